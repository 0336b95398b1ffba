"""CUDA's autocast on host tensors: which operations it widens, and that it is on where the user's code says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from autoaccum.prediction.gpus import Gpu
from autoaccum.prediction.kernels import kernels_replaced
from autoaccum.prediction.recorder import Recorder

_aten = torch.ops.aten

# Operations that run in float32 under CUDA's autocast and in the type that they are given under the CPU's:
# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE of aten/src/ATen/autocast_mode.h, less those the CPU's list has as well.
_FLOAT32_ON_CUDA = (
    *("exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "softplus", "logsumexp"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "acos", "asin", "cosh", "sinh", "tan", "erfinv"),
    *("layer_norm", "group_norm", "rms_norm", "cosine_similarity", "dist", "renorm"),
    *("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "linalg_vector_norm"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d"),
    *("upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d"),
)


def autocast_lists(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> AbstractContextManager[None]:
    """What autocast runs in float32 on CUDA runs in float32 here as well."""
    known = [name for name in _FLOAT32_ON_CUDA if hasattr(_aten, name.split(".")[0])]
    return kernels_replaced("AutocastCPU", {name: _in_float32(name) for name in known})


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(_aten, packet), overload or "default")

    def widened(leaf: Any) -> Any:
        low = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
        return leaf.float() if low else leaf

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operation(*tree_map(widened, args), **tree_map(widened, kwargs))

    return run


@contextmanager
def autocast_regions(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """`torch.autocast("cuda")` in the user's code: without a GPU it would switch itself off."""
    original = torch.autocast.__init__

    def on_host(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        original(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = on_host  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
