"""DeepSpeed's configuration from a plan: three numbers that agree, nothing else touched; and its engine really trains so."""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import InvalidRequestError, Plan
from autoaccum.integrations.deepspeed import deepspeed_config
from autoaccum.records import Levers

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
}


def plan_of(target: int, world_size: int, limit: int, *, equal: bool = True, **levers: Any) -> Plan:
    """A plan for so many ranks, where so many rows fit, with levers put in by hand."""
    plan = autoaccum.predict(
        nn.Linear(4, 2),
        torch.randn(2, 4),
        target,
        gpu="8GiB",
        world_size=world_size,
        max_micro_batch=limit,
        equal_micro_batches=equal,
    )
    values = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return Plan(**{**values, "levers": Levers(**levers)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "world_size", "limit", "micro_batch", "steps"), [(256, 8, 5, 4, 8), (16, 2, 8, 8, 1), (64, 1, 4, 4, 16)]
)
def test_triple_is_exact(target: int, world_size: int, limit: int, micro_batch: int, steps: int) -> None:
    """The product of the three is the target, with the largest micro-batch that fits and divides."""
    config = deepspeed_config(plan_of(target, world_size, limit))
    assert config == {
        "train_batch_size": target,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": steps,
    }
    assert target == micro_batch * steps * world_size


@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False])
def test_target_that_does_not_divide_is_refused_with_near_ones(equal: bool) -> None:
    """256 over 7 ranks would be rounded: refused when tuning for equal micro-batches, or else when writing it down."""
    with pytest.raises(InvalidRequestError) as caught:
        deepspeed_config(plan_of(256, 7, 2, equal=equal))
    for near in ("252 = 2 x 18 x 7", "259 = 1 x 37 x 7", "266 = 2 x 19 x 7"):
        assert near in str(caught.value)


def test_target_smaller_than_the_ranks_is_refused() -> None:
    """Every rank needs a sample."""
    with pytest.raises(InvalidRequestError, match="target_batch=6 is smaller than world_size=8"):
        plan_of(6, 8, 4)


@pytest.mark.slow
def test_uneven_plan_is_refused_with_its_own_division() -> None:
    """3 + 3 + 2 on each of two ranks: what equal micro-batches would be is said."""
    with pytest.raises(
        InvalidRequestError, match=r"micro-batches of 2 and 3 rows.*equal_micro_batches=True.*16 = 2 x 4 x 2"
    ):
        deepspeed_config(plan_of(16, 2, 3, equal=False))


def test_auto_is_replaced_and_nothing_else() -> None:
    """The three numbers stand where "auto" stood; the rest of the config comes out as it went in, "auto" elsewhere too."""
    given = copy.deepcopy(AUTO)
    config = deepspeed_config(plan_of(256, 8, 5), given)
    assert config == {
        **AUTO,
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
    }
    assert list(config) == list(AUTO)
    assert given == AUTO
    config["zero_optimization"]["stage"] = 3
    assert given == AUTO


@pytest.mark.parametrize("managed", [True, False])
def test_numbers_that_agree_stay(managed: bool) -> None:
    """A config that says the same already is kept, and so is who owns the boundary of a window."""
    given = {"train_batch_size": 256, "managed_gradient_accumulation": managed, "gradient_accumulation_steps": None}
    config = deepspeed_config(plan_of(256, 8, 5), given)
    assert config["managed_gradient_accumulation"] is managed
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (256, 8)


def test_numbers_that_disagree_are_refused_naming_both() -> None:
    """DeepSpeed would refuse the product, or train another batch."""
    with pytest.raises(InvalidRequestError) as caught:
        deepspeed_config(plan_of(256, 8, 5), {"train_batch_size": 128, "gradient_accumulation_steps": 8})
    assert "the config has train_batch_size=128 and the plan has train_batch_size=256" in str(caught.value)
    assert "world_size=8" in str(caught.value)


@pytest.mark.slow
def test_search_before_the_ranks_knew_of_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ranks was read as 1 too early; where ranks share a batch it may be 1 all the same."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InvalidRequestError, match=r"there are 8 ranks.*deepspeed\.init_distributed\(\) before the search"):
        deepspeed_config(plan_of(64, 1, 4))
    assert deepspeed_config(plan_of(64, 1, 4), {"tensor_parallel": {"autotp_size": 8}})["train_batch_size"] == 64


def test_path_is_not_a_config() -> None:
    """A file has to be read first."""
    with pytest.raises(InvalidRequestError, match=r"config is a str; expected a dict: json\.load"):
        deepspeed_config(plan_of(64, 1, 4), "ds_config.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_precision_is_autocast(precision: str, dtype: str) -> None:
    """What was measured: weights in float32 under autocast, not weights that are cast."""
    config = deepspeed_config(plan_of(64, 1, 4, precision=precision))
    assert config["torch_autocast"] == {"enabled": True, "dtype": dtype}
    assert precision not in config


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        {"bf16": {"enabled": True}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}},
    ],
)
def test_precision_that_the_config_has_stays(block: dict[str, Any]) -> None:
    """One block for it is enough."""
    assert deepspeed_config(plan_of(64, 1, 4, precision="bf16"), block).keys() - AUTO.keys() == block.keys()
    assert deepspeed_config(plan_of(64, 1, 4), block).keys() - AUTO.keys() == block.keys()


