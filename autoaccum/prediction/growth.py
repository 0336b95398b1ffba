"""From traces of a few small sizes to the allocations of every size.

Every tensor's size is a polynomial in the number of rows, nearly always of degree one: so two traces tell all. Where a size
has no plain constant part, more traces are asked for, and what does not fit a parabola either is refused.
Knows neither how traces are made nor what an allocator does with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import final

import numpy as np

from autoaccum.errors import AutoaccumError
from autoaccum.prediction.trace import KINDS, Kind, Mark, Trace
from autoaccum.records import Phase

# Even sizes: half of the rows (pairs, mixup, two views) are then whole. One row is special in many kernels, and the smaller
# the sizes the faster real tensors are traced. The first four are equally far apart, as differences need it.
_FIRST_SIZES, _MORE_SIZES, _CHECKED_SIZE = (2, 4), (6, 8), 10


class NotAffineError(AutoaccumError):
    """Allocations depend on the number of rows in a way that a few traces do not tell."""


@final
class Growth:
    """The allocations of a probe's windows at any number of rows.

    Args:
        traces: At equally spaced sizes, all with the same events: two for straight lines, three for parabolas.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        first = traces[0]
        self.events: tuple[int, ...] = first.events
        self.kinds: tuple[Kind, ...] = first.kinds
        self.marks: tuple[Mark, ...] = first.marks
        self._start, self._spacing = first.rows, traces[1].rows - first.rows
        # The event after which the model, its optimizer's state and a batch on the host are there, and nothing else yet.
        self.start_event = max(0, next((m.event for m in first.marks if m.phase == "forward"), 1) - 1)
        known = np.array([trace.sizes for trace in traces], dtype=np.float64)
        self._differences = [np.diff(known, order, axis=0)[0] for order in range(len(traces))]
        self._flops = [trace.flops for trace in traces[:2]]
        signed = np.array(first.events, dtype=np.int64)
        self._signs = np.where(signed >= 0, 1, -1)
        self._blocks = np.where(signed >= 0, signed, ~signed)

    def sizes(self, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Bytes asked for, of each block, before any rounding."""
        step = (rows - self._start) / self._spacing
        total, factor = np.zeros_like(self._differences[0]), 1.0
        for order, difference in enumerate(self._differences):  # Newton's forward differences
            total = total + factor * difference
            factor *= (step - order) / (order + 1)
        sizes: np.ndarray[tuple[int], np.dtype[np.int64]] = np.maximum(np.rint(total), 0).astype(np.int64)
        return sizes

    def live(self, rows: int, rounded: Rounding) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Bytes held after each event, every block rounded as the memory's owner rounds it."""
        sizes = rounded(self.sizes(rows))
        return np.cumsum(self._signs * sizes[self._blocks])

    def live_peak(self, rows: int, rounded: Rounding, *, in_optimizer: bool) -> int:
        """The most that is held at once, in bytes, in the optimizer's step or in everything else."""
        live = self.live(rows, rounded)
        ends = [mark.event for mark in self.marks[1:]] + [len(live)]
        spans = [
            live[mark.event : end]
            for mark, end in zip(self.marks, ends, strict=True)
            if (mark.phase == "optimizer") == in_optimizer and end > mark.event
        ]
        return max((int(span.max()) for span in spans), default=0)

    def split(self, rows: int, event: int, rounded: Rounding) -> dict[Kind, int]:
        """What is held after this event, by what it holds, in bytes."""
        sizes = rounded(self.sizes(rows))
        upto = slice(0, event + 1)
        alive = np.zeros(len(sizes), dtype=np.int64)
        np.add.at(alive, self._blocks[upto], self._signs[upto])
        by_kind = np.array([KINDS.index(kind) for kind in self.kinds])
        return {kind: int((alive * sizes)[by_kind == index].sum()) for index, kind in enumerate(KINDS)}

    def with_workspace(self, before_bytes: int, after_bytes: int) -> Growth:
        """The same with a library workspace of another size, as another GPU has it."""
        other = copy.copy(self)
        kept = np.array([kind == "workspaces" for kind in self.kinds]) & (self._differences[0] == before_bytes)
        other._differences = [
            np.where(kept, after_bytes if order == 0 else 0, d) for order, d in enumerate(self._differences)
        ]
        return other

    def without_passing_workspaces(self) -> Growth | None:
        """The same without the workspaces that are given back at once, None where there are none.

        A library can do without: where there is no room, and in versions that choose other kernels.
        """
        events = self.events
        passing = np.zeros(len(self.kinds), dtype=bool)
        for event, following in pairwise(events):
            if event >= 0 and following == ~event and self.kinds[event] == "workspaces":
                passing[event] = True
        if not passing.any():
            return None
        other = copy.copy(self)
        other._differences = [np.where(passing, 0, difference) for difference in self._differences]
        return other

    def by_kind(self, rows: int, rounded: Rounding) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Bytes held after each event by what they hold: one row for each of `KINDS`."""
        deltas = self._signs * rounded(self.sizes(rows))[self._blocks]
        kinds = np.array([KINDS.index(kind) for kind in self.kinds])[self._blocks]
        return np.stack([np.cumsum(np.where(kinds == index, deltas, 0)) for index in range(len(KINDS))])

    def phase_at(self, event: int) -> Phase:
        """What runs when this event happens."""
        return max((mark for mark in self.marks if mark.event <= event), key=lambda mark: mark.event).phase

    def flops(self, rows: int) -> dict[Phase, int]:
        """Floating-point operations of all windows at this size, by phase."""
        first, second = self._flops
        step = (rows - self._start) / self._spacing
        return {phase: round(count + step * (second.get(phase, 0) - count)) for phase, count in first.items()}


Rounding = Callable[[np.ndarray[tuple[int], np.dtype[np.int64]]], np.ndarray[tuple[int], np.dtype[np.int64]]]


def growth_of(trace_at: Callable[[int], Trace], multiple_of: int = 1, *, checked: bool = False) -> Growth:
    """Trace as few sizes as tell all others.

    Args:
        trace_at: Gives the trace of a number of rows.
        multiple_of: Only multiples of this many rows are traced.
        checked: Trace one more size, which has to be as the others say. For predictions that no measurement follows.

    Raises:
        NotAffineError: With what is not.
        Exception: Whatever tracing raises.

    Example:
        >>> def trace_at(rows: int) -> Trace:
        ...     return Trace(rows=rows, events=(0, ~0), sizes=(64 + 8 * rows,), kinds=("activations",))
        >>> int(growth_of(trace_at).sizes(100)[0])
        864
    """
    known = [trace_at(steps * multiple_of) for steps in _FIRST_SIZES]
    check = trace_at(_CHECKED_SIZE * multiple_of) if checked else None
    if _same_events(known) and _has_constant_parts(*known) and (check is None or _agrees(Growth(known), check)):
        return Growth(known)
    known += [trace_at(steps * multiple_of) for steps in _MORE_SIZES]
    if _same_events(known):
        for traces in (known[:2], known[:3]):
            growth = Growth(traces)
            if all(_agrees(growth, trace) for trace in (*known, *([check] if check is not None else []))):
                return growth
        raise NotAffineError("the size of a tensor is no polynomial of the number of rows")
    if _same_events(known[2:]) and _has_constant_parts(*known[2:]) and (check is None or _agrees(Growth(known[2:]), check)):
        return Growth(known[2:])  # branches that only the smallest sizes take
    counts = ", ".join(str(len(trace.events)) for trace in known)
    raise NotAffineError(
        f"what is allocated depends on the number of rows: {counts} events at {', '.join(str(t.rows) for t in known)} rows"
    )


def _agrees(growth: Growth, trace: Trace) -> bool:
    return growth.events == trace.events and np.array_equal(growth.sizes(trace.rows), trace.sizes)


def _same_events(traces: Sequence[Trace]) -> bool:
    return all(trace.events == traces[0].events for trace in traces)


def _has_constant_parts(first: Trace, second: Trace) -> bool:
    """Whether the line through both has no constant part below zero, as a size that grows with the square has.

    Such a line is possible (a size of rows - 1), so that only calls for more traces.
    """
    return all(
        a * second.rows >= b * first.rows and b >= a for a, b in zip(first.sizes, second.sizes, strict=True) if a != b
    )
