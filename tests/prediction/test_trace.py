"""The trace of a training step on fake tensors: the same storages as a real step, to the byte, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import logging
import math
import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import autoaccum
from autoaccum.devices.base import AbstractDevice
from autoaccum.devices.virtual import VirtualDevice
from autoaccum.prediction import forecast
from autoaccum.prediction import trace as trace_module
from autoaccum.prediction.forecast import Traced, in_blocks, traced
from autoaccum.prediction.trace import KINDS, Recorder, Trace, fake_trace, is_refusal, record_windows, self_test
from autoaccum.preserve import preserved
from autoaccum.probing import older_objects_set_aside
from autoaccum.targets.libraries import hf_workload
from autoaccum.workload import Workload

BLOCK = 512


@dataclass(frozen=True)
class Case:
    """A training step: its model, a sample, and how it is trained."""

    model: nn.Module
    sample: Any
    more: dict[str, Any] = field(default_factory=dict)

    def workload(self) -> Workload:
        return Workload(self.model, self.sample, **self.more)


def live_bytes(trace: Trace) -> list[int]:
    """Bytes held after each event, every storage rounded to the allocator's blocks."""
    sizes = [-(-size // BLOCK) * BLOCK for size in trace.sizes]
    held, total = [], 0
    for event in trace.events:
        total += sizes[event] if event >= 0 else -sizes[~event]
        held.append(total)
    return held


def measured(case: Case, rows: int) -> int:
    """The peak of a real probe of this size."""
    result = autoaccum.probe(
        case.model, case.sample, device="virtual:1TiB", max_micro_batch=rows, multiple_of=rows, progress=False, **case.more
    )
    assert result.measured_peak_bytes is not None
    return result.measured_peak_bytes


def held_as(trace: Trace, kind: str) -> int:
    """All bytes of one kind, whenever they were held."""
    return sum(size for size, own in zip(trace.sizes, trace.kinds, strict=True) if own == kind)


# -- models and how they are trained


class Attention(nn.Module):
    """A decoder block with LayerNorm, attention and an MLP."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.inward(self.norms[0](x)).view(split).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        x = x + self.outward(found.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    """Tokens to a mean cross-entropy, with a head that may be tied to the embedding."""

    def __init__(
        self, body: nn.Module, vocabulary: int = 50, width: int = 32, tied: bool = True, sparse: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(vocabulary, width, sparse=sparse), body
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.tokens(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


class Checkpointed(nn.Module):
    """Runs blocks under activation checkpointing."""

    def __init__(self, *blocks: nn.Module, reentrant: bool = False, **more: Any) -> None:
        super().__init__()
        self.blocks, self.more = nn.ModuleList(blocks), {"use_reentrant": reentrant, **more}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.more)
        return x


class Recurrent(nn.Module):
    """The mean of what a recurrent layer says."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].mean()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def pairs(width: int = 16, classes: int = 8, count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width), torch.randint(classes, (count,))


def ids(vocabulary: int = 50, time: int = 12, count: int = 4) -> dict[str, Tensor]:
    found = torch.randint(vocabulary, (count, time))
    return {"input_ids": found, "labels": found.clone()}


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 12, 12), torch.randint(5, (4,))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def classified(**more: Any) -> dict[str, Any]:
    return {"loss_fn": F.cross_entropy, **more}


def optimized(make: Callable[..., Optimizer], **more: Any) -> Case:
    return Case(mlp(), pairs(), classified(optimizer=partial(make, lr=0.01, **more)))


def with_own_optimizer(make: Callable[[nn.Module], Optimizer], steps: int = 0) -> Case:
    """The user's optimizer, which may have stepped already."""
    model = mlp()
    optimizer = make(model)
    for _ in range(steps):
        model(torch.randn(2, 16)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Case(model, pairs(), classified(optimizer=optimizer))


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: Tensor = model(**batch)["loss"]
    return loss


def penalized(model: nn.Module, batch: Any) -> Tensor:
    """A loss of two terms, one of them a penalty on the weights."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-4 * penalty


class Owner(nn.Module):
    """A training step that is a method of a module, which is not the model."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp()
        self.register_buffer("weight", torch.ones(8))

    def training_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=self.weight)


def step_of_the_model_itself() -> Case:
    owner = Owner()
    return Case(owner.network, pairs(), {"training_step": owner.training_step})


def step_over_items(model: nn.Module, items: list[dict[str, Tensor]]) -> Tensor:
    logits = model(torch.stack([item["x"] for item in items]))
    return F.cross_entropy(logits, torch.stack([item["y"] for item in items]))


def frozen_body() -> Case:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return Case(model, pairs(), classified())


def saving_matrix_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selectively() -> Any:
    return create_selective_checkpoint_contexts(saving_matrix_products)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(mlp(), pairs(), classified()),
    "mean of outputs": lambda: Case(mlp(), torch.randn(4, 16)),
    "one row of one value": lambda: Case(nn.Linear(1, 1), torch.randn(4, 1)),
    "batch norm": lambda: Case(convolutional(), images(), classified()),
    "channels last": lambda: Case(convolutional().to(memory_format=torch.channels_last), images(), classified()),
    "attention": lambda: Case(Language(nn.Sequential(Attention(), Attention())), ids()),
    "attention with dropout": lambda: Case(Language(Attention(dropout=0.1)), ids()),
    "attention, not causal": lambda: Case(Language(Attention(causal=False), tied=False), ids()),
    "dropout": lambda: Case(nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 8)), pairs(), classified()),
    "embedding bag": lambda: Case(nn.EmbeddingBag(100, 8, mode="sum"), torch.randint(100, (4, 5))),
    "frozen": frozen_body,
    "gru": lambda: Case(Recurrent(nn.GRU(16, 8, num_layers=2, batch_first=True)), torch.randn(4, 5, 16)),
    "transformer layer": lambda: Case(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(4, 5, 16)
    ),
    "checkpointed": lambda: Case(Language(Checkpointed(Attention(), Attention())), ids()),
    "checkpointed, reentrant": lambda: Case(Language(Checkpointed(Attention(), reentrant=True)), ids()),
    "checkpointed with dropout": lambda: Case(Language(Checkpointed(Attention(dropout=0.1), Attention())), ids()),
    "checkpointed selectively": lambda: Case(Language(Checkpointed(Attention(), context_fn=selectively)), ids()),
    "autocast": lambda: Case(Language(Attention()), ids(), {"training_step": under_autocast}),
    "autocast and checkpointed": lambda: Case(Language(Checkpointed(Attention())), ids(), {"training_step": under_autocast}),
    "bfloat16": lambda: Case(Language(Attention()).bfloat16(), ids()),
    "float64": lambda: Case(mlp().double(), torch.randn(4, 16, dtype=torch.float64)),
    "complex": lambda: Case(nn.Linear(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64), {
        "training_step": lambda model, batch: model(batch).abs().mean()
    }),
    "adamw loop": lambda: optimized(AdamW, foreach=False),
    "adamw foreach": lambda: optimized(AdamW, foreach=True),
    "adamw fused": lambda: optimized(AdamW, fused=True),
    "adamw amsgrad": lambda: optimized(AdamW, amsgrad=True),
    "sgd": lambda: optimized(SGD),
    "momentum": lambda: optimized(SGD, momentum=0.9, foreach=True),
    "rmsprop": lambda: optimized(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adagrad": lambda: optimized(Adagrad),
    "own adagrad": lambda: with_own_optimizer(lambda model: Adagrad(model.parameters())),
    "own fresh adamw": lambda: with_own_optimizer(lambda model: AdamW(model.parameters())),
    "own adamw with state": lambda: with_own_optimizer(lambda model: AdamW(model.parameters(), foreach=True), steps=2),
    "own fused adamw with state": lambda: with_own_optimizer(lambda model: AdamW(model.parameters(), fused=True), steps=1),
    "own momentum with state": lambda: with_own_optimizer(lambda model: SGD(model.parameters(), 0.1, 0.9), steps=1),
    "own adamw of the last layer": lambda: with_own_optimizer(lambda model: AdamW(model[4].parameters())),
    "class weights": lambda: Case(mlp(), pairs(), {"loss_fn": nn.CrossEntropyLoss(weight=torch.rand(8))}),
    "loss with two terms": lambda: Case(mlp(), pairs(), {"training_step": penalized}),
    "method of a module": step_of_the_model_itself,
    "list of dicts": lambda: Case(nn.Linear(16, 4), [{"x": torch.randn(16), "y": torch.tensor(i)} for i in range(3)], {
        "training_step": step_over_items
    }),
    "nested": lambda: Case(mlp(), {"x": [torch.randn(4, 16)], "y": (torch.randint(8, (4,)), "a name")}, {
        "training_step": lambda model, batch: F.cross_entropy(model(batch["x"][0]), batch["y"][0])
    }),
}  # fmt: skip


