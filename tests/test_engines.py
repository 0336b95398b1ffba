"""Frameworks that own the step are refused by name, with what to do instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from autoaccum import Accumulator, Workload
from autoaccum.engines import own_optimizer, own_scaler, own_scheduler, refuse_deferred_step, refuse_engines
from autoaccum.errors import InvalidRequestError


def engine(name: str, module: str) -> nn.Module:
    """A model of a class of that name, from that library."""
    kind = type(name, (nn.Linear,), {"__module__": module})
    made: nn.Module = kind(2, 1)
    return made


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("DeepSpeedEngine", "deepspeed.runtime.engine", "train_micro_batch_size_per_gpu"),
        ("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel", "fully_shard"),
    ],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_engine_is_refused(name: str, module: str, remedy: str, is_inside: bool) -> None:
    """By its class, as the model and inside of it, before anything is run."""
    model = engine(name, module)
    model = nn.Sequential(model) if is_inside else model
    with pytest.raises(InvalidRequestError, match=f"{name}.*{remedy}"):
        Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=1)


def test_class_of_the_same_name_is_not_refused() -> None:
    """A class of one's own may be called the same."""
    refuse_engines(engine("DeepSpeedEngine", "mine"))


def test_engine_is_not_searched_either() -> None:
    """A search would step its optimizer behind its back: refused before anything is run, with the way to tune."""
    with pytest.raises(InvalidRequestError, match=r"Tune the module before deepspeed\.initialize.*deepspeed_config"):
        Workload(engine("DeepSpeedEngine", "deepspeed.runtime.engine"), torch.randn(2, 2))


def test_plain_parts_are_taken_as_they_are() -> None:
    """An optimizer, a scheduler and a scaler of torch are what steps, and steps when it is told to."""
    optimizer = SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    scheduler, scaler = StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
    assert own_optimizer(optimizer) is optimizer
    assert own_scheduler(scheduler) is scheduler
    assert own_scaler(optimizer, scaler) is scaler
    refuse_deferred_step(optimizer, scheduler, None)
