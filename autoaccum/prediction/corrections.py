"""What a CUDA device does differently from fake tensors in host memory: one named row each, with its source.

While `as_on(gpu)` is entered, recorded windows take the kernels that this GPU would take. Kernels are put in place with
`torch.library` for host tensors and taken away again. Knows nothing of models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autoaccum.prediction.gpus import Gpu
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.recording import Adjusted

_aten = torch.ops.aten


class Correction(NamedTuple):
    """One difference: what is put right, and where it is known from. `enter` puts it in place."""

    name: str
    on_cpu: str
    on_cuda: str
    source: str
    enter: Callable[[Gpu, Recorder, Optimizer], AbstractContextManager[None]]


def as_on(gpu: Gpu, *, real: bool = False, seen: set[frozenset[str]] | None = None) -> Adjusted:
    """What `fake_trace` enters while windows run, so that they take what they would take on this GPU.

    Args:
        real: Leave out what real tensors in host memory cannot run.
        seen: Gets what attention could have run with, for `kernel_choices`.
    """

    @contextmanager
    def adjusted(recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
        with ExitStack() as stack:
            for correction in CORRECTIONS:
                if not (real and correction.name in _ONLY_FAKE):
                    stack.enter_context(correction.enter(gpu, recorder, optimizer))
            yield
        if seen is not None:
            seen.update(recorder.notes)

    return adjusted


@contextmanager
def _kernels(key: str, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """These kernels for host tensors while inside."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call] # what the library's own finalizer does, but not some time later


