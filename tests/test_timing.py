"""What the times of several steps say: a median, how far it may be off, and which medians are the same."""

from __future__ import annotations

from itertools import permutations
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.records import Timing
from autoaccum.timing import SETTLED_FRAC, are_equal, is_settled, noise_frac, timing_of

times = st.floats(1e-4, 1e3)


def timing(times_s: list[float]) -> Timing:
    found = timing_of(times_s)
    assert found is not None
    return found


def ranks(num: int) -> tuple[int, int]:
    """Which of so many ordered values, counted from 0, are the ends of the interval: seen from values that are ranks."""
    found = timing([1000.0 + index for index in range(num)])
    assert found.interval_frac is not None
    width = found.interval_frac * found.median_s * 2
    outside = round((num - 1 - width) / 2)
    return outside, num - 1 - outside


def test_nothing_measured_is_no_timing() -> None:
    """Without a single step there is nothing to say."""
    assert timing_of([]) is None
    assert not is_settled(None)


def test_single_step_is_its_own_median() -> None:
    """One step is median and quartiles at once, and has no interval."""
    assert timing([0.5]) == Timing(median_s=0.5, first_quartile_s=0.5, third_quartile_s=0.5, num=1, interval_frac=None)


def test_quartiles_lie_between_the_measured_values() -> None:
    """Quartiles are those of the values themselves, so that none is below the fastest or above the slowest step."""
    found = timing([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.first_quartile_s, found.median_s, found.third_quartile_s, found.num) == (2.0, 3.0, 4.0, 5)


@given(st.lists(times, min_size=1, max_size=60))
def test_summary_agrees_with_numpy(seconds: list[float]) -> None:
    """Median and quartiles are numpy's, for any number of steps."""
    found = timing(seconds)
    wanted = np.quantile(seconds, [0.25, 0.5, 0.75])
    assert np.allclose([found.first_quartile_s, found.median_s, found.third_quartile_s], wanted, rtol=1e-9)


def test_order_of_the_steps_does_not_matter() -> None:
    """The same times in another order say the same."""
    assert len({timing(list(order)) for order in permutations([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])}) == 1


@given(st.lists(times, min_size=1, max_size=40), st.sampled_from([0.001, 0.5, 8.0, 1024.0]))
def test_fractions_do_not_depend_on_the_unit(seconds: list[float], factor: float) -> None:
    """Steps that all take longer by the same factor are known as well as before, in proportion."""
    one, other = timing(seconds), timing([factor * value for value in seconds])
    assert noise_frac(other) == pytest.approx(noise_frac(one), rel=1e-6, abs=1e-9)


# -- the interval of the median


@pytest.mark.parametrize("num", range(1, 6))
def test_fewer_than_six_steps_have_no_interval(num: int) -> None:
    """Even from the fastest to the slowest of five steps, the chance of holding the median is below 95 %."""
    assert timing([1.0 + index for index in range(num)]).interval_frac is None
    assert 1 - 2 / 2**num < 0.95


@pytest.mark.parametrize("num", range(6, 41))
def test_interval_holds_the_median_in_95_of_100_cases(num: int) -> None:
    """Whatever the distribution, the true median is inside of the interval in at least 95 % of 2,000 draws."""
    low, high = ranks(num)
    drawn = np.sort(np.random.default_rng(num).random((2000, num)), axis=1)  # ranks are all that counts
    inside = (drawn[:, low] <= 0.5) & (drawn[:, high] >= 0.5)
    assert inside.mean() >= 0.95 - 2 * (0.95 * 0.05 / 2000) ** 0.5  # the draws themselves have an error


@pytest.mark.parametrize("num", range(6, 41))
def test_interval_is_the_narrowest_of_its_kind(num: int) -> None:
    """One value further in at either end, and it would hold the median in fewer than 95 % of 20,000 draws."""
    low, high = ranks(num)
    if low + 1 >= high - 1:
        return
    drawn = np.sort(np.random.default_rng(num).random((20_000, num)), axis=1)
    inside = (drawn[:, low + 1] <= 0.5) & (drawn[:, high - 1] >= 0.5)
    assert inside.mean() < 0.95 + 2 * (0.95 * 0.05 / 20_000) ** 0.5


def test_outliers_beyond_the_interval_do_not_widen_it() -> None:
    """A step that a background job made a hundred times slower leaves the interval of twelve steps where it was."""
    quiet = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.01, 0.99]
    assert timing([*quiet[:-1], 100.0]).interval_frac == pytest.approx(0.01, abs=1e-3)


