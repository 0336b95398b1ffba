"""What would be needed for the next step up, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from autoaccum.records import Levers
from autoaccum.tradeoffs.points import Point
from autoaccum.units import format_bytes

Peak = Callable[[Levers, int], int | None]


def advice_for(
    chosen: Point,
    *,
    budget_bytes: int,
    largest: int,
    next_size: int | None,
    peak: Peak,
    not_allowed: Sequence[tuple[Levers, int]],
) -> tuple[str, ...]:
    """What more memory or another lever would bring; all of it predicted.

    Args:
        largest: The largest micro-batch that fits with the chosen levers; a smaller one may be chosen for its speed.
        next_size: The next larger one that the target can be divided into, None where there is none.
        peak: The expected peak of a setting, None where it is not known.
        not_allowed: Levers that change the numerics, with the largest micro-batch that each would make possible.
    """
    found = [
        _without_checkpointing(chosen, budget_bytes, peak),
        _one_size_up(chosen, budget_bytes, next_size, peak),
        *(_with_other_numerics(largest, levers, size) for levers, size in not_allowed),
    ]
    return tuple(sentence for sentence in found if sentence is not None)


def _without_checkpointing(chosen: Point, budget_bytes: int, peak: Peak) -> str | None:
    if chosen.levers.checkpointing == "off":
        return None
    plain = msgspec.structs.replace(chosen.levers, checkpointing="off", checkpointed_blocks=0, block_names=())
    needed = peak(plain, chosen.micro_batch)
    if needed is None or needed <= budget_bytes:
        return None
    return (
        f"{format_bytes(needed - budget_bytes)} more would make checkpointing needless at micro-batch {chosen.micro_batch}."
    )


def _one_size_up(chosen: Point, budget_bytes: int, next_size: int | None, peak: Peak) -> str | None:
    needed = None if next_size is None else peak(chosen.levers, next_size)
    if needed is None or needed <= budget_bytes:
        return None
    return f"{format_bytes(needed - budget_bytes)} more would allow a micro-batch of {next_size} with the same levers."


def _with_other_numerics(largest: int, levers: Levers, size: int) -> str | None:
    if size <= largest:
        return None
    times = size / largest
    said = "double" if times == 2 else f"raise {times:.2g}-fold" if times > 2 else "raise"
    return (
        f"{levers.precision} would {said} the micro-batch, from {largest} to {size} (predicted); it changes the "
        'numerics, so it takes levers="all".'
    )
