"""What ranks do for test_ranks.py: torch is imported once, and every scenario is then run by copies of this process.

So a rank may be killed, and the next scenario begins with new ones. The answers of all go into one file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum import meeting, session
from autoaccum.records import Trial
from autoaccum.request import Request
from autoaccum.session import pace
from autoaccum.tune import tune_workload
from autoaccum.workload import Workload

PATIENCE_S = 100.0  # a scenario that takes longer hangs
SILENT_S = 1.5  # here, so that a killed rank is soon missed
SCENARIOS: dict[str, Scenario] = {}
FULL = {"checkpointing": ["full"]}
PHASES = ("data", "forward", "backward", "optimizer")
HUNG, DIED = "hung", "died"


class Scenario:
    """A function of the rank, run by so many of them; `tcp`: the first one keeps the store, as where torchrun does not."""

    def __init__(self, run: Callable[[int], Any], world: int, tcp: bool) -> None:
        self.run, self.world, self.tcp = run, world, tcp


def scenario(world: int = 2, *, tcp: bool = False) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    """Register what every rank of a new group runs."""

    def register(run: Callable[[int], Any]) -> Callable[[int], Any]:
        SCENARIOS[run.__name__] = Scenario(run, world, tcp)
        return run

    return register


# -- models


class Fuse(nn.Module):
    """Runs out of memory above so many rows."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.linear, self.limit = nn.Linear(4, 3), limit

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limit:
            raise out_of_memory()
        out: Tensor = self.linear(x)
        return out


