"""One trial out of what all ranks say of theirs."""

from __future__ import annotations

import pytest

from autoaccum.errors import RankMismatchError
from autoaccum.records import Candidate, Fit, Outcome, OutOfMemory, Trial
from autoaccum.session.saying import Said, trial_of_all


def said(outcome: Outcome, *, size: int = 4, wall_s: float = 1.0, called_off: bool = False) -> Said:
    trial = Trial(candidate=Candidate(micro_batch=size), outcome=outcome, wall_s=wall_s, rows_per_step=2 * size)
    return Said(trial, None, 0.0, called_off)


FITS, FAILED = Fit(peak_bytes=1), OutOfMemory(cause="allocator", phase="backward")


def test_worst_outcome_and_longest_time_count() -> None:
    """A size fits when it fits on every rank, and takes as long as on the slowest."""
    found = trial_of_all([said(FITS, wall_s=3.0), said(FAILED)])
    assert (found.outcome, found.wall_s) == (FAILED, 3.0)


def test_called_off_ranks_do_not_count() -> None:
    """What stopped because of another rank says nothing of itself."""
    assert trial_of_all([said(OutOfMemory(cause="unclear"), called_off=True), said(FAILED)]).outcome == FAILED


def test_different_trials_are_a_bug() -> None:
    """Ranks that ran different sizes have lost each other."""
    with pytest.raises(RankMismatchError, match="different trials"):
        trial_of_all([said(FITS), said(FITS, size=5)])
