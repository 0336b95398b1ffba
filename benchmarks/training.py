"""Time to the target batch: plans of `autotune` against what users do today, under one cap on memory.

    python benchmarks/training.py run            # all models, about 10 minutes on two idle cores
    python benchmarks/training.py run --small    # one model, few steps, some 2 minutes
    python benchmarks/training.py render         # the tables again, from the JSON

Every way of training (ways.py) runs in a process of its own, under the same RLIMIT_DATA and the same settings of malloc
(those that a plan asks for), with the same weights, rows and target batch. The ways take turns: an optimizer step of each,
then in the opposite order, and so on. What is done today is told its micro-batch by halving: the target, then half of it,
until four optimizer steps of the loop by hand run to their end; one that dies later begins again with half. Plans are made
in processes that end before any step is timed. Written: `results/training.json` and `results/training.md`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
from search import environment
from training_report import BY_HAND, in_words, write
from ways import CASES, WAYS, gradient_error

import autoaccum
from autoaccum.devices import ERROR_ROWS
from autoaccum.devices.base import recognise
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.limits import status_bytes
from autoaccum.plan import Plan
from autoaccum.records import Levers, StepResult

RESULTS = Path(__file__).parent / "results" / "training.json"
MIB = 2**20
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LEVERS = {"plan, exact levers": "exact", "plan, no levers": "none"}
TODAY = (BY_HAND, "Trainer", "Accelerate")
WARM_UP_ROUNDS, ROUNDS, SMALL_ROUNDS = 2, 12, 4
COMPARED_ROWS = 8  # of a micro-batch when gradients are compared
TRIED_STEPS = 4  # that have to run for a size to be taken
TUNING_S = 60.0  # after which `autotune` tries no further setting


def words(levers: Levers) -> str:
    """The levers that are turned."""
    usual = Levers()
    turned = {
        name: getattr(levers, name) for name in levers.__struct_fields__ if getattr(levers, name) != getattr(usual, name)
    }
    return ", ".join(f"{name} {value}" for name, value in turned.items()) or "none"


# -- in processes of their own


def capped(cap_bytes: int | None) -> None:
    """Memory as it is for every way: malloc's thresholds steady, and no more of it than the cap. Ends with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    CpuDevice().steadied().__enter__()  # held to the end of the process
    if cap_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, resource.RLIM_INFINITY))


def base_bytes(name: str) -> int:
    """What RLIMIT_DATA counts in a process that has the model, its optimizer and the data, and has not trained."""
    capped(None)
    case = CASES[name]
    held = case.model(), case.rows(case.target_batch)
    torch.ones(2**20).add_(1)  # the threads of parallel operations are there
    return status_bytes("VmData") if held else 0


def tune(name: str, levers: str, cap_bytes: int) -> dict[str, Any]:
    """The plan inside the cap, of which the default budget leaves a tenth, as JSON, and how long it took to find."""
    capped(cap_bytes)
    case = CASES[name]
    model, sample = case.model(), torch.utils.data.default_collate(case.rows(8))
    begun = time.perf_counter()
    plan = autoaccum.autotune(
        model,
        sample,
        case.target_batch,
        optimizer=torch.optim.AdamW(model.parameters()),
        weight=case.weight,
        levers=levers,
        time_budget_s=TUNING_S,
        progress=False,
    )
    return {"plan": plan.to_json(), "tuning_s": time.perf_counter() - begun, "trials": len(plan.trials)}


