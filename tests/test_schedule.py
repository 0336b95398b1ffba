"""How rows are divided: sums, evenness, limits and multiples, each compared with trying everything."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autoaccum.divisions import largest_divisor
from autoaccum.errors import InvalidRequestError
from autoaccum.schedule import (
    balanced,
    check_target,
    ladder,
    proportional_shares,
    proportional_sizes,
    rank_sizes,
    shares,
    smallest,
    split_rows,
    steps_for,
    steps_over_ranks,
    whole_number,
)

shares_of_any_size = st.integers(1, 10**6) | st.integers(1, 200)
small_shares = st.integers(1, 400)
multiples = st.integers(1, 24)


@given(st.integers(0, 10**9), st.integers(1, 5000))
def test_balanced_sums_to_the_total(total: int, parts: int) -> None:
    """The parts are as many as asked for and sum to the total."""
    sizes = balanced(total, parts)
    assert len(sizes) == parts and sum(sizes) == total


@given(st.integers(0, 10**9), st.integers(1, 5000))
def test_balanced_is_even(total: int, parts: int) -> None:
    """No two parts differ by more than one, and the larger ones come first."""
    sizes = balanced(total, parts)
    assert sizes[0] - sizes[-1] <= 1 and list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(1, 10**7), st.integers(1, 4096))
def test_shares_add_up_to_the_target(target: int, world_size: int) -> None:
    """All ranks together take exactly the target, none more than one row above another."""
    of_ranks = shares(target, world_size)
    assert len(of_ranks) == world_size and sum(of_ranks) == target
    assert max(of_ranks) - min(of_ranks) <= 1


@given(st.integers(1, 512), st.data())
def test_every_rank_has_a_row(world_size: int, data: st.DataObject) -> None:
    """With a target of at least the number of ranks, no rank is left without a row."""
    assert min(shares(data.draw(st.integers(world_size, 10**6)), world_size)) >= 1


@given(shares_of_any_size, st.integers(1, 3000), multiples)
@example(33, 4, 16)
@example(7, 3, 8)
def test_split_sums_to_the_share(share: int, steps: int, multiple_of: int) -> None:
    """Micro-batches sum to the share and none is empty."""
    sizes = split_rows(share, steps, multiple_of)
    assert sum(sizes) == share and min(sizes) >= 1


@given(shares_of_any_size, st.integers(1, 3000), multiples)
def test_split_keeps_multiples(share: int, steps: int, multiple_of: int) -> None:
    """Every micro-batch but the last is a multiple of what was asked for."""
    assert all(size % multiple_of == 0 for size in split_rows(share, steps, multiple_of)[:-1])


@given(shares_of_any_size, st.integers(1, 3000), multiples)
def test_split_is_near_even(share: int, steps: int, multiple_of: int) -> None:
    """Micro-batches differ by less than two multiples, and all but the last by at most one."""
    sizes = split_rows(share, steps, multiple_of)
    assert max(sizes) - min(sizes) < 2 * multiple_of
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) <= multiple_of


@given(shares_of_any_size, st.integers(1, 3000), multiples)
def test_split_uses_the_steps_it_is_given(share: int, steps: int, multiple_of: int) -> None:
    """There are as many micro-batches as steps, or as multiples where those are fewer."""
    assert len(split_rows(share, steps, multiple_of)) == min(steps, -(-share // multiple_of))


@given(shares_of_any_size, st.integers(1, 3000))
def test_split_into_ones_is_balanced(share: int, steps: int) -> None:
    """Without a multiple the split is the balanced one."""
    assert split_rows(share, steps) == balanced(share, min(steps, share))


@given(shares_of_any_size, st.data(), multiples)
def test_steps_respect_the_limit(share: int, data: st.DataObject, multiple_of: int) -> None:
    """A split into that many steps has no micro-batch above the limit."""
    limit = data.draw(st.integers(multiple_of, 2 * max(share, multiple_of)))
    assert max(split_rows(share, steps_for(share, limit, multiple_of), multiple_of)) <= limit


@given(small_shares, st.data(), multiples)
def test_steps_are_the_fewest(share: int, data: st.DataObject, multiple_of: int) -> None:
    """No smaller number of steps keeps all micro-batches within the limit."""
    limit = data.draw(st.integers(multiple_of, 2 * max(share, multiple_of)))
    possible = (steps for steps in range(1, share + 1) if max(split_rows(share, steps, multiple_of)) <= limit)
    assert steps_for(share, limit, multiple_of) == next(possible)


@given(small_shares, st.data())
def test_a_share_within_the_limit_is_one_step(share: int, data: st.DataObject) -> None:
    """A share that fits is taken in one step, also when it is no multiple and the limit is below one."""
    assert steps_for(share, data.draw(st.integers(share, 1000)), multiple_of=data.draw(st.integers(1, 2000))) == 1


@given(small_shares, st.integers(1, 500), multiples)
@example(1, 1, 1)
@example(5, 4, 8)
def test_ladder_is_every_largest_size(share: int, bound: int, multiple_of: int) -> None:
    """The ladder holds the largest micro-batch of every possible number of steps, up to the bound, ascending."""
    everything = {max(split_rows(share, steps, multiple_of)) for steps in range(1, share + 1)}
    assert ladder(share, bound, multiple_of) == tuple(sorted(size for size in everything if size <= bound))


def test_ladder_without_a_multiple() -> None:
    """Without a multiple every size is possible."""
    assert ladder(12, 12) == (1, 2, 3, 4, 6, 12)


@given(st.integers(1, 10**9))
def test_ladder_is_short(share: int) -> None:
    """A ladder has no more than about two square roots of the share as its sizes."""
    assert len(ladder(share, share)) <= 2 * share**0.5 + 1


@given(shares_of_any_size, multiples)
def test_ladder_goes_from_one_multiple_to_the_share(share: int, multiple_of: int) -> None:
    """The smallest size is one multiple, or the share where that is less, and the largest is the share."""
    sizes = ladder(share, share, multiple_of)
    assert (sizes[0], sizes[-1]) == (min(multiple_of, share), share)


@pytest.mark.parametrize(
    ("share", "limit", "steps", "divisor"),
    [(128, 100, 2, 64), (32, 5, 7, 4), (97, 10, 10, 1), (32, 40, 1, 32), (7, 3, 3, 1)],
)
def test_limits_people_met(share: int, limit: int, steps: int, divisor: int) -> None:
    """A limit is not halved away: the fewest near-even steps in one's own loop, the largest divisor elsewhere."""
    assert steps_for(share, limit) == steps
    assert max(split_rows(share, steps)) <= limit
    assert largest_divisor(share, limit) == divisor


