"""Rows of unequal cost in micro-batches, none above the limit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.batches.packing import pack, refuse_above
from autoaccum.errors import InvalidRequestError

lengths_of_rows = st.lists(st.integers(1, 50), min_size=1, max_size=40)
CostOf = Callable[[Sequence[int]], float]


def padded(lengths: Sequence[int]) -> CostOf:
    """Rows times the longest of them."""
    return lambda rows: len(rows) * max(lengths[row] for row in rows)


def summed(lengths: Sequence[int]) -> CostOf:
    """Rows that are put one behind the other."""
    return lambda rows: sum(lengths[row] for row in rows)


def by_chunks(lengths: Sequence[int], limit: float) -> int:
    """How many micro-batches padding needs at least: sorted rows, as many at a time as go with the longest."""
    left, count = sorted(lengths, reverse=True), 0
    while left:
        left, count = left[max(1, int(limit // left[0])) :], count + 1
    return count


@pytest.mark.parametrize("kind", [padded, summed])
@given(lengths=lengths_of_rows, limit=st.integers(1, 120))
def test_every_row_once(kind: Callable[[Sequence[int]], CostOf], lengths: list[int], limit: int) -> None:
    """Every row is in exactly one micro-batch, in ascending order there, and no micro-batch is empty."""
    packed = pack(lengths, kind(lengths), limit)
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    assert all(rows and rows == sorted(rows) for rows in packed)


@pytest.mark.parametrize("kind", [padded, summed])
@given(lengths=lengths_of_rows, limit=st.integers(1, 120))
def test_never_above_the_limit(kind: Callable[[Sequence[int]], CostOf], lengths: list[int], limit: int) -> None:
    """No micro-batch of several rows costs more than the limit."""
    cost_of = kind(lengths)
    assert all(len(rows) == 1 or cost_of(rows) <= limit for rows in pack(lengths, cost_of, limit))


@given(lengths=lengths_of_rows, limit=st.integers(1, 120))
def test_no_two_could_be_one(lengths: list[int], limit: int) -> None:
    """Where costs add up, no two micro-batches fit together, so there are fewer than twice as many as are needed."""
    cost_of = summed(lengths)
    packed = pack(lengths, cost_of, limit)
    costs = [cost_of(rows) for rows in packed]
    assert all(one + other > limit for index, one in enumerate(costs) for other in costs[:index])
    if max(lengths) <= limit:
        assert len(packed) <= max(1, 2 * ceil(sum(lengths) / limit) - 1)


@given(lengths=lengths_of_rows, limit=st.integers(1, 500))
def test_padding_needs_no_more_than_sorted_chunks(lengths: list[int], limit: int) -> None:
    """Where the longest row counts, there are as few micro-batches as cutting the sorted rows into chunks gives."""
    assert len(pack(lengths, padded(lengths), limit)) == by_chunks(lengths, limit)


@given(rows=st.integers(1, 60), length=st.integers(1, 9), limit=st.integers(9, 90))
def test_equal_rows_are_cut_like_rows(rows: int, length: int, limit: int) -> None:
    """Rows of one length need the fewest micro-batches that there can be, and keep their order."""
    packed = pack([length] * rows, padded([length] * rows), limit)
    assert [row for batch in packed for row in batch] == list(range(rows))
    assert len(packed) == ceil(rows / (limit // length))


def test_unequal_rows_need_fewer_than_in_order() -> None:
    """Long and short rows by turns need fewer micro-batches than cutting them in order does."""
    lengths = [100, 1] * 8
    in_order = 16  # two neighbours cost 200
    assert len(pack(lengths, padded(lengths), 100)) == 9 < in_order


def test_dearest_row_comes_first() -> None:
    """The first micro-batch has the dearest row, so that a window that does not fit fails at once."""
    lengths = [1, 7, 2, 9, 9]
    assert pack(lengths, padded(lengths), 10) == [[3], [4], [1], [0, 2]]


def test_cheapest_rows_fill_the_first_that_has_room() -> None:
    """A row goes into the first micro-batch with room, not into the last."""
    lengths = [6, 6, 4, 4, 1]
    assert pack(lengths, summed(lengths), 10) == [[0, 2], [1, 3], [4]]


def test_a_row_above_the_limit_is_alone() -> None:
    """A row that costs more than the limit gets a micro-batch of its own, and no other row joins it."""
    lengths = [1, 50, 1]
    assert pack(lengths, padded(lengths), 10) == [[1], [0, 2]]


def test_without_a_limit_all_rows_are_together() -> None:
    """With an infinite limit there is one micro-batch."""
    assert pack([3, 1, 2], padded([3, 1, 2]), inf) == [[0, 1, 2]]


@pytest.mark.parametrize(("costs", "expected"), [([], []), ([0.0, 0.0], [[0, 1]])], ids=["no rows", "free rows"])
def test_borders(costs: list[float], expected: list[list[int]]) -> None:
    """No rows are no micro-batches, and rows that cost nothing go together."""
    assert pack(costs, summed(costs), 0) == expected


@given(lengths=lengths_of_rows)
def test_cost_is_asked_for_ascending_rows(lengths: list[int]) -> None:
    """The cost is only ever asked of ascending rows without repeats, as a micro-batch would hold them."""

    def cost_of(rows: Sequence[int]) -> float:
        assert list(rows) == sorted(set(rows))
        return len(rows)

    pack(lengths, cost_of, 3)


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(0, 20))
def test_rows_above_the_limit_are_refused(costs: list[int], limit: int) -> None:
    """An error comes exactly when some row costs more than the limit."""
    if not costs or max(costs) <= limit:
        refuse_above(costs, limit)
        return
    with pytest.raises(InvalidRequestError):
        refuse_above(costs, limit)


def test_rows_above_the_limit_are_named() -> None:
    """The error has the rows with what they cost, and the limit."""
    text = "row 1 costs 12, row 3 costs 10.5, above max_cost=10 on its own; expected every row within it."
    with pytest.raises(InvalidRequestError, match=re.escape(text)):
        refuse_above([1, 12, 10, 10.5], 10)


def test_many_rows_above_the_limit_are_counted() -> None:
    """Of many rows above the limit, five are named and the others counted."""
    with pytest.raises(InvalidRequestError, match=r"row 4 costs 9 and 3 more, above") as caught:
        refuse_above([9] * 8, 1)
    assert "row 5" not in str(caught.value)
