"""What a comparison of a whole batch with an uneven split finds, and which reason it gives."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import autoaccum
from autoaccum import Accumulator
from autoaccum.records import CheckResult

ROWS = 20
IGNORED = -100


def build(*between: nn.Module) -> nn.Sequential:
    """Six inputs, three outputs, and something between two layers; the same each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def checked(model: nn.Module, data: Any = None, *, micro_batch: int = 4, **options: Any) -> CheckResult:
    if "training_step" not in options:
        options.setdefault("loss_fn", nn.CrossEntropyLoss())
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=micro_batch, **options)
    return acc.check(batch() if data is None else data)


def one_reason(result: CheckResult) -> str:
    """The only reason of a check that was not exact."""
    assert not result.exact
    (reason,) = result.reasons
    return reason


# -- what is exact


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, values: Tensor) -> Tensor:
        return self.run(values)


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


def test_split_is_uneven() -> None:
    """Two thirds and one third: halves would hide a wrong weight in more than half of all orders."""
    assert checked(build()).micro_batch_sizes == (14, 6)


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


# -- layers


@pytest.mark.parametrize(("micro_batch", "momentum"), [(4, "0.02085"), (10, "0.05132"), (20, "0.05132")])
def test_batch_norm_is_named_with_its_momentum(micro_batch: int, momentum: str) -> None:
    """BatchNorm is named by its layer, with the momentum for as many micro-batches as training would have."""
    result = checked(build(nn.BatchNorm1d(8)), micro_batch=micro_batch)
    reason = one_reason(result)
    assert reason.startswith("Layer 1: BatchNorm normalises by the micro-batch it sees")
    assert f"momentum={momentum}, " in reason
    assert result.relative_error > 0.05


def test_every_batch_norm_is_named() -> None:
    """Several layers are named together; one that is frozen is not among them."""
    frozen = nn.BatchNorm1d(8).eval()
    reason = one_reason(checked(build(nn.BatchNorm1d(8), frozen, nn.Tanh(), nn.BatchNorm1d(8))))
    assert reason.startswith("Layer 1, 4: BatchNorm")


def test_batch_norm_without_running_averages() -> None:
    """Without averages there is no momentum to advise, and the layer is named as one that mixes rows."""
    reason = one_reason(checked(build(nn.BatchNorm1d(8, track_running_stats=False))))
    assert reason.startswith("Layer 1 (BatchNorm1d): its output for a row depends on the other rows")


class Whitening(nn.Module):
    """Normalises over the rows without being a BatchNorm."""

    def forward(self, values: Tensor) -> Tensor:
        return (values - values.mean(0)) / (values.std(0) + 0.1)


def test_own_layer_that_mixes_rows_is_named() -> None:
    """A layer of the user's own that normalises over the batch is named with its class."""
    reason = one_reason(checked(build(nn.Tanh(), Whitening())))
    assert reason.startswith("Layer 2 (Whitening): its output for a row depends on the other rows of the micro-batch")
    assert "No accumulation repairs that" in reason


def test_rows_mixed_between_layers() -> None:
    """Rows mixed by the forward of a module itself are laid on that module, and not on the innocent layer after it."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, rows: Tensor) -> Tensor:
            hidden = self.first(rows)
            return self.second((hidden - hidden.mean(0)).tanh())  # type: ignore[no-any-return]

    assert "Linear" not in one_reason(checked(Centred()))


def test_batch_norm_and_a_loss_that_compares_rows() -> None:
    """Two causes are told as two reasons."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return in_batch_negatives(model, batch)

    result = checked(build(nn.BatchNorm1d(8)), training_step=step)
    assert len(result.reasons) == 2
    assert "BatchNorm" in result.reasons[0]
    assert "compares the rows of a micro-batch with each other" in result.reasons[1]


def test_noise_is_told_as_noise() -> None:
    """Random numbers in the forward pass make two runs of one batch differ, and no more is concluded from that."""
    result = checked(build(Between(lambda values: values + torch.randn(values.shape, dtype=values.dtype))))
    assert "draws random numbers" in one_reason(result)


def test_one_number_for_each_forward_pass() -> None:
    """A number of whichever generator drawn once per pass, as for skipping layers, is the same for whole and parts."""

    def drawn(values: Tensor) -> Tensor:
        return values * (1 + random.random() + float(np.random.rand()) + torch.rand((), dtype=values.dtype))

    assert checked(build(Between(drawn), nn.Tanh())).exact


def test_hook_that_is_not_the_cause_is_not_named() -> None:
    """Where the loss is the cause, a hook that has no part in it is not blamed."""
    model = build(nn.Tanh())
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    reason = one_reason(checked(model, training_step=lambda model, batch: model(batch[0]).pow(2).sum()))
    assert "is a sum" in reason


def test_hooks_on_all_parameters_that_are_not_the_cause() -> None:
    """Hooks that treat all gradients alike leave the error as it is, and are not blamed for it."""
    model = build(nn.Tanh())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    reason = one_reason(checked(model, training_step=lambda model, batch: model(batch[0]).pow(2).sum()))
    assert "is a sum" in reason


# -- losses


