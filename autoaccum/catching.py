"""The one place where running out of memory is caught.

It records text, leaves the `except` block, and only then lets go of what the frames hold: inside the block the traceback
keeps the activations alive, so freeing there frees nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

from autoaccum.devices import ERROR_ROWS
from autoaccum.devices.base import ErrorRow, Verdict, chain_of, recognise

T = TypeVar("T")

_MESSAGE_CHARS = 2000  # of an error, kept in the log; some messages carry a C++ stack


class Failure(NamedTuple):
    """An error that says something about the size that was tried.

    Attributes:
        error: The exception itself; the local variables of its frames are gone.
        behind: With all that came before it inside the attempt.
    """

    row: ErrorRow
    message: str
    error: Exception
    behind: tuple[BaseException, ...]

    def forget(self) -> None:
        """The error is not going to be raised, so nobody needs to know where it was.

        Its frames still hold their functions, and these what they have closed over. That cannot be emptied: another function
        may share it.
        """
        for error in self.behind:
            error.__traceback__ = None


def attempted(run: Callable[[], T], verdicts: Collection[Verdict]) -> T | Failure:
    """What `run` returns, or the failure, when its error is one of these verdicts.

    Raises:
        Exception: Whatever else `run` raises, unchanged.
    """
    handled = chain_of(current) if (current := sys.exception()) else []
    try:
        return run()
    except Exception as error:
        row = recognise(error, ERROR_ROWS, handled)
        if row is None or row.verdict not in verdicts:
            raise
        behind = tuple(one for one in chain_of(error) if not any(one is earlier for earlier in handled))
        failure = Failure(row, _shortened(error), error, behind)
    _let_go_of_frames(failure)
    return failure


def _shortened(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."


def _let_go_of_frames(failure: Failure) -> None:
    """Keep the traceback, but let go of the local variables of every frame in it."""
    for error in failure.behind:
        found = error.__traceback__
        if error is failure.error and found is not None:
            found = found.tb_next  # the first frame is this module's own
        error.__traceback__ = found
        if found is not None:
            traceback.clear_frames(found)
