"""Objects that Accelerate has prepared are tuned and trained as they are, and its own accumulation follows a plan."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import autoaccum
from autoaccum import Accumulator, InvalidRequestError, Plan
from autoaccum.errors import MissingExtraError
from autoaccum.integrations.accelerate import accelerator_kwargs, follow_plan
from autoaccum.records import Levers

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

ROWS = 24
DATA = (torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS).float()[:, None] / ROWS)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes an Accelerator on the CPU; what it keeps for the whole process is forgotten afterwards."""
    state = pytest.importorskip("accelerate.state", reason="accelerate is not installed")

    def forget() -> None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    forget()
    yield lambda **options: accelerate.Accelerator(cpu=True, **options)
    forget()


class Fuse(nn.Module):
    """Runs out of memory above so many rows."""

    def __init__(self, limit: int = 10**6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.limit = nn.Linear(6, 8), nn.Linear(8, 1), limit

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        output: Tensor = self.last(self.first(inputs).tanh())
        return output


def loader_of(rows: int, **options: Any) -> DataLoader[Any]:
    """All data in order, so many rows at a time."""
    return DataLoader(TensorDataset(*DATA), batch_size=rows, **options)


def whole_steps(limit: int = 8, *, max_norm: float | None = None, windows: int = 3) -> Fuse:
    """What plain torch learns with the big batch."""
    model = Fuse()
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    for inputs, targets in list(zip(DATA[0].split(limit), DATA[1].split(limit), strict=True)) * 2:
        if windows:
            mse_loss(model(inputs), targets).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            windows -= 1
    return model


def distance(model: nn.Module, other: nn.Module) -> float:
    """Of all parameters, relative."""
    ours, theirs = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (model, other))
    return float((ours - theirs).norm() / theirs.norm())


def plan_of(target: int, limit: int, *, levers: Levers | None = None, **options: Any) -> Plan:
    """A plan for the fuse, with levers put in by hand."""
    plan = autoaccum.autotune(
        Fuse(limit), (DATA[0][:2], DATA[1][:2]), target, loss_fn=mse_loss, device="virtual:1GiB", levers="none", **options
    )
    changed = {} if levers is None else {"levers": levers}
    return Plan(**{name: changed.get(name, getattr(plan, name)) for name in Plan.__struct_fields__})


def lists_of(accelerator: Any) -> list[Any]:
    """What the accelerator keeps, and where its accumulation stands."""
    kept = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    counts = [accelerator.step, accelerator.sync_gradients, accelerator.gradient_accumulation_steps]
    return [[id(one) for one in some] for some in kept] + counts


# -- the search


def test_search_works_on_prepared_objects(make: Callable[..., Any]) -> None:
    """Model, optimizer and loader are tuned as they were prepared; with room for 3 rows, 8 become 3 + 3 + 2."""
    accelerator = make(gradient_accumulation_steps=4)
    plain = Fuse(limit=3)
    model, optimizer, loader = accelerator.prepare(plain, AdamW(plain.parameters()), loader_of(8, shuffle=True))
    plan = autoaccum.autotune(model, loader, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="none")
    assert plan.micro_batch_sizes == (3, 3, 2)
    assert plan.environment is not None
    assert plan.environment.optimizer == "AdamW"


def test_search_leaves_the_accelerator_as_it_was(make: Callable[..., Any]) -> None:
    """Nothing is prepared again, step counter and `sync_gradients` stay, and so do weights, groups and optimizer state."""
    accelerator = make(gradient_accumulation_steps=4)
    plain = Fuse(limit=3)
    inner = AdamW(plain.parameters())
    model, optimizer, loader, _ = accelerator.prepare(plain, inner, loader_of(8), StepLR(inner, 1))
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(DATA[0][:2]), DATA[1][:2]))
    before, weights, groups = lists_of(accelerator), copy.deepcopy(plain.state_dict()), inner.param_groups
    gradients = [parameter.grad for parameter in plain.parameters()]
    autoaccum.autotune(
        model, loader, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="exact", time_budget_s=1
    )
    assert lists_of(accelerator) == before
    assert before[4:] == [1, False, 4]
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    assert inner.param_groups is groups
    assert [id(p) for group in groups for p in group["params"]] == [id(p) for p in plain.parameters()]
    assert not inner.state
    assert all(now.grad is gradient for now, gradient in zip(plain.parameters(), gradients, strict=True))