@given(st.integers(1, 10**6), st.data())
def test_rank_sizes_of_one_s_own_loop(share: int, data: st.DataObject) -> None:
    """In one's own loop a rank splits its share, also when it has fewer rows than there are steps."""
    steps, multiple_of = data.draw(st.integers(1, 2000)), data.draw(multiples)
    assert rank_sizes(share, steps, multiple_of, None) == split_rows(share, min(steps, share), multiple_of)


@given(st.integers(1, 500), st.integers(1, 500))
def test_rank_sizes_of_one_number(micro_batch: int, steps: int) -> None:
    """Where one number has to serve, every micro-batch has that size and they sum to the share."""
    assert rank_sizes(micro_batch * steps, 0, 1, micro_batch) == (micro_batch,) * steps


@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=5), min_size=1, max_size=5))
def test_smallest_over_all_ranks(sizes: list[list[int]]) -> None:
    """The smallest micro-batch is looked for on every rank."""
    assert smallest(sizes) == min(size for of_rank in sizes for size in of_rank)


@given(st.integers(1, 1000), st.data())
def test_target_of_at_least_the_ranks_is_taken(world_size: int, data: st.DataObject) -> None:
    """A target that gives every rank a sample is returned as it is."""
    target = data.draw(st.integers(world_size, 10**9))
    assert check_target(target, world_size) == target


