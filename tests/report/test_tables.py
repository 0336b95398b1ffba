"""Trials as rows: every outcome has its words, and what is not known is not a number."""

from __future__ import annotations

from typing import get_args

import pytest

from autoaccum.records import Candidate, Fit, Levers, Outlook, OutOfMemory, Phase, PlanRecord, Refused, Trial
from autoaccum.report.tables import (
    TRIAL_HEADER,
    Cells,
    levers_in_words,
    outcome_in_words,
    outlook_cells,
    rate_in_words,
    samples_per_s,
    timing_in_words,
    trial_cells,
    trial_rows,
    without_empty,
)
from autoaccum.timing import timing_of

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

NO_LEVERS = {
    "checkpointing": "off",
    "checkpointed_blocks": 0,
    "precision": "fp32",
    "optimizer_impl": "default",
    "offload": "off",
}


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
    """A fit's row has its peak, the median and quartiles of its step times and the samples of one step over that."""
    assert trial_rows(trials)[2] == {
        "micro_batch": 4,
        **NO_LEVERS,
        "purpose": "probe",
        "outcome": "fits",
        "fits": True,
        "peak_bytes": 20 * 2**20,
        "offloaded_bytes": None,
        "step_s": 0.75,
        "first_quartile_step_s": 0.5,
        "third_quartile_step_s": 0.875,
        "num_timed_steps": 3,
        "samples_per_s": 8 / 0.75,
        "phase": None,
        "message": None,
        "wall_s": 2.0,
    }


def test_row_of_a_failure(trials: tuple[Trial, ...]) -> None:
    """A failure's row has its phase and the whole message, and no peak or rate that was not measured."""
    assert trial_rows(trials)[3] == {
        "micro_batch": 64,
        **NO_LEVERS,
        "purpose": "probe",
        "outcome": "out of memory in backward",
        "fits": False,
        "peak_bytes": None,
        "offloaded_bytes": None,
        "step_s": None,
        "first_quartile_step_s": None,
        "third_quartile_step_s": None,
        "num_timed_steps": 0,
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


def test_row_has_the_levers(plan: PlanRecord) -> None:
    """Each lever has a column, with the position that the trial was run at."""
    row = trial_rows(plan.trials)[2]
    assert {name: row[name] for name in NO_LEVERS} == NO_LEVERS | {
        "checkpointing": "full",
        "checkpointed_blocks": 6,
        "precision": "bf16",
    }


def test_columns_of_levers_are_the_record() -> None:
    """Every lever of the record has its column, but for the names of the caller's own blocks."""
    assert set(NO_LEVERS) | {"block_names"} == set(Levers.__struct_fields__)


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        (Levers(), "none"),
        (Levers(block_names=("a", "b")), "none"),
        (Levers(checkpointing="selective", checkpointed_blocks=1), "selective checkpointing of 1 block"),
        (Levers(checkpointing="full"), "full checkpointing"),
        (
            Levers(precision="tf32", optimizer_impl="for-loop", offload="cpu"),
            "tf32, for-loop optimizer, offload to the host",
        ),
    ],
)
def test_levers_in_words(levers: Levers, words: str) -> None:
    """Only levers that are turned are named, each with its level."""
    assert levers_in_words(levers) == words


@pytest.mark.parametrize(
    ("times_s", "words"),
    [
        ((0.5,) * 12, "500 ms (500 to 500 ms, n=12)"),
        ((0.8, 0.9, 1.0, 1.0, 1.1, 1.2), "1 s (925 ms to 1.08 s, n=6; noisy: \u00b120 %)"),
        ((0.4, 0.5), "450 ms (425 to 475 ms, n=2; too few to know the noise)"),
        ((0.4,), "400 ms (n=1; too few to know the noise)"),
    ],
)
def test_timing_in_words(times_s: tuple[float, ...], words: str) -> None:
    """A time is said with its quartiles and number of steps, and that it is noisy where it is, or may be."""
    timing = timing_of(times_s)
    assert timing is not None and timing_in_words(timing) == words


@pytest.mark.parametrize(("rate", "words"), [(None, "-"), (0.01234567, "0.01235"), (44.0, "44"), (123456.7, "123457")])
def test_rate_in_words(rate: float | None, words: str) -> None:
    """A rate has four digits, and a large one is whole instead of in powers of ten."""
    assert rate_in_words(rate) == words


def test_cells_fit_under_the_header(plan: PlanRecord) -> None:
    """Every row of text has a cell for each column."""
    header, rows = trial_cells(plan.trials)
    assert header == TRIAL_HEADER and {len(row) for row in rows} == {len(header)}


def test_no_column_of_levers_without_any(trials: tuple[Trial, ...]) -> None:
    """Where no trial turns a lever, there is no column of them."""
    assert trial_cells(trials).header == tuple(name for name in TRIAL_HEADER if name != "levers")


def test_cells_are_read_by_people(trials: tuple[Trial, ...]) -> None:
    """Cells have units, say how many micro-batches a plan's own step has, and show a dash for what is not known."""
    rows = trial_cells(trials).rows
    assert rows[2] == ("4", "fits", "20.00 MiB", "750 ms", "10.67", "2 s")
    assert rows[9] == ("4 x 3", "fits", "22.00 MiB", "500 ms", "22", "2 s")
    assert rows[3] == ("64", "out of memory in backward", "-", "-", "-", "2 s")
    assert rows[10] == ("3", "fits", "15.00 MiB", "-", "-", "2 s")


def test_cells_of_levers(plan: PlanRecord) -> None:
    """Where one trial turns a lever, each says which it turns."""
    assert [row[1] for row in trial_cells(plan.trials).rows] == ["none"] + ["full checkpointing of 6 blocks, bf16"] * 10


def test_offloaded_bytes_are_said() -> None:
    """What lay in host memory stands beside the peak and in its own column."""
    fit = Fit(peak_bytes=2**20, offloaded_bytes=2**30)
    trial = Trial(candidate=Candidate(micro_batch=1), outcome=fit, wall_s=1.0, rows_per_step=2)
    assert trial_cells([trial]).rows[0][2] == "1.00 MiB + 1.00 GiB on the host"
    assert trial_rows([trial])[0]["offloaded_bytes"] == 2**30


def test_outlooks_say_what_fits() -> None:
    """A GPU on which the step fits has its sizes, and one on which it does not says so."""
    fits = Outlook(gpu="A", total_bytes=2**33, fits=True, peak_bytes=2**32, micro_batch=4, accumulation_steps=3)
    small = Outlook(gpu="B", total_bytes=2**31, fits=False, peak_bytes=2**32)
    assert outlook_cells([fits, small]).rows == (
        ("A", "4 x 3", "4.00 GiB", "8.00 GiB", "none"),
        ("B", "does not fit", "4.00 GiB", "2.00 GiB", "none"),
    )


def test_empty_columns_are_left_out() -> None:
    """A column without a word in any row is left out, and a table without rows keeps its header."""
    assert without_empty(("a", "b"), [("", "1"), ("", "")]) == Cells(("b",), (("1",), ("",)))
    assert without_empty(("a", "b"), []) == Cells(("a", "b"), ())