class FailsBackward(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise out_of_memory()


class Injected:
    """A training step, a batch and an optimizer, one of which fails at one place of a trial above so many rows."""

    def __init__(self, phase: str, call: int, purpose: str, limit: int = 2) -> None:
        self.phase, self.call, self.purpose, self.limit = phase, call, purpose, limit
        self.current, self.calls, self.rows, self.failures = "", 0, 0, 0

    def started(self, candidate: Any, purpose: str) -> None:
        self.current, self.calls, self.rows = purpose, 0, candidate.micro_batch

    def finished(self, trial: Trial) -> None:
        self.current = ""

    def bounded(self, top: int) -> None:
        pass

    def fails(self, phase: str) -> bool:
        if phase != self.phase or self.current != self.purpose or self.rows <= self.limit:
            return False
        self.calls += 1
        self.failures += self.calls > self.call
        return self.calls > self.call

    def batch(self, rows: int) -> Tensor:
        if self.fails("data"):
            raise out_of_memory()
        return torch.ones(rows, 4)

    def step(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self.fails("forward"):
            raise out_of_memory()
        hidden = model(batch)
        return (FailsBackward.apply(hidden) if self.fails("backward") else hidden).mean()  # type: ignore[no-any-return, no-untyped-call]

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        injected = self

        class Failing(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                if injected.fails("optimizer"):
                    raise out_of_memory()
                super().step(closure)

        return Failing(parameters, lr=0.1)


class Blocks(nn.Module):
    """Repeated blocks that hold more than they hand on: checkpointing makes room."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8 * width), nn.Tanh(), nn.Linear(8 * width, width)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


# -- answers


def facts(plan: Any) -> list[Any]:
    """What has to be the same on all ranks: what was run and what came of it, and the plan."""
    return [
        [[str(trial.candidate), trial.purpose, type(trial.outcome).__name__, trial.rows_per_step] for trial in plan.trials],
        str(plan.levers),
        [plan.schedule(rank) for rank in range(plan.world_size)],
        plan.max_micro_batch,
        plan.limited_by,
    ]


def tune(model: nn.Module, target: int = 16, *, sample: Any = None, levers: Any = "none", **options: Any) -> Any:
    """A plan on a virtual device."""
    sample = torch.ones(4, 4) if sample is None else sample
    return autoaccum.autotune(model, sample, target, **{"device": "virtual:1GiB", "levers": levers, **options})


def error_of(run: Callable[[], Any]) -> str:
    """The error that it raises, as text."""
    try:
        return f"none, but {run()}"
    except Exception as error:  # noqa: BLE001 - whatever it is, is the answer
        return f"{type(error).__name__}: {error}"


# -- the same answer everywhere


@scenario()
def worst_rank(rank: int) -> Any:
    found = []
    for limits in ((8, 3), (3, 8)):
        model = DistributedDataParallel(Fuse(limits[rank]))
        plan = tune(model)
        found.append([plan.max_micro_batch, plan.micro_batch_sizes, plan.world_size, plan.effective_batch])
    model(torch.ones(2, 4)).sum().backward()  # DDP still works after the search
    return found


@scenario()
def uneven_target(rank: int) -> Any:
    plan = tune(Fuse(3), 15)
    return [plan.micro_batch_sizes, [plan.schedule(0), plan.schedule(1)]]


@scenario(world=3)
def every_target(rank: int) -> Any:
    found = []
    for target in (3, 4, 7, 11, 50):
        request = Request(target_batch=target, predict=False, shares="equal" if target % 2 else "proportional")
        plan = tune_workload(Workload(Fuse(2 + rank), torch.ones(4, 4)), request, device="virtual:1GiB")
        found.append([target, plan.effective_batch, sum(sum(plan.schedule(of)) for of in range(3))])
    return found


@scenario()
def other_memory_and_data(rank: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 3))
    data = TensorDataset(torch.ones(900 if rank else 700, 4))
    step = lambda model, batch: model(batch[0]).sum()  # noqa: E731
    found = autoaccum.probe(model, data, training_step=step, device=("virtual:1MiB", "virtual:640KiB")[rank])
    return [found.max_micro_batch, found.limited_by, [trial.candidate.micro_batch for trial in found.trials]]


@scenario()
def injected(rank: int) -> Any:
    return injected_at(rank, 2, product(range(2), ("probe", "confirm"), PHASES, (0, 1)))


@scenario()
def injected_somewhere(rank: int) -> Any:
    return injected_at(
        rank, 2, [(of, *place) for of in range(2) for place in (("probe", PHASES[2], 1), ("confirm", PHASES[3], 0))]
    )


@scenario(world=3)
def injected_in_three(rank: int) -> Any:
    return injected_at(rank, 3, product(range(3), ("probe",), PHASES, (0,)))


def injected_at(rank: int, world: int, places: Iterable[tuple[int, str, str, int]]) -> Any:
    """Plans of searches in which a rank runs out of memory: which, in what, in which phase, after how many micro-batches."""
    found = {}
    for failing, purpose, phase, call in places:
        one = Injected(phase, call, purpose) if rank == failing else Injected("never", 0, purpose)
        workload = Workload(nn.Linear(4, 3), one.batch, training_step=one.step, optimizer=one.optimizer)
        request = Request(target_batch=4 * world, predict=False)
        plan = tune_workload(workload, request, device="virtual:1GiB", listener=one)
        found[f"{failing} {purpose} {phase} {call}"] = [one.failures, facts(plan)]
    return found


@scenario()
def few_exchanges(rank: int) -> Any:
    found = []
    kept = session.Search.__exit__

    def counting(search: Any, *error: Any) -> None:
        kept(search, *error)
        found.append([search.ranks.num_exchanges, len(search.log.trials), len(search.forecasts.known())])

    session.Search.__exit__ = counting  # type: ignore[method-assign]
    tune(Fuse(5), 64)
    tune(Blocks(), 1024, sample=torch.ones(4, 16), levers=FULL, device="virtual:768KiB")
    return found


# -- levers


@scenario()
def levers_by_memory(rank: int) -> Any:
    device = ("virtual:768KiB", "virtual:600KiB")[rank]
    options = {"sample": torch.ones(4, 16), "levers": FULL, "multiple_of": 160}  # which needs checkpointing
    return facts(tune(Blocks(), 1024, device=device, **options))


@scenario()
def all_exact_levers(rank: int) -> Any:
    return facts(tune(Blocks(), 1024, sample=torch.ones(4, 16), levers="exact", device="virtual:675KiB"))


@scenario()
def levers_by_data(rank: int) -> Any:
    class Summed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum(1)

    sample = torch.ones(4, 4 if rank else 6, 16)  # longer rows on the first rank: other predictions
    found = [facts(tune(Summed(), 64, sample=sample, levers=FULL, device="virtual:600KiB"))]
    sample = torch.ones(4, 6 if rank else 4, 16)
    return [*found, facts(tune(Summed(), 64, sample=sample, levers=FULL, device="virtual:600KiB"))]


@scenario()
def levers_for_room(rank: int) -> Any:
    found = autoaccum.probe(
        Blocks(), torch.ones(4, 16), device=("virtual:768KiB", "virtual:800KiB")[rank], levers=FULL, max_micro_batch=2000
    )
    return [found.max_micro_batch, str(found.levers), [str(trial.candidate) for trial in found.trials]]


@scenario()
def levers_in_little_time(rank: int) -> Any:
    class Slow(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02 * (1 + rank))
            return super().forward(x)

    options = {"sample": torch.ones(4, 16), "levers": FULL, "device": "virtual:768KiB", "time_budget_s": 2.0}
    return facts(tune(Slow(), 1024, **options))


@scenario()
def levers_sampled(rank: int) -> Any:
    from autoaccum import exploring

    exploring._ENUMERATED = 3
    exploring._SAMPLED = 4
    return facts(tune(Blocks(), 1024, sample=torch.ones(4, 16), levers="exact", device="virtual:768KiB"))


# -- errors


@scenario()
def users_error(rank: int) -> Any:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() if rank == 0 else {}["missing"]  # type: ignore[no-any-return]

    first = error_of(lambda: tune(Fuse(100), training_step=step))
    return [first, tune(Fuse(3)).max_micro_batch]  # and the next call works


@scenario()
def users_error_on_the_first(rank: int) -> Any:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() if rank == 1 else {}["missing"]  # type: ignore[no-any-return]

    return error_of(lambda: tune(Fuse(100), training_step=step))


@scenario()
def users_error_in_the_middle(rank: int) -> Any:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() if rank == 0 or len(batch) < 4 else {}["missing"]  # type: ignore[no-any-return]

    return error_of(lambda: tune(Fuse(100), 64, training_step=step, budget=None))


@scenario()
def refused_on_one(rank: int) -> Any:
    return [
        error_of(lambda: tune(Fuse(9), budget=("1GiB", "9GiB")[rank])),
        error_of(lambda: tune(Fuse(9), optimizer=(None, 3)[rank])),
        error_of(lambda: tune(Fuse(100), 1)),
    ]


@scenario()
def unclear_on_one(rank: int) -> Any:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if rank == 1:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
        return model(batch).sum()  # type: ignore[no-any-return]

    return error_of(lambda: tune(Fuse(100), training_step=step))


@scenario()
def other_arguments(rank: int) -> Any:
    wide = nn.Linear(4, 3 + rank)
    frozen = nn.Linear(4, 3)
    frozen.bias.requires_grad_(rank == 0)
    weights = (autoaccum.tokens("labels"), autoaccum.tokens("labels", shift=True))
    return {
        "target": error_of(lambda: tune(Fuse(9), (64, 32)[rank])),
        "several": error_of(lambda: tune(Fuse(9), levers=("none", "exact")[rank], multiple_of=(1, 2)[rank])),
        "model": error_of(lambda: tune((nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3)))[rank])),
        "shape": error_of(lambda: tune(wide)),
        "frozen": error_of(lambda: tune(frozen)),
        "optimizer": error_of(lambda: tune(Fuse(9), optimizer=(torch.optim.SGD, torch.optim.AdamW)[rank])),
        "weight": error_of(lambda: tune(Fuse(9), weight=weights[rank])),
        "call": error_of(lambda: tune(Fuse(9)) if rank else autoaccum.probe(Fuse(9), torch.ones(4, 4), 16, device="cpu")),
        "budget": tune(Fuse(9), budget=("1GiB", "512MiB")[rank]).max_micro_batch,
    }


@scenario(world=3)
def other_arguments_in_three(rank: int) -> Any:
    return error_of(lambda: tune(Fuse(9), 64 if rank != 1 else 32))


# -- ranks that die


@contextmanager
def impatient() -> Iterator[None]:
    """With a time limit for tests."""
    meeting.SILENT_S, meeting.ABSENT_S, meeting.BEAT_S, meeting._PARTING_S = SILENT_S, SILENT_S, 0.2, 0.2
    yield


def killed_at(rank: int, dying: int, trial: int, world: int) -> Any:
    """The error of a search in which a rank dies, and how long the others waited for it."""
    calls = 0

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if rank == dying and calls > trial:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).sum()  # type: ignore[no-any-return]

    with impatient():
        begun = time.monotonic()
        return [error_of(lambda: tune(Fuse(4), training_step=step)), time.monotonic() - begun]


@scenario(world=3)
def killed_in_first_trial(rank: int) -> Any:
    return killed_at(rank, 1, 2, 3)


@scenario(world=3)
def killed_later(rank: int) -> Any:
    return killed_at(rank, 2, 11, 3)


@scenario(world=3)
def killed_first_rank(rank: int) -> Any:
    return killed_at(rank, 0, 2, 3)


@scenario(world=3, tcp=True)
def killed_with_the_store(rank: int) -> Any:
    return killed_at(rank, 0, 2, 3)


@scenario(world=3, tcp=True)
def killed_without_the_store(rank: int) -> Any:
    return killed_at(rank, 2, 2, 3)


@scenario(tcp=True)
def leaves_at_once(rank: int) -> Any:
    return tune(Fuse(3)).max_micro_batch  # after which the first rank ends, and the store with it


@scenario()
def stays_away(rank: int) -> Any:
    with impatient():
        if rank == 1:
            time.sleep(SILENT_S * 2)
            return "away"
        return error_of(lambda: tune(Fuse(4)))


@scenario()
def slow_trial(rank: int) -> Any:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(0.3 if rank == 1 else 0.0)
        return model(batch).sum()  # type: ignore[no-any-return]

    with impatient():
        request = Request(target_batch=4, predict=False)
        workload = Workload(Fuse(4), torch.ones(4, 4), training_step=step)
        begun = time.monotonic()
        plan = tune_workload(workload, request, device="virtual:1GiB")
        return [plan.max_micro_batch, time.monotonic() - begun]


# -- shares in proportion


@scenario()
def proportional(rank: int) -> Any:
    plan = tune(Fuse((30, 10)[rank]), 100, shares="proportional", max_micro_batch=40)
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.fill_(0.0)
    rows = torch.arange(400.0).view(100, 4) / 400
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lambda model, batch: model(batch).pow(2).mean()  # noqa: E731
    read = autoaccum.Plan.from_json(plan.to_json())
    acc = autoaccum.Accumulator(model, optimizer, plan=read, training_step=step)
    own = rows[: plan.shares[0]] if rank == 0 else rows[plan.shares[0] :]
    result = acc.step(own)
    single = nn.Linear(4, 1)
    with torch.no_grad():
        single.weight.fill_(0.5), single.bias.fill_(0.0)
    single(rows).pow(2).mean().backward()
    expected = single.weight - 0.1 * single.weight.grad
    return {
        "shares": plan.shares,
        "limits": plan.limits,
        "sizes": plan.micro_batch_sizes,
        "schedules": [plan.schedule(0), plan.schedule(1)],
        "max": plan.max_micro_batch,
        "limited_by": plan.limited_by,
        "evidence": plan.evidence,
        "run": result.micro_batch_sizes,
        "error": float((model.weight - expected).abs().max().detach()),
        "timed": plan.step_time_s,
        "purposes": [trial.purpose for trial in plan.trials],
    }


@scenario()
def proportional_by_memory(rank: int) -> Any:
    device = ("virtual:768KiB", "virtual:1536KiB")[rank]
    plan = tune(Blocks(), 1000, sample=torch.ones(4, 16), shares="proportional", levers="exact", device=device)
    return [plan.shares, plan.limits, plan.max_micro_batch, [plan.schedule(0), plan.schedule(1)], plan.warnings]


@scenario()
def proportional_confirm_fails(rank: int) -> Any:
    one = Injected("forward", 2, "confirm", limit=6) if rank == 0 else Injected("never", 0, "confirm")
    workload = Workload(nn.Linear(4, 3), one.batch, training_step=one.step)
    request = Request(target_batch=60, predict=False, shares="proportional", max_micro_batch=10)
    plan = tune_workload(workload, request, device="virtual:1GiB", listener=one)
    return [plan.shares, plan.limits, plan.micro_batch_sizes]


@scenario()
def proportional_refused(rank: int) -> Any:
    batch_norm = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    return {
        "equal": error_of(lambda: tune(Fuse(9), shares="proportional", equal_micro_batches=True)),
        "lockstep": error_of(lambda: tune(batch_norm, shares="proportional")),
        "nothing fits": error_of(lambda: tune(Fuse((9, 0)[rank]), shares="proportional")),
    }


# -- what is kept


@scenario()
def kept(rank: int) -> Any:
    folder = Path(os.environ["SCENARIO_FOLDER"])

    def plan(cache: Path | None = None, storage: Path | None = None) -> Any:
        workload = Workload(Fuse(5), torch.ones(4, 4))
        request = Request(target_batch=33, predict=False, cache=None if cache is None else str(cache))
        return tune_workload(workload, request, device="virtual:1GiB", storage=None if storage is None else str(storage))

    fresh, again = (plan(cache=folder / f"cache{rank}") for _ in range(2))
    first, second = (plan(storage=folder / f"study{rank}.log") for _ in range(2))
    only_first = plan(storage=folder / "other.log" if rank == 0 else None)
    dist.barrier()
    return {
        "files": [sorted(path.name[-5:] for path in (folder / f"cache{of}").glob("*")) for of in range(2)],
        "studies": [(folder / f"study{of}.log").exists() for of in range(2)],
        "fresh": facts(fresh),
        "again": [again.rank, again.micro_batch_sizes, len(again.trials), facts(again)],
        "first": facts(first),
        "second": [len(second.trials) - len(first.trials), facts(second)],
        "only first": facts(only_first),
    }


# -- running them


def main(folder: Path, names: list[str]) -> None:
    """Run these scenarios one after the other, each by new copies of this process."""
    torch.set_num_threads(1)
    pace._MEASURED_S = 0.2
    autoaccum.autotune(Blocks(), torch.ones(4, 16), 8, device="virtual:1MiB")  # what it loads, copies have
    answers = {}
    for name in names:
        begun, cpu = time.monotonic(), os.times()
        answers[name] = run(name, SCENARIOS[name], folder)
        used = os.times()
        cpu_s = used.children_user + used.children_system - cpu.children_user - cpu.children_system
        print(f"{name}: {time.monotonic() - begun:.1f} s, {cpu_s:.1f} s of CPU", flush=True)
        (folder / "answers.json").write_text(json.dumps(answers))


def run(name: str, wanted: Scenario, folder: Path) -> list[Any]:
    """What every rank answers; HUNG or DIED where one does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        method = f"tcp://127.0.0.1:{server.getsockname()[1]}" if wanted.tcp else f"file://{folder}/{name}.store"
    files = [folder / f"{name}-{rank}.json" for rank in range(wanted.world)]
    started = {fork(wanted, rank, method, folder, files[rank]): rank for rank in range(wanted.world)}
    hung, until = [], time.monotonic() + PATIENCE_S
    while started:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        started.pop(pid, None)
        if not pid:
            time.sleep(0.005)
        if time.monotonic() > until:
            for pid, rank in started.items():
                hung.append(rank)
                os.kill(pid, signal.SIGKILL)
            until = float("inf")
    return [
        HUNG if rank in hung else json.loads(file.read_text()) if file.exists() else DIED for rank, file in enumerate(files)
    ]


def fork(wanted: Scenario, rank: int, method: str, folder: Path, answer: Path) -> int:
    """Start one rank; gives its process."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        faulthandler.dump_traceback_later(PATIENCE_S - 5, exit=False)
        os.environ["SCENARIO_FOLDER"] = str(folder)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=wanted.world)
        answer.with_suffix(".new").write_text(json.dumps(wanted.run(rank)))
        answer.with_suffix(".new").rename(answer)
        status = 0
    except Exception:  # noqa: BLE001 - a rank without an answer; the test shows this
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(SCENARIOS))