LESS_COMMON = (
    "gru", "transformer layer", "autocast and checkpointed", "checkpointed with dropout", "attention, not causal", "complex",
    "embedding bag", "adamw amsgrad", "rmsprop", "adagrad", "own fused adamw with state", "nested", "float64", "sgd",
    "momentum", "own adagrad", "own fresh adamw", "adamw loop", "checkpointed, reentrant", "loss with two terms",
)  # fmt: skip


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in LESS_COMMON else ()) for name in CASES],
    ids=[name.replace(" ", "-") for name in CASES],
)
def case(request: pytest.FixtureRequest) -> Case:
    """Every case, freshly built."""
    torch.manual_seed(0)
    return CASES[request.param]()


FEW = ("attention with dropout", "checkpointed selectively", "adamw foreach")
FEW_MORE = ("batch norm", "own momentum with state")


@pytest.fixture(
    params=[*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in FEW_MORE)],
    ids=[name.replace(" ", "-") for name in (*FEW, *FEW_MORE)],
)
def few(request: pytest.FixtureRequest) -> Case:
    """A few of them."""
    torch.manual_seed(0)
    return CASES[request.param]()


# -- agreement with reality


def test_peak_is_that_of_a_real_probe(case: Case) -> None:
    """The traced peak is the peak that a real probe measures, to the byte."""
    expected = measured(case, 5)
    assert max(live_bytes(fake_trace(case.workload(), 5, host_batch=False))) == expected


@pytest.mark.parametrize("kind", ["bert", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gpt2", "t5"))])
def test_peak_of_a_transformers_model(kind: str) -> None:
    """A small model of the transformers library is traced as it runs, to the byte."""
    case = from_transformers(kind)
    assert max(live_bytes(fake_trace(case.workload(), 3, host_batch=False))) == measured(case, 3)


def from_transformers(kind: str) -> Case:
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
    options: dict[str, dict[str, Any]] = {
        "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16},
        "bert": small,
        "llama": {**small, "num_key_value_heads": 2},
        "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64},
    }
    workload = hf_workload(kind, {**options[kind], "seq_len": 12})
    return Case(workload.model, ids(64))


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow), 17])
def test_peak_of_other_sizes(rows: int) -> None:
    """Sizes other than the sample's, one row included, are traced as they run."""
    case = Case(Language(Attention()), ids())
    assert max(live_bytes(fake_trace(case.workload(), rows, host_batch=False))) == measured(case, rows)


