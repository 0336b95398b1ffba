"""Faults in the midst of Accumulator.step, in this process: a window is taken whole, or is as if it had not begun.

Once the optimizer steps, what it has done stays; gradients are gone, the error is the user's own, and training can go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import autoaccum
from autoaccum.records import StepResult
from faulting.bench import Bench
from faulting.injection import (
    ANYWHERE,
    KINDS,
    NEIGHBOUR,
    STOPS,
    USERS,
    WRONG_CLOCK,
    Injector,
    evenly,
    terminable,
    watching,
)
from faulting.record import Case
from faulting.state import differences, surroundings, training_state

_ROWS, _MICRO_BATCH = 12, 4  # in halves as well; BatchNorm refuses a single row
_BEFORE_STEP = ("weight", "data", "forward", "loss", "backward")
_PARTS = (*_BEFORE_STEP, "optimizer step", "scheduler step")
_PLACES = {
    "out of memory": _PARTS,
    USERS: _PARTS,
    **dict.fromkeys(STOPS, _PARTS),
    NEIGHBOUR: ("forward",),
    WRONG_CLOCK: ("clock",),
}


class Setting(NamedTuple):
    """One way to train."""

    name: str
    levers: Any
    scaled: bool = False


SETTINGS = (
    Setting("Accumulator.step", "none"),
    Setting("Accumulator.step, checkpointing", {"checkpointing": ["full"]}),
    Setting("Accumulator.step, loss scaling", "none", scaled=True),
)


def training_cases(setting: Setting, kinds: Collection[str], at_most: int) -> Iterator[Case]:
    """A fault at every call of every part that one step makes, and at every call of our own functions.

    Args:
        kinds: See `injection.KINDS`.
        at_most: So many calls of one part, evenly spaced over all that there are.
    """
    log, level = logging.getLogger("autoaccum"), logging.getLogger("autoaccum").level
    log.setLevel(logging.ERROR)  # replays are said there
    try:
        with terminable():
            steps = _Steps(setting)
            known = steps.counted()
            for kind in [kind for kind in KINDS if kind in kinds]:
                for place in (*_PLACES.get(kind, ()), *((ANYWHERE,) if kind in STOPS else ())):
                    for step in evenly(known[place], at_most):
                        yield from steps.tried(kind, place, step)
    finally:
        log.setLevel(level)


class _Scheduler(torch.optim.lr_scheduler.StepLR):
    """A scheduler that can be made to fail."""

    injector: Injector | None = None

    def step(self, *args: Any) -> None:
        if self.injector is not None:
            self.injector.passing("scheduler step")
        super().step(*args)


class _Training:
    """A run of training after its first window, always the same."""

    def __init__(self, injector: Injector, setting: Setting, plan: autoaccum.Plan | None) -> None:
        injector.disarm()
        self.injector, self.bench = injector, Bench(injector)
        self._scheduler = _Scheduler(self.bench.optimizer, step_size=1)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if setting.scaled else None
        self.acc = self.accumulator(plan=plan) if plan is not None else self.accumulator(micro_batch=_MICRO_BATCH)
        self.batch = torch.randn(_ROWS, 6)
        self.acc.step(self.batch)
        self._scheduler.injector = injector
        injector.disarm()

    def accumulator(self, **size: Any) -> autoaccum.Accumulator:
        """What goes on with this training, in micro-batches of this size."""
        return autoaccum.Accumulator(
            self.bench.model,
            self.bench.optimizer,
            training_step=self.bench.step,
            weight=self._weight,
            split=self._split,
            max_grad_norm=0.5,
            scheduler=self._scheduler,
            scaler=self._scaler,
            **size,
        )

    def _weight(self, micro_batch: Tensor) -> float:
        self.injector.passing("weight")
        return float(len(micro_batch))

    def _split(self, batch: Tensor, sizes: Any) -> list[Tensor]:
        self.injector.passing("data")
        return list(batch.split(list(sizes)))

    def state(self) -> list[Any]:
        """Everything that a window may change, and everything that it may not."""
        of = self.bench.model, self.bench.optimizer
        return [training_state(*of), surroundings(*of)]


class _Steps:
    """One window after the other, each from the same start."""

    def __init__(self, setting: Setting) -> None:
        self.injector, self.setting = Injector(), setting
        self.plan = self._planned()
        self._after: dict[int, Any] = {}

    def _planned(self) -> autoaccum.Plan | None:
        if self.setting.levers == "none":
            return None
        bench = Bench(self.injector)
        return autoaccum.autotune(
            bench.model,
            bench.sample,
            _ROWS,
            training_step=bench.step,
            optimizer=bench.optimizer,
            max_micro_batch=_MICRO_BATCH,
            device="virtual:1GiB",
            levers=self.setting.levers,
            progress=False,
        )

    def _training(self) -> _Training:
        return _Training(self.injector, self.setting, self.plan)

    def counted(self) -> Counter[str]:
        """How often a clean step calls every part."""
        training = self._training()
        with watching(self.injector, "clock"), watching(self.injector, ANYWHERE):
            training.acc.step(training.batch)
        return Counter(self.injector.calls)

    def tried(self, kind: str, place: str, step: int) -> Iterator[Case]:
        """One fault, where the call that is meant came about, and what is wrong after it."""
        training, injector = self._training(), self.injector
        before = training.state()
        found: StepResult | BaseException
        injector.arm(place, step, KINDS[kind])
        try:
            with watching(injector, place):
                found = training.acc.step(training.batch)
        except BaseException as error:  # noqa: BLE001 - whatever comes out is looked at
            found = error
        struck, raised, calls = injector.struck, injector.raised, Counter(injector.calls)
        injector.disarm()
        if not struck:
            return
        problems = _misjudged(kind, raised, found)
        if isinstance(found, StepResult):
            problems += [f"{name} after it, not as with smaller micro-batches" for name in self._unlike(training, found)]
        elif not calls["optimizer step"]:
            problems += [f"{name} after it" for name in differences(before, training.state())]
        elif any(parameter.grad is not None for parameter in training.bench.model.parameters()):
            problems.append("gradients are left")
        problems += self._next_call(training)
        yield Case(self.setting.name, kind, place, step, tuple(problems))

    def _unlike(self, training: _Training, found: StepResult) -> list[str]:
        """What differs from a step that took these micro-batches from the start."""
        size = max(rows or 0 for rows in found.micro_batch_sizes)
        if size not in self._after:
            other = self._training()
            other.accumulator(micro_batch=size).step(other.batch)
            self.injector.disarm()
            self._after[size] = training_state(other.bench.model, other.bench.optimizer)
        return list(differences(self._after[size], training_state(training.bench.model, training.bench.optimizer)))

    def _next_call(self, training: _Training) -> list[str]:
        try:
            result = training.acc.step(training.batch)
        except Exception as error:  # noqa: BLE001 - that is what is to be found
            return [f"the next call raised {type(error).__name__}: {error}"]
        finally:
            self.injector.disarm()
        return [] if sum(rows or 0 for rows in result.micro_batch_sizes) == _ROWS else ["the next call lost rows"]


def _misjudged(kind: str, raised: BaseException | None, found: StepResult | BaseException) -> list[str]:
    """What is wrong with what came out."""
    if kind in STOPS:
        return [] if isinstance(found, STOPS[kind]) else [f"it ended with {found!r}"]
    if isinstance(found, StepResult):
        return ["the user's exception was swallowed"] if kind == USERS else []
    return [] if found is raised else [f"it raised {type(found).__name__}: {found}"]
