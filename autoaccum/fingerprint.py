"""What the outcome of a search depends on, as text: to know one's own trials and plans again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from types import CodeType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from autoaccum.batches.structure import tensors_in
from autoaccum.devices.base import AbstractDevice
from autoaccum.preserve import random_states_kept
from autoaccum.request import Request
from autoaccum.workload import Workload

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of functions and objects: another one in every process
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_DEEPEST = 4  # settings in objects in objects
_LOOKED_AT_ROWS = 2


def fingerprint_of(workload: Workload, device: AbstractDevice, request: Request, world_size: int) -> dict[str, str]:
    """Model structure, settings and types, optimizer, sample, device and driver, versions, and every number of the call.

    Values of weights do not count, and neither does how much memory happens to be free.
    """
    numbers = {name: getattr(request, name) for name in request.__struct_fields__ if name not in _NOT_OF_THE_ANSWER}
    return {
        "model": digest(_structure(workload.module)),
        "model_name": type(workload.module).__name__,
        "optimizer": f"{workload.optimizer_name} {digest(_options(workload))}",
        "loss": _named(workload.loss.training_step or workload.loss.loss_fn),
        "batch": f"{workload.source.description} {digest(_rows_of(workload))}",
        "device": f"{device.name} {device.description()} {device.total_bytes()}",
        "driver": device.driver(),
        "torch": str(torch.__version__),
        "autoaccum": version("autoaccum"),
        "world_size": str(world_size),
        "request": msgspec.json.encode(numbers).decode(),
    }


_NOT_OF_THE_ANSWER = ("time_budget_s", "storage", "cache", "predict")


def digest(value: Any) -> str:
    """A short name of any plain value."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def _structure(module: nn.Module) -> list[Any]:
    """Every module with its class and its own settings, every tensor with its shape and type."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [
        _ADDRESS.sub("", repr(module)),
        [[name, _class_of(part), _settings(part)] for name, part in module.named_modules()],
        [
            [name, list(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad]
            for name, tensor in tensors
        ],
    ]


def _class_of(value: Any) -> list[str]:
    """A class by its name and by what its forward pass does."""
    kind = type(value)
    return [f"{kind.__module__}.{kind.__qualname__}", _code(getattr(kind, "forward", None))]


def _settings(value: Any, depth: int = 0) -> Any:
    """The plain values that an object holds, and those of plain objects in it; no tensors, modules, lists that grow."""
    if isinstance(value, _PLAIN):
        return str(value)
    if isinstance(value, tuple):
        return [_settings(part, depth) for part in value]
    if callable(value) and not isinstance(value, nn.Module):
        return _code(value)
    if depth == _DEEPEST or isinstance(value, (Tensor, list, set)) or (depth and isinstance(value, nn.Module)):
        return ""
    held = value if isinstance(value, Mapping) and depth else getattr(value, "__dict__", {})
    registries = isinstance(value, nn.Module)
    return {
        str(name): _settings(part, depth + 1)
        for name, part in held.items()
        if not (registries and isinstance(part, Mapping) and str(name).startswith("_"))
    }


def _code(function: Any) -> str:
    """What a function does, as far as its own instructions say."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return str(getattr(function, "__qualname__", "")) if not isinstance(code, CodeType) else digest(_instructions(code))


def _instructions(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), [_constant(value) for value in code.co_consts], list(code.co_names)]


def _constant(value: Any) -> Any:
    """Sets of texts have another order in every process."""
    if isinstance(value, CodeType):
        return _instructions(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else _ADDRESS.sub("", repr(value))


def _options(workload: Workload) -> list[str]:
    groups = workload.make_optimizer().param_groups
    return [repr({name: value for name, value in group.items() if name != "params"}) for group in groups]


def _rows_of(workload: Workload) -> list[Any]:
    """Shapes and types of a few rows, since not every source says what they are."""
    with random_states_kept():
        batch = workload.source.take(min(_LOOKED_AT_ROWS, workload.source.length or _LOOKED_AT_ROWS))
    return [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors_in(batch)]


def _named(function: Any) -> str:
    """A loss by its name, by what it does, and by its settings where it is an object that has some."""
    if function is None:
        return ""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    what = [_class_of(function), _settings(function)] if isinstance(function, nn.Module) else _code(function)
    return f"{name} {digest(what)}"
