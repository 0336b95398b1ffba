"""A model that has been trained, and whether anything of it has changed."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.workload import Workload


class Everything(nn.Module):
    """Buffers, dropout, a temperature that is a plain tensor, a count in Python, and an error where it is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.temperature, self.calls, self.fails = torch.tensor(2.0), 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails:
            raise ZeroDivisionError("the model divides by zero")
        random.random(), np.random.rand()
        return self.layers(x) / self.temperature


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Everything of a model and an optimizer that training could change, copied."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "identities": {name: (id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()},
        "types": {name: type(tensor) for name, tensor in tensors.items()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.clone()) for name, p in model.named_parameters()
        },
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "hooks": (len(optimizer._optimizer_step_pre_hooks), [len(m._forward_hooks) for m in model.modules()]),
        "modes": [module.training for module in model.modules()],
        "calls": getattr(model, "calls", None),
    }


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def same(first: Any, second: Any) -> bool:
    """Equal, tensors bit for bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


class Trained(NamedTuple):
    """A model that has been trained for a step and has gradients and hooks, and its workload."""

    model: Everything
    optimizer: Optimizer
    workload: Workload
    seen: list[str]
