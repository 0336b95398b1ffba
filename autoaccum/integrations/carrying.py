"""What of a plan a framework's own settings can carry: one micro-batch size, one number of steps. Knows no framework."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from autoaccum.divisions import divisions_in_words, largest_divisor, near_divisions
from autoaccum.errors import InvalidRequestError
from autoaccum.plan import Plan

logger = logging.getLogger("autoaccum")


def all_sizes(plan: Plan) -> list[int]:
    """The different sizes of micro-batches on all ranks, in rows, ascending."""
    return sorted({size for rank in range(plan.world_size) for size in plan.schedule(rank)})


def refuse_uneven(plan: Plan, receiver: str, remedy: str) -> None:
    """Refuse a plan whose micro-batches are not all of one size, on all ranks.

    Args:
        plan: Of any number of ranks.
        receiver: What takes two numbers only, at the start of a sentence.
        remedy: What else can run the plan as it is, after an "or".

    Raises:
        InvalidRequestError: With near targets that divide.
    """
    if not isinstance(plan, Plan):
        raise InvalidRequestError(f"plan is a {type(plan).__name__}; expected a Plan, from autotune, predict or Plan.load.")
    sizes = all_sizes(plan)
    if len({plan.schedule(rank) for rank in range(plan.world_size)}) == len(sizes) == 1:
        return
    bounds = {"at_least": plan.min_micro_batch, "multiple_of": plan.multiple_of}
    found = list(near_divisions(plan.target_batch, plan.world_size, plan.max_micro_batch, **bounds))
    share, rest = divmod(plan.target_batch, plan.world_size)
    own = None if rest else largest_divisor(share, plan.max_micro_batch, **bounds)
    if own is not None:
        found.insert(0, (plan.target_batch, own, share // own))
    raise InvalidRequestError(
        f"{receiver} takes one micro-batch size and one number of steps, and target_batch={plan.target_batch} over "
        f"world_size={plan.world_size} is planned in micro-batches of {' and '.join(map(str, sizes))} rows: rounded numbers "
        f"would train another batch. Tune with equal_micro_batches=True and a target that divides: "
        f"{divisions_in_words(found, plan.world_size)}. Or {remedy}"
    )


def refuse_early(plan: Plan, remedy: str) -> None:
    """Refuse a plan for one rank where there are several: it was made before they knew of each other.

    Args:
        plan: Of any number of ranks.
        remedy: What to do before the search, after a semicolon.

    Raises:
        InvalidRequestError: With the number of ranks that there are.
    """
    known = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE") or 1)  # set by all launchers
    if plan.world_size == 1 < ranks:
        raise InvalidRequestError(
            f"the plan is for world_size=1 and there are {ranks} ranks, each of which would take the whole batch; {remedy}"
        )


def warn_of_levers(plan: Plan, precisions: tuple[str, ...]) -> None:
    """Log the levers of a plan that the framework's settings have no word for.

    Args:
        precisions: Those that they have.
    """
    levers = plan.levers
    carried = {"fp32", *precisions}
    left = {
        "checkpointing": levers.checkpointing != "off",
        "precision": levers.precision not in carried,
        "optimizer_impl": levers.optimizer_impl != "default",
        "offload": levers.offload != "off",
    }
    names = [f"{name}={getattr(levers, name)}" for name, is_left in left.items() if is_left]
    if names:
        logger.warning("the plan also turns %s: run the loop inside plan.applied(model, optimizer)", ", ".join(names))
