"""A forecast, corrected by what was measured, and how often it has disappointed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from typing import NamedTuple, Protocol

from autoaccum.records import Fit, Refused, Trial
from autoaccum.search.plain import Gap
from autoaccum.search.standing import peaks_of, standing

_DISAPPOINTMENTS = 3  # so many, and the forecast is not asked again
_WILD_FRAC = 0.1  # of the budget: a measured peak further than this from its prediction disappoints
_ABSURD = 2  # budgets: one peak that far from its prediction, and the forecast is not asked again
_BEYOND_BYTES = 2**60  # more than any device has; larger predictions would only overflow


class Forecast(Protocol):
    """Predicted peaks, from a trace that ran nothing. May be wrong in every way."""

    @property
    def error_frac(self) -> float:
        """By how much the predictor is known to err: 0.03 when growth may be 3 % more than it says."""

    def peak_bytes(self, size: int) -> int:
        """The predicted peak of a micro-batch of this many rows."""


class Guide:
    """The forecast, corrected by what was measured, and how often it has disappointed."""

    def __init__(self, trials: Sequence[Trial], forecast: Forecast, budget_bytes: int) -> None:
        self.trials, self.budget_bytes, self.error_frac = trials, budget_bytes, forecast.error_frac
        self.raw_bytes = cache(lambda size: max(-_BEYOND_BYTES, min(forecast.peak_bytes(size), _BEYOND_BYTES)))
        self.has_slope = len(peaks_of(trials)) > 1
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

    def limit(self, gap: Gap, margin_frac: float = 0.0) -> int:
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
    measured = peaks_of([trial]).get(trial.candidate.micro_batch)
    error = 0 if measured is None else abs(measured - predicted) / max(budget_bytes, 1)
    return _Surprise(
        too_low=expected and not fits,
        too_high=fits and not expected,
        wild=error > _WILD_FRAC,
        calibrated=bool(peaks_of(before)),
        absurd=error > _ABSURD,
    )


def _corrected(trials: Sequence[Trial], raw_bytes: Callable[[int], int], budget_bytes: int) -> Callable[[int], float]:
    """The forecast plus its residual: constant after one measured peak, linear in the size after two."""
    peaks = peaks_of(trials)
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
