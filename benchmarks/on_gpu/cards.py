"""Smaller cards emulated by a memory fraction: the limit that a probe finds, against that of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import NothingFitsError
from autoaccum.request import Request
from autoaccum.tune import probe_workload
from autoaccum.workload import Workload

from .common import GIB, GPT, RESNET, emptied, on_device, outcome_of

CARDS_BYTES = (8 * GIB, 12 * GIB, 24 * GIB)
MODELS = {"gpt": GPT, "resnet": RESNET}
STEPS, MICRO_BATCHES = 3, 2
Ending = Literal["fits", "fits after a flush", "out of memory"]


def run(
    device: AbstractDevice, cards_bytes: tuple[int, ...] = CARDS_BYTES, models: dict[str, str] = MODELS
) -> Iterator[dict[str, Any]]:
    """One row for each card and model; cards that are larger than this one are left out, and said to be."""
    for card_bytes in cards_bytes:
        for name, target in models.items():
            if card_bytes > device.total_bytes():
                yield {"card_bytes": card_bytes, "model": name, "not_run": "this card is smaller"}
                continue
            yield {"card_bytes": card_bytes, "model": name, **limits(device, target, card_bytes)}


def limits(device: AbstractDevice, target: str, card_bytes: int) -> dict[str, Any]:
    """What the probe says, what a plain loop comes to, and whether they agree."""
    emptied(device)
    workload = on_device(target, device)
    plain_loop(workload, device, 2)  # kernels are loaded, outside of the allocator, before the card's size is divided
    with device.limited_to(card_bytes):
        try:
            result = probe_workload(workload, Request(budget=card_bytes), device=device)
        except NothingFitsError as error:
            return {"probe": 0, "trials": [outcome_of(trial) for trial in error.trials], "ok": False}
        tried: dict[int, Ending] = {}

        def ending(rows: int) -> Ending:
            if rows not in tried:
                tried[rows] = plain_loop(workload, device, rows)
            return tried[rows]

        true = largest(lambda rows: ending(rows) == "fits", result.max_micro_batch)
    return {
        "probe": result.max_micro_batch,
        "limited_by": result.limited_by,
        "evidence": result.evidence,
        "true": true,
        "trials": [outcome_of(trial) for trial in result.trials],
        "plain": [f"{rows} {tried[rows]}" for rows in sorted(tried)],
        "ok": result.max_micro_batch == true,
    }


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest size that fits where all smaller ones do: from a guess outwards, then by halves; 0 where none does."""
    low, high, step = 0, guess + 1, 1
    while fits(high):
        low, high, step = high, high + step, 2 * step
    step = 1
    while low == 0 and high > 1:
        below = max(1, high - step)
        if fits(below):
            low = below
        else:
            high, step = below, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plain_loop(workload: Workload, device: AbstractDevice, rows: int) -> Ending:
    """Three optimizer steps of two micro-batches as anyone would write them, with nothing of autoaccum's around them."""
    emptied(device)
    model, batch = workload.module, workload.source.take(rows)
    failed = False
    with device.watched(list(model.parameters())) as watch:
        try:
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(STEPS):
                for _ in range(MICRO_BATCHES):
                    (workload.loss(device.place(batch)) / MICRO_BATCHES).backward()
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError:
            failed = True
    optimizer = None
    model.zero_grad()
    emptied(device)
    if failed:
        return "out of memory"
    return "fits after a flush" if watch.allocator_retries else "fits"
