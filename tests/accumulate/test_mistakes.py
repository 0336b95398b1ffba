"""Habits of loops written by hand that would make a window wrong: refused, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from autoaccum import Accumulator, tokens
from autoaccum.errors import InvalidRequestError

Batch = tuple[Tensor, Tensor]


@pytest.fixture
def model() -> nn.Module:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def zero_first(optimizer: SGD, loss: Tensor) -> None:
    optimizer.zero_grad()


def zero_in_place(optimizer: SGD, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)


def step_too(optimizer: SGD, loss: Tensor) -> None:
    optimizer.step()


def backward_too(optimizer: SGD, loss: Tensor) -> None:
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]


HABITS = [
    (zero_first, "cleared"),
    (zero_in_place, "cleared"),
    (step_too, "changed the parameters"),
    (backward_too, "backward"),
]


@pytest.mark.parametrize(("habit", "text"), HABITS, ids=lambda value: getattr(value, "__name__", ""))
def test_training_step_that_touches_gradients(model: nn.Module, habit: Callable[..., None], text: str) -> None:
    """A step that clears, steps or runs backward itself is refused in the first window, which is undone."""
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = loss_of(model, batch)
        habit(optimizer, loss)
        return loss

    acc = Accumulator(model, optimizer, micro_batch=4, training_step=step)
    with pytest.raises(InvalidRequestError, match=rf"{text}.*a training step returns the loss and does no more"):
        acc.step(batch())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("habit", "text"), HABITS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("at", [1, 2])
def test_loop_of_ones_own_that_touches_gradients(model: nn.Module, habit: Callable[..., None], text: str, at: int) -> None:
    """In a loop of one's own as well, also after the last micro-batch."""
    optimizer = SGD(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, micro_batch=4, loss_fn=functional.cross_entropy)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        pytest.raises(InvalidRequestError, match=r"backward, step and zero_grad happen here"),
        acc.window(batch()) as window,
    ):
        for index, micro_batch in enumerate(window):
            loss = loss_of(model, micro_batch)
            other = loss_of(model, micro_batch)
            window.backward(loss)
            if index == at:
                habit(optimizer, other)
    if habit is not step_too:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_gradient_penalty_is_no_mistake(model: nn.Module) -> None:
    """A step may differentiate by itself, as gradient penalties do, as long as it leaves the parameters' gradients alone."""
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return output.pow(2).mean() + slope.pow(2).sum(1).mean()

    acc = Accumulator(model, optimizer, micro_batch=5, training_step=step)
    assert not acc.step(batch()).skipped
    assert acc.check(batch()).exact


@pytest.mark.parametrize(("weight", "told"), [("samples", True), (tokens("labels"), False)])
def test_ignored_labels_weighed_by_rows_are_told(weight: Any, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Labels of -100 under the default weight are most likely a loss over tokens: said once, with the remedy."""
    torch.manual_seed(0)
    model = nn.Embedding(9, 9)
    labels = torch.randint(9, (6, 4))
    labels[0, 1:] = -100

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=step, weight=weight)
    for _ in range(2):
        acc.step({"ids": torch.randint(9, (6, 4)), "labels": labels})
    assert caplog.text.count("autoaccum.tokens('labels')") == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, 1),
        ({"weight": lambda batch: len(batch[1])}, 0),
        ({"micro_batch": 6}, 0),
        ({"loss_fn": functional.cross_entropy}, 0),
    ],
    ids=["default", "weight", "one-micro-batch", "torch's"],
)
def test_loss_of_ones_own_is_taken_at_its_word_aloud(
    options: dict[str, Any], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss that nobody knows and nobody has said a weight of may not split evenly: said once, with what tells."""
    class_weight = torch.tensor([0.1, 1.0, 10.0])
    model = nn.Linear(4, 3)
    given = {"micro_batch": 2, "loss_fn": lambda o, t: functional.cross_entropy(o, t, weight=class_weight), **options}
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), **given)
    for _ in range(2):
        acc.step((torch.randn(6, 4), torch.randint(3, (6,))))
    assert caplog.text.count("Accumulator.check(batch) tells") == told


def test_time_axis_is_not_cut_in_silence() -> None:
    """Where the model takes time first and every tensor has two dimensions in common, the user is asked."""
    model = nn.LSTM(6, 3)
    acc = Accumulator(
        model, SGD(model.parameters(), lr=0.1), micro_batch=3, training_step=lambda m, b: m(b[0])[0].sub(b[1]).pow(2).mean()
    )
    data = (torch.randn(7, 10, 6), torch.randn(7, 10, 3))
    with pytest.raises(InvalidRequestError, match="may be time"):
        acc.step(data)
    with pytest.raises(InvalidRequestError, match="may be time"):
        acc.check(data)


@pytest.mark.parametrize("with_loss_fn", [True, False])
def test_loss_function_beside_a_training_step_is_told(
    model: nn.Module, with_loss_fn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss function that a training step leaves unused is said to be, once."""
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=0.1),
        micro_batch=5,
        loss_fn=functional.cross_entropy if with_loss_fn else None,
        training_step=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    )
    acc.step(batch())
    acc.step(batch())
    assert caplog.text.count("loss_fn is not used") == with_loss_fn


@pytest.mark.parametrize("place", ["first", "last"])
def test_table_with_a_largest_norm_is_no_mistake(place: str) -> None:
    """Embeddings with `max_norm` are scaled down while they are read, by the model and not by the loop."""
    torch.manual_seed(0)
    table, head = nn.Embedding(9, 4, max_norm=0.5).double(), nn.Linear(4, 3).double()
    model = nn.ModuleList([table, head] if place == "first" else [head, table])
    ids, labels = torch.randint(0, 9, (12,)), torch.randint(3, (12,))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(head(table(batch[0])), batch[1])

    step(model, (ids, labels))  # all that are read have their norm
    expected = torch.autograd.grad(step(model, (ids, labels)), [table.weight, head.weight])
    before = [table.weight.detach().clone(), head.weight.detach().clone()]
    Accumulator(model, SGD(model.parameters(), lr=1.0), training_step=step, micro_batch=5).step((ids, labels))
    moved = [old - new.detach() for old, new in zip(before, (table.weight, head.weight), strict=True)]
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(moved, expected, strict=True))
