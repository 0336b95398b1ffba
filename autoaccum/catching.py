"""The one place where running out of memory is caught.

It records text, leaves the `except` block, and only then lets go of what the frames hold: inside the block the traceback
keeps the activations alive, so freeing there frees nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

from autoaccum.devices import ERROR_ROWS
from autoaccum.devices.base import ErrorRow, Verdict, chain_of, recognise

T = TypeVar("T")

_MESSAGE_CHARS = 2000  # of an error, kept in the log; some messages carry a C++ stack


class Failure(NamedTuple):
    """An error that says something about the size that was tried.

    Attributes:
        error: The exception itself; the local variables of its frames are gone.
    """

    row: ErrorRow
    message: str
    error: Exception


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
        failure = Failure(row, _shortened(error), error)
    _let_go_of_frames(failure.error, handled)
    return failure


def _shortened(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."


def _let_go_of_frames(error: Exception, handled: Sequence[BaseException]) -> None:
    """Keep the traceback, but let go of the local variables of every frame in it."""
    for behind in chain_of(error):
        if any(behind is earlier for earlier in handled):
            continue
        found = behind.__traceback__
        if behind is error and found is not None:
            found = found.tb_next  # the first frame is this module's own
        behind.__traceback__ = found
        if found is not None:
            traceback.clear_frames(found)
