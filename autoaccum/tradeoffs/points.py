"""A setting that can be run, and what the log says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from autoaccum.records import Fit, Levers, Timing, Trial
from autoaccum.timing import timing_of


class Point(NamedTuple):
    """One position of the levers and the largest micro-batch of one division of the target."""

    levers: Levers
    micro_batch: int


class Measured(NamedTuple):
    """A point whose whole optimizer steps ran inside the budget."""

    point: Point
    timing: Timing
    peak_bytes: int


def point_of(trial: Trial) -> Point:
    """What a trial ran."""
    return Point(trial.candidate.levers, trial.candidate.micro_batch)


def measured_points(trials: Sequence[Trial], rows_per_step: int) -> list[Measured]:
    """Every point whose whole optimizer steps were timed, several trials of one together, in the order first run.

    A point that failed in any trial is left out.

    Args:
        rows_per_step: Rows of a whole optimizer step on one rank; trials of fewer were cut short.
    """
    times: dict[Point, list[float]] = {}
    peaks: dict[Point, int] = {}
    failed = {point_of(trial) for trial in trials if not isinstance(trial.outcome, Fit)}
    for trial in trials:
        whole = trial.purpose == "confirm" and trial.rows_per_step == rows_per_step
        if whole and isinstance(trial.outcome, Fit) and trial.outcome.step_times_s and point_of(trial) not in failed:
            point = point_of(trial)
            times.setdefault(point, []).extend(trial.outcome.step_times_s)
            peaks[point] = max(trial.outcome.peak_bytes, peaks.get(point, 0))
    found = ((point, timing_of(seconds)) for point, seconds in times.items())
    return [Measured(point, timing, peaks[point]) for point, timing in found if timing is not None]


def with_blocks(levers: Levers, blocks: int) -> Levers:
    """The same with so many blocks checkpointed."""
    return msgspec.structs.replace(levers, checkpointed_blocks=blocks)


def alike(one: Levers, other: Levers) -> bool:
    """Whether they differ in nothing but the number of checkpointed blocks."""
    return with_blocks(one, 0) == with_blocks(other, 0)
