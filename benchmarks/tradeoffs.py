"""What levers bring on real host memory, and whether the chosen setting is the best one.

    python benchmarks/tradeoffs.py            # all, about 20 minutes on two idle cores
    python benchmarks/tradeoffs.py reach      # how much larger the micro-batch can be
    python benchmarks/tradeoffs.py sweep      # the chosen setting against every other one
    python benchmarks/tradeoffs.py render     # how long reports take

`reach`: at a budget at which the plain step holds a micro-batch of 2, how many rows fit with the exact levers, and how many
probes that took. `sweep`: autotune at a target, then every setting of the levers (half of the blocks, or all) at every
division of the target that fits, with the same measurement; the best of the sweep and the chosen setting are then measured
in turn, and the ratio of their medians is what counts. Every case runs in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from autoaccum.exploring import Exploration
from autoaccum.records import Fit, Levers
from autoaccum.report.pages import plan_html
from autoaccum.request import Request
from autoaccum.session import Search
from autoaccum.targets import load_target
from autoaccum.tradeoffs.points import Point
from autoaccum.tune import probe_workload, tune_workload
from autoaccum.workload import Workload

RESULTS = Path(__file__).parent / "results"
TARGETS = {
    "gpt": "demo:gpt?layers=12&width=128&heads=4&seq_len=128&vocabulary=1024",
    "resnet": "demo:resnet?image=64&width=32&blocks=4",
}
SWEPT = {
    "gpt": ("demo:gpt?layers=12&width=128&heads=4&seq_len=128&vocabulary=1024", 8),
    "resnet": ("demo:resnet?image=160&width=16&blocks=4", 8),  # large rows: this process itself grows by some 10 MiB
}
_PAIRS = 7


def peak(target: str, rows: int) -> int:
    """The measured peak of this many rows as they are."""
    request = Request(max_micro_batch=rows, multiple_of=rows, predict=False)
    return probe_workload(load_target(target), request, device="cpu").measured_peak_bytes or 0


def between(target: str, rows: int) -> int:
    """A budget that holds so many rows as they are, and not one more; each peak is that of a process of its own."""
    return sum(int(of_process("peak", target, str(size))) for size in (rows, rows + 1)) // 2


def reach(name: str) -> dict[str, Any]:
    """The largest micro-batch without levers and with those that keep the numerics, where 2 rows fit as they are."""
    budget = between(TARGETS[name], 2)
    found: dict[str, Any] = {"target": TARGETS[name], "budget_bytes": budget}
    for levers in ("none", "exact"):
        found[levers] = of_process("reached", TARGETS[name], levers, str(budget))
    return found


def reached(target: str, levers: str, budget: str) -> dict[str, Any]:
    """How many rows fit with these levers, and what it took to find out."""
    begun = time.perf_counter()
    result = probe_workload(load_target(target), Request(levers=levers, budget=int(budget)), device="cpu")
    return {
        "max_micro_batch": result.max_micro_batch,
        "levers": words(result.levers),
        "probes": len(result.trials),
        "failures": sum(not isinstance(trial.outcome, Fit) for trial in result.trials),
        "seconds": time.perf_counter() - begun,
    }


def sweep(name: str) -> dict[str, Any]:
    """The chosen setting against the best of all that fit."""
    target, rows = SWEPT[name]
    budget = _budget_for(target, rows)
    gc.collect()  # another copy of the model, held while tuning, would be half a row
    return {"target": target} | sweep_on(lambda: load_target(target), rows, "cpu", budget, _budget_now)


def _budget_for(target: str, rows: int) -> int:
    """The budget in this process before anything is tuned in it."""
    with Search(load_target(target), Request(target_batch=rows, levers="exact"), "cpu", None, None, ()) as search:
        search.forecasts.of(Levers())  # what tuning loads lies under the budget
        return _budget_now(search, rows)


def _budget_now(search: Search, rows: int) -> int:
    """The budget in this process, which holds more with time: a quarter of the rows fits, and not one more."""
    peaks = [search.probe(Levers(), size).outcome for size in (rows // 4, rows // 4 + 1)]
    return sum(outcome.peak_bytes for outcome in peaks if isinstance(outcome, Fit)) // 2


def sweep_on(
    load: Callable[[], Workload],
    rows: int,
    device: object,
    budget: int,
    room_of: Callable[[Search, int], int] | None = None,
    tuning_s: float | None = None,
    sweeping_s: float = inf,
) -> dict[str, Any]:
    """The chosen setting against the best of all that fit, both measured again in turn.

    Args:
        load: Gives the workload, twice.
        rows: The target batch.
        device: As `autotune` takes it.
        budget: Inside which the setting is chosen.
        room_of: What a search and the target say that the others have to fit; None: the budget.
        tuning_s: Seconds after which the search tries no further setting; None: as `autotune` has it.
        sweeping_s: Seconds after which no further setting is run.
    """
    begun = time.perf_counter()
    request = Request(target_batch=rows, levers="exact", budget=budget, time_budget_s=tuning_s)
    plan = tune_workload(load(), request, device=device)
    took_s = time.perf_counter() - begun
    chosen = Point(plan.levers, plan.micro_batch)
    ample = Request(target_batch=rows, levers="exact", predict=False)
    with Search(load(), ample, device, None, None, ()) as search:
        exploration = Exploration(search)
        room = budget if room_of is None else room_of(search, rows)
        points = [
            Point(levers, size)
            for levers in _every_setting(exploration)
            for size in exploration.divisions
            if size * 16 >= exploration.divisions[-1]
        ]
        if sweeping_s < inf:
            Random(0).shuffle(points)  # what is left out is then of all kinds
        begun, swept = time.perf_counter(), 0
        for point in [chosen, *(point for point in points if point != chosen)]:
            if time.perf_counter() - begun > sweeping_s:
                break
            search.confirm(point.levers, exploration.schedule(point.micro_batch))
            swept += 1
        measured = [one for one in exploration.measured() if one.peak_bytes <= room or one.point == chosen]
        best = min(measured, key=lambda one: one.timing.median_s)
        ratio = _paired(search, exploration, chosen, best.point)
    return {
        "target_batch": rows,
        "budget_bytes": budget,
        "settings": len(points),
        "swept": swept,
        "fitting": len(measured),
        "chosen": f"{words(chosen.levers)}, micro-batch {chosen.micro_batch}",
        "best": f"{words(best.point.levers)}, micro-batch {best.point.micro_batch}",
        "slowest_over_best": max(one.timing.median_s for one in measured) / best.timing.median_s,
        "chosen_over_best": ratio,
        "trials": len(plan.trials),
        "tuning_s": took_s,
    }


def _every_setting(exploration: Exploration) -> list[Levers]:
    space = exploration.space
    halves = sorted({max(1, space.num_blocks // 2), space.num_blocks})
    modes = [("off", 0), *product(space.levels["checkpointing"][1:], halves)]
    return [
        Levers(checkpointing=mode, checkpointed_blocks=blocks, optimizer_impl=step)  # type: ignore[arg-type]
        for (mode, blocks), step in product(modes, space.levels["optimizer_impl"])
    ]


def _paired(search: Search, exploration: Exploration, chosen: Point, best: Point) -> float:
    """The median of the chosen setting over that of the best, measured in turn; 1 where they are the same."""
    if chosen == best:
        return 1.0
    ratios = []
    for _ in range(_PAIRS):
        medians = []
        for point in (chosen, best):
            trial = search.confirm(point.levers, exploration.schedule(point.micro_batch))
            assert trial is not None and isinstance(trial.outcome, Fit)
            medians.append(trial.outcome.median_step_s or 0.0)
        ratios.append(medians[0] / medians[1])
    return median(ratios)


def render(name: str) -> dict[str, Any]:
    """Seconds to render the page of a real plan."""
    target, rows = SWEPT[name]
    plan = tune_workload(load_target(target), Request(target_batch=rows, levers="exact"), device="virtual:256MiB")
    begun = time.perf_counter()
    page = plan_html(plan)
    return {"target": target, "trials": len(plan.trials), "seconds": time.perf_counter() - begun, "bytes": len(page)}


def words(levers: Levers) -> str:
    """The levers that are turned."""
    turned = [
        f"{name} {getattr(levers, name)}"
        for name in ("checkpointing", "checkpointed_blocks", "precision", "optimizer_impl", "offload")
        if getattr(levers, name) != getattr(Levers(), name)
    ]
    return ", ".join(turned) or "none"


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "reach": (reach, TARGETS),
    "sweep": (sweep, SWEPT),
    "render": (render, SWEPT),
}
PARTS = {"peak": lambda target, rows: peak(target, int(rows)), "reached": reached}


def of_process(kind: str, *arguments: str) -> Any:
    """What a case or a part of one gives in a process of its own, on one thread: two would wait for each other."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", kind, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(kinds: list[str]) -> None:
    """Run every case in a process of its own and write the results."""
    path = RESULTS / "tradeoffs.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found["torch"], found["threads"] = str(torch.__version__), 1
    for kind in kinds or list(CASES):
        for name in CASES[kind][1]:
            found.setdefault(kind, {})[name] = of_process(kind, name)
            print(kind, name, json.dumps(found[kind][name]), flush=True)
            path.write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "tradeoffs.md").write_text(in_words(found))


