"""Saved activations in host memory: the same bits come back, weights stay, and a host without room says so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.devices import CpuDevice, VirtualDevice
from autoaccum.devices.base import COMMON_ROWS, Verdict, recognise
from autoaccum.levers import Subject, applied
from autoaccum.levers.offload import HostShelf, Offload
from autoaccum.preserve import preserved
from autoaccum.probing import Attempt, run_trial, subject_on
from autoaccum.records import Candidate, Fit, Levers, OutOfMemory, Refused
from autoaccum.targets.demos import gpt
from autoaccum.workload import Workload

from .models import CASE_NAMED, HOST, Mlp, Stack, differing, full, plan_of, seed, trained

OFF = Levers(offload="cpu")
KIB, MIB = 2**10, 2**20


def subject(module: nn.Module, **more: Any) -> Subject:
    return Subject(module, HOST, **{"worth_moving_bytes": 0, **more})


# The same bits.


@pytest.mark.parametrize("name", CASE_NAMED)
def test_gradients_are_the_same_bits(name: str) -> None:
    """Losses, gradients and buffers are bit for bit those of training without the lever."""
    expected, found = trained(CASE_NAMED[name]), trained(CASE_NAMED[name], OFF)
    assert torch.equal(torch.stack(expected.losses), torch.stack(found.losses))
    assert differing(expected.gradients, found.gradients) == []
    assert differing(expected.buffers, found.buffers) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4, 5),
        lambda: torch.randn(3, 4, 5).transpose(0, 2),
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.randn(6, 8)[::2, 1::3],
        lambda: torch.randn(4, 1).expand(4, 7),
        lambda: torch.randint(0, 255, (9,), dtype=torch.uint8),
        lambda: torch.randn(5, dtype=torch.complex64).conj(),
        lambda: torch.tensor(2.5),
        lambda: torch.empty(0, 3),
        lambda: torch.randn(7).bfloat16(),
    ],
    ids=["plain", "transposed", "channels last", "strided", "expanded", "bytes", "conjugate", "scalar", "empty", "bfloat16"],
)
def test_tensor_comes_back(make: Callable[[], Tensor]) -> None:
    """What is taken from the shelf has the shape, type and values of what was put there, and is not the same memory."""
    tensor = make()
    shelf = HostShelf(subject(nn.Linear(2, 2)))
    taken = shelf.take(shelf.put(tensor))
    assert (taken.shape, taken.dtype, taken.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert torch.equal(taken, tensor)
    assert not tensor.numel() or taken.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_dense_tensor_comes_back_in_its_layout() -> None:
    """Strides of dense tensors stay what they were, since kernels are chosen by them."""
    shelf = HostShelf(subject(nn.Linear(2, 2)))
    for tensor in (torch.randn(3, 4).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)):
        assert shelf.take(shelf.put(tensor)).stride() == tensor.stride()


def test_sparse_tensors_stay() -> None:
    """A sparse tensor is kept as it is, in the memory in which it is."""
    sparse, shelf = torch.eye(50).to_sparse().coalesce(), HostShelf(subject(nn.Linear(2, 2)))
    taken = shelf.take(shelf.put(sparse))
    assert taken.layout == torch.sparse_coo
    assert taken.values().data_ptr() == sparse.values().data_ptr()


def test_gradient_of_a_gradient() -> None:
    """A penalty on the gradient has the gradients that it has without the lever."""
    found = []
    for levers in (Levers(), OFF):
        seed()
        model, x = Stack(Mlp(), Mlp()), torch.randn(3, 8, requires_grad=True)
        with applied(levers, subject(model)):
            (slope,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
            slope.pow(2).sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *found))


def test_two_backward_passes() -> None:
    """With `retain_graph` what lies in host memory is taken twice."""
    model = Stack(Mlp(), Mlp())
    with applied(OFF, subject(model)):
        loss = model(torch.randn(3, 8)).sin().sum()
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        loss.backward()
    assert all(torch.equal(p.grad, 2 * one) for p, one in zip(model.parameters(), once, strict=True))  # type: ignore[arg-type]


# What is moved.


class Spying:
    """Notes what the shelf is given and whether it moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: list[Tensor] = []
        self.stayed: list[Tensor] = []
        original = HostShelf.put

        def put(shelf: HostShelf, tensor: Tensor) -> Any:
            kept = original(shelf, tensor)
            stays = shelf.take(kept).untyped_storage()._cdata == tensor.untyped_storage()._cdata
            (self.stayed if stays else self.moved).append(tensor)
            return kept

        monkeypatch.setattr(HostShelf, "put", put)


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def test_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and buffers that are saved for the backward pass are kept as they are, views of them as well."""
    seen = Spying(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Bilinear(8, 8, 4))
    with applied(OFF, subject(model)):
        hidden = model[1](model[0](torch.randn(6, 8)))
        model[2](hidden, hidden).sum().backward()
    own = storages([*model.parameters(), *model.buffers()])
    assert storages(seen.stayed) & own
    assert not storages(seen.moved) & own
    assert seen.moved


def test_tied_and_frozen_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights, frozen ones and integers are not moved either."""
    seen = Spying(monkeypatch)
    for name in ("gpt", "adapters on integers"):
        made = CASE_NAMED[name].make()
        with applied(OFF, subject(made.module)):
            made.loss(made.module, made.batches[0]).backward()
        assert not storages(seen.moved) & storages(made.module.parameters())


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is smaller than is worth moving stays on the device."""
    seen = Spying(monkeypatch)
    model = nn.Linear(8, 8)
    with applied(OFF, Subject(model, HOST)):
        for rows in (64 * KIB // (8 * 4), 64 * KIB // (8 * 4) - 1):
            model(torch.randn(rows, 8).requires_grad_()).exp().sum().backward()
    assert [len(tensor) for tensor in seen.moved] == [2048, 2048]
    assert all(tensor.nbytes < 64 * KIB for tensor in seen.stayed)


def test_inputs_of_blocks_that_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpointing as well, what is moved is what checkpointing keeps: the inputs of blocks."""
    seen = Spying(monkeypatch)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    with applied(full(3, offload="cpu"), subject(model)):
        model(torch.randn(4, 8).requires_grad_()).sum().backward()
    moved = [tuple(tensor.shape) for tensor in seen.moved if tensor.numel()]  # older checkpoints save an empty one as well
    assert moved == [(4, 8)] * 3


