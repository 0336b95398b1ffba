"""Frameworks that take optimizer steps in their own way: what cannot be accumulated from outside is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autoaccum.errors import InvalidRequestError

_ENGINES = {
    "DeepSpeedEngine": "its engine owns the gradients and steps them itself. Tune the module before deepspeed.initialize, "
    "and give it the plan's numbers (train_micro_batch_size_per_gpu, gradient_accumulation_steps) by "
    "autoaccum.integrations.deepspeed.deepspeed_config(plan).",
    "FullyShardedDataParallel": "FSDP1 keeps flat parameters that cannot be accumulated from outside; "
    "use torch.distributed.fsdp.fully_shard (FSDP2).",
}


def refuse_engines(model: object) -> None:
    """Refuse models that take their optimizer steps in their own way.

    Raises:
        InvalidRequestError: With the reason and the remedy.
    """
    parts = list(model.modules()) if isinstance(model, nn.Module) else [model]
    _refuse_own_backward(parts)
    for part in parts:
        for kind in type(part).__mro__:
            if kind.__name__ in _ENGINES and kind.__module__.split(".")[0] in ("deepspeed", "torch"):
                raise InvalidRequestError(f"model contains a {kind.__name__}: {_ENGINES[kind.__name__]}")


def _refuse_own_backward(parts: Iterable[object]) -> None:
    """Refuse a module of Lightning Fabric in mixed precision, whose outputs only `fabric.backward` may go back from."""
    for part in parts:
        if any(kind.__name__ == "_FabricModule" for kind in type(part).__mro__):
            precision = type(part._strategy.precision)  # type: ignore[attr-defined]
            methods = (getattr(precision, name, None) for name in ("pre_backward", "backward", "post_backward"))
            if any(getattr(method, "__qualname__", "Precision").split(".")[0] != "Precision" for method in methods):
                raise InvalidRequestError(
                    f"Fabric's {precision.__name__} wants fabric.backward(loss) after the wrapped model; pass model.module "
                    "instead, and call it in fabric.autocast() inside training_step. Gradients are reduced here."
                )


def refuse_own_scaling(optimizer: Any) -> None:
    """Refuse an optimizer of Lightning that would divide gradients by a scale that nobody multiplied them with.

    Raises:
        InvalidRequestError: With the remedy.
    """
    is_of_lightning = any(kind.__name__ in ("LightningOptimizer", "_FabricOptimizer") for kind in type(optimizer).__mro__)
    strategy = getattr(optimizer, "_strategy", None) if is_of_lightning else None
    if getattr(getattr(strategy, "precision_plugin", getattr(strategy, "precision", None)), "scaler", None) is not None:
        raise InvalidRequestError(
            "the optimizer was set up by Lightning for fp16 and has a gradient scaler of its own; pass optimizer.optimizer "
            "and scaler=torch.amp.GradScaler()."
        )


def own_optimizer(optimizer: Any) -> Any:
    """What really steps: the optimizer inside of one that Accelerate has prepared, else the one given.

    The wrapper leaves steps out while Accelerate accumulates, and hands what is set on a copy of it to the original.
    """
    while _is_accelerated(optimizer, "AcceleratedOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def own_scheduler(scheduler: Any) -> Any:
    """The scheduler inside of one that Accelerate has prepared, else the one given."""
    return scheduler.scheduler if _is_accelerated(scheduler, "AcceleratedScheduler") else scheduler


def own_scaler(optimizer: Any, scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """The gradient scaler that Accelerate has put into an optimizer it prepared for fp16, else the one given.

    Raises:
        InvalidRequestError: When both are there, and are not the same.
    """
    prepared = optimizer.scaler if _is_accelerated(optimizer, "AcceleratedOptimizer") else None
    if prepared is not None and scaler is not None and scaler is not prepared:
        raise InvalidRequestError(
            "the optimizer was prepared by Accelerate for fp16 with a gradient scaler of its own, and scaler= is another "
            "one; leave scaler= out."
        )
    return scaler if prepared is None else prepared


def refuse_deferred_step(*prepared: Any) -> None:
    """Refuse a window that Accelerate would take for a part of its own accumulation.

    Args:
        prepared: The optimizer and the scheduler as they were given.

    Raises:
        InvalidRequestError: With the remedy.
    """
    accelerated = [part for part in prepared if _is_accelerated(part, "AcceleratedOptimizer", "AcceleratedScheduler")]
    if not all(part.gradient_state.sync_gradients for part in accelerated):
        raise InvalidRequestError(
            "accelerator.sync_gradients is False: inside accelerator.accumulate(), or after one that ended in the middle of "
            "a window, optimizers and schedulers of Accelerate do not step. Take the window outside of it: the whole "
            "accumulation happens here."
        )


def _is_accelerated(part: Any, *names: str) -> bool:
    return any(kind.__name__ in names and kind.__module__.split(".")[0] == "accelerate" for kind in type(part).__mro__)
