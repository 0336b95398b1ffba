"""Ctrl-C waits for the end of a restoration, and a lost device stops no other part of it."""

from __future__ import annotations

import signal
import threading

import pytest
from torch import nn

from autoaccum.preserve import Snapshot, preserved

from .networks import CPU, LostDevice, both_places, disturb, state_of, trained_network


def interrupted(snapshot: Snapshot) -> None:
    """Let Ctrl-C arrive in the midst of a restore: modules are back, optimizers and tensors are not yet."""
    snapshot._optimizers.insert(0, lambda: signal.raise_signal(signal.SIGINT))


@both_places
def test_interrupt_during_restore_comes_after_it(on_disk: bool) -> None:
    """Ctrl-C that arrives while things are put back is raised once all of them are."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with pytest.raises(KeyboardInterrupt), preserved(model, optimizer, device=CPU, on_disk=on_disk) as snapshot:
        disturb(model, optimizer)
        interrupted(snapshot)
    assert state_of(model, optimizer) == before


def test_users_handler_gets_the_interrupt() -> None:
    """A handler that the user set for Ctrl-C is the one that is called, once, after the restore, and it stays set."""
    layer = nn.Linear(2, 2)
    calls: list[list[float]] = []

    def handler(number: int, frame: object) -> None:
        calls.append(layer.bias.tolist())

    nn.init.zeros_(layer.bias)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with preserved(layer, device=CPU) as snapshot:
            nn.init.ones_(layer.bias)
            interrupted(snapshot)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [[0, 0]]


def test_restored_in_a_thread() -> None:
    """In another thread than the main one, where no handler can be set, everything is restored all the same."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)

    def work() -> None:
        with preserved(model, optimizer, device=CPU):
            disturb(model, optimizer)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert state_of(model, optimizer) == before


def lost() -> None:
    """What a device whose context is lost says to everything."""
    raise LostDevice("CUDA error: device-side assert triggered")


def test_lost_device_does_not_hide_the_users_error() -> None:
    """Where restoring fails after an error, the user's error comes out, with a note on what could not be put back."""
    error = KeyError("lables")
    with pytest.raises(KeyError) as caught, preserved(nn.Linear(2, 2), device=CPU) as snapshot:
        snapshot._tensors.append(lost)
        raise error
    assert caught.value is error
    assert error.__notes__ == ["autoaccum could not put the model back: CUDA error: device-side assert triggered"]


def test_lost_device_after_success_is_an_error() -> None:
    """Where restoring fails after success, that error comes out."""
    with pytest.raises(LostDevice), preserved(nn.Linear(2, 2), device=CPU) as snapshot:
        snapshot._tensors.append(lost)


@pytest.mark.parametrize("where", ["_optimizers", "_tensors", "_ambient"])
def test_lost_device_does_not_stop_the_rest(where: str) -> None:
    """What can be put back is, though another part refuses."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with pytest.raises(KeyError), preserved(model, optimizer, device=CPU) as snapshot:
        disturb(model, optimizer)
        getattr(snapshot, where).insert(0, lost)
        raise KeyError("lables")
    assert state_of(model, optimizer) == before
