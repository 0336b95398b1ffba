"""Predictions of a model without values, traced once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Plan
from autoaccum.prediction import gpu_traces
from autoaccum.records import Prediction

MIB, GIB = 2**20, 2**30
SMALL, MIDDLE, LARGE, TURING = "RTX 3060 12GB", "RTX 4090 24GB", "A100 80GB", "T4 16GB"


def heavy(width: int = 4096, depth: int = 3, hidden: int = 8) -> nn.Module:
    """A model without values; each row keeps `depth` wide activations."""
    layers: list[nn.Module] = [nn.Linear(hidden, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    with torch.device("meta"):
        return nn.Sequential(*layers, nn.Linear(width, hidden)).to("meta")


def predict(
    target: int = 10_000_000, gpu: Any = SMALL, model: nn.Module | None = None, sample: Any = None, **more: Any
) -> Plan:
    """A plan for a model of 34 million parameters, of which 12 GiB hold some hundred thousand rows."""
    with traced_once() if model is sample is None and not more.keys() & STEP else nullcontext():
        given = meta_model() if model is None else model
        return autoaccum.predict(given, torch.randn(4, 8) if sample is None else sample, target, gpu=gpu, **more)


STEP = {"loss_fn", "training_step", "optimizer", "weight", "batch_dim", "split"}

_TRACED: dict[object, Any] = {}


@contextmanager
def traced_once(target: str = "") -> Iterator[None]:
    """The training step of this target is traced for each GPU once, for all tests."""
    true = gpu_traces._isolated

    def isolated(attempt: Any) -> Any:
        traces, (gpu,) = attempt.func.__self__, attempt.args
        key = (target, repr(gpu), traces._multiple_of, traces._levers)
        if key not in _TRACED:
            _TRACED[key] = true(attempt)
        return _TRACED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_traces, "_isolated", isolated)
        yield


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 8))


def foreseen(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction
