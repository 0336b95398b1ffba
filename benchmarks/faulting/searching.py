"""Faults in the midst of autotune, in this process: whatever happens, everything is put back and the next search works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import autoaccum
from autoaccum.records import Fit
from autoaccum.session import forecasts, pace
from faulting.bench import Bench
from faulting.injection import (
    ANYWHERE,
    KILLED,
    KINDS,
    NEIGHBOUR,
    OF_PREDICTION,
    PARTS,
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

_TARGET = 14
_PARTS = PARTS[: PARTS.index("optimizer step") + 1]
_IN_TRACE = ("out of memory", USERS, "SIGTERM, with a handler", KILLED)  # Ctrl-C is not for that process
_PLACES = {
    "out of memory": _PARTS,
    USERS: _PARTS,
    **dict.fromkeys(STOPS, (*_PARTS, "boundary")),
    KILLED: (),
    NEIGHBOUR: ("forward",),
    WRONG_CLOCK: ("clock",),
}


class Setting(NamedTuple):
    """One way to call autotune."""

    name: str
    device: str
    levers: Any
    makes_optimizer: bool = False


SETTINGS = (
    Setting("autotune, virtual device", "virtual:1GiB", "none"),
    Setting("autotune, virtual device, checkpointing", "virtual:1GiB", {"checkpointing": ["full"]}, makes_optimizer=True),
    Setting("autotune, host memory", "cpu", "none"),
)


def searching_cases(setting: Setting, kinds: Collection[str], at_most: int) -> Iterator[Case]:
    """A fault at every call of every part, of those that a whole search makes.

    Args:
        kinds: See `injection.KINDS`.
        at_most: So many calls of one part, evenly spaced over all that there are.
    """
    with terminable(), _short_steps(), _traced_once() as traces:
        trials = _Trials(setting)
        known = trials.counted()
        traces.clear()
        in_trace = trials.counted_in_trace()
        for kind in [kind for kind in KINDS if kind in kinds]:
            for place in _PLACES[kind]:
                for step in evenly(known[place], at_most):
                    yield from trials.tried(kind, place, step)
            for part in _PARTS if kind in _IN_TRACE else ():
                for step in evenly(in_trace[part], max(2, at_most // 4)):  # tracing anew takes longer
                    traces.clear()
                    yield from trials.tried(kind, part + OF_PREDICTION, step)
        if "Ctrl-C" in kinds:
            for step in evenly(known[ANYWHERE], at_most):
                yield from trials.tried("Ctrl-C", ANYWHERE, step)


class _Trials:
    """Searches in one setting, on one model for as long as it is put back."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.injector = Injector()
        self.bench = Bench(self.injector).with_oddities()
        self.size = self.search().micro_batch

    def search(self) -> autoaccum.Plan:
        """A whole search, which ends at the limit."""
        bench, setting = self.bench, self.setting
        return autoaccum.autotune(
            bench.model,
            bench.sample,
            _TARGET,
            training_step=bench.step,
            optimizer=bench.make_optimizer if setting.makes_optimizer else bench.optimizer,
            device=setting.device,
            levers=setting.levers,
            progress=False,
        )

    def counted(self) -> Counter[str]:
        """How often a clean search calls every part."""
        self.injector.disarm()
        with watching(self.injector, "boundary"), watching(self.injector, "clock"), watching(self.injector, ANYWHERE):
            self.search()
        return Counter(self.injector.calls)

    def counted_in_trace(self) -> Counter[str]:
        """How often the process that traces calls every part."""
        self.injector.disarm()
        self.search()
        return Counter({part: self.injector.count_in_trace(part) for part in _PARTS})

    def tried(self, kind: str, place: str, step: int) -> Iterator[Case]:
        """One fault, where the call that is meant came about, and what is wrong after it."""
        injector, before = self.injector, self._state()
        found: autoaccum.Plan | BaseException
        injector.arm(place, step, KINDS[kind])
        try:
            with watching(injector, place):
                found = self.search()
        except BaseException as error:  # noqa: BLE001 - whatever comes out is looked at
            found = error
        struck, raised = injector.has_struck, injector.raised
        injector.disarm()
        if not struck:
            return
        problems = [f"{name} after it" for name in differences(before, self._state())]
        problems += _misjudged(kind, raised, found, of_prediction=OF_PREDICTION in place)
        problems += self._next_call()
        if problems:
            self.bench = Bench(injector).with_oddities()
        yield Case(self.setting.name, kind, place, step, tuple(problems))

    def _state(self) -> list[Any]:
        of = self.bench.model, self.bench.optimizer
        return [training_state(*of), surroundings(*of)]

    def _next_call(self) -> list[str]:
        try:
            plan = self.search()
        except Exception as error:  # noqa: BLE001 - that is what is to be found
            return [f"the next call raised {type(error).__name__}: {error}"]
        finally:
            self.injector.disarm()
        return [] if plan.micro_batch == self.size else [f"the next call found {plan.micro_batch} instead of {self.size}"]


def _misjudged(
    kind: str, raised: BaseException | None, found: autoaccum.Plan | BaseException, *, of_prediction: bool
) -> list[str]:
    """What is wrong with what came out."""
    if kind in STOPS and not of_prediction:
        return [] if isinstance(found, STOPS[kind]) else [f"it ended with {found!r}"]
    if found is raised:
        return []
    if isinstance(found, autoaccum.Plan):
        if kind == USERS and not of_prediction:
            return ["the user's exception was swallowed"]
        if kind == USERS and "UsersError" not in str(found.warnings):
            return ["the user's exception while predicting is not in the warnings"]
        return _misplanned(found)
    if isinstance(found, autoaccum.NothingFitsError) and kind in ("out of memory", NEIGHBOUR) and str(found).endswith("."):
        return []
    return [f"it raised {type(found).__name__}: {found}"]


def _misplanned(plan: autoaccum.Plan) -> list[str]:
    fits = [trial for trial in plan.trials if isinstance(trial.outcome, Fit)]
    times = [seconds for trial in fits for seconds in (*trial.outcome.step_times_s, trial.wall_s)]  # type: ignore[union-attr]
    problems = [] if all(isfinite(seconds) and seconds >= 0 for seconds in times) else [f"times of {min(times):.3g} s"]
    if plan.effective_batch != _TARGET or sum(plan.micro_batch_sizes) != _TARGET:
        problems.append(f"the effective batch is {plan.effective_batch}")
    if plan.micro_batch not in [trial.candidate.micro_batch for trial in fits]:
        problems.append(f"micro_batch={plan.micro_batch} never ran")
    return problems


@contextmanager
def quick_searches() -> Iterator[None]:
    """What is always the same is run once."""
    with _short_steps(), _traced_once():
        yield


@contextmanager
def _short_steps() -> Iterator[None]:
    """Time the plan's own step twice only: all of them are alike."""
    before, pace._MOST_STEPS = pace._MOST_STEPS, 2
    try:
        yield
    finally:
        pace._MOST_STEPS = before


@contextmanager
def _traced_once() -> Iterator[dict[Any, Any]]:
    """The predictions of one workload are made once, until they are cleared: tracing takes most of a small search."""
    known: dict[Any, Any] = {}
    real = forecasts.traced

    def remembered(workload: Any, device: Any, **more: Any) -> Any:
        key = more["levers"], more["multiple_of"]
        if key not in known:
            known[key] = real(workload, device, **more)
        return known[key]

    forecasts.traced = remembered
    try:
        yield known
    finally:
        forecasts.traced = real
