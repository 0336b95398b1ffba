"""Which micro-batches are worth measuring: about half as large each, around the largest that fits as it is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

_POWERS = [2**power for power in range(30)]  # kernels work on tiles of such sizes
_DOWNWARDS = 3  # halvings below the largest size that fits: smaller ones are seldom faster, and then by their trend


def sizes_of_interest(sizes: Sequence[int], fits: int | None, best: int | None = None) -> list[int]:
    """A few of the sizes, ascending.

    Args:
        sizes: All that the target can be divided into, ascending.
        fits: The largest that fits with no lever turned; None where none does.
        best: The fastest so far, whose neighbours are of interest as well.

    Example:
        >>> sizes_of_interest([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96], fits=8)
        [1, 2, 4, 6, 8, 12, 24, 48, 96]
    """
    if fits is None:
        return _halvings(sizes, sizes[-1], len(sizes))
    anchor = bisect_right(sizes, fits) - 1
    found = {*_halvings(sizes, sizes[anchor], _DOWNWARDS), *sizes[max(0, anchor - 1) : anchor + 2]}
    found |= {size for size in _halvings(sizes, sizes[-1], len(sizes)) if size > fits}
    found |= {size for size in map(partial(_at_most, sizes), _POWERS) if min(found) <= size <= sizes[anchor]}
    if best is not None:
        at = sizes.index(best)
        found |= set(sizes[max(0, at - 1) : at + 2])
    return sorted(found)


def _at_most(sizes: Sequence[int], bound: int) -> int:
    return sizes[max(0, bisect_right(sizes, bound) - 1)]


def _halvings(sizes: Sequence[int], start: int, most: int) -> list[int]:
    """The size itself, the largest one of at most half of it, and so on."""
    found = [start]
    while len(found) <= most and found[-1] > sizes[0]:
        found.append(sizes[max(0, bisect_right(sizes, found[-1] // 2) - 1)])
    return sorted(found)
