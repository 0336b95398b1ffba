"""How many whole optimizer steps a setting is run for, and when its time is known well enough."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from autoaccum.probing import MICRO_BATCHES_PER_WINDOW, WINDOWS_PER_PROBE, IsEnough
from autoaccum.records import Fit, Trial
from autoaccum.timing import is_settled, timing_of
from autoaccum.units import format_seconds

_MEASURED_S = 5.0  # a setting's optimizer steps are repeated no longer than this
_MOST_STEPS = 50  # nor more often
_BEATEN_FRAC, _BEATEN_STEPS = 0.1, 3  # nor when the best of so many steps is slower than the fastest setting by this much
_LONGEST_S = 60.0  # two optimizer steps that take longer than this are not run to their end


class Pace(NamedTuple):
    """What a trial of whole optimizer steps is to run.

    Attributes:
        windows: Sizes of the micro-batches of each step; the first one is not timed.
        is_enough: Whether the last window need not run once more; None: as often as it stands there.
        note: Why the steps are cut short and not timed; None where they are whole.
    """

    windows: Sequence[Sequence[int]]
    is_enough: IsEnough | None
    note: str | None = None


def pace_of(
    sizes: Sequence[int],
    *,
    rows: int,
    logs: tuple[Sequence[Trial], Sequence[Trial]],
    time_budget_s: float | None,
    elapsed_s: float,
    is_in_lockstep: bool,
) -> Pace:
    """Whole optimizer steps until their median is known, the time is up, or another setting is clearly faster.

    Args:
        sizes: Rows of each micro-batch of one optimizer step on this rank.
        rows: Rows of one optimizer step, the same number on all ranks.
        logs: Trials under these levers, and all trials.
        time_budget_s: What the caller set; None: nothing.
        is_in_lockstep: All ranks take the same number of steps, which has to be known before.
    """
    step_s = _expected_step_s(logs, rows)
    left_s = _LONGEST_S if time_budget_s is None else min(_LONGEST_S, max(0.0, time_budget_s - elapsed_s))
    if step_s * 2 > left_s:
        short = "" if left_s == _LONGEST_S else f" and little is left of time_budget_s={time_budget_s}"
        note = (
            f"One optimizer step at the target takes about {format_seconds(step_s)}{short}, so the last one was not "
            "run to the end and not timed."
        )
        return Pace([sizes[:MICRO_BATCHES_PER_WINDOW]] * WINDOWS_PER_PROBE, None, note)
    allowed_s = min(_MEASURED_S, left_s)
    if is_in_lockstep:
        return Pace([sizes] * max(2, min(_MOST_STEPS, int(allowed_s / max(step_s, 1e-3)))), None)
    return Pace([sizes] * 2, _enough(allowed_s, _fastest_step_s(logs[1], sum(sizes))))


def _enough(allowed_s: float, fastest_s: float) -> IsEnough:
    begun = time.monotonic()

    def is_enough(times_s: Sequence[float]) -> bool:
        is_late = time.monotonic() - begun + times_s[-1] > allowed_s
        is_beaten = len(times_s) >= _BEATEN_STEPS and min(times_s) > fastest_s * (1 + _BEATEN_FRAC)
        return is_late or is_beaten or len(times_s) >= _MOST_STEPS or is_settled(timing_of(times_s))

    return is_enough


def _fastest_step_s(trials: Sequence[Trial], rows: int) -> float:
    """The median of the fastest setting so far, infinite where none was measured."""
    steps = [trial for trial in trials if trial.purpose == "confirm" and trial.rows_per_step == rows]
    times = [trial.outcome.median_step_s for trial in steps if isinstance(trial.outcome, Fit)]
    return min((seconds for seconds in times if seconds is not None), default=inf)


def _expected_step_s(logs: tuple[Sequence[Trial], Sequence[Trial]], rows: int) -> float:
    """What an optimizer step of so many rows takes, by the trials so far; under other levers where there are none."""
    for log in logs:
        times = [
            trial.outcome.median_step_s / trial.rows_per_step
            for trial in log
            if isinstance(trial.outcome, Fit) and trial.outcome.median_step_s
        ]
        if times:
            return min(times) * rows
    return 0.0
