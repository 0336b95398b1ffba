"""Trials as rows: every outcome has its words, and what is not known is not a number."""

from __future__ import annotations

from typing import get_args

import pytest

from autoaccum.records import Candidate, Fit, OutOfMemory, Phase, Refused, Trial
from autoaccum.report.tables import TABLE_HEADER, outcome_in_words, samples_per_s, table_rows, trial_rows

WORDS = [
    "too small to run",
    "fits",
    "fits",
    "out of memory in backward",
    "peak above the budget",
    "fits only by flushing the cache",
    "worker process died",
    "failed in optimizer, probably out of memory",
    "beyond a limit other than memory",
    "fits",
    "fits",
]


def test_every_outcome_has_its_words(trials: tuple[Trial, ...]) -> None:
    """Each kind of outcome and each cause is told apart in words."""
    assert [outcome_in_words(trial) for trial in trials] == WORDS


def test_every_cause_is_tried_here(trials: tuple[Trial, ...]) -> None:
    """The trials above have every cause, bound and kind that a record can hold."""
    outcomes = [trial.outcome for trial in trials]
    causes = {outcome.cause for outcome in outcomes if isinstance(outcome, OutOfMemory)}
    assert causes == {"allocator", "budget", "retries", "process", "unclear"}
    assert {outcome.bound for outcome in outcomes if isinstance(outcome, Refused)} == {"ceiling", "floor"}
    assert {type(outcome) for outcome in outcomes} == {Fit, OutOfMemory, Refused}


@pytest.mark.parametrize("phase", get_args(Phase))
def test_the_phase_is_named(phase: Phase) -> None:
    """Running out of memory is said with the phase in which it happened."""
    trial = Trial(
        candidate=Candidate(micro_batch=1),
        outcome=OutOfMemory(cause="allocator", phase=phase),
        wall_s=1.0,
        rows_per_step=1,
    )
    assert outcome_in_words(trial) == f"out of memory in {phase}"


def test_rows_are_in_the_order_run(trials: tuple[Trial, ...]) -> None:
    """There is one row for each trial, in the order in which they were run."""
    rows = trial_rows(trials)
    assert [row["micro_batch"] for row in rows] == [1, 2, 4, 64, 32, 16, 15, 14, 13, 4, 3]
    assert [row["outcome"] for row in rows] == WORDS
    assert [row["purpose"] for row in rows] == ["probe"] * 9 + ["confirm", "probe"]


def test_row_of_a_fit(trials: tuple[Trial, ...]) -> None:
    """A fit's row has its peak, the median of its step times and the samples of one step over that."""
    assert trial_rows(trials)[2] == {
        "micro_batch": 4,
        "purpose": "probe",
        "outcome": "fits",
        "fits": True,
        "peak_bytes": 20 * 2**20,
        "step_s": 0.75,
        "samples_per_s": 8 / 0.75,
        "phase": None,
        "message": None,
        "wall_s": 2.0,
    }


def test_row_of_a_failure(trials: tuple[Trial, ...]) -> None:
    """A failure's row has its phase and the whole message, and no peak or rate that was not measured."""
    assert trial_rows(trials)[3] == {
        "micro_batch": 64,
        "purpose": "probe",
        "outcome": "out of memory in backward",
        "fits": False,
        "peak_bytes": None,
        "step_s": None,
        "samples_per_s": None,
        "phase": "backward",
        "message": "CUDA out of memory.\nTried to allocate",
        "wall_s": 2.0,
    }


def test_peak_above_the_budget_is_kept(trials: tuple[Trial, ...]) -> None:
    """A size that ran above the budget has its peak in the row, but does not count as fitting."""
    row = trial_rows(trials)[4]
    assert (row["peak_bytes"], row["fits"]) == (200 * 2**20, False)


def test_rate_counts_the_rows_of_the_step(trials: tuple[Trial, ...]) -> None:
    """The plan's own step has its rate from all its rows, and a fit that was not timed has none."""
    assert samples_per_s(trials[9]) == 11 / 0.5
    assert samples_per_s(trials[10]) is None


def test_no_time_is_no_rate() -> None:
    """A step of zero seconds, as a coarse clock gives it, has no rate instead of an infinite one."""
    fit = Fit(peak_bytes=1, step_times_s=(0.0,))
    assert samples_per_s(Trial(candidate=Candidate(micro_batch=1), outcome=fit, wall_s=0.0, rows_per_step=1)) is None


def test_cells_fit_under_the_header(trials: tuple[Trial, ...]) -> None:
    """Every row of text has a cell for each column."""
    assert {len(row) for row in table_rows(trials)} == {len(TABLE_HEADER)}


def test_cells_are_read_by_people(trials: tuple[Trial, ...]) -> None:
    """Cells have units, mark the plan's own step, and show a dash for what is not known."""
    rows = table_rows(trials)
    assert rows[2] == ("4", "fits", "20.00 MiB", "750 ms", "10.67", "2 s")
    assert rows[9] == ("4 (the plan's step)", "fits", "22.00 MiB", "500 ms", "22", "2 s")
    assert rows[3] == ("64", "out of memory in backward", "-", "-", "-", "2 s")
    assert rows[10] == ("3", "fits", "15.00 MiB", "-", "-", "2 s")
