"""What is held over one optimizer step, by what holds it, in few enough points to be kept and drawn."""

from __future__ import annotations

import numpy as np

from autoaccum.prediction.growth import Growth, Rounding
from autoaccum.prediction.trace import KINDS
from autoaccum.records import Timeline

_MOST_POINTS = 400


def timeline_of(growth: Growth, rows: int, rounded: Rounding, *, title: str, limit_bytes: int | None) -> Timeline:
    """The last traced optimizer step with micro-batches of so many rows.

    Of neighbouring events the highest one is kept, so that the peak is.
    """
    last = [mark for mark in growth.marks if mark.window == growth.marks[-1].window]
    held = growth.by_kind(rows, rounded)[:, last[0].event :]
    kept = _kept_events(held.sum(axis=0), [mark.event - last[0].event for mark in last])
    return Timeline(
        title=title,
        held_bytes={kind: tuple(map(int, row[kept])) for kind, row in zip(KINDS, held, strict=True)},
        phases=tuple((int(np.searchsorted(kept, mark.event - last[0].event)), mark.phase) for mark in last),
        limit_bytes=limit_bytes,
    )


def _kept_events(
    total: np.ndarray[tuple[int], np.dtype[np.int64]], phase_starts: list[int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The highest event of each stretch, and where phases begin."""
    if len(total) <= _MOST_POINTS:
        return np.arange(len(total))
    stretches = np.array_split(np.arange(len(total)), _MOST_POINTS)
    highest = [int(stretch[np.argmax(total[stretch])]) for stretch in stretches]
    return np.unique(np.array([*highest, *(start for start in phase_starts if start < len(total))]))
