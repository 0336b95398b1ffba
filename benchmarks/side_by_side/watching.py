"""What a tool does, seen from outside: passes, refused allocations, and what it left changed."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_OOM_TEXTS = ("can't allocate memory", "out of memory", "could not create a primitive", "bad_alloc")

_COUNTED = "_counted_as_oom"


def is_oom(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a GPU, as torch and its libraries word it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OOM_TEXTS)


@dataclass
class Counts:
    """What ran.

    Attributes:
        passes: Forward passes begun on real tensors.
        ooms: Forward passes, backward passes and optimizer steps that were refused memory.
    """

    passes: int = 0
    ooms: int = 0


def count(model: nn.Module, optimizer: type[torch.optim.Optimizer]) -> Counts:
    """Count from now on, for all models and optimizers of these classes in this process."""
    counts = Counts()

    def counted(run: Callable[..., Any], is_pass: bool = False) -> Callable[..., Any]:
        @functools.wraps(run)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_pass:
                counts.passes += not any(type(value).__name__ == "FakeTensor" for value in (*args, *kwargs.values()))
            try:
                return run(*args, **kwargs)
            except Exception as error:
                if is_oom(error) and not hasattr(error, _COUNTED):  # a backward pass may run inside an optimizer's step
                    setattr(error, _COUNTED, True)
                    counts.ooms += 1
                raise

        return wrapper

    kind: Any = type(model)
    kind.forward = counted(kind.forward, is_pass=True)
    torch.autograd.backward = counted(torch.autograd.backward)
    optimizer.step = counted(optimizer.step)  # type: ignore[method-assign]
    return counts


@dataclass(frozen=True)
class State:
    """Fingerprints of all that a search should leave as it was."""

    parts: dict[str, str]

    def changed_since(self, before: State) -> list[str]:
        """The parts that differ, by name."""
        return [name for name, mark in self.parts.items() if mark != before.parts[name]]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """To the bit: weights, buffers, gradients, modes, the optimizer's state, and the random number generators."""
    parts = {
        "weights": _mark(dict(model.named_parameters())),
        "buffers": _mark(dict(model.named_buffers())),
        "gradients": _mark({name: parameter.grad for name, parameter in model.named_parameters()}),
        "mode": _mark([module.training for module in model.modules()]),
        "random numbers": _mark([torch.get_rng_state(), random.getstate(), np.random.get_state()]),
    }
    if torch.cuda.is_initialized():
        parts["random numbers on the GPU"] = _mark(torch.cuda.get_rng_state_all())
    if optimizer is not None:
        parts["optimizer"] = _mark(optimizer.state_dict())
    return State(parts)


def _mark(value: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())
