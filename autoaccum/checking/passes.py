"""Backward passes of a whole batch and of an uneven split of it, in one precision.

The split is uneven because an even one hides wrong weights: two halves weigh the same whatever is counted in them. Knows
nothing of what differences mean.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.backward import Backward
from autoaccum.batches.pieces import AbstractShare
from autoaccum.batches.structure import mapped
from autoaccum.batches.weights import Weigher
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.gradients import Accumulation, parameters_of
from autoaccum.losses import MicroBatchLoss
from autoaccum.rewind import Rewinder
from autoaccum.window import Progress, accumulate

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Up to which relative difference two gradients count as the same, by the precision in which the model ran.

float64: a model that computes a part in float32 differs by that precision, 6e-8. float32: sums of many numbers lose a few
digits. Half precision: bfloat16 rounds by up to 2**-9 = 0.002 at every operation, and these add up.
"""


class Gradients(NamedTuple):
    """The gradient of the whole, and that of each part as scaled for the window."""

    whole: Tensor
    parts: list[Tensor]

    @property
    def split(self) -> Tensor:
        """The sum of the parts."""
        return torch.stack(self.parts).sum(0)

    def error(self) -> float:
        """Norm of the difference over the norm of the whole's."""
        return relative(self.split, self.whole)

    def norm_ratio(self) -> float:
        """Norm of the split's over the norm of the whole's."""
        norm = float(self.whole.norm())
        return float(self.split.norm()) / norm if norm else 1.0


class Subject(NamedTuple):
    """What is examined: a model with its loss, weights and optimizer, and this rank's rows.

    Attributes:
        steps_of: Into how many micro-batches training would cut so many rows.
    """

    module: nn.Module
    share: AbstractShare
    loss: MicroBatchLoss
    weigher: Weigher
    optimizer: Optimizer
    device: AbstractDevice
    steps_of: Callable[[int], int]


@final
class Passes:
    """Forward and backward passes of the whole and of each part. Leaves the model as the caller's snapshot finds it."""

    def __init__(self, subject: Subject, rows: int, smallest: int, dtype: torch.dtype | None) -> None:
        module, share, loss, weigher, optimizer, device, steps_of = subject
        self.module, self._device, self.loss, self._dtype = module, device, loss, dtype
        self.steps = max(2, steps_of(rows))  # of training
        for parameter in module.parameters():
            parameter.grad = None
        if dtype is not None:
            module.to(dtype)
            self.loss = MicroBatchLoss(module, _in_dtype(loss.loss_fn, dtype), loss.training_step)
        self._parameters = parameters_of(optimizer)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._buffer_names = {id(buffer): name for name, buffer in module.named_buffers()}
        self.sizes = _uneven(rows, smallest)
        (self.whole,), self.parts = share.first([rows]), share.first(self.sizes)
        weights = [weigher(part, size) for part, size in zip(self.parts, self.sizes, strict=True)]
        if not sum(weights):
            raise InvalidRequestError("nothing in the batch has a weight: are all labels ignored? Check another batch.")
        self.scales = [1.0 if weigher.summed else weight / sum(weights) for weight in weights]
        self._rewinder = Rewinder(module, device.torch_device)
        self._rewinder.mark()
        self.divisors: list[Divisor | None] = []
        first = next(iter(self._parameters), None)
        self.ran_in = torch.float32 if first is None else first.dtype
        self.tolerance = TOLERANCES.get(self.ran_in, 1e-4)

    def gradients(self) -> Gradients:
        """The gradients of the whole and of the parts, each from the same state."""
        self.divisors = []
        whole = self.gradient(self.whole, 1.0)
        return Gradients(whole, [self.gradient(*part) for part in zip(self.parts, self.scales, strict=True)])

    def gradient(self, batch: Any, scale: float) -> Tensor:
        """The gradient of this batch, from the state that the first pass found."""
        self._rewinder.rewind()
        return self.gradient_as_it_comes(batch, scale)

    def gradient_as_it_comes(self, batch: Any, scale: float) -> Tensor:
        """The gradient of this batch, from the state that the pass before has left."""
        accumulation = Accumulation(self._parameters, Backward(module=self.module), wide=True)

        def loss(placed: Any) -> Tensor:
            found = self.loss(placed)
            self.divisors.append(_constant_divisor(found))
            return found

        try:
            accumulate([batch], [scale], loss=loss, place=self._placed, accumulation=accumulation, progress=Progress())
            return _flat(self._parameters, accumulation.gradients())
        finally:
            accumulation.discard()

    def _placed(self, batch: Any) -> Any:
        dtype = self._dtype
        placed = mapped(batch, {}, (), lambda leaf, how: leaf if dtype is None else _as_float(leaf, dtype))
        return self._device.place(placed)

    def moved_buffers(self) -> list[str]:
        """The names of the buffers that the pass before has changed."""
        moved = {id(buffer) for buffer in self._rewinder.changed()}
        return [name for buffer, name in self._buffer_names.items() if buffer in moved]

    def is_random(self) -> bool:
        """Whether the whole has another gradient where the generators stand elsewhere."""
        first = self.gradient(self.whole, 1.0)
        self._rewinder.rewind()
        move_generators(self._device.torch_device)
        return relative(self.gradient_as_it_comes(self.whole, 1.0), first) > self.tolerance

    def take_hooks(self, registry: str) -> list[str]:
        """Take the hooks off all parameters; the caller's snapshot puts them back. Gives the names of those that had one."""
        had = []
        for parameter in self.module.parameters():
            hooks = getattr(parameter, registry)
            if hooks:
                had.append(self._names[id(parameter)])
                hooks.clear()
        return had