@pytest.mark.parametrize("num", [2000, 5000])
def test_thousands_of_steps_are_summed_up(num: int) -> None:
    """Several trials of one setting make up thousands of steps, whose interval is a narrow one."""
    found = timing(list(np.random.default_rng(0).normal(1.0, 0.05, num)))
    assert found.interval_frac is not None and found.interval_frac < 0.01


# -- enough steps


def test_equal_steps_are_settled_at_six() -> None:
    """Steps that all take the same time are known well enough as soon as there can be an interval."""
    assert [is_settled(timing_of([0.1] * num)) for num in (5, 6, 7)] == [False, True, True]


def test_wandering_steps_are_not_settled() -> None:
    """Six steps that differ by a third need more of them."""
    assert not is_settled(timing_of([1.0, 1.3, 1.1, 1.2, 1.05, 1.25]))


def test_settled_is_within_two_percent_to_either_side() -> None:
    """Half the width of the interval decides, and 2 % of the median is where."""
    below, above = ([1.0 - half, *[1.0] * 4, 1.0 + half] for half in (0.99 * SETTLED_FRAC, 1.01 * SETTLED_FRAC))
    assert (is_settled(timing_of(below)), is_settled(timing_of(above))) == (True, False)


# -- noise


@pytest.mark.parametrize(("num", "frac"), [(1, 0.1), (4, 0.05)])
def test_few_steps_are_taken_to_be_noisy(num: int, frac: float) -> None:
    """Where there is no interval, one step may differ by a tenth, and more of them by the square root less."""
    assert noise_frac(timing([1.0] * num)) == pytest.approx(frac)


def test_spread_of_few_steps_counts_where_it_is_larger() -> None:
    """Three steps that lie far apart are noisier than three steps are taken to be."""
    assert noise_frac(timing([1.0, 2.0, 3.0])) == pytest.approx(0.25)


def test_noise_of_many_steps_is_their_interval() -> None:
    """Where there is an interval, it is the noise."""
    found = timing([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06])
    assert noise_frac(found) == found.interval_frac


def test_steps_without_a_duration_have_a_noise() -> None:
    """A clock that did not move between two steps is no division by zero."""
    assert noise_frac(timing([0.0, 0.0])) > 0
    assert timing([0.0] * 8).interval_frac is None


# -- equal medians


def made(median_s: float, frac: float | None = 0.01, num: int = 20) -> Timing:
    return Timing(median_s=median_s, first_quartile_s=median_s, third_quartile_s=median_s, num=num, interval_frac=frac)


def test_medians_closer_than_their_noise_are_equal() -> None:
    """1 % apart is the same at 1 % noise, 3 % apart is not."""
    assert are_equal(made(1.0), made(1.0099))
    assert not are_equal(made(1.0), made(1.03))


def test_noisier_one_of_two_decides() -> None:
    """One setting that is known badly is equal to everything within its own noise."""
    assert are_equal(made(1.0, 0.001), made(1.05, 0.06))
    assert not are_equal(made(1.0, 0.001), made(1.05, 0.01))


@given(times, times, st.floats(0, 0.2), st.floats(0, 0.2))
def test_equality_does_not_depend_on_the_order(one_s: float, other_s: float, one_frac: float, other_frac: float) -> None:
    """If one is equal to the other, the other is equal to it; and each is equal to itself."""
    one, other = made(one_s, one_frac), made(other_s, other_frac)
    assert are_equal(one, other) == are_equal(other, one)
    assert are_equal(one, one)


def test_medians_of_the_same_steps_are_told_apart_or_not_by_their_noise() -> None:
    """Twenty steps of a setting that is a fifth slower are told apart, and two halves of one log are not."""
    drawn = np.random.default_rng(1).normal(1.0, 0.02, (2, 20))
    assert are_equal(timing(list(drawn[0])), timing(list(drawn[1])))
    assert not are_equal(timing(list(drawn[0])), timing(list(1.2 * drawn[1])))
    assert timing(list(drawn[0])).median_s == median(drawn[0])
