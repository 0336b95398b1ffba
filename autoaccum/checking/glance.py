"""Does a loss split over micro-batches? A glance at a few rows, before a plan is handed over.

Forward passes only, in the model's own precision: much cheaper than `check_split`, and coarser. What it sees is wrong; what
it does not see may be.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from math import inf, isclose, isfinite
from typing import Any, NamedTuple, final

import torch
from torch import nn

from autoaccum.batches.slicing import Slicer
from autoaccum.batches.source_kinds import AbstractSource
from autoaccum.catching import Failure, attempted
from autoaccum.checking.dropout import without_dropout
from autoaccum.checking.passes import move_generators
from autoaccum.devices.base import AbstractDevice, Verdict
from autoaccum.losses import MicroBatchLoss
from autoaccum.preserve import Snapshot
from autoaccum.rewind import Rewinder
from autoaccum.workload import Workload
from autoaccum.wrapped import is_compiled

_ROWS = 16
_NEAR_NOTHING = 1e-5  # losses below are what is left of larger terms, and mostly rounding
_TOLERANCE, _COARSE_TOLERANCE = 3e-4, 1e-2
"""Up to which relative difference losses count as the same; the coarse one under autocast and in half precision.

Measured on small models of 8 kinds: up to 2e-7 in float32, 3e-6 under bfloat16 autocast on the CPU, 4e-3 where the loss
itself is computed in bfloat16. A mean over tokens that was weighed by rows differs by 1e-3 before any training.
"""


class Glance(NamedTuple):
    """The loss of a few rows at once, and the same from micro-batches of these sizes as a window weighs them.

    Attributes:
        error: Their difference, relative to the largest term.
        tolerance: What of it may be rounding.
    """

    whole: float
    split: float
    sizes: tuple[int, int]
    error: float
    tolerance: float


def glance(
    workload: Workload,
    device: AbstractDevice,
    snapshot: Snapshot,
    *,
    budget_bytes: int,
    at_most: int,
    at_least: int,
    multiple_of: int,
) -> Glance | None:
    """A few rows of the sample whose loss is another one when it is put together from micro-batches.

    Args:
        snapshot: Restored before this returns.
        at_most, at_least: Rows that are known to run at once.

    Returns:
        None where it splits, and where it cannot be seen: too few rows, a random loss, a step that refuses such sizes, a
        model that would be compiled again for them.
    """
    if getattr(workload.loss.training_step, "is_weighed_elsewhere", False) or is_compiled(workload.model):
        return None
    found, seconds = None, [at_least, max(at_least, 2)]  # a spread over the rows is NaN where there is one row
    for sizes in dict.fromkeys(_uneven(workload.source, at_most, second, multiple_of) for second in seconds):
        if sizes is not None and found is None:
            try:
                found = _seen(workload, device, sizes, budget_bytes)
            finally:
                gc.collect()
                device.release()
                snapshot.restore()
    return found if found is not None and found.error > found.tolerance else None


def _seen(workload: Workload, device: AbstractDevice, sizes: tuple[int, int], budget_bytes: int) -> Glance | None:
    try:
        with device.limited_to(budget_bytes):
            found = attempted(lambda: _compared(workload, device, sizes), frozenset(Verdict) - {Verdict.DEAD})
    except Exception:  # noqa: BLE001 - the step has run with the plan's own sizes, and only those have to run
        return None
    return None if isinstance(found, Failure) else found


def _uneven(source: AbstractSource, at_most: int, at_least: int, multiple_of: int) -> tuple[int, int] | None:
    """Two sizes that run, the second no larger than the first, where there are as many rows."""
    rows = min(at_most, _rows_of(source)) // multiple_of * multiple_of
    second = max(at_least, round(0.3 * rows))
    second = -(-second // multiple_of) * multiple_of
    return None if rows - second < second else (rows - second, second)


def _rows_of(source: AbstractSource) -> int:
    return min(limit for limit in (_ROWS, source.distinct, source.length) if limit is not None)


def _compared(workload: Workload, device: AbstractDevice, sizes: tuple[int, int]) -> Glance | None:
    """The worst of several groups of rows."""
    workload.set_training_mode()
    if not _held_still(workload.module):
        return None
    rows = sum(sizes)
    count = _rows_of(workload.source) // rows
    batch = workload.source.varied(count * rows)
    share = Slicer(inf, batch_dim=workload.batch_dim, split=workload.split).share(batch)
    wholes, parts = share.first([rows] * count), share.first(sizes * count)
    look = _Look(workload, device)
    with without_dropout(workload.module):
        if look.is_random(wholes[0]):
            return None
        seen = [look.at(whole, parts[2 * index : 2 * index + 2], sizes) for index, whole in enumerate(wholes)]
    return max((one for one in seen if one is not None), key=lambda one: one.error, default=None)


@final
class _Look:
    """Losses, each from the state that the first one found."""

    def __init__(self, workload: Workload, device: AbstractDevice) -> None:
        # Not the mean of the outputs, which stands for a loss that nobody gave.
        self._loss = MicroBatchLoss(workload.module, workload.loss.loss_fn, workload.loss.training_step)
        self._weigher, self._device = workload.weigher, device
        dtypes = {parameter.dtype for parameter in workload.module.parameters()}
        self._tolerance = _TOLERANCE if dtypes <= {torch.float32, torch.float64} else _COARSE_TOLERANCE
        workload.module.register_forward_pre_hook(self._note_autocast)  # the caller's snapshot takes it off
        self._rewinder = Rewinder(workload.module, device.torch_device)
        self._rewinder.mark()

    def _note_autocast(self, *_: Any) -> None:
        if torch.is_autocast_enabled(self._device.torch_device.type):
            self._tolerance = _COARSE_TOLERANCE

    def is_random(self, batch: Any) -> bool:
        """Whether the loss is another one where the generators stand elsewhere."""
        first = self._loss_of(batch)
        self._rewinder.rewind()
        move_generators(self._device.torch_device)
        return not isclose(self._loss_as_it_comes(batch), first, rel_tol=1e-5)

    def at(self, whole: Any, parts: Sequence[Any], sizes: tuple[int, int]) -> Glance | None:
        """Of one group of rows; None where nothing in it counts, or the loss is not finite."""
        weights = [self._weigher(part, size) for part, size in zip(parts, sizes, strict=True)]
        if not sum(weights):
            return None
        scales = [1.0 if self._weigher.summed else weight / sum(weights) for weight in weights]
        of_whole = self._loss_of(whole)
        of_parts = [scale * self._loss_of(part) for scale, part in zip(scales, parts, strict=True)]
        if not all(map(isfinite, (of_whole, *of_parts))):
            return None
        size = max(abs(of_whole), *map(abs, of_parts), _NEAR_NOTHING)
        return Glance(of_whole, sum(of_parts), sizes, abs(sum(of_parts) - of_whole) / size, self._tolerance)

    def _loss_of(self, batch: Any) -> float:
        self._rewinder.rewind()
        return self._loss_as_it_comes(batch)

    def _loss_as_it_comes(self, batch: Any) -> float:
        return float(self._loss(self._device.place(batch)).detach())


def _held_still(module: nn.Module) -> bool:
    """Let BatchNorm layers use what they have learned, which is said of them elsewhere; False where one has nothing."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            if part.running_mean is None:
                return False
            part.training = False
    return True
