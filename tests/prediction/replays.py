"""Replays of traces that are written in MiB."""

from __future__ import annotations

from typing import Any

from autoaccum.prediction.allocator import Replay, replay
from autoaccum.prediction.allocator_settings import AllocatorSettings

MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def run(events: list[int], sizes_mib: list[float], **options: Any) -> Replay:
    """Replay a trace whose sizes, and whose limit, are written in MiB."""
    if "limit_mib" in options:
        options["limit_bytes"] = int(options.pop("limit_mib") * MIB)
    return replay(events, [int(size * MIB) for size in sizes_mib], **options)
