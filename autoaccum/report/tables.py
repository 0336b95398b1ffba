"""Trials as rows: the one list of column names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

from autoaccum.records import Fit, OutOfMemory, Refused, Trial
from autoaccum.units import format_bytes, format_seconds


def trial_rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One plain dict per trial, in the order run; units end the names, None is "not known"."""
    return [
        {
            "micro_batch": trial.candidate.micro_batch,
            "purpose": trial.purpose,
            "outcome": outcome_in_words(trial),
            "fits": isinstance(trial.outcome, Fit),
            "peak_bytes": None if isinstance(trial.outcome, Refused) else trial.outcome.peak_bytes,
            "step_s": trial.outcome.median_step_s if isinstance(trial.outcome, Fit) else None,
            "samples_per_s": samples_per_s(trial),
            "phase": None if isinstance(trial.outcome, Fit) else trial.outcome.phase,
            "message": None if isinstance(trial.outcome, Fit) else trial.outcome.message,
            "wall_s": trial.wall_s,
        }
        for trial in trials
    ]


def samples_per_s(trial: Trial) -> float | None:
    """Rows of this rank per second of the trial's optimizer steps, None where none was timed."""
    step_s = trial.outcome.median_step_s if isinstance(trial.outcome, Fit) else None
    return None if not step_s else trial.rows_per_step / step_s


def outcome_in_words(trial: Trial) -> str:
    """What came of a trial, in a few words."""
    match trial.outcome:
        case Fit():
            return "fits"
        case OutOfMemory(cause="budget"):
            return "peak above the budget"
        case OutOfMemory(cause="retries"):
            return "fits only by flushing the cache"
        case OutOfMemory(cause="process"):
            return "worker process died"
        case OutOfMemory(cause="unclear", phase=phase):
            return f"failed in {phase}, probably out of memory"
        case OutOfMemory(phase=phase):
            return f"out of memory in {phase}"
        case Refused(bound="floor"):
            return "too small to run"
        case Refused():
            return "beyond a limit other than memory"
        case _:
            assert_never(trial.outcome)


TABLE_HEADER = ("micro-batch", "outcome", "peak", "optimizer step", "samples/s", "took")
_PURPOSES = {"probe": "", "confirm": " (the plan's step)"}


def table_rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Trials as cells of text under `TABLE_HEADER`."""
    rows: list[tuple[str, ...]] = []
    for trial, row in zip(trials, trial_rows(trials), strict=True):
        rate = row["samples_per_s"]
        rows.append(
            (
                f"{row['micro_batch']}{_PURPOSES[trial.purpose]}",
                str(row["outcome"]),
                format_bytes(row["peak_bytes"]),
                format_seconds(row["step_s"]),
                "-" if rate is None else f"{rate:.4g}",
                format_seconds(trial.wall_s),
            )
        )
    return rows