def test_compiled_model_is_traced_as_it_runs_eagerly() -> None:
    """A compiled model is traced like the model that it was made of."""
    model = mlp()
    plain = fake_trace(Case(model, pairs(), classified()).workload(), 3, host_batch=False)
    compiled = fake_trace(Case(torch.compile(model), pairs(), classified()).workload(), 3, host_batch=False)  # type: ignore[arg-type]
    assert (compiled.events, compiled.sizes) == (plain.events, plain.sizes)


@pytest.mark.parametrize(
    "name",
    [
        *("batch norm", "attention with dropout", "checkpointed"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("frozen", "bfloat16")),
    ],
)
def test_meta_model_is_traced_like_one_with_values(name: str) -> None:
    """A model on the meta device has the trace of the same model in host memory."""
    case = CASES[name]()
    with torch.device("meta"):
        model = CASES[name]().model
    assert next(model.parameters()).is_meta
    expected = fake_trace(case.workload(), 3, host_batch=False)
    assert fake_trace(Case(model, case.sample, case.more).workload(), 3, host_batch=False) == expected


def test_two_traces_are_the_same() -> None:
    """Tracing a size twice gives the same events, sizes and kinds."""
    workload = Case(Language(Attention(dropout=0.1)), ids()).workload()
    assert fake_trace(workload, 3, host_batch=False) == fake_trace(workload, 3, host_batch=False)


def test_sparse_gradient_is_small() -> None:
    """With a sparse embedding no gradient as large as the table is in the trace."""

    def largest_temporary(sparse: bool) -> int:
        case = Case(nn.Embedding(20_000, 16, sparse=sparse), torch.arange(8), {"optimizer": partial(SGD, lr=0.1)})
        trace = fake_trace(case.workload(), 4, host_batch=False)
        return max(size for size, kind in zip(trace.sizes, trace.kinds, strict=True) if kind != "weights")

    assert largest_temporary(sparse=False) >= 20_000 * 16 * 4
    assert largest_temporary(sparse=True) <= 10_000


def test_batch_on_the_host_is_there_from_the_start() -> None:
    """Where the batch lies in the memory that is recorded, it is held once and nothing is copied."""
    workload = Case(mlp(), pairs(), classified()).workload()
    on_host, placed = (fake_trace(workload, 4, host_batch=host) for host in (True, False))
    batch = 4 * 16 * 4 + 4 * 8
    assert (held_as(on_host, "batch"), held_as(placed, "batch")) == (batch, 4 * batch)


# -- what is recorded


@pytest.fixture(scope="module")
def recorded() -> Trace:
    """An MLP without biases, trained by AdamW, with four rows."""
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 8, bias=False))
    with torch.random.fork_rng(devices=[]):
        case = Case(model, torch.randn(4, 16), {"optimizer": partial(AdamW, foreach=False)})
        return fake_trace(case.workload(), 4, host_batch=False)


PARAMETERS = (16 * 64 + 64 * 8) * 4


def test_weights_are_the_parameters(recorded: Trace) -> None:
    """What is held as weights has the bytes of the parameters, once."""
    assert held_as(recorded, "weights") == PARAMETERS


def test_gradients_are_as_large_as_parameters_in_each_window(recorded: Trace) -> None:
    """Each of the two windows has one set of gradients."""
    assert held_as(recorded, "gradients") == 2 * PARAMETERS


def test_optimizer_state_is_made_once(recorded: Trace) -> None:
    """AdamW holds two moments and a step count of four bytes for each parameter, made in the first step alone."""
    assert held_as(recorded, "optimizer state") == 2 * PARAMETERS + 2 * 4
    made = [e for e in recorded.events if e >= 0 and recorded.kinds[e] == "optimizer state"]
    second_window = next(mark.event for mark in recorded.marks if mark.window == 1)
    assert all(recorded.events.index(event) < second_window for event in made)


def test_activations_are_what_backward_needs(recorded: Trace) -> None:
    """Activations are what the forward pass leaves for the backward pass: hidden values before and after GELU, a loss."""
    activations = [size for size, kind in zip(recorded.sizes, recorded.kinds, strict=True) if kind == "activations"]
    assert activations.count(4 * 64 * 4) == 2 * 4
    assert sum(activations) <= 4 * (2 * 4 * 64 * 4 + 4 * 8 * 4 + 64)


def test_gradients_live_through_the_second_micro_batch(recorded: Trace) -> None:
    """While the second micro-batch runs forward, the gradients of the first are held."""
    start = next(mark.event for mark in recorded.marks if mark[1:] == ("forward", 0, 1))
    alive = set()
    for event in recorded.events[:start]:
        (alive.add if event >= 0 else alive.discard)(event if event >= 0 else ~event)
    assert sum(recorded.sizes[block] for block in alive if recorded.kinds[block] == "gradients") == PARAMETERS


def test_phases_follow_the_windows(recorded: Trace) -> None:
    """Marks ascend and go through data, forward and backward of both micro-batches and the optimizer, twice."""
    phases = [mark[1:] for mark in recorded.marks if mark.phase != "data"]
    one = [(phase, index) for index in (0, 1) for phase in ("forward", "backward")]
    assert phases == [(phase, w, i) for w in (0, 1) for phase, i in [*one, ("optimizer", 1)]]
    starts = [mark.event for mark in recorded.marks]
    assert starts == sorted(set(starts)) and starts[0] == 0 and starts[-1] < len(recorded.events)


def test_events_are_sound(few: Case) -> None:
    """Every block is allocated before it is freed and never twice, and every block has a size and a kind."""
    trace = fake_trace(few.workload(), 2, host_batch=True)
    alive: set[int] = set()
    for event in trace.events:
        assert (event not in alive) if event >= 0 else (~event in alive)
        (alive.add if event >= 0 else alive.remove)(event if event >= 0 else ~event)
    assert len(trace.sizes) == len(trace.kinds) == 1 + max(trace.events)
    assert set(trace.kinds) <= set(KINDS) and min(trace.sizes) >= 0


