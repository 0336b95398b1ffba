"""Mixed precision by autocast, and TF32 in matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from operator import attrgetter
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.records import Levers
from autoaccum.shards import is_sharded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCASTING = ("cpu", "cuda", "xpu", "mps")


@final
class Precision(AbstractLever):
    """Forward passes run under autocast; weights, gradients and optimizer state stay as they are.

    It changes the numerics. With fp16 the loss has to be scaled by a `torch.amp.GradScaler`, which the window does.
    """

    name: ClassVar[str] = "precision"
    levels: ClassVar[tuple[str, ...]] = ("fp32", "tf32", "bf16", "fp16")
    keeps_numerics: ClassVar[bool] = False

    def reason_against(self, level: str, subject: Subject) -> str | None:
        if level == "fp32":
            return None
        low = {parameter.dtype for parameter in subject.module.parameters() if parameter.is_floating_point()}
        if not low:
            return "no weight is a real floating-point number"
        if torch.float32 not in low:
            return f"the weights are {', '.join(sorted(map(str, low)))}, which is what the caller uses already"
        if level in DTYPES and is_sharded(subject.module):
            return "the precision of a sharded model is set by the MixedPrecisionPolicy of fully_shard"
        kind = subject.device.type
        if kind in _AUTOCASTING and torch.is_autocast_enabled(kind):
            return "autocast is on around the call, which is what the caller uses already"
        if "_original_forward" in vars(subject.module):  # where Accelerate keeps what its autocast is around
            return "Accelerate runs the forward pass under autocast, which is what the caller uses already"
        return _reason_of_device(level, subject.device) if subject.is_here else None

    @contextmanager
    def applied(self, levers: Levers, subject: Subject) -> Iterator[None]:
        """The model's own forward pass runs under it; a loss that is computed outside gets float32."""
        if levers.precision == "fp32":
            yield
            return
        with ExitStack() as stack:
            if levers.precision == "tf32":
                stack.enter_context(_matmul_precision("high"))
            else:
                stack.enter_context(_forward_under_autocast(levers, subject))
            yield


def autocast_for(levers: Levers, device: torch.device) -> torch.autocast:
    """The autocast region for a forward pass and its loss; one that changes nothing where the lever asks for none.

    Example:
        >>> autocast_for(Levers(precision="bf16"), torch.device("cpu")).fast_dtype
        torch.bfloat16
    """
    kind = device.type if device.type in _AUTOCASTING else "cpu"
    if levers.precision not in DTYPES:
        return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
    return torch.autocast(kind, dtype=DTYPES[levers.precision])


def under_autocast(loss: Callable[[Any], Tensor], levers: Levers, device: torch.device) -> Callable[[Any], Tensor]:
    """The loss of a micro-batch, with forward pass and loss in one autocast region; the loss itself in float32."""
    if levers.precision not in DTYPES:
        return loss

    def run(micro_batch: Any) -> Tensor:
        with autocast_for(levers, device):
            return loss(micro_batch).float()

    return run


@contextmanager
def _forward_under_autocast(levers: Levers, subject: Subject) -> Iterator[None]:
    module = subject.module
    before = vars(module).get("forward")
    # Not a closure: a deep copy of the model, made while inside, would run this model's forward pass.
    cast_forward = update_wrapper(partial(_cast, module.forward, levers, subject.device), module.forward)
    vars(module)["forward"] = cast_forward
    try:
        yield
    finally:
        if before is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = before


def _cast(forward: Callable[..., Any], levers: Levers, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    if torch.is_autocast_enabled(device.type):  # the loss is inside of a region as well, and decides for itself
        return forward(*args, **kwargs)
    with autocast_for(levers, device):
        out = forward(*args, **kwargs)
    return tree_map(_widened, out)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in DTYPES.values() else leaf


@contextmanager
def _matmul_precision(level: str) -> Iterator[None]:
    """By the old name; by the new ones (torch 2.9) where those were used, since torch then does not tell the old one."""
    names = ("cuda.matmul", "mkldnn.matmul") if hasattr(torch.backends, "fp32_precision") else ()
    places = [attrgetter(name)(torch.backends) for name in names]
    by_new_names = [(place, place.fp32_precision) for place in places]
    by_old_name = matmul_precision()
    if by_old_name is None:
        places[0].fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        if by_old_name is not None:
            torch.set_float32_matmul_precision(by_old_name)
        for place, precision in by_new_names:  # the old name's setter leaves its own value there, in place of none
            if place.fp32_precision != precision:
                place.fp32_precision = precision


def matmul_precision() -> str | None:
    """How matrix products of float32 are computed, None where torch does not tell by this name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _reason_of_device(level: str, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "TF32 is a mode of NVIDIA GPUs" if level == "tf32" else None
    if device.type == "cuda":
        return _reason_of_gpu(level, device)
    if level == "tf32":
        return "TF32 is a mode of NVIDIA GPUs"
    return None if device.type in _AUTOCASTING else f"autocast does not know {device.type}"


def _reason_of_gpu(level: str, device: torch.device) -> str | None:
    if level == "bf16":
        known = torch.cuda.is_bf16_supported(including_emulation=False)
        return None if known else "this GPU has no bfloat16 arithmetic"
    if level == "fp16":
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "TF32 needs an NVIDIA GPU of compute capability 8.0 or newer"
    if matmul_precision() != "highest":
        return "matrix products use TF32 already"
    return None
