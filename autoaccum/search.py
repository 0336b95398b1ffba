"""Which micro-batch to try next. A pure function of the trials so far; the log is the whole state.

Doubling, then bisection, over the sizes that matter (a sorted ladder, possibly a range of a million). Where two fitting
trials show how the peak grows, the size predicted to cross the budget is tried instead of the doubled or the middle
one, but only as long as the worst case stays within `2 * ceil(log2(limit)) + 2` probes.
Knows nothing of devices, levers or time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil, log2
from typing import assert_never

from autoaccum.records import Fit, OutOfMemory, Record, Refused, Trial

_CAUTION_PROBES = 4  # what a cautious search may spend beyond the bound on not running far past the budget


class Standing(Record, frozen=True, kw_only=True):
    """What a log of trials says.

    `best`: the largest size that fits and lies below every failure, with its peak. `ceiling`: the smallest size that is
    too large, with its peak where it ran to the end. `floor`: the largest size that is too small to run at all.
    """

    best: int | None = None
    best_peak_bytes: int | None = None
    ceiling: int | None = None
    ceiling_peak_bytes: int | None = None
    floor: int = 0
    num_probes: int = 0


def standing(trials: Sequence[Trial]) -> Standing:
    """Sum up the log. A size that both fitted and failed counts as failed."""
    fits: dict[int, int] = {}
    failures: dict[int, int | None] = {}
    floor = 0
    for trial in trials:
        size = trial.candidate.micro_batch
        match trial.outcome:
            case Fit(peak_bytes=peak):
                fits[size] = max(peak, fits.get(size, 0))
            case OutOfMemory(peak_bytes=peak_or_none):
                failures[size] = peak_or_none
            case Refused(bound="floor"):
                floor = max(floor, size)
            case Refused():
                failures[size] = None
            case _:
                assert_never(trial.outcome)
    ceiling = min(failures, default=None)
    best = max((size for size in fits if ceiling is None or size < ceiling), default=None)
    return Standing(
        best=best,
        best_peak_bytes=None if best is None else fits[best],
        ceiling=ceiling,
        ceiling_peak_bytes=None if ceiling is None else failures[ceiling],
        floor=floor,
        num_probes=sum(trial.purpose == "probe" for trial in trials),
    )


def propose(
    trials: Sequence[Trial],
    ladder: Sequence[int],
    *,
    budget_bytes: int | None = None,
    cautious: bool = False,
    tolerance_frac: float = 0.0,
) -> int | None:
    """The next size to try, None when the answer stands.

    Args:
        trials: Everything run so far under one lever setting, in any order.
        ladder: The sizes worth trying, ascending; a `range` will do.
        budget_bytes: What a peak must not exceed. None: peaks are not used.
        cautious: Do not double to a size predicted to be far past the budget, even where that costs up to four probes
            more. For devices on which running out of memory is dangerous.
        tolerance_frac: Stop when the largest size is known to within this fraction of itself. 0: exactly.
    """
    now = standing(trials)
    low = bisect_right(ladder, max(now.best or 0, now.floor))
    high = len(ladder) if now.ceiling is None else bisect_left(ladder, now.ceiling)
    if low >= high or now.num_probes >= probe_ceiling(ladder):
        return None
    if now.best is None:
        doubled_floor = min(bisect_left(ladder, 2 * now.floor), high - 1)
        return ladder[max(low, doubled_floor)] if now.ceiling is None else ladder[(low + high) // 2]
    if now.ceiling is not None and now.ceiling - now.best <= tolerance_frac * now.best:
        return None
    predicted = None if budget_bytes is None else _predicted_limit(trials, now, budget_bytes)
    if now.ceiling is None:
        doubled = max(low, bisect_right(ladder, 2 * now.best) - 1)
        return ladder[_gallop(ladder, low, doubled, predicted, now, cautious)]
    return ladder[_narrow(ladder, low, high, predicted, now)]


def probe_ceiling(ladder: Sequence[int]) -> int:
    """More probes than any sound search over this ladder needs; the search ends there whatever happens."""
    return _most_probes(max(ladder[-1] / ladder[0], len(ladder))) + 8 if ladder else 0


def _most_probes(limit: float) -> int:
    """What doubling and bisection need at most to find a limit of this many steps of the ladder."""
    return 2 * ceil(log2(max(limit, 1))) + 2


def _predicted_limit(trials: Sequence[Trial], now: Standing, budget_bytes: int) -> int | None:
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
    if len(peaks) < 2 or now.best is None or now.best_peak_bytes is None:
        return None
    other = max(size for size in peaks if size != now.best)
    slope = (peaks[other] - now.best_peak_bytes) / (other - now.best)
    return now.best + int((budget_bytes - now.best_peak_bytes) / slope) if slope > 0 else None


def _gallop(ladder: Sequence[int], low: int, doubled: int, predicted: int | None, now: Standing, cautious: bool) -> int:
    """Nothing failed yet: double, or try the first size that is predicted to fail when that comes sooner."""
    first_above = doubled if predicted is None else max(low, bisect_right(ladder, predicted))
    if first_above >= doubled:
        return doubled
    spent = now.num_probes + 1
    allowance = _CAUTION_PROBES if cautious else 0
    affordable = spent <= ceil(log2(max(ladder[first_above] / ladder[0], 1))) + 1 + allowance
    return first_above if affordable else doubled


def _narrow(ladder: Sequence[int], low: int, high: int, predicted: int | None, now: Standing) -> int:
    """Between a fit and a failure: the middle, or the predicted limit while the worst case can afford to be wrong."""
    middle = (low + high) // 2
    if predicted is None or now.best is None or predicted < now.best or predicted >= ladder[high - 1] + 1:
        return middle
    guess = min(max(low, bisect_right(ladder, predicted) - 1), high - 1)
    spent = now.num_probes + 1
    if_too_large = spent + _bisections(guess - low) <= _most_probes(now.best / ladder[0])
    if_it_fits = spent + _bisections(high - guess - 1) <= _most_probes(ladder[guess] / ladder[0])
    return guess if if_too_large and if_it_fits else middle


def _bisections(num_candidates: int) -> int:
    return ceil(log2(num_candidates + 1))
