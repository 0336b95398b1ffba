"""Does the trainer's own accumulation give the big batch's gradient? Measured on a few of its rows, and what would.

Knows no plan and no budget. Everything is put back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoaccum.batches.structure import cloned
from autoaccum.batches.weights import Tokens, tokens
from autoaccum.checking.dropout import without_dropout
from autoaccum.engines import own_optimizer
from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.trainer.few_rows import Rows
from autoaccum.integrations.trainer.windows import Weighing, Windows, rows_of
from autoaccum.integrations.trainer.workload import replaced
from autoaccum.preserve import preserved

_PIECE = 2**20  # elements
# Relative errors of correct windows: about 1e-7 in float32, 1e-3 with TF32, 1e-2 in bfloat16. A wrong scale is far above.
_FINE_TOLERANCE, _TOLERANCE, _COARSE_TOLERANCE = 5e-5, 5e-3, 4e-2
_BEYOND_DOUBT, _CLEARLY = 5e-6, 3.0  # float32's own rounding; errors that differ by less than this factor are equal


class Finding(NamedTuple):
    """What was measured.

    Attributes:
        error: Relative error of the trainer's own window.
        norm_ratio: Norm of its gradient over that of the whole batch.
        num_parts: Micro-batches of the first window that was looked at.
        weighing: What makes it right; None where it is already.
        left: The relative error with it.
        is_exact: Whether what is left is rounding.
    """

    error: float
    norm_ratio: float
    num_parts: int
    weighing: Weighing | None
    left: float
    is_exact: bool


def examined(trainer: Any, several: Sequence[Rows], weighings: Sequence[Weighing]) -> Finding:
    """Measure the trainer's own accumulation, and where it is in doubt the weighings, and find the one that is right.

    Args:
        trainer: Whose `compute_loss` and scaling are measured.
        several: Each is a batch of its own; what is right is right for all of them.
        weighings: What may be, the likeliest first.

    Raises:
        InvalidRequestError: When none is.
    """
    rounding, tolerance = _rounding_of(trainer.model), _TOLERANCE if _is_float32(trainer.model) else _COARSE_TOLERANCE
    with _quiet(trainer):
        error, ratio = max(_compared(_gradient(trainer, rows.whole), trainer, rows.cuts, None) for rows in several)
        if not isfinite(ratio):
            raise InvalidRequestError(
                "the gradient of a few rows is zero or not finite, so the scaling of the loss could not be checked; look at "
                "the loss of a small batch first, or pass check=False."
            )
        errors = [0.0] * len(weighings)
        for rows in several if error > _BEYOND_DOUBT else ():
            whole = _gradient(trainer, rows.whole)
            found = [_compared(whole, trainer, rows.cuts, weighing)[0] for weighing in weighings]
            errors = list(map(max, errors, found))
    best = min(errors, default=inf) if error > _BEYOND_DOUBT else inf
    num_parts = len(several[0].cuts[0])
    if error <= max(_BEYOND_DOUBT, min(tolerance, best * _CLEARLY)):
        return Finding(error, ratio, num_parts, None, error, error <= rounding)
    if best <= tolerance:  # several may be right on these rows: the likeliest
        index = next(index for index, found in enumerate(errors) if found <= max(_BEYOND_DOUBT, best * _CLEARLY))
        return Finding(error, ratio, num_parts, weighings[index], errors[index], errors[index] <= rounding)
    tried = ", ".join(f"{weighing.name}: {found:.2g}" for weighing, found in zip(weighings, errors, strict=True))
    raise InvalidRequestError(
        f"the gradient that this trainer accumulates is not that of the big batch: over {num_parts} uneven "
        f"micro-batches it is wrong by {error:.2g} (its norm is {ratio:.3f} times the right one), and no known weight of "
        f"micro-batches makes it right ({tried}). Where the loss is a mean over something else (weighted classes, masked "
        "pixels), pass weight=batch -> number, what it is a mean over. Where it compares rows with each other or has a term "
        "of the whole batch (contrastive losses, load balancing of experts), no accumulation is exact; check=False takes it "
        "as it is."
    )


def weighings_for(batch: Any, shifts: bool) -> list[Weighing]:
    """What the loss of such batches may be a mean over, the likeliest first."""
    rows, summed = Weighing("rows", rows_of), Weighing("nothing, since it is a sum", None)
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return [rows, summed]
    plain = Weighing("labels other than -100", tokens("labels"))
    if labels.ndim < 2:
        return [rows, plain, summed]
    shifted = Weighing("labels other than -100 without each row's first", tokens("labels", shift=True))
    return [shifted, plain, rows, summed] if shifts else [plain, shifted, rows, summed]


def weighing_of(weight: object) -> Weighing:
    """The caller's own.

    Raises:
        InvalidRequestError: When it is no weight.
    """
    if weight == "samples":
        return Weighing("rows", rows_of)
    if isinstance(weight, Tokens):
        return Weighing(f"tokens({weight.key!r})", weight)
    if callable(weight):
        return Weighing("the caller's weight", weight)
    raise InvalidRequestError(
        f"weight={weight!r} is unknown; expected None (measured), 'samples', autoaccum.tokens('labels'), or a function "
        "micro-batch -> number."
    )


# -- the measurement


@contextmanager
def _quiet(trainer: Any) -> Iterator[None]:
    """No dropout, no batch statistics, nothing said to other ranks; all is put back."""
    model: nn.Module = trainer.model
    recurrent = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
    with ExitStack() as stack:
        if "_original_forward" in vars(model):  # what Accelerate has put under autocast in an earlier training
            stack.enter_context(replaced(model, forward=vars(model)["_original_forward"]))
        optimizer = None if trainer.optimizer is None else own_optimizer(trainer.optimizer)
        on_disk = trainer.args.device.type == "cpu"
        stack.enter_context(preserved(model, optimizer, device=trainer.args.device, on_disk=on_disk))
        stack.enter_context(without_dropout(model))
        model.eval()  # also layer drop, and running statistics of BatchNorm
        for part in recurrent:
            part.training = True  # cuDNN computes no gradient otherwise
        stack.enter_context(replaced(model, train=lambda mode=True: model))
        stack.enter_context(replaced(trainer.args, average_tokens_across_devices=False))
        yield


def _accumulate(trainer: Any, parts: Sequence[Any]) -> None:
    """Leave in the parameters what the trainer accumulates over these micro-batches."""
    args, model = trainer.args, trainer.model
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad(), replaced(args, gradient_accumulation_steps=len(parts)):
        batches, count = trainer.get_batch_samples(iter([cloned(part) for part in parts]), len(parts), args.device)
        with replaced(trainer, current_gradient_accumulation_steps=len(batches)):
            for micro_batch in batches:
                trainer.training_step(model, micro_batch, count)


def _gradient(trainer: Any, whole: Any) -> list[Tensor | None]:
    """The whole batch's gradient, in host memory."""
    _accumulate(trainer, [whole])
    return [None if p.grad is None else p.grad.detach().to("cpu", copy=True) for p in trainer.model.parameters()]


