"""The trace of a training step: the same storages as a real step, to the byte, by what they hold."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.flop_counter import FlopCounterMode

from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.recording import record_windows
from autoaccum.prediction.trace import KINDS, Trace
from autoaccum.preserve import preserved
from autoaccum.probing import older_objects_set_aside

from .cases import (
    BLOCK,
    CASES,
    Attention,
    Case,
    Checkpointed,
    Language,
    classified,
    held_as,
    ids,
    live_bytes,
    measured,
    mlp,
    pairs,
    small_transformer,
)


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
    return Case(small_transformer(kind).model, ids(64))


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


@pytest.mark.slow
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


def test_real_tensors_are_recorded_alike(few: Case) -> None:
    """A trace on real tensors has the peak of the one on fake tensors."""
    fake, workload = fake_trace(few.workload(), 3, host_batch=False), few.workload()
    with older_objects_set_aside(), preserved(workload.module, workload.own_optimizer, device=torch.device("cpu")):
        real = record_windows(workload, workload.source.take(3), 3, host_batch=False)
    assert max(live_bytes(real)) == max(live_bytes(fake))
