"""The user's model, loss and optimizer, as one thing that can take a training step.

Decides which module is run in place of the model, and in which mode. Knows nothing of budgets or trials.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autoaccum.admitting import (
    OptimizerFactory,
    check_sample_device,
    check_step,
    checked_optimizer,
    refuse_time_as_rows,
    single_device,
    unwrapped,
)
from autoaccum.batches.layout import BatchDim
from autoaccum.batches.opaque import SplitFn
from autoaccum.batches.source_kinds import AbstractSource, BatchSource
from autoaccum.batches.sources import source_of
from autoaccum.batches.weights import Tokens, Weigher
from autoaccum.engines import own_optimizer, refuse_engines
from autoaccum.errors import InvalidRequestError
from autoaccum.losses import UNUSED_LOSS_FN, LossFn, MicroBatchLoss, TrainingStep
from autoaccum.preserve import random_states_kept
from autoaccum.records import MemoryAccount
from autoaccum.shards import local_part
from autoaccum.units import shown

Weight = str | Tokens | Callable[[Any], float]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@final
class Workload:
    """What one training step is made of.

    Args:
        model: At least one trainable parameter; all parameters on one device. A DDP wrapper is taken off for probing.
        sample: A batch of any size >= 1, a `Dataset`, a `DataLoader` (never iterated), or a callable `n -> batch`.
        loss_fn: `loss_fn(output, target)` -> scalar mean loss, for samples shaped `(input, ..., target)`.
        training_step: `training_step(model, batch)` -> scalar loss; full control, wins over `loss_fn` with a warning.
        optimizer: An `Optimizer` on this model's parameters, or a factory `params -> Optimizer`. None: AdamW.
        weight: What the loss is a mean over: "samples", `tokens("labels")`, or `batch -> number`.
        batch_dim: Which dimension holds the rows, where it cannot be seen: an int, or `{leaf name: int or None}`.
        split: `split(batch, sizes) -> list of micro-batches`, for batches that cannot be cut by rows.

    Raises:
        InvalidRequestError: When one of them cannot be used as it is; the message says which and what to do.

    Leaves behind:
        Nothing: the model is neither run nor changed. One that FSDP2 shards holds its shards, as after a training step.

    Example:
        >>> import torch
        >>> Workload(torch.nn.Linear(4, 2), torch.randn(8, 4)).num_trainable
        10
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        *,
        loss_fn: LossFn | None = None,
        training_step: TrainingStep | None = None,
        optimizer: Optimizer | OptimizerFactory | None = None,
        weight: Weight = "samples",
        batch_dim: BatchDim = None,
        split: SplitFn | None = None,
    ) -> None:
        if split is not None and not callable(split):
            raise InvalidRequestError(f"split={shown(split)} cannot be called; expected a function.")
        self.weigher = Weigher(weight, None if training_step is not None else loss_fn)
        self.batch_dim, self.split = batch_dim, split
        refuse_engines(model)
        self.model = model
        self.module = unwrapped(model)
        single_device(self.module, meta_allowed=True)
        self.weight = weight
        self.warnings: list[str] = []
        self.loss = MicroBatchLoss(self.module, loss_fn, training_step, warn=self.warn)
        if loss_fn is not None and training_step is not None:
            self.warn(UNUSED_LOSS_FN)
        self._optimizer = checked_optimizer(own_optimizer(optimizer), self.module)
        with random_states_kept():
            self.source: AbstractSource = source_of(sample, batch_dim, split)
        if isinstance(self.source, BatchSource):
            check_sample_device(sample, self.device)
            if batch_dim is None:
                refuse_time_as_rows(sample, self.module)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    def refuse_meta(self) -> None:
        """Refuse a model without values, which can be predicted but not run.

        Raises:
            InvalidRequestError: With the remedy.
        """
        single_device(self.module)

    def move_to(self, device: torch.device) -> None:
        """Move the model; its parameters stay the same objects, so an optimizer over them stays valid."""
        self.module.to(device)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters that get a gradient, a tied one once."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @property
    def num_trainable(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.trainable)

    @property
    def own_optimizer(self) -> Optimizer | None:
        """The user's optimizer, None where one is made for each trial."""
        return self._optimizer if isinstance(self._optimizer, Optimizer) else None

    @property
    def optimizer_name(self) -> str:
        """The optimizer in words."""
        if self._optimizer is None:
            return "AdamW (assumed)"
        named = (
            self._optimizer
            if inspect.isroutine(self._optimizer) or inspect.isclass(self._optimizer)
            else type(self._optimizer)
        )
        return str(getattr(named, "__name__", type(self._optimizer).__name__))

    def make_optimizer(self) -> Optimizer:
        """The user's optimizer, or a fresh one.

        Raises:
            InvalidRequestError: When the factory returns something else.
        """
        if isinstance(self._optimizer, Optimizer):
            return self._optimizer
        made = torch.optim.AdamW(self.trainable) if self._optimizer is None else self._optimizer(self.trainable)
        if not isinstance(made, Optimizer):
            raise InvalidRequestError(
                f"the optimizer factory returned {type(made).__name__}; expected a torch.optim.Optimizer."
            )
        check_step(made)
        return made

    def copied(self) -> Workload:
        """The same workload on a deep copy of its model, its optimizer and a loss that is part of a module; one sample.

        Raises:
            Exception: Whatever the user's own classes raise when they are copied.
        """
        memo: dict[int, Any] = {}
        module = copy.deepcopy(self.module, memo)
        optimizer = copy.deepcopy(self.own_optimizer, memo)
        loss_fn, training_step = (
            copy.deepcopy(function, memo) if isinstance(_owner(function), nn.Module) else function
            for function in (self.loss.loss_fn, self.loss.training_step)
        )
        other = copy.copy(self)
        other.model = other.module = module
        other.warnings = []
        other.loss = MicroBatchLoss(module, loss_fn, training_step, warn=other.warn)
        other._optimizer = self._optimizer if optimizer is None else optimizer
        return other

    def resident(self) -> list[Tensor]:
        """Tensors that are on the device whether or not a step runs: parameters, buffers, optimizer state; DDP's buckets."""
        state = [] if self.own_optimizer is None else list(self.own_optimizer.state.values())
        found = [*self.module.parameters(), *self.module.buffers(), *tree_leaves(state)]
        return [*(local_part(tensor) for tensor in found if isinstance(tensor, Tensor)), *_buckets_of(self.model)]

    def account(self, optimizer_state_bytes: int | None = None) -> MemoryAccount:
        """Where the memory goes that does not depend on the batch; a tied weight counts once."""
        trainable = self.trainable
        frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        return MemoryAccount(
            trainable_bytes=num_bytes(trainable),
            frozen_bytes=num_bytes(frozen),
            buffer_bytes=num_bytes(self.module.buffers()),
            gradient_bytes=num_bytes(trainable),
            optimizer_state_bytes=optimizer_state_bytes,
            trainable_parameters=sum(parameter.numel() for parameter in trainable),
            frozen_parameters=sum(parameter.numel() for parameter in frozen),
        )

    def training_batch_norms(self) -> list[str]:
        """Names of the BatchNorm layers that normalise by the batch they see."""
        return [
            name or type(module).__name__
            for name, module in self.module.named_modules()
            if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None)
        ]

    def set_training_mode(self) -> None:
        """Train mode where the whole model is in eval mode, as a freshly loaded one is; BatchNorm stays as it is.

        A model whose root is in train mode is left alone: the user has chosen which parts are frozen.
        """
        if self.module.training:
            return
        self.warn(
            "The model is in eval mode. It was probed in train mode, but for layers that keep batch statistics; "
            "call model.train() first to train those as well."
        )
        for module in self.module.modules():
            if not isinstance(module, _BATCH_NORMS):
                module.training = True

    def warn(self, text: str) -> None:
        """Say something once."""
        if text not in self.warnings:
            self.warnings.append(text)


def _owner(function: Any) -> Any:
    """What a method is bound to, else the callable itself."""
    return getattr(function, "__self__", function)


def _buckets_of(model: nn.Module) -> list[Tensor]:
    """Stands for what DistributedDataParallel takes when it wraps a model, as much as all gradients, and shows to nobody."""
    if not isinstance(model, DistributedDataParallel):
        return []
    size = sum(p.numel() * p.element_size() for p in model.module.parameters() if p.requires_grad)
    return [torch.empty(size, dtype=torch.uint8, device="meta")]


def num_bytes(tensors: Iterable[Any]) -> int:
    """Bytes that these tensors hold here, a shared storage once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            storage = local_part(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def step_hooks_suspended(optimizer: Optimizer) -> Iterator[None]:
    """Leave out the optimizer's step hooks while inside: they feed averages and loggers that no snapshot can put back."""
    registries = [vars(optimizer).get(name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    kept = [(registry, dict(registry)) for registry in registries if registry]
    for registry, _ in kept:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in kept:
            registry.update(hooks)
