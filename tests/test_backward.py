"""Who else is in a loss: gradients go to the given parameters, and nobody else's are touched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum import backward
from autoaccum.backward import Backward


def received(parameters: Sequence[Tensor], losses: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients that these losses leave, one after the other."""
    run = Backward()
    for index, loss in enumerate(losses):
        run(loss, parameters, is_first=index == 0)
    return [parameter.grad for parameter in parameters]


@pytest.fixture
def pair() -> tuple[nn.Linear, nn.Linear]:
    """The part that is trained, and one that another optimizer has."""
    torch.manual_seed(0)
    return nn.Linear(3, 3), nn.Linear(3, 1)


def test_strangers_get_no_gradient(pair: tuple[nn.Linear, nn.Linear]) -> None:
    """What else the loss leads to, as a generator's loss to the discriminator, receives no gradient."""
    own, stranger = pair
    inputs = torch.randn(4, 3)
    expected = torch.autograd.grad(stranger(own(inputs)).mean(), own.weight)[0]
    found = received(list(own.parameters()), [stranger(own(inputs)).mean() / 2 for _ in range(2)])
    assert stranger.weight.grad is None and stranger.bias.grad is None
    assert torch.allclose(found[0], expected)  # type: ignore[arg-type]


def test_gradients_of_strangers_stay(pair: tuple[nn.Linear, nn.Linear]) -> None:
    """A gradient that a stranger holds, for its own optimizer, is neither added to nor removed."""
    own, stranger = pair
    held = torch.ones_like(stranger.weight)
    stranger.weight.grad = held
    received(list(own.parameters()), [stranger(own(torch.randn(4, 3))).mean()] * 1)
    assert stranger.weight.grad is held and torch.equal(held, torch.ones_like(held))


def test_parameters_before_the_own_ones_are_strangers_too(pair: tuple[nn.Linear, nn.Linear]) -> None:
    """Strangers on the near and on the far side of the own parameters get none."""
    stranger, own = pair
    received(list(own.parameters()), [own(stranger(torch.randn(4, 3))).mean()])
    assert stranger.weight.grad is None and own.weight.grad is not None


def test_own_parameters_off_the_graph_stay_without(pair: tuple[nn.Linear, nn.Linear]) -> None:
    """Own parameters that the loss does not lead to have no gradient, with strangers and without."""
    own, stranger = pair
    for model in (nn.Sequential(own, stranger), own):
        unused = nn.Parameter(torch.ones(1))
        found = received([*own.parameters(), unused], [model(torch.randn(4, 3)).mean()])
        assert [each is None for each in found] == [False, False, True]
        model.zero_grad()


def test_graph_is_walked_once(pair: tuple[nn.Linear, nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    """What else a loss leads to is looked for once for every kind of loss."""
    own, stranger = pair
    walked = []
    look = backward._look
    monkeypatch.setattr(backward, "_look", lambda *args: walked.append(1) or look(*args))
    received(list(own.parameters()), [stranger(own(torch.randn(4, 3))).mean() for _ in range(3)])
    assert walked == [1]
    Backward(look_for_others=False)(own(torch.randn(4, 3)).mean(), list(own.parameters()))
    assert walked == [1]


def test_without_looking_all_get_gradients(pair: tuple[nn.Linear, nn.Linear]) -> None:
    """With `look_for_others=False` the backward pass is the usual one, because parameters may stand in for others."""
    own, stranger = pair
    Backward(look_for_others=False)(stranger(own(torch.randn(4, 3))).mean(), list(own.parameters()))
    assert stranger.weight.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_without_strangers(pair: tuple[nn.Linear, nn.Linear], use_reentrant: bool) -> None:
    """Checkpointed parts have their gradients, whichever way they are checkpointed."""
    own, _ = pair
    inputs = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(own(inputs).mean(), own.weight)[0]
    losses = [checkpoint(own, inputs, use_reentrant=use_reentrant).mean() / 2 for _ in range(2)]
    assert torch.allclose(received(list(own.parameters()), losses)[0], expected)  # type: ignore[arg-type]


def test_own_parameters_around_a_checkpoint_keep_their_gradients(pair: tuple[nn.Linear, nn.Linear]) -> None:
    """Own parameters inside and outside of a reentrant checkpoint have their gradients, also when they held one before."""
    inside, outside = pair
    inputs, parameters = torch.randn(4, 3, requires_grad=True), [*inside.parameters(), *outside.parameters()]
    expected = torch.autograd.grad(outside(inside(inputs)).mean(), parameters)
    losses = [outside(checkpoint(inside, inputs, use_reentrant=True)).mean() / 2 for _ in range(2)]
    found = received(parameters, losses)
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True) if one is not None)
    assert all(each is not None for each in found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_with_strangers(pair: tuple[nn.Linear, nn.Linear], use_reentrant: bool) -> None:
    """With strangers in the loss, checkpointed parts have their gradients and the strangers have none."""
    own, stranger = pair
    inputs = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(stranger(own(inputs)).mean(), own.weight)[0]
    losses = [stranger(checkpoint(own, inputs, use_reentrant=use_reentrant)).mean() / 2 for _ in range(2)]
    found = received(list(own.parameters()), losses)
    assert torch.allclose(found[0], expected)  # type: ignore[arg-type]
    assert stranger.weight.grad is None and stranger.bias.grad is None


def test_reentrant_checkpointing_beside_held_gradients(pair: tuple[nn.Linear, nn.Linear]) -> None:
    """Gradients that strangers hold stay what they are beside reentrant checkpointing as well."""
    own, stranger = pair
    stranger.weight.grad = torch.ones_like(stranger.weight)
    loss = stranger(checkpoint(own, torch.randn(4, 3, requires_grad=True), use_reentrant=True)).mean()
    received(list(own.parameters()), [loss])
    assert torch.equal(stranger.weight.grad, torch.ones_like(stranger.weight)) and own.weight.grad is not None


@pytest.mark.parametrize("with_stranger", [False, True])
def test_scaler_multiplies_the_loss(pair: tuple[nn.Linear, nn.Linear], with_stranger: bool) -> None:
    """With a gradient scaler, gradients are those of the scaled loss."""
    own, stranger = pair
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inputs = torch.randn(4, 3)
    loss = (stranger(own(inputs)) if with_stranger else own(inputs)).mean()
    expected = torch.autograd.grad(loss, own.weight, retain_graph=True)[0] * 8
    Backward(scaler)(loss, list(own.parameters()))
    assert torch.allclose(own.weight.grad, expected)  # type: ignore[arg-type]
