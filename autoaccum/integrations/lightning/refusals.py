"""What cannot be made exact under Lightning, and what to do instead. Touches nothing."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.carrying import all_sizes
from autoaccum.integrations.window_loader import WindowSchedule
from autoaccum.plan import Plan

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_OTHER_CALLBACKS = {
    "BatchSizeFinder": "it looks for a batch size as well, and changes it; leave it out.",
    "GradientAccumulationScheduler": "it sets accumulate_grad_batches, which the plan sets; leave it out.",
}


def refuse_settings(trainer: Any, pl_module: Any, own_kind: type) -> None:
    """Refuse a trainer that sets what the plan sets, or that steps in a way of its own.

    Args:
        own_kind: Of the callback that asks, of which there can be one.

    Raises:
        InvalidRequestError: With the reason and the remedy.
    """
    if not pl_module.automatic_optimization:
        raise InvalidRequestError(
            "the module optimizes manually, and takes its steps itself; use autoaccum.Accumulator inside training_step, one "
            "for each optimizer."
        )
    if trainer.accumulate_grad_batches != 1:
        raise InvalidRequestError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and AutoAccum both set the accumulation; "
            "leave it at 1."
        )
    if trainer.overfit_batches:
        raise InvalidRequestError(
            f"Trainer(overfit_batches={trainer.overfit_batches}) counts batches of a loader that is made anew; give a data "
            "set of that many samples instead, such as torch.utils.data.Subset."
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _OTHER_CALLBACKS:
                raise InvalidRequestError(f"the callback {kind.__name__}: {_OTHER_CALLBACKS[kind.__name__]}")
    if sum(isinstance(callback, own_kind) for callback in trainer.callbacks) > 1:
        raise InvalidRequestError("there are several AutoAccum callbacks; expected one.")
    if type(trainer.strategy).__name__ not in _STRATEGIES:
        raise InvalidRequestError(
            f"the strategy {type(trainer.strategy).__name__} is not supported; expected one device or 'ddp'. For FSDP2, "
            "fully_shard the model and use autoaccum.Accumulator, with Fabric or without."
        )
    if trainer.world_size > 1 and not trainer._accelerator_connector.use_distributed_sampler:
        raise InvalidRequestError(
            "Trainer(use_distributed_sampler=False) leaves the ranks' data to the caller, and windows are divided over "
            "ranks here; leave it at True."
        )


def refuse_training_step(pl_module: Any) -> None:
    """Refuse a training step that fetches its own data.

    Raises:
        InvalidRequestError: With what is expected.
    """
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise InvalidRequestError(
            "training_step(dataloader_iter) takes its batches itself; expected training_step(batch, batch_idx)."
        )


def refuse_data(loader: Any, schedule: WindowSchedule) -> None:
    """Refuse data of which no window would come.

    Raises:
        InvalidRequestError: With both numbers.
    """
    if isinstance(loader.dataset, IterableDataset) or not loader.drop_last:
        return
    order = loader.dataset if isinstance(loader.sampler, DistributedSampler) else loader.sampler
    if isinstance(order, Sized) and len(order) < schedule.target_batch:
        raise InvalidRequestError(
            f"drop_last=True drops every window: the data has {len(order)} samples and "
            f"target_batch={schedule.target_batch}. Leave it out, or "
            "lower the target."
        )


def refuse_plan(plan: Plan, trainer: Any, is_stream: bool) -> None:
    """Refuse a ready plan for something else.

    Raises:
        InvalidRequestError: With the difference.
    """
    if plan.world_size != trainer.world_size:
        raise InvalidRequestError(
            f"the plan is for {plan.world_size} ranks and the trainer has {trainer.world_size}; tune with as many."
        )
    if plan.levers.precision != "fp32":
        raise InvalidRequestError(
            f"the plan turns precision={plan.levers.precision!r}, which the trainer sets: Trainer(precision=...); tune with "
            "levers='exact'."
        )
    sizes = all_sizes(plan)
    if is_stream and len(sizes) > 1:
        raise InvalidRequestError(
            f"over a stream all micro-batches have one size, and the plan's have {sizes[0]} to {sizes[-1]} rows; tune "
            "with equal_micro_batches=True."
        )
