"""What is noise: how far a run's own measurements of peaks, times and sizes may be off."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autoaccum.comparing.compare import compare
from autoaccum.comparing.markdown import comparison_markdown, verdict_line
from autoaccum.comparing.records import Figure
from autoaccum.records import (
    Fit,
    OutOfMemory,
    PlanRecord,
    Timing,
)
from autoaccum.timing import timing_of

from .runs import FULL, plan, result, rows_of, timing, trial, verdict_on


def noisy_steps(generator: random.Random, mean_s: float, noise_frac: float, num: int) -> Timing:
    found = timing_of([max(1e-6, generator.gauss(mean_s, noise_frac * mean_s)) for _ in range(num)])
    assert found is not None
    return found


@pytest.mark.parametrize("num", [2, 3, 5, 6, 10, 30])
@pytest.mark.parametrize("noise_frac", [0.01, 0.05, 0.15])
def test_noise_alone_never_fails(num: int, noise_frac: float) -> None:
    """Two runs of one distribution do not fail, in 200 draws, however many steps were timed."""
    generator = random.Random(0)
    for _ in range(200):
        base, new = (plan(step_s=noisy_steps(generator, 1.0, noise_frac, num)) for _ in range(2))
        assert compare(base, new, 0.05).passed


@pytest.mark.parametrize("num", [9, 12, 30])
def test_slowdown_beyond_the_noise_always_fails(num: int) -> None:
    """Steps that take 20 % longer fail with 2 % of noise, in 200 draws."""
    generator = random.Random(0)
    for _ in range(200):
        base, new = (plan(step_s=noisy_steps(generator, mean_s, 0.02, num)) for mean_s in (1.0, 1.2))
        assert verdict_on(base, new, "plan", "samples_per_s") == "regressed"


def test_wide_interval_is_too_noisy_even_where_nothing_changed() -> None:
    """Where a loss of more than allowed could hide in the noise, the row does not say ok."""
    noisy = plan(step_s=timing(1.0, 0.2))
    found = compare(noisy, noisy, 0.05)
    assert found.passed and verdict_on(noisy, noisy, "plan", "samples_per_s") == "too noisy to tell"
    assert verdict_line(found).endswith("and 1 cannot be told.")


@pytest.mark.parametrize(
    ("num", "expected"), [(1, "too noisy to tell"), (2, "too noisy to tell"), (3, "too noisy to tell"), (4, "regressed")]
)
def test_few_steps_are_judged_by_their_quartiles(num: int, expected: str) -> None:
    """With fewer than six steps the quartiles are widened, the more the fewer there are; two say nothing."""
    base, new = (plan(step_s=timing(step_s, None, num)) for step_s in (1.0, 1.3))
    assert verdict_on(base, new, "plan", "samples_per_s") == expected


def test_single_step_is_said_to_be_too_few() -> None:
    """A row without any spread says why nothing can be told."""
    once = plan(step_s=None, step_time_s=1.0)
    row = rows_of(once, once)["plan", "samples_per_s"]
    assert (row.verdict, row.note) == ("too noisy to tell", "too few optimizer steps were timed")


def test_spread_of_repeated_trials_is_the_noise_of_a_peak() -> None:
    """Where trials of the setting's own kind differ, a peak regresses only beyond that."""
    confirms = (trial(32, 1000, "confirm"), trial(32, 1080, "confirm"))
    base, new = plan(trials=confirms), plan(peak=1090)
    assert verdict_on(base, new, "plan", "peak_bytes") == "too noisy to tell"
    assert verdict_on(base, plan(peak=1200), "plan", "peak_bytes") == "regressed"


def test_trials_of_another_kind_are_no_noise() -> None:
    """The spread is that of trials of the same purpose: a probe's peak says nothing about the plan's own step."""
    base = plan(trials=(trial(32, 1300), trial(32, 1000, "confirm")))
    assert verdict_on(base, plan(peak=1090), "plan", "peak_bytes") == "regressed"


def test_gap_below_the_failure_is_not_held_against_the_new_run() -> None:
    """Where sizes below the one that failed were not tried, they may fit, and the row says so."""
    gap = result(32, trials=(trial(32, 1000), trial(40, FULL)))
    row = rows_of(result(), gap)["probe result", "max_micro_batch"]
    assert row.verdict == "too coarse to tell" and "sizes up to 39 were not tried" in row.note


