"""What a GPU does differently from host memory: each difference by what a trace then holds, and nothing is left of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoaccum.prediction.corrections import CORRECTIONS, as_on, kernel_choices
from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.gpus import GPUS
from autoaccum.prediction.growth import growth_of
from autoaccum.prediction.recorder import Recorder
from autoaccum.workload import Workload

from .cases import small_transformer
from .on_gpus import AMD, AMPERE, BOOL_MASK, HOPPER, TURING, Doing, attending, held_as, names, operations, trace_of

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


@pytest.mark.slow
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


TOGETHER: dict[str, Callable[[], Workload]] = {
    "convolutional": convolutional,
    **{kind: lambda kind=kind: small_transformer(kind) for kind in ("gpt2", "bert", "llama", "t5")},  # type: ignore[misc]
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
