"""Where the command line begins: Ctrl-C and SIGTERM have their meaning before anything large is imported.

Exit codes: 130 after Ctrl-C, 143 after SIGTERM; all others are `cli`'s.
"""

import signal
import sys
from types import FrameType


class Terminated(BaseException):
    """SIGTERM has come. No `Exception` and no `SystemExit`, which a target may raise or catch."""


def main() -> None:
    """Run the command line and exit with its code."""
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, _terminate)
    try:
        from autoaccum.cli import main as run

        run()
    except KeyboardInterrupt:
        _end("interrupted", signal.SIGINT)
    except Terminated:
        _end("terminated", signal.SIGTERM)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _end(word: str, number: int) -> None:
    print(word, file=sys.stderr)
    sys.exit(128 + number)