def test_optimizer_state_is_measured_inside_an_open_window(make: Callable[..., Any]) -> None:
    """Where Accelerate would leave the step out, the search takes it all the same: else Adam's state would be missing."""
    accelerator = make(gradient_accumulation_steps=4)
    plain = Fuse()
    model, optimizer = accelerator.prepare(plain, AdamW(plain.parameters()))
    with accelerator.accumulate(model):
        plan = autoaccum.autotune(
            model, DATA, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="none"
        )
    assert plan.memory is not None
    assert (plan.memory.optimizer_state_bytes or 0) >= 2 * plan.memory.trainable_bytes


def test_step_hooks_are_left_out_of_the_search(make: Callable[..., Any]) -> None:
    """Hooks of the optimizer inside are not called, as for one that is not prepared."""
    plain, calls = Fuse(), []
    inner = AdamW(plain.parameters())
    inner.register_step_post_hook(lambda *args: calls.append(1))
    model, optimizer = make().prepare(plain, inner)
    autoaccum.autotune(model, DATA, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="none")
    assert not calls


def test_subset_of_a_prepared_loader_is_seen(make: Callable[..., Any]) -> None:
    """A loader over some of the rows stays one over these, though preparing it puts its sampler elsewhere."""
    loader = make().prepare(loader_of(4, sampler=SubsetRandomSampler([1, 5, 7])))
    result = autoaccum.probe(Fuse(), loader, loss_fn=mse_loss, device="virtual:1GiB")
    assert (result.max_micro_batch, result.limited_by) == (3, "data")


class Stream(IterableDataset[Any]):
    """Rows in order, of which nobody knows how many there are."""

    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(*DATA))


def test_prepared_stream_is_looked_at_and_trained_from(make: Callable[..., Any]) -> None:
    """Data without a length, whose loader Accelerate replaces by one that reads for all processes."""
    plain = Fuse(limit=3)
    model, optimizer, loader = make().prepare(
        plain, SGD(plain.parameters(), lr=0.3, momentum=0.9), DataLoader(Stream(), batch_size=8)
    )
    plan = autoaccum.autotune(model, loader, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="none")
    acc = Accumulator(model, optimizer, plan=plan, loss_fn=mse_loss)
    assert [acc.step(batch).micro_batch_sizes for batch in loader] == [(3, 3, 2)] * 3
    assert distance(plain, whole_steps()) <= 2e-6


def test_mixed_precision_of_a_prepared_model_is_the_baseline(make: Callable[..., Any]) -> None:
    """A forward pass that Accelerate has put under autocast is tuned as it is; turning precision is left out, and why."""
    accelerator = make(mixed_precision="bf16")
    plain = Fuse()
    model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.1))
    plan = autoaccum.autotune(
        model, DATA, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers=["precision"]
    )
    assert plan.levers.precision == "fp32"
    reasons = {skipped.level: skipped.reason for skipped in plan.skipped if skipped.lever == "precision"}
    assert "Accelerate runs the forward pass under autocast" in reasons["bf16"]


# -- the Accumulator


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("limit", [2, 3])
def test_three_prepared_steps_are_those_of_the_big_batch(make: Callable[..., Any], limit: int, steps: int) -> None:
    """Tuned, then trained from the prepared loader with clipping, whatever the accelerator's own number of steps."""
    accelerator = make(gradient_accumulation_steps=steps)
    plain = Fuse(limit)
    model, optimizer, loader = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.3, momentum=0.9), loader_of(8))
    plan = autoaccum.autotune(model, loader, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="none")
    acc = Accumulator(model, optimizer, plan=plan, loss_fn=mse_loss, max_grad_norm=0.05)
    before = lists_of(accelerator)[:-3]
    results = [acc.step(batch) for batch in loader]
    assert [result.micro_batch_sizes for result in results] == [plan.micro_batch_sizes] * 3
    assert not any(result.replays for result in results)
    assert distance(plain, whole_steps(max_norm=0.05)) <= 2e-6
    assert lists_of(accelerator) == [*before, 0, True, steps]