def in_batch_negatives(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Each row is to find itself among all rows."""
    first = functional.normalize(model(batch[0]), dim=-1)
    second = functional.normalize(model(batch[0] * 1.1 + 0.1), dim=-1)
    return functional.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


def batch_dice(output: Tensor, target: Tensor) -> Tensor:
    """One overlap over all rows."""
    found, wanted = (output * 5).sigmoid(), functional.one_hot(target, 3)
    return 1 - 2 * (found * wanted).sum() / (found.pow(2).sum() + wanted.sum())


@pytest.mark.parametrize(
    "options", [{"training_step": in_batch_negatives}, {"loss_fn": batch_dice}], ids=["negatives", "dice"]
)
def test_loss_that_compares_rows(options: dict[str, Any]) -> None:
    """In-batch negatives and a Dice over the batch are no sum of their parts, and nothing is promised."""
    reason = one_reason(checked(build(nn.Tanh()), **options))
    assert "compares the rows of a micro-batch with each other" in reason
    assert "No accumulation repairs that" in reason


def test_loss_is_named() -> None:
    """The loss is called by its name: the function's, the class's, or the training step."""
    assert one_reason(checked(build(), loss_fn=batch_dice)).startswith("The loss batch_dice compares")
    assert one_reason(checked(build(), training_step=in_batch_negatives)).startswith("The loss of training_step compares")


def positions() -> dict[str, Tensor]:
    """Rows of five positions, of which 1 to 5 have labels."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (ROWS, 5), generator=generator)
    for row in range(ROWS):
        labels[row, 1 + (row * row) % 5 :] = IGNORED
    return {"x": torch.randn(ROWS, 5, 6, generator=generator), "labels": labels}


def over_positions(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def over_next_positions(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize(
    ("step", "given", "right"),
    [
        (over_positions, "samples", "weight=autoaccum.tokens('labels')"),
        (over_next_positions, "samples", "weight=autoaccum.tokens('labels', shift=True)"),
        (over_next_positions, autoaccum.tokens("labels"), "weight=autoaccum.tokens('labels', shift=True)"),
        (over_positions, autoaccum.tokens("labels", shift=True), "weight=autoaccum.tokens('labels')"),
        (lambda model, batch: model(batch["x"]).pow(2).mean(), autoaccum.tokens("labels"), 'weight="samples"'),
    ],
)
def test_right_weight_is_suggested(step: Any, given: Any, right: str) -> None:
    """A mean over something else than `weight=` counts is told with the call that counts it, and that call is exact."""
    reason = one_reason(checked(build(), positions(), training_step=step, weight=given))
    assert reason.endswith(f"Pass {right}.")
    weight = eval(right.removeprefix("weight="), {"autoaccum": autoaccum})
    assert checked(build(), positions(), training_step=step, weight=weight).exact


@pytest.mark.parametrize("own_precision", [True, False])
def test_class_weights_that_cannot_be_seen(own_precision: bool) -> None:
    """Class weights inside of a function are found as a mean over something else, with the shares, in any precision."""
    weight = torch.tensor([0.1, 1.0, 10.0])

    def hidden(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, weight=weight if own_precision else weight.to(output.dtype))

    result = checked(build(), loss_fn=hidden)
    reason = one_reason(result)
    assert "it is a mean over something else" in reason
    sums = [float(weight[part].double().sum()) for part in batch()[1].split((14, 6))]
    shares = [float(share) for share in re.findall(r"weighs the parts ([\d.]+) : ([\d.]+)", reason)[0]]
    assert shares == pytest.approx([part / sum(sums) for part in sums], abs=1e-3)
    assert result.dtype == ("float32" if own_precision else "float64")


@pytest.mark.parametrize("divisor", [1, ROWS])
def test_sum_and_share_of_the_whole(divisor: int) -> None:
    """A sum, also divided by the rows of the whole batch, adds up as it is and is scaled once too often: norm too small."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / divisor

    result = checked(build(), training_step=step)
    assert "is a sum, or is already divided by a number that belongs to the whole batch" in one_reason(result)
    assert result.norm_ratio < 0.8


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


def test_root_of_a_mean() -> None:
    """A root of a mean square is a nonlinear function of a mean, told with the parts that only the outcome knows."""

    def root(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, functional.one_hot(target, 3).to(output.dtype) * 5).sqrt()

    result = checked(build(), loss_fn=root)
    assert "is a nonlinear function of a mean" in one_reason(result)
    assert "take the mean last" in result.reasons[0]
    assert result.relative_error > 1e-4


def test_nothing_can_be_said_of_nan() -> None:
    """Where the gradient is NaN nothing is compared, and the batch is not called exact."""
    rows, targets = batch()
    rows[3] = torch.nan
    assert "NaN" in one_reason(checked(build(), (rows, targets)))


# -- hooks


def test_clamping_hook_is_named() -> None:
    """A hook that clamps the gradient of every micro-batch is named by its parameter."""
    model = build(nn.Tanh())
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
    reason = one_reason(checked(model))
    assert reason.startswith("Parameter 2.weight: a hook changes the gradient of every micro-batch")


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
