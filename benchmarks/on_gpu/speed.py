"""What the chosen setting brings beside every other one, and what a window of the Accumulator costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from overhead import compare
from tradeoffs import sweep_on

from autoaccum.devices.base import AbstractDevice

from .common import MIB, SMALLER_GPT, emptied, on_device

TARGET_BATCH = 32
ROOM_BYTES = 2048 * MIB
TUNING_S, SWEEPING_S = 30.0, 35.0
WINDOWS = ((1024, 8, 8192, 1024), (1024, 8, 1024, 128), (256, 4, 256, 16))  # width, layers, rows, micro-batch


def sweep(
    device: AbstractDevice,
    target: str = SMALLER_GPT,
    target_batch: int = TARGET_BATCH,
    room_bytes: int = ROOM_BYTES,
    tuning_s: float = TUNING_S,
    sweeping_s: float = SWEEPING_S,
) -> Iterator[dict[str, Any]]:
    """The chosen setting against a sweep of all others, as far as the time goes; both measured again in turn."""
    emptied(device)
    held = device.held_bytes(on_device(target, device).resident())
    emptied(device)
    load = partial(on_device, target, device)
    yield sweep_on(load, target_batch, device, held + room_bytes, tuning_s=tuning_s, sweeping_s=sweeping_s)


def windows(device: AbstractDevice, settings: tuple[tuple[int, int, int, int], ...] = WINDOWS) -> Iterator[dict[str, Any]]:
    """The Accumulator against a correct loop by hand, in turn on one model."""
    for setting in settings:
        yield compare(*setting, device=device)
