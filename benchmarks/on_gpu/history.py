"""A history that torch's allocator recorded of itself, replayed by our model of that allocator: equal, to the byte?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoaccum.devices.base import AbstractDevice
from autoaccum.prediction.allocator import AllocatorSettings, replay
from autoaccum.prediction.history import events_of

from .common import emptied, is_cuda

Entry = tuple[int, int, str]
MOST_ENTRIES = 1_000_000
ROWS = (4, 24, 9, 32, 17)


class NotEmptyError(Exception):
    """The allocator cannot be emptied."""


def run(device: AbstractDevice) -> Iterator[dict[str, Any]]:
    """Training with batches of changing sizes: with all the memory there is, and where the cache has to be given back."""
    place = device.torch_device
    if not is_cuda(device):
        yield {"not_run": "only torch's CUDA allocator records its history"}
        return
    settings = AllocatorSettings.parse(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    entries, stats = recorded(device)
    yield {"case": "all memory", **compared(entries, stats, settings, None)}
    if settings.expandable_segments:  # a fraction refuses these by other figures than what is mapped (see `replay`)
        return
    case = {"case": "a cap under which the cache is given back"}
    limit = flushing_limit(entries, stats, settings)
    if limit is None:
        yield {**case, "not_run": "the replay finds no cap at which this training flushes and still fits"}
        return
    total = torch.cuda.get_device_properties(place).total_memory  # what a fraction is a fraction of
    torch.cuda.set_per_process_memory_fraction(limit / total, place)
    try:
        entries, stats = recorded(device)
    except NotEmptyError as error:
        yield {**case, "not_run": str(error)}
        return
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place)
    yield {**case, **compared(entries, stats, settings, int(limit / total * total))}


def flushing_limit(entries: list[Entry], stats: dict[str, int], settings: AllocatorSettings) -> int | None:
    """A cap under which these events take a flush and fit, as the replay has it; None where there is none."""
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    events, sizes = events_of(entries)
    for part in range(1, 16):
        limit = reserved - (reserved - allocated) * part // 16
        outcome = replay(events, sizes, settings=settings, limit_bytes=limit)
        if outcome.fits and outcome.flushes:
            return limit
    return None


def recorded(device: AbstractDevice) -> tuple[list[Entry], dict[str, int]]:
    """The history of some training, and the allocator's counters after it, from an allocator that begins empty."""
    place = device.torch_device
    emptied(device)
    left = torch.cuda.memory_reserved(place)
    if left:
        raise NotEmptyError(f"libraries keep {left} bytes, and a replay begins with none")
    torch.cuda.reset_peak_memory_stats(place)
    torch.cuda.reset_accumulated_memory_stats(place)
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_ENTRIES)
    try:
        earlier = len(torch.cuda.memory._snapshot()["device_traces"][place.index])
        with contextlib.suppress(torch.OutOfMemoryError):  # it is in the history
            train(place)
        torch.cuda.synchronize(place)
        stats = torch.cuda.memory_stats(place)
        trace = torch.cuda.memory._snapshot()["device_traces"][place.index][earlier:]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return [(entry.get("addr", 0), entry["size"], entry["action"]) for entry in trace], stats


def train(place: torch.device) -> None:
    """Optimizer steps of a small transformer behind a convolution, with batches of changing sizes."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)]
    first = nn.Conv1d(64, 512, 3, padding=1).to(place)
    model = nn.Sequential(*layers).to(place)
    optimizer = torch.optim.AdamW([*first.parameters(), *model.parameters()])
    for rows in ROWS:
        x_bct = torch.randn(rows, 64, 256, device=place)
        model(first(x_bct).transpose(1, 2)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compared(entries: list[Entry], stats: dict[str, int], settings: AllocatorSettings, limit: int | None) -> dict[str, Any]:
    """The peaks, flushes and end of the recorded run beside those of its replay."""
    events, sizes = events_of(entries)
    outcome = replay(events, sizes, settings=settings, limit_bytes=limit)
    recorded = {
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "requested_bytes": stats["requested_bytes.all.peak"],
        "flushes": stats["num_alloc_retries"],
    }
    replayed = {
        "allocated_bytes": outcome.peak_allocated_bytes,
        "reserved_bytes": outcome.peak_reserved_bytes,
        "requested_bytes": outcome.peak_requested_bytes,
        "flushes": outcome.flushes,
    }
    died = any(action == "oom" for _, _, action in entries)
    return {
        "events": len(events),
        "limit_bytes": limit,
        "died": died,
        "recorded": recorded,
        "replayed": replayed,
        "ok": recorded == replayed and not died and outcome.fits,
    }
