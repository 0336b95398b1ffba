"""What Ctrl-C and SIGTERM do to the command line. Standard library only: it is there before anything large is imported."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Terminated(BaseException):
    """SIGTERM has come. No `Exception` and no `SystemExit`, which a target may raise or catch."""


def terminating(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGTERM: everything on the way out is put back and cleaned up, as after Ctrl-C."""
    raise Terminated


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While libraries are imported, a signal ends the process with its word and code: nothing is there to put back yet.

    An exception would not do: Python swallows one that comes in a callback of its import system, and torch aborts at one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = {number: signal.signal(number, _end_at_once) for number in WORDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    sys.stderr.write(WORDS[signal.Signals(number)] + "\n")
    sys.stderr.flush()
    os._exit(128 + number)
