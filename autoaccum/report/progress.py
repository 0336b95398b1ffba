"""A progress bar on stderr while a search runs."""

from __future__ import annotations

from math import log2
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoaccum.records import Candidate, Fit, Levers, Trial
from autoaccum.report.tables import levers_in_words, outcome_in_words


@final
class ProgressBar:
    """Follows a search: how far the largest fitting size has come towards the bound, and what is being tried.

    The bar is logarithmic in the size, since the search doubles; it jumps to the end when the limit is found.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("looking", total=1.0)
        self._tried = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def bounded(self, top: int) -> None:
        """No size above this one will be tried."""
        self._progress.update(self._task, total=log2(top + 1))

    def started(self, candidate: Candidate, purpose: str) -> None:
        """A trial begins."""
        what = "trying" if purpose == "probe" else "running the whole step at"
        levers = "" if candidate.levers == Levers() else f", {levers_in_words(candidate.levers)}"
        self._progress.update(self._task, description=f"{what} micro-batch {candidate.micro_batch}{levers}")

    def finished(self, trial: Trial) -> None:
        """A trial is over."""
        self._tried += 1
        size = trial.candidate.micro_batch
        done = log2(size + 1) if isinstance(trial.outcome, Fit) else None
        self._progress.update(
            self._task, completed=done, description=f"micro-batch {size}: {outcome_in_words(trial)} ({self._tried} tried)"
        )
