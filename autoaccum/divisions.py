"""Where one size of micro-batch must serve on every rank: the sizes that divide a target, and targets that divide better.

Pure arithmetic, as in `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.errors import InvalidRequestError


def largest_divisor(share: int, limit: int, *, at_least: int = 1, multiple_of: int = 1) -> int | None:
    """The largest size up to `limit` that divides `share` without a rest, None when there is none.

    Example:
        >>> largest_divisor(256, 10), largest_divisor(97, 10), largest_divisor(97, 10, at_least=2)
        (8, 1, None)
    """
    if at_least <= share <= limit:
        return share
    for size in range(min(limit, share) // multiple_of * multiple_of, 0, -multiple_of):
        if size < at_least:
            return None
        if share % size == 0:
            return size
    return None


def near_targets(share: int, limit: int, *, at_least: int = 1, multiple_of: int = 1) -> tuple[tuple[int, int, int], ...]:
    """Shares close to this one that divide well: (share, micro_batch, steps), nearest first.

    The nearest one below, the nearest above, and the nearest that uses the limit itself. A divisor counts as good from
    three quarters of the limit on.

    Example:
        >>> near_targets(97, 10)
        ((96, 8, 12), (99, 9, 11), (100, 10, 10))
    """
    full = max(limit // multiple_of * multiple_of, multiple_of)
    good = max(at_least, 1, -(-3 * full // 4))

    def fitting(other: int) -> bool:
        size = largest_divisor(other, limit, at_least=at_least, multiple_of=multiple_of)
        return size is not None and size >= min(good, other)

    below = next((other for other in range(share - 1, 0, -1) if fitting(other)), None)
    above = next((other for other in range(share + 1, share + full + 1) if fitting(other)), None)
    exact = min((share // full * full or full, -(-share // full) * full), key=lambda other: abs(other - share))
    found = sorted({other for other in (below, above, exact) if other}, key=lambda other: (abs(other - share), other))
    sizes = {other: largest_divisor(other, limit, at_least=at_least, multiple_of=multiple_of) for other in found}
    return tuple((other, size, other // size) for other, size in sizes.items() if size is not None)


def near_divisions(
    target_batch: int, world_size: int, limit: int, *, at_least: int = 1, multiple_of: int = 1
) -> tuple[tuple[int, int, int], ...]:
    """Targets close to this one that are the same micro-batches on every rank: (target, micro_batch, steps).

    Where the target divides over the ranks, `near_targets` of a rank's share, nearest first. Else, ascending, the next ones
    that do, however small their micro-batches, and those that divide well.

    Example:
        >>> near_divisions(256, 7, 2)
        ((252, 2, 18), (259, 1, 37), (266, 2, 19))
    """
    below, rest = divmod(target_batch, world_size)
    found = near_targets(below + (rest > 0), limit, at_least=at_least, multiple_of=multiple_of)
    if rest:
        sizes = {
            share: largest_divisor(share, limit, at_least=at_least, multiple_of=multiple_of) for share in (below, below + 1)
        }
        next_ones = [(share, size, share // size) for share, size in sizes.items() if size is not None]
        found = tuple(sorted({*found, *next_ones}))
    return tuple((share * world_size, micro_batch, steps) for share, micro_batch, steps in found)


def divisions_in_words(divisions: Sequence[tuple[int, int, int]], world_size: int) -> str:
    """Near targets as products: of micro-batch, steps and, where there are several, ranks.

    Example:
        >>> divisions_in_words(((252, 2, 18), (259, 1, 37)), 7)
        '252 = 2 x 18 x 7, 259 = 1 x 37 x 7'
    """
    ranks = f" x {world_size}" if world_size > 1 else ""
    return ", ".join(f"{target} = {micro_batch} x {steps}{ranks}" for target, micro_batch, steps in divisions)


def refuse_indivisible(target_batch: int, world_size: int, limit: int, *, at_least: int = 1, multiple_of: int = 1) -> None:
    """Refuse a target that is not the same number of rows on every rank, where one size must serve.

    Raises:
        InvalidRequestError: With near targets that are, in micro-batches of at most `limit` rows.
    """
    if target_batch % world_size:
        near = near_divisions(target_batch, world_size, limit, at_least=at_least, multiple_of=multiple_of)
        raise InvalidRequestError(
            f"target_batch={target_batch} does not divide over world_size={world_size}, which equal micro-batches need; "
            f"near targets that do: {divisions_in_words(near, world_size)}."
        )
