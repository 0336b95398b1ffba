"""Where the command line begins: Ctrl-C and SIGTERM have their meaning before anything large is imported.

Exit codes: 130 after Ctrl-C, 143 after SIGTERM; all others are `cli`'s.
"""

import signal
import sys

from autoaccum.signals import WORDS, Terminated, ending_at_once, terminating


def main() -> None:
    """Run the command line and exit with its code."""
    with ending_at_once():
        from autoaccum.cli import main as run
    signal.signal(signal.SIGTERM, terminating)
    try:
        run()
    except Terminated:
        print(WORDS[signal.SIGTERM], file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # all is done: while Python ends, a signal would take the exit code
            signal.signal(number, signal.SIG_IGN)
        eval("None")  # after an interrupt inside of another `eval` Python would end itself by the signal, not by the code