@given(st.integers(2, 1000), st.data())
def test_target_below_the_ranks_is_refused(world_size: int, data: st.DataObject) -> None:
    """A target smaller than the number of ranks is refused with both numbers and the reason."""
    target = data.draw(st.integers(1, world_size - 1))
    text = f"target_batch={target} is smaller than world_size={world_size}; every rank needs at least one sample."
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(text)}$"):
        check_target(target, world_size)


@pytest.mark.parametrize(
    "value",
    [8, 8.0, np.int64(8), np.float32(8), Fraction(8), Decimal(8), torch.tensor(8)],
    ids=lambda value: type(value).__name__,
)
def test_whole_numbers_of_any_type(value: object) -> None:
    """A whole number of any numeric type becomes an int."""
    whole = whole_number(value, "target_batch", "rows")
    assert whole == 8 and type(whole) is int


@pytest.mark.parametrize(
    "value",
    [
        0,
        -3,
        2.5,
        float("nan"),
        float("inf"),
        "8",
        b"8",
        True,
        None,
        [8],
        8j,
        object(),
        Fraction(7, 2),
        np.arange(3),
        pytest.param(-(10**5000), id="long"),
    ],
)
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    """Anything but a whole number above zero is refused with its name and its meaning, shortly."""
    with pytest.raises(InvalidRequestError, match=r"(?s)^steps=.* is not possible; .*: micro-batches per step\.$") as caught:
        whole_number(value, "steps", "micro-batches per step")
    assert len(str(caught.value)) < 250


limits_of_ranks = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@given(st.data(), limits_of_ranks, st.integers(1, 24))
def test_shares_in_proportion_add_up(data: st.DataObject, limits: list[int], multiple_of: int) -> None:
    """For any target from the number of ranks on: the shares sum to it, and every rank has a row."""
    target = data.draw(st.integers(len(limits), 20000))
    found = proportional_shares(target, limits, multiple_of)
    assert sum(found) == target and min(found) >= 1


@given(st.data(), limits_of_ranks, multiples)
def test_shares_in_proportion_fit(data: st.DataObject, limits: list[int], multiple_of: int) -> None:
    """No rank has more rows than its micro-batches hold in the fewest steps that hold the target together."""
    limits = [max(limit, multiple_of) for limit in limits]
    target = data.draw(st.integers(len(limits), 20000))
    full = [limit // multiple_of * multiple_of for limit in limits]
    steps = steps_over_ranks(target, limits, multiple_of)
    assert sum(full) * (steps - 1) < target <= sum(full) * steps
    shares_found = proportional_shares(target, limits, multiple_of)
    assert all(share <= limit * steps for share, limit in zip(shares_found, full, strict=True))
    for sizes, share, limit in zip(proportional_sizes(target, limits, multiple_of), shares_found, limits, strict=True):
        assert sum(sizes) == share and max(sizes) <= limit and len(sizes) <= steps
        assert all(size % multiple_of == 0 for size in sizes[:-1])


@given(st.data(), limits_of_ranks)
def test_shares_are_within_a_row_of_the_proportion(data: st.DataObject, limits: list[int]) -> None:
    """Where every rank's part is a row or more, no share differs from its exact part by a whole row."""
    target = data.draw(st.integers(-(-sum(limits) // min(limits)), 40000))
    for share, limit in zip(proportional_shares(target, limits), limits, strict=True):
        assert abs(share - Fraction(target * limit, sum(limits))) < 1


@pytest.mark.parametrize(
    ("target", "limits", "at_least", "said"),
    [
        (3, (4, 4), 2, "leaves fewer than 2 rows.*use at least 4"),
        (20, (4, 1), 2, "on rank 1 no more than 1 fit"),
        (5, (2, 2), 2, "cannot be divided in proportion"),
    ],
)
def test_shares_that_cannot_be_are_refused(target: int, limits: tuple[int, ...], at_least: int, said: str) -> None:
    """Where micro-batches would be too small to run, the error says for which number of rows."""
    with pytest.raises(InvalidRequestError, match=said):
        proportional_sizes(target, limits, at_least=at_least)
