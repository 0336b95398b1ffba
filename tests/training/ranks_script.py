"""What every rank runs for test_ranks.py, under torchrun: all scenarios in turn, the answers in one file a rank."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from autoaccum import Accumulator, StepResult, Window, tokens
from autoaccum.errors import AutoaccumError

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 2))  # set by torchrun
ROWS = {2: [13, 7], 3: [12, 8, 0]}[WORLD]  # uneven, and with three ranks one without data
FIRST = sum(ROWS[:RANK])
MINE = slice(FIRST, FIRST + ROWS[RANK])
IGNORED = -100


class Recording(SGD):
    """Keeps the gradient that it steps with."""

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.gradients = [None if p.grad is None else p.grad.to_dense().double().clone() for p in parameters]
        super().step(closure)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise out_of_memory()


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class Net(nn.Module):
    """Dropout, BatchNorm and two parameters that only some ranks use, or none; runs out of memory where it is told to."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.only_on_rank_0, self.never = nn.Linear(8, 3), nn.Linear(8, 3)
        self.drop, self.norm, self.noisy = nn.Dropout(0.3), nn.BatchNorm1d(8), noisy
        self.calls, self.fails_at = 0, (-1, "")

    def forward(self, inputs: Tensor) -> Tensor:
        call, self.calls = self.calls, self.calls + 1
        if self.fails_at == (call, "forward"):
            raise out_of_memory()
        hidden = self.first(inputs).tanh()
        if self.noisy:
            hidden = self.norm(self.drop(hidden))
        if self.fails_at == (call, "backward"):
            hidden = FailingBackward.apply(hidden)  # type: ignore[no-untyped-call]
        output: Tensor = self.last(hidden)
        return output + self.only_on_rank_0(hidden) if RANK == 0 else output


def data() -> tuple[Tensor, Tensor]:
    """20 rows over all ranks, of which two labels do not count."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 3, (20,), generator=generator)
    targets[[3, 16]] = IGNORED
    return torch.randn(20, 6, generator=generator, dtype=torch.float64), targets


def same_on_all_ranks(tensors: list[Tensor | None]) -> bool:
    """Bit for bit."""
    flat = torch.cat(
        [torch.zeros(0, dtype=torch.float64), *(t.detach().double().flatten() for t in tensors if t is not None)]
    )
    found = [torch.empty_like(flat) for _ in range(WORLD)]
    dist.all_gather(found, flat)
    return all(torch.equal(found[0], other) for other in found)


def relative(got: list[Tensor | None], expected: list[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(got, expected, strict=True) if a is not None and b is not None]
    a, b = (torch.cat([tensors[side].flatten() for tensors in pairs]) for side in (0, 1))
    return float((a - b).norm() / b.norm())


def whole_gradient(model: Net, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
    """By hand, on the data of all ranks, each row as its rank sees it."""
    inputs, targets = data()
    hidden = model.first(inputs).tanh()
    output = model.last(hidden)
    on_rank_0 = torch.arange(20)[:, None] < ROWS[0]
    loss_fn(torch.where(on_rank_0, output + model.only_on_rank_0(hidden), output), targets).backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def wrapped(model: nn.Module, how: str) -> nn.Module:
    match how:
        case "plain":
            return model
        case "ddp":
            return DistributedDataParallel(model)
        case "static_graph":
            return DistributedDataParallel(model, static_graph=True)
    return DistributedDataParallel(model, find_unused_parameters=True)


def exact(how: str) -> dict[str, Any]:
    """Three windows; the first one's gradient is compared."""
    model = Net().double()
    expected = whole_gradient(model, functional.cross_entropy)
    optimizer = Recording(model.parameters(), lr=0.1)
    acc = Accumulator(wrapped(model, how), optimizer, micro_batch=4, loss_fn=nn.CrossEntropyLoss())
    inputs, targets = data()
    step = acc.step((inputs[MINE], targets[MINE]))
    error = relative(optimizer.gradients, expected)
    whole_loss = float(functional.cross_entropy(forward_by_hand(Net().double()), targets).detach())
    never = [optimizer.gradients[index] for index, (name, _) in enumerate(model.named_parameters()) if "never" in name]
    for _ in range(2):
        acc.step((inputs[MINE], targets[MINE]))
    return {
        "error": error,
        "loss_error": abs(step.loss - whole_loss),
        "weight": step.weight,
        "sizes": step.micro_batch_sizes,
        "never_used_is_none": all(gradient is None for gradient in never),
        "same": same_on_all_ranks(optimizer.gradients) and same_on_all_ranks([*model.parameters()]),
    }