def test_blocks_that_live_on_are_held_by_something(recorded: Trace) -> None:
    """After the last step weights, optimizer state and the loss are left; no activation, gradient or batch is."""
    left = {event for event in recorded.events if event >= 0} - {~event for event in recorded.events if event < 0}
    kinds = {recorded.kinds[block] for block in left}
    assert kinds <= {"weights", "optimizer state", "temporaries"}
    assert sum(recorded.sizes[block] for block in left if recorded.kinds[block] == "temporaries") <= 64


def test_flops_are_those_of_torchs_counter() -> None:
    """Two windows of two micro-batches take four times the operations that FlopCounterMode counts for one."""
    case = Case(Language(Attention()), ids(count=3))
    with FlopCounterMode(display=False) as counter:
        case.model(**case.sample)["loss"].backward()
    assert sum(fake_trace(case.workload(), 3, host_batch=False).flops.values()) == 4 * counter.get_total_flops()


def test_checkpointing_shows_in_the_backwards_flops() -> None:
    """Under checkpointing the backward pass runs the forward pass once more; the forward pass stays what it is."""
    torch.manual_seed(0)
    blocks = [Attention(), Attention()]
    plain = fake_trace(Case(Language(nn.Sequential(*blocks)), ids()).workload(), 3, host_batch=False).flops
    again = fake_trace(Case(Language(Checkpointed(*blocks)), ids()).workload(), 3, host_batch=False).flops
    head = 4 * 2 * (3 * 12) * 32 * 50
    assert again["forward"] == plain["forward"]
    # The last matrix product of a block is not needed again: its output is nobody's input.
    assert plain["backward"] < again["backward"] <= plain["backward"] + plain["forward"] - head


def test_checkpointing_holds_less() -> None:
    """Checkpointed blocks hold fewer bytes at the peak than the same blocks without."""
    blocks = [Attention() for _ in range(4)]
    plain = fake_trace(Case(Language(nn.Sequential(*blocks)), ids()).workload(), 16, host_batch=False)
    less = fake_trace(Case(Language(Checkpointed(*blocks)), ids()).workload(), 16, host_batch=False)
    assert max(live_bytes(less)) < 0.7 * max(live_bytes(plain))


def test_foreach_step_holds_a_copy_of_the_parameters() -> None:
    """A foreach AdamW holds temporaries as large as all parameters at its step, a loop those of one or two."""

    def at_step(foreach: bool) -> int:
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
        case = Case(model, torch.randn(4, 64), {"optimizer": partial(AdamW, foreach=foreach)})
        trace = fake_trace(case.workload(), 1, host_batch=False)
        step = next(mark.event for mark in trace.marks if mark[1:3] == ("optimizer", 1))
        held = live_bytes(trace)
        return max(held[step:]) - held[step - 1]

    one = 64 * 64 * 4
    assert 8 * one <= at_step(foreach=True) <= 8 * one + 64 * BLOCK
    assert at_step(foreach=False) <= 3 * one


