"""What torch's own losses divide by: a table of the losses that are a mean over their target.

A row is believed only for torch's own forward; a loss of the user's own is never looked into.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

_Rule = Literal["classes", "elements", "rows"]


class DenominatorRow(NamedTuple):
    """A loss of torch, as a module's forward and as a function, what its mean divides by, and where that is written.

    `rule`: "classes" the class weights of the labels that count; "elements" the elements of the target;
    "rows" the first dimension.
    """

    forward: Callable[..., Any]
    function: Callable[..., Any]
    rule: _Rule
    source: str


_CLASSES_SOURCE = "torch.nn.CrossEntropyLoss, torch.nn.NLLLoss: the formula for reduction='mean'"
_MEAN_SOURCE = "the loss's documentation: 'mean' divides by the number of elements in the output"

DENOMINATORS = (
    DenominatorRow(nn.CrossEntropyLoss.forward, functional.cross_entropy, "classes", _CLASSES_SOURCE),
    DenominatorRow(nn.NLLLoss.forward, functional.nll_loss, "classes", _CLASSES_SOURCE),
    DenominatorRow(nn.MSELoss.forward, functional.mse_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.L1Loss.forward, functional.l1_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.SmoothL1Loss.forward, functional.smooth_l1_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.HuberLoss.forward, functional.huber_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.BCELoss.forward, functional.binary_cross_entropy, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.BCEWithLogitsLoss.forward, functional.binary_cross_entropy_with_logits, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.PoissonNLLLoss.forward, functional.poisson_nll_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.KLDivLoss.forward, functional.kl_div, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.HingeEmbeddingLoss.forward, functional.hinge_embedding_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.SoftMarginLoss.forward, functional.soft_margin_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.MultiLabelMarginLoss.forward, functional.multilabel_margin_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.MultiLabelSoftMarginLoss.forward, functional.multilabel_soft_margin_loss, "elements", _MEAN_SOURCE),
    DenominatorRow(nn.MultiMarginLoss.forward, functional.multi_margin_loss, "elements", _MEAN_SOURCE),
)

# Losses whose function divides by the sum of an elementwise `weight`, which cannot be cut with the batch.
_WEIGHTED_BY_ELEMENT = (functional.mse_loss, functional.l1_loss, functional.huber_loss)


@final
class Denominator:
    """What one of torch's losses divides by, counted from its target.

    Attributes:
        summed: The loss is a sum: micro-batches add up as they are.
    """

    def __init__(self, rule: _Rule, summed: bool, ignore_index: int, class_weight: Tensor | None) -> None:
        self.summed = summed
        self._rule, self._ignore_index, self._class_weight = rule, ignore_index, class_weight

    def __call__(self, target: Tensor) -> float:
        """The denominator for this target: elements, rows, or the summed class weights of the labels that count."""
        if self._rule == "rows":
            return float(target.shape[0])
        if self._rule == "elements":
            return float(target.numel())
        if target.is_floating_point():  # class probabilities, of which the mean is over everything but the classes
            return target.numel() / (target.shape[1] if target.ndim > 1 else 1)
        counts = target != self._ignore_index
        if self._class_weight is None:
            return float(counts.sum())
        # float64: a float32 sum would cost 4e-8 of the gradient.
        weight = self._class_weight.detach().to(target.device, torch.float64)
        return float(weight[target[counts].long()].sum())


def denominator_of(loss_fn: object) -> Denominator | None:
    """What this loss divides by, None where it is not one of torch's own.

    Args:
        loss_fn: A loss module (or a subclass with torch's own forward, or its bound `forward`), a function of
            `torch.nn.functional`, or a `functools.partial` of one with keywords only.

    Example:
        >>> import torch
        >>> denominator = denominator_of(torch.nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0])))
        >>> denominator(torch.tensor([0, 1, 1, -100]))
        4.5
    """
    if type(loss_fn).__name__ == "OptimizedModule":  # what torch.compile makes of a module; its class is slow to import
        loss_fn = getattr(loss_fn, "_orig_mod", loss_fn)
    if isinstance(loss_fn, nn.Module):
        changed = "forward" in vars(loss_fn) or type(loss_fn).__call__ is not nn.Module.__call__ or loss_fn._forward_hooks
        row = None if changed else next((row for row in DENOMINATORS if type(loss_fn).forward is row.forward), None)
        return None if row is None else _denominator(row, {**vars(loss_fn), **loss_fn._buffers})
    if _is_call_of_a_module(loss_fn):
        return denominator_of(loss_fn.__self__)  # type: ignore[attr-defined]
    function, settings = loss_fn, dict[str, Any]()
    if isinstance(loss_fn, functools.partial) and not loss_fn.args:
        function, settings = loss_fn.func, dict(loss_fn.keywords)
        if not settings:
            return denominator_of(function)
    row = next((row for row in DENOMINATORS if function is row.function), None)
    if row is None or (settings.get("weight") is not None and row.function in _WEIGHTED_BY_ELEMENT):
        return None
    return _denominator(row, settings)


def _is_call_of_a_module(loss_fn: object) -> bool:
    """Whether it is the bound `forward` or `__call__` of a module, which is the module."""
    module, function = getattr(loss_fn, "__self__", None), getattr(loss_fn, "__func__", None)
    return isinstance(module, nn.Module) and function in (type(module).forward, type(module).__call__)


def _denominator(row: DenominatorRow, settings: dict[str, Any]) -> Denominator | None:
    if settings.get("size_average") is not None or settings.get("reduce") is not None:
        return None  # the names before torch 0.4.1; modules have turned them into `reduction`
    match settings.get("reduction", "mean"):
        case "mean":
            rule, summed = row.rule, False
        case "sum":
            rule, summed = row.rule, True
        case "batchmean":
            rule, summed = "rows", False
        case _:
            return None
    weight = settings.get("weight") if row.rule == "classes" else None
    return Denominator(rule, summed, settings.get("ignore_index", -100), weight)