@pytest.mark.parametrize("block", [{"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}])
def test_other_precision_is_refused_naming_both(block: dict[str, Any]) -> None:
    """Two precisions cannot both be meant."""
    with pytest.raises(InvalidRequestError, match=rf"enables {next(iter(block))} .*turns precision to bf16"):
        deepspeed_config(plan_of(64, 1, 4, precision="bf16"), block)


@pytest.mark.slow
def test_block_that_is_off_is_no_precision() -> None:
    """`"enabled": false` says nothing against the plan's."""
    config = deepspeed_config(plan_of(64, 1, 4, precision="bf16"), {"fp16": {"enabled": False}})
    assert config["torch_autocast"]["dtype"] == "bfloat16"


@pytest.mark.slow
def test_levers_without_a_word_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Activation checkpointing and offloaded activations are not what DeepSpeed's blocks of like names do."""
    with caplog.at_level(logging.WARNING, "autoaccum"):
        config = deepspeed_config(plan_of(64, 1, 4, checkpointing="full", offload="cpu"))
    assert "checkpointing=full, offload=cpu: run the loop inside plan.applied" in caplog.text
    assert not {"activation_checkpointing", "zero_optimization"} & set(config)


# -- its engine

CHILD = """
import copy, datetime, os
world_size, stage, managed, checkpointing = {arguments}
rank = 1 if world_size == 2 and os.fork() == 0 else 0  # before torch is there
import torch
import torch.distributed as dist
from torch import nn
import autoaccum
from autoaccum.integrations.deepspeed import deepspeed_config

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, which takes a minute

dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=world_size,
                        timeout=datetime.timedelta(seconds=100))
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29500")  # read, though the group is there

torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], nn.Linear(6, 3))
whole = copy.deepcopy(net)
inputs, targets = torch.randn(24, 6), torch.randint(3, (24,))
loss_fn = nn.functional.cross_entropy

class Fuse(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = net, 0
    def forward(self, rows):
        self.calls += 1
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.net(rows)

model = Fuse()
levers = {{"checkpointing": ["full"]}} if checkpointing else "none"
plan = autoaccum.autotune(model, (inputs[:2], targets[:2]), 8, loss_fn=loss_fn, device="virtual:1GiB", levers=levers,
                          equal_micro_batches=True)
if checkpointing:
    plan = autoaccum.Plan(**{{**{{name: getattr(plan, name) for name in autoaccum.Plan.__struct_fields__}},
                            "levers": autoaccum.records.Levers(checkpointing="full", checkpointed_blocks=3)}})
given = {{"train_batch_size": "auto", "zero_optimization": {{"stage": stage}}, "zero_allow_untested_optimizer": True,
         "managed_gradient_accumulation": managed}}
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(plan, given))
numbers = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]

reference = torch.optim.SGD(whole.parameters(), lr=0.3, momentum=0.9)
share, micro_batch = 8 // world_size, plan.micro_batch
with plan.applied(model):
    for window in range(3):
        first = 8 * window + rank * share
        for row in range(first, first + share, micro_batch):
            rows = slice(row, row + micro_batch)
            engine.backward(loss_fn(engine(inputs[rows]), targets[rows]))
            if managed:
                engine.step()
        if not managed:
            engine.step()
        rows = slice(8 * window, 8 * window + 8)
        loss_fn(whole(inputs[rows]), targets[rows]).backward()
        reference.step()
        reference.zero_grad()
with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
    ours = torch.cat([p.detach().flatten() for p in net.parameters()])
theirs = torch.cat([p.detach().flatten() for p in whole.parameters()])
try:
    autoaccum.autotune(engine, (inputs, targets), 8, loss_fn=loss_fn, device="virtual:1GiB")
except autoaccum.InvalidRequestError as error:
    refusal = str(error)
dist.destroy_process_group()
if rank:
    os._exit(0)
if world_size == 2:
    assert os.wait()[1] == 0
answer([float((ours - theirs).norm() / theirs.norm()), numbers, engine.global_steps, refusal])
os._exit(0)  # a thread of gloo may still hold a tensor, which would abort Python's own end
"""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or sys.platform == "win32",
    reason="deepspeed is not installed, or ranks cannot be forked",
)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("world_size", "stage", "managed", "checkpointing"),
    [
        (1, 2, True, False),
        pytest.param(1, 0, True, True, marks=pytest.mark.slow),
        pytest.param(1, 1, True, False, marks=pytest.mark.slow),
        pytest.param(1, 2, True, True, marks=pytest.mark.slow),
        pytest.param(1, 2, False, False, marks=pytest.mark.slow),
        pytest.param(1, 3, True, False, marks=pytest.mark.slow),
        pytest.param(2, 0, True, False, marks=pytest.mark.slow),
        pytest.param(2, 2, False, False, marks=pytest.mark.slow),
        pytest.param(2, 3, True, False, marks=pytest.mark.slow),
    ],
)
def test_engine_takes_the_big_batchs_steps(
    run_child: Any, tmp_path: Any, world_size: int, stage: int, managed: bool, checkpointing: bool
) -> None:
    """Three optimizer steps of the engine with the written config are those of the big batch, on one or two gloo ranks."""
    arguments = (world_size, stage, managed, checkpointing)
    error, numbers, steps, refusal = run_child(CHILD.format(arguments=arguments, store=tmp_path / "store"))
    assert error <= 2e-6
    assert (numbers, steps) == ([8, 2, 4 // world_size], 3)
    assert "Tune the module before deepspeed.initialize" in refusal