def test_second_step_peaks_higher_than_the_first() -> None:
    """The optimizer's state, made in the first step, is part of the second window's peak."""
    case = Case(mlp(), pairs(), classified(optimizer=partial(AdamW, foreach=False)))
    trace = fake_trace(case.workload(), 512, host_batch=False)
    second = next(mark.event for mark in trace.marks if mark.window == 1)
    held = live_bytes(trace)
    state = 2 * sum(-(-p.numel() * 4 // BLOCK) * BLOCK for p in case.model.parameters())
    assert max(held[second:]) - max(held[:second]) >= state


def test_logits_in_float32_are_seen() -> None:
    """A bfloat16 model whose loss is computed in float32 holds at least three float32 copies of its logits."""
    case = Case(Language(nn.Identity(), vocabulary=2000).bfloat16(), ids(2000))
    trace = fake_trace(case.workload(), 4, host_batch=False)
    logits = 4 * 12 * 2000 * 4
    weights, gradients = 2000 * 32 * 2, 2000 * 32 * 4
    assert max(live_bytes(trace)) >= 3 * logits + weights + gradients


def test_autocast_keeps_a_copy_of_the_weights() -> None:
    """Under autocast the half-precision copies of weights are in the trace, once for each region."""
    model = nn.Linear(256, 256, bias=False)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (model(batch) + model(batch)).mean()

    trace = fake_trace(Case(model, torch.randn(2, 256), {"training_step": step}).workload(), 2, host_batch=False)
    forward = next(mark for mark in trace.marks if mark[1:] == ("forward", 0, 0))
    end = next(mark.event for mark in trace.marks if mark.event > forward.event)
    assert [trace.sizes[e] for e in trace.events[forward.event : end] if e >= 0].count(256 * 256 * 2) == 1


def test_tied_weight_counts_once() -> None:
    """A head that is tied to the embedding is neither a second weight nor a second gradient."""
    tied, apart = (
        fake_trace(Case(Language(nn.Identity(), tied=tied), ids()).workload(), 2, host_batch=False) for tied in (True, False)
    )
    table = 50 * 32 * 4
    assert (held_as(tied, "weights"), held_as(apart, "weights")) == (table, 2 * table)
    assert (held_as(tied, "gradients"), held_as(apart, "gradients")) == (2 * table, 4 * table)


def test_frozen_parameter_has_neither_gradient_nor_state() -> None:
    """Of frozen layers there are weights, and no gradient and no state."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False))
    model[0].requires_grad_(False)
    trace = fake_trace(Case(model, torch.randn(2, 16)).workload(), 2, host_batch=False)
    assert held_as(trace, "weights") == (16 * 16 + 16 * 8) * 4
    assert held_as(trace, "gradients") == 2 * 16 * 8 * 4
    assert held_as(trace, "optimizer state") == 2 * 16 * 8 * 4 + 4


# -- sums of gradients


class Forked(nn.Module):
    """Wide values that two layers use, so that two gradients are added up; the values are there until after that."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.left, self.right = nn.Linear(4, 256), nn.Linear(256, 4), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.widen(x))
        return (self.left(wide) + self.right(wide)).mean()


def test_sums_in_place_take_no_block() -> None:
    """With sums in place, the sum of two gradients takes the block of the first, and the peak is lower by it."""
    workload = Case(Forked(), torch.randn(4, 4)).workload()
    apart, in_place = (fake_trace(workload, 512, host_batch=False, sums_in_place=each) for each in (False, True))
    wide = 512 * 256 * 4
    assert 0.95 * wide <= max(live_bytes(apart)) - max(live_bytes(in_place)) <= wide
    assert len(apart.events) - len(in_place.events) == 2 * 4  # of four micro-batches


def test_sums_in_place_leave_a_sound_trace(few: Case) -> None:
    """With sums in place, blocks are still allocated before they are freed and never twice, and phases stay in order."""
    trace = fake_trace(few.workload(), 2, host_batch=False, sums_in_place=True)
    alive: set[int] = set()
    for event in trace.events:
        assert (event not in alive) if event >= 0 else (~event in alive)
        (alive.add if event >= 0 else alive.remove)(event if event >= 0 else ~event)
    starts = [mark.event for mark in trace.marks]
    assert starts == sorted(starts) and starts[-1] <= len(trace.events)


def test_sums_in_place_are_what_the_allocator_sees() -> None:
    """With sums in place the peak of a backward pass is the one that the CPU allocator's own log shows, within 1 %."""
    model, batch = Forked(), torch.randn(2048, 4)

    def logged() -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model(batch).backward()
        assert profiler.profiler is not None
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return max(accumulate(sizes))

    def predicted(sums_in_place: bool) -> int:
        case = Case(model, batch, {"optimizer": partial(SGD, lr=0.0)})
        trace = fake_trace(case.workload(), 2048, host_batch=True, sums_in_place=sums_in_place)
        end = next(mark.event for mark in trace.marks if mark[2:] == (0, 1))
        held = live_bytes(trace)[:end]
        return max(held) - sum(-(-p.numel() * 4 // BLOCK) * BLOCK for p in model.parameters()) - 2048 * 4 * 4

    assert predicted(sums_in_place=True) == pytest.approx(logged(), rel=0.01)
    assert predicted(sums_in_place=False) > 1.3 * logged()


# -- nothing is left behind


class Everything(nn.Module):
    """Buffers, dropout, a temperature that is a plain tensor, a count in Python, and an error where it is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.temperature, self.calls, self.fails = torch.tensor(2.0), 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails:
            raise ZeroDivisionError("the model divides by zero")
        random.random(), np.random.rand()
        return self.layers(x) / self.temperature


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Everything of a model and an optimizer that training could change, copied."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "identities": {name: (id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()},
        "types": {name: type(tensor) for name, tensor in tensors.items()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.clone()) for name, p in model.named_parameters()
        },
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "hooks": (len(optimizer._optimizer_step_pre_hooks), [len(m._forward_hooks) for m in model.modules()]),
        "modes": [module.training for module in model.modules()],
        "calls": getattr(model, "calls", None),
    }


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def same(first: Any, second: Any) -> bool:
    """Equal, tensors bit for bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


class Trained(NamedTuple):
    """A model that has been trained for a step and has gradients and hooks, and its workload."""

    model: Everything
    optimizer: Optimizer
    workload: Workload
    seen: list[str]


@pytest.fixture
def trained() -> Trained:
    torch.manual_seed(0)
    model = Everything()
    optimizer = AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(4, 16)
    model(batch).sum().backward()
    optimizer.step()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    model.layers[0].register_forward_hook(lambda *_: None)
    return Trained(model, optimizer, Workload(model, batch, optimizer=optimizer), seen)


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "raised"])
def test_model_and_optimizer_are_as_they_were(trained: Trained, fails: bool) -> None:
    """Parameters, buffers, gradients, state and hooks are the same objects with the same bits, even after an error."""
    trained.model.fails = fails
    before = state_of(trained.model, trained.optimizer)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fake_trace(trained.workload, 3, host_batch=False)
    after = state_of(trained.model, trained.optimizer)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert trained.seen == []


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "raised"])
def test_generators_are_as_they_were(trained: Trained, fails: bool) -> None:
    """The generators of torch, numpy and Python give the numbers that they would have given, even after an error."""
    trained.model.fails = fails
    before = generators()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fake_trace(trained.workload, 3, host_batch=False)
    assert generators() == before


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "raised"])
def test_torch_is_as_it_was(trained: Trained, fails: bool) -> None:
    """No patch, dispatch mode, log level or garbage collector setting is left, even after an error."""

    def settings() -> list[Any]:
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        return [
            nn.Parameter.__deepcopy__, Tensor.__deepcopy__, torch.autocast.__init__, logger.level, gc.isenabled(),
            gc.get_freeze_count(), _get_current_dispatch_mode(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        ]  # fmt: skip

    trained.model.fails = fails
    before = settings()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fake_trace(trained.workload, 3, host_batch=False)
    assert settings() == before
    assert type(torch.ones(2) + 1) is Tensor
    assert torch.equal(copy.deepcopy(trained.model.layers[0].weight), trained.model.layers[0].weight)


def test_trained_model_trains_on(trained: Trained) -> None:
    """After a trace a real step runs as it would have without one, bit for bit."""
    other = copy.deepcopy((trained.model, trained.optimizer))
    fake_trace(trained.workload, 3, host_batch=False)
    found = []
    for model, optimizer in ((trained.model, trained.optimizer), other):
        torch.manual_seed(7)
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
        found.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*found)


