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
from autoaccum.session.giving_up import is_of_memory, nothing_runs, refuse_growing_plans
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


def test_plans_that_grow_are_given_up_after_three() -> None:
    """Whole steps that fail three times although their micro-batches fit are the user's to mend; fewer are tried again."""
    log = [failed(2, NO_MEMORY, "confirm")] * 3
    refuse_growing_plans(log[:2], schedule_for(8, 1, 2), log)
    with pytest.raises(NothingFitsError, match="memory grows from one micro-batch to the next"):
        refuse_growing_plans(log, schedule_for(8, 1, 2), log)
