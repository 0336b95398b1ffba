"""The best of the settings that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autoaccum.records import Levers
from autoaccum.timing import are_equal
from autoaccum.tradeoffs.points import Measured

Objective = Literal["throughput", "memory"]
_RIVAL_FRAC = 0.05  # settings this close to the best are measured once more before one is chosen


def best(measured: Sequence[Measured], objective: Objective, peak_noise_bytes: int) -> Measured:
    """The setting to use.

    For throughput the fastest; those that are not slower by more than the noise count as equal, and of equals the one that
    computes least again is taken, then the one with the lowest peak. For memory the lowest peak; of those within
    `peak_noise_bytes` of it the fastest.
    """
    if objective == "memory":
        lowest = min(one.peak_bytes for one in measured)
        near = [one for one in measured if one.peak_bytes <= lowest + peak_noise_bytes]
        return min(near, key=lambda one: one.timing.median_s)
    fastest = min(measured, key=lambda one: one.timing.median_s)
    equal = [one for one in measured if are_equal(one.timing, fastest.timing)]
    return min(equal, key=lambda one: (recomputation(one.point.levers), one.peak_bytes))


def rivals(measured: Sequence[Measured]) -> list[Measured]:
    """The fastest setting and those close behind it, the fastest first; a single one has no rival."""
    ordered = sorted(measured, key=lambda one: one.timing.median_s)
    return [one for one in ordered if one.timing.median_s <= ordered[0].timing.median_s * (1 + _RIVAL_FRAC)]


def recomputation(levers: Levers) -> tuple[int, int]:
    """How much is computed again, as something to sort by: fully checkpointed blocks, then selectively checkpointed ones."""
    blocks = levers.checkpointed_blocks
    return (blocks if levers.checkpointing == "full" else 0, blocks if levers.checkpointing == "selective" else 0)


def pareto_front(measured: Sequence[Measured]) -> list[Measured]:
    """Those that no other one beats in both step time and peak, the fastest first."""
    front: list[Measured] = []
    for one in sorted(measured, key=lambda one: (one.timing.median_s, one.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return front
