"""Which kernel attention takes on which GPU, and what that kernel keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Optimizer

from autoaccum.prediction.corrections import as_on
from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.recording import record_windows
from autoaccum.workload import Workload

from .on_gpus import AMD, AMPERE, BOOL_MASK, HOPPER, TURING, Doing, Ran, attending, held_as, names, operations, trace_of


def kernels(ran: list[Ran]) -> set[str]:
    """Which attention kernels ran."""
    found = {"flash_attention", "efficient_attention", "cudnn_attention"}
    fused = {kind.removesuffix("_attention") for each in ran for kind in found if f"_product_{kind}" in each.name}
    return fused or ({"math"} if "aten._safe_softmax.default" in names(ran) else set())


BIAS = torch.zeros(6, 6)


@pytest.mark.parametrize(
    ("gpu", "expected", "more"),
    [
        (AMPERE, "efficient", {}),
        (TURING, "efficient", {}),
        (HOPPER, "efficient", {}),
        (AMD, "efficient", {}),
        (AMPERE, "efficient", {"mask": BOOL_MASK}),
        (AMPERE, "efficient", {"dropout": 0.1}),
        (AMPERE, "math", {"dtype": torch.float64}),
        (AMPERE, "math", {"dimensions": 3}),
        (AMPERE, "flash", {"dtype": torch.bfloat16}),
        (AMPERE, "flash", {"dtype": torch.float16}),
        (AMPERE, "flash", {"dtype": torch.bfloat16, "dropout": 0.1}),
        (AMPERE, "flash", {"dtype": torch.bfloat16, "causal": True}),
        (AMPERE, "flash", {"dtype": torch.bfloat16, "width": 12}),
        (AMPERE, "flash", {"dtype": torch.bfloat16, "width": 256}),
        (AMPERE, "efficient", {"dtype": torch.bfloat16, "width": 264}),
        (AMPERE, "efficient", {"dtype": torch.bfloat16, "mask": BOOL_MASK}),
        (AMPERE, "efficient", {"dtype": torch.bfloat16, "mask": BIAS}),
        (TURING, "efficient", {"dtype": torch.float16}),
        (TURING, "math", {"dtype": torch.bfloat16}),
        (HOPPER, "cudnn", {"dtype": torch.bfloat16}),
        (HOPPER, "cudnn", {"dtype": torch.bfloat16, "mask": BOOL_MASK}),
        (HOPPER, "flash", {"dtype": torch.bfloat16, "width": 136}),
        (HOPPER, "flash", {"dtype": torch.bfloat16, "width": 12}),
        (AMD, "flash", {"dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_attention_takes_the_gpus_kernel(gpu: str, expected: str, more: dict[str, Any]) -> None:
    """Attention runs the first kernel of the GPU's order that takes these inputs."""
    assert kernels(operations(attending(**more), gpu)) == {expected}


@pytest.mark.parametrize("gpu", [AMPERE, HOPPER])
def test_attention_under_autocast_runs_in_half(gpu: str) -> None:
    """Under autocast to bfloat16 attention takes the kernel for bfloat16."""
    inner = attending()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch)

    workload = Workload(inner.module, torch.randn(4, 6, 16), training_step=step)
    assert kernels(operations(workload, gpu)) == {"flash" if gpu == AMPERE else "cudnn"}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("gpu", [AMPERE, HOPPER])
def test_fused_attention_has_no_matrix_of_positions(gpu: str, dropout: float) -> None:
    """A fused kernel, with dropout as well, makes no matrix of positions times positions; plain attention does."""
    positions = 300

    def do(x: Tensor) -> Tensor:
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).mean()

    workload = Workload(Doing(do), torch.randn(2, positions, 16))

    def largest() -> int:
        trace = trace_of(workload, gpu)
        return max(size for size, kind in zip(trace.sizes, trace.kinds, strict=True) if kind != "workspaces")

    assert largest() < 2 * positions * positions
    with sdpa_kernel(SDPBackend.MATH):
        assert largest() >= 2 * positions * positions * 4


def test_kernels_that_are_switched_off_are_not_taken() -> None:
    """Attention heeds torch's switches, as a model sets them around its own attention."""

    def do(x: Tensor) -> Tensor:
        q = x.unsqueeze(1)
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, q, q).mean()

    assert kernels(operations(Workload(Doing(do), torch.randn(4, 6, 16)))) == {"math"}


def test_cudnn_that_is_switched_off_leaves_flash() -> None:
    """Where cuDNN's attention is switched off, a Hopper GPU takes flash attention."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert kernels(operations(attending(torch.bfloat16), HOPPER)) == {"flash"}


def test_attention_without_gradient_keeps_no_logsumexp() -> None:
    """Where nothing wants a gradient, efficient attention gives no sums of exponentials to keep."""

    def do(x: Tensor) -> Tensor:
        with torch.no_grad():
            q = x.unsqueeze(1)
            shift = F.scaled_dot_product_attention(q, q, q).mean()
        return (x + shift).mean()

    (ran,) = {each for each in operations(Workload(Doing(do), torch.randn(4, 6, 16))) if "efficient" in each.name}
    assert ran.shapes[1][-1] == 0


def test_grouped_queries_repeat_keys_and_values() -> None:
    """With fewer heads of keys than of queries, keys and values are repeated for every query head, as the result shows."""

    def do(x: Tensor) -> Tensor:
        query, key = x.view(-1, 4, 6, 4), x.view(-1, 4, 6, 4)[:, :2]
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=True).mean()

    ran = operations(Workload(Doing(do), torch.randn(2, 6, 16)))
    assert kernels(ran) == {"efficient"}
    assert (2, 4, 6, 4) in [shape for each in ran if "efficient" in each.name for shape in each.shapes]


def test_boolean_mask_becomes_a_bias_of_the_queries_type() -> None:
    """A boolean mask is turned into a bias of the queries' type, for all heads and rows at once, its rows aligned."""
    trace = trace_of(attending(mask=BOOL_MASK))
    assert 6 * 16 * 4 in trace.sizes  # six rows of six, each padded to sixteen values
    assert max(held_as(trace, "temporaries")) < 4 * 6 * 6 * 4 + 16 * 16 * 4


def test_attention_on_real_tensors_stays_what_it_is() -> None:
    """Where real tensors run, attention is left alone, because they cannot run a GPU's kernels."""
    workload = attending()
    optimizer = SGD(workload.module.parameters(), lr=0.1)
    seen: list[str] = []

    @contextmanager
    def adjusted(recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
        with as_on(gpu_for(AMPERE), real=True)(recorder, optimizer):
            recorder.listeners.append(lambda operation, args, out: seen.append(str(operation)))
            yield

    del optimizer
    record_windows(workload, workload.source.take(2), 2, host_batch=False, adjusted=adjusted)
    assert any("flash_attention_for_cpu" in name for name in seen)
