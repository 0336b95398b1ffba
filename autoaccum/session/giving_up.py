"""What to raise when nothing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from autoaccum.budget import weights_in_words
from autoaccum.choose import Schedule
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import NothingFitsError, RankMismatchError
from autoaccum.records import Budget, Candidate, Fit, OutOfMemory, Trial
from autoaccum.search import standing
from autoaccum.units import format_bytes
from autoaccum.workload import Workload

_MOST_CONFIRMS = 6  # plans whose own step failed, before it is not the size that is at fault


def is_of_memory(trial: Trial) -> bool:
    """Whether it is certain that memory ran out."""
    return isinstance(trial.outcome, OutOfMemory) and trial.outcome.cause != "unclear"


def cap_of_plans(log: Sequence[Trial], largest: int) -> int:
    """No larger micro-batch is worth planning with, after the plans whose own step failed under these levers.

    The first one may be a little too large. After another one, half of it: what a whole step needs besides its micro-batch,
    such as the rows of all of them, is not seen while one is probed.
    """
    failed = _failed_plans(log)
    return min(failed) // 2 if len(failed) > 1 else largest


def refuse_growing_plans(log: Sequence[Trial], schedule: Schedule, trials: Sequence[Trial], least: int = 1) -> None:
    """Give up when several plans' own steps failed, or that of the smallest micro-batch, though their micro-batches fit.

    Args:
        log: Trials under the levers of the schedule.
        trials: All trials, for the error to carry.
        least: The smallest micro-batch that may be planned with.

    Raises:
        NothingFitsError: With what may be the reason.
    """
    failed = _failed_plans(log)
    if len(failed) < _MOST_CONFIRMS and min(failed, default=inf) > least:
        return
    raise NothingFitsError(
        f"the plan's own step of {len(schedule.sizes[0])} micro-batches does not fit, although one micro-batch of "
        f"{schedule.micro_batch} rows does: memory grows from one micro-batch to the next. "
        "Does the model, the loss or the sample keep tensors, or does collating the whole step need the memory?",
        trials,
    )


def _failed_plans(log: Sequence[Trial]) -> list[int]:
    """The micro-batches of the plans whose own step was too large."""
    failed = [trial for trial in log if trial.purpose == "confirm" and not isinstance(trial.outcome, Fit)]
    return [trial.candidate.micro_batch for trial in failed if getattr(trial.outcome, "bound", None) != "floor"]


def nothing_runs(
    trials: Sequence[Trial],
    errors: Mapping[Candidate, Exception],
    device: AbstractDevice,
    budget: Budget,
    workload: Workload,
) -> Exception:
    """The user's own error where memory is not certain, else what was missing."""
    certain = [trial for trial in trials if is_of_memory(trial)]
    if not certain and errors:
        return errors[min(errors, key=lambda candidate: candidate.micro_batch)]
    if not certain:
        message = next(str(getattr(trial.outcome, "message", "")) for trial in reversed(trials))
        return RankMismatchError(f"no size runs on some other rank, whose own traceback says where ({message[:300]}).")
    lowest = min(certain, key=lambda trial: trial.candidate.micro_batch)
    assert isinstance(lowest.outcome, OutOfMemory)
    floor = standing(trials).floor
    refused = f" Sizes up to {floor} are too small to run at all." if floor else ""
    peak, phase, message = lowest.outcome.peak_bytes, lowest.outcome.phase, lowest.outcome.message
    ran_out = f"memory ran out in the {phase} phase" if phase else "it failed"
    needed = f"it took {format_bytes(peak)}" if peak else ran_out
    remedy = "Raise the budget, or use a smaller model, sample or optimizer state."
    if lowest.outcome.cause == "allocator" and device.limit_in_words():
        remedy = f"This process is {device.limit_in_words()}: raise that, or use a smaller model, sample or optimizer state."
    if phase == "data":
        remedy = (
            "The batch itself did not fit, before the model was called: the rows of a whole optimizer step are held at "
            "once, as by a loop that hands them over. Raise the budget, or use a smaller target_batch or smaller rows."
        )
    if lowest.outcome.cause == "process":
        remedy = "A process that dies at the smallest size may have met a bug in the target rather than a lack of memory."
    return NothingFitsError(
        f"micro_batch={lowest.candidate.micro_batch} does not fit into {format_bytes(budget.budget_bytes)} on "
        f"{device.name}: {needed} ({message[:300]}). Before the first trial {format_bytes(budget.held_bytes)} were held. "
        f"{weights_in_words(workload)}{refused} {remedy}",
        trials,
    )