def _compared(
    whole: Sequence[Tensor | None], trainer: Any, cuts: Sequence[Sequence[Any]], weighing: Weighing | None
) -> tuple[float, float]:
    """Largest relative error of these windows under this weighing, with the ratio of its norms."""
    windows = Windows(trainer, weighing, world_size=1)
    if weighing is not None:
        windows.put_on()
    found = []
    try:
        for parts in cuts:
            _accumulate(trainer, parts)
            found.append(_distance(whole, trainer.model.parameters()))
    finally:
        windows.take_off()
    return max(found)


def _distance(whole: Sequence[Tensor | None], parameters: Iterable[nn.Parameter]) -> tuple[float, float]:
    """Norm of the difference and norm of the parameters' gradients, each over the norm of the first."""
    squares = [0.0, 0.0, 0.0]
    for first, parameter in zip(whole, parameters, strict=True):
        if first is None and parameter.grad is None:
            continue
        for one, other in _in_pieces(first, parameter.grad):
            for index, value in enumerate((one, other, other - one)):
                squares[index] += float(value.square().sum())
    norm, other_norm, difference = (sqrt(value) if isfinite(value) else inf for value in squares)
    if norm == 0 or not isfinite(norm):
        return inf, inf
    return difference / norm, other_norm / norm


def _in_pieces(first: Tensor | None, second: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Two gradients side by side in float64, in pieces: copies of a whole embedding may not fit; None is zero."""
    one, other = (None if gradient is None else _flat(gradient) for gradient in (first, second))
    zero = torch.zeros((), dtype=torch.float64)
    for start in range(0, max(0 if flat is None else len(flat) for flat in (one, other)), _PIECE):
        pieces = [zero if flat is None else flat[start : start + _PIECE].to("cpu", torch.float64) for flat in (one, other)]
        yield pieces[0], pieces[1]


def _flat(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().flatten()


def _rounding_of(model: nn.Module) -> float:
    """The largest relative error of a window that is right."""
    if not _is_float32(model):
        return _COARSE_TOLERANCE
    on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return _FINE_TOLERANCE if on_host or torch.get_float32_matmul_precision() == "highest" else _TOLERANCE


def _is_float32(model: nn.Module) -> bool:
    return all(p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.requires_grad)
