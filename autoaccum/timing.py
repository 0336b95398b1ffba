"""From the times of several optimizer steps to what can be said about them. Pure: measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import median, quantiles

from autoaccum.records import Timing

SETTLED_FRAC = 0.02  # a median whose interval is narrower than this, to either side, is known well enough
_CONFIDENCE = 0.95
_UNKNOWN_FRAC = 0.1  # by how much a single step may differ from the median of many


def timing_of(times_s: Sequence[float]) -> Timing | None:
    """Median, quartiles and the interval of the median; None without any time.

    Example:
        >>> timing_of([1.0, 1.0, 1.0, 1.1, 1.0, 1.0]).median_s, timing_of([]) is None
        (1.0, True)
    """
    if not times_s:
        return None
    ordered = sorted(times_s)
    first, _, third = quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else (ordered[0],) * 3
    return Timing(
        median_s=median(ordered),
        first_quartile_s=first,
        third_quartile_s=third,
        num=len(ordered),
        interval_frac=_interval_frac(ordered),
    )


def is_settled(timing: Timing | None) -> bool:
    """Whether more steps would not tell much more."""
    return timing is not None and timing.interval_frac is not None and timing.interval_frac <= SETTLED_FRAC


def noise_frac(timing: Timing) -> float:
    """By how much the median may be off, as a fraction of it: its interval; wider where too few steps ran to have one."""
    if timing.interval_frac is not None:
        return timing.interval_frac
    spread = (timing.third_quartile_s - timing.first_quartile_s) / 2 / timing.median_s if timing.median_s else 0.0
    return max(spread, _UNKNOWN_FRAC / sqrt(timing.num))


def are_equal(one: Timing, other: Timing) -> bool:
    """Whether two medians are closer than their noise."""
    apart = abs(one.median_s - other.median_s)
    return apart <= max(noise_frac(one) * one.median_s, noise_frac(other) * other.median_s)


def _interval_frac(ordered: Sequence[float]) -> float | None:
    """Half the width of the median's interval between two order statistics, which assumes no kind of distribution."""
    num = len(ordered)
    lost = 0.0
    rank = -1  # how many values at either end are outside of the interval
    while rank + 1 < num // 2:
        lost += 2 * comb(num, rank + 1) / 2**num
        if lost > 1 - _CONFIDENCE:
            break
        rank += 1
    middle = median(ordered)
    if rank < 0 or middle <= 0:
        return None
    return (ordered[num - 1 - rank] - ordered[rank]) / 2 / middle