def test_step_that_reaches_for_the_real_model(trained: Trained) -> None:
    """A training step that runs the real model instead of the one that it is given changes nothing of it either."""
    model = trained.model
    workload = Workload(model, torch.randn(4, 16), training_step=lambda _, batch: model(batch).mean())
    before = state_of(model, trained.optimizer)
    with suppress(Exception):
        fake_trace(workload, 3, host_batch=False)
    after = state_of(model, trained.optimizer)
    kept = ("values", "types", "gradients", "optimizer", "modes")
    assert [name for name in kept if not same(before[name], after[name])] == []


def test_sample_is_as_it_was() -> None:
    """A training step that writes into its batch writes into a fake one."""
    sample = torch.ones(4, 16)
    workload = Workload(mlp(), sample, training_step=lambda model, batch: model(batch.mul_(2)).mean())
    fake_trace(workload, 3, host_batch=False)
    assert torch.equal(sample, torch.ones(4, 16))


def test_model_without_gradients_gets_none() -> None:
    """A model that had no gradients has none afterwards."""
    case = Case(mlp(), pairs(), classified())
    fake_trace(case.workload(), 3, host_batch=False)
    assert [parameter.grad for parameter in case.model.parameters()] == [None] * 6


def test_nothing_of_a_trace_stays_alive() -> None:
    """After a second trace as many tensors are alive as after the first."""
    workload = Case(Language(Attention(dropout=0.1)), ids()).workload()
    fake_trace(workload, 2, host_batch=False)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    before = alive()
    fake_trace(workload, 2, host_batch=False)
    assert alive() == before


def test_hooks_of_modules_run_in_a_trace() -> None:
    """Forward hooks of the user run on the copy, because they may keep tensors alive."""
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(type(output).__name__))
    fake_trace(Case(model, pairs(), classified()).workload(), 2, host_batch=False)
    assert seen == ["FakeTensor"] * 4


@pytest.mark.parametrize("training", [True, False])
def test_model_in_eval_mode_is_traced_in_train_mode(training: bool) -> None:
    """As a probe does it, dropout runs in a model that is wholly in eval mode, which stays so."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 8)).train(training)
    case = Case(model, pairs(), classified())
    trace = fake_trace(case.workload(), 5, host_batch=False)
    assert max(live_bytes(trace)) == measured(case, 5)
    assert [module.training for module in model.modules()] == [training] * 4


# -- no memory is taken


def test_trace_of_a_billion_parameters_takes_no_memory(run_child: Any) -> None:
    """A model of a billion parameters on the meta device is traced within 300 MiB of resident memory."""
    grown, weights = run_child(
        """
        import psutil, torch
        from torch import nn
        from autoaccum.prediction.trace import fake_trace
        from autoaccum.workload import Workload

        def build(width, depth):
            with torch.device("meta"):
                return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])

        fake_trace(Workload(build(8, 4), torch.randn(2, 8)), 2, host_batch=False)  # imports what tracing needs
        before = psutil.Process().memory_info().rss
        trace = fake_trace(Workload(build(16384, 4), torch.randn(2, 16384)), 64, host_batch=False)
        held = sum(size for size, kind in zip(trace.sizes, trace.kinds) if kind == "weights")
        answer([psutil.Process().memory_info().rss - before, held])
        """,
        OMP_NUM_THREADS="1",
    )
    assert weights == 4 * 16384**2 * 4 >= 4 * 10**9
    assert grown < 300 * 2**20


@pytest.mark.slow
def test_trace_of_a_model_with_values_makes_no_copy(run_child: Any) -> None:
    """A model of 400 MiB in host memory is traced, for a large batch, within 100 MiB more."""
    grown = run_child(
        """
        import psutil, torch
        from torch import nn
        from autoaccum.prediction.trace import fake_trace
        from autoaccum.workload import Workload

        def build(width):
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))

        fake_trace(Workload(build(8), torch.randn(2, 8)), 2, host_batch=False)  # imports what tracing needs
        workload = Workload(build(10240), torch.randn(2, 10240))
        before = psutil.Process().memory_info().rss
        fake_trace(workload, 4096, host_batch=False)
        answer(psutil.Process().memory_info().rss - before)
        """,
        OMP_NUM_THREADS="1",
    )
    assert grown < 100 * 2**20


# -- what fake tensors refuse


class Doing(nn.Module):
    """Does something with the output of a linear layer."""

    def __init__(self, do: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(16, 8), do

    def forward(self, x: Tensor) -> Any:
        return self.do(self.linear(x))


class InNumpy(torch.autograd.Function):
    """A function computed by numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.exp(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda y: y * y.detach().mean().item(), "aten._local_scalar_dense"),
    "float": (lambda y: y * float(y.detach().mean()), "aten._local_scalar_dense"),
    "branch": (lambda y: y * 2 if y.sum() > -1e9 else y, "aten._local_scalar_dense"),
    "mask": (lambda y: y[y > -1e9].mean(), "aten.nonzero"),
    "nonzero": (lambda y: y.flatten()[(y.flatten() > -1e9).nonzero().squeeze(1)].mean(), "aten.nonzero"),
    "unique": (lambda y: y.mean() * torch.unique(y.detach()).numel(), "aten._unique2"),
    "equal": (lambda y: y if torch.equal(y, y) else y * 2, "aten.equal"),
    "numpy": (lambda y: y * y.detach().numpy().mean(), "numpy()"),
    "function of numpy": (InNumpy.apply, "numpy()"),
}


