"""How a model is called with a batch, and what of its output is the loss.

Knows nothing of optimizers, memory or trials.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.batches.structure import is_plain_sequence
from autoaccum.errors import InvalidRequestError
from autoaccum.units import shown

# Keys under which models return the sum of the other losses.
_TOTALS = frozenset({"total_loss", "loss_total", "total", "total_losses", "overall_loss", "sum_loss"})


def checked_loss(loss: Any, origin: str) -> Tensor:
    """The loss as a scalar with a graph, or an error that says what it is instead."""
    if not isinstance(loss, Tensor):
        raise InvalidRequestError(f"{origin} returned {type(loss).__name__} as the loss; expected a scalar tensor.")
    if loss.numel() != 1:
        raise InvalidRequestError(
            f"{origin} returned a loss of shape {tuple(loss.shape)}, which is not a scalar; reduce it, for example with "
            ".mean()."
        )
    if not loss.requires_grad:
        raise InvalidRequestError(
            f"{origin} returned a loss that does not require grad: nothing trainable leads to it. "
            "Was it detached, converted with .item(), or computed under no_grad?"
        )
    return loss if loss.ndim == 0 else loss.reshape(())


def inputs_and_target(batch: Any) -> tuple[Any, Any]:
    """A pair, or all parts but the last and the last."""
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)) or len(batch) < 2:
        raise InvalidRequestError(
            f"loss_fn needs samples shaped (input, target); this one is a {type(batch).__name__}. "
            "Pass training_step=(model, batch) -> loss instead."
        )
    return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]


def call(module: nn.Module, inputs: Any) -> Any:
    """Call with keywords for a mapping, with positions for a tuple or list of arguments, else with the one value."""
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs) and binds(module, **inputs):
        return module(**inputs)
    if is_plain_sequence(inputs) and not is_item_list(inputs) and binds(module, *inputs):
        return module(*inputs)
    if isinstance(inputs, Mapping) and not binds(module, inputs):
        _refuse_unknown_keys(module, inputs)
    return module(inputs)


def _refuse_unknown_keys(module: nn.Module, inputs: Mapping[Any, Any]) -> None:
    """Say which keys are too many: as one argument, the mapping would only be said to lack all the others."""
    taken = _names_of_arguments(module)
    known = {key: value for key, value in inputs.items() if key in taken}
    unknown = [key for key in inputs if key not in taken]
    if unknown and binds(module, **known):
        listed, expected = ", ".join(map(repr, unknown)), ", ".join(taken) or "none"
        raise InvalidRequestError(
            f"the batch has keys that {type(module).__name__}.forward does not take: {listed}; expected only its arguments, "
            f"{expected}. Leave the others out, or pass training_step=(model, batch) -> loss."
        )


def binds(module: nn.Module, /, *args: Any, **kwargs: Any) -> bool:
    """Whether the forward of the module can be called so; when that cannot be seen, it is taken to be."""
    function = getattr(module.forward, "__func__", None)
    signature = _signature_of_forward(module)
    if signature is None:
        return True
    try:
        signature.bind(*(() if function is None else (module,)), *args, **kwargs)
    except TypeError:
        return False
    return True


def _names_of_arguments(module: nn.Module) -> list[str]:
    """What the forward of the module can be given by name."""
    signature = _signature_of_forward(module)
    if signature is None:
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in by_name]
    return names if getattr(module.forward, "__func__", None) is None else names[1:]  # not the module itself


def _signature_of_forward(module: nn.Module) -> inspect.Signature | None:
    """Of the class's own function where there is one, so that it is looked up once, not at every call."""
    forward = module.forward
    return _signature(getattr(forward, "__func__", forward))


@functools.lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def is_item_list(batch: Any) -> bool:
    """A list of per-item mappings or pairs, which goes to the model as one argument."""
    return (
        isinstance(batch, list)
        and bool(batch)
        and (all(isinstance(item, Mapping) for item in batch) or all(isinstance(item, tuple) for item in batch))
    )


def is_one_per_row(inputs: list[Any], target: Any) -> bool:
    """Whether a list holds one input for every row of the target, and is no list of columns: it is one argument then."""
    rows = len(target) if isinstance(target, (list, tuple)) or (isinstance(target, Tensor) and target.ndim) else None
    columns = all(isinstance(item, Tensor) and item.ndim and len(item) == rows for item in inputs)
    return len(inputs) == rows and not columns


def own_loss(output: Any) -> Tensor | None:
    """The loss that the model itself returns, None when it returns none.

    Raises:
        InvalidRequestError: When a total stands beside its parts, without the key "loss" to say which of them it is.
    """
    if isinstance(output, Tensor):
        return output if output.numel() == 1 else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    if isinstance(output, Mapping):
        parts = [part for part in output.values() if isinstance(part, Tensor)]
        scalars = bool(parts) and len(parts) == len(output) and all(part.numel() == 1 for part in parts)
        return _sum_of_parts(output) if scalars else None
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].ndim == 0:
        return output[0]
    return None


def _sum_of_parts(parts: Mapping[Any, Tensor]) -> Tensor:
    """The sum of what has a gradient, as training would use it; what is detached is there for a log."""
    trained = {name: part for name, part in parts.items() if part.requires_grad}
    total = next((name for name in parts if str(name).lower() in _TOTALS), None)
    others = [name for name in trained if name != total]
    if total is not None and others:
        raise InvalidRequestError(
            f"the model returned {shown(total)} beside {shown(others[0])}; expected one loss, or parts to be summed, and "
            'not a total of them as well. Return {"loss": ...}, or pass training_step=(model, batch) -> loss.'
        )
    return torch.stack([part.reshape(()) for part in (trained or parts).values()]).sum()
