"""How many whole optimizer steps a setting is run for."""

from __future__ import annotations

from typing import Any, Literal

from autoaccum.records import Candidate, Fit, Levers, Trial
from autoaccum.session.pace import Pace, pace_of


def ran(step_s: float, rows: int = 8, purpose: Literal["probe", "confirm"] = "confirm") -> Trial:
    outcome = Fit(peak_bytes=1, step_times_s=(step_s,))
    candidate = Candidate(micro_batch=4, levers=Levers())
    return Trial(candidate=candidate, outcome=outcome, wall_s=step_s, rows_per_step=rows, purpose=purpose)


def pace(*trials: Trial, sizes: tuple[int, ...] = (4, 4), **changes: Any) -> Pace:
    asked: dict[str, Any] = {"time_budget_s": None, "elapsed_s": 0.0, "is_in_lockstep": False, **changes}
    return pace_of(sizes, rows=sum(sizes), logs=(trials, trials), **asked)


def test_first_step_is_not_enough() -> None:
    """Two whole steps are run, of which the second is timed, and more are asked for."""
    found = pace(ran(0.01))
    assert found.windows == [(4, 4)] * 2 and found.note is None
    assert found.is_enough is not None and not found.is_enough([0.01])


def test_steps_that_agree_are_enough() -> None:
    """When the median is known, no more steps are run."""
    found = pace(ran(0.01))
    assert found.is_enough is not None and found.is_enough([0.01] * 12)


def test_clearly_beaten_is_enough() -> None:
    """A setting whose best step is slower than another's median by more than a tenth need not be known better."""
    found = pace(ran(0.01))
    assert found.is_enough is not None
    assert found.is_enough([0.02, 0.03, 0.02])
    assert not found.is_enough([0.02, 0.03])
    assert not found.is_enough([0.0101, 0.03, 0.02])


def test_steps_that_take_long_are_cut() -> None:
    """Steps that would take more than half a minute run two micro-batches, and the note says how long a whole one takes."""
    found = pace(ran(31.0, rows=8), sizes=(4, 2, 2))
    assert found.windows == [(4, 2)] * 2 and found.is_enough is None
    assert found.note is not None and "31.0 s" in found.note.replace("31 s", "31.0 s")


def test_little_time_left_cuts_steps() -> None:
    """What the caller's time does not hold is cut as well, and the note says whose time it was."""
    found = pace(ran(2.0), time_budget_s=10.0, elapsed_s=7.0)
    assert found.note is not None and "time_budget_s=10.0" in found.note
    assert pace(ran(2.0), time_budget_s=10.0, elapsed_s=5.0).note is None


def test_ranks_in_lockstep_know_the_number_before() -> None:
    """Where all ranks have to run as many steps, none is added on the way."""
    found = pace(ran(1.0), is_in_lockstep=True)
    assert found.windows == [(4, 4)] * 5 and found.is_enough is None