def traced_on(device: AbstractDevice, workload: Workload, *, real: bool = True) -> Traced:
    """What a search would trace."""
    with (
        older_objects_set_aside(),
        preserved(workload.module, workload.own_optimizer, device=torch.device("cpu")) as snapshot,
    ):
        return traced(workload, device, snapshot=snapshot if real else None, budget_bytes=2**40)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_step_is_traced_on_real_tensors(name: str) -> None:
    """What fake tensors refuse is named in one line, and the traces of real tensors have the probe's peak."""
    do, operation = REFUSED[name]
    case = Case(Doing(do), torch.randn(4, 16))
    found = traced_on(VirtualDevice("1TiB"), case.workload())
    assert found.note is not None and operation in found.note and "real passes" in found.note
    assert len(found.note.splitlines()) == 1
    assert found.growth is not None
    assert int(found.growth.live(7, in_blocks).max()) == measured(case, 7)


def test_custom_operation_without_a_fake_version() -> None:
    """A custom operation that says nothing of its shape is traced on real tensors."""

    @torch.library.custom_op("autoaccum_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_autograd(lambda ctx, gradient: gradient * 2)
    case = Case(Doing(lambda y: doubled(y)), torch.randn(4, 16))
    found = traced_on(VirtualDevice("1TiB"), case.workload())
    assert found.note is not None and "doubled" in found.note and found.growth is not None
    assert int(found.growth.live(7, in_blocks).max()) == measured(case, 7)


def test_optimizer_that_reads_a_value() -> None:
    """An optimizer whose step reads a norm, as Adafactor's does, is traced on real tensors."""
    case = optimized(torch.optim.Adafactor)
    found = traced_on(VirtualDevice("1TiB"), case.workload())
    assert found.note is not None and "aten._local_scalar_dense" in found.note and found.growth is not None
    assert int(found.growth.live(7, in_blocks).max()) == measured(case, 7)


def test_fused_lstm_of_the_host_is_refused() -> None:
    """OneDNN's LSTM, whose workspace fake tensors do not know, is traced on real tensors, where it is seen."""
    case = Case(Recurrent(nn.LSTM(16, 8, batch_first=True)), torch.randn(4, 5, 16))
    found = traced_on(VirtualDevice("1TiB"), case.workload())
    assert found.note is not None and "mkldnn_rnn_layer" in found.note and found.growth is not None
    assert int(found.growth.live(4, in_blocks).max()) == measured(case, 4)


def test_refusal_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Fake tensors' own errors about what they refuse are not logged."""
    with caplog.at_level(logging.DEBUG):
        traced_on(VirtualDevice("1TiB"), Case(Doing(REFUSED["item"][0]), torch.randn(4, 16)).workload())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_traces_on_real_tensors_leave_nothing(trained: Trained) -> None:
    """After traces on real tensors the model, the optimizer and the generators are as they were."""
    model = trained.model
    model.layers.append(Reading())
    before, numbers = state_of(model, trained.optimizer), generators()
    found = traced_on(VirtualDevice("1TiB"), trained.workload)
    after = state_of(model, trained.optimizer)
    assert found.growth is not None and found.note is not None
    unchanged = ("values", "gradients", "optimizer", "hooks", "modes", "types")
    assert [name for name in unchanged if not same(plain(before[name]), plain(after[name]))] == []
    assert generators() == numbers and trained.seen == []


class Reading(nn.Module):
    """Reads a value of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().abs().max().item()


def plain(state: Any) -> Any:
    """Without identities, which a snapshot need not keep for gradients."""
    return (
        {name: value[1] if isinstance(value, tuple) and len(value) == 2 else value for name, value in state.items()}
        if (isinstance(state, dict))
        else state
    )


def test_refused_step_without_a_snapshot_is_not_run() -> None:
    """Where nothing can be put back, nothing real is run, and why there is no prediction is said."""
    model = Doing(REFUSED["item"][0])
    found = traced_on(VirtualDevice("1TiB"), Workload(model, torch.randn(4, 16)), real=False)
    assert found.growth is None
    assert found.note is not None and "No prediction" in found.note and "aten._local_scalar_dense" in found.note


def test_users_error_is_not_repeated_on_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the user's own ends tracing after one call of the model, with a note of what it was."""
    monkeypatch.setattr(forecast, "can_run_apart", lambda: False)  # to see the calls
    calls = []

    def fail(y: Tensor) -> Tensor:
        calls.append(type(y).__name__)
        raise KeyError("no such column")

    found = traced_on(VirtualDevice("1TiB"), Workload(Doing(fail), torch.randn(4, 16)))
    assert calls == ["FakeTensor"] and found.growth is None
    assert found.note is not None and "KeyError" in found.note


def test_users_error_comes_out_at_the_first_trial() -> None:
    """Autotune raises the user's own error, unchanged, from a real pass."""
    error = KeyError("no such column")

    def fail(y: Tensor) -> Tensor:
        raise error

    with pytest.raises(KeyError) as caught:
        autoaccum.autotune(Doing(fail), torch.randn(4, 16), 64, device="virtual:1GiB", progress=False, levers="none")
    assert caught.value is error
    assert any("micro_batch=" in note for note in error.__notes__)


_tables: list[Tensor] = []


class Caching(nn.Module):
    """Keeps a table outside of itself, made at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not _tables:
            _tables.append(torch.ones(8))
        return (self.linear(x) * _tables[0]).mean()


@pytest.mark.skipif(not forecast.can_run_apart(), reason="only Linux copies processes")
def test_cache_outside_of_the_model_holds_no_fake_tensor() -> None:
    """What a step keeps elsewhere is real after a search and a prediction, and the model runs."""
    _tables.clear()
    model = Caching()
    autoaccum.predict(model, torch.randn(4, 16), 64, gpu="T4")
    autoaccum.autotune(model, torch.randn(4, 16), 64, device="virtual:1GiB", levers="none")
    assert not any(isinstance(table, FakeTensor) for table in _tables)
    assert math.isfinite(model(torch.randn(4, 16)).item())


def test_interrupt_passes_through_a_trace(trained: Trained) -> None:
    """Ctrl-C while the user's code is traced comes out, and nothing is left behind."""

    def interrupt(model: nn.Module, batch: Tensor) -> Tensor:
        if isinstance(model(batch), FakeTensor):
            raise KeyboardInterrupt
        return model(batch).mean()

    before = state_of(trained.model, trained.optimizer)
    workload = Workload(trained.model, torch.randn(4, 16), training_step=interrupt, optimizer=trained.optimizer)
    with pytest.raises(KeyboardInterrupt):
        traced(workload, VirtualDevice("1TiB"))
    assert same(before, state_of(trained.model, trained.optimizer))
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (DataDependentOutputException(torch.ops.aten.item.default), True),
        (DynamicOutputShapeException(torch.ops.aten.nonzero.default), True),
        (RuntimeError(".numpy() is not supported for tensor subclasses."), True),
        (RuntimeError("There was no fake impl registered for my::op"), True),
        (NotImplementedError("my::op: attempted to run this operator with Meta tensors"), True),
        (ValueError("too many values to unpack"), False),
        (KeyError("column"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x16 and 8x8)"), False),
    ],
)
def test_refusals_are_told_from_errors(error: Exception, refused: bool) -> None:
    """What fake tensors refuse is told from what is wrong with the user's code."""
    assert is_refusal(error) is refused


