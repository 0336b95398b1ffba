"""What fits under which levers: by what ran where that tells, else by predictions, corrected by what was measured."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import final

import msgspec

from autoaccum.levers import Space
from autoaccum.prediction.forecast import Forecast
from autoaccum.records import AS_IT_IS, Fit, Levers, Refused
from autoaccum.search.standing import peaks_of
from autoaccum.session import Search
from autoaccum.tradeoffs.points import Point, alike, with_blocks

_TRACING_S = 60.0  # after so long, no further family of settings is predicted, and none that is not is run


@final
class Foresight:
    """Peaks of one search at any setting of the levers."""

    def __init__(self, search: Search, space: Space) -> None:
        self._search, self._space = search, space
        self.raw_peak = lru_cache(maxsize=None)(self._raw_peak)

    def is_affordable(self, family: Levers) -> bool:
        """Whether there is a prediction of this family, or time left to make one."""
        if _plain(family) in self._search.forecasts.known():
            return True
        return self._search.forecasts.tracing_s <= _TRACING_S and not self._search.is_late()

    def blocks_for(self, family: Levers, size: int) -> int | None:
        """The smallest number of checkpointed blocks with which the size fits, None where it never does.

        All of them where nothing is predicted: each smaller number would be a trial that may fail.
        """
        if family.checkpointing == "off":
            return 0 if self.fits(family, size) else None
        total = self._space.num_blocks
        if not self.fits(with_blocks(family, total), size):
            return None
        known = self.raw_peak(with_blocks(family, total), size) is not None
        return self.fewest_predicted(family, size, total) if known else total

    def fewest_predicted(self, family: Levers, size: int, enough: int) -> int:
        """The smallest number of checkpointed blocks that is expected to do, given one that does."""
        low, high = 0, enough  # `low` is taken not to fit: with no block it is another family
        while high - low > 1:
            middle = min(max(self._interpolated(family, size, low, high), low + 1), high - 1)
            low, high = (low, middle) if self.fits(with_blocks(family, middle), size) else (middle, high)
        return high

    def _interpolated(self, family: Levers, size: int, low: int, high: int) -> int:
        """Peaks of blocks that are alike fall evenly."""
        above, below = (self.peak(with_blocks(family, blocks), size) for blocks in (low, high))
        if above is None or below is None or above <= below:
            return (low + high) // 2
        return low + ceil((above - self._search.guide_bytes) / (above - below) * (high - low))

    def fits(self, levers: Levers, size: int) -> bool:
        """By what ran, where something ran that tells; else by the prediction; without one, it may."""
        for trial in self._search.log.trials:
            other, blocks = trial.candidate, trial.candidate.levers.checkpointed_blocks
            if not alike(other.levers, levers) or (isinstance(trial.outcome, Refused) and trial.outcome.bound == "floor"):
                continue
            if isinstance(trial.outcome, Fit):
                if other.micro_batch >= size and blocks <= levers.checkpointed_blocks:
                    return True
            elif other.micro_batch <= size and blocks >= levers.checkpointed_blocks:
                return False
        peak = self.peak(levers, size)
        return peak is None or peak <= self._search.guide_bytes

    def peak(self, levers: Levers, size: int) -> int | None:
        """The expected peak: the prediction, and by how much measured peaks differ from theirs."""
        raw = self.raw_peak(levers, size)
        return None if raw is None else raw + self._offset(levers)

    def known_peak(self, levers: Levers, size: int) -> int | None:
        """The prediction, where the traces that it takes were made already."""
        known, needed = self._search.forecasts.known(), {_plain(levers)}
        if levers != _plain(levers):
            needed |= {AS_IT_IS, Levers(optimizer_impl=levers.optimizer_impl)}
        return self.raw_peak(levers, size) if needed <= set(known) else None

    def _raw_peak(self, levers: Levers, size: int) -> int | None:
        plain = _plain(levers)
        forecast = self._forecast(plain)
        if forecast is None or plain == levers:
            return None if forecast is None else forecast.peak_bytes(size)
        # The optimizer's step is the same whatever else is turned, so that its implementations are traced only once.
        here, there = self._forecast(AS_IT_IS), self._forecast(Levers(optimizer_impl=levers.optimizer_impl))
        if here is None or there is None:
            return None
        change = there.phase_peak_bytes(size, in_optimizer=True) - here.phase_peak_bytes(size, in_optimizer=True)
        rest, step = (forecast.phase_peak_bytes(size, in_optimizer=inside) for inside in (False, True))
        return forecast.peak_bytes(size) - max(rest, step) + max(rest, step + change)

    def _forecast(self, levers: Levers) -> Forecast | None:
        return self._search.forecasts.of(levers)

    def _offset(self, levers: Levers) -> int:
        """By how much measured peaks differ from their predictions: of these levers, else with none turned."""
        for log in (self._search.log.of(levers), self._search.log.of(AS_IT_IS)):
            peaks = peaks_of(log)
            if peaks:
                size = max(peaks)
                predicted = self.raw_peak(log[0].candidate.levers, size)
                return 0 if predicted is None else peaks[size] - predicted
        return 0

    def work(self, point: Point) -> float:
        """Operations per row, relative to those with no lever turned; 1 where they are not known."""
        known = self._search.forecasts.known()
        here, base = known.get(_plain(point.levers)), known.get(AS_IT_IS)
        if here is None or base is None:
            return 1.0
        per_row = here.work_per_row(point.micro_batch), base.work_per_row(point.micro_batch)
        return per_row[0] / per_row[1] if min(per_row) > 0 else 1.0

    def forecast_of(self, levers: Levers) -> Forecast | None:
        """The traced prediction closest to these levers, if there is one; its optimizer step may be another one's."""
        return self._search.forecasts.known().get(_plain(levers))


def _plain(levers: Levers) -> Levers:
    return msgspec.structs.replace(levers, optimizer_impl="default")