def test_clipping_is_that_of_the_accelerator(make: Callable[..., Any]) -> None:
    """`max_grad_norm` does what `accelerator.clip_grad_norm_` does to the whole gradient, and reports the same norm."""
    accelerator = make()
    theirs, ours = Fuse(), Fuse()
    model, optimizer = accelerator.prepare(theirs, SGD(theirs.parameters(), lr=1.0))
    accelerator.backward(mse_loss(model(DATA[0]), DATA[1]))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    model, optimizer = accelerator.prepare(ours, SGD(ours.parameters(), lr=1.0))
    step = Accumulator(model, optimizer, micro_batch=7, loss_fn=mse_loss, max_grad_norm=0.05).step(DATA)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert distance(ours, theirs) <= 2e-6


def test_out_of_memory_is_replayed_without_preparing_again(make: Callable[..., Any]) -> None:
    """Running out of memory in training needs no restart: the window goes through in halves, the lists stay."""
    accelerator = make()
    plain = Fuse(limit=4)
    model, optimizer, loader = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.3, momentum=0.9), loader_of(8))
    before = lists_of(accelerator)
    acc = Accumulator(model, optimizer, micro_batch=8, loss_fn=mse_loss)
    assert sum(acc.step(batch).replays for batch in loader) == 1
    assert distance(plain, whole_steps()) <= 2e-6
    assert lists_of(accelerator) == before


def test_prepared_scheduler_is_stepped_once_for_a_window(make: Callable[..., Any]) -> None:
    """In one process a prepared scheduler follows optimizer steps, not micro-batches."""
    plain = Fuse()
    inner = SGD(plain.parameters(), lr=1.0)
    model, optimizer, scheduler = make(gradient_accumulation_steps=4).prepare(plain, inner, StepLR(inner, 1, gamma=0.5))
    acc = Accumulator(model, optimizer, micro_batch=3, loss_fn=mse_loss, scheduler=scheduler)
    rates = []
    for _ in range(3):
        rates.append(inner.param_groups[0]["lr"])
        acc.step(DATA)
    assert rates == [1.0, 0.5, 0.25]


def test_prepared_plateau_scheduler_is_refused(make: Callable[..., Any]) -> None:
    """One that needs a metric is refused inside of Accelerate's wrapper as well."""
    plain = Fuse()
    inner = SGD(plain.parameters(), lr=1.0)
    model, optimizer, scheduler = make().prepare(plain, inner, ReduceLROnPlateau(inner))
    with pytest.raises(InvalidRequestError, match="ReduceLROnPlateau needs a metric"):
        Accumulator(model, optimizer, micro_batch=3, loss_fn=mse_loss, scheduler=scheduler)


def test_window_with_a_prepared_scheduler_inside_accumulate_is_refused(make: Callable[..., Any]) -> None:
    """There such a scheduler would not step, which would go unnoticed."""
    accelerator, plain = make(gradient_accumulation_steps=4), Fuse()
    inner = SGD(plain.parameters(), lr=1.0)
    model, scheduler = accelerator.prepare(plain, StepLR(inner, 1))
    acc = Accumulator(model, inner, micro_batch=3, loss_fn=mse_loss, scheduler=scheduler)
    with accelerator.accumulate(model), pytest.raises(InvalidRequestError, match="sync_gradients is False"):
        acc.step(DATA)


def test_training_step_that_runs_the_accelerators_backward_is_refused(make: Callable[..., Any]) -> None:
    """In a search and in a window, with the reason: that backward divides the loss as well."""
    accelerator = make(gradient_accumulation_steps=4)
    plain = Fuse()
    model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=1.0))

    def training_step(module: nn.Module, batch: Any) -> Tensor:
        loss = mse_loss(module(batch[0]), batch[1])
        accelerator.backward(loss)
        return loss

    reason = r"accelerator\.backward\(loss\), which also divides by gradient_accumulation_steps"
    with pytest.raises(InvalidRequestError, match=reason):
        Accumulator(model, optimizer, micro_batch=3, training_step=training_step).step(DATA)
    with pytest.raises(InvalidRequestError, match=reason):
        autoaccum.autotune(model, DATA, 8, training_step=training_step, optimizer=optimizer, device="virtual:1GiB")
    assert all(parameter.grad is None for parameter in plain.parameters())


