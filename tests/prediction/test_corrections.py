"""What a GPU does differently from host memory: each difference by what a trace then holds, and nothing is left of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoaccum.prediction.corrections import CORRECTIONS, as_on, kernel_choices
from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.gpus import GPUS
from autoaccum.prediction.growth import growth_of
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.recording import record_windows
from autoaccum.prediction.trace import Trace
from autoaccum.targets.libraries import hf_workload
from autoaccum.workload import Workload

AMPERE, TURING, HOPPER, AMD = "RTX 3060 12GB", "T4 16GB", "H100 80GB", "MI300X 192GB"
Do = Callable[[Tensor], Tensor]


class Ran(NamedTuple):
    """One operation of a trace, and what it gave."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]


class Doing(nn.Module):
    """Does something with the output of a linear layer."""

    def __init__(self, do: Do, width: int = 16) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(width, width), do

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self.linear(x))


def operations(workload: Workload, gpu: str = AMPERE, rows: int = 2, **more: Any) -> list[Ran]:
    """Everything that runs in a trace as on this GPU."""
    found: list[Ran] = []

    def note(operation: Any, args: Any, out: Any) -> None:
        tensors = [part for part in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(part, Tensor)]
        found.append(Ran(str(operation), tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors)))

    @contextmanager
    def adjusted(recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
        with as_on(gpu_for(gpu), **more)(recorder, optimizer):
            recorder.listeners.append(note)
            yield

    fake_trace(workload, rows, host_batch=False, adjusted=adjusted)
    return found


def names(ran: list[Ran]) -> set[str]:
    return {each.name for each in ran}


def trace_of(workload: Workload, gpu: str | None = AMPERE, rows: int = 2) -> Trace:
    adjusted = None if gpu is None else as_on(gpu_for(gpu))
    return fake_trace(workload, rows, host_batch=False, adjusted=adjusted)


def held_as(trace: Trace, kind: str) -> list[int]:
    return [size for size, own in zip(trace.sizes, trace.kinds, strict=True) if own == kind]


# -- dropout


def dropping(p: float = 0.5) -> Workload:
    return Workload(nn.Sequential(nn.Linear(16, 1000), nn.Dropout(p), nn.Linear(1000, 4)), torch.randn(4, 16))


def test_dropout_keeps_a_byte_for_each_value() -> None:
    """As on a GPU, dropout's mask is one byte for each value, and no mask of the values' own type is kept."""
    on_gpu, on_host = (held_as(trace_of(dropping(), gpu, rows=3), "activations") for gpu in (AMPERE, None))
    assert on_gpu.count(3 * 1000) == 4 and on_host.count(3 * 1000) == 0
    assert sum(on_host) - sum(on_gpu) >= 4 * 3 * 1000 * 3


def test_dropout_of_nothing_is_no_kernel() -> None:
    """Dropout with p=0, and dropout in a frozen part that is in eval mode, runs no kernel and keeps no mask."""
    in_eval = dropping()
    in_eval.module[1].eval()
    assert all("native_dropout" not in each.name for w in (dropping(0.0), in_eval) for each in operations(w))


def test_dropout_of_everything_runs() -> None:
    """Dropout with p=1 is traced as well."""
    assert "aten.native_dropout.default" in names(operations(dropping(1.0)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_is_the_same_in_recomputation(reentrant: bool) -> None:
    """In a checkpointed part the recomputation takes the same kernel as the forward pass."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=reentrant)

    workload = Workload(Checkpointed(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)), torch.randn(4, 16))
    ran = [each.name for each in operations(workload)]
    assert ran.count("aten.native_dropout.default") == 2 * 4
    assert "aten.bernoulli_.float" not in ran


# -- attention


def attending(
    dtype: torch.dtype = torch.float32,
    width: int = 16,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    dimensions: int = 4,
) -> Workload:
    """Attention over six positions."""

    def do(x: Tensor) -> Tensor:
        q = x.unsqueeze(1) if dimensions == 4 else x
        given = None if mask is None else mask if mask.dtype == torch.bool else mask.to(dtype)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=given, dropout_p=dropout, is_causal=causal).mean()

    return Workload(Doing(do, width).to(dtype), torch.randn(4, 6, width).to(dtype))


def kernels(ran: list[Ran]) -> set[str]:
    """Which attention kernels ran."""
    found = {"flash_attention", "efficient_attention", "cudnn_attention"}
    fused = {kind.removesuffix("_attention") for each in ran for kind in found if f"_product_{kind}" in each.name}
    return fused or ({"math"} if "aten._safe_softmax.default" in names(ran) else set())


BOOL_MASK = torch.ones(6, 6, dtype=torch.bool).tril()
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


# -- autocast


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


# -- steps that name a GPU

ON_A_GPU: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "to": lambda model, batch: model(batch.to("cuda")).mean(),
    "to an index": lambda model, batch: model(batch.to("cuda:0", non_blocking=True)).mean(),
    "to a device": lambda model, batch: model(batch.to(device=torch.device("cuda"))).mean(),
    "cuda": lambda model, batch: model(batch.pin_memory().cuda()).mean(),
    "made there": lambda model, batch: (model(batch) + torch.zeros(16, device="cuda")).mean(),
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_step_that_sends_its_batch_to_a_gpu(name: str) -> None:
    """A training step that names cuda is traced where there is none."""
    workload = Workload(nn.Linear(16, 16), torch.randn(4, 16), training_step=ON_A_GPU[name])
    assert "aten.addmm.default" in names(operations(workload))


def test_cuda_is_not_here_afterwards() -> None:
    """Outside of a trace, a tensor is sent to a GPU as ever."""
    workload = Workload(nn.Linear(16, 16), torch.randn(4, 16), training_step=ON_A_GPU["to"])
    operations(workload)
    assert torch.ones(1).to("cpu").device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            torch.ones(1).to("cuda")


# -- recurrent layers


def test_lstm_runs_in_its_parts() -> None:
    """An LSTM is traced in its parts, of which each is seen, and not as oneDNN's one operation, whose workspace is not."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(16, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].mean()

    workload = Workload(Recurrent(), torch.randn(4, 5, 16))
    assert not any("mkldnn" in name for name in names(operations(workload)))
    gates = 4 * 2 * 5 * 4 * 8 * 4  # of four micro-batches, two rows, five steps and four gates
    assert sum(held_as(trace_of(workload), "activations")) >= gates


# -- the optimizer


@pytest.mark.parametrize(
    ("make", "is_foreach"),
    [
        (lambda parameters: AdamW(parameters), True),
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), True),
        (lambda parameters: torch.optim.RMSprop(parameters), True),
        (lambda parameters: AdamW(parameters, foreach=False), False),
        (lambda parameters: AdamW(parameters, fused=True), False),
    ],
    ids=["adamw", "momentum", "rmsprop", "loop", "fused"],
)
def test_optimizer_that_is_left_to_torch_is_foreach(make: Any, is_foreach: bool) -> None:
    """An optimizer works on all parameters at once, as it does by default on a GPU, unless the user chose otherwise."""
    workload = Workload(nn.Linear(16, 16), torch.randn(4, 16), optimizer=make)
    assert any("_foreach_mul_" in name for name in names(operations(workload))) is is_foreach


@pytest.mark.parametrize("fails", [False, True])
def test_optimizers_groups_are_as_they_were(fails: bool) -> None:
    """What was undecided in an optimizer's groups is undecided afterwards, and what was decided is untouched."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer: Optimizer = AdamW([{"params": first.parameters()}, {"params": second.parameters(), "foreach": False}])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), as_on(gpu_for(AMPERE))(Recorder(), optimizer):
        assert [group["foreach"] for group in optimizer.param_groups] == [True, False]
        if fails:
            raise ZeroDivisionError
    assert optimizer.state_dict() == before


# -- workspaces


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


# -- GPUs that do the same


def test_gpus_of_one_generation_choose_the_same() -> None:
    """Whatever was seen, an RTX 3060 and an RTX 4090 choose the same kernels."""
    seen: set[frozenset[str]] = set()
    fake_trace(attending(torch.bfloat16), 2, host_batch=False, adjusted=as_on(gpu_for(AMPERE), seen=seen))
    assert seen
    assert kernel_choices(seen, gpu_for(AMPERE)) == kernel_choices(seen, gpu_for("RTX 4090"))


@pytest.mark.parametrize("other", [TURING, HOPPER, AMD])
def test_gpus_that_choose_otherwise_are_told_apart(other: str) -> None:
    """A GPU that takes another kernel for what was seen is told apart, and traced for itself."""
    seen: set[frozenset[str]] = set()
    fake_trace(attending(torch.bfloat16), 2, host_batch=False, adjusted=as_on(gpu_for(AMPERE), seen=seen))
    assert kernel_choices(seen, gpu_for(AMPERE)) != kernel_choices(seen, gpu_for(other))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16, torch.float16])
def test_same_choices_are_the_same_trace(dtype: torch.dtype) -> None:
    """GPUs said to choose the same for a workload have the same trace of it, but for their workspaces' size."""
    workload = attending(dtype)
    found: dict[tuple[str, ...], Any] = {}
    for gpu in (AMPERE, "RTX 4090", TURING, "V100 16GB", HOPPER, "B200", AMD, "RX 7900 XTX"):
        seen: set[frozenset[str]] = set()
        trace = fake_trace(workload, 2, host_batch=False, adjusted=as_on(gpu_for(gpu), seen=seen))
        sizes = [size for size, kind in zip(trace.sizes, trace.kinds, strict=True) if kind != "workspaces"]
        known = found.setdefault(kernel_choices(seen, gpu_for(gpu)), (trace.events, sizes))
        assert known == (trace.events, sizes)
    assert len(found) >= 2


# -- all together, and nothing left


def convolutional() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5),
    )  # fmt: skip
    return Workload(model, (torch.randn(4, 3, 8, 8), torch.randint(5, (4,))), loss_fn=F.cross_entropy)


