"""Telling a loss that its gradient scaler has multiplied already: scaled twice, its gradient is too large."""

from __future__ import annotations

import torch
from torch import Tensor

from autoaccum.errors import InvalidRequestError

_NEAR_THE_TOP = 6  # operations: divided by the steps, weighed, moved to another dtype
_PASSED = ("MulBackward0", "DivBackward0", "ToCopyBackward0")


def refuse_scaled_loss(loss: Tensor, scaler: torch.amp.GradScaler) -> None:
    """Refuse a loss to which this scaler was applied in the training step.

    Looks at the factors of the loss only, no further down: reading what a checkpointed operation saved would run the whole
    block again.

    Raises:
        InvalidRequestError: With the remedy.
    """
    node = loss.grad_fn
    for _ in range(_NEAR_THE_TOP):
        if node is None or node.name() not in _PASSED or scaler._scale is None:
            return
        if node.name() == "MulBackward0" and getattr(node, "_saved_other", None) is scaler._scale:
            raise InvalidRequestError(
                "the loss was multiplied by scaler.scale() already; expected the loss as it is. Leave scaler.scale() out: "
                "an Accumulator that is given the scaler scales, unscales and updates."
            )
        following = [after for after, _ in node.next_functions if after is not None]
        node = following[0] if len(following) == 1 else None
