"""What the chosen setting brings beside every other one, and what a window of the Accumulator costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from overhead import compare
from tradeoffs import sweep_on

from autoaccum.devices.base import AbstractDevice

from .common import GPT, MIB, emptied, on_device

TARGET_BATCH = 16
ROOM_BYTES = 3072 * MIB
SWEEPING_S = 45.0
WINDOWS = ((1024, 8, 8192, 1024), (1024, 8, 1024, 128), (256, 4, 256, 16))  # width, layers, rows, micro-batch


def sweep(
    device: AbstractDevice,
    target: str = GPT,
    target_batch: int = TARGET_BATCH,
    room_bytes: int = ROOM_BYTES,
    sweeping_s: float = SWEEPING_S,
) -> Iterator[dict[str, Any]]:
    """The chosen setting against a sweep of all others, as far as the time goes; both measured again in turn."""
    emptied(device)
    held = device.held_bytes(on_device(target, device).resident())
    emptied(device)
    load = partial(on_device, target, device)
    yield sweep_on(load, target_batch, device, held + room_bytes, sweeping_s=sweeping_s)


def windows(device: AbstractDevice, settings: tuple[tuple[int, int, int, int], ...] = WINDOWS) -> Iterator[dict[str, Any]]:
    """The Accumulator against a correct loop by hand, in turn on one model."""
    for setting in settings:
        yield compare(*setting, device=device)
