"""What tests of whole searches share: a clock that models set, traces that are made once, and a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.prediction.forecast import Traced, traced
from autoaccum.workload import Workload

TICK_S = 1 / 1024  # sums of it are exact


class Clock:
    """Stands still but where a model says how long it takes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


_TRACED: dict[Any, Traced] = {}


def traced_once(workload: Workload, device: Any, **more: Any) -> Traced:
    """What is traced depends on neither budgets nor targets nor times, so that all searches of a model share it."""
    model = type(workload.module)
    shapes = tuple(tuple(parameter.shape) for parameter in workload.module.parameters())
    key = (model.__module__, model.__qualname__, shapes, workload.optimizer_name, workload.source.description)
    key = (*key, workload.source.length, more["levers"], more["multiple_of"])
    if key not in _TRACED:
        _TRACED[key] = traced(workload, device, **more)
    return _TRACED[key]


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
