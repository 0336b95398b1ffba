"""What the cross entropies in a loss have divided by, read from its graph, and whether micro-batches are weighed so."""

from __future__ import annotations

from math import isclose
from typing import Any, final

from torch import Tensor

_NEAR_THE_TOP = 8  # operations: weighed, divided, added to other terms, moved to another dtype
_PASSED = ("AddBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0")
_MULTIPLIED, _DIVIDED = ("MulBackward0", "MulBackward1"), ("DivBackward0", "DivBackward1")
_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_MEAN = 1  # torch's number for the reduction
_ROUNDING = 1e-4  # of sums of class weights in float32, with room


def divisors_of(loss: Tensor) -> tuple[float, ...]:
    """What each mean cross entropy near the top of a loss is divided by: labels that count, or the sum of their weights.

    Factors of the loss are counted in. Synchronises. A loss that is checkpointed itself runs once more for it; blocks below
    do not.
    """
    found = list[float]()
    level: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    for _ in range(_NEAR_THE_TOP):
        below: list[tuple[Any, float]] = []
        for node, divisor in level:
            if node is None:
                continue
            if node.name() in _CROSS_ENTROPIES and node._saved_reduction == _MEAN:
                found.append(float(node._saved_total_weight) * divisor)
            elif (factor := _factor_of(node)) is not None:
                below += [(following, divisor / factor) for following, _ in node.next_functions]
        level = below
    return tuple(found)


def _factor_of(node: Any) -> float | None:
    """What the operation multiplies a loss by; None where it is no such thing, or not one number."""
    if node.name() in _PASSED:
        return 1.0
    is_product, num_inputs = node.name() in _MULTIPLIED, sum(following is not None for following, _ in node.next_functions)
    if num_inputs != 1 or not (is_product or node.name() in _DIVIDED):
        return None
    other = node._saved_other
    if isinstance(other, Tensor) and other.numel() != 1:
        return None
    number = float(other)
    return None if not number else number if is_product else 1 / number


@final
class DivisorWatch:
    """Compares the micro-batches of one window."""

    def __init__(self) -> None:
        self._first: tuple[tuple[float, ...], float] | None = None
        self._is_over = False

    def note(self, loss: Tensor, scale: float) -> str | None:
        """Take the loss of the next micro-batch, and its share of the window; says once what is weighed wrongly."""
        if self._is_over or not scale:
            return None
        divisors = divisors_of(loss)
        if self._first is None:
            self._first, self._is_over = (divisors, scale), not divisors
            return None
        first, its_scale = self._first
        for one, other in zip(first, divisors, strict=False):
            if not isclose(one * scale, other * its_scale, rel_tol=_ROUNDING):
                self._is_over = True
                return (
                    f"a cross entropy in this loss divides by {one:g} in one micro-batch and by {other:g} in another, which "
                    f"count {its_scale:.3g} and {scale:.3g} of the window: labels are ignored, or classes have weights, so "
                    "accumulation is not exact. weight= says what it divides by: autoaccum.tokens('labels'), with "
                    "shift=True for causal language models, or a function micro_batch -> number"
                )
        return None
