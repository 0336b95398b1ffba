"""The largest micro-batch worth trying, and what keeps it from being larger."""

from __future__ import annotations

from typing import NamedTuple

from autoaccum.errors import InvalidRequestError
from autoaccum.records import LimitedBy
from autoaccum.request import ROWS_WITHOUT_BOUND, Request, largest_of_use


class Bounds(NamedTuple):
    """Of one rank.

    Attributes:
        top: Rows of the largest micro-batch worth trying.
        bound: What sets it.
        note: What is to be said of it; None where it goes without saying.
    """

    top: int
    bound: LimitedBy
    note: str | None = None


def bounds_of(request: Request, *, share: int | None, length: int | None, world_size: int) -> Bounds:
    """Bounds by the target, the data and the caller.

    Args:
        share: Rows of one optimizer step on a rank, where there is a target.
        length: Rows of the data, where it has an end.

    Raises:
        InvalidRequestError: When `multiple_of` is larger than all that is allowed.
    """
    most = share
    if request.shares == "proportional" and world_size > 1:
        assert request.target_batch is not None
        most = request.target_batch - (world_size - 1)  # the others have a row each
    found = largest_of_use(request, most, length)
    if found is None:
        note = (
            f"Nothing bounds this search, so it goes no further than {ROWS_WITHOUT_BOUND:,} rows; "
            "max_micro_batch sets another bound."
        )
        return Bounds(ROWS_WITHOUT_BOUND, "caller", note)
    top, bound = found
    if top < request.multiple_of and top != most:
        raise InvalidRequestError(
            f"multiple_of={request.multiple_of} is larger than the largest micro-batch allowed ({top} rows); "
            "lower it, or raise max_micro_batch."
        )
    return Bounds(top, bound)
