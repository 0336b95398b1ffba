"""What a CUDA device does differently from fake tensors in host memory: one named row each, with its source.

While `as_on(gpu)` is entered, recorded windows take the kernels that this GPU would take. Kernels are put in place with
`torch.library` for host tensors and taken away again. Knows nothing of models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autoaccum.prediction.attention import first_able, gpu_attention
from autoaccum.prediction.autocasting import autocast_lists, autocast_regions
from autoaccum.prediction.gpus import Gpu
from autoaccum.prediction.kernels import kernels_replaced
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.recording import Adjusted
from autoaccum.prediction.workspaces import convolution_workspaces, library_workspaces, on_tensor_cores

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


def _fused_dropout(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> AbstractContextManager[None]:
    def dropout(values: Tensor, p: float, train: bool) -> Tensor:
        dropped: Tensor = _aten.native_dropout(values, p, train)[0] if train and p > 0 else values
        return dropped

    return kernels_replaced("AutogradCPU", {"dropout": dropout})


def kernel_choices(seen: Iterable[frozenset[str]], gpu: Gpu) -> tuple[str, ...]:
    """What this GPU would run for what was `seen`: GPUs with the same choices allocate the same.

    But for the size of their matrix library's workspace.
    """
    uses_tensor_cores = [str(on_tensor_cores(gpu, dtype)) for dtype in (torch.float32, torch.bfloat16)]
    return (*uses_tensor_cores, *(first_able(gpu, able) for able in sorted(seen, key=sorted)))


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


_ONLY_FAKE = ("attention",)  # the GPU's kernels have no version for real tensors in host memory


@contextmanager
def _recurrent_layers(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """The fused LSTM of oneDNN keeps what it needs where a fake tensor shows nothing; in parts it shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings for other makers' GPUs, which the flags touch as well
        with torch.backends.mkldnn.flags(enabled=False):
            yield


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
        gpu_attention,
    ),
    Correction(
        "autocast lists",
        "norms, softmax, sums and powers run in the type that they are given",
        "they run in float32",
        "aten/src/ATen/autocast_mode.h",
        autocast_lists,
    ),
    Correction(
        "autocast regions",
        'torch.autocast("cuda") switches itself off',
        "it is on",
        "torch/amp/autocast_mode.py",
        autocast_regions,
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
        library_workspaces,
    ),
    Correction(
        "convolutions",
        "no workspace in torch's hands",
        "a workspace for the input, output and weight in NHWC, in every pass",
        "cuDNN's developer guide on tensor layouts; its heuristics for the RTX 3060 and 4060, versions 9.8 and 9.24",
        convolution_workspaces,
    ),
    Correction(
        "recurrent layers",
        "oneDNN's fused LSTM, whose workspace is not seen",
        "cuDNN's, whose reserve holds about what the parts of the layer save",
        "aten/src/ATen/native/RNN.cpp; the size of the reserve is an estimate",
        _recurrent_layers,
    ),
)
