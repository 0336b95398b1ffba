"""What fails a build, what is an improvement, and what a budget explains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.comparing.compare import compare
from autoaccum.comparing.markdown import comparison_markdown, verdict_line

from .runs import FULL, plan, result, rows_of, timing, trial, verdict_on


@pytest.mark.parametrize(
    ("peak", "expected"), [(1000, "ok"), (1050, "ok"), (1051, "regressed"), (950, "ok"), (949, "improved"), (1, "improved")]
)
def test_peak_that_grew_more_than_allowed(peak: int, expected: str) -> None:
    """A measured peak regresses above what is allowed, not at it, and improves by as much downwards."""
    assert verdict_on(plan(), plan(peak=peak), "plan", "peak_bytes") == expected


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(1.0, "ok"), (1.02, "ok"), (1.06, "too noisy to tell"), (1.2, "regressed"), (0.8, "improved"), (0.95, "ok")],
)
def test_rate_that_fell_more_than_allowed(step_s: float, expected: str) -> None:
    """Samples per second regress where they fell by more than is allowed at the kind ends of both intervals of 1 %."""
    assert verdict_on(plan(), plan(step_s=step_s), "plan", "samples_per_s") == expected


def test_nothing_allowed_lets_equal_runs_pass() -> None:
    """With 0 %, a run compared with itself passes, and a byte more fails."""
    same = plan(step_s=timing(1.0, 0.0))
    assert compare(same, same, 0.0).passed
    assert not compare(same, plan(peak=1001, step_s=timing(1.0, 0.0)), 0.0).passed


@given(st.integers(1, 2**50), st.integers(1, 2**50), st.floats(0, 0.99))
def test_only_one_direction_regresses(one: int, other: int, allowed: float) -> None:
    """Of a comparison and its reverse at most one regresses, and a regression in one is no "ok" in the other's favour."""
    there = verdict_on(plan(peak=one), plan(peak=other), "plan", "peak_bytes", allowed)
    back = verdict_on(plan(peak=other), plan(peak=one), "plan", "peak_bytes", allowed)
    assert not (there == back == "regressed")
    if there == "regressed":
        assert other > one and back in ("improved", "ok")


def test_regression_fails_and_is_counted() -> None:
    """A row that regressed fails the comparison, whose last line says how many did."""
    found = compare(plan(), plan(peak=1500), 0.05)
    assert not found.passed
    assert verdict_line(found) == "**Failed**: 1 of 3 measurements regressed by more than 5 %."


def test_improvement_passes_and_is_listed() -> None:
    """A row that improved passes and is called so."""
    found = compare(plan(), plan(peak=500), 0.05)
    assert found.passed and "-50.0 % | **improved** |" in comparison_markdown(found)


@pytest.mark.parametrize(("size", "expected"), [(40, "ok"), (38, "ok"), (37, "regressed"), (42, "ok"), (43, "improved")])
def test_largest_micro_batch_that_fell(size: int, expected: str) -> None:
    """A largest micro-batch that is known exactly regresses where it fell by more than allowed."""
    assert verdict_on(result(), result(size), "probe result", "max_micro_batch") == expected


def test_peak_at_another_largest_size_is_not_judged() -> None:
    """The peak of a probe's result is that of its largest size, so it is not judged where those differ."""
    row = rows_of(result(), result(37))["probe result", "peak_bytes"]
    assert (row.verdict, row.note) == ("not compared", "it is that of another size")


def test_smaller_budget_explains_a_smaller_size() -> None:
    """A largest micro-batch that fell with the budget is not judged; one that fell with a larger budget is."""
    tried = (trial(20, 500), trial(21, FULL))
    row = rows_of(result(trials=tried), result(20, budget_bytes=1000, trials=tried))["probe result", "max_micro_batch"]
    assert (row.verdict, row.note) == ("not compared", "the new budget is smaller")
    assert verdict_on(result(), result(20, budget_bytes=4000), "probe result", "max_micro_batch") == "regressed"


def test_larger_budget_explains_a_larger_size() -> None:
    """A largest micro-batch that grew with the budget is no improvement."""
    tried = (trial(20, 500),)
    row = rows_of(result(trials=tried), result(80, budget_bytes=4000, trials=tried))["probe result", "max_micro_batch"]
    assert (row.verdict, row.note) == ("not compared", "the new budget is larger")


def test_budget_does_not_excuse_the_peak_of_an_equal_setting() -> None:
    """The peak of the same setting is judged whatever the budget, and the report says that budgets differ."""
    found = compare(plan(), plan(peak=1500, budget_bytes=1900), 0.05)
    assert not found.passed and any("The budgets differ" in note for note in found.notes)
