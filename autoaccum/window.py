"""One accumulation window: the single place where training happens.

The probe, the measurement of time, the self-check and the training loop all run this function, so that what was proved is
what is run. It reads no value from a tensor on its way: the same code runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from autoaccum.errors import InvalidRequestError
from autoaccum.records import Phase


@final
class Progress:
    """Where a window is; what was reached when an error came."""

    def __init__(self) -> None:
        self.phase: Phase = "data"


def run_window(
    micro_batches: Iterable[Any],
    weights: Sequence[float],
    *,
    loss: Callable[[Any], Tensor],
    optimizer: Optimizer,
    place: Callable[[Any], Any],
    progress: Progress,
) -> Tensor:
    """Accumulate the gradient of the whole window and take one optimizer step.

    The gradient is sum_j w_j * grad(mean_j) / sum_i w_i, which is the gradient of the mean over the whole window when w_j is
    the denominator that the loss of micro-batch j itself used. A micro-batch of weight 0 is left out: its mean is 0 / 0.

    Args:
        micro_batches: In order, as many as weights; taken one at a time.
        weights: What each micro-batch's loss is a mean over: rows, valid tokens. Not all zero.
        loss: Scalar mean loss of a placed micro-batch, with its graph.
        optimizer: Its gradients must be None; they are None again afterwards.
        place: Puts a micro-batch on the device.
        progress: Its phase follows what runs.

    Returns:
        The mean loss over the window, detached, on the device. Reading it synchronises; this function does not.

    Raises:
        InvalidRequestError: When no parameter of the optimizer received a gradient.
        Exception: Whatever the user's code raises.
    """
    total_weight = float(sum(weights))
    mean_loss: Tensor | None = None
    progress.phase = "data"  # drawing a micro-batch belongs to it
    # The step as well: optimizer state made under inference mode could not be updated outside of it.
    with torch.inference_mode(False), torch.enable_grad():
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            if weight == 0:
                continue
            placed = place(micro_batch)
            progress.phase = "forward"
            part = loss(placed) * (weight / total_weight)
            del placed
            progress.phase = "backward"
            part.backward()  # type: ignore[no-untyped-call]
            part = part.detach()
            mean_loss = part if mean_loss is None else mean_loss + part
            progress.phase = "data"
        progress.phase = "optimizer"
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            raise InvalidRequestError(
                "no parameter of the optimizer received a gradient: the training step ran nothing that leads to them. "
                "Does the loss depend on the model that was passed in?"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert mean_loss is not None  # a gradient came from somewhere
    return mean_loss
