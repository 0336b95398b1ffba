"""A plan that two numbers cannot say is refused, and only such a one."""

from __future__ import annotations

import logging
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum import InvalidRequestError, Plan
from autoaccum.choose import schedule_for
from autoaccum.integrations.carrying import refuse_early, refuse_uneven, warn_of_levers
from autoaccum.records import Levers


def plan_of(target: int, world_size: int, limit: int, levers: Levers | None = None) -> Plan:
    """The balanced plan for so many ranks where so many rows fit."""
    sizes = schedule_for(target, world_size, limit).sizes[0]
    return Plan(
        target_batch=target,
        world_size=world_size,
        effective_batch=target,
        micro_batch=max(sizes),
        accumulation_steps=len(sizes),
        micro_batch_sizes=sizes,
        max_micro_batch=limit,
        limited_by="memory",
        evidence="measured",
        budget_bytes=1,
        levers=levers or Levers(),
    )


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_plan_passes_where_two_numbers_say_all_of_it(target: int, world_size: int, limit: int) -> None:
    """Micro-batch times steps times ranks is the target for a plan that passes, and never for one that is refused."""
    target = max(target, world_size)
    plan = plan_of(target, world_size, limit)
    product = prod((plan.micro_batch, plan.accumulation_steps, plan.world_size))
    try:
        refuse_uneven(plan, "it", "do without.")
    except InvalidRequestError as error:
        assert product != target
        named = str(error).split("divides: ")[1].split(". Or do without.")[0]
        for division in named.split(", "):
            whole, factors = division.split(" = ")
            numbers = [int(factor) for factor in factors.split(" x ")]
            assert int(whole) == prod(numbers) and int(whole) % world_size == 0
            assert numbers[0] <= limit
    else:
        assert product == target


def test_levers_that_are_carried_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Only what the framework has no word for."""
    with caplog.at_level(logging.WARNING, "autoaccum"):
        warn_of_levers(plan_of(8, 1, 4, Levers(precision="bf16")), ("bf16",))
        assert not caplog.records
        warn_of_levers(plan_of(8, 1, 4, Levers(precision="bf16", checkpointing="full")), ())
    assert "checkpointing=full, precision=bf16: run" in caplog.text


@pytest.mark.parametrize(("world_size", "launched", "is_early"), [(1, "2", True), (2, "2", False), (1, "1", False)])
def test_plan_from_before_the_ranks_knew_of_each_other_is_refused(
    world_size: int, launched: str, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would take the whole batch: what the launcher says is compared where no process group is there yet."""
    monkeypatch.setenv("WORLD_SIZE", launched)
    try:
        refuse_early(plan_of(8, world_size, 4), "do it later.")
    except InvalidRequestError as error:
        assert is_early and "there are 2 ranks, each of which would take the whole batch; do it later." in str(error)
    else:
        assert not is_early
