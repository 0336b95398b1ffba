"""Which kernel of `scaled_dot_product_attention` a GPU takes, and that kernel in the place of the host's.

Knows nothing of models; the order in which a GPU's kernels are tried is in `gpus`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from autoaccum.prediction.gpus import Gpu
from autoaccum.prediction.kernels import kernels_replaced
from autoaccum.prediction.recorder import Recorder

_aten = torch.ops.aten


def gpu_attention(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> AbstractContextManager[None]:
    """Attention as this GPU would run it, in the place of the host's."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        able = _able_kernels(query, key, value, attn_mask)
        recorder.notes.add(able)
        kernel = first_able(gpu, able)
        if enable_gqa and key.shape[-3] != query.shape[-3] and kernel not in _GROUPED:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        needs_gradient = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        return _ATTENTION[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale, needs_gradient)

    return kernels_replaced("AutogradCPU", {"scaled_dot_product_attention": attention})


_GROUPED = ("flash", "cudnn")  # take fewer keys than queries as they are
_BFLOAT16 = "in bfloat16"


def first_able(gpu: Gpu, able: frozenset[str]) -> str:
    """The kernel that this GPU runs of those that take the inputs."""
    if _BFLOAT16 in able and gpu.vendor == "NVIDIA" and gpu.compute_capability < (8, 0):
        return "math"  # no other kernel has it there
    return next((kernel for kernel in gpu.attention_order if kernel in able), "math")


def _able_kernels(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> frozenset[str]:
    """The kernels that take these inputs: `can_use_*` in sdp_utils.cpp, what matters of it."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    four = query.ndim == key.ndim == value.ndim == 4
    wide = max(query.shape[-1], value.shape[-1])
    switched_on = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "math": True,
    }
    takes = {
        "flash": half and four and mask is None and wide <= 256,
        "cudnn": half and four and wide <= 128 and wide % 8 == 0,
        "efficient": four
        and query.dtype != torch.float64
        and not (mask is not None and mask.requires_grad)
        and not any(part.shape[-1] % (8 if half else 4) for part in (query, value)),
        "math": True,
    }
    able = {kernel for kernel, can in takes.items() if can and switched_on[kernel]}
    return frozenset(able | ({_BFLOAT16} if query.dtype == torch.bfloat16 else set()))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, grad: bool
) -> Tensor:
    width = q.shape[-1]
    if width % 8:  # pad_last_dim<8> in attention.cpp
        q, k, v = (torch.nn.functional.pad(part, (0, 8 - width % 8)) for part in (q, k, v))
    out: Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, grad: bool
) -> Tensor:
    bias = _bias(mask, q, k)
    out: Tensor = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, grad, p, causal, scale=scale)[0]
    return out


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, grad: bool
) -> Tensor:
    bias = _bias(mask, q, k)
    out: Tensor = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, grad, p, causal, False, scale=scale)[0]
    return out


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, grad: bool
) -> Tensor:
    out: Tensor = _aten._scaled_dot_product_attention_math(q, k, v, mask, p, causal, None, scale=scale)[0]
    return out


_ATTENTION = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}
_BIAS_ALIGNMENT = 16  # pad_bias<16> in aten/src/ATen/native/transformers/attention.cpp


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as the kernels take it: of the queries' type (`convert_boolean_attn_mask`), its rows aligned, for all heads."""
    if mask is None:
        return None
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, 0.0) if mask.dtype == torch.bool else mask
    last = bias.shape[-1]
    if last % _BIAS_ALIGNMENT:
        bias = torch.nn.functional.pad(bias, (0, _BIAS_ALIGNMENT - last % _BIAS_ALIGNMENT))[..., :last]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
