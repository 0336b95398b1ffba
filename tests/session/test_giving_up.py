"""What is raised when nothing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
import torch
from torch import nn

from autoaccum.choose import schedule_for
from autoaccum.devices.virtual import VirtualDevice
from autoaccum.errors import NothingFitsError, RankMismatchError
from autoaccum.records import Budget, Candidate, OutOfMemory, Refused, Trial
from autoaccum.session.giving_up import cap_of_plans, is_of_memory, nothing_runs, refuse_growing_plans
from autoaccum.workload import Workload


def failed(size: int, outcome: OutOfMemory | Refused, purpose: Literal["probe", "confirm"] = "probe") -> Trial:
    return Trial(candidate=Candidate(micro_batch=size), outcome=outcome, wall_s=1.0, rows_per_step=2 * size, purpose=purpose)


NO_MEMORY = OutOfMemory(cause="allocator", phase="backward", message="CUDA out of memory")
UNCLEAR = OutOfMemory(cause="unclear", phase="forward", message="unable to find an engine")


def raised(trials: Sequence[Trial], errors: Mapping[Candidate, Exception] | None = None) -> Exception:
    workload = Workload(nn.Linear(3, 2), torch.randn(4, 3))
    budget = Budget(budget_bytes=2**20, held_bytes=2**10, total_bytes=2**30)
    return nothing_runs(trials, errors or {}, VirtualDevice("1GiB"), budget, workload)


def test_memory_that_ran_out_is_said_of_the_smallest_size() -> None:
    """The error names the smallest size, the phase, the budget and what to do, and carries the trials."""
    trials = [failed(2, NO_MEMORY), failed(1, NO_MEMORY)]
    error = raised(trials)
    assert isinstance(error, NothingFitsError) and error.trials == tuple(trials)
    for part in ("micro_batch=1", "1.00 MiB", "backward phase", "Raise the budget"):
        assert part in str(error)


def test_unclear_errors_are_the_users_own() -> None:
    """Where no trial says memory for certain, the user's error of the smallest size comes out as it is."""
    own, other = ValueError("mine"), ValueError("other")
    errors = {Candidate(micro_batch=2): other, Candidate(micro_batch=1): own}
    assert raised([failed(2, UNCLEAR), failed(1, UNCLEAR)], errors) is own


def test_errors_of_another_rank_are_said_to_be_there() -> None:
    """A rank without an error of its own points to the one that has it."""
    assert isinstance(raised([failed(1, UNCLEAR)]), RankMismatchError)


def test_unclear_is_not_of_memory() -> None:
    """Only what is certain counts as memory."""
    assert is_of_memory(failed(1, NO_MEMORY)) and not is_of_memory(failed(1, UNCLEAR))


def test_plans_that_grow_are_given_up_after_six() -> None:
    """Whole steps that fail six times although their micro-batches fit are the user's to mend; fewer are tried again."""
    log = [failed(size, NO_MEMORY, "confirm") for size in (64, 60, 30, 15, 7, 3)]
    refuse_growing_plans(log[:5], schedule_for(120, 1, 7), log)
    with pytest.raises(NothingFitsError, match="memory grows from one micro-batch to the next"):
        refuse_growing_plans(log, schedule_for(120, 1, 3), log)


def test_plan_of_the_smallest_micro_batch_is_the_last_one() -> None:
    """Where the whole step fails with the smallest micro-batch there is, nothing else is left to try."""
    log = [failed(2, NO_MEMORY, "confirm")]
    refuse_growing_plans(log, schedule_for(8, 1, 2), log, least=1)
    with pytest.raises(NothingFitsError, match="does not fit, although one micro-batch of 2 rows does"):
        refuse_growing_plans(log, schedule_for(8, 1, 2), log, least=2)


def test_plans_shrink_by_halves_after_the_second_failure() -> None:
    """One failed plan is answered by the next size below, two by half of the smaller one; failed probes do not count."""
    log = [failed(90, NO_MEMORY), failed(64, NO_MEMORY, "confirm"), failed(60, NO_MEMORY, "confirm")]
    assert [cap_of_plans(log[:num], 100) for num in (1, 2, 3)] == [100, 100, 30]


def test_batch_that_does_not_fit_is_not_the_models_fault() -> None:
    """Where the data itself ran out of memory, the error names the rows of the whole step."""
    error = raised([failed(1, OutOfMemory(cause="allocator", phase="data", message="can't allocate memory"))])
    assert "the rows of a whole optimizer step are held at once" in str(error)
    assert "smaller target_batch" in str(error) and "smaller model" not in str(error)
