"""What `tests/test_lockstep.py` runs on every rank: models of FSDP2, tuned and trained."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import autoaccum
from autoaccum import Accumulator
from autoaccum.devices.virtual import StorageTracker
from autoaccum.records import Fit, Levers, OutOfMemory, Trial
from autoaccum.request import Request
from autoaccum.session import Search
from autoaccum.workload import Workload

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by the test
WIDTH, NUM_BLOCKS = 16, 3
DEVICE = "virtual:1GiB"


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


class Block(nn.Module):
    """Fails where it is told to: in its n-th forward pass, or in the backward pass of that one."""

    runs: ClassVar[list[int]] = [0]  # of all blocks; what a block holds itself is put back when it is computed again

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.calls, self.fails_at, self.error = 0, (-1, ""), out_of_memory

    def forward(self, inputs: Tensor) -> Tensor:
        call, self.calls = self.calls, self.calls + 1
        self.runs[0] += 1
        if self.fails_at == (call, "forward"):
            raise self.error()
        hidden = self.first(inputs).tanh()
        if self.fails_at == (call, "backward"):
            hidden = FailingBackward.apply(hidden, self.error())  # type: ignore[no-untyped-call]
        output: Tensor = inputs + self.last(hidden)
        return output


class Net(nn.Module):
    """Blocks, and a head with dropout before it that belongs to the root."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, 3)
        self.skips_on: int | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if not (index == 1 and self.skips_on == RANK):
                inputs = block(inputs)
        output: Tensor = self.head(self.drop(inputs))
        return output