def forward_by_hand(model: Net) -> Tensor:
    inputs, _ = data()
    hidden = model.first(inputs).tanh()
    output: Tensor = model.last(hidden)
    return torch.where(torch.arange(20)[:, None] < ROWS[0], output + model.only_on_rank_0(hidden), output)


def noisy_run(how: str, micro_batch: int, fails_at: tuple[int, int, str] | None) -> tuple[StepResult, Recording, Net]:
    model = Net(noisy=True).double()
    if fails_at is not None and fails_at[0] == RANK:
        model.fails_at = fails_at[1:]
    optimizer = Recording(model.parameters(), lr=0.1)
    acc = Accumulator(wrapped(model, how), optimizer, micro_batch=micro_batch, loss_fn=nn.CrossEntropyLoss())
    inputs, targets = data()
    torch.manual_seed(10 + RANK)
    return acc.step((inputs[MINE], targets[MINE])), optimizer, model


def replays(how: str) -> list[Any]:
    """Out of memory on every rank, in every micro-batch, in forward and in backward."""
    found = []
    references = {limit: noisy_run(how, limit, None) for limit in (4, 2)}
    for rank in range(WORLD):
        for index in range(4):
            for phase in ("forward", "backward"):
                step, optimizer, model = noisy_run(how, 4, (rank, index, phase))
                happens = index < -(-ROWS[rank] // 4)
                expected, recorded, reference = references[2 if happens else 4]
                same = all(
                    (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
                    for a, b in zip(optimizer.gradients, recorded.gradients, strict=True)
                )
                buffers = zip(model.buffers(), reference.buffers(), strict=True)
                found.append(
                    {
                        "at": [rank, index, phase],
                        "replays": step.replays,
                        "happens": happens,
                        # A rest of one row, which BatchNorm refuses, is another replay, there and here.
                        "expected_replays": int(happens) + expected.replays,
                        "sizes_as_expected": step.micro_batch_sizes == expected.micro_batch_sizes,
                        "loss_as_expected": step.loss == expected.loss,
                        "gradients_as_expected": same,
                        "buffers_as_expected": all(torch.equal(a, b) for a, b in buffers),
                        "same": same_on_all_ranks([*model.parameters(), *model.buffers()]),
                    }
                )
    return found


def raises(run: Callable[[], Any]) -> list[str]:
    """What the call raises, by name and text, with its notes."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
    return []


def failing(step_fn: Callable[[nn.Module, Any], Tensor], optimizer_type: type[Optimizer] = SGD, rows: int = 4) -> list[str]:
    model = Net()
    optimizer = optimizer_type(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=step_fn)
    found = raises(lambda: acc.step((torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long))))
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def cross_entropy_step(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def users_error() -> list[str]:
    """Raised on rank 1 only."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        if RANK == 1:
            raise KeyError("the user's own")
        return cross_entropy_step(model, batch)

    return failing(step)


def single_row_too_large() -> list[str]:
    """Memory never suffices on rank 1."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        if RANK == 1:
            raise out_of_memory()
        return cross_entropy_step(model, batch)

    return failing(step)


class FailingStep(SGD):
    def step(self, closure: Any = None) -> None:
        if RANK == 1:
            raise out_of_memory()
        super().step(closure)


def optimizer_out_of_memory() -> list[str]:
    return failing(cross_entropy_step, FailingStep)


def bad_batch() -> list[str]:
    """Rank 1 gets a batch whose rows cannot be told."""
    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=cross_entropy_step)
    batch = (torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    return raises(lambda: acc.step("no batch" if RANK == 1 else batch))


def uneven_loaders() -> list[Any]:
    """Five micro-batches on rank 0, two on the others; windows of two."""
    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=cross_entropy_step)
    ready = [(torch.randn(2, 6), torch.zeros(2, dtype=torch.long))] * (5 if RANK == 0 else 2)
    steps = [acc.step(window) for window in acc.windows(iter(ready), steps=2)]
    return [[step.weight for step in steps], [step.micro_batch_sizes for step in steps]]


def failing_loader() -> list[str]:
    def loader() -> Any:
        yield (torch.randn(2, 6), torch.zeros(2, dtype=torch.long))
        if RANK == 1:
            raise OSError("disk")
        yield (torch.randn(2, 6), torch.zeros(2, dtype=torch.long))

    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=cross_entropy_step)
    return raises(lambda: [acc.step(window) for window in acc.windows(loader(), steps=1)])


def nothing_anywhere() -> list[Any]:
    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=cross_entropy_step)
    steps = [acc.step(batch) for batch in (None, [], Window([]))]
    return [[step.skipped, step.weight] for step in steps]


def scaler_overflow() -> list[Any]:
    """An infinity on rank 1 only skips the step of all."""
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy_step(model, batch) * (float("inf") if RANK == 1 and bool((batch[0] > 5).any()) else 1.0)

    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=step, scaler=scaler)
    inputs = torch.zeros(6, 6)
    inputs[2] = 9.0
    result = acc.step((inputs, torch.zeros(6, dtype=torch.long)))
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    again = acc.step((torch.zeros(6, 6), torch.zeros(6, dtype=torch.long)))
    return [result.skipped, unchanged, scaler.get_scale(), again.skipped, same_on_all_ranks([*model.parameters()])]


def sparse() -> dict[str, Any]:
    """Sparse gradients of an embedding, token means, clipping of the dense rest."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(11, 4, sparse=True, dtype=torch.float64), nn.Linear(4, 11, dtype=torch.float64)
    model = nn.Sequential(embedding, head)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 11, (20, 5), generator=generator)
    labels = ids.clone()
    labels[torch.rand(20, 5, generator=generator) < 0.5] = IGNORED

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    loss(model, {"ids": ids, "labels": labels}).backward()
    expected = [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    optimizer = Recording(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, micro_batch=3, training_step=loss, weight=tokens("labels"))
    step = acc.step({"ids": ids[MINE], "labels": labels[MINE]})
    return {
        "error": relative(optimizer.gradients, list(expected)),
        "weight": step.weight,
        "expected_weight": int((labels != IGNORED).sum()),
        "same": same_on_all_ranks(optimizer.gradients),
    }


def clipped() -> dict[str, Any]:
    """The norm over all ranks' gradient, clipped once."""
    model = Net().double()
    whole = whole_gradient(model, functional.cross_entropy)
    norm = float(torch.cat([g.flatten() for g in whole if g is not None]).norm())
    optimizer = Recording(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, micro_batch=4, loss_fn=nn.CrossEntropyLoss(), max_grad_norm=norm / 10)
    inputs, targets = data()
    step = acc.step((inputs[MINE], targets[MINE]))
    got = float(torch.cat([g.flatten() for g in optimizer.gradients if g is not None]).norm())
    assert step.grad_norm is not None
    return {"norm_error": abs(step.grad_norm / norm - 1), "clipped_error": abs(got / (norm / 10) - 1)}


def half_precision() -> dict[str, Any]:
    """bfloat16 parameters: summed over micro-batches and ranks in float32, rounded once."""
    model = Net().bfloat16()
    optimizer = Recording(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, micro_batch=1, loss_fn=nn.CrossEntropyLoss())
    expected = whole_gradient(Net().bfloat16().double(), functional.cross_entropy)
    inputs, targets = data()
    acc.step((inputs[MINE].bfloat16(), targets[MINE]))
    dtypes = {str(p.grad_dtype) for p in model.parameters()} if hasattr(Tensor, "grad_dtype") else {"torch.bfloat16"}
    return {
        "error": relative(optimizer.gradients, expected),
        "same": same_on_all_ranks(optimizer.gradients),
        "dtypes": sorted(dtypes),
    }


def explicit() -> dict[str, Any]:
    """A loop of one's own."""
    model = Net().double()
    expected = whole_gradient(model, functional.cross_entropy)
    optimizer = Recording(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    acc = Accumulator(ddp, optimizer, micro_batch=4, loss_fn=nn.CrossEntropyLoss())
    inputs, targets = data()
    with acc.window((inputs[MINE], targets[MINE])) as window:
        for micro_inputs, micro_targets in window:
            window.backward(functional.cross_entropy(ddp(micro_inputs), micro_targets))
    return {"error": relative(optimizer.gradients, expected), "sizes": window.result.micro_batch_sizes}


def forward_before(who: list[int]) -> dict[str, Any]:
    """A forward of the wrapped model outside of any window, with gradients on, before each of two windows."""
    model = Net().double()
    # Its own broadcast of buffers, in a forward on one rank alone, would be the user's mistake.
    ddp = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    optimizer = Recording(model.parameters(), lr=0.0)
    acc = Accumulator(ddp, optimizer, micro_batch=4, loss_fn=nn.CrossEntropyLoss())
    expected = whole_gradient(model, functional.cross_entropy)
    inputs, targets = data()
    errors = []
    for _ in range(2):
        if RANK in who:
            ddp(inputs[:2])
        acc.step((inputs[MINE], targets[MINE]))
        errors.append(relative(optimizer.gradients, expected))
    return {"error": max(errors)}


def inner_model() -> dict[str, Any]:
    """The accumulator has the module, and the step calls the wrapped model."""
    model = Net().double()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = Recording(model.parameters(), lr=0.0)
    acc = Accumulator(
        model, optimizer, micro_batch=4, weight=counted, training_step=lambda model, batch: cross_entropy_step(ddp, batch)
    )
    expected = whole_gradient(model, functional.cross_entropy)
    inputs, targets = data()
    acc.step((inputs[MINE], targets[MINE]))
    return {"error": relative(optimizer.gradients, expected)}


def counted(batch: tuple[Tensor, Tensor]) -> int:
    return int((batch[1] != IGNORED).sum())


def two_networks() -> dict[str, Any]:
    """A GAN of two wrapped networks against one without ranks."""

    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return nn.Linear(4, 6).double(), nn.Linear(6, 1).double()

    def d_loss(generate: nn.Module, judge: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
        return functional.softplus(-judge(real)).mean() + functional.softplus(judge(generate(noise).detach())).mean()

    def g_loss(generate: nn.Module, judge: nn.Module, noise: Tensor) -> Tensor:
        return functional.softplus(-judge(generate(noise))).mean()

    real, noise = data()[0], data()[0][:, :4]
    g, d = build()
    optimizers = [SGD(g.parameters(), lr=0.5), SGD(d.parameters(), lr=0.5)]
    for _ in range(3):
        d_loss(g, d, real, noise).backward()
        optimizers[1].step()
        g.zero_grad()
        d.zero_grad()
        g_loss(g, d, noise).backward()
        optimizers[0].step()
        g.zero_grad()
        d.zero_grad()
    own_g, own_d = build()
    ddp_g, ddp_d = DistributedDataParallel(own_g), DistributedDataParallel(own_d)
    acc_d = Accumulator(
        ddp_d, SGD(own_d.parameters(), lr=0.5), micro_batch=3, training_step=lambda m, b: d_loss(ddp_g, ddp_d, b[0], b[1])
    )
    acc_g = Accumulator(
        ddp_g, SGD(own_g.parameters(), lr=0.5), micro_batch=3, training_step=lambda m, b: g_loss(ddp_g, ddp_d, b)
    )
    for _ in range(3):
        acc_d.step((real[MINE], noise[MINE]))
        acc_g.step(noise[MINE])
    own = [*own_g.parameters(), *own_d.parameters()]
    return {"error": relative([p.detach() for p in own], [p.detach() for p in (*g.parameters(), *d.parameters())])}


def other_parameters() -> list[str]:
    """Rank 1 starts with rows of a weight exchanged, whose sum is the same."""
    model = Net()
    if RANK == 1:
        model.first.weight.data = model.first.weight.data.flip(0)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=cross_entropy_step)
    return raises(lambda: acc.step((torch.randn(4, 6), torch.zeros(4, dtype=torch.long))))


def fewer_trainable() -> list[str]:
    """Rank 1 has frozen a parameter."""
    model = Net()
    model.last.bias.requires_grad_(RANK != 1)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=cross_entropy_step)
    return raises(lambda: acc.step((torch.randn(4, 6), torch.zeros(4, dtype=torch.long))))


class BreakingStep(SGD):
    def step(self, closure: Any = None) -> None:
        if RANK == 1:
            raise KeyError("the user's own")
        super().step(closure)


def after_a_failed_step(optimizer_type: type[SGD]) -> list[str]:
    """The window after an optimizer step that failed on rank 1."""
    model = Net()
    acc = Accumulator(model, optimizer_type(model.parameters(), lr=0.1), micro_batch=2, training_step=cross_entropy_step)
    batch = (torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    raises(lambda: acc.step(batch))
    return raises(lambda: acc.step(batch))


def sharded_bad_batch() -> list[Any]:
    """Rank 1 gets no batch; the window after it is taken by all."""
    model = nn.Sequential(nn.Linear(6, 3))
    fully_shard(model)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.5), micro_batch=4, loss_fn=nn.CrossEntropyLoss())
    batch = (torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    first = raises(lambda: acc.step("no batch" if RANK == 1 else batch))
    return [first[0], acc.step(batch).weight]


def sharded(rows: list[int]) -> dict[str, Any]:
    """FSDP2, against the whole batch on one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    reference = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    reference.load_state_dict(model.state_dict())
    for part in (model[0], model[2], model):
        fully_shard(part)
    acc = Accumulator(
        model, SGD(model.parameters(), lr=0.5), micro_batch=4, loss_fn=nn.CrossEntropyLoss(), max_grad_norm=0.5
    )
    by_hand = SGD(reference.parameters(), lr=0.5)
    inputs, targets = data()
    inputs, targets = inputs[: sum(rows)], targets[: sum(rows)]
    mine = slice(sum(rows[:RANK]), sum(rows[: RANK + 1]))
    losses, steps = [], []
    for _ in range(2):
        steps.append(acc.step((inputs[mine], targets[mine])))
        loss = functional.cross_entropy(reference(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        by_hand.step()
        by_hand.zero_grad()
        losses.append(float(loss.detach()))
    full = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return {
        "error": relative(full, [p.detach() for p in reference.parameters()]),
        "loss_error": max(abs(step.loss - loss) for step, loss in zip(steps, losses, strict=True)),
        "sizes": steps[0].micro_batch_sizes,
    }


def sharded_without_data() -> list[str]:
    model = nn.Sequential(nn.Linear(6, 3))
    fully_shard(model)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.5), micro_batch=4, loss_fn=nn.CrossEntropyLoss())
    batch = (torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    return raises(lambda: acc.step(None if RANK == 1 else batch))


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"exact-{how}": lambda how=how: exact(how) for how in ("plain", "ddp", "static_graph", "unused")},  # type: ignore[misc]
    **{f"replays-{how}": lambda how=how: replays(how) for how in ("plain", "static_graph")},  # type: ignore[misc]
    "users_error": users_error,
    "single_row_too_large": single_row_too_large,
    "optimizer_out_of_memory": optimizer_out_of_memory,
    "bad_batch": bad_batch,
    "uneven_loaders": uneven_loaders,
    "failing_loader": failing_loader,
    "nothing_anywhere": nothing_anywhere,
    "scaler_overflow": scaler_overflow,
    "sparse": sparse,
    "clipped": clipped,
    "half_precision": half_precision,
    "explicit": explicit,
    "forward_before-all": lambda: forward_before(list(range(WORLD))),
    "forward_before-one": lambda: forward_before([0]),
    "inner_model": inner_model,
    "two_networks": two_networks,
    "other_parameters": other_parameters,
    "fewer_trainable": fewer_trainable,
    "after_a_failed_step": lambda: after_a_failed_step(FailingStep),
    "after_a_broken_step": lambda: after_a_failed_step(BreakingStep),
}
if hasattr(Tensor, "grad_dtype"):  # about as old as FSDP2 on the CPU: gloo could not do it in torch 2.6
    SCENARIOS["sharded"] = lambda: sharded({2: [13, 7], 3: [12, 6, 2]}[WORLD])
    SCENARIOS["sharded_without_data"] = sharded_without_data
    SCENARIOS["sharded_bad_batch"] = sharded_bad_batch


def main(folder: Path) -> None:
    """Run all scenarios; what one cannot finish is an answer as well."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    answers = {}
    for name, scenario in SCENARIOS.items():
        try:
            answers[name] = scenario()
        except AutoaccumError as error:
            answers[name] = f"{type(error).__name__}: {error}"
        (folder / f"{RANK}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()
    os._exit(0)  # Python's own end may meet a thread of gloo that still holds a tensor, which aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
