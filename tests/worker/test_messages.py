"""What the two processes say to each other survives the pipe, and nothing else is taken for a message."""

from __future__ import annotations

import msgspec
import pytest
import torch

import autoaccum
from autoaccum.records import (
    Candidate,
    Environment,
    Fit,
    Levers,
    MemoryAccount,
    OutOfMemory,
    PlanRecord,
    ProbeResult,
    Refused,
    Trial,
)
from autoaccum.request import Request
from autoaccum.worker.messages import Bounded, Failed, Finished, Job, Message, Planned, Probed, Started

FIT = Trial(
    candidate=Candidate(micro_batch=4, levers=Levers(precision="bf16")),
    outcome=Fit(peak_bytes=10, peak_allocated_bytes=9, step_times_s=(0.5, 0.25)),
    wall_s=1.5,
    rows_per_step=8,
    purpose="confirm",
)
DEATH = Trial(
    candidate=Candidate(micro_batch=8),
    outcome=OutOfMemory(cause="process", phase="backward", message='ended by "signal 9"\nand more: é'),
    wall_s=0.0,
    rows_per_step=8,
)
FLOOR = Trial(
    candidate=Candidate(micro_batch=1),
    outcome=Refused(bound="floor", phase="forward", message="Expected more than 1 value"),
    wall_s=0.1,
    rows_per_step=2,
)
ENVIRONMENT = Environment(
    device="cpu",
    device_name="x86_64",
    model="Net",
    optimizer="AdamW",
    batch="4 rows",
    python_version="3.11",
    torch_version="2.6",
    autoaccum_version="0.1",
    platform="Linux",
)
PLAN = PlanRecord(
    target_batch=9,
    world_size=2,
    rank=1,
    effective_batch=9,
    micro_batch=2,
    accumulation_steps=2,
    micro_batch_sizes=(2, 2),
    max_micro_batch=3,
    limited_by="memory",
    evidence="exact",
    budget_bytes=100,
    trials=(FIT, DEATH, FLOOR),
    warnings=("a <note>",),
    environment=ENVIRONMENT,
)
RESULT = ProbeResult(
    max_micro_batch=4,
    limited_by="data",
    evidence="measured",
    measured_peak_bytes=None,
    budget_bytes=100,
    trials=(FIT,),
    memory=MemoryAccount(
        trainable_bytes=1, frozen_bytes=2, buffer_bytes=3, gradient_bytes=4, trainable_parameters=5, frozen_parameters=6
    ),
)

MESSAGES: list[Message] = [
    Bounded(top=2**40),
    Started(candidate=Candidate(micro_batch=3), purpose="probe"),
    Finished(trial=FIT),
    Finished(trial=DEATH),
    Finished(trial=FLOOR),
    Planned(plan=PLAN),
    Probed(result=RESULT),
    Failed(kind="user", text='Traceback:\n  File "é.py"\n'),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_comes_back_equal(message: Message) -> None:
    """Every message is equal to itself after the way through the pipe, and of the same class."""
    back = msgspec.json.decode(msgspec.json.encode(message), type=Message)
    assert back == message and type(back) is type(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_is_one_line(message: Message) -> None:
    """No message contains a line break, whatever its texts hold, since a line is what separates them."""
    assert b"\n" not in msgspec.json.encode(message)


def test_a_plan_made_by_autotune_passes_as_its_record() -> None:
    """The fields of a Plan that `autotune` made are those of the record that is sent."""
    plan = autoaccum.autotune(torch.nn.Linear(4, 2), torch.randn(2, 4), 3, device="virtual:1MiB", levers="none")
    record = PlanRecord(**{name: getattr(plan, name) for name in PlanRecord.__struct_fields__})
    back = msgspec.json.decode(msgspec.json.encode(Planned(plan=record)), type=Message)
    assert isinstance(back, Planned) and back.plan == record


def test_job_comes_back_equal() -> None:
    """A job keeps its target, device and log, and its request is readable as a request of the search."""
    request = Request(target_batch=9, budget="80%", max_micro_batch=4, time_budget_s=1.5, exact=False)
    job = Job(
        target="é.py:build",
        device=None,
        request=msgspec.Raw(msgspec.json.encode(request)),
        log=(FIT, DEATH),
    )
    back = msgspec.json.decode(msgspec.json.encode(job), type=Job)
    assert (back.target, back.device, back.log) == ("é.py:build", None, (FIT, DEATH))
    assert msgspec.json.decode(back.request, type=Request) == request


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Fatal Python error",
        b'{"type": "finished", "trial": {"candidate"',
        b'{"type": "exploded"}',
        b'{"type": "bounded", "top": "many"}',
        b'{"type": "bounded", "top": 3, "more": 1}',
        b'{"top": 3}',
    ],
)
def test_anything_else_is_no_message(line: bytes) -> None:
    """Half a message, an unknown one, or one with other fields raises instead of being half understood."""
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(line, type=Message)
