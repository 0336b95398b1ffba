"""Frameworks that take optimizer steps in their own way: what cannot be accumulated from outside is refused by name."""

from __future__ import annotations

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
    parts = model.modules() if isinstance(model, nn.Module) else [model]
    for part in parts:
        for kind in type(part).__mro__:
            if kind.__name__ in _ENGINES and kind.__module__.split(".")[0] in ("deepspeed", "torch"):
                raise InvalidRequestError(f"model contains a {kind.__name__}: {_ENGINES[kind.__name__]}")


def refuse_own_scaling(optimizer: Optimizer) -> None:
    """Refuse an optimizer of Accelerate that would divide gradients by a scale that nobody multiplied them with.

    Raises:
        InvalidRequestError: With the remedy.
    """
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


def _is_accelerated(optimizer: Optimizer) -> bool:
    return any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimizer).__mro__)