def in_words(found: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    lines = ["# Levers on host memory", "", f"torch {found['torch']}, {found['threads']} thread.", ""]
    lines += ["| at a budget that holds 2 rows | rows with exact levers | how | probes | more than without |"]
    lines += ["|---|---|---|---|---|"]
    for name, case in found.get("reach", {}).items():
        exact = case["exact"]
        lines.append(
            f"| {name} | {exact['max_micro_batch']} (without: {case['none']['max_micro_batch']}) | {exact['levers']} | "
            f"{exact['probes']} (without: {case['none']['probes']}) | {exact['probes'] - case['none']['probes']} |"
        )
    lines += ["", "| sweep | settings that fit | chosen | best of the sweep | chosen / best | slowest / best | trials |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, case in found.get("sweep", {}).items():
        lines.append(
            f"| {name} | {case['fitting']} of {case['settings']} | {case['chosen']} | {case['best']} | "
            f"{case['chosen_over_best']:.3f} | {case['slowest_over_best']:.2f} | {case['trials']} |"
        )
    lines += ["", "| page | trials | seconds | bytes |", "|---|---|---|---|"]
    for name, case in found.get("render", {}).items():
        lines.append(f"| {name} | {case['trials']} | {case['seconds']:.3f} | {case['bytes']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run = PARTS[sys.argv[2]] if sys.argv[2] in PARTS else CASES[sys.argv[2]][0]
        print(json.dumps(run(*sys.argv[3:])))
    else:
        main(sys.argv[1:])