COPIES: dict[str, Callable[[Tensor], Any]] = {
    "values": lambda y: copy.deepcopy(y.detach()) + y,
    "parameter": lambda y: y * copy.deepcopy(nn.Parameter(y.detach())),
    "module": lambda y: copy.deepcopy(nn.Linear(8, 8))(y),
}


@pytest.mark.parametrize("what", COPIES)
def test_copies_made_inside_are_traced(what: str) -> None:
    """A step that copies tensors by copy.deepcopy, which torch cannot do to fake ones, is traced as it runs."""
    case = Case(Doing(COPIES[what]), torch.randn(4, 16))
    assert max(live_bytes(fake_trace(case.workload(), 5, host_batch=False))) == measured(case, 5)


# -- the recorder and the self-test


def test_recorder_notes_sizes_before_rounding() -> None:
    """Sizes are the bytes that were asked for, in the order in which storages appear."""
    recorder = Recorder()
    with recorder.recording():
        first = torch.ones(3)
        second = first + 1
        del first
    trace = recorder.trace(rows=1)
    assert (trace.events, trace.sizes) == ((0, 1, ~0), (12, 12))
    assert second.shape == (3,)


def test_recorder_counts_no_view_and_nothing_in_place() -> None:
    """Views and operations in place make no event."""
    recorder = Recorder()
    with recorder.recording():
        values = torch.ones(4, 4)
        values.view(16).add_(1)
        values.t().mul_(2)
    assert recorder.trace(rows=1).events == (0,)


def test_recorder_follows_a_storage_that_grows() -> None:
    """A storage that is given another size is freed and allocated."""
    recorder = Recorder()
    with recorder.recording():
        values = torch.ones(4)
        values.resize_(1000)
    trace = recorder.trace(rows=1)
    assert (trace.events, trace.sizes) == ((0, ~0, 1), (16, 4000))


def test_recorder_pauses() -> None:
    """What runs while paused leaves no event."""
    recorder = Recorder()
    with recorder.recording():
        with recorder.paused():
            host = torch.ones(64)
        placed = host * 2
    assert list(recorder.trace(rows=1).sizes) == [256, 256]  # an operand is seen when it is used
    assert placed.shape == (64,)


@pytest.mark.parametrize("kept", [True, False])
def test_workspace_is_an_event(kept: bool) -> None:
    """A library's workspace is allocated, and freed at once unless it is kept."""
    recorder = Recorder()
    with recorder.recording():
        recorder.workspace(4096, kept=kept)
    trace = recorder.trace(rows=1)
    assert (trace.events, trace.sizes, trace.kinds) == ((0,) if kept else (0, ~0), (4096,), ("workspaces",))


def test_first_name_of_a_block_holds() -> None:
    """What a block was first said to hold stays, as a weight that is a buffer of an optimizer stays a weight."""
    recorder, tensor = Recorder(), torch.ones(4)
    with recorder.recording():
        recorder.hold([tensor], "weights")
        recorder.hold([tensor], "optimizer state")
    assert recorder.trace(rows=1).kinds == ("weights",)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_as_it_was(enabled: bool) -> None:
    """The collector waits while recording and is then as the caller had it, even after an error."""
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), Recorder().recording():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_real_tensors_are_recorded_alike(few: Case) -> None:
    """A trace on real tensors has the peak of the one on fake tensors."""
    fake, workload = fake_trace(few.workload(), 3, host_batch=False), few.workload()
    with older_objects_set_aside(), preserved(workload.module, workload.own_optimizer, device=torch.device("cpu")):
        real = record_windows(workload, workload.source.take(3), 3, host_batch=False)
    assert max(live_bytes(real)) == max(live_bytes(fake))


def test_self_test_is_content() -> None:
    """Fake tensors of this torch do what is expected of them."""
    assert self_test() is None


def test_self_test_notices_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch in which fake tensors cannot be made any more is named as such."""

    def changed(*args: object, **more: object) -> None:
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode", changed)
    assert self_test() == "TypeError: unexpected keyword argument"


def test_self_test_notices_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch in which something is no longer seen is named with what is missing."""
    monkeypatch.setattr(trace_module, "_state_of", lambda optimizer: [])
    assert self_test() == "optimizer state 0, not 8192"
