"""Which micro-batch to try next. A pure function of the trials so far; the log is the whole state.

Without a forecast: doubling, then bisection, over the sizes that matter (a sorted ladder, possibly a range of a million).
Where two fitting trials show how the peak grows, the size predicted to cross the budget is tried instead of the doubled
or the middle one, but only as long as the worst case stays within `2 * ceil(log2(limit)) + 2` probes.
With a forecast: a safe size, then the predicted limit, corrected by what was measured; a forecast that is wrong costs a
few probes and never the answer. Knows nothing of devices, levers or time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from math import ceil, log2
from typing import NamedTuple, Protocol, assert_never

from autoaccum.records import Fit, OutOfMemory, Record, Refused, Trial

_CAUTION_PROBES = 4  # what a cautious search may spend beyond the bound on not running far past the budget
_FORECAST_PROBES = 4  # what a wrong forecast may cost beyond the search without one
_DISAPPOINTMENTS = 3  # so many, and the forecast is not asked again
_WILD_FRAC = 0.1  # of the budget: a measured peak further than this from its prediction disappoints
_ABSURD = 2  # budgets: one peak that far from its prediction, and the forecast is not asked again
_SAFE_PART = 4  # a cautious search begins with this part of the predicted limit, and grows by no more at a time
_FEW_RUNGS = 3  # a limit among the lowest few sizes is tried at once
_BEYOND_BYTES = 2**60  # more than any device has; larger predictions would only overflow
_CONVEXITY_FRAC = 0.01  # of the budget: resident memory and allocator reserves are not exactly convex


class Forecast(Protocol):
    """Predicted peaks, from a trace that ran nothing. May be wrong in every way."""

    @property
    def error_frac(self) -> float:
        """By how much the predictor is known to err: 0.03 when growth may be 3 % more than it says."""

    def peak_bytes(self, size: int) -> int:
        """The predicted peak of a micro-batch of this many rows."""


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
    forecast: Forecast | None = None,
    trust: bool = False,
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
        trust: With a forecast, stop without a failure when the measured peaks alone show that the next size cannot fit.
    """
    now = standing(trials)
    low = bisect_right(ladder, max(now.best or 0, now.floor))
    high = len(ladder) if now.ceiling is None else bisect_left(ladder, now.ceiling)
    if low >= high or now.num_probes >= probe_ceiling(ladder):
        return None
    if now.best is not None and now.ceiling is not None and now.ceiling - now.best <= tolerance_frac * now.best:
        return None
    gap = _Gap(ladder, low, high, now, _predicted_limit(trials, now, budget_bytes), cautious, allowance=0)
    if forecast is None or budget_bytes is None:
        return ladder[_plain(gap)]
    if trust and is_closed_by_convexity(trials, ladder, budget_bytes):
        return None
    guide = _Guide(trials, forecast, budget_bytes)
    if guide.says_nothing(ladder):
        return ladder[_plain(gap)]
    return ladder[_guided(gap._replace(allowance=_FORECAST_PROBES), guide, trust, tolerance_frac)]


def is_closed_by_convexity(trials: Sequence[Trial], ladder: Sequence[int], budget_bytes: int) -> bool:
    """Whether the measured peaks alone show that the size after the largest one that fits cannot fit.

    A peak is the largest of many sums that are affine in the size, so it is convex: the line through two measured peaks is
    a lower bound beyond them. The further the line is prolonged, the more certain it has to be. Only probes count, since
    they all run alike.
    """
    now = standing(trials)
    best, following = now.best, bisect_right(ladder, now.best or 0)
    if best is None or following == len(ladder) or (now.ceiling is not None and now.ceiling <= ladder[following]):
        return False
    peaks = _peaks([trial for trial in trials if isinstance(trial.outcome, Fit) and trial.purpose == "probe"])
    ahead = ladder[following] - best

    def excess(other: int) -> float:
        lengths = ahead / (best - other)
        line = peaks[best] + (peaks[best] - peaks[other]) * lengths
        return line - budget_bytes * (1 + _CONVEXITY_FRAC * max(1, lengths))

    return best in peaks and any(excess(other) > 0 for other in peaks if other < best)


def probe_ceiling(ladder: Sequence[int]) -> int:
    """More probes than any sound search over this ladder needs; the search ends there whatever happens."""
    return _most_probes(max(ladder[-1] / ladder[0], len(ladder))) + _CAUTION_PROBES + _FORECAST_PROBES + 4 if ladder else 0


def _most_probes(limit: float) -> int:
    """What doubling and bisection need at most to find a limit of this many steps of the ladder."""
    return 2 * ceil(log2(max(limit, 1))) + 2


