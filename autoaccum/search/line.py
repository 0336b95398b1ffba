"""The line through two measured peaks as a forecast: all that is needed where trials take less time than a trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from autoaccum.records import Trial
from autoaccum.search.standing import peaks_of, standing

_STRIDE = 4  # how much larger the next size is
_SHORT_STRIDE = 2  # where all that one size takes, so many times, would not fit
_FAR = 16  # a line is followed to no more than so many times the growth that was measured
_CAUTION = 3  # a size is tried only where so many times its predicted growth fits


class Line(NamedTuple):
    """Peaks on a straight line; a `Forecast`. True peaks are convex in the size, so beyond both points it is too low.

    Attributes:
        size: Rows of the larger of the two sizes.
        peak_at_size: Its peak, in bytes.
        bytes_per_row: How much each further row adds.
    """

    size: int
    peak_at_size: int
    bytes_per_row: float
    error_frac: float = 0.05

    def peak_bytes(self, size: int) -> int:
        """The peak of this many rows."""
        return int(self.peak_at_size + self.bytes_per_row * (size - self.size))

    def crossing(self, budget_bytes: int) -> float:
        """The size at which the line reaches the budget."""
        return self.size + (budget_bytes - self.peak_at_size) / self.bytes_per_row


def line_through(trials: Sequence[Trial], budget_bytes: int) -> Line | None:
    """The line through the smallest and the largest peak; None while too little of the way to the budget was measured."""
    peaks = peaks_of(trials)
    if len(peaks) < 2:
        return None
    low, high = min(peaks), max(peaks)
    growth = peaks[high] - peaks[low]
    if growth <= 0 or growth * _FAR < budget_bytes - peaks[high]:
        return None
    return Line(high, peaks[high], growth / (high - low))


def next_to_measure(trials: Sequence[Trial], ladder: Sequence[int], *, budget_bytes: int, held_bytes: int) -> int | None:
    """The next larger size on the way to a line; None at the end of the ladder, or where it might be far past the budget.

    Args:
        trials: All of them fit.
        ladder: The sizes that may be tried, ascending.
        held_bytes: Before the first trial.
    """
    best = standing(trials).best
    if best is None:
        return ladder[0]
    peaks = peaks_of(trials)
    may_be_near = len(peaks) == 1 and held_bytes + (peaks[best] - held_bytes) * _STRIDE > budget_bytes
    size = ladder[bisect_right(ladder, best * (_SHORT_STRIDE if may_be_near else _STRIDE)) - 1]
    growth = (peaks[best] - peaks[min(peaks)]) / max(1, best - min(peaks)) * (size - best)
    return size if size > best and peaks[best] + _CAUTION * growth <= budget_bytes else None
