"""One trial, really run, and what came of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.devices import VirtualDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.preserve import preserved
from autoaccum.probing import Attempt, older_objects_set_aside, run_trial
from autoaccum.records import Candidate, Fit, OutOfMemory, Refused
from autoaccum.workload import Workload


def attempt(
    workload: Workload, size: int, *, budget: int = 2**30, windows: Any = None, warm_up: int | None = None
) -> Attempt:
    device = VirtualDevice("1GiB")
    with preserved(workload.module, workload.own_optimizer, device=workload.device) as snapshot:
        return run_trial(
            workload,
            device,
            Candidate(micro_batch=size),
            budget_bytes=budget,
            snapshot=snapshot,
            windows=windows or [[size, size]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
            warm_up=warm_up,
        )


def linear(step: Any = None) -> Workload:
    return Workload(nn.Linear(3, 2), torch.randn(4, 3), training_step=step or (lambda model, batch: model(batch).mean()))


def test_trial_that_fits_has_peak_time_and_rows() -> None:
    """A fit carries its peak, one step time after the first, and the rows of an optimizer step."""
    found = attempt(linear(), 5)
    assert isinstance(found.trial.outcome, Fit)
    assert found.trial.outcome.peak_bytes > 0
    assert len(found.trial.outcome.step_times_s) == 1
    assert (found.trial.rows_per_step, found.trial.candidate.micro_batch) == (10, 5)
    assert found.optimizer_state_bytes


def test_clock_that_goes_backwards_gives_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every reading of the clock is an hour before the last, times are above 0 still."""
    readings = count(0.0, -3600.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    trial = attempt(linear(), 5).trial
    assert isinstance(trial.outcome, Fit)
    assert trial.wall_s > 0 and min(trial.outcome.step_times_s) > 0


def test_probe_runs_two_steps_of_two_micro_batches() -> None:
    """The model sees four micro-batches of the size, and the optimizer steps twice."""
    seen, steps = [], []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return model(batch).mean()

    model = nn.Linear(3, 2)
    attempt(Workload(model, torch.randn(4, 3), training_step=step, optimizer=lambda p: Counting(p, lr=0.1)), 5)
    assert (seen, len(steps)) == ([5, 5, 5, 5], 2)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_phase_in_which_memory_ran_out_is_named(phase: str) -> None:
    """An allocation that fails is recorded with its phase and text, and the trial does not raise."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("full")

    class FailingStep(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError("full")

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if phase == "forward":
            raise torch.OutOfMemoryError("full")
        output = model(batch)
        return (Fails.apply(output) if phase == "backward" else output).mean()

    optimizer = (lambda p: FailingStep(p, lr=0.1)) if phase == "optimizer" else None
    found = attempt(Workload(nn.Linear(3, 2), torch.randn(4, 3), training_step=step, optimizer=optimizer), 2)
    assert found.trial.outcome == OutOfMemory(cause="allocator", phase=phase, message="OutOfMemoryError: full")  # type: ignore[arg-type]
    assert found.error is None


def test_peak_above_the_budget_does_not_fit() -> None:
    """A trial that needs more than the budget is out of memory, whatever the device's own size."""
    assert isinstance(attempt(linear(), 100, budget=512 * 10).trial.outcome, OutOfMemory)


def test_unclear_error_is_kept_without_its_memory() -> None:
    """The user's exception is kept with its traceback, but no tensor of the trial lives on in it."""
    alive: list[Any] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        hidden = model(batch)
        alive.append(weakref.ref(hidden))
        raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")

    found = attempt(linear(step), 2)
    gc.collect()
    assert isinstance(found.trial.outcome, OutOfMemory)
    assert found.trial.outcome.cause == "unclear"
    assert isinstance(found.error, RuntimeError)
    assert found.error.__traceback__ is not None
    assert alive[0]() is None


def test_known_limit_is_refused_with_its_direction() -> None:
    """Too few rows is a floor, an index limit is a ceiling."""

    def too_few(model: nn.Module, batch: Tensor) -> Tensor:
        raise ValueError("Expected more than 1 value per channel when training, got input size [1, 4]")

    def too_many(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements")

    outcomes = [attempt(linear(step), 1).trial.outcome for step in (too_few, too_many)]
    assert [outcome.bound for outcome in outcomes if isinstance(outcome, Refused)] == ["floor", "ceiling"]


def spread(model: nn.Module, batch: Tensor) -> Tensor:
    """NaN for a single row."""
    out: Tensor = model(batch)
    return (out - out.mean(0)).square().sum() / (len(out) - 1)


@pytest.mark.parametrize("windows", [[[1, 1]] * 2, [[3, 3, 1]] * 2])
def test_loss_that_is_nan_for_one_row_is_a_floor(windows: list[list[int]]) -> None:
    """A NaN where a micro-batch has a single row says that this is too small, and the error is kept."""
    found = attempt(linear(spread), max(windows[0]), windows=windows)
    assert isinstance(found.trial.outcome, Refused) and found.trial.outcome.bound == "floor"
    assert isinstance(found.error, InvalidRequestError) and "with a micro-batch of one row" in str(found.error)


def test_loss_that_is_nan_for_more_rows_is_an_error() -> None:
    """A NaN with two rows in every micro-batch that ran has another reason, whatever is left out while warming up."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch).mean() * float("nan")
        return out

    for windows, warm_up in (([[2, 2]] * 2, None), ([[2, 2, 1]] * 2, 2)):
        with pytest.raises(InvalidRequestError, match="the loss is NaN on the sample"):
            attempt(linear(step), 2, windows=windows, warm_up=warm_up)


def test_users_error_passes_with_a_note() -> None:
    """Anything else is raised as the same object, with the size and phase in a note."""
    error = ZeroDivisionError("mine")

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        raise error

    with pytest.raises(ZeroDivisionError) as caught:
        attempt(linear(step), 7)
    assert caught.value is error
    assert "micro_batch=7 (forward phase)" in error.__notes__[0]


def test_lost_device_passes_with_a_note() -> None:
    """An error after which nothing more can be run is no answer about the size: it is raised as the same object."""
    error = RuntimeError("CUDA error: device-side assert triggered")

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        raise error

    with pytest.raises(RuntimeError) as caught:
        attempt(linear(step), 7)
    assert caught.value is error and len(error.__notes__) == 1


def test_own_complaint_gets_no_note() -> None:
    """An error of autoaccum's own says all there is to say."""
    with pytest.raises(InvalidRequestError) as caught:
        attempt(linear(lambda model, batch: model(batch)), 7)
    assert not hasattr(caught.value, "__notes__")


def test_long_message_is_cut() -> None:
    """A message with a C++ stack in it does not swell the log."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("x" * 100_000)

    outcome = attempt(linear(step), 1).trial.outcome
    assert isinstance(outcome, OutOfMemory)
    assert len(outcome.message) < 2100


def test_windows_of_the_plans_sizes_are_run() -> None:
    """Uneven windows run as given, and the rows are those of the last window."""
    seen: list[int] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return model(batch).mean()

    found = attempt(linear(step), 4, windows=[[4, 3]] * 3)
    assert seen == [4, 3] * 3
    assert found.trial.rows_per_step == 7
    assert isinstance(found.trial.outcome, Fit)
    assert len(found.trial.outcome.step_times_s) == 2


def test_warming_up_takes_part_of_the_first_window() -> None:
    """Where so many micro-batches are enough to warm up, the first window runs no more, and the timed ones run whole."""
    seen: list[int] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return model(batch).mean()

    found = attempt(linear(step), 4, windows=[[4, 4, 4, 3]] * 2, warm_up=2)
    assert seen == [4, 4, 4, 4, 4, 3]
    assert found.trial.rows_per_step == 15
    assert isinstance(found.trial.outcome, Fit) and len(found.trial.outcome.step_times_s) == 1


@pytest.fixture
def nothing_set_aside() -> Iterator[None]:
    """As in a process whose caller froze nothing."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_set_aside")
def test_collector_sees_everything_again_afterwards() -> None:
    """What was set aside is back when the search is over."""
    with older_objects_set_aside():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_objects_that_the_caller_set_aside_stay_so() -> None:
    """A caller who froze objects before a fork keeps them frozen."""
    gc.freeze()
    before = gc.get_freeze_count()
    with older_objects_set_aside():
        pass
    assert gc.get_freeze_count() == before > 0