def move_generators(device: torch.device) -> None:
    """Draw from each, so that what is random comes out otherwise."""
    random.random()
    np.random.random()
    torch.rand(1)
    torch.rand(1, device=device)


def _uneven(rows: int, smallest: int) -> tuple[int, int]:
    """About two thirds and one third, never half and half unless the second part would have too few rows otherwise."""
    second = max(smallest, round(rows * 0.3))
    return (rows - second, second)


def _flat(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """All gradients as one float64 vector on the host."""
    flat = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        dense = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
        flat.append(dense.detach().reshape(-1).to("cpu", torch.float64, copy=True))
    return torch.cat(flat)


def relative(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    norm = float(reference.norm())
    difference = float((value - reference).norm())
    return difference / norm if norm else (inf if difference else 0.0)


def _in_dtype(loss_fn: Any, dtype: torch.dtype) -> Any:
    """The loss with its own tensors, such as class weights, in this precision."""
    if isinstance(loss_fn, nn.Module):
        return copy.deepcopy(loss_fn).to(dtype)
    if isinstance(loss_fn, functools.partial):
        keywords = {name: _as_float(value, dtype) for name, value in loss_fn.keywords.items()}
        return functools.partial(loss_fn.func, *loss_fn.args, **keywords)
    return loss_fn


def _as_float(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.to(dtype)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
        return leaf.astype(np.float64)
    return leaf


class Divisor(NamedTuple):
    """The number that a loss is divided by in its last operation, and whether that comes after adding losses up."""

    number: float
    of_a_sum: bool


def _constant_divisor(loss: Tensor) -> Divisor | None:
    """What the last operation divides by, or multiplies with the inverse of; None where it is another one."""
    node = loss.grad_fn
    if node is None or node.name() not in ("DivBackward0", "MulBackward0") or node.next_functions[1][0] is not None:
        return None
    other, before = getattr(node, "_saved_other", None), node.next_functions[0][0]
    if not isinstance(other, Tensor) or other.numel() != 1 or not float(other):
        return None
    number = float(other) if node.name() == "DivBackward0" else 1 / float(other)
    return Divisor(round(number, 6), before is not None and before.name() in ("AddBackward0", "SumBackward0"))
