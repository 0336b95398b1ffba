"""A loss that a gradient scaler has multiplied already is told from one that has factors of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoaccum
from autoaccum.errors import InvalidRequestError
from autoaccum.scaled_losses import refuse_scaled_loss

INPUTS = torch.ones(4, 3)


def scaler(scale: float = 2.0**16) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def loss() -> Tensor:
    torch.manual_seed(0)
    result: Tensor = nn.Linear(3, 1)(INPUTS).pow(2).mean()
    return result


SCALED: dict[str, Callable[[torch.amp.GradScaler], Tensor]] = {
    "scaled": lambda scaler: scaler.scale(loss()),
    "scaled and divided by the steps": lambda scaler: scaler.scale(loss()) / 4,
    "divided and scaled": lambda scaler: scaler.scale(loss() / 4),
    "weighed afterwards": lambda scaler: scaler.scale(loss()).float() * 0.25,
}
NOT_SCALED: dict[str, Callable[[], Tensor]] = {
    "as it is": loss,
    "times a large number": lambda: loss() * 65536,
    "times a tensor that is no power of two": lambda: loss() * torch.tensor(2000.0),
    "times a small power of two": lambda: loss() * torch.tensor(16.0),
    "times a temperature that is trained": lambda: loss() * nn.Parameter(torch.tensor(4096.0)),
    "times infinity": lambda: loss() * torch.tensor(torch.inf),
    "a leaf": lambda: torch.ones((), requires_grad=True),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("own", [True, False], ids=["own", "another"])
def test_scaled_loss_is_refused(name: str, own: bool) -> None:
    """By the scaler that is given and by one that is not, the error says by how much and where a scaler belongs."""
    user = scaler()
    with pytest.raises(InvalidRequestError, match=r"multiplied by 65536; expected the loss as it is\. Take scaler\.scale"):
        refuse_scaled_loss(SCALED[name](user), user if own else None)


def test_own_scale_is_told_at_any_size() -> None:
    """A scaler that has come down to 8 is still the same one."""
    user = scaler(8.0)
    with pytest.raises(InvalidRequestError, match="multiplied by 8;"):
        refuse_scaled_loss(user.scale(loss()), user)


@pytest.mark.parametrize("name", NOT_SCALED)
def test_factors_of_the_loss_are_its_own(name: str) -> None:
    """Numbers, and tensors that are not like a scaler's, are part of the loss."""
    refuse_scaled_loss(NOT_SCALED[name](), scaler())


@pytest.mark.parametrize("given", [True, False], ids=["scaler given", "none given"])
def test_accumulator_refuses_a_step_that_scales(given: bool) -> None:
    """The first window raises, before any gradient or parameter is touched."""
    torch.manual_seed(0)
    model, user = nn.Linear(3, 1), scaler()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        scaled: Tensor = user.scale(model(batch).mean())
        return scaled

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    acc = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=2, scaler=user if given else None)
    with pytest.raises(InvalidRequestError, match=r"Accumulator\(scaler=\.\.\.\)"):
        acc.step(INPUTS)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autotune_refuses_a_step_that_scales() -> None:
    """The search says so before training does."""
    user = scaler()
    with pytest.raises(InvalidRequestError, match="multiplied by 65536"):
        autoaccum.autotune(
            nn.Linear(3, 1),
            INPUTS,
            4,
            training_step=lambda model, batch: user.scale(model(batch).mean()),
            device="virtual:1GiB",
        )
