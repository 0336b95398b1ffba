"""The optimizer is as it was: groups, state, and what schedulers leave."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

from autoaccum.preserve import preserved

from .networks import CPU, bits, build_network, state_of, train, trained_network


def test_parameter_group_that_was_added_is_gone() -> None:
    """A parameter group that a step adds is gone, and one that it takes out is back, each the same object."""
    model = build_network()
    optimizer = SGD([{"params": [model[0].weight], "lr": 1.0}, {"params": [model[0].bias], "lr": 2.0}])
    groups = list(optimizer.param_groups)
    with preserved(model, optimizer, device=CPU):
        optimizer.add_param_group({"params": [model[4].weight]})
        del optimizer.param_groups[0]
    assert [id(group) for group in optimizer.param_groups] == [id(group) for group in groups]
    assert [group["lr"] for group in groups] == [1.0, 2.0]
    assert groups[0]["params"][0] is model[0].weight


def test_learning_rate_that_is_a_tensor() -> None:
    """A learning rate that is a tensor has its value back in the same tensor."""
    model = build_network()
    rate = torch.tensor(0.1)
    optimizer = AdamW(model.parameters(), lr=rate)
    with preserved(model, optimizer, device=CPU):
        rate.mul_(3)
        optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_state_tensors_stay_the_same() -> None:
    """Moments that were there are the same tensors afterwards, so that what holds them, holds the right ones."""
    model = build_network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    before = bits(moment)
    with preserved(model, optimizer, device=CPU):
        train(model, optimizer)
        optimizer.state.clear()
        train(model, optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"] is moment
    assert bits(moment) == before


def test_state_dict_that_was_loaded() -> None:
    """Loading another state inside the block leaves no trace: groups, values and moments are as before."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with preserved(model, optimizer, device=CPU):
        other = copy.deepcopy(optimizer.state_dict())
        other["param_groups"][0]["lr"] = 9.0
        optimizer.load_state_dict(other)
        train(model, optimizer)
    assert state_of(model, optimizer) == before


def test_scheduler_made_inside_leaves_no_mark() -> None:
    """The initial rates that a scheduler writes into the optimizer are gone, and the rate is the one before."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with preserved(model, optimizer, device=CPU):
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
        assert "initial_lr" in optimizer.param_groups[0]
    assert state_of(model, optimizer) == before


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and holds a slow copy of the weights, a counter and a log."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups[0]["params"], dict(base.defaults))
        self.slow = [parameter.detach().clone() for parameter in base.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(parameter.detach(), 0.5)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
def test_optimizer_inside_an_optimizer(trained: bool) -> None:
    """What wraps another optimizer is as before with it: its state, and tensors and counters that the wrapper holds."""
    model = build_network()
    base = AdamW(model.parameters(), lr=0.1)
    optimizer = Lookahead(base)
    if trained:
        train(model, optimizer)
    before, slow, steps = state_of(model, base), [bits(tensor) for tensor in optimizer.slow], optimizer.steps
    with preserved(model, optimizer, device=CPU) as snapshot:
        train(model, optimizer)
        snapshot.restore()
        train(model, optimizer)
        optimizer.slow = [torch.zeros(1)]
    assert state_of(model, base) == before
    assert [bits(tensor) for tensor in optimizer.slow] == slow
    assert optimizer.steps == steps
