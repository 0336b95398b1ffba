"""Everything that the windows of one training run share."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autoaccum.accumulate.arguments import check_options, slicer_for
from autoaccum.admitting import checked_optimizer, refuse_time_as_rows, single_device, unwrapped
from autoaccum.backward import Backward
from autoaccum.batches.layout import BatchDim
from autoaccum.batches.opaque import SplitFn
from autoaccum.batches.slicing import CostFn
from autoaccum.batches.weights import Weigher
from autoaccum.caps import Caps
from autoaccum.devices import device_for
from autoaccum.engines import own_optimizer, own_scaler, refuse_engines, refuse_own_scaling
from autoaccum.errors import InvalidRequestError, RankMismatchError
from autoaccum.levers import under_autocast
from autoaccum.losses import UNUSED_LOSS_FN, LossFn, MicroBatchLoss, TrainingStep
from autoaccum.plan import Plan
from autoaccum.records import Levers
from autoaccum.reduction import Reducer, fingerprint_of
from autoaccum.rewind import Rewinder
from autoaccum.sharding import Sharding
from autoaccum.workload import Weight
from autoaccum.wrapped import is_compiled, refuse_wrapped

logger = logging.getLogger("autoaccum")


@final
class Training:
    """The user's model, optimizer and options, with what has been learned from the windows so far. See `Accumulator`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        plan: Plan | None,
        micro_batch: int | None,
        loss_fn: LossFn | None,
        training_step: TrainingStep | None,
        weight: Weight,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float | None,
        scheduler: Any,
        batch_dim: BatchDim,
        split: SplitFn | None,
        process_group: Any,
        on_oom: Literal["replay", "raise"],
        cost: CostFn | None,
        max_cost: float | None,
    ) -> None:
        refuse_engines(model)
        module = unwrapped(model)
        if isinstance(model, nn.DataParallel):
            module = model  # spreads a micro-batch over several devices in its own forward
        self.given = (optimizer, scheduler)  # as a framework has prepared them
        refuse_own_scaling(optimizer)
        scaler, optimizer = own_scaler(optimizer, scaler), own_optimizer(optimizer)
        if not isinstance(checked_optimizer(optimizer, module), Optimizer):
            raise InvalidRequestError(
                f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer over model.parameters()."
            )
        refuse_wrapped(model, process_group)
        check_options(scaler, max_grad_norm, scheduler, on_oom, split)
        self.model, self.module, self.optimizer, self.plan = model, module, optimizer, plan
        self.wrapped = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        self.is_compiled = is_compiled(model)
        self.max_grad_norm, self.scheduler, self.on_oom = max_grad_norm, scheduler, on_oom
        self.loss = MicroBatchLoss(module, loss_fn, training_step)
        if loss_fn is not None and training_step is not None:
            logger.warning(UNUSED_LOSS_FN)
        self.weigher = Weigher(weight, None if training_step is not None else loss_fn)
        self.device = device_for(None, single_device(module))
        if process_group is None and isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        self.reducer = Reducer(process_group)
        self.slicer = slicer_for(plan, micro_batch, cost, max_cost, self.reducer, batch_dim=batch_dim, split=split)
        levers, place = Levers() if plan is None else plan.levers, self.device.torch_device
        self.owns_scaler = scaler is None and levers.precision == "fp16"
        scaler = torch.amp.GradScaler(place.type) if self.owns_scaler else scaler
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.loss_in_window = under_autocast(self.loss, levers, place)
        self.slicer.refuse = partial(refuse_time_as_rows, module=module)
        self.caps = Caps(whole=cost is None)
        self.sharding = Sharding(module, self.reducer.ranks)
        self.backward = Backward(self.scaler, module=module, look_for_others=not self.sharding.is_sharded)
        self.rewinder = Rewinder(module, self.device.torch_device)
        self.counts = {"windows": 0, "skipped": 0, "replays": 0}
        self.fingerprinted = bool(self.wrapped) or self.sharding.is_sharded  # those start with the same parameters

        self.broken = False  # a rank has failed in the optimizer's step, which others have taken

    def fingerprint(self) -> float:
        """A number made of all parameters, before the first step of a model that nothing has made the same on all ranks."""
        return 0.0 if self.fingerprinted or self.reducer.world_size == 1 else fingerprint_of(self.module.parameters())

    def refuse_broken(self) -> None:
        """Refuse to go on with ranks whose parameters differ.

        Raises:
            RankMismatchError: After an optimizer step that failed on some rank.
        """
        if self.broken:
            raise RankMismatchError(
                "an optimizer step has failed on a rank, and others may have taken it: parameters may differ between ranks. "
                "Load a checkpoint on every rank and make a new Accumulator."
            )
