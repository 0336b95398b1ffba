"""What a comparison of a whole batch with an uneven split finds, and which reason it gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import ROWS, Between, batch, build, checked, one_reason

# -- what is exact


def attend(values: Tensor) -> Tensor:
    """Attention within each row."""
    heads = values.reshape(len(values), 2, 4)
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4).reshape(len(values), 8)


class Recurrent(nn.Module):
    """An LSTM with dropout over three steps of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head = nn.LSTM(2, 8, 2, dropout=0.5, batch_first=True), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.inner(rows.reshape(-1, 3, 2))[0][:, -1])  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Attention with dropout over three steps of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head = nn.MultiheadAttention(2, 2, dropout=0.5, batch_first=True), nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        steps = rows.reshape(-1, 3, 2)
        return self.head(self.inner(steps, steps, steps)[0].flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "model",
    [
        build(nn.Tanh()),
        build(nn.LayerNorm(8), nn.GELU()),
        build(nn.GroupNorm(2, 8)),
        build(nn.Dropout(0.5)),
        build(Between(lambda values: functional.dropout(values, 0.5, training=True)), nn.Dropout(0.2)),
        build(Between(attend)),
        build(nn.BatchNorm1d(8).eval()),
        Recurrent(),
        Attending(),
    ],
    ids=[
        "plain",
        "layer-norm",
        "group-norm",
        "dropout",
        "functional",
        "attention",
        "frozen-batch-norm",
        "lstm",
        "multihead",
    ],
)
def test_exact(model: nn.Module) -> None:
    """Whatever keeps rows apart is exact to rounding, dropout of every kind included, and gives no reason."""
    result = checked(model)
    assert result.exact
    assert result.relative_error <= 1e-12
    assert result.norm_ratio == pytest.approx(1.0, abs=1e-12)
    assert (result.reasons, result.notes, result.dtype) == ((), (), "float64")


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 10.0])),
        functools.partial(functional.cross_entropy, weight=torch.tensor([0.1, 1.0, 10.0])),
        nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=["class-weights", "partial", "ignored", "sum"],
)
def test_known_losses_are_exact(loss_fn: Any) -> None:
    """A loss of torch that is recognised is exact with its class weights in any precision, ignored labels, or as a sum."""
    result = checked(build(), loss_fn=loss_fn)
    assert result.exact
    assert result.relative_error <= 1e-12


def test_term_that_does_not_depend_on_rows_is_exact() -> None:
    """A penalty on the weights counts once over the window."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        return functional.cross_entropy(model(batch[0]), batch[1]) + 0.1 * penalty

    assert checked(build(), training_step=step).exact


def test_hook_in_proportion_is_exact() -> None:
    """A hook that doubles a gradient doubles it before and after adding up alike."""
    model = build(nn.Tanh())
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    assert checked(model).exact


@pytest.mark.parametrize("form", ["division", "product"])
@pytest.mark.parametrize("micro_batch", [4, 5])
def test_loss_divided_by_the_number_of_micro_batches(form: str, micro_batch: int) -> None:
    """Divided twice, the step is that many times too small; the error and the ratio of norms say by how much."""
    steps = ROWS // micro_batch

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        return loss / steps if form == "division" else loss * (1 / steps)

    result = checked(build(), training_step=step, micro_batch=micro_batch)
    assert f"already divided by {steps}, the number of micro-batches" in one_reason(result)
    assert result.norm_ratio == pytest.approx(1 / steps)
    assert result.relative_error == pytest.approx(1 - 1 / steps)


def test_other_factor_is_exact() -> None:
    """A loss divided by a number that is not the number of micro-batches is a loss like any other."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) / 3

    assert checked(build(), training_step=step).exact


@pytest.mark.parametrize("form", ["half a square", "mean of two losses"])
def test_half_is_not_two_micro_batches(form: str) -> None:
    """Half a mean square, and the mean of two losses, are exact also where there happen to be two micro-batches."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = model(batch[0])
        if form == "half a square":
            return 0.5 * output.pow(2).mean()  # type: ignore[no-any-return]
        return (functional.cross_entropy(output, batch[1]) + output.abs().mean()) / 2  # type: ignore[no-any-return]

    assert checked(build(), training_step=step, micro_batch=10).exact


def test_nothing_can_be_said_of_nan() -> None:
    """Where the gradient is NaN nothing is compared, and the batch is not called exact."""
    rows, targets = batch()
    rows[3] = torch.nan
    assert "NaN" in one_reason(checked(build(), (rows, targets)))


def test_optimizer_in_the_backward_pass_is_named_and_not_run() -> None:
    """A hook that steps after each gradient is named by its parameter, and not run by the check."""
    model, ran = build(nn.Tanh()), []
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: ran.append(parameter))
    result = checked(model)
    assert one_reason(result).startswith("Parameter 0.bias: a hook runs after each gradient is accumulated")
    assert ran == []
    functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
    assert len(ran) == 1  # it is there again


# -- what micro-batches leave to each other


class MovingCentre(nn.Module):
    """Subtracts a running mean before it is moved by the rows it sees."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        output = (hidden - self.centre).tanh()
        moved = 0.5 * self.centre + 0.5 * hidden.detach().mean(0)
        if self.replaces:
            self.centre = moved
        else:
            self.centre.copy_(moved)
        return output


@pytest.mark.parametrize("replaces", [False, True])
def test_buffer_that_the_next_micro_batch_is_computed_with(replaces: bool) -> None:
    """Each part alone has the whole's gradient, but in training the second one sees what the first has left."""
    result = checked(build(MovingCentre(replaces)))
    assert "Buffer 1.centre" in one_reason(result)
    assert result.relative_error > 1e-3


def test_spectral_norm_moves_with_every_micro_batch() -> None:
    """Its power iteration goes on with every forward pass, so the weights differ between micro-batches."""
    torch.manual_seed(0)
    result = checked(nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(6, 3))))
    assert "0.weight_u" in one_reason(result)


def test_running_averages_that_are_not_used_are_no_reason() -> None:
    """Statistics that are kept for evaluation only, as GroupNorm with a counter would, change nothing."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, hidden: Tensor) -> Tensor:
            self.seen.add_(len(hidden))
            return hidden

    assert checked(build(Counting())).exact


def test_gradient_of_zero_is_not_exact() -> None:
    """Where there is no gradient, nothing was compared."""
    result = checked(build(), training_step=lambda model, data: (model(data[0]) * 0).sum())
    assert "zero, so nothing can be compared" in one_reason(result)
