"""Why a split differs: which layer, which loss, which weight."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoaccum

from .models import IGNORED, ROWS, Between, batch, build, checked, one_reason


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


def test_root_of_a_mean() -> None:
    """A root of a mean square is a nonlinear function of a mean, told with the parts that only the outcome knows."""

    def root(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, functional.one_hot(target, 3).to(output.dtype) * 5).sqrt()

    result = checked(build(), loss_fn=root)
    assert "is a nonlinear function of a mean" in one_reason(result)
    assert "take the mean last" in result.reasons[0]
    assert result.relative_error > 1e-4


def test_clamping_hook_is_named() -> None:
    """A hook that clamps the gradient of every micro-batch is named by its parameter."""
    model = build(nn.Tanh())
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
    reason = one_reason(checked(model))
    assert reason.startswith("Parameter 2.weight: a hook changes the gradient of every micro-batch")
