"""Telling a loss that a gradient scaler has multiplied already: scaled twice, or never unscaled, gradients are too large."""

from __future__ import annotations

from collections.abc import Iterator
from math import frexp

import torch
from torch import Tensor

from autoaccum.errors import InvalidRequestError

_NEAR_THE_TOP = 6  # operations: divided by the steps, added up, moved to another dtype
_SMALLEST_SCALE = 1024.0  # a scaler starts at 2 ** 16 and halves; smaller factors may be part of a loss


def refuse_scaled_loss(loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse a loss to which `GradScaler.scale` was applied in the training step, by this scaler or another one.

    Another one is told by its factor, a tensor of one power of two from 1024 on; reading it waits for the device.

    Raises:
        InvalidRequestError: With the remedy.
    """
    own = None if scaler is None else scaler._scale
    for factor in _factors(loss):
        if factor is own or _is_a_scale(factor):
            raise InvalidRequestError(
                f"the training step returns a loss that a gradient scaler has multiplied by {float(factor):g}; expected the "
                "loss as it is. Take scaler.scale() out of it, and give the scaler to Accumulator(scaler=...), which scales "
                "and unscales. (Where the factor is part of the loss, multiply by a number instead of a tensor.)"
            )


def _factors(loss: Tensor) -> Iterator[Tensor]:
    """The tensors of one element without a gradient by which the loss was multiplied last of all."""
    node = loss.grad_fn
    for _ in range(_NEAR_THE_TOP):
        if node is None:
            return
        factor = getattr(node, "_saved_other", None) if node.name().startswith("Mul") else None
        if type(factor) is Tensor and not factor.is_meta and factor.numel() == 1 and not factor.requires_grad:
            yield factor  # a fake tensor, which has no value, is of another type
        following = [after for after, _ in node.next_functions if after is not None]
        node = following[0] if len(following) == 1 else None


def _is_a_scale(factor: Tensor) -> bool:
    """Numbers of Python are float64 there, the factor of a scaler is float32."""
    if factor.dtype is not torch.float32:
        return False
    value = float(factor)
    return _SMALLEST_SCALE <= value < float("inf") and frexp(value)[0] == 0.5
