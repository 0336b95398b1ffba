"""Frameworks that take optimizer steps in their own way: what cannot be accumulated from outside is refused by name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from autoaccum.errors import InvalidRequestError

_ENGINES = {
    "DeepSpeedEngine": "its engine owns the gradients and steps them itself; give it the plan's numbers "
    "(train_micro_batch_size_per_gpu, gradient_accumulation_steps) instead.",
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


def refuse_own_scaling(optimizer: Optimizer) -> None:
    """Refuse an optimizer of a framework that would divide gradients by a scale that nobody multiplied them with.

    Raises:
        InvalidRequestError: With the remedy.
    """
    strategy = getattr(optimizer, "_strategy", None) if _is_of_lightning(optimizer) else None
    if getattr(getattr(strategy, "precision_plugin", getattr(strategy, "precision", None)), "scaler", None) is not None:
        raise InvalidRequestError(
            "the optimizer was set up by Lightning for fp16 and has a gradient scaler of its own; pass optimizer.optimizer "
            "and scaler=torch.amp.GradScaler()."
        )
    if _is_accelerated(optimizer) and getattr(optimizer, "scaler", None) is not None:
        raise InvalidRequestError(
            "the optimizer was prepared by Accelerate for fp16 and has a gradient scaler of its own; "
            "pass optimizer.optimizer and scaler=optimizer.scaler."
        )


def refuse_deferred_step(optimizer: Optimizer) -> None:
    """Refuse a step that Accelerate would leave out without a word, inside its own accumulation.

    Raises:
        InvalidRequestError: With the remedy.
    """
    state = getattr(optimizer, "gradient_state", None) if _is_accelerated(optimizer) else None
    if state is not None and not state.sync_gradients:
        raise InvalidRequestError(
            "inside accelerator.accumulate(), optimizers of Accelerate do not step; take the window outside of it: the "
            "whole accumulation happens here."
        )


def _is_of_lightning(optimizer: Optimizer) -> bool:
    return any(kind.__name__ in ("LightningOptimizer", "_FabricOptimizer") for kind in type(optimizer).__mro__)


def _is_accelerated(optimizer: Optimizer) -> bool:
    return any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimizer).__mro__)
