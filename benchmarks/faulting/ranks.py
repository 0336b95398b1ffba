"""A rank of two that dies: by `kill -9` at any call of its training step, in autotune and in Accumulator.step.

The other one has to raise an error that says so, soon, with everything put back. Ranks are copies of one process that has
loaded torch and run no backward pass yet.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import autoaccum
from autoaccum import meeting
from faulting.bench import Bench
from faulting.injection import KINDS, Injector
from faulting.record import Case
from faulting.state import differences, training_state

RANK_KINDS = ("dead rank",)
_FOLDER = str(Path(__file__).resolve().parents[1])
_PATIENCE_S = 60.0
_SILENT_S = 2.0  # here, so that a dead rank is soon missed
_CALLS = (1, 6)
_PARTS = ("forward", "backward", "optimizer step")


def rank_cases(kinds: Collection[str]) -> Iterator[Case]:
    """Either rank dies, at some calls of every part, in a search and in training."""
    if "dead rank" not in kinds:
        return
    with TemporaryDirectory() as folder:
        source = f"import sys; sys.path.insert(0, {_FOLDER!r}); from faulting.ranks import run_all; run_all({folder!r})"
        subprocess.run([sys.executable, "-c", source], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for row in json.loads(Path(folder, "cases.json").read_text()):
            yield Case(row["where"], "dead rank", row["place"], row["step"], tuple(row["problems"]))


def run_all(folder: str) -> None:
    """Every scenario, one after the other; the answers go into a file."""
    meeting.SILENT_S, meeting.BEAT_S = _SILENT_S, 0.2
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()  # loads what every copy would load by itself
    rows = []
    for where, work in (("autotune, two ranks", _search), ("Accumulator.step, two ranks", _train)):
        for place in _PARTS:
            for step in _CALLS if place != "optimizer step" else _CALLS[:1]:
                for dead in (0, 1):
                    name = f"{len(rows)}"
                    problems = _both(Path(folder) / name, work, place, step, dead)
                    rows.append({"where": where, "place": f"{place} of rank {dead}", "step": step, "problems": problems})
    Path(folder, "cases.json").write_text(json.dumps(rows))


def _both(folder: Path, work: Any, place: str, step: int, dead: int) -> list[str]:
    folder.mkdir()
    ranks = []
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(folder, work, rank, place, step, dead)
            finally:
                os._exit(0)
        ranks.append(pid)
    left, give_up = dict(enumerate(ranks)), time.monotonic() + _PATIENCE_S
    codes = {}
    while left and time.monotonic() < give_up:
        for rank, pid in list(left.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del left[rank]
        time.sleep(0.02)
    for pid in left.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    problems = [f"rank {rank} hangs" for rank in left]
    if codes.get(dead) != -signal.SIGKILL:
        return [*problems, f"rank {dead} did not die: {codes}"]
    answer = folder / f"{1 - dead}.json"
    return problems + (json.loads(answer.read_text()) if answer.exists() else ["no answer"])


def _rank(folder: Path, work: Any, rank: int, place: str, step: int, dead: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    injector = Injector()
    bench = Bench(injector)
    problems: list[str] = []
    ready = work(bench)
    before = training_state(bench.model, bench.optimizer)
    if rank == dead:
        injector.arm(place, step, KINDS["kill -9"])
    else:
        injector.disarm()
    try:
        ready()
    except autoaccum.RankMismatchError as error:
        if not any(word in str(error) for word in ("died", "ended", "reached")):
            problems.append(f"says {error}")
    except BaseException as error:  # noqa: BLE001 - whatever comes out is looked at
        problems.append(f"raised {type(error).__name__}: {error}")
    else:
        problems.append("raised nothing")
    if not injector.calls["optimizer step"] or work is _search:
        problems += [f"{name} after it" for name in differences(before, training_state(bench.model, bench.optimizer))]
    problems += ["gradients are left"] * any(parameter.grad is not None for parameter in bench.model.parameters())
    (folder / f"{rank}.json").write_text(json.dumps(problems))


def _search(bench: Bench) -> Any:
    def search() -> None:
        more = {"device": "virtual:1GiB", "levers": "none", "progress": False}
        autoaccum.autotune(bench.model, bench.sample, 16, training_step=bench.step, optimizer=bench.optimizer, **more)

    return search


def _train(bench: Bench) -> Any:
    acc = autoaccum.Accumulator(bench.model, bench.optimizer, micro_batch=2, training_step=bench.step)
    batch = torch.ones(8, 6)

    def train() -> None:
        for _ in range(3):
            acc.step(batch)

    return train
