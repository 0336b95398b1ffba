"""What libraries take for themselves, and for which operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.prediction.trace import Trace
from autoaccum.workload import Workload

from .on_gpus import AMD, AMPERE, HOPPER, TURING, held_as, trace_of


@pytest.mark.parametrize(
    ("gpu", "num_bytes"), [(AMPERE, 8320 * 1024), (TURING, 8320 * 1024), (HOPPER, 32 * 2**20), (AMD, 2**27)]
)
def test_matrix_library_keeps_two_workspaces(gpu: str, num_bytes: int) -> None:
    """The forward's thread and autograd's each take the GPU's workspace once, with their first product, and keep it."""
    trace = trace_of(Workload(nn.Linear(16, 16), torch.randn(4, 16)), gpu)
    assert held_as(trace, "workspaces") == [num_bytes, num_bytes]
    blocks = [block for block, kind in enumerate(trace.kinds) if kind == "workspaces"]
    assert not {~block for block in blocks} & set(trace.events)
    phases = [[m for m in trace.marks if m.event <= trace.events.index(block)][-1] for block in blocks]
    assert [(mark.phase, mark.window) for mark in phases] == [("forward", 0), ("backward", 0)]


def test_without_products_there_is_no_workspace() -> None:
    """A model that multiplies no matrices takes no workspace."""
    assert held_as(trace_of(Workload(nn.LayerNorm(16), torch.randn(4, 16))), "workspaces") == []


def convolution(
    *, layer: nn.Module | None = None, dtype: torch.dtype = torch.float32, shape: Any = (4, 8, 10, 10)
) -> Workload:
    model = (nn.Conv2d(8, 16, 3, padding=1, bias=False) if layer is None else layer).to(dtype)
    return Workload(nn.Sequential(model), torch.randn(*shape).to(dtype))


def passing(trace: Trace) -> list[int]:
    """Workspaces that are given back at once."""
    pairs = zip(trace.events, trace.events[1:], strict=False)
    return [trace.sizes[a] for a, b in pairs if a >= 0 and b == ~a and trace.kinds[a] == "workspaces"]


def test_convolution_takes_its_tensors_in_another_layout() -> None:
    """A dense convolution takes room for input, weight and output in each of its passes, and gives it back."""
    workload = Workload(nn.Sequential(nn.Tanh(), nn.Conv2d(8, 16, 3, padding=1, bias=False)), torch.randn(4, 8, 10, 10))
    nn.init.ones_(workload.module[1].weight)
    rows = 3
    one = 4 * (rows * 8 * 100 + 16 * 8 * 9 + rows * 16 * 100)
    found = passing(trace_of(workload, AMPERE, rows))
    assert found == [one] * len(found) and len(found) == 4 * 2  # the input wants no gradient


def test_convolution_whose_input_wants_a_gradient_takes_three() -> None:
    """With a gradient for the input there are two backward passes."""
    layers = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 1, bias=False))
    assert len(passing(trace_of(Workload(layers, torch.randn(4, 8, 6, 6))))) == 4 * (2 + 3)


@pytest.mark.parametrize(
    ("gpu", "more", "takes"),
    [
        (AMPERE, {}, True),
        (AMPERE, {"dtype": torch.bfloat16}, True),
        (AMPERE, {"dtype": torch.float64}, False),
        (AMPERE, {"layer": nn.Conv2d(8, 16, 3, groups=2)}, False),
        (AMPERE, {"layer": nn.Conv2d(8, 8, 3, groups=8)}, False),
        (AMPERE, {"layer": nn.Conv1d(8, 8, 3), "shape": (4, 8, 10)}, False),
        (TURING, {}, False),
        (TURING, {"dtype": torch.float16}, True),
        (AMD, {}, False),
        (AMD, {"dtype": torch.bfloat16}, False),
    ],
    ids=str,
)
def test_which_convolutions_take_a_workspace(gpu: str, more: dict[str, Any], takes: bool) -> None:
    """Only dense two-dimensional convolutions on NVIDIA's tensor cores take workspaces."""
    assert bool(passing(trace_of(convolution(**more), gpu))) is takes


def test_channels_last_needs_no_turning() -> None:
    """A convolution in channels_last takes no workspace."""
    model = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch.to(memory_format=torch.channels_last)).mean()

    assert passing(trace_of(Workload(model, torch.randn(4, 8, 10, 10), training_step=step))) == []


def test_float32_without_tf32_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 switched off, float32 convolutions take no workspace."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert passing(trace_of(convolution())) == []
