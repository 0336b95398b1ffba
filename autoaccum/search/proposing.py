"""The next size to try: by a forecast where there is one, else by what was measured alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from autoaccum.records import Fit, Trial
from autoaccum.search.guide import Forecast, Guide
from autoaccum.search.guided import FORECAST_PROBES, guided
from autoaccum.search.plain import CAUTION_PROBES, Gap, most_probes, plain, predicted_limit
from autoaccum.search.standing import peaks_of, standing

_ROUNDING_BYTES = 2**16  # blocks are rounded, which tiny peaks show
NOISE_FRAC = 0.01  # of the budget: resident memory and allocator reserves are not exactly convex


def propose(
    trials: Sequence[Trial],
    ladder: Sequence[int],
    *,
    budget_bytes: int | None = None,
    cautious: bool = False,
    tolerance_frac: float = 0.0,
    forecast: Forecast | None = None,
    trust: bool = False,
    noise_frac: float = NOISE_FRAC,
) -> int | None:
    """The next size to try, None when the answer stands.

    Args:
        trials: Everything run so far under one lever setting, in any order; with a forecast, in the order they ran.
        ladder: The sizes worth trying, ascending; a `range` will do.
        budget_bytes: What a peak must not exceed. None: neither peaks nor a forecast are used.
        cautious: Do not run a size predicted to be far past the budget, even where that costs up to four probes
            more. For devices on which running out of memory is dangerous.
        tolerance_frac: Stop when the largest size is known to within this fraction of itself. 0: exactly.
        forecast: Predicted peaks, where to look first. A wrong one changes no answer.
        noise_frac: By how much measured peaks of a device wander, as a fraction of the budget.
        trust: With a forecast, stop without a failure when the measured peaks alone show that the next size cannot fit.
    """
    now = standing(trials)
    low = bisect_right(ladder, max(now.best or 0, now.floor))
    high = len(ladder) if now.ceiling is None else bisect_left(ladder, now.ceiling)
    if low >= high or now.num_probes >= probe_ceiling(ladder):
        return None
    if now.best is not None and now.ceiling is not None and now.ceiling - now.best <= tolerance_frac * now.best:
        return None
    gap = Gap(ladder, low, high, now, predicted_limit(trials, now, budget_bytes), cautious, allowance=0)
    if forecast is None or budget_bytes is None:
        return ladder[plain(gap)]
    if trust and is_closed_by_convexity(trials, ladder, budget_bytes, noise_frac):
        return None
    guide = Guide(trials, forecast, budget_bytes)
    if guide.says_nothing(ladder):
        return ladder[plain(gap)]
    return ladder[guided(gap._replace(allowance=FORECAST_PROBES), guide, trust, tolerance_frac)]


def is_closed_by_convexity(
    trials: Sequence[Trial], ladder: Sequence[int], budget_bytes: int, noise_frac: float = NOISE_FRAC
) -> bool:
    """Whether the measured peaks alone show that the size after the largest one that fits cannot fit.

    A peak is the largest of many sums that are affine in the size, so it is convex: the line through two measured peaks is
    a lower bound beyond them. The further the line is prolonged, the more certain it has to be. Only probes count, since
    they all run alike.
    """
    now = standing(trials)
    best, following = now.best, bisect_right(ladder, now.best or 0)
    if best is None or following == len(ladder) or (now.ceiling is not None and now.ceiling <= ladder[following]):
        return False
    peaks = peaks_of([trial for trial in trials if isinstance(trial.outcome, Fit) and trial.purpose == "probe"])
    ahead = ladder[following] - best

    def excess(other: int) -> float:
        lengths = ahead / (best - other)
        line = peaks[best] + (peaks[best] - peaks[other]) * lengths
        return line - budget_bytes - (noise_frac * budget_bytes + _ROUNDING_BYTES) * max(1, lengths)

    return best in peaks and any(excess(other) > 0 for other in peaks if other < best)


def probe_ceiling(ladder: Sequence[int]) -> int:
    """More probes than any sound search over this ladder needs; the search ends there whatever happens."""
    return most_probes(max(ladder[-1] / ladder[0], len(ladder))) + CAUTION_PROBES + FORECAST_PROBES + 4 if ladder else 0
