"""Which runs are not alike, and what else is noted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autoaccum.comparing.compare import compare
from autoaccum.errors import InvalidRequestError
from autoaccum.records import (
    PlanRecord,
)

from .runs import HOST, plan, result


def test_plan_and_probe_are_not_alike() -> None:
    """A plan is not compared with a probe's result."""
    with pytest.raises(InvalidRequestError, match=r"a\.json and b\.json are a Plan and a ProbeResult"):
        compare(plan(), result(), 0.05, base_name="a.json", new_name="b.json", allow_different_environments=True)


def test_different_targets_are_always_refused() -> None:
    """Optimizer steps of different sizes are not compared, whatever is allowed."""
    other = plan(effective_batch=128, target_batch=128, micro_batch_sizes=(32,) * 4, accumulation_steps=4)
    with pytest.raises(InvalidRequestError, match="target_batch=64 and 128"):
        compare(plan(), other, 0.05, allow_different_environments=True)


def test_measurement_and_prediction_are_refused() -> None:
    """What was predicted is not compared with what was measured."""
    with pytest.raises(InvalidRequestError, match="only predicted"):
        compare(plan(), plan(evidence="predicted"), 0.05)


DIFFERENT = [
    ("device", "cuda:0", r"device is 'cpu' and 'cuda'"),
    ("device_name", "arm64", r"device_name is 'x86_64, 4 threads' and 'arm64'"),
    ("model", "Bert", r"model is 'Gpt' and 'Bert'"),
    ("optimizer", "SGD", r"optimizer is 'AdamW' and 'SGD'"),
    ("torch_version", "2.6.0", r"torch_version is '2.13.0' and '2.6.0'"),
    ("python_version", "3.13.0", r"python_version is '3.12' and '3.13'"),
    ("world_size", 2, r"world_size is 1 and 2"),
]


def elsewhere(**changes: Any) -> PlanRecord:
    return plan(environment=msgspec.structs.replace(HOST, **changes))


@pytest.mark.parametrize(("name", "value", "said"), DIFFERENT)
def test_different_environments_are_refused(name: str, value: object, said: str) -> None:
    """Runs of different conditions are not compared; the error names what differs, and nothing else."""
    with pytest.raises(InvalidRequestError, match=f"conditions: {said}. Measure both") as refused:
        compare(plan(), elsewhere(**{name: value}), 0.05)
    assert "--allow-different-environments" in str(refused.value)


@pytest.mark.parametrize("name", [name for name, _, _ in DIFFERENT])
def test_different_environments_can_be_allowed(name: str) -> None:
    """On request they are compared, and the report says what differs."""
    value = 2 if name == "world_size" else "9.9"
    found = compare(plan(), elsewhere(**{name: value}), 0.05, allow_different_environments=True)
    assert found.passed and [note.partition(" ")[0] for note in found.notes] == [name]


@pytest.mark.parametrize(
    ("name", "value"), [("batch", "8 longer rows"), ("driver", "570"), ("platform", "BSD"), ("autoaccum_version", "2.0")]
)
def test_what_explains_a_change_is_noted(name: str, value: str) -> None:
    """Another sample, driver, system or version of autoaccum is noted and refuses nothing."""
    found = compare(plan(), elsewhere(**{name: value}), 0.05)
    assert [note.partition(" ")[0] for note in found.notes] == [name]


def test_equal_devices_and_small_updates_are_alike() -> None:
    """Which of several equal devices was used, and Python's last number, make no difference."""
    one, other = elsewhere(device="cuda:0"), elsewhere(device="cuda:1", python_version="3.12.9")
    assert compare(one, other, 0.05).notes == ()


def test_environment_that_is_not_known_is_refused() -> None:
    """A run that does not say where it was measured is compared on request only."""
    with pytest.raises(InvalidRequestError, match="does not say where it was measured"):
        compare(plan(), plan(environment=None), 0.05)
    assert compare(plan(), plan(environment=None), 0.05, allow_different_environments=True).passed


def test_different_requests_are_noted() -> None:
    """Numbers of the request that shape the answer are noted where they differ."""
    notes = compare(plan(), plan(multiple_of=8, objective="memory"), 0.05).notes
    assert [note.partition(" ")[0] for note in notes] == ["multiple_of", "objective"]
