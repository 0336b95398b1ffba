"""Putting rows of unequal cost together into micro-batches, none above a limit. Pure: knows no batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoaccum.errors import InvalidRequestError


def pack(costs: Sequence[float], cost_of: Callable[[Sequence[int]], float], limit: float) -> list[list[int]]:
    """First-fit decreasing: the dearest row first, each into the first micro-batch that stays within the limit.

    A row that is above the limit on its own gets a micro-batch of its own; see `refuse_above`.

    Args:
        costs: What each row costs alone.
        cost_of: What some rows cost together, as a micro-batch; rows times the longest of them where they are padded.
        limit: No micro-batch of several rows costs more.

    Returns:
        For every micro-batch its rows, ascending; the micro-batch with the dearest row first.

    Example:
        >>> lengths = [6, 1, 2, 5, 1]
        >>> pack(lengths, lambda rows: len(rows) * max(lengths[row] for row in rows), 10)
        [[0], [2, 3], [1, 4]]
    """
    packed: list[list[int]] = []
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        home = next((rows for rows in packed if cost_of(sorted((*rows, row))) <= limit), None)
        if home is None:
            packed.append([row])
        else:
            home.append(row)
    return [sorted(rows) for rows in packed]


def refuse_above(costs: Sequence[float], limit: float) -> None:
    """Refuse rows that no cutting brings below the limit.

    Raises:
        InvalidRequestError: It names the rows and their costs.
    """
    above = [row for row, cost in enumerate(costs) if cost > limit]
    if above:
        named = ", ".join(f"row {row} costs {costs[row]:g}" for row in above[:5])
        more = f" and {len(above) - 5} more" if len(above) > 5 else ""
        raise InvalidRequestError(
            f"{named}{more}, above max_cost={limit:g} on its own; expected every row within it. "
            "Leave such rows out, shorten them, or raise the limit."
        )
