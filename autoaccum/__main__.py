"""`python -m autoaccum` is the command line."""

from autoaccum.entry import main

if __name__ == "__main__":
    main()