def language(kind: str) -> Workload:
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
    options: dict[str, dict[str, Any]] = {
        "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16},
        "bert": small,
        "llama": {**small, "num_key_value_heads": 2},
        "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64},
    }
    return hf_workload(kind, {**options[kind], "seq_len": 12})


TOGETHER: dict[str, Callable[[], Workload]] = {
    "convolutional": convolutional,
    **{kind: lambda kind=kind: language(kind) for kind in ("gpt2", "bert", "llama", "t5")},  # type: ignore[misc]
}


@pytest.mark.parametrize(
    "name", ["convolutional", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "bert", "llama", "t5"))]
)
def test_corrections_run_together(name: str) -> None:
    """With every correction in place a model is traced, and its growth is exact at another size."""
    workload = TOGETHER[name]()
    growth = growth_of(lambda rows: trace_of(workload, AMPERE, rows))
    true = trace_of(workload, AMPERE, 7)
    assert growth.events == true.events and growth.sizes(7).tolist() == list(true.sizes)


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS[:: len(GPUS) // 6]] + [TURING, HOPPER, AMD])
def test_every_kind_of_gpu_can_be_traced(gpu: str) -> None:
    """Attention with a mask and dropout under autocast is traced for any GPU."""
    inner = attending(mask=BOOL_MASK, dropout=0.1)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch)

    assert trace_of(Workload(inner.module, torch.randn(4, 6, 16), training_step=step), gpu).events


