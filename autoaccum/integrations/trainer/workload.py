"""What a trainer runs for one micro-batch: its data, its loss, its optimizer, its precision. Knows no plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autoaccum.engines import own_optimizer
from autoaccum.errors import InvalidRequestError
from autoaccum.levers import Subject, applied
from autoaccum.preserve import random_states_kept
from autoaccum.records import Levers


def train_loader(trainer: Any) -> DataLoader[Any]:
    """The trainer's own loader, with its collator, its columns removed, and its sampler; nothing is drawn from it.

    Raises:
        InvalidRequestError: When it is no DataLoader, whose data set could be looked at.
    """
    known = trainer.accelerator._dataloaders
    before = list(known)
    try:
        with random_states_kept():
            loader = trainer.get_train_dataloader()
    finally:
        known[:] = before  # accelerate keeps every loader that it prepared until training begins
    if not isinstance(loader, DataLoader):
        raise InvalidRequestError(
            f"get_train_dataloader() gives a {type(loader).__name__}, whose data cannot be looked at; pass sample=: a "
            "batch, a data set, a DataLoader, or a function n -> batch."
        )
    return loader


def refuse_other_batch_size(trainer: Any) -> None:
    """Refuse a loader that yields other micro-batches than the trainer was told to.

    Raises:
        InvalidRequestError: With both numbers.
    """
    loader = train_loader(trainer)
    batch_size = getattr(loader, "batch_size", None)
    size = getattr(loader.batch_sampler, "batch_size", None) if batch_size is None else batch_size
    if size is not None and size != trainer._train_batch_size:
        raise InvalidRequestError(
            f"get_train_dataloader() yields batches of {size} rows where per_device_train_batch_size is "
            f"{trainer._train_batch_size}; make it use self._train_batch_size."
        )


@final
class TrainerStep:
    """The loss of one micro-batch as the trainer computes it: its counting, its inputs, its `compute_loss`.

    The micro-batch is counted as a window of its own: what is measured does not depend on the number.
    """

    is_weighed_elsewhere = True  # `scaling` measures how the trainer weighs micro-batches

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.__qualname__ = f"{type(trainer).__qualname__}.compute_loss {_identity(trainer)}"  # for plans kept in a cache

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        trainer = self._trainer
        _, count = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=count)
        return loss


def _identity(trainer: Any) -> str:
    """A short name of what decides about memory and time besides model and data."""
    args = trainer.args
    functions = (type(trainer).compute_loss, trainer.compute_loss_func)
    codes = [getattr(getattr(function, "__code__", None), "co_code", b"").hex() for function in functions]
    settings = (args.fp16, args.bf16, args.gradient_checkpointing, args.label_smoothing_factor)
    return hashlib.sha256(repr((codes, settings, args.gradient_checkpointing_kwargs)).encode()).hexdigest()[:16]


def optimizer_of(trainer: Any) -> Optimizer | Callable[[list[nn.Parameter]], Optimizer]:
    """The trainer's optimizer where it has one, else a factory of what it would make, which leaves none behind."""
    if trainer.optimizer is not None:
        own: Optimizer = own_optimizer(trainer.optimizer)
        return own

    def made(parameters: list[nn.Parameter]) -> Optimizer:
        try:
            optimizer: Optimizer = trainer.create_optimizer()
        finally:
            trainer.optimizer = None
        start_training = getattr(optimizer, "train", None)  # schedule-free optimizers have a mode
        if callable(start_training):
            start_training()
        _point_at(optimizer, dict(zip(_trainable(trainer), parameters, strict=True)))
        return optimizer

    made.__name__ = type(made(_trainable(trainer))).__name__
    return made


def _trainable(trainer: Any) -> list[nn.Parameter]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


def _point_at(optimizer: Optimizer, given: dict[nn.Parameter, nn.Parameter]) -> None:
    """A prediction runs a copy of the model: the same groups, of the copy's parameters."""
    for group in optimizer.param_groups:
        group["params"] = [given[parameter] for parameter in group["params"]]


@contextmanager
def as_in_training(trainer: Any) -> Iterator[None]:
    """What `train()` turns on, while inside: train mode, checkpointing, autocast; no talking between ranks."""
    with ExitStack() as stack:
        for module in trainer.model.modules():
            stack.callback(setattr, module, "training", module.training)
        trainer.model.train()
        stack.enter_context(replaced(trainer.args, average_tokens_across_devices=False))
        if trainer.args.gradient_checkpointing:
            stack.enter_context(_checkpointing(trainer))
        precision = trainer.accelerator.mixed_precision
        if precision in ("bf16", "fp16"):
            subject = Subject(trainer.model, trainer.args.device)
            stack.enter_context(applied(Levers(precision=precision), subject))
        yield


@contextmanager
def silenced(trainer: Any) -> Iterator[None]:
    """What `compute_loss` logs while inside is nothing that was trained: no callback hears of it, and no row is kept."""
    handler = trainer.callback_handler
    with replaced(trainer, log=lambda *args, **kwargs: None), replaced(handler, callbacks=[]):
        rows = list(trainer.state.log_history)
        try:
            yield
        finally:
            trainer.state.log_history[:] = rows


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object with other values while inside; what was not there is not there afterwards."""
    held = vars(owner)
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                held[name] = before[name]
            else:
                held.pop(name, None)


@contextmanager
def _checkpointing(trainer: Any) -> Iterator[None]:
    """The arguments' own checkpointing, as `train()` turns it on; off again where it was off."""
    model = trainer.model
    if any(vars(module).get("gradient_checkpointing") is True for module in model.modules()):
        yield
        return
    given = dict(trainer.args.gradient_checkpointing_kwargs or {})
    before = [(module, set(vars(module)), _hooks_of(module)) for module in model.modules()]
    if "activation_checkpointing" in vars(trainer.args):  # transformers 5.24; before, it was called gradient checkpointing
        every, offload = given.pop("every_n_layers", 1), given.pop("offload", False)
        model.activation_checkpointing_enable(given or None, every_n_layers=every, offload=offload)
        turn_off = model.activation_checkpointing_disable
    else:
        model.gradient_checkpointing_enable(given or None)
        turn_off = model.gradient_checkpointing_disable
    try:
        yield
    finally:
        turn_off()
        for module, names, hooks in before:
            for name, made in _hooks_of(module).items():
                if made is not hooks.get(name):
                    for handle in made if isinstance(made, list) else [made]:
                        handle.remove()
            for name in [name for name in vars(module) if name not in names]:
                del vars(module)[name]
            vars(module).update(hooks)


def _hooks_of(module: nn.Module) -> dict[str, Any]:
    """Those that make embeddings require gradients, which turning checkpointing off leaves."""
    names = ("_require_grads_hooks", "_require_grads_hook")
    return {name: vars(module)[name] for name in names if vars(module).get(name) is not None}