def test_prepared_bf16_model_trains_as_with_the_big_batch(make: Callable[..., Any]) -> None:
    """The forward pass stays under Accelerate's autocast; what differs is bfloat16's own rounding."""
    accelerator = make(mixed_precision="bf16")
    theirs, ours = Fuse(), Fuse()
    for plain, rows in ((theirs, 24), (ours, 7)):
        model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=1.0))
        Accumulator(model, optimizer, micro_batch=rows, loss_fn=mse_loss).step(DATA)
    assert 0 < distance(ours, theirs) <= 1e-3
    assert distance(theirs, Fuse()) > 1e-2


def test_prepared_fp16_optimizer_brings_its_own_scaler(make: Callable[..., Any]) -> None:
    """The scaler that Accelerate has put there scales the loss, looks for infinities and is updated, once for a window."""
    plain, whole = Fuse(), Fuse()
    model, optimizer = make().prepare(plain, SGD(plain.parameters(), lr=1.0))
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    acc = Accumulator(model, optimizer, micro_batch=7, loss_fn=mse_loss)
    scales = []
    for _ in range(2):
        acc.step(DATA)
        scales.append(optimizer.scaler.get_scale())
    assert scales == [8.0, 16.0]
    plain_acc = Accumulator(whole, SGD(whole.parameters(), lr=1.0), micro_batch=24, loss_fn=mse_loss)
    plain_acc.step(DATA)
    plain_acc.step(DATA)
    assert distance(plain, whole) <= 2e-6
    assert "scaler" not in acc.state_dict()  # it is saved with the accelerator


def test_second_scaler_is_refused(make: Callable[..., Any]) -> None:
    """Two scales for one loss cannot both be right."""
    plain = Fuse()
    model, optimizer = make().prepare(plain, SGD(plain.parameters(), lr=1.0))
    optimizer.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(InvalidRequestError, match="leave scaler= out"):
        Accumulator(model, optimizer, micro_batch=3, loss_fn=mse_loss, scaler=torch.amp.GradScaler("cpu"))


def test_levers_reach_the_optimizer_inside(make: Callable[..., Any]) -> None:
    """A plan's optimizer implementation is set on the optimizer that steps, and taken back."""
    plain = Fuse()
    inner = AdamW(plain.parameters())
    model, optimizer = make().prepare(plain, inner)
    plan = plan_of(8, 3, levers=Levers(optimizer_impl="foreach"))
    with plan.applied(model, optimizer):
        assert inner.param_groups[0]["foreach"] is True
    assert inner.param_groups[0]["foreach"] is None


# -- its own accumulation


def test_kwargs_are_the_plans_steps(make: Callable[..., Any]) -> None:
    """The number of steps, windows that no end of the data cuts short, and no precision where none was turned."""
    kwargs = accelerator_kwargs(plan_of(8, 2))
    assert set(kwargs) == {"gradient_accumulation_plugin"}
    accelerator = make(**kwargs)
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator.gradient_state.sync_with_dataloader is False


def test_kwargs_turn_precision_where_the_plan_does() -> None:
    """bf16 and fp16 have the same names there."""
    assert accelerator_kwargs(plan_of(8, 2, levers=Levers(precision="bf16")))["mixed_precision"] == "bf16"


