"""The progress bar: says what is being tried, moves towards the bound, and goes away."""

from __future__ import annotations

import io
from math import log2

import pytest
from rich.console import Console

from autoaccum.records import Candidate, Trial
from autoaccum.report.progress import ProgressBar


def bar_on(terminal: bool) -> tuple[ProgressBar, io.StringIO]:
    page = io.StringIO()
    return ProgressBar(Console(file=page, width=120, force_terminal=terminal)), page


def test_what_is_tried_is_shown() -> None:
    """On a terminal, the size that is being tried is shown, and the plan's own step is told apart."""
    bar, page = bar_on(terminal=True)
    with bar:
        bar.bounded(64)
        bar.started(Candidate(micro_batch=16), "probe")
        bar._progress.refresh()
        bar.started(Candidate(micro_batch=12), "confirm")
        bar._progress.refresh()
    assert "trying micro-batch 16" in page.getvalue()
    assert "running the whole step at micro-batch 12" in page.getvalue()


def test_outcomes_are_shown_and_counted(trials: tuple[Trial, ...]) -> None:
    """Each trial's outcome is shown in words, with how many have been tried."""
    bar, page = bar_on(terminal=True)
    with bar:
        for trial in trials[2:4]:
            bar.finished(trial)
            bar._progress.refresh()
    assert "micro-batch 4: fits (1 tried)" in page.getvalue()
    assert "micro-batch 64: out of memory in backward (2 tried)" in page.getvalue()


def test_bar_is_logarithmic(trials: tuple[Trial, ...]) -> None:
    """The bar stands at the logarithm of the largest size that fitted, of the logarithm of the bound."""
    bar, _ = bar_on(terminal=True)
    with bar:
        bar.bounded(63)
        bar.finished(trials[2])
        (task,) = bar._progress.tasks
        assert (task.completed, task.total) == (log2(5), 6.0)


def test_failures_do_not_move_the_bar(trials: tuple[Trial, ...]) -> None:
    """A size that did not fit leaves the bar where it was."""
    bar, _ = bar_on(terminal=True)
    with bar:
        bar.bounded(64)
        bar.finished(trials[2])
        bar.finished(trials[3])
        assert bar._progress.tasks[0].completed == log2(5)


def test_bar_leaves_no_trace() -> None:
    """When the search is over, the line is cleared and the cursor is shown again."""
    bar, page = bar_on(terminal=True)
    with bar:
        bar.started(Candidate(micro_batch=1), "probe")
    assert page.getvalue().rstrip().endswith("\x1b[2K") and "\x1b[?25h" in page.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_bar_is_taken_away_on_an_error(error: type[BaseException]) -> None:
    """An error or an interruption passes through, and the cursor is shown again."""
    bar, page = bar_on(terminal=True)
    with pytest.raises(error), bar:
        raise error
    assert "\x1b[?25h" in page.getvalue()


def test_no_codes_where_there_is_no_terminal(trials: tuple[Trial, ...]) -> None:
    """A bar that is forced on a file writes no escape codes into it."""
    bar, page = bar_on(terminal=False)
    with bar:
        bar.bounded(64)
        for trial in trials:
            bar.started(trial.candidate, trial.purpose)
            bar.finished(trial)
    assert "\x1b" not in page.getvalue()


def test_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a console of its own, the bar leaves standard output alone."""
    with ProgressBar() as bar:
        bar.started(Candidate(micro_batch=1), "probe")
    assert capsys.readouterr().out == ""
