"""The best of the settings that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autoaccum.records import Levers
from autoaccum.timing import are_equal
from autoaccum.tradeoffs.points import Measured

Objective = Literal["throughput", "memory"]
_RIVAL_FRAC = 0.05  # settings this close to the best are measured once more before one is chosen
_EQUAL_FRAC = 0.03  # a setting that was measured slower than this is not taken for its memory, however noisy the times are


def best(measured: Sequence[Measured], objective: Objective, peak_noise_bytes: int) -> Measured:
    """The setting to use.

    For throughput the fastest; those that are not slower by more than the noise, and by 3 % at most, count as equal, and of
    equals the one that computes least again is taken, then the one with the lowest peak. For memory the lowest peak; of
    those within `peak_noise_bytes` of it the fastest.
    """
    if objective == "memory":
        lowest = min(one.peak_bytes for one in measured)
        near = [one for one in measured if one.peak_bytes <= lowest + peak_noise_bytes]
        return min(near, key=lambda one: one.timing.median_s)
    return _preferred(measured)[0]


def _preferred(measured: Sequence[Measured]) -> list[Measured]:
    """Those that count as the fastest, in the order in which they are taken."""
    fastest = min(measured, key=lambda one: one.timing.median_s)
    slowest_s = fastest.timing.median_s * (1 + _EQUAL_FRAC)
    equal = [one for one in measured if one.timing.median_s <= slowest_s and are_equal(one.timing, fastest.timing)]
    return sorted(equal, key=lambda one: (recomputation(one.point.levers), one.peak_bytes))


def rivals(measured: Sequence[Measured], at_most: int) -> list[Measured]:
    """What to measure once more before one is chosen; none where the fastest has no other close behind it.

    The fastest, the one that would be chosen now, and others close to the fastest; the fastest first.
    """
    ordered = sorted(measured, key=lambda one: one.timing.median_s)
    close = [one for one in ordered if one.timing.median_s <= ordered[0].timing.median_s * (1 + _RIVAL_FRAC)]
    if len(close) < 2:
        return []
    wanted = list(dict.fromkeys([close[0], _preferred(measured)[0], *close]))[:at_most]
    return [one for one in ordered if one in wanted]


def recomputation(levers: Levers) -> tuple[int, int]:
    """How much is computed again, as something to sort by: fully checkpointed blocks, then selectively checkpointed ones."""
    blocks = levers.checkpointed_blocks
    return (blocks if levers.checkpointing == "full" else 0, blocks if levers.checkpointing == "selective" else 0)
