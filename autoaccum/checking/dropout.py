"""Dropout off, with everything else in the mode it is in: train mode chooses what detection models return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

# Functions of torch that draw a dropout mask, and the name and position of the argument that says how much.
_DROPOUTS: dict[Any, tuple[str, int]] = {
    functional.dropout: ("p", 1),
    functional.dropout1d: ("p", 1),
    functional.dropout2d: ("p", 1),
    functional.dropout3d: ("p", 1),
    functional.alpha_dropout: ("p", 1),
    functional.feature_alpha_dropout: ("p", 1),
    torch.dropout: ("p", 1),
    torch.dropout_: ("p", 1),
    torch.native_dropout: ("p", 1),
    torch.alpha_dropout: ("p", 1),
    torch.alpha_dropout_: ("p", 1),
    torch.feature_dropout: ("p", 1),
    torch.feature_dropout_: ("p", 1),
    torch.feature_alpha_dropout: ("p", 1),
    torch.feature_alpha_dropout_: ("p", 1),
    functional.scaled_dot_product_attention: ("dropout_p", 4),
}


@final
class _DropoutOff(TorchFunctionMode):
    """Calls of dropout inside drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            name, position = _DROPOUTS[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """No dropout while inside, of layers and of functions."""
    # Layers by their own numbers as well: a checkpointed part may run again in a thread that the mode does not reach.
    numbers = [
        (layer, name)
        for layer in module.modules()
        for kinds, name in (((nn.RNNBase, nn.MultiheadAttention), "dropout"), ((_DropoutNd,), "p"))
        if isinstance(layer, kinds)
    ]
    before = [getattr(layer, name) for layer, name in numbers]
    for layer, name in numbers:
        setattr(layer, name, 0.0)
    try:
        with _DropoutOff():
            yield
    finally:
        for (layer, name), number in zip(numbers, before, strict=True):
            setattr(layer, name, number)
