"""The ranks that train together, seen from one trial: what they run, how they stay in step, what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import Tensor

from autoaccum.lockstep import Lockstep
from autoaccum.reduction import Reducer
from autoaccum.window import Progress


@final
class Company:
    """The ranks that train together, seen from one trial; by default this process is alone.

    Args:
        lockstep: How they stay in step.
        process_group: Theirs.
        num_micro_batches: How many each runs per window, where they run together.
    """

    def __init__(self, lockstep: Lockstep | None = None, process_group: Any = None, *, num_micro_batches: int = 0) -> None:
        self._lockstep, self._group, self._num_micro_batches = lockstep, process_group, num_micro_batches
        self.is_sharded = lockstep is not None and lockstep.is_sharded
        self.is_in_lockstep = lockstep is not None and lockstep.is_needed

    @property
    def was_called_off(self) -> bool:
        """Another rank has failed in this trial, and this one has not."""
        return self._lockstep is not None and self._lockstep.was_called_off

    def on_trial(self) -> AbstractContextManager[None]:
        """See `Lockstep.trial`."""
        return nullcontext() if self._lockstep is None else self._lockstep.trial()

    def settle(self) -> None:
        """See `Lockstep.settle`."""
        if self._lockstep is not None:
            self._lockstep.settle()

    def padded(self, micro_batches: Sequence[Any], sizes: Sequence[int]) -> tuple[list[Any], list[float]]:
        """What this rank runs in one window, and its weights: as in training, the last one again where others have more."""
        missing = max(0, self._num_micro_batches - len(sizes)) if self.is_in_lockstep else 0
        run = list(micro_batches)
        return run + run[-1:] * missing, [float(size) for size in sizes] + [0.0] * missing

    def placing(self, place: Callable[[Any], Any], progress: Progress, count: int) -> Callable[[Any], Any]:
        """How micro-batches are put on the device, one of `count` after the other."""
        if self._lockstep is None or not self.is_sharded:
            return place
        sharding = self._lockstep.sharding

        def placed(micro_batch: Any) -> Any:
            sharding.entering(progress.index, count)
            return place(micro_batch)

        return placed

    def reducing(self) -> Callable[[Sequence[Tensor | None]], None] | None:
        """Gets the memory in which gradients are reduced over ranks, and keeps it; None where none is needed."""
        if self._lockstep is None or self.is_sharded:
            return None
        reducer = Reducer(self._group)
        return reducer.prepare if reducer.world_size > 1 else None