def _predicted_limit(trials: Sequence[Trial], now: Standing, budget_bytes: int | None) -> int | None:
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


# -- without a forecast


class _Gap(NamedTuple):
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


def _plain(gap: _Gap) -> int:
    """The next rung by what was measured alone."""
    if gap.now.best is None:
        return gap.lowest if gap.now.ceiling is None else (gap.low + gap.high) // 2
    return _gallop(gap) if gap.now.ceiling is None else _narrow(gap)


def _gallop(gap: _Gap) -> int:
    """Nothing failed nearby: double, or try the first size that is predicted to fail when that comes sooner."""
    first_above = gap.doubled if gap.predicted is None else max(gap.low, gap.rung(gap.predicted) + 1)
    if first_above >= gap.doubled:
        return gap.doubled
    spent = gap.now.num_probes + 1
    allowance = gap.allowance + (_CAUTION_PROBES if gap.cautious else 0)
    affordable = spent <= ceil(log2(max(gap.ladder[first_above] / gap.ladder[0], 1))) + 1 + allowance
    return first_above if affordable else gap.doubled


def _narrow(gap: _Gap) -> int:
    """Between a fit and a failure: the middle, or the predicted limit while the worst case can afford to be wrong."""
    ladder, low, high, now, predicted, _, allowance = gap
    middle = (low + high) // 2
    if predicted is None or now.best is None or predicted < now.best or predicted >= ladder[high - 1] + 1:
        return middle
    guess = min(max(low, gap.rung(predicted)), high - 1)
    spent = now.num_probes + 1 - allowance
    if_too_large = spent + _bisections(guess - low) <= _most_probes(now.best / ladder[0])
    if_it_fits = spent + _bisections(high - guess - 1) <= _most_probes(ladder[guess] / ladder[0])
    return guess if if_too_large and if_it_fits else middle


def _bisections(num_candidates: int) -> int:
    return ceil(log2(num_candidates + 1))


# -- with a forecast


class _Guide:
    """The forecast, corrected by what was measured, and how often it has disappointed."""

    def __init__(self, trials: Sequence[Trial], forecast: Forecast, budget_bytes: int) -> None:
        self.trials, self.budget_bytes, self.error_frac = trials, budget_bytes, forecast.error_frac
        self.raw_bytes = cache(lambda size: max(-_BEYOND_BYTES, min(forecast.peak_bytes(size), _BEYOND_BYTES)))
        self.has_slope = len(_peaks(trials)) > 1
        self.peak_bytes = _corrected(trials, self.raw_bytes, budget_bytes)
        self._surprises = [
            _surprise(trial, trials[:index], self.raw_bytes, budget_bytes) for index, trial in enumerate(trials)
        ]

    def says_nothing(self, ladder: Sequence[int]) -> bool:
        """Whether this cannot be a peak: it is nothing, or falls."""
        return self.raw_bytes(ladder[-1]) <= 0 or self.raw_bytes(ladder[-1]) < self.raw_bytes(ladder[0])

    @property
    def is_refuted(self) -> bool:
        """Whether it disappointed too often, or once beyond all measure."""
        return any(surprise.absurd for surprise in self._surprises) or self.disappointments >= _DISAPPOINTMENTS

    @property
    def disappointments(self) -> int:
        """Failures predicted to fit, and measured peaks far from their prediction; the first peak only calibrates."""
        return sum(surprise.too_low or (surprise.wild and surprise.calibrated) for surprise in self._surprises)

    @property
    def is_wild(self) -> bool:
        """Whether the latest peak was far from its prediction."""
        return bool(self._surprises) and self._surprises[-1].wild

    @property
    def too_high(self) -> int:
        """How many of the latest trials, in a row, fitted though they were predicted to fail."""
        return sum(1 for _ in takewhile(lambda surprise: surprise.too_high, reversed(self._surprises)))

    @property
    def too_low(self) -> int:
        """How many failed though they were predicted to fit."""
        return sum(surprise.too_low for surprise in self._surprises)

    def limit(self, gap: _Gap, margin_frac: float = 0.0) -> int:
        """The last open rung that is predicted to fit, `gap.low - 1` when none is."""
        best, budget_bytes = gap.now.best, float(self.budget_bytes)

        def upper(size: int) -> float:
            return self.upper_bytes(size, best, margin_frac)

        return bisect_right(gap.ladder, budget_bytes, gap.low, gap.high, key=upper) - 1

    def upper_bytes(self, size: int, best: int | None, margin_frac: float) -> float:
        """The prediction with a margin on what is not measured: the growth since the largest size that fits."""
        unmeasured = 0 if best is None else abs(self.raw_bytes(size) - self.raw_bytes(best))
        return self.peak_bytes(size) + margin_frac * unmeasured


