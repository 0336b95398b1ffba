"""The plan that a finished log of trials supports. Pure: knows neither devices nor models."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from autoaccum.divisions import divisions_in_words, largest_divisor, near_divisions, refuse_indivisible
from autoaccum.errors import InvalidRequestError
from autoaccum.records import Evidence, LimitedBy, OutOfMemory, PlanRecord, Record, Refused, Trial
from autoaccum.schedule import proportional_sizes, rank_sizes, shares, smallest, split_rows, steps_for
from autoaccum.search import Standing


class Schedule(Record, frozen=True, kw_only=True):
    """The micro-batch sizes of every rank for one optimizer step, and what is to be said about them."""

    sizes: tuple[tuple[int, ...], ...]
    warnings: tuple[str, ...] = ()

    @property
    def micro_batch(self) -> int:
        """The largest size of all ranks."""
        return max(max(of_rank) for of_rank in self.sizes)


def schedule_for(
    target_batch: int,
    world_size: int,
    limit: int,
    *,
    at_least: int = 1,
    multiple_of: int = 1,
    equal: bool = False,
) -> Schedule:
    """Divide the target over ranks and micro-batches, none above the limit and none below what runs.

    Args:
        target_batch: Rows of one optimizer step over all ranks.
        limit: The largest micro-batch that fits.
        at_least: The smallest micro-batch that runs at all (2 where BatchNorm refuses one row).
        multiple_of: Every micro-batch but a rank's last is a multiple of it.
        equal: One size for all micro-batches of all ranks, where one number must serve.

    Raises:
        InvalidRequestError: When no such division exists; the message names near targets.

    Example:
        >>> schedule_for(128, 1, 100).sizes, schedule_for(97, 1, 10, equal=True).sizes[0][:3]
        (((64, 64),), (1, 1, 1))
    """
    of_ranks = shares(target_batch, world_size)
    if equal:
        return _equal_schedule(target_batch, of_ranks, limit, at_least, multiple_of)
    steps = steps_for(of_ranks[0], limit, multiple_of)
    sizes = tuple(rank_sizes(share, steps, multiple_of, None) for share in of_ranks)
    if smallest(sizes) < at_least:
        nearby = (target_batch + sign * step for step in range(1, 2 * limit * world_size + 1) for sign in (-1, 1))
        works = next(
            (other for other in nearby if other >= world_size and _runs(other, world_size, limit, at_least, multiple_of)),
            None,
        )
        raise InvalidRequestError(
            f"target_batch={target_batch} leaves a micro-batch of {smallest(sizes)} rows with micro-batches of at most "
            f"{limit}, and this model needs at least {at_least}; use "
            + (f"target_batch={works}" if works else "a larger budget")
            + (f" or a smaller multiple_of than {multiple_of}." if multiple_of > 1 else ".")
        )
    return Schedule(sizes=sizes)


def sizes_of(plan: PlanRecord, rank: int) -> tuple[int, ...]:
    """The micro-batch sizes of any rank of a plan, in rows."""
    if plan.shares:
        return proportional_sizes(plan.target_batch, plan.limits, plan.multiple_of, plan.min_micro_batch)[rank]
    largest = split_rows(shares(plan.target_batch, plan.world_size)[0], plan.accumulation_steps, plan.multiple_of)[0]
    return schedule_for(
        plan.target_batch,
        plan.world_size,
        plan.micro_batch if plan.equal_micro_batches else largest,
        at_least=plan.min_micro_batch,
        multiple_of=plan.multiple_of,
        equal=plan.equal_micro_batches,
    ).sizes[rank]


def of_rank(plan: PlanRecord, rank: int) -> PlanRecord:
    """The plan of one rank as another one has it."""
    sizes = sizes_of(plan, rank)
    return msgspec.structs.replace(
        plan, rank=rank, micro_batch=max(sizes), accumulation_steps=len(sizes), micro_batch_sizes=sizes
    )


def _runs(target_batch: int, world_size: int, limit: int, at_least: int, multiple_of: int) -> bool:
    """Whether this target leaves no micro-batch below what runs."""
    of_ranks = shares(target_batch, world_size)
    steps = steps_for(of_ranks[0], limit, multiple_of)
    return smallest([rank_sizes(share, steps, multiple_of, None) for share in of_ranks]) >= at_least


def _equal_schedule(target_batch: int, of_ranks: Sequence[int], limit: int, at_least: int, multiple_of: int) -> Schedule:
    world_size = len(of_ranks)
    refuse_indivisible(target_batch, world_size, limit, at_least=at_least, multiple_of=multiple_of)
    divisions = near_divisions(target_batch, world_size, limit, at_least=at_least, multiple_of=multiple_of)
    near = divisions_in_words(divisions, world_size)
    size = largest_divisor(of_ranks[0], limit, at_least=at_least, multiple_of=multiple_of)
    if size is None:
        raise InvalidRequestError(
            f"target_batch={target_batch} has no equal division into micro-batches of {at_least} to {limit} rows"
            + (f" that are multiples of {multiple_of}" if multiple_of > 1 else "")
            + f"; near targets that have one: {near}."
        )
    sizes = tuple(rank_sizes(share, 0, 1, size) for share in of_ranks)
    poor = size < limit / 2 and size < of_ranks[0]
    text = (
        f"target_batch={target_batch} divides only into micro-batches of {size} where {limit} fit; "
        f"near targets that divide better: {near}."
    )
    return Schedule(sizes=sizes, warnings=(text,) if poor else ())


def limited_by(now: Standing, trials: Sequence[Trial], top: int, bound: LimitedBy, *, proved: bool = False) -> LimitedBy:
    """What keeps the largest fitting size from being larger.

    Args:
        top: The largest size of the search.
        bound: What set `top`.
        proved: Whether the peaks measured below show that the next size cannot fit, so that it was not run.
    """
    if now.best == top:
        return bound
    if proved:
        return "memory"
    at_ceiling = [trial.outcome for trial in trials if trial.candidate.micro_batch == now.ceiling]
    if any(isinstance(outcome, OutOfMemory) for outcome in at_ceiling):
        return "memory"
    refused = [outcome.limited_by for outcome in at_ceiling if isinstance(outcome, Refused)]
    return refused[0] if refused else "caller"  # nothing failed: the caller's time was up


def evidence(now: Standing, ladder: Sequence[int]) -> Evidence:
    """Whether the next size of the search ran and failed ("exact"), or the search ended otherwise ("measured")."""
    if now.ceiling is None or now.best is None:
        return "measured"
    following = bisect_right(ladder, now.best)
    return "exact" if following < len(ladder) and ladder[following] == now.ceiling else "measured"


def remarks(trials: Sequence[Trial]) -> tuple[str, ...]:
    """What was believed about sizes that failed for another reason than plain memory, one sentence each."""
    said = []
    for trial in trials:
        match trial.outcome:
            case Refused(bound="floor", message=message):
                text = f"is too small to run, so every micro-batch is larger ({message})"
            case Refused(message=message):
                text = f"is beyond a limit that is not the device's memory ({message})"
            case OutOfMemory(cause="unclear", message=message):
                text = f"failed with an error that often means memory, believed because a smaller size ran ({message})"
            case _:
                continue
        said.append(f"micro_batch={trial.candidate.micro_batch} {text}.")
    return tuple(said)
