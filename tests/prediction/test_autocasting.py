"""Autocast on host tensors as CUDA has it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoaccum.workload import Workload

from .on_gpus import AMPERE, Do, Doing, held_as, operations, trace_of


def under_cuda_autocast(do: Do, dtype: torch.dtype | None = torch.bfloat16, width: int = 16) -> Workload:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return model(batch).float().mean()

    return Workload(Doing(do, width), torch.randn(4, width), training_step=step)


FLOAT32: dict[str, tuple[Do, str]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (16,)), "aten.native_layer_norm"),
    "group_norm": (lambda x: F.group_norm(x.unsqueeze(-1), 4), "aten.native_group_norm"),
    "softmax": (lambda x: F.softmax(x, -1), "aten._softmax"),
    "log_softmax": (lambda x: F.log_softmax(x, -1), "aten._log_softmax"),
    "exp": (torch.exp, "aten.exp"),
    "pow": (lambda x: x.pow(2), "aten.pow"),
    "sum": (lambda x: x.sum(), "aten.sum"),
    "sum over a dimension": (lambda x: x.sum(-1), "aten.sum"),
    "cumsum": (lambda x: x.cumsum(-1), "aten.cumsum"),
    "softplus": (F.softplus, "aten.softplus"),
    "rsqrt": (lambda x: (x * x).rsqrt(), "aten.rsqrt"),
    "upsample": (lambda x: F.interpolate(x.view(-1, 1, 4, 4), scale_factor=2, mode="bilinear"), "aten.upsample_bilinear2d"),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_operations_that_cuda_runs_in_float32(name: str) -> None:
    """Under bfloat16 autocast, operations of CUDA's float32 list give float32, though the linear layer gives bfloat16."""
    do, operation = FLOAT32[name]
    ran = operations(under_cuda_autocast(do))
    assert {each.dtypes[0] for each in ran if each.name == "aten.addmm.default"} == {torch.bfloat16}
    assert torch.float32 in [each.dtypes[0] for each in ran if each.name.startswith(operation)]
    assert torch.bfloat16 not in [each.dtypes[0] for each in ran if each.name == f"{operation}.default"]


@pytest.mark.parametrize("do", [F.gelu, torch.tanh, F.relu, lambda x: x + x], ids=["gelu", "tanh", "relu", "add"])
def test_other_operations_keep_half_precision(do: Do) -> None:
    """Operations on no list run in the type that they are given: no float32 of the activations' size is made for them."""
    ran = operations(under_cuda_autocast(do))
    forward = [each.dtypes[0] for each in ran if each.name.split(".")[1] in ("gelu", "tanh", "relu", "add")]
    assert torch.bfloat16 in forward


@pytest.mark.parametrize(
    ("given", "expected"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (None, torch.float16)]
)
def test_cuda_autocast_is_on_without_a_gpu(given: torch.dtype | None, expected: torch.dtype) -> None:
    """Autocast for CUDA takes effect in a trace, in the type given or CUDA's own, without a warning that there is no GPU."""
    ran = operations(under_cuda_autocast(torch.tanh, given))
    assert {each.dtypes[0] for each in ran if each.name == "aten.addmm.default"} == {expected}


def test_autocast_that_is_off_stays_off() -> None:
    """A disabled region inside of autocast runs in float32."""

    def do(x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x.float() @ x.float().t()

    products = [each.dtypes[0] for each in operations(under_cuda_autocast(do)) if each.name == "aten.mm.default"]
    assert torch.float32 in products


def test_without_autocast_nothing_is_widened() -> None:
    """A bfloat16 model without autocast has its norms and softmax in bfloat16."""
    model = Doing(lambda x: F.softmax(F.layer_norm(x, (16,)), -1)).bfloat16()
    ran = operations(Workload(model, torch.randn(4, 16).bfloat16()))
    assert {each.dtypes[0] for each in ran if each.name.startswith(("aten._softmax.", "aten.native_layer_norm."))} == {
        torch.bfloat16
    }


def test_float32_norm_holds_more_than_the_hosts() -> None:
    """Under autocast a layer norm holds a float32 copy of its input and output on a GPU, and none on the host."""

    def do(x: Tensor) -> Tensor:
        return F.layer_norm(x, (256,))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).float().mean()

    workload = Workload(Doing(do, 256), torch.randn(4, 256), training_step=step)
    on_gpu, on_host = (sum(held_as(trace_of(workload, gpu, rows=64), "activations")) for gpu in (AMPERE, None))
    assert on_gpu - on_host >= 4 * 64 * 256 * 2