def test_sizes_that_a_plan_skips_may_fit() -> None:
    """A plan that went from one micro-batch to two, without a trial in between, may fit all sizes in between."""
    row = rows_of(plan(64, limited_by="target"), plan(32))["plan", "max_micro_batch"]
    assert row.verdict == "too coarse to tell" and "sizes up to 63 were not tried" in row.note


@pytest.mark.parametrize(
    ("changes", "upper"),
    [
        ({"equal_micro_batches": True, "multiple_of": 8}, 23),
        ({"multiple_of": 16}, 31),
        ({}, 21),
        ({"limited_by": "caller"}, None),
    ],
)
def test_next_size_of_the_plans_search_ends_what_may_fit(changes: dict[str, Any], upper: int | None) -> None:
    """Without a failed trial, the next size that the search would have tried is the first that does not fit."""
    row = rows_of(plan(64, limited_by="target"), plan(16, **changes))["plan", "max_micro_batch"]
    assert row.new is not None and row.new.high == upper


def test_limit_other_than_memory_is_no_regression_of_memory() -> None:
    """A largest micro-batch that fell because the caller allowed no more is not held against memory."""
    row = rows_of(result(), result(20, limited_by="caller", trials=()))["probe result", "max_micro_batch"]
    assert row.verdict == "too coarse to tell" and row.note.startswith("memory is not what limits")


def test_plan_without_a_timing_is_timed_by_its_trials() -> None:
    """Without a recorded timing, the times of the plan's own optimizer steps count, and no probe's."""

    def timed(step_s: float) -> PlanRecord:
        fits = Fit(peak_bytes=1000, step_times_s=(step_s,) * 6)
        strange = trial(32, Fit(peak_bytes=1000, step_times_s=(99.0,)))
        return plan(step_s=None, trials=(strange, trial(32, fits, "confirm")))

    row = rows_of(timed(1.0), timed(1.2))["plan", "samples_per_s"]
    assert row.base == Figure(value=64.0, low=64.0, high=64.0) and row.verdict == "regressed"


def test_plan_that_was_timed_in_one_run_only() -> None:
    """A measurement that one run lacks is listed, and does not fail."""
    assert verdict_on(plan(), plan(step_s=None), "plan", "samples_per_s") == "only in base"
    assert verdict_on(plan(step_s=None), plan(), "plan", "samples_per_s") == "only in new"


def test_trial_that_no_longer_fits_is_at_least_its_budget() -> None:
    """A size that ran far below the budget and now runs out of memory has regressed: its peak is above the budget."""
    base, new = plan(trials=(trial(64, 1500),)), plan(trials=(trial(64, FULL),))
    found = compare(base, new, 0.05)
    (row,) = (row for row in found.rows if row.part == "probe trial")
    assert (row.verdict, row.note, row.new) == ("regressed", "did not fit in new", Figure(value=2000, low=2000, high=None))
    assert "at least +33.3 %" in comparison_markdown(found)


def test_trial_that_failed_by_little_cannot_be_told() -> None:
    """A size that ran close below the budget and now runs out of memory may have grown by less than allowed."""
    base, new = plan(trials=(trial(64, 1990),)), plan(trials=(trial(64, FULL),))
    assert verdict_on(base, new, "probe trial", "peak_bytes") == "too coarse to tell"
    assert verdict_on(new, plan(trials=(trial(64, 1500),)), "probe trial", "peak_bytes") == "improved"


def test_trial_above_the_budget_has_its_peak() -> None:
    """A trial that ran and was above the budget is compared by what it took."""
    above = OutOfMemory(cause="budget", peak_bytes=2100)
    base, new = plan(trials=(trial(64, 1990),)), plan(trials=(trial(64, above),))
    assert verdict_on(base, new, "probe trial", "peak_bytes") == "regressed"


@pytest.mark.parametrize("cause", ["process", "unclear", "retries"])
def test_other_ends_of_a_trial_say_nothing_about_its_peak(cause: Any) -> None:
    """A worker that died, or an error that may not be memory, is no measurement."""
    new = plan(trials=(trial(64, OutOfMemory(cause=cause)),))
    assert {row.part for row in compare(plan(trials=(trial(64, 100),)), new, 0.05).rows} == {"plan"}


def test_trials_that_failed_in_both_runs_have_no_row() -> None:
    """A size that fits in neither run has nothing to compare."""
    both = plan(trials=(trial(64, FULL),))
    assert {row.part for row in compare(both, both, 0.05).rows} == {"plan"}
