"""A probe's windows, recorded as they run. The window that runs is the one that training runs.

Knows nothing of whether the tensors are real, nor of budgets.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autoaccum.batches.structure import cloned, tensors_in
from autoaccum.levers import Subject, applied, under_autocast
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.trace import Trace
from autoaccum.probing import MICRO_BATCHES_PER_WINDOW, WINDOWS_PER_PROBE, scaler_for
from autoaccum.records import AS_IT_IS, Levers
from autoaccum.window import run_window
from autoaccum.workload import Workload, step_hooks_suspended

HOST = torch.device("cpu")
Adjusted = Callable[[Recorder, Optimizer], AbstractContextManager[None]]  # entered while windows run


def record_windows(
    workload: Workload,
    batch: Any,
    rows: int,
    *,
    host_batch: bool,
    sums_in_place: bool = False,
    adjusted: Adjusted | None = None,
    levers: Levers = AS_IT_IS,
    device: torch.device = HOST,
) -> Trace:
    """Record a probe's windows as they run on this workload, whatever its tensors are. It is changed by that."""
    workload.set_training_mode()
    for parameter in workload.module.parameters():
        parameter.grad = None
    recorder = Recorder()

    def place(micro_batch: Any) -> Any:
        if host_batch:
            return micro_batch
        with recorder.paused():  # the batch that it is cut from stays on the host
            placed = cloned(micro_batch)
        recorder.hold(tensors_in(placed), "batch")
        return placed

    with ExitStack() as stack:
        stack.enter_context(recorder.recording())
        recorder.hold([*workload.module.parameters(), *workload.module.buffers()], "weights")
        if workload.own_optimizer is not None:
            recorder.hold(_state_of(workload.own_optimizer), "optimizer state")
        if host_batch:
            recorder.hold(tensors_in(batch), "batch")
        optimizer = workload.make_optimizer()
        stack.enter_context(step_hooks_suspended(optimizer))
        stack.enter_context(_holdings_noted(recorder, optimizer))
        subject = Subject(workload.module, device, optimizer, off_device=recorder.paused, worth_moving_bytes=0)
        # First the levers: what is adjusted is where neither they nor the user have chosen.
        stack.enter_context(applied(levers, subject))
        stack.enter_context(adjusted(recorder, optimizer) if adjusted is not None else nullcontext())
        scaler = scaler_for(levers, HOST)
        for recorder.window in range(WINDOWS_PER_PROBE):
            loss = run_window(  # it lives on through the next window, as in a probe
                [batch] * MICRO_BATCHES_PER_WINDOW,
                [rows] * MICRO_BATCHES_PER_WINDOW,
                loss=under_autocast(workload.loss, levers, device),
                optimizer=optimizer,
                place=place,
                progress=recorder.progress,
                module=workload.module,
                scaler=scaler,
            )
            gc.collect()
        del loss
        return recorder.trace(rows, sums_in_place=sums_in_place)


@contextmanager
def _holdings_noted(recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """Before each step what the gradients are, after it what the optimizer has made."""

    def before(optimizer: Optimizer, *_: Any) -> None:
        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        recorder.hold(found, "gradients")

    def after(optimizer: Optimizer, *_: Any) -> None:
        recorder.hold(_state_of(optimizer), "optimizer state")

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