def _fused_dropout(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> AbstractContextManager[None]:
    def dropout(values: Tensor, p: float, train: bool) -> Tensor:
        dropped: Tensor = _aten.native_dropout(values, p, train)[0] if train and p > 0 else values
        return dropped

    return _kernels("AutogradCPU", {"dropout": dropout})


def _attention(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> AbstractContextManager[None]:
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
        kernel = _first_able(gpu, able)
        if enable_gqa and key.shape[-3] != query.shape[-3] and kernel not in _GROUPED:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        needs_gradient = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        return _ATTENTION[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale, needs_gradient)

    return _kernels("AutogradCPU", {"scaled_dot_product_attention": attention})


def kernel_choices(seen: Iterable[frozenset[str]], gpu: Gpu) -> tuple[str, ...]:
    """What this GPU would run for what was `seen`: GPUs with the same choices allocate the same.

    But for the size of their matrix library's workspace.
    """
    on_tensor_cores = [str(_on_tensor_cores(gpu, dtype)) for dtype in (torch.float32, torch.bfloat16)]
    return (*on_tensor_cores, *(_first_able(gpu, able) for able in sorted(seen, key=sorted)))


_GROUPED = ("flash", "cudnn")  # take fewer keys than queries as they are
_BFLOAT16 = "in bfloat16"


def _first_able(gpu: Gpu, able: frozenset[str]) -> str:
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


def _autocast_lists(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> AbstractContextManager[None]:
    known = [name for name in _FLOAT32_ON_CUDA if hasattr(_aten, name.split(".")[0])]
    return _kernels("AutocastCPU", {name: _in_float32(name) for name in known})


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


class _HereInsteadOf(TorchFunctionMode):
    """Whatever is sent to a GPU stays in host memory. Not active where checkpoints run again; there it is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda or func is Tensor.pin_memory:
            return args[0]
        return func(*tree_map(_here, args), **tree_map(_here, kwargs or {}))


def _here(leaf: Any) -> Any:
    is_gpu = isinstance(leaf, (str, torch.device)) and str(leaf).split(":")[0] == "cuda"
    return torch.device("cpu") if is_gpu else leaf


def _devices(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> AbstractContextManager[Any]:
    return _HereInsteadOf()


@contextmanager
def _autocast_regions(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
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


@contextmanager
def _foreach_optimizer(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """`_default_to_fused_or_foreach` of torch/optim/optimizer.py, where the user has not chosen."""
    undecided = [group for group in optimizer.param_groups if group.get("foreach", False) is None and not group.get("fused")]
    if optimizer.defaults.get("differentiable"):
        undecided = []
    for group in undecided:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in undecided:
            group["foreach"] = None


_MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)


@contextmanager
def _library_workspaces(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """One cuBLAS handle per thread, each with a workspace that it keeps: the forward's thread and autograd's."""
    taken: set[bool] = set()

    def ran(operation: Any, args: Any, out: Any) -> None:
        in_backward = recorder.progress.phase == "backward"
        if operation in _MATRIX_PRODUCTS and in_backward not in taken:
            taken.add(in_backward)
            recorder.workspace(gpu.workspace_bytes, kept=True)

    recorder.listeners.append(ran)
    try:
        yield
    finally:
        recorder.listeners.remove(ran)


_ONLY_FAKE = ("attention",)  # the GPU's kernels have no version for real tensors in host memory


@contextmanager
def _convolution_workspaces(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """Tensor cores compute in NHWC: cuDNN turns what comes in NCHW into it, and its result back, in a workspace.

    For dense two-dimensional convolutions; grouped and depthwise ones run other kernels, and NHWC needs no turning. cuDNN's
    own heuristics, asked for the RTX 3060 and 4060, list workspaces of these sizes; which passes get one varies with the
    version, so all are given one.
    """

    def takes(inputs: Tensor, weight: Tensor, outputs: Tensor, groups: int) -> int:
        dense = groups == 1 and inputs.ndim == 4 and inputs.is_contiguous()
        return _bytes(inputs, weight, outputs) if dense and _on_tensor_cores(gpu, inputs.dtype) else 0

    with _workspace_in_every_pass(recorder, takes):
        yield


@contextmanager
def _workspace_in_every_pass(recorder: Recorder, takes: Callable[[Tensor, Tensor, Tensor, int], int]) -> Iterator[None]:
    """A workspace of what `takes` says (of input, weight, output and groups) in each pass of every convolution."""

    def ran(operation: Any, args: Any, out: Any) -> None:
        if operation is _aten.convolution.default:
            num_bytes, passes = takes(args[0], args[1], out, args[8]), 1
        elif operation is _aten.convolution_backward.default:
            num_bytes, passes = takes(args[1], args[2], args[0], args[9]), sum(args[10][:2])
        else:
            return
        for _ in range(passes if num_bytes else 0):
            recorder.workspace(num_bytes, kept=False)

    recorder.listeners.append(ran)
    try:
        yield
    finally:
        recorder.listeners.remove(ran)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def on_host(recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """What real convolutions in host memory take and fake ones do not: oneDNN computes in a blocked layout of its own.

    Plain tensors are turned into it and back around every pass (`reorder` in aten/src/ATen/native/mkldnn). Measured with a
    ResNet: at the peak, one input and one output of the layer more than without.
    """
    is_there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]

    def takes(inputs: Tensor, weight: Tensor, outputs: Tensor, groups: int) -> int:
        return _bytes(inputs, outputs) if is_there and inputs.ndim == 4 else 0

    with _workspace_in_every_pass(recorder, takes):
        yield


@contextmanager
def _recurrent_layers(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """The fused LSTM of oneDNN keeps what it needs where a fake tensor shows nothing; in parts it shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings for other makers' GPUs, which the flags touch as well
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _on_tensor_cores(gpu: Gpu, dtype: torch.dtype) -> bool:
    """float32 runs there as TF32 from Ampere on, unless it is switched off; half precision from Volta on."""
    if gpu.vendor != "NVIDIA":
        return False
    if dtype == torch.float32:
        return gpu.compute_capability >= (8, 0) and torch.backends.cudnn.allow_tf32
    return dtype in (torch.float16, torch.bfloat16) and gpu.compute_capability >= (7, 0)


CORRECTIONS = (
    Correction(
        "dropout",
        "four operations, a mask of the values' own type is saved",
        "one kernel, a mask of one byte per value is saved",
        "is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp",
        _fused_dropout,
    ),
    Correction(
        "attention",
        "flash attention for the CPU, or the plain product where there is dropout",
        "the first kernel of the GPU's order that takes the inputs",
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; the order: prediction/gpus.py",
        _attention,
    ),
    Correction(
        "autocast lists",
        "norms, softmax, sums and powers run in the type that they are given",
        "they run in float32",
        "aten/src/ATen/autocast_mode.h",
        _autocast_lists,
    ),
    Correction(
        "autocast regions",
        'torch.autocast("cuda") switches itself off',
        "it is on",
        "torch/amp/autocast_mode.py",
        _autocast_regions,
    ),
    Correction(
        "devices",
        'batch.to("cuda") in a training step fails',
        "it moves the batch",
        "torch.overrides.TorchFunctionMode",
        _devices,
    ),
    Correction(
        "optimizer implementation",
        "a loop over parameters",
        "foreach kernels, where nothing else was chosen",
        "_default_to_fused_or_foreach in torch/optim/optimizer.py",
        _foreach_optimizer,
    ),
    Correction(
        "matrix library",
        "no workspace",
        "a workspace for each of two threads, kept",
        "aten/src/ATen/cuda/CublasHandlePool.cpp; the size: prediction/gpus.py",
        _library_workspaces,
    ),
    Correction(
        "convolutions",
        "no workspace in torch's hands",
        "a workspace for the input, output and weight in NHWC, in every pass",
        "cuDNN's developer guide on tensor layouts; its heuristics for the RTX 3060 and 4060, versions 9.8 and 9.24",
        _convolution_workspaces,
    ),
    Correction(
        "recurrent layers",
        "oneDNN's fused LSTM, whose workspace is not seen",
        "cuDNN's, whose reserve holds about what the parts of the layer save",
        "aten/src/ATen/native/RNN.cpp; the size of the reserve is an estimate",
        _recurrent_layers,
    ),
)
