"""The line through two measured peaks, and the sizes that lead to it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.records import Candidate, Fit, Trial
from autoaccum.search.line import Line, line_through, next_to_measure

BUDGET = 10_000_000


def following(trials: Sequence[Trial], ladder: Sequence[int], budget_bytes: int = BUDGET, held_bytes: int = 0) -> int | None:
    return next_to_measure(trials, ladder, budget_bytes=budget_bytes, held_bytes=held_bytes)


def ran(size: int, peak: int) -> Trial:
    return Trial(candidate=Candidate(micro_batch=size), outcome=Fit(peak_bytes=peak), wall_s=0.1, rows_per_step=2 * size)


def test_line_goes_through_both_peaks() -> None:
    """Sizes between and beyond are on the straight line through what was measured."""
    line = line_through([ran(1, 1_000_000), ran(4, 2_500_000)], BUDGET)
    assert line is not None
    assert [line.peak_bytes(size) for size in (1, 4, 8)] == [1_000_000, 2_500_000, 4_500_000]
    assert line.crossing(BUDGET) == 19.0


def test_one_peak_is_no_line() -> None:
    """Nor are none."""
    assert line_through([], BUDGET) is None
    assert line_through([ran(1, 1_000_000)], BUDGET) is None


def test_little_growth_is_no_line() -> None:
    """Where the batch adds next to nothing yet, pages and noise would be prolonged to the budget."""
    assert line_through([ran(1, 1_000_000), ran(4, 1_010_000)], BUDGET) is None


def test_falling_peaks_are_no_line() -> None:
    """A peak that falls with the size says nothing of larger ones."""
    assert line_through([ran(1, 2_000_000), ran(4, 1_900_000)], BUDGET) is None


def test_sizes_grow_fourfold() -> None:
    """From the smallest size on, each next one is four times the last, or the nearest below that there is."""
    ladder = range(3, 100, 3)
    assert following([], ladder) == 3
    assert following([ran(3, 1_000_000)], ladder) == 12
    assert following([ran(3, 1_000_000), ran(12, 1_000_100)], ladder) == 48


def test_sizes_grow_twofold_near_the_budget() -> None:
    """After one size, four times all that it took has to fit, of which growth is a part; else the next is twice the size."""
    assert following([ran(1, 4_000_000)], range(1, 100), held_bytes=2_000_000) == 4
    assert following([ran(1, 5_000_000)], range(1, 100), held_bytes=2_000_000) == 2
    assert following([ran(1, 5_000_000)], [1, 3, 9], held_bytes=2_000_000) is None


def test_end_of_the_ladder() -> None:
    """With all sizes measured there is none left."""
    assert following([ran(8, 1_000_000)], [1, 2, 8]) is None


def test_nothing_is_tried_that_may_be_far_past_the_budget() -> None:
    """A size is passed over when three times its predicted growth would not fit."""
    trials = [ran(1, 1_000_000), ran(4, 2_000_000)]  # 16 rows should take 6 MB, and 14 MB if growth is three times as much
    assert following(trials, range(1, 100)) is None
    assert following(trials, range(1, 100), 2 * BUDGET) == 16


@given(st.integers(0, 2**30), st.integers(1, 2**20), st.integers(1, 64), st.integers(1, 64))
def test_peaks_on_a_line_are_found_again(base: int, per_row: int, small: int, more: int) -> None:
    """Where peaks do lie on a line, it crosses the budget where they do."""
    sizes = small, small + more
    peaks = [base + per_row * size for size in sizes]
    budget = peaks[1] + per_row * more
    line = line_through([ran(*pair) for pair in zip(sizes, peaks, strict=True)], budget)
    assert isinstance(line, Line)
    assert abs(line.crossing(budget) - (sizes[1] + more)) < 1e-6 * budget + 1e-3