def errors(name: str, way: str) -> dict[str, float]:
    """The error of the gradient, for windows of whole micro-batches and for one with a short one at its end."""
    counts = {"full": 2 * COMPARED_ROWS, "short": 2 * COMPARED_ROWS + COMPARED_ROWS // 4}
    return {kind: gradient_error(name, way, COMPARED_ROWS, count) for kind, count in counts.items()}


def train(turns: Connection, name: str, way: str, sized: str | int, cap_bytes: int) -> None:
    """Train, an optimizer step for each True that is heard; said are its seconds, its replays and its micro-batches."""
    capped(cap_bytes)
    case = CASES[name]
    rows = case.rows(2 * case.target_batch)
    begun: list[float] = []

    def turn(step: StepResult | None = None) -> bool:
        now = time.perf_counter()
        more = (0, None) if step is None else (step.replays, step.micro_batch_sizes)
        turns.send((now - begun.pop() if begun else 0.0, *more))
        goes_on = turns.recv()
        begun.append(time.perf_counter())
        return bool(goes_on)

    try:
        WAYS[way](case, Plan.from_json(sized) if isinstance(sized, str) else sized, rows, turn)
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if recognise(error, ERROR_ROWS) is None:
            raise  # not memory: to be seen


# -- in the process that starts them

_FORKED = multiprocessing.get_context("fork")  # all begin with the same libraries in memory, and no model


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a process of its own."""
    here, there = _FORKED.Pipe()
    process = _FORKED.Process(target=_answer, args=(there, work, arguments))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise RuntimeError(f"{work.__name__}{arguments} failed; its error is above") from None
    finally:
        process.join()


def _answer(there: Connection, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    there.send(work(*arguments))


class DiedError(Exception):
    """A process that trains has ended before its time."""


@final
class Trainer:
    """A way of training in a process of its own, waiting for its turns. Ended with `end`.

    Attributes:
        is_over: It has died, or was ended.
        replays: Of all its steps.
        sizes: The micro-batches of its latest step, where the way tells them.
    """

    def __init__(self, *job: Any) -> None:
        self.is_over, self.replays = False, 0
        self.sizes: Sequence[int] | None = None
        self._turns, there = _FORKED.Pipe()
        self._process = _FORKED.Process(target=train, args=(there, *job))
        self._process.start()
        there.close()
        self._heard()

    def step(self) -> float:
        """Seconds of one optimizer step."""
        self._turns.send(True)
        return self._heard()

    def _heard(self) -> float:
        try:
            seconds, replays, self.sizes = self._turns.recv()
        except (EOFError, ConnectionResetError):
            self.end()
            raise DiedError from None
        self.replays += replays
        return float(seconds)

    def end(self) -> None:
        """Let it go."""
        self.is_over = True
        self._turns.close()
        self._process.kill()
        self._process.join()


def started(name: str, way: str, sized: str | int, cap_bytes: int) -> Trainer | None:
    """A process that has taken its first steps, None when it could not."""
    try:
        trainer = Trainer(name, way, sized, cap_bytes)
        for _ in range(TRIED_STEPS):
            trainer.step()
    except DiedError:
        return None
    return trainer


def halved(start: Callable[[int], Trainer | None], rows: int) -> tuple[Trainer, int]:
    """The first of these rows, half of them, a quarter, ... that trains."""
    while rows:
        trainer = start(rows)
        if trainer is not None:
            return trainer, rows
        rows //= 2
    raise RuntimeError("not even one row trains inside the cap")


def in_turns(trainers: Sequence[Trainer], rounds: int) -> list[list[float]] | None:
    """Seconds of every step of each, taken in turns, in an order that turns around; None when one has died."""
    times: list[list[float]] = [[] for _ in trainers]
    for number in range(WARM_UP_ROUNDS + rounds):
        for index in range(len(trainers))[:: -1 if number % 2 else 1]:
            try:
                seconds = trainers[index].step()
            except DiedError:
                return None
            if number >= WARM_UP_ROUNDS:
                times[index].append(seconds)
    return times


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One model, trained in every way."""
    case = CASES[name]
    cap_bytes = -(-apart(base_bytes, name) // MIB) * MIB + case.room_mib * MIB
    found: dict[str, dict[str, Any]] = {way: {"way": way, "gradient_error": apart(errors, name, way)} for way in WAYS}
    trainers: dict[str, Trainer] = {}
    rows_of: dict[str, int] = {}

    def fitting(way: str, rows: int) -> None:
        trainers[way], rows_of[way] = halved(lambda size: started(name, way, size, cap_bytes), rows)

    try:
        for way, levers in LEVERS.items():
            tuned = apart(tune, name, levers, cap_bytes)
            text = tuned.pop("plan")
            plan, trainer = Plan.from_json(text), started(name, way, text, cap_bytes)
            if trainer is None:
                raise RuntimeError(f"{name}: this plan does not train inside the cap: {plan}")
            trainers[way] = trainer
            found[way] |= tuned | {"planned_micro_batch": plan.micro_batch, "levers": words(plan.levers)}
        begun = time.perf_counter()
        fitting(BY_HAND, 1 << (case.target_batch.bit_length() - 1))
        found[BY_HAND]["tuning_s"] = time.perf_counter() - begun
        for way in TODAY[1:]:
            fitting(way, rows_of[BY_HAND])
        while (times := in_turns(list(trainers.values()), rounds)) is None:
            for way in [way for way, trainer in trainers.items() if trainer.is_over]:
                found[way]["died"] = found[way].get("died", 0) + 1
                fitting(way, rows_of[way] // 2)  # a plan replays instead
    finally:
        for trainer in trainers.values():
            trainer.end()
    for (way, trainer), of_way in zip(trainers.items(), times, strict=True):
        sizes = trainer.sizes or [rows_of[way]] * (case.target_batch // rows_of[way])
        found[way] |= {"micro_batch_sizes": sizes, "replays": trainer.replays, "step_times_s": of_way}
    return {"model": name, "target_batch": case.target_batch, "cap_bytes": cap_bytes, "ways": list(found.values())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or render what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("run", "render"))
    parser.add_argument("--small", action="store_true", help="one model and few steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file; the tables go beside it")
    asked = parser.parse_args(arguments)
    if asked.do == "render":
        write(json.loads(asked.results.read_text(encoding="utf-8")), asked.results)
        return
    begun = time.perf_counter()
    autoaccum.autotune, autoaccum.Accumulator  # noqa: B018 - loaded now, so that every process has them
    report: dict[str, Any] = {"environment": environment() | {"load_average": round(os.getloadavg()[0], 1)}, "models": []}
    for name in ("bert",) if asked.small else CASES:
        report["models"].append(measured(name, SMALL_ROUNDS if asked.small else ROUNDS))
        report["seconds"] = round(time.perf_counter() - begun)
        write(report, asked.results)
    print(in_words(report))


if __name__ == "__main__":
    main()
