"""How a number of rows is divided over ranks and micro-batches. Pure arithmetic: knows neither memory nor time.

Sizes are near even (37, 37, 36), never full ones with a small rest (40, 40, 30): that keeps the peak low, avoids a rest
of one row that BatchNorm refuses, and avoids recompilation for one odd shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.errors import InvalidRequestError
from autoaccum.units import shown

LARGEST_TARGET = 10**9  # a window is a list of micro-batches; longer ones than this are a slip of the hand


def shares(target_batch: int, world_size: int) -> tuple[int, ...]:
    """Rows of one optimizer step for every rank; they differ by at most one.

    Example:
        >>> shares(10, 4)
        (3, 3, 2, 2)
    """
    return balanced(target_batch, world_size)


def proportional_shares(
    target_batch: int, limits: Sequence[int], multiple_of: int = 1, at_least: int = 1
) -> tuple[int, ...]:
    """Rows of one optimizer step for every rank, in proportion to the largest micro-batch that fits on each.

    By the largest remainder; never more than `steps_over_ranks` micro-batches hold, never fewer than `at_least` rows.

    Args:
        limits: The largest micro-batch that fits, by rank.
        multiple_of: Every micro-batch but a rank's last is a multiple of it.
        at_least: The smallest micro-batch that runs.

    Raises:
        InvalidRequestError: When there are too few rows for every rank to have `at_least`.

    Example:
        >>> proportional_shares(100, (30, 10)), proportional_shares(5, (100, 1, 1))
        ((75, 25), (3, 1, 1))
    """
    if min(limits) < at_least:
        raise InvalidRequestError(
            f"micro-batches of fewer than {at_least} rows do not run, and on rank {limits.index(min(limits))} no more than "
            f"{min(limits)} fit; raise its budget."
        )
    if target_batch < at_least * len(limits):
        raise InvalidRequestError(
            f"target_batch={target_batch} leaves fewer than {at_least} rows, the smallest micro-batch that runs, for some "
            f"of {len(limits)} ranks; use at least {at_least * len(limits)}."
        )
    full = [_whole_part(limit, multiple_of) for limit in limits]
    most = [limit * steps_over_ranks(target_batch, limits, multiple_of) for limit in full]
    exact = [target_batch * limit / sum(full) for limit in full]
    found = [min(max(int(part), at_least), top) for part, top in zip(exact, most, strict=True)]
    while (missing := target_batch - sum(found)) != 0:
        step = 1 if missing > 0 else -1
        open_ranks = [r for r in range(len(full)) if (found[r] < most[r] if step > 0 else found[r] > at_least)]
        found[max(open_ranks, key=lambda r: (step * (exact[r] - found[r]), -r))] += step
    return tuple(found)


def steps_over_ranks(target_batch: int, limits: Sequence[int], multiple_of: int = 1) -> int:
    """The fewest micro-batches with which ranks of these limits hold the target together.

    Example:
        >>> steps_over_ranks(100, (30, 10)), steps_over_ranks(100, (30, 10), multiple_of=8)
        (3, 4)
    """
    return -(-target_batch // sum(_whole_part(limit, multiple_of) for limit in limits))


def proportional_sizes(
    target_batch: int, limits: Sequence[int], multiple_of: int = 1, at_least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of every rank, near even, none above the rank's limit.

    Raises:
        InvalidRequestError: When some would be too small to run.

    Example:
        >>> proportional_sizes(100, (30, 10))
        ((25, 25, 25), (9, 8, 8))
    """
    steps = steps_over_ranks(target_batch, limits, multiple_of)
    of_ranks = proportional_shares(target_batch, limits, multiple_of, at_least)
    sizes = tuple(split_rows(share, max(1, min(steps, share // at_least)), multiple_of) for share in of_ranks)
    sound = all(max(of_rank) <= limit for of_rank, limit in zip(sizes, limits, strict=True))
    if not sound or smallest(sizes) < at_least:
        raise InvalidRequestError(
            f"target_batch={target_batch} cannot be divided in proportion to {list(limits)[:20]} rows without micro-batches "
            f"below {at_least} rows, which do not run; use another target_batch."
        )
    return sizes


def _whole_part(limit: int, multiple_of: int) -> int:
    """The largest multiple within the limit; the limit itself where there is none."""
    return limit // multiple_of * multiple_of or limit


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """`total` as `parts` whole numbers that differ by at most one, the larger ones first.

    Example:
        >>> balanced(110, 3)
        (37, 37, 36)
    """
    quotient, remainder = divmod(total, parts)
    return (quotient + 1,) * remainder + (quotient,) * (parts - remainder)


def split_rows(share: int, steps: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Sizes of `steps` micro-batches over `share` rows; all but the last are multiples of `multiple_of`.

    Example:
        >>> split_rows(100, 3, multiple_of=8)
        (40, 32, 28)
    """
    units = -(-share // multiple_of)
    sizes = [part * multiple_of for part in balanced(units, min(steps, units))]
    sizes[-1] -= units * multiple_of - share
    return tuple(sizes)


def steps_for(share: int, micro_batch_limit: int, multiple_of: int = 1) -> int:
    """The fewest micro-batches that cover `share` rows with none above the limit.

    Example:
        >>> steps_for(128, 100), steps_for(32, 5), steps_for(7, 8)
        (2, 7, 1)
    """
    if share <= micro_batch_limit:
        return 1
    units, units_limit = -(-share // multiple_of), micro_batch_limit // multiple_of
    return -(-units // units_limit)


def ladder(share: int, bound: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Every size, ascending, that can be the largest micro-batch of a balanced window of `share` rows.

    Only about 2 * sqrt(share) sizes matter: between two of them the number of micro-batches is the same.

    Args:
        share: Rows of one optimizer step on one rank.
        bound: No size above this one.
        multiple_of: As in `split_rows`.

    Example:
        >>> ladder(12, 12), ladder(100, 48, multiple_of=8)
        ((1, 2, 3, 4, 6, 12), (8, 16, 24, 32, 40))
    """
    units = -(-share // multiple_of)
    found, steps = set(), 1
    while steps <= units:
        per_step = -(-units // steps)
        found.add(share if steps == 1 else per_step * multiple_of)
        if per_step == 1:
            break
        steps = -(-units // (per_step - 1))
    return tuple(sorted(size for size in found if size <= bound))


def check_target(target_batch: object, world_size: int) -> int:
    """The target as an int that every rank can take part in.

    Raises:
        InvalidRequestError: When it is not whole, not above zero, or smaller than the number of ranks.
    """
    whole = whole_number(target_batch, "target_batch", "the rows of one optimizer step over all ranks")
    if whole > LARGEST_TARGET:
        raise InvalidRequestError(
            f"target_batch={shown(target_batch)} is beyond any optimizer step; expected at most {LARGEST_TARGET}."
        )
    if whole < world_size:
        raise InvalidRequestError(
            f"target_batch={whole} is smaller than world_size={world_size}; every rank needs at least one sample."
        )
    return whole


def whole_number(value: object, name: str, meaning: str) -> int:
    """The value as an int of at least one.

    Raises:
        InvalidRequestError: Otherwise, with the name, the value and the meaning.
    """
    try:
        whole = int(value)  # type: ignore[call-overload]
        sound = whole == value and whole >= 1 and not isinstance(value, (bool, str))
    except (TypeError, ValueError, OverflowError):
        sound = False
    if not sound:
        raise InvalidRequestError(f"{name}={shown(value)} is not possible; expected a whole number >= 1: {meaning}.")
    return int(whole)


def rank_sizes(share: int, steps: int, multiple_of: int, micro_batch: int | None) -> tuple[int, ...]:
    """One rank's sizes: `steps` balanced ones, or equal ones of `micro_batch` rows where one number must serve."""
    if micro_batch is not None:
        return (micro_batch,) * (share // micro_batch)
    return split_rows(share, min(steps, share), multiple_of)


def smallest(sizes: Sequence[Sequence[int]]) -> int:
    """The smallest micro-batch over all ranks."""
    return min(min(of_rank) for of_rank in sizes)
