"""What a recorder notes while something runs."""

from __future__ import annotations

import gc

import pytest
import torch

from autoaccum.prediction.recorder import Recorder


def test_recorder_notes_sizes_before_rounding() -> None:
    """Sizes are the bytes that were asked for, in the order in which storages appear."""
    recorder = Recorder()
    with recorder.recording():
        first = torch.ones(3)
        second = first + 1
        del first
    trace = recorder.trace(rows=1)
    assert (trace.events, trace.sizes) == ((0, 1, ~0), (12, 12))
    assert second.shape == (3,)


def test_recorder_counts_no_view_and_nothing_in_place() -> None:
    """Views and operations in place make no event."""
    recorder = Recorder()
    with recorder.recording():
        values = torch.ones(4, 4)
        values.view(16).add_(1)
        values.t().mul_(2)
    assert recorder.trace(rows=1).events == (0,)


def test_recorder_follows_a_storage_that_grows() -> None:
    """A storage that is given another size is freed and allocated."""
    recorder = Recorder()
    with recorder.recording():
        values = torch.ones(4)
        values.resize_(1000)
    trace = recorder.trace(rows=1)
    assert (trace.events, trace.sizes) == ((0, ~0, 1), (16, 4000))


def test_recorder_pauses() -> None:
    """What runs while paused leaves no event."""
    recorder = Recorder()
    with recorder.recording():
        with recorder.paused():
            host = torch.ones(64)
        placed = host * 2
    assert list(recorder.trace(rows=1).sizes) == [256, 256]  # an operand is seen when it is used
    assert placed.shape == (64,)


@pytest.mark.parametrize("kept", [True, False])
def test_workspace_is_an_event(kept: bool) -> None:
    """A library's workspace is allocated, and freed at once unless it is kept."""
    recorder = Recorder()
    with recorder.recording():
        recorder.workspace(4096, kept=kept)
    trace = recorder.trace(rows=1)
    assert (trace.events, trace.sizes, trace.kinds) == ((0,) if kept else (0, ~0), (4096,), ("workspaces",))


def test_first_name_of_a_block_holds() -> None:
    """What a block was first said to hold stays, as a weight that is a buffer of an optimizer stays a weight."""
    recorder, tensor = Recorder(), torch.ones(4)
    with recorder.recording():
        recorder.hold([tensor], "weights")
        recorder.hold([tensor], "optimizer state")
    assert recorder.trace(rows=1).kinds == ("weights",)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_as_it_was(enabled: bool) -> None:
    """The collector waits while recording and is then as the caller had it, even after an error."""
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), Recorder().recording():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
