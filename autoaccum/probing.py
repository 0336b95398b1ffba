"""One candidate, really run under a budget, and what came of it. It frees and restores before it returns."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autoaccum.catching import Failure, attempted
from autoaccum.company import Company
from autoaccum.devices.base import AbstractDevice, Verdict, Watch
from autoaccum.errors import AutoaccumError, InvalidRequestError
from autoaccum.levers import Subject, applied, under_autocast
from autoaccum.preserve import Snapshot
from autoaccum.records import Candidate, Fit, Levers, Outcome, OutOfMemory, Refused, Trial
from autoaccum.window import Progress, run_window
from autoaccum.workload import Workload, num_bytes, step_hooks_suspended

WINDOWS_PER_PROBE, MICRO_BATCHES_PER_WINDOW = 2, 2
"""The second micro-batch of the second step is the true peak: gradients and optimizer state are both there by then.

Measured with a GPT-2-small at micro-batch 4: the first micro-batch of the first step peaks 26 % lower.
"""

IsEnough = Callable[[Sequence[float]], bool]

_SHORTEST_S = 1e-9  # what clocks count in
_ABOUT_THE_SIZE = frozenset(Verdict) - {Verdict.DEAD}
_are_set_aside = False


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Let the garbage collector look only at what is made inside: nine tenths of a small trial's time otherwise.

    Left alone where the caller has set objects aside, which could not be told apart afterwards. Counting these takes as long
    as looking at them, so it is done once, not for every trace of a search.
    """
    global _are_set_aside
    if _are_set_aside:
        yield
        return
    is_callers = bool(gc.get_freeze_count())
    if not is_callers:
        gc.freeze()
    _are_set_aside = True
    try:
        yield
    finally:
        _are_set_aside = False
        if not is_callers:
            gc.unfreeze()


class Attempt(NamedTuple):
    """A trial and what is not written down with it.

    `error` is the user's exception where it is not certain that memory was the reason; its frames hold nothing any more.
    `called_off`: another rank has failed, and what came of the trial is for that one to say.
    """

    trial: Trial
    error: Exception | None = None
    optimizer_state_bytes: int | None = None
    called_off: bool = False


class _Measured(NamedTuple):
    watch: Watch
    step_times_s: tuple[float, ...]
    optimizer_state_bytes: int
    offloaded_bytes: int | None