def test_corrections_have_a_name_and_a_source() -> None:
    """Each correction has its own name, says what differs, and names where that is known from."""
    assert len({row.name for row in CORRECTIONS}) == len(CORRECTIONS) >= 7
    for row in CORRECTIONS:
        assert row.on_cpu != row.on_cuda and min(map(len, (row.on_cpu, row.on_cuda, row.source))) > 5
        assert "/" in row.source or "." in row.source


class Names(TorchDispatchMode):
    """The names of all operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def on_the_host() -> list[str]:
    """What dropout, attention and autocast run on real tensors in host memory, forward and backward."""
    x = torch.randn(2, 1, 6, 16, requires_grad=True)
    with Names() as seen:
        F.dropout(x, 0.5).sum().backward()
        F.scaled_dot_product_attention(x, x, x).sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.softmax(F.layer_norm(x @ x.mT, (6,)), -1)
    return [*seen.found, str(out.dtype)]


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "raised"])
def test_host_kernels_are_back(fails: bool) -> None:
    """After a trace, dropout, attention and autocast run their ordinary kernels, and autocast is its own class again."""
    before, original = on_the_host(), torch.autocast.__init__
    assert "aten.native_dropout.default" not in before

    def do(x: Tensor) -> Tensor:
        if fails:
            raise ZeroDivisionError
        return F.dropout(x, 0.5)

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        operations(Workload(Doing(do), torch.randn(4, 16)))
    assert on_the_host() == before
    assert torch.autocast.__init__ is original


def test_corrections_are_in_place_only_inside() -> None:
    """Inside, dropout on the host runs the GPU's kernel; before and afterwards it does not."""

    def ran() -> bool:
        with Names() as seen:
            F.dropout(torch.ones(4, requires_grad=True), 0.5)
        return "aten.native_dropout.default" in seen.found

    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    found = [ran()]
    with as_on(gpu_for(AMPERE), real=True)(Recorder(), optimizer):
        found.append(ran())
    assert [*found, ran()] == [False, True, False]


def test_corrections_can_be_entered_again() -> None:
    """Two traces one after the other are the same."""
    first, second = (trace_of(dropping()) for _ in range(2))
    assert first == second


def test_differentiable_optimizer_stays_a_loop() -> None:
    """An optimizer that is to be differentiated through is not made foreach, as torch does not either."""
    optimizer = AdamW(nn.Linear(2, 2).parameters(), differentiable=True)
    with as_on(gpu_for(AMPERE))(Recorder(), optimizer):
        assert optimizer.param_groups[0]["foreach"] is None


def test_listeners_are_gone() -> None:
    """After the corrections are left, nobody listens to the recorder any more."""
    recorder = Recorder()
    adjusted: AbstractContextManager[None] = as_on(gpu_for(AMPERE))(recorder, SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with adjusted:
        assert recorder.listeners
    assert recorder.listeners == []
