"""What a run allocates and frees, in order, and what each block holds. Knows nothing of how that is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from autoaccum.records import Phase

Kind = Literal["weights", "batch", "gradients", "optimizer state", "activations", "temporaries", "workspaces"]
KINDS: tuple[Kind, ...] = ("weights", "batch", "gradients", "optimizer state", "activations", "temporaries", "workspaces")


class Mark(NamedTuple):
    """From this event on, a phase of a micro-batch of a window runs."""

    event: int
    phase: Phase
    window: int
    micro_batch: int


class Trace(NamedTuple):
    """The allocations of a run.

    Attributes:
        rows: Of each micro-batch.
        events: In order; `i` allocates block i, `~i` frees it.
        sizes: Bytes asked for, of each block.
        kinds: What each block holds.
        marks: Where phases begin, ascending.
        flops: Of all that ran, by phase; matrix products, convolutions and attention, recomputation included.
    """

    rows: int
    events: tuple[int, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    marks: tuple[Mark, ...] = ()
    flops: dict[Phase, int] = {}  # noqa: RUF012 - a NamedTuple's default, never changed


def with_sums_in_place(trace: Trace, sums: Mapping[int, int]) -> Trace:
    """The trace in which a sum takes the place of its first part, where that part is freed at once."""
    events: list[int] = []
    moved: dict[int, int] = {}
    kinds = list(trace.kinds)
    index = 0
    starts = {mark.event: at for at, mark in enumerate(trace.marks)}
    marks = list(trace.marks)
    while index < len(trace.events):
        if index in starts:
            marks[starts[index]] = marks[starts[index]]._replace(event=len(events))
        event = trace.events[index]
        first = sums.get(index)
        if first is not None and index + 1 < len(trace.events) and trace.events[index + 1] == ~first:
            moved[event] = moved.get(first, first)
            kinds[moved[event]] = kinds[event]  # a gradient is named when it is complete
            index += 2
            continue
        events.append(moved.get(event, event) if event >= 0 else ~moved.get(~event, ~event))
        index += 1
    return trace._replace(events=tuple(events), marks=tuple(marks), kinds=tuple(kinds))


def with_frees_in_order(trace: Trace) -> Trace:
    """The trace with frees that follow one another sorted: what a C++ container held dies in an order that varies.

    Autocast's copies of weights do, at the end of its region. What the allocator has afterwards is the same.
    """
    events, starts = list(trace.events), {mark.event for mark in trace.marks}
    begin = 0
    for index in range(len(events) + 1):
        if index == len(events) or events[index] >= 0 or index in starts:
            events[begin:index] = sorted(events[begin:index])  # the latest block first, as a workspace goes
            begin = index if index < len(events) and events[index] < 0 else index + 1
    return trace._replace(events=tuple(events))


def kinds_by_life(events: Sequence[int], marks: Sequence[Mark], num_blocks: int) -> dict[int, Kind]:
    """Activations are made in a forward pass and freed after it; everything else is a temporary."""
    kinds: dict[int, Kind] = dict.fromkeys(range(num_blocks), "temporaries")
    ends = [mark.event for mark in marks[1:]] + [len(events)]
    for mark, end in zip(marks, ends, strict=True):
        if mark.phase == "forward":
            inside = events[mark.event : end]
            freed = {~event for event in inside if event < 0}
            kinds.update({block: "activations" for block in inside if block >= 0 and block not in freed})
    return kinds
