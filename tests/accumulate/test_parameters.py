"""Who receives gradients: the optimizer's own parameters, each once, and nobody else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, SparseAdam
from torch.utils.checkpoint import checkpoint

from autoaccum import Accumulator, Window


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def relative(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


# -- two networks, two optimizers


class Pair(nn.Module):
    """A generator and a discriminator, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()


def judge(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What the discriminator minimises: real and generated rows told apart."""
    real, noise = batch
    scores = model.discriminator(torch.cat([real, model.generator(noise).detach()]))  # type: ignore[operator, union-attr]
    return functional.softplus(-scores[: len(real)]).mean() + functional.softplus(scores[len(real) :]).mean()


def fool(model: nn.Module, batch: Tensor) -> Tensor:
    """What the generator minimises, through the discriminator."""
    return functional.softplus(-model.discriminator(model.generator(batch))).mean()  # type: ignore[operator, union-attr]


def two_rounds(micro_batch: int, limits: tuple[int, int] = (1000, 1000)) -> tuple[Tensor, list[bool]]:
    """Two rounds of discriminator and then generator; the parameters of both, and who held gradients in between."""
    pair, held = Pair(), []

    def within(step: Any, limit: int) -> Any:
        def run(model: nn.Module, batch: Any) -> Tensor:
            if len(batch[0] if isinstance(batch, tuple) else batch) > limit:
                raise torch.OutOfMemoryError("full")
            return step(model, batch)  # type: ignore[no-any-return]

        return run

    phases = []
    for part, step, limit in ((pair.discriminator, judge, limits[0]), (pair.generator, fool, limits[1])):
        optimizer = Adam(part.parameters(), lr=1e-2)
        phases.append(Accumulator(pair, optimizer, micro_batch=micro_batch, training_step=within(step, limit)))
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        real = torch.randn(20, 6, generator=generator, dtype=torch.float64)
        noise = torch.randn(20, 4, generator=generator, dtype=torch.float64)
        for acc, batch in zip(phases, ((real, noise), noise), strict=True):
            acc.step(batch)
            held.append(any(parameter.grad is not None for parameter in pair.parameters()))
    return values_of(pair), held


@pytest.mark.parametrize(("micro_batch", "limits"), [(5, (1000, 1000)), (20, (5, 7)), (7, (1000, 3))])
def test_generator_and_discriminator(micro_batch: int, limits: tuple[int, int]) -> None:
    """One accumulator for each: after two rounds both networks are where full batches take them, also with replays.

    The generator's phase leads through the discriminator and leaves no gradient in it.
    """
    expected, _ = two_rounds(20)
    found, held = two_rounds(micro_batch, limits)
    assert relative(found, expected) <= 1e-10
    assert held == [False] * 4
    assert relative(found, values_of(Pair())) > 1e-3


class AdversarialLater(nn.Module):
    """Learns to reconstruct; once it is told to, also to fool a judge that another optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge, self.adversarial = nn.Linear(3, 3), nn.Linear(3, 1), False

    def forward(self, batch: Tensor) -> Tensor:
        made = self.generator(batch)
        loss = functional.mse_loss(made, batch)
        return loss + self.judge(made).mean() if self.adversarial else loss


def test_others_that_a_later_loss_leads_to_receive_nothing() -> None:
    """A loss that begins to lead through another optimizer's parameters after some steps leaves no gradient there."""
    model = AdversarialLater()
    acc = Accumulator(model, SGD(model.generator.parameters(), lr=0.1), micro_batch=2)
    acc.step(torch.randn(4, 3))
    model.adversarial = True
    acc.step(torch.randn(4, 3))
    assert model.judge.weight.grad is None


def test_gradients_of_another_optimizer_are_kept() -> None:
    """What another optimizer's parameters hold when a window goes through them is neither added to nor dropped."""
    model = AdversarialLater()
    model.adversarial = True
    acc = Accumulator(model, SGD(model.generator.parameters(), lr=0.1), micro_batch=2)
    held = torch.full_like(model.judge.weight, 7.0)
    model.judge.weight.grad = held
    for _ in range(2):
        acc.step(torch.randn(4, 3))
        assert model.judge.weight.grad is held
    assert torch.equal(held, torch.full_like(held, 7.0))
    assert model.judge.bias.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_outside_of_the_optimizer(reentrant: bool) -> None:
    """Parameters that the optimizer does not have end without a gradient, also where a checkpoint hides the graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        start = model[0](batch)  # type: ignore[index]
        return checkpoint(model[1:], start, use_reentrant=reentrant).pow(2).mean()  # type: ignore[index, no-any-return]

    acc = Accumulator(model, SGD(model[0].parameters(), lr=0.1), micro_batch=2, training_step=step)
    before = values_of(model[0])
    acc.step(torch.randn(6, 3))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6
    assert not torch.equal(values_of(model[0]), before)


def beside_a_reentrant_checkpoint() -> tuple[nn.Sequential, Accumulator]:
    """The optimizer has the first two layers, the second of them behind a checkpoint that hides it; not the third."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        middle = checkpoint(model[1], model[0](batch), use_reentrant=True)  # type: ignore[index]
        return model[2](middle).pow(2).mean()  # type: ignore[index, no-any-return]

    optimizer = SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    return model, Accumulator(model, optimizer, micro_batch=2, training_step=step)


def test_others_beside_a_reentrant_checkpoint() -> None:
    """Where a reentrant checkpoint forbids to name the parameters, others end without a gradient and own ones train."""
    model, acc = beside_a_reentrant_checkpoint()
    before = [values_of(layer) for layer in model]
    acc.step(torch.randn(6, 3))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6
    moved = [not torch.equal(values_of(layer), values) for layer, values in zip(model, before, strict=True)]
    assert moved == [True, True, False]


def test_gradients_of_others_beside_a_reentrant_checkpoint() -> None:
    """A gradient that another optimizer's parameter holds is still the same afterwards."""
    model, acc = beside_a_reentrant_checkpoint()
    held = model[2].weight.grad = torch.ones(1, 4)
    acc.step(torch.randn(6, 3))
    assert model[2].weight.grad is held
    assert torch.equal(held, torch.ones(1, 4))


def test_gradients_of_others_beside_a_reentrant_checkpoint_that_fails() -> None:
    """The same where the backward pass raises."""
    model, acc = beside_a_reentrant_checkpoint()
    held = model[2].weight.grad = torch.ones(1, 4)

    def fails(gradient: Tensor) -> None:
        raise ZeroDivisionError

    model[1].weight.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        acc.step(torch.randn(6, 3))
    assert model[2].weight.grad is held


@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_that_join_the_optimizer(reentrant: bool) -> None:
    """A layer whose parameters join the optimizer after some windows is trained from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        middle = checkpoint(model[1], model[0](batch), use_reentrant=reentrant)  # type: ignore[index]
        return model[2](middle).pow(2).mean()  # type: ignore[index, no-any-return]

    model[1].requires_grad_(False)
    optimizer = SGD(model[0].parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=step)
    acc.step(torch.randn(4, 3))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    before = values_of(model[2])
    acc.step(torch.randn(4, 3))
    assert not torch.equal(values_of(model[2]), before)


def test_leaf_outside_of_the_model() -> None:
    """A tensor of the user's own that the loss leads to receives no gradient either, and keeps the one that it has."""
    model, scale = nn.Linear(3, 1), torch.ones((), requires_grad=True)
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=0.1),
        micro_batch=2,
        training_step=lambda model, x: (model(x) * scale).mean(),
    )
    acc.step(torch.ones(4, 3))
    assert scale.grad is None
    scale.grad = torch.full((), 7.0)
    acc.step(torch.ones(4, 3))
    assert scale.grad.item() == 7.0


