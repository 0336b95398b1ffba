"""The sentences: each names what it is about, and says what can be done."""

from __future__ import annotations

import pytest

from autoaccum.checking import reasons


@pytest.mark.parametrize(
    ("momentum", "steps", "corrected"),
    [(0.1, 8, "0.01308"), (0.1, 2, "0.05132"), (0.01, 4, "0.002509"), (1.0, 4, "1")],
)
def test_momentum_that_repairs_running_averages(momentum: float, steps: int, corrected: str) -> None:
    """With k micro-batches, 1 - (1 - m)^(1/k) moves the averages as one batch does; plain use at 0.1 and 8 has 0.57."""
    said = reasons.batch_norm(["layer"], momentum, steps)
    assert f"momentum={corrected}, " in said
    assert f"with {steps} of them" in said
    assert 1 - (1 - float(corrected)) ** steps == pytest.approx(momentum, rel=1e-3)


def test_batch_norm_is_not_promised_a_repair() -> None:
    """The momentum repairs the averages only, and the sentence says that the gradient stays as it is."""
    said = reasons.batch_norm(["backbone.bn"], 0.1, 4)
    assert said.startswith("Layer backbone.bn: BatchNorm")
    assert "leaves the gradient as it is" in said
    assert "GroupNorm, LayerNorm or BatchNorm in eval mode would be exact" in said


def test_many_names_are_cut_short() -> None:
    """Five names are shown, and the others are counted."""
    said = reasons.batch_norm([f"bn{index}" for index in range(8)], 0.1, 2)
    assert said.startswith("Layer bn0, bn1, bn2, bn3, bn4 and 3 more: ")


def test_layer_without_a_name() -> None:
    """The model itself has no name among its own modules."""
    assert reasons.batch_norm([""], 0.1, 2).startswith("Layer the model itself: ")
    assert "the model itself (Net)" in reasons.mixing_layer("", "Net")
    assert "Layer head.norm (Whitening)" in reasons.mixing_layer("head.norm", "Whitening")


def test_weight_is_suggested_where_one_matches() -> None:
    """Both sets of shares are told, with the call that matches or what such a call has to count."""
    matching = reasons.other_weight("The loss f", [0.75, 0.25], [0.5, 0.5], "weight=autoaccum.tokens('labels')")
    assert matching.endswith("0.75 : 0.25 where weight= says 0.5 : 0.5. Pass weight=autoaccum.tokens('labels').")
    other = reasons.other_weight("The loss f", [0.75, 0.25], [0.5, 0.5], None)
    assert "0.75 : 0.25 where weight= says 0.5 : 0.5" in other
    assert "a function micro_batch -> number" in other


def test_number_of_micro_batches_is_told() -> None:
    """A loss that is divided already is told by what."""
    assert "divided by 4, the number of micro-batches" in reasons.already_divided(4.0)


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (reasons.RANDOM, ("draws random numbers", "Turn that off")),
        (reasons.NOT_A_NUMBER, ("NaN", "another batch")),
        (reasons.hooks_on_gradients(["a.weight"]), ("Parameter a.weight", "max_grad_norm=")),
        (reasons.optimizer_in_backward(["a.weight"]), ("Parameter a.weight", "the window steps once")),
        (reasons.compares_rows("The loss f"), ("The loss f compares", "in-batch negatives", "No accumulation repairs that")),
        (reasons.is_a_sum("The loss f"), ("The loss f is a sum", "Return the mean")),
        (reasons.nonlinear("The loss f", [0.8, 0.3]), ("The loss f is a nonlinear", "0.8 : 0.3", "take the mean last")),
    ],
)
def test_sentence_says_what_and_what_to_do(said: str, parts: tuple[str, ...]) -> None:
    """Each reason names its subject and a way out, and is a whole sentence."""
    assert all(part in said for part in parts)
    assert said.endswith(".")
