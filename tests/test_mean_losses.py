"""What the cross entropies in a loss divide by, and when a window's micro-batches are weighed by something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum.mean_losses import DivisorWatch, divisors_of

LOGITS = torch.zeros(6, 3, requires_grad=True)
PIXELS = torch.zeros(2, 3, 4, 5, requires_grad=True)
LABELS = torch.tensor([0, 1, 2, -100, 0, 0])  # five that count, of which three of class 0
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])  # 3 * 1 + 2 + 3 = 8


def entropy(**more: Any) -> Tensor:
    return functional.cross_entropy(LOGITS, LABELS, **more)


DIVISORS: dict[str, tuple[Callable[[], Tensor], tuple[float, ...]]] = {
    "labels that count": (entropy, (5,)),
    "weights of classes": (lambda: entropy(weight=WEIGHTS), (8,)),
    "pixels": (lambda: functional.cross_entropy(PIXELS, torch.zeros(2, 4, 5).long()), (40,)),
    "a negative log likelihood": (lambda: functional.nll_loss(LOGITS, LABELS), (5,)),
    "divided": (lambda: entropy() / 4, (20,)),
    "multiplied by a number": (lambda: 0.5 * entropy(), (10,)),
    "multiplied by a tensor": (lambda: entropy() * torch.tensor(0.5), (10,)),
    "with another term": (lambda: entropy() + LOGITS.pow(2).mean(), (5,)),
    "two of them": (lambda: entropy() + entropy(weight=WEIGHTS), (5, 8)),
    "in another dtype": (lambda: functional.cross_entropy(LOGITS.double(), LABELS).float(), (5,)),
    "of shape (1,)": (lambda: entropy().reshape(1), (5,)),
    "a sum": (lambda: entropy(reduction="sum"), ()),
    "a mean of one's own": (lambda: entropy(reduction="none").mean(), ()),
    "times something that is trained": (lambda: entropy() * LOGITS.sum(), ()),
    "times nothing": (lambda: entropy() * 0, ()),
    "another loss": (lambda: LOGITS.pow(2).mean(), ()),
    "a leaf": (lambda: torch.ones((), requires_grad=True), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVISORS)
def test_divisors(name: str) -> None:
    """Read near the top of the loss, with its factors; nothing where the loss is no mean cross entropy."""
    make, expected = DIVISORS[name]
    assert divisors_of(make()) == expected


def test_label_smoothing_is_seen_through() -> None:
    """The part of a smoothed loss that is a cross entropy divides by the same, over its share of the loss."""
    assert divisors_of(entropy(label_smoothing=0.2)) == pytest.approx((5 / 0.8,))


def test_checkpointed_blocks_do_not_run_again() -> None:
    """Looking at the loss of a checkpointed model runs no part of it."""
    runs = 0

    def block(inputs: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return inputs.sin()

    loss = functional.cross_entropy(checkpoint(block, LOGITS, use_reentrant=False), LABELS)
    assert divisors_of(loss) == (5,)
    assert runs == 1


# -- one window


def said(*seen: tuple[Tensor, float]) -> list[str]:
    watch = DivisorWatch()
    return [text for loss, scale in seen if (text := watch.note(loss, scale)) is not None]


def test_shares_that_match_are_silent() -> None:
    """Micro-batches of 8 and 5 that count as 8 to 5 are weighed rightly."""
    assert not said((entropy(weight=WEIGHTS), 8 / 13), (entropy(), 5 / 13))


def test_shares_that_differ_are_told_once() -> None:
    """Counted alike, they are not, whatever comes after; the message has the figures."""
    (text,) = said((entropy(weight=WEIGHTS), 0.25), (entropy(), 0.25), (entropy(), 0.5))
    assert "divides by 8 in one micro-batch and by 5 in another, which count 0.25 and 0.25 of the window" in text


def test_micro_batch_that_does_not_count_is_passed_over() -> None:
    """A micro-batch of scale 0 compares with nothing."""
    nothing = functional.cross_entropy(LOGITS, torch.full((6,), -100))
    assert math.isnan(nothing.item())
    assert not said((nothing, 0.0), (entropy(), 0.5), (entropy(), 0.5))


# -- training


def told(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("a cross entropy in this loss divides by")


def weighted(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS)


def accumulator(**more: Any) -> autoaccum.Accumulator:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    return autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), **({"micro_batch": 2} | more))


BATCH = (torch.zeros(4, 3), torch.tensor([0, 0, 1, 2]))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"training_step": weighted}, 1),
        ({"training_step": weighted, "micro_batch": 4}, 0),
        ({"training_step": weighted, "weight": lambda batch: WEIGHTS[batch[1]].sum()}, 0),
        ({"training_step": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])}, 0),
        ({"loss_fn": nn.CrossEntropyLoss(weight=WEIGHTS)}, 0),
        ({"loss_fn": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")}, 0),
    ],
    ids=["weighted", "one micro-batch", "weighed by what it divides by", "not weighted", "torch's own", "a sum"],
)
def test_class_weights_in_a_step_are_told(more: dict[str, Any], expected: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first window says that classes have weights where micro-batches are weighed by rows; the second does not again."""
    acc = accumulator(**more)
    acc.step(BATCH)
    acc.step(BATCH)
    assert told(caplog) == expected


def test_class_weights_in_a_loop_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """In a loop of one's own as well."""
    model = nn.Linear(3, 3)
    acc = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
    with acc.window(BATCH) as window:
        for micro_batch in window:
            window.backward(weighted(model, micro_batch))
    assert told(caplog) == 1


def test_class_weights_in_a_models_own_loss_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Of a model that returns its loss too."""

    class Own(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(super().forward(x), labels, weight=WEIGHTS)

    model = Own(3, 3)
    acc = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
    acc.step({"x": BATCH[0], "labels": BATCH[1]})
    assert told(caplog) == 1