def test_levers_without_a_word_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Checkpointing and the like need `plan.applied`, and the log says so."""
    with caplog.at_level(logging.WARNING, "autoaccum"):
        accelerator_kwargs(plan_of(8, 2, levers=Levers(optimizer_impl="foreach", precision="tf32")))
    assert "precision=tf32, optimizer_impl=foreach: run the loop inside plan.applied" in caplog.text


def test_uneven_plan_is_refused_with_the_remedies() -> None:
    """3 + 3 + 2 cannot be said in one number; near targets, equal micro-batches and the Accumulator are named."""
    with pytest.raises(InvalidRequestError) as caught:
        accelerator_kwargs(plan_of(8, 3))
    for part in ("2 and 3 rows", "equal_micro_batches=True", "8 = 2 x 4, 9 = 3 x 3, 6 = 3 x 2", "autoaccum.Accumulator"):
        assert part in str(caught.value)


def test_anything_but_a_plan_is_refused() -> None:
    """Such as the number that was looked for elsewhere."""
    with pytest.raises(InvalidRequestError, match="plan is a int; expected a Plan"):
        accelerator_kwargs(8)  # type: ignore[arg-type]


def test_missing_accelerate_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pip command."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r'python -m pip install "autoaccum\[accelerate\]"'):
        accelerator_kwargs(plan_of(8, 2))


@pytest.mark.parametrize("already_there", [False, True])
def test_accumulate_with_a_plan_is_the_big_batch(make: Callable[..., Any], already_there: bool) -> None:
    """Inside `accelerator.accumulate`: 12 rows in pairs and steps of 8 rows, so that windows go over the end of the data."""
    plan = plan_of(8, 2)
    accelerator = make() if already_there else make(**accelerator_kwargs(plan))
    if already_there:
        follow_plan(accelerator, plan)
    plain = Fuse()
    rows = TensorDataset(DATA[0][:12], DATA[1][:12])
    model, optimizer, loader = accelerator.prepare(
        plain, SGD(plain.parameters(), lr=0.3, momentum=0.9), DataLoader(rows, batch_size=plan.micro_batch, drop_last=True)
    )
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    whole = Fuse()
    optimizer = SGD(whole.parameters(), lr=0.3, momentum=0.9)
    for inputs, targets in zip(*(DATA[i][:12].repeat(2, 1).split(8) for i in range(2)), strict=True):
        mse_loss(whole(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(plain, whole) <= 2e-6


def test_plan_is_followed_between_windows_only(make: Callable[..., Any]) -> None:
    """In the middle of a window the gradients so far were divided by another number."""
    accelerator, plan = make(gradient_accumulation_steps=2), plan_of(8, 2)
    model = accelerator.prepare(Fuse())
    with accelerator.accumulate(model), pytest.raises(InvalidRequestError, match="in the middle of a window"):
        follow_plan(accelerator, plan)
    with accelerator.accumulate(model):
        pass
    follow_plan(accelerator, plan)
    assert (accelerator.step, accelerator.gradient_accumulation_steps) == (0, 4)


def test_plan_for_other_ranks_is_not_followed(make: Callable[..., Any]) -> None:
    """Its share of the batch would be another one."""
    model = Fuse()
    plan = autoaccum.predict(model, DATA, 16, gpu="8GiB", loss_fn=mse_loss, max_micro_batch=2, world_size=2)
    with pytest.raises(InvalidRequestError, match="world_size=2 and the accelerator has 1 processes"):
        follow_plan(make(), plan)


@pytest.mark.slow
def test_plan_of_another_precision_is_not_followed(make: Callable[..., Any]) -> None:
    """An accelerator keeps the precision that it was made with."""
    with pytest.raises(InvalidRequestError, match="'bf16' and the accelerator has 'no'"):
        follow_plan(make(), plan_of(8, 2, levers=Levers(precision="bf16")))


# -- the way over from find_executable_batch_size


def test_way_over_from_find_executable_batch_size(make: Callable[..., Any]) -> None:
    """Before: a smaller batch was learned from, and every try prepared again. After: the batch that was asked for, once."""
    accelerator = make()

    @accelerate.utils.find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> nn.Module:
        model = Fuse(limit=5)
        model_, optimizer, loader = accelerator.prepare(
            model, SGD(model.parameters(), lr=0.3, momentum=0.9), loader_of(batch_size)
        )
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model_(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        return model

    before = train()
    assert distance(before, whole_steps()) > 1e-2
    assert len(accelerator._models) > 1

    accelerator.free_memory()
    after = Fuse(limit=5)
    model, optimizer, loader = accelerator.prepare(after, SGD(after.parameters(), lr=0.3, momentum=0.9), loader_of(8))
    plan = autoaccum.autotune(model, loader, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="none")
    acc = Accumulator(model, optimizer, plan=plan, loss_fn=mse_loss)
    for batch in loader:
        acc.step(batch)
    assert distance(after, whole_steps()) <= 2e-6
    assert len(accelerator._models) == 1


# -- two processes

TWO_RANKS = """
import copy, datetime, os
rank = 1 if os.fork() == 0 else 0  # before torch is there
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
dist.init_process_group("gloo", init_method="file://STORE", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
import autoaccum
from accelerate import Accelerator
from autoaccum.integrations.accelerate import follow_plan

torch.manual_seed(0)
data = torch.randn(24, 6), torch.randn(24, 1)

class Fuse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
    def forward(self, inputs):
        if self.training and len(inputs) > 3 - rank:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.last(self.first(inputs).tanh())

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

def loader_of(rows):
    return DataLoader(TensorDataset(*data), batch_size=rows, drop_last=True)

def distance(model):
    ours, theirs = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (model, whole))
    return float((ours - theirs).norm() / theirs.norm())

