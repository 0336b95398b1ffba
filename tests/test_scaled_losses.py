"""A loss that its gradient scaler has multiplied already is told from one that has factors of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch).mean()
    return result


SCALED: dict[str, Callable[[torch.amp.GradScaler], Tensor]] = {
    "scaled": lambda scaler: scaler.scale(loss()),
    "scaled and divided by the steps": lambda scaler: scaler.scale(loss()) / 4,
    "divided and scaled": lambda scaler: scaler.scale(loss() / 4),
    "weighed afterwards": lambda scaler: scaler.scale(loss()).double() * 0.25,
}
NOT_SCALED: dict[str, Callable[[], Tensor]] = {
    "as it is": loss,
    "times a number": lambda: loss() * 65536,
    "times a tensor of the same value": lambda: loss() * torch.tensor(65536.0),
    "times a temperature that is trained": lambda: loss() * nn.Parameter(torch.tensor(4096.0)),
    "a leaf": lambda: torch.ones((), requires_grad=True),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_loss_is_refused(name: str) -> None:
    """The error says what to take out."""
    user = scaler()
    with pytest.raises(InvalidRequestError, match=r"already; expected the loss as it is\. Leave scaler\.scale"):
        refuse_scaled_loss(SCALED[name](user), user)


@pytest.mark.parametrize("name", NOT_SCALED)
def test_factors_of_the_loss_are_its_own(name: str) -> None:
    """Numbers and tensors that are not the scaler's are part of the loss, whether the scaler has been used or not."""
    user = scaler()
    refuse_scaled_loss(NOT_SCALED[name](), user)
    user.scale(loss())
    refuse_scaled_loss(NOT_SCALED[name](), user)


def test_nothing_is_run_again_to_look() -> None:
    """Below the factors of the loss there may be a checkpoint, of which nothing is read."""
    runs = 0

    def block(inputs: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return inputs * inputs.detach()

    user = scaler()
    user.scale(loss())
    inputs = INPUTS.clone().requires_grad_()
    refuse_scaled_loss(checkpoint(block, inputs, use_reentrant=False).sum() / 2, user)
    assert runs == 1


def test_accumulator_refuses_a_step_that_scales() -> None:
    """The first window raises, before any gradient or parameter is touched."""
    torch.manual_seed(0)
    model, user = nn.Linear(3, 1), scaler()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        scaled: Tensor = user.scale(model(batch).mean())
        return scaled

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    acc = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=2, scaler=user)
    with pytest.raises(InvalidRequestError, match="multiplied by scaler"):
        acc.step(INPUTS)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loop_of_one_s_own_that_scales_is_refused() -> None:
    """`window.backward` takes the loss unscaled."""
    torch.manual_seed(0)
    model, user = nn.Linear(3, 1), scaler()
    acc = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=2, scaler=user)
    with pytest.raises(InvalidRequestError, match="multiplied by scaler"), acc.window(INPUTS) as window:
        for micro_batch in window:
            window.backward(user.scale(model(micro_batch).mean()))


def test_one_scaler_may_serve_two() -> None:
    """As in a GAN: that the other one has used the scaler before means nothing."""
    torch.manual_seed(0)
    user = scaler()
    for _ in range(2):
        for _ in range(2):
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            acc = autoaccum.Accumulator(model, optimizer, training_step=mean_of, micro_batch=2, scaler=user)
            assert not acc.step(INPUTS).skipped
