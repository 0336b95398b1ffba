"""The predictions of one search: each made once, by the first rank, and the same on all."""

from __future__ import annotations

import gc
import time
from typing import final

from autoaccum.devices.base import AbstractDevice
from autoaccum.meeting import Meeting
from autoaccum.prediction.forecast import Forecast, Traced, take_first_step, traced
from autoaccum.preserve import Snapshot
from autoaccum.records import AS_IT_IS, Levers
from autoaccum.search import NOISE_FRAC
from autoaccum.session.clock import Clock
from autoaccum.workload import Workload

_EXCHANGED = (
    "No prediction: ranks exchange parameters or statistics inside this model's step, which cannot be traced; "
    "sizes were searched by doubling and bisection."
)


@final
class Forecasts:
    """Predicted peaks of every size, for each position of the levers that was asked for.

    Args:
        snapshot: Restores the workload after real passes.
        budget_bytes: The limit under which real passes run.
        share: Rows of one optimizer step on a rank, where there is a target.
        is_wanted: Whether the caller wants predictions.
        is_possible: Whether a step can be traced by itself.

    Attributes:
        tracing_s: Spent so far, on all ranks the same.
        note: What is to be said of the prediction with no lever turned, or of why there is none.
    """

    def __init__(
        self,
        workload: Workload,
        device: AbstractDevice,
        ranks: Meeting,
        clock: Clock,
        *,
        snapshot: Snapshot,
        multiple_of: int,
        budget_bytes: int,
        share: int | None,
        is_wanted: bool,
        is_possible: bool,
    ) -> None:
        self._workload, self._device, self._ranks, self._clock = workload, device, ranks, clock
        self._snapshot, self._multiple_of, self._budget_bytes, self._share = snapshot, multiple_of, budget_bytes, share
        self._is_wanted, self._is_possible = is_wanted, is_possible
        self._made: dict[Levers, Forecast | None] = {}
        self.tracing_s = 0.0
        self.note: str | None = None

    def of(self, levers: Levers) -> Forecast | None:
        """The predicted peak of every size under these levers, traced once; None where there is no prediction."""
        if not self._is_wanted:
            return None
        if not self._is_possible:
            self.note = _EXCHANGED
            return None
        if levers not in self._made:
            self._made[levers] = self._traced(levers)
        return self._made[levers]

    def known(self) -> dict[Levers, Forecast]:
        """The predictions that were made."""
        return {levers: forecast for levers, forecast in self._made.items() if forecast is not None}

    def noise_frac(self, levers: Levers) -> float:
        """By how much peaks wander here, as a fraction of the budget."""
        forecast = self._made.get(levers)
        return NOISE_FRAC if forecast is None else forecast.noise_frac

    def _traced(self, levers: Levers) -> Forecast | None:
        begun = time.monotonic()
        # Ranks' data and memory may differ. All go by the first one's prediction, above what the fullest one holds.
        own: Traced | None = None
        if self._ranks.rank == 0:
            own = traced(
                self._workload,
                self._device,
                multiple_of=self._multiple_of,
                snapshot=self._snapshot,
                budget_bytes=self._budget_bytes,
                levers=levers,
            )
        if self._device.is_host:
            take_first_step()
        gc.collect()
        self._device.release()  # what earlier work left in a cache is used again, and would be counted twice
        held_bytes = self._device.held_bytes(self._workload.resident())
        heard = self._ranks.gather((own, held_bytes, time.monotonic() - begun, self._clock.own_s()))
        found = heard[0][0]
        assert found is not None
        self.tracing_s += max(tracing_s for _, _, tracing_s, _ in heard)
        self._clock.agree([elapsed_s for _, _, _, elapsed_s in heard])
        if levers == AS_IT_IS:
            self.note = found.note
        if found.growth is None:
            return None
        is_cut = self._device.is_host and self._workload.source.cuts_views
        return Forecast(
            found.growth,
            unit=self._device.unit,
            held_bytes=max(of_rank for _, of_rank, _, _ in heard),
            whole_batch=self._share if is_cut else None,
        )
