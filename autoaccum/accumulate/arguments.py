"""The arguments of an Accumulator: what fits together, and how batches are to be cut."""

from __future__ import annotations

import logging
from math import inf, isfinite

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autoaccum.batches.layout import BatchDim
from autoaccum.batches.opaque import SplitFn
from autoaccum.batches.slicing import CostFn, Slicer
from autoaccum.engines import own_scheduler
from autoaccum.errors import InvalidRequestError
from autoaccum.plan import Plan
from autoaccum.records import PlanRecord
from autoaccum.reduction import Reducer
from autoaccum.schedule import whole_number
from autoaccum.units import shown

logger = logging.getLogger("autoaccum")


def slicer_for(
    plan: object,
    micro_batch: object,
    cost: CostFn | None,
    max_cost: float | None,
    reducer: Reducer,
    *,
    batch_dim: BatchDim,
    split: SplitFn | None,
) -> Slicer:
    """How batches are to be cut: by the plan, by rows, or by what they cost.

    Raises:
        InvalidRequestError: When these do not go together.
    """
    if (cost is None) != (max_cost is None) or (cost is not None and split is not None):
        raise InvalidRequestError("cost= and max_cost= go together, without split=; expected both or none.")
    if cost is not None:
        if micro_batch is not None:
            raise InvalidRequestError("micro_batch= counts rows, and with cost= the limit is max_cost=; give one of them.")
        if not callable(cost) or not isinstance(max_cost, (int, float)) or max_cost is True or not 0 < max_cost < inf:
            raise InvalidRequestError(f"cost={cost!r}, max_cost={max_cost!r}; expected a function and a number above 0.")
        return Slicer(inf, batch_dim=batch_dim, cost=cost, max_cost=max_cost)
    if (plan is None) == (micro_batch is None):
        raise InvalidRequestError("give either plan= or micro_batch= (rows), or cost= with max_cost=.")
    if plan is None:
        rows = whole_number(micro_batch, "micro_batch", "the most rows of one micro-batch on this rank")
        return Slicer(rows, batch_dim=batch_dim, split=split)
    if not isinstance(plan, PlanRecord):
        raise InvalidRequestError(f"plan is a {type(plan).__name__}; expected a Plan, from autotune or Plan.load.")
    planned: tuple[int, ...] = ()
    limit = plan.micro_batch
    if plan.world_size == reducer.world_size:
        planned = Plan.of(plan).schedule(reducer.ranks.rank)
        limit = max(planned) if plan.shares else limit  # a plan that another rank has saved is of its own memory
    else:
        logger.warning(
            "the plan is for %d ranks and there are %d: only its micro-batch is used", plan.world_size, reducer.world_size
        )
    return Slicer(
        limit,
        batch_dim=batch_dim,
        split=split,
        multiple_of=plan.multiple_of,
        at_least=plan.min_micro_batch,
        planned=planned,
    )


def check_options(scaler: object, max_grad_norm: object, scheduler: object, on_oom: object, split: object) -> None:
    """Refuse options that are of another kind than what is needed.

    Raises:
        InvalidRequestError: It names the option, its value, and what was expected.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidRequestError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler.")
    number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool) and isfinite(max_grad_norm)
    if max_grad_norm is not None and not (number and float(max_grad_norm) > 0):  # type: ignore[arg-type]
        raise InvalidRequestError(f"max_grad_norm={max_grad_norm!r} is not possible; expected a finite number above 0.")
    if isinstance(own_scheduler(scheduler), ReduceLROnPlateau):
        raise InvalidRequestError(
            "ReduceLROnPlateau needs a metric for its step; leave scheduler= out and call it yourself, with step.loss or a "
            "validation loss."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise InvalidRequestError(
            f"scheduler is a {type(scheduler).__name__} without step(); expected a scheduler of torch."
        )
    if on_oom not in ("replay", "raise"):
        raise InvalidRequestError(f'on_oom={on_oom!r} is unknown; expected "replay" or "raise".')
    if split is not None and not callable(split):
        raise InvalidRequestError(f"split={shown(split)} cannot be called; expected a function.")