class HostBytes:
    """The most that was moved to host memory, None where nothing was."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None

    def note(self, held_bytes: int) -> None:
        """So much lies there now."""
        self.peak_bytes = max(self.peak_bytes or 0, held_bytes)


def subject_on(module: nn.Module, device: AbstractDevice, optimizer: Optimizer | None) -> Subject:
    """What levers are turned on, on a device that is here."""
    return Subject(module, device.torch_device, optimizer, off_device=device.off_device, is_host=device.is_host)


def scaler_for(levers: Levers, device: torch.device) -> torch.amp.GradScaler | None:
    """What fp16 needs in a trial; with a scale of one, since a trial looks for memory and time and not for a loss."""
    return torch.amp.GradScaler(device.type, init_scale=1.0) if levers.precision == "fp16" else None


def run_trial(
    workload: Workload,
    device: AbstractDevice,
    candidate: Candidate,
    *,
    budget_bytes: int,
    snapshot: Snapshot,
    windows: Sequence[Sequence[int]],
    feed: Callable[[Sequence[int]], Sequence[Any]],
    purpose: Any = "probe",
    is_enough: IsEnough | None = None,
    warm_up: int | None = None,
    company: Company | None = None,
) -> Attempt:
    """Run the windows at the candidate's size under the budget and say whether they fitted.

    Args:
        budget_bytes: What this process may hold on the device.
        snapshot: Restored before this returns, and by its owner when this raises.
        windows: Sizes of the micro-batches of each optimizer step, in rows on this rank.
        feed: Gives the micro-batches of one window.
        purpose: See `Trial`.
        is_enough: Asked with the times of all windows but the first; while it says no, the last window is run again.
        warm_up: The first window runs only so many of its micro-batches; None: all.
        company: The other ranks; None: this process on its own.

    Returns:
        A complete trial. Step times leave out the first window.

    Raises:
        InvalidRequestError: When what ran was no training step, or its loss is NaN with more than one row.
        Exception: Whatever the user's code raises, unless a table knows it to depend on the size. It carries a note.

    Leaves behind:
        Nothing of the trial: the state is restored and no tensor of it is alive.
    """
    started, progress = time.perf_counter(), Progress()
    company = Company() if company is None else company

    def run() -> _Measured:
        with company.on_trial(), device.limited_to(budget_bytes):
            return _run_windows(workload, device, candidate.levers, windows, is_enough, warm_up, feed, progress, company)

    try:
        came_out = attempted(run, _ABOUT_THE_SIZE)
    except BaseException as error:
        try:
            company.settle()
        except RuntimeError as lost:  # a lost device context: the user's error matters more than this one
            error.add_note(f"autoaccum could not bring the sharded model to rest: {lost}")
        if isinstance(error, Exception) and not isinstance(error, AutoaccumError):
            error.add_note(f"raised while autoaccum probed micro_batch={candidate.micro_batch} ({progress.phase} phase)")
        raise
    failure = came_out if isinstance(came_out, Failure) else None
    measured = None if isinstance(came_out, Failure) else came_out
    uncertain = failure is not None and failure.row.verdict is not Verdict.TOO_LARGE
    if failure is not None and not uncertain:
        failure.forget()
    company.settle()
    gc.collect()
    device.release()
    snapshot.restore()
    trial = Trial(
        candidate=candidate,
        outcome=_outcome(measured, failure, progress, budget_bytes),
        wall_s=_since(started),
        rows_per_step=sum(windows[-1]),
        purpose=purpose,
    )
    kept = failure.error if failure is not None and uncertain else None
    state_bytes = None if measured is None else measured.optimizer_state_bytes
    return Attempt(trial, kept, state_bytes, company.was_called_off)


def _run_windows(
    workload: Workload,
    device: AbstractDevice,
    levers: Levers,
    windows: Sequence[Sequence[int]],
    is_enough: IsEnough | None,
    warm_up: int | None,
    feed: Callable[[Sequence[int]], Sequence[Any]],
    progress: Progress,
    company: Company,
) -> _Measured:
    workload.set_training_mode()
    for parameter in workload.module.parameters():
        parameter.grad = None  # the user's gradients are in the snapshot; training starts without any
    batches = {tuple(sizes): company.padded(feed(sizes), sizes) for sizes in windows}
    resident, times_s = workload.resident(), list[float]()
    on_host = HostBytes()
    with device.watched(resident) as watch:
        optimizer = workload.make_optimizer()
        subject = subject_on(workload.module, device, optimizer)._replace(note_host_bytes=on_host.note)
        loss_of, scaler = under_autocast(workload.loss, levers, device.torch_device), scaler_for(levers, device.torch_device)
        reducing = company.reducing()
        with step_hooks_suspended(optimizer), applied(levers, subject):
            for sizes in _repeated(windows, times_s, is_enough):
                begun = time.perf_counter()
                micro_batches, weights = batches[tuple(sizes)]
                if not times_s:
                    micro_batches, weights = micro_batches[:warm_up], weights[:warm_up]
                loss = run_window(
                    micro_batches,
                    weights,  # what is measured does not depend on them; rows need nothing read from the labels
                    loss=loss_of,
                    optimizer=optimizer,
                    place=company.placing(device.place, progress, len(weights)),
                    progress=progress,
                    module=workload.module,
                    scaler=scaler,
                    look_for_others=not company.is_sharded,
                    run_all=company.is_in_lockstep,
                    wide=True if reducing is not None else None,
                    reducing=reducing,
                )
                device.synchronize()
                times_s.append(_since(begun))
                if len(times_s) == 1:
                    _refuse_nan(loss, sizes[:warm_up])
        state_bytes = _state_bytes(optimizer)
    return _Measured(watch, tuple(times_s[1:]), state_bytes, on_host.peak_bytes)


def _since(begun: float) -> float:
    """Seconds; never none or fewer, whatever becomes of the clock of a machine that is moved or suspended."""
    return max(time.perf_counter() - begun, _SHORTEST_S)


def _repeated(
    windows: Sequence[Sequence[int]], times_s: Sequence[float], is_enough: IsEnough | None
) -> Iterator[Sequence[int]]:
    """The windows, and the last one again until that is enough; `times_s` grows while this is read."""
    yield from windows
    while is_enough is not None and not is_enough(times_s[1:]):
        yield windows[-1]


def _refuse_nan(loss: Tensor, sizes: Sequence[int]) -> None:
    """With one row it may be that alone, as a spread over the rows is NaN then: `COMMON_ROWS` knows the text as a floor."""
    if math.isnan(float(loss)):
        where = "with a micro-batch of one row" if min(sizes) == 1 else "on the sample"
        raise InvalidRequestError(
            f"the loss is NaN {where}, before any parameter has changed. "
            "Check the sample (are all labels ignored? are there NaN inputs?) and the model."
        )


def _state_bytes(optimizer: Optimizer) -> int:
    return num_bytes(leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor))


def _outcome(measured: _Measured | None, failure: Failure | None, progress: Progress, budget_bytes: int) -> Outcome:
    if failure is not None:
        return _failed_outcome(failure, progress)
    assert measured is not None
    watch = measured.watch
    if watch.peak_bytes > budget_bytes:
        return OutOfMemory(cause="budget", peak_bytes=watch.peak_bytes, message="ran, but its peak is above the budget")
    if watch.allocator_retries:
        text = f"ran, but the allocator flushed its cache {watch.allocator_retries} times to make room"
        return OutOfMemory(cause="retries", peak_bytes=None, message=text)
    return Fit(
        peak_bytes=watch.peak_bytes,
        peak_allocated_bytes=watch.peak_allocated_bytes,
        peak_reserved_bytes=watch.peak_reserved_bytes,
        step_times_s=measured.step_times_s,
        offloaded_bytes=measured.offloaded_bytes,
    )


def _failed_outcome(failure: Failure, progress: Progress) -> Outcome:
    match failure.row.verdict:
        case Verdict.TOO_LARGE:
            return OutOfMemory(cause="allocator", phase=progress.phase, message=failure.message)
        case Verdict.UNCLEAR:
            return OutOfMemory(cause="unclear", phase=progress.phase, message=failure.message)
        case Verdict.FLOOR:
            return Refused(bound="floor", phase=progress.phase, message=failure.message)
        case Verdict.HOST:
            return Refused(bound="ceiling", limited_by="host", phase=progress.phase, message=failure.message)
        case _:
            return Refused(bound="ceiling", phase=progress.phase, message=failure.message)
