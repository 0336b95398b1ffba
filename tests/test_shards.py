"""What is seen of FSDP2 from outside, on one rank of its own; several are in test_lockstep.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from autoaccum.shards import is_sharded, local_part, mesh_size

needs_rest = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 of this torch cannot go on after a step that was broken off"
)

HEAD = """
import torch, tempfile
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from autoaccum.preserve import preserved
from autoaccum.shards import bring_to_rest, local_part, make_ready, mesh_size, split_again
from autoaccum.admitting import unwrapped
from autoaccum.workload import num_bytes
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)

def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    fully_shard(model[0], reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=False)
"""


def run_alone(run_child: Callable[..., Any], source: str) -> Any:
    """The source on one rank."""
    # Not Python's own end: a thread of gloo may still hold a tensor, which would abort it.
    return run_child(HEAD + source + "\nimport os; os._exit(0)\n")


def test_other_models_are_not_sharded() -> None:
    """A plain model has no shards, and its tensors are themselves."""
    model = nn.Linear(2, 2)
    assert not is_sharded(model)
    assert local_part(model.weight) is model.weight
    assert mesh_size(model.weight) is None


@pytest.mark.slow
def test_local_part_is_the_memory_itself(run_child: Callable[..., Any]) -> None:
    """What is written to it is in the distributed tensor; bytes are counted there."""
    source = """
weight = made()[1].weight
with torch.no_grad():
    local_part(weight).fill_(3.0)
answer([float(weight.full_tensor().sum()), mesh_size(weight), num_bytes([weight]), local_part(weight).requires_grad])
"""
    assert run_alone(run_child, source) == [48.0, 1, 64, False]


@pytest.mark.slow
def test_model_that_a_forward_pass_left_whole_is_split_again(run_child: Callable[..., Any]) -> None:
    """Its parameters are those that an optimizer has."""
    source = """
model = made()
own = list(model.parameters())
with torch.no_grad():
    model(torch.randn(3, 4))
whole = any(now is not before for now, before in zip(model.parameters(), own))
unwrapped(model)
answer([whole, all(now is before for now, before in zip(model.parameters(), own))])
"""
    assert run_alone(run_child, source) == [True, True]


@pytest.mark.slow
@needs_rest
def test_pass_that_was_broken_off_leaves_nothing(run_child: Callable[..., Any]) -> None:
    """After an error in the middle of backward the next gradient is as if it had not been, and all is sharded."""
    source = """
model = made()
make_ready(model)
batch = torch.randn(3, 4)
model(batch).sum().backward()
expected = [p.grad.to_local().clone() for p in model.parameters()]
bring_to_rest(model)
class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("broken off")
handle = model[0].register_forward_hook(lambda module, args, output: Failing.apply(output))
try:
    model(batch).sum().backward()
except KeyError:
    pass
handle.remove()
bring_to_rest(model)
rest = all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
model(batch).sum().backward()
answer([rest, all(torch.equal(p.grad.to_local(), e) for p, e in zip(model.parameters(), expected))])
"""
    assert run_alone(run_child, source) == [True, True]


@pytest.mark.slow
@needs_rest
def test_hooks_of_the_first_pass_survive_a_snapshot(run_child: Callable[..., Any]) -> None:
    """A state dict taken while parameters are whole has the shards, as without a search before it."""
    source = """
model = made()
make_ready(model)
with preserved(model, device=torch.device("cpu")):
    pass
with torch.no_grad():
    model(torch.randn(3, 4))
answer(all(isinstance(value, DTensor) for value in model.state_dict().values()))
"""
    assert run_alone(run_child, source)


@pytest.mark.slow
@needs_rest
def test_snapshot_puts_shards_and_their_gradients_back(run_child: Callable[..., Any]) -> None:
    """Bit for bit, in the same memory, whether kept in memory or on disk."""
    source = """
found = []
for on_disk in (False, True):
    model = made()
    make_ready(model)
    model(torch.randn(3, 4)).sum().backward()
    tensors = [*model.parameters(), *[p.grad for p in model.parameters()]]
    before = [t.to_local().detach().clone() for t in tensors]
    places = [t.to_local().data_ptr() for t in tensors]
    with preserved(model, device=torch.device("cpu"), on_disk=on_disk):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
                p.grad.mul_(2.0)
                p.grad = None
    now = [*model.parameters(), *[p.grad for p in model.parameters()]]
    found.append(all(torch.equal(t.to_local(), value) for t, value in zip(now, before)))
    found.append(places == [t.to_local().data_ptr() for t in now])
answer(found)
"""
    assert run_alone(run_child, source) == [True] * 4


@pytest.mark.slow
def test_prediction_of_shards_is_refused(run_child: Callable[..., Any]) -> None:
    """Nothing can be traced, which is said with what can be done instead."""
    source = """
import autoaccum
try:
    autoaccum.predict(made(), torch.randn(3, 4), 8, gpu="24GiB")
except autoaccum.InvalidRequestError as error:
    answer(str(error))
"""
    assert "predict it before it is sharded" in run_alone(run_child, source)


@pytest.mark.slow
def test_implementation_that_shards_do_not_take_is_no_lever(run_child: Callable[..., Any]) -> None:
    """Steps of torch without a rule for sharded parameters are skipped with torch's reason, before anything runs."""
    source = """
from autoaccum.levers import space_for
from autoaccum.levers.base import Subject
model = made()
reasons = {}
for kind in (torch.optim.SGD, torch.optim.AdamW):
    space = space_for(["optimizer_impl"], Subject(model, torch.device("cpu"), kind(model.parameters(), lr=0.1)))
    reasons[kind.__name__] = [one.level for one in space.skipped if "sharding strategy" in one.reason]
answer(reasons)
"""
    assert run_alone(run_child, source) == {"SGD": ["fused"], "AdamW": []}
