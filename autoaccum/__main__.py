"""`python -m autoaccum` is the command line."""

from autoaccum.cli import main

if __name__ == "__main__":
    main()