# -- parameters of all kinds


def test_frozen_parameters_stay() -> None:
    """A parameter that does not require a gradient is left as it is, and the others take the whole batch's step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    reference, batch = copy.deepcopy(model), torch.randn(7, 3).double()
    reference(batch).pow(2).mean().backward()
    SGD(reference.parameters(), lr=0.5).step()
    acc = Accumulator(
        model, SGD(model.parameters(), lr=0.5), micro_batch=3, training_step=lambda model, batch: model(batch).pow(2).mean()
    )
    acc.step(batch)
    assert relative(values_of(model), values_of(reference)) <= 1e-12
    assert torch.equal(model[0].weight, reference[0].weight)


def test_tied_weights_count_once() -> None:
    """A weight that is embedding and output at once has the whole batch's gradient, both parts of it, once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))  # type: ignore[no-any-return]

    model, reference = Tied().double(), Tied().double()
    ids, targets = torch.arange(7), torch.arange(7).flip(0)
    functional.cross_entropy(reference(ids), targets).backward()
    SGD(reference.parameters(), lr=0.5).step()
    Accumulator(model, SGD(model.parameters(), lr=0.5), micro_batch=2, loss_fn=nn.CrossEntropyLoss()).step((ids, targets))
    assert model.head.weight is model.embedding.weight
    assert relative(model.head.weight.detach(), reference.head.weight.detach()) <= 1e-12


