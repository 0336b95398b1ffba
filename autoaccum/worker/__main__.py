"""`python -m autoaccum.worker` is the worker process. Ctrl-C ends it at once and without a word, while it imports torch too.

Nothing is lost by that: what it would put back is its own memory, and the parent says that the search was interrupted.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from autoaccum.worker.child import main

    try:
        sys.exit(main())
    except KeyboardInterrupt:  # raised by the target itself
        sys.exit(130)
