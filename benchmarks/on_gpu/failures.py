"""Running out of memory in forward, backward and step, and fitting only after a flush: what is said, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

import autoaccum
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import NothingFitsError
from autoaccum.records import Fit, OutOfMemory, Trial
from autoaccum.request import Request
from autoaccum.tune import probe_workload
from autoaccum.workload import Workload

from .common import MIB, counters, emptied, is_cuda, outcome_of

WIDTH, ROWS = 16, 64
ROW_BYTES, ROOM_BYTES = 32 * MIB, 1024 * MIB  # so that about 30 rows fit
Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class _Takes(torch.autograd.Function):
    """The identity, which takes so many bytes for a moment in each pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_bytes: int, backward_bytes: int) -> Tensor:
        """Take, and give back."""
        ctx.backward_bytes = backward_bytes
        taken(forward_bytes, x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """As above."""
        taken(ctx.backward_bytes, gradients[0].device)
        return gradients[0], None, None


def taken(num_bytes: int, place: torch.device) -> None:
    """Allocate so much, and let it go."""
    torch.empty(num_bytes, dtype=torch.uint8, device=place)


class Hungry(nn.Module):
    """A layer whose training step takes memory for every row, in one phase."""

    def __init__(self, phase: Phase) -> None:
        super().__init__()
        self.layer, self.phase, self.rows = nn.Linear(WIDTH, WIDTH), phase, 0

    def forward(self, x_bc: Tensor) -> Tensor:
        """The layer's output."""
        self.rows = len(x_bc)
        of_rows = self.rows * ROW_BYTES
        takes = [of_rows if self.phase == phase else 0 for phase in ("forward", "backward")]
        return _Takes.apply(self.layer(x_bc), *takes)  # type: ignore[no-any-return, no-untyped-call]

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """One that takes memory for the rows of the latest forward pass, where that is the phase."""
        model = self

        class HungryAdamW(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                taken(model.rows * ROW_BYTES if model.phase == "optimizer" else 0, model.layer.weight.device)
                return super().step(closure)

        return HungryAdamW(parameters)


class Flushing(nn.Module):
    """A layer whose forward pass fits only when the allocator gives its cache back: 0.4, then 0.7 of the room."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_bc: Tensor) -> Tensor:
        """The layer's output."""
        for part in (4, 7):
            taken(ROOM_BYTES * part // 10, x_bc.device)
        return self.layer(x_bc)  # type: ignore[no-any-return]


def run(device: AbstractDevice) -> Iterator[dict[str, Any]]:
    """A search and a training step that run out in each phase; then a step that flushes."""
    for phase in PHASES:
        yield searched(device, phase)
        yield trained(device, phase)
    yield flushed(device)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of all these."""
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]


def workload_of(model: nn.Module, device: AbstractDevice, **more: Any) -> Workload:
    """On the device, with an allocator that begins empty but for its weights."""
    workload = Workload(model, torch.randn(4, WIDTH), training_step=mean_square, **more)
    workload.move_to(device.torch_device)
    emptied(device)
    return workload


def searched(device: AbstractDevice, phase: Phase) -> dict[str, Any]:
    """A probe for a limit that this phase sets."""
    model = Hungry(phase)
    workload = workload_of(model, device, optimizer=model.optimizer)
    warm_up(workload, device)
    before = counters(device, workload.resident())
    request = Request(budget=device.held_bytes(workload.resident()) + ROOM_BYTES, max_micro_batch=ROWS, predict=False)
    result = probe_workload(workload, request, device=device)
    after = counters(device, workload.resident())
    failed = [trial for trial in result.trials if isinstance(trial.outcome, OutOfMemory)]
    in_phase = [trial.outcome.phase == phase for trial in failed if isinstance(trial.outcome, OutOfMemory)]
    return {
        "case": f"search that runs out in {phase}",
        "limit": result.max_micro_batch,
        "trials": [outcome_of(trial) for trial in result.trials],
        "left": left(before, after),
        "ok": bool(failed) and all(in_phase) and 0 < result.max_micro_batch < ROWS and before == after,
    }


def trained(device: AbstractDevice, phase: Phase) -> dict[str, Any]:
    """An `Accumulator` whose first micro-batch is too large: it replays, but for the optimizer's step, which raises."""
    model = Hungry(phase)
    workload = workload_of(model, device, optimizer=model.optimizer)
    warm_up(workload, device)
    optimizer = model.optimizer(list(model.parameters()))
    acc = autoaccum.Accumulator(model, optimizer, micro_batch=ROWS, training_step=mean_square)
    resident = list(model.parameters())
    before = counters(device, resident)
    failed, replays, sizes = False, 0, ()
    with device.limited_to(device.held_bytes(resident) + ROOM_BYTES), device.watched(resident):
        try:
            step = acc.step(torch.randn(ROWS, WIDTH))
            replays, sizes = step.replays, step.micro_batch_sizes or ()
        except torch.OutOfMemoryError:
            failed = True
        small = acc.step(torch.randn(1, WIDTH))  # what ran out leaves nothing that is in the way of the next step
    after = counters(device, resident)
    # The first steps make the optimizer's state, two numbers for each weight and a count for each parameter.
    grown_bytes = after.allocated_bytes - before.allocated_bytes
    return {
        "case": f"training step that runs out in {phase}",
        "raised": failed,
        "replays": replays,
        "micro_batch_sizes": sizes,
        "grown_bytes": grown_bytes,
        "ok": failed == (phase == "optimizer") and (replays > 0) != failed and not small.skipped and grown_bytes <= MIB,
    }


def flushed(device: AbstractDevice) -> dict[str, Any]:
    """A step that would train, and would wait for the driver in each pass: counted by the allocator, and no fit."""
    workload = workload_of(Flushing(), device)
    warm_up(workload, device, with_model=False)
    request = Request(
        budget=device.held_bytes(workload.resident()) + ROOM_BYTES, max_micro_batch=1, multiple_of=1, predict=False
    )
    trials: tuple[Trial, ...]
    try:
        trials = probe_workload(workload, request, device=device).trials
    except NothingFitsError as error:
        trials = tuple(error.trials)
    causes = [trial.outcome.cause for trial in trials if isinstance(trial.outcome, OutOfMemory)]
    fits = [trial for trial in trials if isinstance(trial.outcome, Fit)]
    # Where the cache is nobody's, there is nothing to flush, and the step fits.
    return {
        "case": "step that fits after a flush",
        "trials": [outcome_of(trial) for trial in trials],
        "ok": causes == ["retries"] and not fits if is_cuda(device) else bool(fits),
    }


def warm_up(workload: Workload, device: AbstractDevice, *, with_model: bool = True) -> None:
    """A training step of one row, so that libraries have made what they keep."""
    model = workload.module if with_model else workload.module.get_submodule("layer")
    mean_square(model, device.place(torch.randn(1, WIDTH))).backward()
    workload.module.zero_grad()


def left(before: Any, after: Any) -> dict[str, int]:
    """By how much the counters differ."""
    return {
        "allocated_bytes": after.allocated_bytes - before.allocated_bytes,
        "reserved_bytes": after.reserved_bytes - before.reserved_bytes,
    }
