"""What the chosen setting brings beside every other one, and what a window of the Accumulator costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from overhead import compare
from tradeoffs import sweep_on

from autoaccum.devices.base import AbstractDevice

from .common import GPT, MIB, emptied, on_device

TARGET_BATCH = 32
ROOM_BYTES = 3072 * MIB
WINDOWS = ((1024, 8, 8192, 1024), (1024, 8, 1024, 128), (256, 4, 256, 16))  # width, layers, rows, micro-batch


def sweep(
    device: AbstractDevice, target: str = GPT, target_batch: int = TARGET_BATCH, room_bytes: int = ROOM_BYTES
) -> Iterator[dict[str, Any]]:
    """The chosen setting against an exhaustive sweep, both measured again in turn."""
    emptied(device)
    held = device.held_bytes(on_device(target, device).resident())
    emptied(device)
    yield sweep_on(partial(on_device, target, device), target_batch, device, held + room_bytes)


def windows(device: AbstractDevice, settings: tuple[tuple[int, int, int, int], ...] = WINDOWS) -> Iterator[dict[str, Any]]:
    """The Accumulator against a correct loop by hand, in turn on one model."""
    for setting in settings:
        yield compare(*setting, device=device)
