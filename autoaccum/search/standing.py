"""What a log of trials says. The log is the whole state of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from autoaccum.records import Fit, OutOfMemory, Record, Refused, Trial


class Standing(Record, frozen=True, kw_only=True):
    """What a log of trials says.

    `best`: the largest size that fits and lies below every failure, with its peak. `ceiling`: the smallest size that is
    too large, with its peak where it ran to the end. `floor`: the largest size that is too small to run at all.
    """

    best: int | None = None
    best_peak_bytes: int | None = None
    ceiling: int | None = None
    ceiling_peak_bytes: int | None = None
    floor: int = 0
    num_probes: int = 0


def standing(trials: Sequence[Trial]) -> Standing:
    """Sum up the log. A size that both fitted and failed counts as failed."""
    fits: dict[int, int] = {}
    failures: dict[int, int | None] = {}
    floor = 0
    for trial in trials:
        size = trial.candidate.micro_batch
        match trial.outcome:
            case Fit(peak_bytes=peak):
                fits[size] = max(peak, fits.get(size, 0))
            case OutOfMemory(peak_bytes=peak_or_none):
                failures[size] = peak_or_none
            case Refused(bound="floor"):
                floor = max(floor, size)
            case Refused():
                failures[size] = None
            case _:
                assert_never(trial.outcome)
    ceiling = min(failures, default=None)
    best = max((size for size in fits if ceiling is None or size < ceiling), default=None)
    return Standing(
        best=best,
        best_peak_bytes=None if best is None else fits[best],
        ceiling=ceiling,
        ceiling_peak_bytes=None if ceiling is None else failures[ceiling],
        floor=floor,
        num_probes=sum(trial.purpose == "probe" for trial in trials),
    )


def peaks_of(trials: Sequence[Trial]) -> dict[int, int]:
    """Every peak that was measured to its end, by size."""
    peaks: dict[int, int] = {}
    for trial in trials:
        match trial.outcome:
            case Fit(peak_bytes=peak) | OutOfMemory(cause="budget", peak_bytes=int(peak)):
                size = trial.candidate.micro_batch
                peaks[size] = max(peak, peaks.get(size, 0))
    return peaks
