"""Who follows a search: a progress bar, a parent process, or nobody. Imports no torch, and rich only for a bar."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, final

from autoaccum.records import Candidate, Trial


class Follower(Protocol):
    """Is told how a search goes on."""

    def bounded(self, top: int) -> None:
        """No size above this one will be tried."""

    def started(self, candidate: Candidate, purpose: str) -> None:
        """A trial begins."""

    def finished(self, trial: Trial) -> None:
        """A trial is over."""


@final
class Nobody:
    """Follows a search without a word."""

    def bounded(self, top: int) -> None:
        """Nothing to show."""

    def started(self, candidate: Candidate, purpose: str) -> None:
        """Nothing to show."""

    def finished(self, trial: Trial) -> None:
        """Nothing to show."""


@contextmanager
def following(progress: bool | None) -> Iterator[Follower]:
    """A bar on stderr while inside, where one is wanted; None: where stderr is a terminal.

    Example:
        >>> with following(False) as follower:
        ...     follower.bounded(8)
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield Nobody()
        return
    drawn = random.getstate()
    from autoaccum.report.progress import ProgressBar

    random.setstate(drawn)  # rich draws random numbers while it is imported

    with ProgressBar() as bar:
        yield bar
