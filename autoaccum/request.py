"""The numbers of one call, checked, and what follows from them before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from autoaccum.divisions import refuse_indivisible
from autoaccum.errors import InvalidRequestError
from autoaccum.levers import check_asked
from autoaccum.records import LimitedBy, Record
from autoaccum.schedule import check_target, ladder, whole_number
from autoaccum.units import shown

ROWS_WITHOUT_BOUND = 1_048_576  # where nothing bounds the search: 2**20 rows


class Request(Record, frozen=True, kw_only=True):
    """The numbers of one call, as they can be written down; the model, the sample and the device come beside it.

    `levers`: see `levers.space_for`. `shares`: how the target is divided over ranks. `predict`: start where a trace says
    that the limit is; for comparison, and where tracing ended a worker. `storage`, `cache`: where trials and plans are kept.
    `seed`: of what samples a lever space that is too large to enumerate.
    """

    target_batch: int | None = None
    budget: int | str | None = None
    levers: str | list[str] | dict[str, Any] = "none"
    objective: Literal["throughput", "memory"] = "throughput"
    max_micro_batch: int | None = None
    multiple_of: int = 1
    equal_micro_batches: bool = False
    shares: Literal["equal", "proportional"] = "equal"
    time_budget_s: float | None = None
    exact: bool = True
    predict: bool = True
    storage: str | None = None
    cache: str | None = None
    seed: int = 0


def checked(request: Request, world_size: int) -> Request:
    """The request with every number checked; nothing has been touched yet.

    Raises:
        InvalidRequestError: It names the number, its value, and what was expected.
    """
    target = None if request.target_batch is None else check_target(request.target_batch, world_size)
    largest = request.max_micro_batch
    if largest is not None:
        largest = whole_number(largest, "max_micro_batch", "rows of the largest micro-batch to try")
    multiple_of = whole_number(request.multiple_of, "multiple_of", "what micro-batches are to be multiples of")
    if request.equal_micro_batches and target is not None:  # before a search that would find no division
        refuse_indivisible(target, world_size, largest or -(-target // world_size), multiple_of=multiple_of)
    check_asked(request.levers)
    if request.objective not in ("throughput", "memory"):
        raise InvalidRequestError(f'objective={shown(request.objective)} is unknown; expected "throughput" or "memory".')
    if request.shares not in ("equal", "proportional"):
        raise InvalidRequestError(f'shares={shown(request.shares)} is unknown; expected "equal" or "proportional".')
    if request.shares == "proportional":
        _refuse_proportional(request)
    limit = request.time_budget_s
    if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
        raise InvalidRequestError(f"time_budget_s={shown(limit)} is not possible; expected seconds above 0.")
    return Request(
        target_batch=target,
        budget=request.budget,
        levers=request.levers,
        objective=request.objective,
        max_micro_batch=largest,
        multiple_of=multiple_of,
        equal_micro_batches=bool(request.equal_micro_batches),
        shares=request.shares,
        time_budget_s=limit,
        exact=bool(request.exact),
        predict=bool(request.predict),
        storage=request.storage,
        cache=request.cache,
        seed=request.seed,
    )


def _refuse_proportional(request: Request) -> None:
    reasons = {
        "equal_micro_batches=True": (request.equal_micro_batches, "gives every rank the same micro-batches"),
        'objective="memory"': (request.objective == "memory", "leaves memory unused, which these shares are made to fill"),
        "target_batch=None": (request.target_batch is None, "leaves nothing to be shared"),
    }
    for what, (is_asked, why) in reasons.items():
        if is_asked:
            raise InvalidRequestError(f'shares="proportional" does not go with {what}, which {why}; use shares="equal".')


def largest_of_use(request: Request, share: int | None, length: int | None) -> tuple[int, LimitedBy] | None:
    """The largest micro-batch worth trying, and what sets it; None where nothing does.

    Args:
        share: Rows of one optimizer step on a rank.
        length: Of the data, where it has one.
    """
    bounds: list[tuple[int | None, LimitedBy]] = [
        (share, "target"),
        (length, "data"),
        (request.max_micro_batch, "caller"),
    ]
    known = [(size, kind) for size, kind in bounds if size is not None]
    return min(known, key=lambda item: item[0]) if known else None


def sizes_of_use(request: Request, share: int, top: int) -> Sequence[int]:
    """The micro-batches that an optimizer step of `share` rows can be divided into, ascending; the largest one allowed too.

    That one is tried as well, so that a bound that fits is known to fit.
    """
    multiple_of = request.multiple_of
    if request.equal_micro_batches:
        return range(multiple_of, top + 1, multiple_of) or (top,)
    allowed = top // multiple_of * multiple_of
    return sorted({*ladder(share, top, multiple_of), allowed or top})
