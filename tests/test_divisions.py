"""Sizes that divide a target and targets that divide well, each compared with trying everything."""

from __future__ import annotations

from hypothesis import assume, example, given
from hypothesis import strategies as st

from autoaccum.divisions import largest_divisor, near_targets

multiples = st.integers(1, 24)
limits = st.integers(1, 300)


@given(st.integers(1, 3000), st.data(), multiples)
@example(97, None, 1)
def test_largest_divisor_is_the_largest(share: int, data: st.DataObject | None, multiple_of: int) -> None:
    """The divisor is the largest one that satisfies every condition, or None where there is none."""
    limit = data.draw(st.integers(0, 2 * share)) if data else 10
    at_least = data.draw(st.integers(1, 20)) if data else 2
    possible = [
        size
        for size in range(1, min(share, limit) + 1)
        if share % size == 0 and size >= at_least and (size % multiple_of == 0 or size == share)
    ]
    assert largest_divisor(share, limit, at_least=at_least, multiple_of=multiple_of) == max(possible, default=None)


@given(st.integers(1, 20_000), limits, st.integers(1, 8), multiples)
@example(100, 5, 1, 8)
@example(97, 15, 1, 8)
@example(97, 10, 9, 8)
def test_near_targets_divide_as_they_say(share: int, limit: int, at_least: int, multiple_of: int) -> None:
    """Every near target is its micro-batch times its steps, within the limit and not too small."""
    for near, micro_batch, steps in near_targets(share, limit, at_least=at_least, multiple_of=multiple_of):
        assert near == micro_batch * steps and near >= 1
        assert at_least <= micro_batch <= limit
        assert micro_batch % multiple_of == 0 or steps == 1


@given(st.integers(1, 20_000), limits, multiples)
def test_near_targets_come_nearest_first(share: int, limit: int, multiple_of: int) -> None:
    """Near targets are ordered by their distance, without repetition."""
    found = [near for near, _, _ in near_targets(share, limit, multiple_of=multiple_of)]
    assert len(set(found)) == len(found)
    assert [abs(near - share) for near in found] == sorted(abs(near - share) for near in found)


@given(st.integers(1, 20_000), limits, multiples)
def test_near_targets_are_near(share: int, limit: int, multiple_of: int) -> None:
    """Where the limit holds a whole multiple, a near target lies within half of the limit or the limit itself."""
    assume(limit >= multiple_of)
    nearest = near_targets(share, limit, multiple_of=multiple_of)[0][0]
    assert abs(nearest - share) <= max(limit // 2, limit - share)


@given(st.integers(200, 5000), st.integers(4, 64))
def test_near_target_below_and_above_are_the_first_good_ones(share: int, limit: int) -> None:
    """Next to a target, the first one below and above with a divisor of three quarters of the limit is offered."""
    found = {near for near, _, _ in near_targets(share, limit)}
    good = range(-(-3 * limit // 4), limit + 1)
    below = next(near for near in range(share - 1, 0, -1) if any(near % size == 0 for size in good))
    above = next(near for near in range(share + 1, 2 * share) if any(near % size == 0 for size in good))
    assert {below, above} <= found


@given(st.integers(1, 20_000), limits, multiples)
def test_near_targets_hold_the_nearest_multiple_of_the_limit(share: int, limit: int, multiple_of: int) -> None:
    """The nearest target that is made up of the largest possible micro-batch only is always offered."""
    assume(limit >= multiple_of)
    full = limit // multiple_of * multiple_of
    nearest = min(
        (steps * full for steps in (share // full, share // full + 1) if steps), key=lambda near: abs(near - share)
    )
    assert nearest in {near for near, _, _ in near_targets(share, limit, multiple_of=multiple_of)}


def test_a_prime_target_has_neighbours() -> None:
    """For a prime target, targets next to it that divide well are offered with their division."""
    assert {(96, 8, 12), (100, 10, 10)} <= set(near_targets(97, 10))
