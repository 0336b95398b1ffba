"""One comparison of a whole batch's gradient with that of an uneven split, and its diagnosis.

The split is uneven because an even one hides wrong weights: two halves weigh the same whatever is counted in them.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from math import inf, isclose, isnan
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.backward import Backward
from autoaccum.batches.pieces import AbstractShare
from autoaccum.batches.structure import leaves_of, mapped, name_of
from autoaccum.batches.weights import Tokens, Weigher
from autoaccum.checking import reasons
from autoaccum.checking.dropout import without_dropout
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.gradients import Accumulation, parameters_of
from autoaccum.losses import MicroBatchLoss
from autoaccum.records import CheckResult
from autoaccum.rewind import Rewinder
from autoaccum.window import Progress, accumulate

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Up to which relative difference two gradients count as the same, by the precision in which the model ran.

float64: a model that computes a part in float32 differs by that precision, 6e-8. float32: sums of many numbers lose a few
digits. Half precision: bfloat16 rounds by up to 2**-9 = 0.002 at every operation, and these add up.
"""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Gradients(NamedTuple):
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


class _Carried(NamedTuple):
    """The gradients of parts of which the second saw what the first had left, and the buffers in which it was left."""

    gradients: _Gradients
    names: list[str]


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
class Examination:
    """One comparison and its diagnosis, in one precision. Leaves the model as the caller's snapshot finds it."""

    def __init__(self, subject: Subject, rows: int, dtype: torch.dtype | None) -> None:
        module, share, loss, weigher, optimizer, device, steps_of = subject
        self._module, self._device, self._loss, self._dtype = module, device, loss, dtype
        self._steps = max(2, steps_of(rows))
        for parameter in module.parameters():
            parameter.grad = None
        if dtype is not None:
            module.to(dtype)
            self._loss = MicroBatchLoss(module, _in_dtype(loss.loss_fn, dtype), loss.training_step)
        self._parameters = parameters_of(optimizer)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._buffer_names = {id(buffer): name for name, buffer in module.named_buffers()}
        self._sizes = _uneven(rows)
        (self._whole,), self._parts = share.first([rows]), share.first(self._sizes)
        weights = [weigher(part, size) for part, size in zip(self._parts, self._sizes, strict=True)]
        if not sum(weights):
            raise InvalidRequestError("nothing in the batch has a weight: are all labels ignored? Check another batch.")
        self._scales = [1.0 if weigher.summed else weight / sum(weights) for weight in weights]
        self._rewinder = Rewinder(module, device.torch_device)
        self._rewinder.mark()
        self._divisors: list[_Divisor | None] = []
        first = next(iter(self._parameters), None)
        self._ran_in = torch.float32 if first is None else first.dtype
        self._tolerance = TOLERANCES.get(self._ran_in, 1e-4)
        self._closeness = 10 * self._tolerance  # of factors, which carry the errors of several gradients

    def result(self) -> CheckResult:
        """The comparison, with its reasons."""
        told, notes, in_backward = list[str](), self._about_labels(), self._take_hooks("_post_accumulate_grad_hooks")
        with without_dropout(self._module):
            gradients = self._gradients()
            error, ratio = gradients.error(), gradients.norm_ratio()
            divisor, is_certain = self._divided_by()
            if isnan(error):
                told.append(reasons.NOT_A_NUMBER)
            elif not float(gradients.whole.norm()):
                told.append(reasons.NO_GRADIENT)
            elif error > self._tolerance:
                told += self._reasons(gradients)
            elif (carried := self._carried_over(gradients)) is not None:
                error, ratio = carried.gradients.error(), carried.gradients.norm_ratio()
                told.append(reasons.carried_over(carried.names))
            elif divisor is not None and is_certain:
                error, ratio = 1 - 1 / divisor, 1 / divisor
                told.append(reasons.already_divided(divisor))
            elif divisor is not None:
                notes.append(reasons.perhaps_divided(divisor))
        if in_backward:
            told.append(reasons.optimizer_in_backward(in_backward))
        return CheckResult(
            exact=not told,
            relative_error=error,
            norm_ratio=ratio,
            reasons=tuple(told),
            micro_batch_sizes=self._sizes,
            dtype=str(self._ran_in).removeprefix("torch."),
            notes=tuple(notes),
        )

    def _gradients(self) -> _Gradients:
        self._divisors = []
        whole = self._gradient(self._whole, 1.0)
        return _Gradients(whole, [self._gradient(*part) for part in zip(self._parts, self._scales, strict=True)])

    def _gradient(self, batch: Any, scale: float) -> Tensor:
        self._rewinder.rewind()
        return self._gradient_as_it_comes(batch, scale)

    def _gradient_as_it_comes(self, batch: Any, scale: float) -> Tensor:
        accumulation = Accumulation(self._parameters, Backward(module=self._module), wide=True)

        def loss(placed: Any) -> Tensor:
            found = self._loss(placed)
            self._divisors.append(_constant_divisor(found))
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

    def _take_hooks(self, registry: str) -> list[str]:
        """Take the hooks off all parameters; the caller's snapshot puts them back. Gives the names of those that had one."""
        had = []
        for parameter in self._module.parameters():
            hooks = getattr(parameter, registry)
            if hooks:
                had.append(self._names[id(parameter)])
                hooks.clear()
        return had

    def _reasons(self, gradients: _Gradients) -> list[str]:
        """Why the gradients differ: one thing after another is taken out of the way, until they agree."""
        if self._is_random():
            return [reasons.RANDOM]
        told = []
        for take_out, sentence, at_most in (
            (self._freeze_batch_norms, self._about_batch_norm, 0.99),
            # A hook that only scales changes the error a little where something else is the cause.
            (self._take_tensor_hooks, reasons.hooks_on_gradients, 0.5),
        ):
            names = take_out()
            if names:
                before, gradients = gradients.error(), self._gradients()
                if gradients.error() <= at_most * before:
                    told.append(sentence(names))
                if gradients.error() <= self._tolerance:
                    return told
        mixing = self._mixing_layer()
        return [*told, self._about_the_loss(gradients) if mixing is None else reasons.mixing_layer(*mixing)]

    def _is_random(self) -> bool:
        first = self._gradient(self._whole, 1.0)
        self._rewinder.rewind()
        for draw in (
            random.random,
            np.random.random,
            lambda: torch.rand(1),
            lambda: torch.rand(1, device=self._device.torch_device),
        ):
            draw()
        return relative(self._gradient_as_it_comes(self._whole, 1.0), first) > self._tolerance

    def _carried_over(self, gradients: _Gradients) -> _Carried | None:
        """What a micro-batch leaves behind that the next one is computed with, as in training; None where nothing counts."""
        first = self._gradient(self._parts[0], self._scales[0])
        moved = {id(buffer) for buffer in self._rewinder.changed()}
        second = self._gradient_as_it_comes(self._parts[1], self._scales[1])
        carried = _Gradients(gradients.whole, [first, second])
        if carried.error() <= self._tolerance or self._is_random():
            return None
        return _Carried(carried, [name for buffer, name in self._buffer_names.items() if buffer in moved])

    def _freeze_batch_norms(self) -> list[str]:
        found = []
        for name, module in self._module.named_modules():
            if isinstance(module, _BATCH_NORMS) and module.training and module.running_mean is not None:
                module.training = False
                found.append(name)
        return found

    def _about_batch_norm(self, names: list[str]) -> str:
        momentum = getattr(self._module.get_submodule(names[0]), "momentum", None)
        return reasons.batch_norm(names, momentum, self._steps)

    def _take_tensor_hooks(self) -> list[str]:
        return self._take_hooks("_backward_hooks")

    def _mixing_layer(self) -> tuple[str, str] | None:
        """The first layer whose output for some rows is another one in a part than in the whole, though its input is not."""
        in_whole, in_part = self._calls(self._whole), self._calls(self._parts[0])
        for (name, *whole), (other, *part) in zip(in_whole, in_part, strict=False):
            if name == other and self._agree(part[0], whole[0]) and self._agree(part[1], whole[1]) is False:
                return name, type(self._module.get_submodule(name)).__name__
        return None

    def _agree(self, part: Tensor | None, whole: Tensor | None) -> bool | None:
        """Whether the rows of a part are the first ones of the whole; None where they cannot be compared."""
        if part is None or whole is None:
            return None
        rows = self._sizes[0]
        if len(part) != rows or whole.shape != (sum(self._sizes), *part.shape[1:]):
            return None
        return relative(part, whole[:rows]) <= self._tolerance

    def _calls(self, batch: Any) -> list[tuple[str, Tensor | None, Tensor | None]]:
        """Every call of a layer in order of its end: its name, its first input and its output, where these are tensors."""
        found: list[tuple[str, Tensor | None, Tensor | None]] = []

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, given: Any, output: Any) -> None:
                found.append((name, _kept(given[0] if given else None), _kept(output)))

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in self._module.named_modules()]
        try:
            self._gradient(batch, 1.0)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _about_the_loss(self, gradients: _Gradients) -> str:
        """What the factors say with which the parts' gradients make up the whole's."""
        parts = [part / scale if scale else part for part, scale in zip(gradients.parts, self._scales, strict=True)]
        stacked = torch.stack(parts, 1)
        factors = torch.linalg.lstsq(stacked.T @ stacked, stacked.T @ gradients.whole, driver="gelsd").solution
        left = relative(stacked @ factors, gradients.whole)
        loss = self._loss_name()
        if left > self._tolerance / 5 or not bool(torch.isfinite(factors).all()):
            return reasons.compares_rows(loss)
        shares = [float(factor) for factor in factors]
        if all(isclose(share, 1.0, rel_tol=self._closeness) for share in shares):
            return reasons.is_a_sum(loss)
        suggestion = self._matching_weight(shares)
        if suggestion is not None or isclose(sum(shares), 1.0, rel_tol=self._closeness):
            return reasons.other_weight(loss, shares, self._scales, suggestion)
        return reasons.nonlinear(loss, shares)

    def _matching_weight(self, factors: Sequence[float]) -> str | None:
        """A weight that gives these factors, in words."""
        candidates: dict[str, list[float]] = {'weight="samples"': [float(size) for size in self._sizes]}
        for path, leaf in leaves_of(self._whole):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.ndim and len(path) == 1:
                key: str | int = path[0] if isinstance(self._whole, dict) or not path[0].isdigit() else int(path[0])
                for shift in (False, True) if leaf.ndim > 1 else (False,):
                    count = Tokens(key, -100, shift)
                    text = f"weight=autoaccum.tokens({key!r}{', shift=True' if shift else ''})"
                    candidates[text] = [float(count(part)) for part in self._parts]
        for text, weights in candidates.items():
            total = sum(weights)
            if total and all(isclose(w / total, f, rel_tol=self._closeness) for w, f in zip(weights, factors, strict=True)):
                return text
        return None

    def _loss_name(self) -> str:
        if self._loss.training_step is not None:
            return "The loss of training_step"
        if self._loss.loss_fn is not None:
            named = getattr(self._loss.loss_fn, "__name__", type(self._loss.loss_fn).__name__)
            return f"The loss {named}"
        return f"The loss of {type(self._module).__name__}"

    def _about_labels(self) -> list[str]:
        """What this batch cannot show: a weight by label, where all labels are the same."""
        labels = [(path, leaf) for path, leaf in leaves_of(self._whole) if isinstance(leaf, Tensor) and leaf.numel() > 1]
        return [
            reasons.same_labels(name_of(path))
            for path, leaf in labels
            if leaf.dtype == torch.int64 and bool((leaf == leaf.flatten()[0]).all())
        ]

    def _divided_by(self) -> tuple[float | None, bool]:
        """The number of micro-batches, where the loss of the whole and of each part is divided by just that.

        And whether that is what it is: half of a loss, and a mean of several losses, are written in the same way.
        """
        divisors = set(self._divisors[:3])
        only = divisors.pop() if len(divisors) == 1 else None
        if only is None or only.number != self._steps:
            return None, False
        return only.number, self._steps > 2 and not only.of_a_sum


def _uneven(rows: int) -> tuple[int, int]:
    """About two thirds and one third, never half and half unless there are two rows."""
    second = max(1, round(rows * 0.3))
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


class _Divisor(NamedTuple):
    """The number that a loss is divided by in its last operation, and whether that comes after adding losses up."""

    number: float
    of_a_sum: bool


def _constant_divisor(loss: Tensor) -> _Divisor | None:
    """What the last operation divides by, or multiplies with the inverse of; None where it is another one."""
    node = loss.grad_fn
    if node is None or node.name() not in ("DivBackward0", "MulBackward0") or node.next_functions[1][0] is not None:
        return None
    other, before = getattr(node, "_saved_other", None), node.next_functions[0][0]
    if not isinstance(other, Tensor) or other.numel() != 1 or not float(other):
        return None
    number = float(other) if node.name() == "DivBackward0" else 1 / float(other)
    return _Divisor(round(number, 6), before is not None and before.name() in ("AddBackward0", "SumBackward0"))


def _kept(value: Any) -> Tensor | None:
    """A copy of a tensor with rows, to be compared later."""
    is_comparable = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
    return value.detach().clone() if is_comparable else None