class _Surprise(NamedTuple):
    """How one trial differed from what was predicted just before it ran."""

    too_low: bool = False
    too_high: bool = False
    wild: bool = False
    calibrated: bool = False
    absurd: bool = False


def _surprise(trial: Trial, before: Sequence[Trial], raw_bytes: Callable[[int], int], budget_bytes: int) -> _Surprise:
    """Compare one trial with the forecast as the trials before it had corrected it."""
    if isinstance(trial.outcome, Refused) and trial.outcome.bound == "floor":
        return _Surprise()
    predicted = _corrected(before, raw_bytes, budget_bytes)(trial.candidate.micro_batch)
    fits, expected = isinstance(trial.outcome, Fit), predicted <= budget_bytes
    measured = _peaks([trial]).get(trial.candidate.micro_batch)
    error = 0 if measured is None else abs(measured - predicted) / max(budget_bytes, 1)
    return _Surprise(
        too_low=expected and not fits,
        too_high=fits and not expected,
        wild=error > _WILD_FRAC,
        calibrated=bool(_peaks(before)),
        absurd=error > _ABSURD,
    )


def _corrected(trials: Sequence[Trial], raw_bytes: Callable[[int], int], budget_bytes: int) -> Callable[[int], float]:
    """The forecast plus its residual: constant after one measured peak, linear in the size after two."""
    peaks = _peaks(trials)
    if not peaks:
        return raw_bytes
    now = standing(trials)
    anchor = now.best if now.best is not None else min(peaks)
    residual = peaks[anchor] - raw_bytes(anchor)
    other = _second(peaks, anchor, anchor // 64 if now.ceiling is None else now.ceiling - anchor)
    if other is not None:
        slope = (peaks[other] - raw_bytes(other) - residual) / (other - anchor)
        return lambda size: raw_bytes(size) + residual + slope * (size - anchor)
    if residual <= _WILD_FRAC * budget_bytes:
        return lambda size: raw_bytes(size) + residual
    # Far too low: then the residual is more likely a part of the peak than a constant.
    return lambda size: raw_bytes(size) + residual * max(1.0, raw_bytes(size) / max(raw_bytes(anchor), 1))


def _second(peaks: dict[int, int], anchor: int, distance: int) -> int | None:
    """The measured size for the residual's slope: the next one above, else below, but not so near that noise counts."""
    above = [size for size in peaks if size > anchor]
    below = [size for size in peaks if size < anchor]
    apart = [size for size in below if anchor - size >= distance]
    return min(above, default=None) or max(apart, default=None) or min(below, default=None)


def _peaks(trials: Sequence[Trial]) -> dict[int, int]:
    """Every peak that was measured to its end, by size."""
    peaks: dict[int, int] = {}
    for trial in trials:
        match trial.outcome:
            case Fit(peak_bytes=peak) | OutOfMemory(cause="budget", peak_bytes=int(peak)):
                size = trial.candidate.micro_batch
                peaks[size] = max(peak, peaks.get(size, 0))
    return peaks


def _guided(gap: _Gap, guide: _Guide, trust: bool, tolerance_frac: float) -> int:
    """The next rung by the forecast, while it is worth following, else by what was measured alone."""
    best, ladder = gap.now.best, gap.ladder
    # Doubling up to `best` would have cost these probes, so a forecast that led here may spend them.
    saved = 0 if best is None else max(0, int(log2(max(best / ladder[0], 1))) - 1)
    if guide.is_refuted or gap.now.num_probes >= _FORECAST_PROBES + saved:
        return _plain_upwards(gap, guide)
    if best is not None:
        return _from_fit(gap, guide, trust, tolerance_frac)
    return _first(gap, guide, trust) if gap.now.ceiling is None else _down(gap, guide)


def _plain_upwards(gap: _Gap, guide: _Guide) -> int:
    """As without a forecast, but a failure far above, which only a forecast could lead to, is not halved towards."""
    if gap.now.best is None:
        return gap.lowest
    reach = 2 * gap.now.best
    # The failures before anything fitted are what the forecast cost; without any, it cost at most what it may.
    astray = sum(1 for _ in takewhile(lambda trial: isinstance(trial.outcome, OutOfMemory), guide.trials))
    gap = gap._replace(allowance=astray or _FORECAST_PROBES)
    if gap.now.ceiling is not None and gap.now.ceiling <= reach:
        return _narrow(gap)
    below = Standing(best=gap.now.best, best_peak_bytes=gap.now.best_peak_bytes)
    predicted = _predicted_limit(guide.trials, below, guide.budget_bytes)
    return min(_gallop(gap._replace(predicted=predicted)), gap.high - 1)


def _is_slow(gap: _Gap, trials: Sequence[Trial]) -> bool:
    """Whether the latest two trials left more than half of what was open between a fit and a failure."""
    before = standing(trials[:-2])
    if before.best is None or before.ceiling is None:
        return False
    was_open = bisect_left(gap.ladder, before.ceiling) - bisect_right(gap.ladder, before.best)
    return 2 * (gap.high - gap.low) > was_open


def _first(gap: _Gap, guide: _Guide, trust: bool) -> int:
    """Nothing ran yet: the top if it needs little, a limit among the lowest sizes, else a safe part of the limit.

    On a cautious device the top, or the growth to the safe part, still fits when three times of it is needed.
    """
    ladder, top = gap.ladder, gap.high - 1
    top_bytes = guide.raw_bytes(ladder[top])
    if gap.cautious and top_bytes == guide.raw_bytes(ladder[gap.low]):
        return gap.lowest  # flat: true where the optimizer step needs the most, but nothing to jump by
    if top_bytes <= (0.3 if gap.cautious else 0.6) * guide.budget_bytes:
        return top
    limit = guide.limit(gap)
    if limit < gap.low + _FEW_RUNGS and not gap.cautious and not trust:
        return max(gap.lowest, limit)
    return max(gap.lowest, gap.rung(ladder[max(limit, gap.low)] // (_SAFE_PART if gap.cautious else 2)))


def _down(gap: _Gap, guide: _Guide) -> int:
    """A predicted size failed and nothing has run yet: far down, and soon to the lowest."""
    failures = [trial for trial in guide.trials if not isinstance(trial.outcome, Fit)]
    unclear = any(isinstance(trial.outcome, OutOfMemory) and trial.outcome.cause == "unclear" for trial in failures)
    if len(failures) >= 2 or unclear:  # unclear: whether it is memory at all, only the lowest size can tell
        return gap.lowest
    assert gap.now.ceiling is not None
    over = max((gap.now.ceiling_peak_bytes or 0) / max(guide.budget_bytes, 1), 2)
    return min(max(gap.lowest, gap.rung(gap.now.ceiling / (2 * over))), gap.high - 1)


def _from_fit(gap: _Gap, guide: _Guide, trust: bool, tolerance_frac: float) -> int:
    """Something fits: the corrected limit, or up from it by doubling steps where the correction was too high."""
    low, high, now, error_frac = gap.low, gap.high, gap.now, guide.error_frac
    assert now.best is not None
    if now.ceiling is not None and (
        guide.too_low >= 2 or guide.upper_bytes(now.ceiling, now.best, error_frac) <= guide.budget_bytes
    ):
        return _plain_upwards(gap, guide)  # it is further off than it should be
    if now.ceiling is not None and _is_slow(gap, guide.trials):
        return (low + high) // 2 if now.ceiling <= 2 * now.best else _plain_upwards(gap, guide)
    limit, within = guide.limit(gap), gap.rung(now.best * (1 + tolerance_frac))
    if max(low, limit) <= within:
        return min(within, high - 1)  # a failure here ends the search
    if limit < low:
        steps = low + (1 << guide.too_high) - 1
        return min(steps, high - 1) if now.ceiling is None else min(steps, (low + high) // 2)
    certain = max(low, guide.limit(gap._replace(high=limit + 1), error_frac))
    # One rung is not worth a probe of its own; nor is more once two peaks have corrected the slope as well.
    refuted = now.ceiling is not None and guide.peak_bytes(now.ceiling) <= guide.budget_bytes
    careful = refuted or (not guide.has_slope and (trust or limit - certain > 1))
    next_best = certain if careful else limit
    return min(next_best, _farthest(gap, guide)) if gap.cautious else next_best


def _farthest(gap: _Gap, guide: _Guide) -> int:
    """How far a cautious search may go: to where three times the predicted growth still fits, or to a few times the size."""
    best = gap.now.best or 0
    few_times = max(gap.low, gap.rung(best * (2 if guide.is_wild else _SAFE_PART)))
    says_little = guide.is_wild or guide.raw_bytes(gap.ladder[gap.high - 1]) <= guide.raw_bytes(best)
    return few_times if says_little else max(few_times, guide.limit(gap, margin_frac=2.0))
