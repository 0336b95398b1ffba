"""Preservation: whatever a training step does to the user's things, they are as they were, bit for bit."""

from __future__ import annotations

import pytest
from torch.optim import SGD, AdamW, Optimizer

from autoaccum.preserve import preserved

from .networks import CPU, bits, both_places, build_network, disturb, state_of, train, trained_network

# -- everything at once


@both_places
@pytest.mark.parametrize("error", [None, KeyError("lables"), KeyboardInterrupt()], ids=["success", "error", "interrupt"])
def test_everything_is_as_before(on_disk: bool, error: BaseException | None) -> None:
    """After a training step, an error or Ctrl-C the model, the optimizer and all generators are as before, bit for bit."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    try:
        with preserved(model, optimizer, device=CPU, on_disk=on_disk):
            disturb(model, optimizer)
            changed = state_of(model, optimizer)
            if error is not None:
                raise error
    except (KeyError, KeyboardInterrupt) as caught:
        assert caught is error
    unchanged = [name for name in before if changed[name] == before[name]]
    assert unchanged == ["identities", "members"]  # what was disturbed was seen to be
    assert state_of(model, optimizer) == before


@both_places
def test_restored_between_trials(on_disk: bool) -> None:
    """One snapshot restores any number of times, each time the same."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with preserved(model, optimizer, device=CPU, on_disk=on_disk) as snapshot:
        for _ in range(3):
            disturb(model, optimizer)
            snapshot.restore()
            assert state_of(model, optimizer) == before


def test_training_goes_on_as_if_nothing_was() -> None:
    """Five steps after a restored block end with the same parameters as five steps without it."""
    model, optimizer = trained_network()
    with preserved(model, optimizer, device=CPU):
        disturb(model, optimizer)
    for _ in range(5):
        train(model, optimizer)
    other, other_optimizer = trained_network()
    for _ in range(5):
        train(other, other_optimizer)
    assert [bits(value) for value in model.state_dict().values()] == [bits(value) for value in other.state_dict().values()]


@pytest.mark.parametrize("optimizer_class", [AdamW, SGD])
def test_optimizer_without_state(optimizer_class: type[Optimizer]) -> None:
    """An optimizer that had no state yet has none again."""
    model = build_network()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    with preserved(model, optimizer, device=CPU):
        train(model, optimizer)
    assert len(optimizer.state) == 0


def test_no_optimizer() -> None:
    """Without an optimizer the model is restored all the same."""
    model = build_network()
    before = state_of(model)
    with preserved(model, device=CPU):
        disturb(model, SGD(model.parameters(), lr=0.1))
    assert state_of(model) == before
