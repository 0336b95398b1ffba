"""Frameworks that own the step are refused by name, with what to do instead."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim import SGD

from autoaccum import Accumulator
from autoaccum.engines import refuse_deferred_step, refuse_engines, refuse_own_scaling
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


def test_plain_optimizer_is_not_refused() -> None:
    """An optimizer of torch steps when it is told to."""
    optimizer = SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    refuse_own_scaling(optimizer)
    refuse_deferred_step(optimizer)
