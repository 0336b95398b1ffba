"""What the outcome of a search depends on, as text: to know one's own trials and plans again."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

import msgspec
import torch
from torch import nn

from autoaccum.devices.base import AbstractDevice
from autoaccum.request import Request
from autoaccum.workload import Workload


def fingerprint_of(workload: Workload, device: AbstractDevice, request: Request, world_size: int) -> dict[str, str]:
    """Model structure and types, optimizer, sample, device and driver, versions, and every number of the call.

    Values of weights do not count, and neither does how much memory happens to be free.
    """
    numbers = {name: getattr(request, name) for name in request.__struct_fields__ if name not in _NOT_OF_THE_ANSWER}
    return {
        "model": digest(_structure(workload.module)),
        "model_name": type(workload.module).__name__,
        "optimizer": f"{workload.optimizer_name} {digest(_options(workload))}",
        "loss": _named(workload.loss.training_step or workload.loss.loss_fn),
        "batch": workload.source.description,
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
    """Every module with its own settings, every tensor with its shape and type."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [
        repr(module),
        [
            [name, list(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad]
            for name, tensor in tensors
        ],
    ]


def _options(workload: Workload) -> list[str]:
    groups = workload.make_optimizer().param_groups
    return [repr({name: value for name, value in group.items() if name != "params"}) for group in groups]


def _named(function: Any) -> str:
    return "" if function is None else str(getattr(function, "__qualname__", type(function).__name__))