def test_host_bytes_are_told_and_let_go() -> None:
    """How much lies in host memory is told whenever more is moved, and goes down when the graph is gone."""
    told: list[int] = []
    model = nn.Sequential(*(nn.Tanh() for _ in range(4)), nn.Linear(64, 64))
    with applied(OFF, subject(model, note_host_bytes=told.append)):
        for _ in range(2):
            model(torch.randn(16, 64).requires_grad_()).sum().backward()
            gc.collect()
    tensor = 16 * 64 * 4
    assert told == [tensor * count for count in (1, 2, 3, 4, 5)][: len(told) // 2] * 2


def test_nothing_is_told_where_nothing_is_moved() -> None:
    """Without gradients nothing is moved."""
    told: list[int] = []
    model = nn.Linear(8, 8)
    with applied(OFF, subject(model, note_host_bytes=told.append)), torch.no_grad():
        model(torch.randn(4, 8))
    assert told == []


# In a probe.


def attempt(workload: Workload, rows: int, levers: Levers) -> Attempt:
    """One trial on a virtual device."""
    device = VirtualDevice("1GiB")
    with preserved(workload.module, workload.own_optimizer, device=workload.device) as snapshot:
        return run_trial(
            workload,
            device,
            Candidate(micro_batch=rows, levers=levers),
            budget_bytes=2**30,
            snapshot=snapshot,
            windows=[[rows, rows]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        )


@pytest.fixture
def workload() -> Workload:
    """A small GPT whose activations are worth moving."""
    return gpt(vocabulary=64, seq_len=64, layers=3, width=64, heads=2)


def test_peak_is_lower_and_host_bytes_are_recorded(workload: Workload) -> None:
    """On a device the peak is lower by about what lies in host memory, which the fit records."""
    outcomes = [attempt(workload, 8, levers).trial.outcome for levers in (Levers(), OFF)]
    without, moved = outcomes
    assert isinstance(without, Fit)
    assert isinstance(moved, Fit)
    assert without.offloaded_bytes is None
    assert moved.offloaded_bytes is not None
    assert moved.peak_bytes < 0.7 * without.peak_bytes
    assert moved.offloaded_bytes >= 0.8 * (without.peak_bytes - moved.peak_bytes)


def test_host_bytes_are_those_of_one_micro_batch(workload: Workload) -> None:
    """What is recorded is the most that lies there at once, not the sum over micro-batches."""
    fits = []
    for windows in ([[4]], [[4, 4, 4]] * 3):
        device = VirtualDevice("1GiB")
        with preserved(workload.module, None, device=workload.device) as snapshot:
            outcome = run_trial(
                workload,
                device,
                Candidate(micro_batch=4, levers=OFF),
                budget_bytes=2**30,
                snapshot=snapshot,
                windows=windows,
                feed=lambda sizes: [workload.source.take(size) for size in sizes],
            ).trial.outcome
        assert isinstance(outcome, Fit)
        fits.append(outcome.offloaded_bytes)
    assert fits[0] == fits[1]


def test_tensors_that_are_saved_several_times_lie_there_once() -> None:
    """One activation that three layers need takes host memory for one, not for three."""
    told: list[int] = []
    heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    with applied(OFF, subject(heads, note_host_bytes=told.append)):
        hidden = torch.randn(32, 64).requires_grad_() * 2
        sum(head(hidden) for head in heads).sum().backward()  # type: ignore[union-attr]
    assert max(told) == 32 * 64 * 4


def test_views_do_not_grow() -> None:
    """A tensor that was expanded takes as much host memory as what it is a view of."""
    told: list[int] = []
    shelf = HostShelf(subject(nn.Linear(2, 2), note_host_bytes=told.append))
    tensor = torch.randn(100, 1).expand(100, 1000)
    assert torch.equal(shelf.take(shelf.put(tensor)), tensor)
    assert max(told) == 100 * 4


# No room.


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 300 KiB of free memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=300 * KIB, total=2**30))