whole = Fuse().eval()
optimizer = sgd(whole)
for inputs, targets in zip(data[0].split(8), data[1].split(8)):
    mse_loss(whole(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()

accelerator = Accelerator(cpu=True)
plain = Fuse()
inner = sgd(plain)
schedule = torch.optim.lr_scheduler.StepLR(inner, 100, gamma=0.5)
model, optimizer, loader, scheduler = accelerator.prepare(plain, inner, loader_of(4), schedule)
plan = autoaccum.autotune(model, loader, 8, loss_fn=mse_loss, optimizer=optimizer, device="virtual:1GiB", levers="none")
acc = autoaccum.Accumulator(model, optimizer, plan=plan, loss_fn=mse_loss, scheduler=scheduler)
steps = [acc.step(batch) for batch in loader]
found = {
    "processes": accelerator.num_processes,
    "wrapped": type(model).__name__,
    "sizes": [list(step.micro_batch_sizes) for step in steps],
    "kept": [len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)],
    "accumulator": distance(plain),
    "scheduler_steps": schedule.last_epoch,
}

accelerator.free_memory()
plain = Fuse()
model, optimizer, loader = accelerator.prepare(plain, sgd(plain), loader_of(plan.micro_batch))
follow_plan(accelerator, plan)
for inputs, targets in loader:
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
found["own"] = distance(plain)

gathered = [None, None]
dist.all_gather_object(gathered, found)
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
answer(gathered)
os._exit(0)  # a thread of gloo may still hold a tensor, which would abort Python's own end
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the second process is forked")
def test_two_processes_take_the_big_batchs_steps(run_child: Any, tmp_path: Any) -> None:
    """On two gloo ranks of Accelerate, one with less room: one plan, and the weights of one process with the big batch.

    By the Accumulator and by Accelerate's own accumulation. A prepared scheduler takes a step for each process, as it does
    after every optimizer step of Accelerate's.
    """
    for of_rank in run_child(TWO_RANKS.replace("STORE", str(tmp_path / "store"))):
        assert of_rank.pop("accumulator") <= 2e-6
        assert of_rank.pop("own") <= 2e-6
        assert of_rank == {
            "processes": 2,
            "wrapped": "DistributedDataParallel",
            "sizes": [[2, 2]] * 3,
            "kept": [1, 1, 1],
            "scheduler_steps": 6,
        }


REAL_MEMORY = """
import copy
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
import autoaccum
from autoaccum.devices.cpu import CpuDevice

torch.manual_seed(0)
data = torch.randn(6144, 64), torch.randn(6144, 1)
blocks = [nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64)) for _ in range(12)]
model = nn.Sequential(*blocks, nn.Linear(64, 1))
whole = copy.deepcopy(model)
def sgd(of):
    return torch.optim.SGD(of.parameters(), lr=0.03, momentum=0.9)

accelerator, device = Accelerator(cpu=True), CpuDevice()
prepared, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(TensorDataset(*data), batch_size=2048))
resident = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024
plan = autoaccum.autotune(prepared, loader, 2048, loss_fn=mse_loss, optimizer=optimizer, levers="none",
                          budget=resident + 512 * 2**20)
acc = autoaccum.Accumulator(prepared, optimizer, plan=plan, loss_fn=mse_loss)
with device.watched([]) as watch:
    replays = sum(acc.step(batch).replays for batch in loader)
optimizer = sgd(whole)
for inputs, targets in zip(data[0].split(2048), data[1].split(2048)):
    mse_loss(whole(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
ours, theirs = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (model, whole))
answer([plan.limited_by, plan.accumulation_steps, replays, watch.peak_bytes - plan.budget_bytes,
        float((ours - theirs).norm() / theirs.norm())])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the resident peak is read on Linux only")
def test_tuned_and_trained_inside_real_memory(run_child: Any) -> None:
    """512 MiB more than the process holds: the plan found there trains inside of it, with the big batch's weights."""
    limited_by, steps, replays, above_bytes, error = run_child(REAL_MEMORY)
    assert (limited_by, replays) == ("memory", 0)
    assert steps > 1
    assert above_bytes <= 12 * 2**20  # what a process holds besides its tensors wanders by so much
    assert error <= 2e-6