def sharded(model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def share_of(plan: autoaccum.Plan, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """This rank's rows of the whole batch."""
    first = sum(sum(plan.schedule(rank)) for rank in range(RANK))
    return tuple(part[first : first + sum(plan.schedule(RANK))] for part in batch)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state_of(model: nn.Module, optimizer: Any = None) -> list[Tensor]:
    """Copies of everything that must be as it was: shards, gradients, optimizer state, generators."""
    with torch.no_grad():
        found = [local(tensor).clone() for tensor in (*model.parameters(), *model.buffers())]
        found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        if optimizer is not None:
            states = [optimizer.state[p] for p in model.parameters()]
            found += [local(value).clone() for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*found, torch.get_rng_state()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Recording(SGD):
    """Keeps the gradients of its first step, and fails where it is told to."""

    first: list[Tensor]
    fails_on: int | None = None

    def step(self, closure: Any = None) -> None:
        if self.fails_on == RANK:
            raise out_of_memory()
        if not hasattr(self, "first"):
            self.first = [local(p.grad).clone() for p in self.param_groups[0]["params"]]
        super().step(closure)


class Trials:
    """One search, of which single trials are asked for."""

    def __init__(self, model: Net, **options: Any) -> None:
        self.model, self.made, self.fails_on = model, list[Recording](), None

        def make(parameters: Any) -> Recording:
            self.made.append(Recording(parameters, lr=0.1))
            self.made[-1].fails_on = self.fails_on
            return self.made[-1]

        workload = Workload(model, rows(8), optimizer=make, **{"loss_fn": nn.CrossEntropyLoss(), **options})
        self.search = Search(workload, Request(target_batch=8 * WORLD), DEVICE, None, None, ())

    def run(self, levers: Levers | None = None) -> Trial:
        for block in self.model.blocks:
            block.calls = 0
        return self.search.probe(levers or Levers(), 2)

    @property
    def gradients(self) -> list[Tensor]:
        return self.made[-1].first


def outcome(trial: Trial) -> list[Any]:
    found = trial.outcome
    return [type(found).__name__, found.phase if isinstance(found, OutOfMemory) else None]


def places() -> Iterator[tuple[int, str, int]]:
    yield from (
        (rank, phase, block) for rank in range(WORLD) for phase in ("forward", "backward") for block in range(NUM_BLOCKS)
    )


def everywhere(levers: Levers | None = None, **options: Any) -> list[Any]:
    """Out of memory on every rank, in forward, backward and the optimizer, in every block; after each a trial that runs."""
    model = sharded(Net(dropout=0.5), **options)
    trials, found = Trials(model), []
    torch.manual_seed(5 + RANK)
    before = state_of(model)
    with trials.search:
        reference = trials.run(levers)
        expected = trials.gradients
        for number, (rank, phase, block) in enumerate([*places(), *((rank, "optimizer", 0) for rank in range(WORLD))]):
            if phase == "optimizer":
                trials.fails_on = rank
            elif rank == RANK:
                model.blocks[block].fails_at = ((0, 3, 1)[number % 3], phase)
            failed = trials.run(levers)
            trials.fails_on, model.blocks[block].fails_at = None, (-1, "")
            kept = same(state_of(model), before)
            after = trials.run(levers)
            same_gradients = same(trials.gradients, expected)
            assert isinstance(reference.outcome, Fit)
            # The lower of two: gloo lets go of a tensor when its thread comes to it, and the garbage collector when it does.
            peaks = [run.outcome.peak_bytes for run in (after, trials.run(levers)) if isinstance(run.outcome, Fit)]
            found.append(
                {
                    "at": [rank, phase, block],
                    "outcome": outcome(failed),
                    "kept": kept,
                    "after": outcome(after),
                    "same_gradients": same_gradients,
                    "same_peak": min(peaks, default=0) <= 1.02 * reference.outcome.peak_bytes,
                }
            )
    return found


def at_every_allocation() -> dict[str, Any]:
    """The last rank has room for a little more in each trial, so that memory runs out in all kinds of places."""
    model = sharded(Net())
    trials, phases, clean = Trials(model), [], True
    before = state_of(model)
    with trials.search:
        reference = trials.run().outcome
        assert isinstance(reference, Fit)
        whole, held = trials.search.budget, trials.search.budget.held_bytes
        for step in range(30):
            if RANK == WORLD - 1:
                room = held + (reference.peak_bytes - held) * step // 30
                trials.search.budget = msgspec.structs.replace(whole, budget_bytes=room)
            phases.append(outcome(trials.run()))
            parameters = [
                p for part in (*model.blocks, model) for p in part._get_fsdp_state()._fsdp_param_groups[0].fsdp_params
            ]
            freed = all(not t.untyped_storage().size() for p in parameters for t in p.all_gather_outputs)
            clean = clean and freed and same(state_of(model), before)
        trials.search.budget = whole
        after = outcome(trials.run())
    return {"phases": phases, "clean": clean, "after": after}


def raises(run: Callable[[], Any]) -> list[str]:
    """What the call raises, by name and text."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class HostSyncBatchNorm(nn.SyncBatchNorm):
    """Statistics over all ranks in host memory, which torch's own refuses."""

    def forward(self, inputs: Tensor) -> Tensor:
        mean = SumOverRanks.apply(inputs.mean(0)) / WORLD  # type: ignore[no-untyped-call]
        variance = SumOverRanks.apply((inputs - mean).square().mean(0)) / WORLD  # type: ignore[no-untyped-call]
        output: Tensor = (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return output


def ends() -> list[str]:
    """The last rank's process ends in a backward pass."""
    model = sharded(Net())
    if RANK == WORLD - 1:
        model.blocks[1].fails_at, model.blocks[1].error = (1, "forward"), lambda: os._exit(3)
    trials = Trials(model)

    def run() -> None:
        with trials.search:
            trials.run()

    return raises(run)


def statistics() -> list[Any]:
    """Out of memory on the last rank, before and after statistics are exchanged, in forward and in backward passes."""
    model = Net()
    for block in model.blocks:
        block.first = nn.Sequential(block.first, HostSyncBatchNorm(4 * WIDTH))
    trials, found = Trials(model), []
    before = state_of(model)
    with trials.search:
        for phase in ("forward", "backward"):
            for block in range(NUM_BLOCKS):
                if RANK == WORLD - 1:
                    model.blocks[block].fails_at = (1, phase)
                failed = trials.run()
                model.blocks[block].fails_at = (-1, "")
                found.append([outcome(failed), same(state_of(model), before), outcome(trials.run())])
    return [*found, trials.search.forecasts.note]


def users_error() -> dict[str, Any]:
    """The user's own error in a backward pass on the last rank; then a search of its own runs."""
    model = sharded(Net())
    before = state_of(model)
    comms = [id(part._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm) for part in model.blocks]
    trials = Trials(model)
    if RANK == WORLD - 1:
        model.blocks[1].fails_at, model.blocks[1].error = (1, "backward"), lambda: KeyError("the user's own")

    def run() -> None:
        with trials.search:
            trials.run()

    raised = raises(run)
    model.blocks[1].fails_at = (-1, "")
    again = Trials(model)
    with again.search:
        after = outcome(again.run())
    now = [id(part._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm) for part in model.blocks]
    return {"raised": raised, "kept": same(state_of(model), before), "after": after, "own_exchanges": comms == now}


def different_paths() -> list[str]:
    """The first rank leaves out a block."""
    model = sharded(Net())
    model.skips_on = 0
    trials = Trials(model)

    def run() -> None:
        with trials.search:
            trials.run()

    return raises(run)


def trained(plan: autoaccum.Plan, model: nn.Module, lr: float = 0.5) -> dict[str, Any]:
    """Three steps with the plan against the whole batch in one process."""
    reference = Net()
    batch = rows(plan.target_batch)
    # SGD, in which errors are not amplified; FSDP cannot take its fused step, which the plan may have of AdamW.
    plan = msgspec.structs.replace(plan, levers=msgspec.structs.replace(plan.levers, optimizer_impl="default"))
    acc = Accumulator(model, SGD(model.parameters(), lr=lr), plan=plan, loss_fn=nn.CrossEntropyLoss())
    by_hand = SGD(reference.parameters(), lr=lr)
    losses = []
    for _ in range(3):
        step = acc.step(share_of(plan, batch))
        loss = functional.cross_entropy(reference(batch[0]), batch[1])
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        losses.append(abs(step.loss - float(loss.detach())))
    pairs = [(whole(p).detach(), q.detach()) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    a, b = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    return {"error": float((a - b).norm() / b.norm()), "loss_error": max(losses)}


def tuned(target: int, budget: str, **options: Any) -> dict[str, Any]:
    """Tuned under a budget that not all of a rank's share fits in, with an optimizer of one's own that has state."""
    model = sharded(Net(), **options.pop("sharding", {}))
    optimizer = AdamW(model.parameters(), lr=0.0)
    functional.cross_entropy(model(rows(2)[0]), rows(2)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(rows(2)[0])  # leaves the root's parameters whole
    torch.manual_seed(7 + RANK)
    for part in (*model.blocks, model):
        part.reshard()
    before = state_of(model, optimizer)
    with torch.no_grad():
        model(rows(2)[0])
    plan = autoaccum.autotune(
        model,
        rows(8),
        target,
        **{
            "loss_fn": nn.CrossEntropyLoss(),
            "optimizer": optimizer,
            "device": "virtual:1GiB",
            "budget": budget,
            "levers": "none",
            "time_budget_s": 20.0,
            **options,
        },
    )
    return {
        "schedules": [list(plan.schedule(rank)) for rank in range(WORLD)],
        "limited_by": plan.limited_by,
        "max_micro_batch": plan.max_micro_batch,
        "fits": plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= plan.budget_bytes,
        "peak": plan.measured_peak_bytes,
        "trials": [[t.candidate.micro_batch, *outcome(t)] for t in plan.trials],
        "warnings": list(plan.warnings),
        "skipped": {f"{one.lever} {one.level}": one.reason for one in plan.skipped},
        "levers": plan.levers.checkpointing,
        "kept": same(state_of(model, optimizer), before),
        "trained": trained(plan, model),
    }


def checkpointed(nested: bool) -> dict[str, Any]:
    """The gradients of one step with every block computed again, against those without."""
    model, found = Net(dropout=0.5), {}
    if nested:
        for block in model.blocks:
            fully_shard(block.first)
    trials = Trials(sharded(model))
    torch.manual_seed(5)
    with trials.search:
        without = trials.run()
        expected = trials.gradients
        for name, levers in (("full", CHECKPOINTED), ("selective", SELECTIVE)):
            trial = trials.run(levers)
            assert isinstance(trial.outcome, Fit) and isinstance(without.outcome, Fit)
            found[name] = [same(trials.gradients, expected), trial.outcome.peak_bytes < without.outcome.peak_bytes]
    return found


def uneven() -> dict[str, Any]:
    """One rank has a micro-batch less than the others, which all of them wait for."""
    model = sharded(Net())
    plan = autoaccum.autotune(
        model,
        rows(4),
        2 * WORLD - 1,
        loss_fn=nn.CrossEntropyLoss(),
        device=DEVICE,
        max_micro_batch=1,
        levers="none",
        time_budget_s=1.0,
    )
    return {"steps": len(plan.micro_batch_sizes), "evidence": plan.evidence, "trained": trained(plan, model)}


def probed_on_cpu() -> list[Any]:
    """`probe`, measured by resident memory."""
    found = autoaccum.probe(sharded(Net()), rows(4), loss_fn=nn.CrossEntropyLoss(), max_micro_batch=16)
    return [found.max_micro_batch, found.limited_by, found.evidence]


def replicas() -> list[Any]:
    """HSDP: two ranks share what two others hold as well."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return everywhere(mesh=mesh)


def only_replicas() -> list[str]:
    """A mesh that shards over one rank."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(Net(), mesh=mesh)
    return raises(lambda: autoaccum.probe(model, rows(8), loss_fn=nn.CrossEntropyLoss(), device=DEVICE))


def other_ranks() -> list[str]:
    """A group of fewer ranks than the mesh has."""
    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    model = sharded(Net())
    return raises(
        lambda: autoaccum.probe(model, rows(8), loss_fn=nn.CrossEntropyLoss(), device=DEVICE, process_group=groups[RANK])
    )


def peak(**options: Any) -> int:
    """The measured peak of one trial of a sharded model."""
    trials = Trials(sharded(Net(), **options))
    with trials.search:
        found = trials.run().outcome
    assert isinstance(found, Fit)
    return found.peak_bytes


def wrapped_memory(dtype: torch.dtype) -> list[int]:
    """The peak that was measured of a model under DistributedDataParallel, and that of training it, counted alike."""
    model = Net().to(dtype)
    wrapped = DistributedDataParallel(model)
    batch = (rows(8)[0].to(dtype), rows(8)[1])
    loss_fn = nn.CrossEntropyLoss()
    plan = autoaccum.autotune(wrapped, batch, 8 * WORLD, loss_fn=loss_fn, device=DEVICE, levers="none", time_budget_s=1.0)
    acc = Accumulator(wrapped, AdamW(model.parameters()), plan=plan, loss_fn=loss_fn)
    tracker = StorageTracker()
    tracker.count(model.parameters())
    with tracker:
        for _ in range(2):
            acc.step(batch)
    tracker.close()
    buckets = sum(parameter.nbytes for parameter in model.parameters())
    assert plan.measured_peak_bytes is not None
    return [plan.measured_peak_bytes, tracker.peak_bytes + buckets]


def wrapped_checkpointed(level: str) -> dict[str, Any]:
    """A model under DistributedDataParallel trained with its blocks computed again, against one process without."""
    model = Net()
    wrapped = DistributedDataParallel(model)
    plan = autoaccum.autotune(
        wrapped,
        rows(8),
        8 * WORLD,
        loss_fn=nn.CrossEntropyLoss(),
        device=DEVICE,
        max_micro_batch=3,
        levers="none",
        time_budget_s=1.0,
    )
    levers = Levers(checkpointing=level, checkpointed_blocks=NUM_BLOCKS)  # type: ignore[arg-type]
    before = Block.runs[0]
    found = trained(autoaccum.Plan.of(msgspec.structs.replace(plan, levers=levers)), wrapped)
    by_reference, steps = 3 * NUM_BLOCKS, 3
    runs = (Block.runs[0] - before - by_reference) / (steps * len(plan.schedule(RANK)) * NUM_BLOCKS)
    return found | {"runs_per_micro_batch": runs}


def partly_sharded() -> list[str]:
    """A model of which only a block is sharded."""
    model = Net()
    fully_shard(model.blocks[0])
    return raises(lambda: autoaccum.autotune(model, rows(8), 8, loss_fn=nn.CrossEntropyLoss(), device=DEVICE))


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CHECKPOINTED = Levers(checkpointing="full", checkpointed_blocks=NUM_BLOCKS)
SELECTIVE = Levers(checkpointing="selective", checkpointed_blocks=NUM_BLOCKS)

SCENARIOS: dict[str, Callable[[], Any]] = {
    "everywhere": everywhere,
    "at_every_allocation": at_every_allocation,
    "users_error": users_error,
    "statistics": statistics,
    "ends": ends,
    "different_paths": different_paths,
    "partly_sharded": partly_sharded,
    "tuned": lambda: tuned(24 * WORLD + 1, "140KiB"),
    "uneven": uneven,
    "probed_on_cpu": probed_on_cpu,
    "only_replicas": only_replicas,
    "other_ranks": other_ranks,
    "wrapped_memory": lambda: [wrapped_memory(torch.float32), wrapped_memory(torch.bfloat16)],
    "wrapped_checkpointed": lambda: [wrapped_checkpointed("full"), wrapped_checkpointed("selective")],
    "tuned-levers": lambda: tuned(32 * WORLD, "118KiB", levers=["checkpointing", "offload", "precision", "optimizer_impl"]),
    "checkpointed": lambda: [checkpointed(False), checkpointed(True)],
    "peaks": lambda: [peak(), peak(reshard_after_forward=False)],
    "everywhere-checkpointed": lambda: everywhere(CHECKPOINTED),
    "everywhere-kept-whole": lambda: everywhere(reshard_after_forward=False, mp_policy=BF16),
}


if WORLD == 4:
    SCENARIOS = {"replicas": replicas}


def main(folder: Path, names: list[str]) -> None:
    """Run the scenarios; what one cannot finish is an answer as well."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, rank=RANK, world_size=WORLD)
    answers = {}
    for name in names:
        answers[name] = SCENARIOS[name]()
        (folder / f"{RANK}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()
    os._exit(0)  # Python's own end may meet a thread of gloo that still holds a tensor, which aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
