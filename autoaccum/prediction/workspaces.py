"""What libraries take for themselves: cuBLAS for ever, cuDNN and oneDNN while a convolution runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autoaccum.prediction.gpus import Gpu
from autoaccum.prediction.recorder import Recorder

_aten = torch.ops.aten
_MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)


@contextmanager
def library_workspaces(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """One cuBLAS handle per thread, each with a workspace that it keeps: the forward's thread and autograd's."""
    taken: set[bool] = set()

    def ran(operation: Any, args: Any, out: Any) -> None:
        in_backward = recorder.progress.phase == "backward"
        if operation in _MATRIX_PRODUCTS and in_backward not in taken:
            taken.add(in_backward)
            recorder.workspace(gpu.workspace_bytes, kept=True)

    with recorder.heard_by(ran):
        yield


@contextmanager
def convolution_workspaces(gpu: Gpu, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """Tensor cores compute in NHWC: cuDNN turns what comes in NCHW into it, and its result back, in a workspace.

    For dense two-dimensional convolutions; grouped and depthwise ones run other kernels, and NHWC needs no turning. cuDNN's
    own heuristics, asked for the RTX 3060 and 4060, list workspaces of these sizes; which passes get one varies with the
    version, so all are given one.
    """

    def takes(inputs: Tensor, weight: Tensor, outputs: Tensor, groups: int) -> int:
        dense = groups == 1 and inputs.ndim == 4 and inputs.is_contiguous()
        return _bytes(inputs, weight, outputs) if dense and on_tensor_cores(gpu, inputs.dtype) else 0

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

    with recorder.heard_by(ran):
        yield


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


def on_tensor_cores(gpu: Gpu, dtype: torch.dtype) -> bool:
    """float32 runs there as TF32 from Ampere on, unless it is switched off; half precision from Volta on."""
    if gpu.vendor != "NVIDIA":
        return False
    if dtype == torch.float32:
        return gpu.compute_capability >= (8, 0) and torch.backends.cudnn.allow_tf32
    return dtype in (torch.float16, torch.bfloat16) and gpu.compute_capability >= (7, 0)
