"""The search without a forecast: doubling, then bisection, over the sizes that matter.

Where two fitting trials show how the peak grows, the size predicted to cross the budget is tried instead of the doubled
or the middle one, but only as long as the worst case stays within `2 * ceil(log2(limit)) + 2` probes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from autoaccum.records import Fit, Trial
from autoaccum.search.standing import Standing

CAUTION_PROBES = 4  # what a cautious search may spend beyond the bound on not running far past the budget


class Gap(NamedTuple):
    """What is still open: the rungs from `low` up to, not including, `high`.

    `predicted`: where the line through two measured peaks crosses the budget. `allowance`: probes that are not counted.
    """

    ladder: Sequence[int]
    low: int
    high: int
    now: Standing
    predicted: int | None
    cautious: bool
    allowance: int

    @property
    def lowest(self) -> int:
        """The rung to begin with: the lowest one, or twice a size that was too small to run."""
        doubled_floor = min(bisect_left(self.ladder, 2 * self.now.floor), self.high - 1)
        return max(self.low, doubled_floor)

    @property
    def doubled(self) -> int:
        """The rung of twice the largest size that fits."""
        return max(self.low, min(self.rung(2 * (self.now.best or 0)), self.high - 1))

    def rung(self, size: float) -> int:
        """The last rung that is no larger than this."""
        return bisect_right(self.ladder, size) - 1


def plain(gap: Gap) -> int:
    """The next rung by what was measured alone."""
    if gap.now.best is None:
        return gap.lowest if gap.now.ceiling is None else (gap.low + gap.high) // 2
    return gallop(gap) if gap.now.ceiling is None else narrow(gap)


def gallop(gap: Gap) -> int:
    """Nothing failed nearby: double, or try the first size that is predicted to fail when that comes sooner."""
    first_above = gap.doubled if gap.predicted is None else max(gap.low, gap.rung(gap.predicted) + 1)
    if first_above >= gap.doubled:
        return gap.doubled
    spent = gap.now.num_probes + 1
    allowance = gap.allowance + (CAUTION_PROBES if gap.cautious else 0)
    affordable = spent <= ceil(log2(max(gap.ladder[first_above] / gap.ladder[0], 1))) + 1 + allowance
    return first_above if affordable else gap.doubled


def narrow(gap: Gap) -> int:
    """Between a fit and a failure: the middle, or the predicted limit while the worst case can afford to be wrong."""
    ladder, low, high, now, predicted, _, allowance = gap
    middle = (low + high) // 2
    if predicted is None or now.best is None or predicted < now.best or predicted >= ladder[high - 1] + 1:
        return middle
    guess = min(max(low, gap.rung(predicted)), high - 1)
    spent = now.num_probes + 1 - allowance
    if_too_large = spent + _bisections(guess - low) <= most_probes(now.best / ladder[0])
    if_it_fits = spent + _bisections(high - guess - 1) <= most_probes(ladder[guess] / ladder[0])
    return guess if if_too_large and if_it_fits else middle


def predicted_limit(trials: Sequence[Trial], now: Standing, budget_bytes: int | None) -> int | None:
    """The largest size whose peak should stay inside the budget, on the line through the nearest two known peaks.

    Peaks are convex in the size (the largest of many affine terms), so beyond both points the line is too low, never
    too high: this size is an upper estimate there.
    """
    peaks = {
        trial.candidate.micro_batch: trial.outcome.peak_bytes
        for trial in trials
        if isinstance(trial.outcome, Fit) and trial.candidate.micro_batch <= (now.best or 0)
    }
    if now.ceiling is not None and now.ceiling_peak_bytes is not None:
        peaks[now.ceiling] = now.ceiling_peak_bytes
    if budget_bytes is None or len(peaks) < 2 or now.best is None or now.best_peak_bytes is None:
        return None
    other = max(size for size in peaks if size != now.best)
    slope = (peaks[other] - now.best_peak_bytes) / (other - now.best)
    return now.best + int((budget_bytes - now.best_peak_bytes) / slope) if slope > 0 else None


def most_probes(limit: float) -> int:
    """What doubling and bisection need at most to find a limit of this many steps of the ladder."""
    return 2 * ceil(log2(max(limit, 1))) + 2


def _bisections(num_candidates: int) -> int:
    return ceil(log2(num_candidates + 1))
