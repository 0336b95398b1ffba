"""What fake tensors refuse is traced on real ones, or told."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import autoaccum
from autoaccum.devices.base import AbstractDevice
from autoaccum.devices.virtual import VirtualDevice
from autoaccum.prediction import forecast
from autoaccum.prediction.fake_tensors import is_refusal
from autoaccum.prediction.forecast import Traced, in_blocks, traced
from autoaccum.preserve import preserved
from autoaccum.probing import older_objects_set_aside
from autoaccum.workload import Workload

from .cases import Case, Doing, Recurrent, measured, optimized
from .trained import Trained, generators, same, state_of


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


@pytest.mark.slow
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
