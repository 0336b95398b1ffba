"""Which micro-batches are worth measuring: few, spread evenly, and never one that the target cannot be divided into."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.schedule import ladder
from autoaccum.tradeoffs.sizes import sizes_of_interest

targets = st.integers(1, 100_000)


@given(targets, st.data())
def test_sizes_are_divisions_of_the_target(target: int, data: st.DataObject) -> None:
    """Every size of interest is one of those that were given, once, ascending."""
    sizes = ladder(target, target)
    fits, best = data.draw(st.none() | st.sampled_from(sizes)), data.draw(st.none() | st.sampled_from(sizes))
    found = sizes_of_interest(sizes, fits, best)
    assert found == sorted(set(found)) and set(found) <= set(sizes)


@given(targets, st.data())
def test_largest_that_fits_is_of_interest(target: int, data: st.DataObject) -> None:
    """What fits with no lever turned is always compared with the rest, and so are its neighbours."""
    sizes = ladder(target, target)
    at = data.draw(st.integers(0, len(sizes) - 1))
    assert set(sizes[max(0, at - 1) : at + 2]) <= set(sizes_of_interest(sizes, sizes[at]))


@given(targets, st.data())
def test_target_itself_is_of_interest(target: int, data: st.DataObject) -> None:
    """The whole target in one piece is, however little fits as it is: levers may make it fit."""
    sizes = ladder(target, target)
    assert target in sizes_of_interest(sizes, data.draw(st.none() | st.sampled_from(sizes)))


@given(targets)
def test_every_size_is_within_a_doubling_of_one_of_interest(target: int) -> None:
    """Where nothing is known to fit, all sizes are covered down to one row, at least by one half to twice as large."""
    sizes = ladder(target, target)
    found = sizes_of_interest(sizes, None)
    assert found[0] == 1
    assert all(any(size <= other <= 2 * size + 1 for other in found) for size in sizes)


@given(targets, st.data())
def test_sizes_of_interest_are_few(target: int, data: st.DataObject) -> None:
    """They grow with the logarithm of the target, not with the number of its divisions."""
    sizes = ladder(target, target)
    found = sizes_of_interest(sizes, data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes)))
    assert len(found) <= log2(target) + 12


@given(targets, st.data())
def test_neighbours_of_the_fastest_are_of_interest(target: int, data: st.DataObject) -> None:
    """Around the fastest so far the next sizes up and down are looked at as well."""
    sizes = ladder(target, target)
    at = data.draw(st.integers(0, len(sizes) - 1))
    fits = data.draw(st.sampled_from(sizes))
    assert set(sizes[max(0, at - 1) : at + 2]) <= set(sizes_of_interest(sizes, fits, sizes[at]))


@pytest.mark.parametrize("fits", [None, 5])
def test_single_size_is_all_there_is(fits: int | None) -> None:
    """A target that can be run in one way only has one size of interest."""
    assert sizes_of_interest([5], fits) == [5]


def test_limit_between_two_sizes_counts_as_the_lower() -> None:
    """What fits need not be a division of the target itself."""
    sizes = ladder(48, 48)
    assert sizes_of_interest(sizes, 17) == sizes_of_interest(sizes, 16)


def test_small_sizes_below_the_limit_are_left_to_their_trend() -> None:
    """Far below the largest size that fits nothing is of interest, since small micro-batches are seldom faster."""
    assert min(sizes_of_interest(ladder(1024, 1024), 256)) == 32


def test_equal_divisions_are_halved_like_others() -> None:
    """Divisors with wide gaps between them are all taken."""
    assert sizes_of_interest([1, 97], None) == [1, 97]
    assert sizes_of_interest([8, 24, 120], 24) == [8, 24, 120]