def test_unused_parameter_does_not_move() -> None:
    """A parameter that the window did not use stays without a gradient, so that AdamW's decay and momentum leave it alone.

    With a gradient of zeros it would move.
    """
    torch.manual_seed(0)

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.use_right = nn.Linear(3, 1), nn.Linear(3, 1), True

        def forward(self, batch: Tensor) -> Tensor:
            return (self.right if self.use_right else self.left)(batch).pow(2).mean()  # type: ignore[no-any-return]

    model = Either()
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    acc = Accumulator(model, optimizer, micro_batch=2)
    acc.step(torch.randn(6, 3))
    model.use_right = False
    before = values_of(model.right)
    acc.step(torch.randn(6, 3))
    assert torch.equal(values_of(model.right), before)
    model.right.weight.grad = torch.zeros_like(model.right.weight)
    optimizer.step()
    assert not torch.equal(values_of(model.right), before)


def test_parameter_used_in_one_micro_batch_only() -> None:
    """A parameter that only some micro-batches use has its share of the whole window's mean."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

        def forward(self, rows: Tensor, choice: Tensor) -> Tensor:
            chosen = [self.experts[int(index)](row) for row, index in zip(rows, choice, strict=True)]
            return torch.stack(chosen).pow(2).mean()

    model, reference = Experts().double(), Experts().double()
    rows, choice = torch.randn(6, 3).double(), torch.tensor([0, 0, 0, 0, 0, 1])
    reference(rows, choice).backward()
    SGD(reference.parameters(), lr=0.5).step()
    Accumulator(model, SGD(model.parameters(), lr=0.5), micro_batch=2).step((rows, choice))
    assert relative(values_of(model), values_of(reference)) <= 1e-12
    assert torch.equal(values_of(model.experts[2]), values_of(reference.experts[2]))


class Bag(nn.Module):
    """An embedding with sparse gradients, whose rows are averaged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 3, sparse=True)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(self.embedding(ids).mean(1), targets)


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_sparse_embedding(max_grad_norm: float | None) -> None:
    """A sparse embedding under SparseAdam ends where the whole batch takes it, also clipped.

    Torch's own clipping refuses sparse gradients.
    """
    model, reference = Bag().double(), Bag().double()
    ids, targets = torch.randint(20, (10, 4), generator=torch.Generator().manual_seed(1)), torch.zeros(10, 3).double()
    reference(ids, targets).backward()
    weight = reference.embedding.weight
    assert weight.grad is not None
    weight.grad = weight.grad.coalesce()
    norm = weight.grad.values().norm()
    if max_grad_norm is not None:
        weight.grad = weight.grad * min(1.0, max_grad_norm / (float(norm) + 1e-6))
    SparseAdam(reference.parameters(), lr=0.1).step()
    acc = Accumulator(model, SparseAdam(model.parameters(), lr=0.1), micro_batch=3, max_grad_norm=max_grad_norm)
    step = acc.step((ids, targets))
    assert relative(values_of(model), values_of(reference)) <= 1e-12
    assert step.grad_norm is None or step.grad_norm == pytest.approx(float(norm), rel=1e-12)


def test_sparse_gradients_do_not_grow() -> None:
    """A sparse gradient has one entry per row that was used, however many micro-batches added to it."""
    model, entries = Bag(), []

    class Counting(SparseAdam):
        def step(self, closure: Any = None) -> Any:
            gradient = model.embedding.weight.grad
            assert gradient is not None
            entries.append(gradient._nnz())
            return super().step(closure)

    ids = torch.arange(4).repeat(16, 1)
    Accumulator(model, Counting(model.parameters(), lr=0.1), micro_batch=1).step((ids, torch.zeros(16, 3)))
    assert entries == [4]


def test_parameter_groups_and_shared_lists() -> None:
    """Groups with rates of their own are stepped as they are, and a model of several modules has one window."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    reference, batch = copy.deepcopy(model), torch.randn(5, 3).double()

    def optimizer(model: nn.Module) -> SGD:
        return SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.0}], lr=1.0)  # type: ignore[index]

    reference(batch).pow(2).mean().backward()
    optimizer(reference).step()
    Accumulator(model, optimizer(model), micro_batch=2, training_step=lambda model, batch: model(batch).pow(2).mean()).step(
        batch
    )
    assert relative(values_of(model), values_of(reference)) <= 1e-12


def test_parameters_unfrozen_on_the_way_are_trained() -> None:
    """A layer that is unfrozen after some windows is trained from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    acc = Accumulator(
        model, SGD(model.parameters(), lr=0.5), micro_batch=2, training_step=lambda model, batch: model(batch).pow(2).mean()
    )
    before = values_of(model[0])
    acc.step(torch.randn(4, 3))
    assert torch.equal(values_of(model[0]), before)
    model[0].requires_grad_(True)
    acc.step(Window([torch.randn(2, 3), torch.randn(3, 3)]))
    assert not torch.equal(values_of(model[0]), before)