@pytest.mark.usefixtures("small_host")
def test_host_without_room() -> None:
    """Where the host has no room for more, an OSError with the number 12 says so in words."""
    shelf = HostShelf(subject(nn.Linear(2, 2)))
    kept = shelf.put(torch.randn(50 * KIB))
    with pytest.raises(OSError, match="offloaded activations need more than the 270 KiB of host memory") as caught:
        shelf.put(torch.randn(50 * KIB))
    assert caught.value.errno == 12
    row = recognise(caught.value, COMMON_ROWS)
    assert row is not None
    assert row.verdict is Verdict.HOST
    del kept
    gc.collect()
    shelf.put(torch.randn(50 * KIB))


@pytest.mark.usefixtures("small_host")
def test_probe_where_the_host_has_no_room(workload: Workload) -> None:
    """A trial for which the host has no room is refused, larger ones as well, limited by the host; nothing is raised."""
    found = attempt(workload, 8, OFF)
    outcome = found.trial.outcome
    assert isinstance(outcome, Refused)
    assert (outcome.bound, outcome.limited_by, outcome.phase) == ("ceiling", "host", "forward")
    assert "host memory" in outcome.message
    assert all(parameter.grad is None for parameter in workload.module.parameters())


@pytest.mark.usefixtures("small_host")
def test_training_where_the_host_has_no_room() -> None:
    """In training it is an error with these words, and the model is as it was before the window."""
    model = Stack(Mlp(64), Mlp(64), width=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(
        model, optimizer, plan=plan_of(OFF, 6000, 2000), training_step=lambda model, batch: model(batch).pow(2).mean()
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(OSError, match="host memory"):
        accumulator.step(torch.randn(6000, 64))
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_device_without_room_is_not_the_hosts_fault(workload: Workload) -> None:
    """A device that is too small is out of memory under the lever too."""
    device = VirtualDevice("1MiB")
    with preserved(workload.module, None, device=workload.device) as snapshot:
        outcome = run_trial(
            workload,
            device,
            Candidate(micro_batch=8, levers=OFF),
            budget_bytes=MIB,
            snapshot=snapshot,
            windows=[[8, 8]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        ).trial.outcome
    assert isinstance(outcome, OutOfMemory)


# What is said against it.


def test_reason_where_host_memory_counts() -> None:
    """In host memory itself nothing is won, and the reason says so; on a device there is none."""
    model = nn.Linear(2, 2)
    assert Offload().reason_against("cpu", subject_on(model, CpuDevice(), None)) == "the model is in host memory already"
    assert Offload().reason_against("cpu", subject_on(model, VirtualDevice("1GiB"), None)) is None
    assert Offload().reason_against("off", subject_on(model, CpuDevice(), None)) is None


def test_change_of_a_saved_tensor_is_noticed() -> None:
    """A tensor that is changed in place after it was saved is an error in the backward pass, as without the lever."""
    weight = nn.Linear(5, 5)
    with applied(OFF, subject(weight)):
        out = weight(torch.randn(3, 5, requires_grad=True))
        with torch.no_grad():
            weight.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"in.?place"):
            out.sum().backward()


@pytest.mark.parametrize("worth_moving_bytes", [0, 200, 10**9])
def test_graph_without_a_backward_pass_is_let_go(worth_moving_bytes: int) -> None:
    """A forward pass that no backward pass follows, as when memory runs out, holds nothing, on neither side."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh())
    told: list[int] = []
    tensors = []
    with applied(OFF, subject(model, worth_moving_bytes=worth_moving_bytes, note_host_bytes=told.append)):
        hidden = model[1](model[0](torch.randn(8, 8)))
        out = model[3](model[2](hidden))
        tensors += [weakref.ref(hidden.untyped_storage()), weakref.ref(out.untyped_storage())]
        del hidden, out
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]


def test_trials_that_run_out_of_memory_leave_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lay in host memory when a trial ran out of memory is gone after it."""
    copies: weakref.WeakSet[Any] = weakref.WeakSet()
    original = HostShelf.put

    def put(shelf: HostShelf, tensor: Tensor) -> Any:
        kept = original(shelf, tensor)
        if hasattr(kept, "copy"):
            copies.add(kept)
        return kept

    class RootMeanSquare(nn.Module):
        """Its small result is saved by its own node, and large ones lead to it."""

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    monkeypatch.setattr(HostShelf, "put", put)
    model = nn.Sequential(*(nn.Sequential(RootMeanSquare(), nn.Linear(64, 64), nn.GELU()) for _ in range(30)))
    device = VirtualDevice("2MiB")
    workload = Workload(model, torch.randn(8, 100, 64))
    with preserved(model, None, device=HOST) as snapshot:
        outcome = run_trial(
            workload,
            device,
            Candidate(micro_batch=20, levers=OFF),
            budget_bytes=2 * MIB,
            snapshot=snapshot,
            windows=[[20, 20]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        ).trial.outcome
    gc.collect()
    assert isinstance(outcome, OutOfMemory)
    assert outcome.phase == "forward"
    assert len(copies) == 0


def test_graph_that_outlives_the_context() -> None:
    """A loss whose backward pass comes after the context takes what lies in host memory."""
    model = Stack(Mlp(), Mlp())
    with applied(OFF, subject(model)):
        loss = model(torch.randn(3, 8)).sin().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
