"""One accumulation window: the single place where training happens.

The probe, the measurement of time, the self-check and the training loop all run these functions, so that what was proved is
what is run. `accumulate` and `run_window` read no value from a tensor on their way: the same code runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.backward import Backward
from autoaccum.gradients import (
    LOW_PRECISION,
    Accumulation,
    all_finite,
    clip,
    parameters_of,
    refuse_none,
    total_norm,
)
from autoaccum.records import Phase


@final
class Progress:
    """Where a window is; what was reached when an error came. `index` counts micro-batches from 0."""

    def __init__(self) -> None:
        self.phase: Phase = "data"
        self.index = 0


def accumulate(
    micro_batches: Iterable[Any],
    scales: Sequence[float],
    *,
    loss: Callable[[Any], Tensor],
    place: Callable[[Any], Any],
    accumulation: Accumulation,
    progress: Progress,
    run_all: bool = False,
) -> Tensor | None:
    """Add up the gradient of the whole window: sum_j scale_j * grad(mean_j).

    With scale_j = w_j / sum_i w_i that is the gradient of the mean over the whole window, when w_j is the denominator that
    the loss of micro-batch j itself used. A micro-batch of scale 0 is left out: its mean is 0 / 0.

    Args:
        micro_batches: In order, as many as scales; taken one at a time.
        loss: Scalar mean loss of a placed micro-batch, with its graph.
        place: Puts a micro-batch on the device.
        accumulation: Where the gradients go.
        progress: Its phase follows what runs.
        run_all: Run micro-batches of scale 0 as well, because other ranks wait for it.

    Returns:
        The loss over the window, detached, on the device; None where nothing had a scale.

    Raises:
        Exception: Whatever the user's code raises.
    """
    window_loss: Tensor | None = None
    progress.phase = "data"  # drawing a micro-batch belongs to it
    with training_modes():
        for index, (micro_batch, scale) in enumerate(zip(micro_batches, scales, strict=True)):
            progress.index = index
            if scale == 0 and not run_all:
                continue
            placed = place(micro_batch)
            del micro_batch
            progress.phase = "forward"
            part = scaled(loss(placed), scale)
            del placed
            progress.phase = "backward"
            accumulation.add(part)
            window_loss = added(window_loss, part)
            progress.phase = "data"
    accumulation.complete()
    return window_loss


def scaled(loss: Tensor, scale: float) -> Tensor:
    """This micro-batch's part of the window's loss. A mean over nothing is NaN, and a scale of 0 must not spread it."""
    return loss * scale if scale else loss.nan_to_num() * 0.0


def added(window_loss: Tensor | None, part: Tensor) -> Tensor:
    """The loss so far with another part of it; half precision adds up in float32, where 512 equal parts do not stagnate."""
    part = part.detach()
    part = part.float() if part.dtype in LOW_PRECISION else part
    return part if window_loss is None else window_loss + part


@contextmanager
def training_modes() -> Iterator[None]:
    """Gradients on, whatever mode the caller is in. Optimizer state made in inference mode could not be updated outside."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def run_window(
    micro_batches: Iterable[Any],
    weights: Sequence[float],
    *,
    loss: Callable[[Any], Tensor],
    optimizer: Optimizer,
    place: Callable[[Any], Any],
    progress: Progress,
    module: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
    look_for_others: bool = True,
    run_all: bool = False,
    wide: bool | None = None,
    reducing: Callable[[Sequence[Tensor | None]], None] | None = None,
) -> Tensor:
    """Accumulate the gradient of the whole window and take one optimizer step, as a probe does.

    Args:
        micro_batches: In order, as many as weights; taken one at a time.
        weights: What each micro-batch's loss is a mean over: rows, valid tokens. Not all zero.
        loss: Scalar mean loss of a placed micro-batch, with its graph.
        optimizer: Its gradients must be None; they are None again afterwards.
        place: Puts a micro-batch on the device.
        progress: Its phase follows what runs.
        module: The model, so that other parameters of it receive no gradient.
        scaler: Scales the loss. The step is taken whatever it finds: skipped, it would leave the optimizer without state.
        look_for_others: See `Backward`.
        run_all: See `accumulate`.
        wide: See `Accumulation`; None: where there are several micro-batches.
        reducing: Given the complete gradients; gets the memory that their reduction over ranks takes.

    Returns:
        The mean loss over the window, detached, on the device. Reading it synchronises; this function does not.

    Raises:
        InvalidRequestError: When no parameter of the optimizer received a gradient.
        Exception: Whatever the user's code raises.
    """
    total_weight = float(sum(weights)) or 1.0
    backward = Backward(scaler, module=module, look_for_others=look_for_others)
    accumulation = Accumulation(parameters_of(optimizer), backward, wide=len(weights) > 1 if wide is None else wide)
    try:
        scales = [weight / total_weight for weight in weights]
        mean_loss = accumulate(
            micro_batches,
            scales,
            loss=loss,
            place=place,
            accumulation=accumulation,
            progress=progress,
            run_all=run_all,
        )
        if reducing is not None:
            reducing(accumulation.gradients())
        progress.phase = "optimizer"
        refuse_none(accumulation)
        if scaler is not None:
            accumulation.narrow_where_apart()
            scaler.unscale_(optimizer)
        accumulation.narrow(looks=False)
        with training_modes():
            optimizer.step()
        if scaler is not None:
            scaler.update()
    finally:
        accumulation.discard()
    assert mean_loss is not None  # a gradient came from somewhere
    return mean_loss


class Step(NamedTuple):
    """Whether an optimizer step was taken, and the norm of the gradient before clipping."""

    taken: bool
    grad_norm: Tensor


def take_step(
    accumulation: Accumulation,
    optimizer: Optimizer,
    *,
    scaler: torch.amp.GradScaler | None,
    max_grad_norm: float | None,
    progress: Progress,
) -> Step:
    """Everything that happens once per window after the gradients are complete: unscale, check, clip, step, update, zero.

    A gradient that is not finite skips the step. Reads from the device. What fails before `progress` is in the optimizer
    phase has changed neither parameters nor optimizer state.
    """
    with training_modes():
        if scaler is not None:
            accumulation.narrow_where_apart()
            scaler.unscale_(optimizer)
        gradients = [gradient for gradient in accumulation.gradients() if gradient is not None]
        norm = total_norm(gradients)
        finite = all_finite(gradients, norm)
        if finite and max_grad_norm is not None:
            clip(gradients, norm, max_grad_norm)
        del gradients
        finite = accumulation.narrow() and finite
        progress.phase = "optimizer"
        if scaler is not None:
            scaler.step(optimizer)  # looks for infinities itself, and finds the same
            scaler.update()
        elif finite:
            optimizer.step()
        accumulation.discard()
    return Step(finite, norm)
