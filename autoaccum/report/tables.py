"""Trials, levers and times as rows and words: the one list of column names."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple, assert_never

import msgspec

from autoaccum.records import Fit, Levers, Outlook, OutOfMemory, Refused, Timing, Trial
from autoaccum.timing import is_settled, timing_of
from autoaccum.units import format_bytes, format_seconds

NO_LEVER = "none"
COLUMNS_OF_WORDS = frozenset({"standing", "levers", "outcome", "note", "GPU"})  # the others hold numbers
TRIAL_HEADER = ("micro-batch", "levers", "outcome", "peak", "optimizer step", "samples/s", "took")
OUTLOOK_HEADER = ("GPU", "micro-batch x steps", "peak", "of", "levers")


class Cells(NamedTuple):
    """A table as text: the names of its columns, and one cell for each in every row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def trial_rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One plain dict per trial, in the order run; units end the names, None is "not known"."""
    return [
        {
            "micro_batch": trial.candidate.micro_batch,
            **_lever_columns(trial.candidate.levers),
            "purpose": trial.purpose,
            "outcome": outcome_in_words(trial),
            "fits": isinstance(trial.outcome, Fit),
            "peak_bytes": None if isinstance(trial.outcome, Refused) else trial.outcome.peak_bytes,
            "offloaded_bytes": trial.outcome.offloaded_bytes if isinstance(trial.outcome, Fit) else None,
            **_step_columns(trial),
            "samples_per_s": samples_per_s(trial),
            "phase": None if isinstance(trial.outcome, Fit) else trial.outcome.phase,
            "message": None if isinstance(trial.outcome, Fit) else trial.outcome.message,
            "wall_s": trial.wall_s,
        }
        for trial in trials
    ]


def _lever_columns(levers: Levers) -> dict[str, Any]:
    return {
        "checkpointing": levers.checkpointing,
        "checkpointed_blocks": levers.checkpointed_blocks,
        "precision": levers.precision,
        "optimizer_impl": levers.optimizer_impl,
        "offload": levers.offload,
    }


def _step_columns(trial: Trial) -> dict[str, Any]:
    timing = trial_timing(trial)
    return {
        "step_s": timing and timing.median_s,
        "first_quartile_step_s": timing and timing.first_quartile_s,
        "third_quartile_step_s": timing and timing.third_quartile_s,
        "num_timed_steps": timing.num if timing else 0,
    }


def trial_timing(trial: Trial) -> Timing | None:
    """What the trial's step times say, None where no step was timed."""
    return timing_of(trial.outcome.step_times_s) if isinstance(trial.outcome, Fit) else None


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


def is_default(levers: Levers) -> bool:
    """Whether no lever is turned. Names of blocks alone turn none."""
    return msgspec.structs.replace(levers, block_names=()) == Levers()


def levers_in_words(levers: Levers) -> str:
    """The levers that are turned, in a few words.

    Example:
        >>> levers_in_words(Levers(checkpointing="full", checkpointed_blocks=6, precision="bf16", optimizer_impl="fused"))
        'full checkpointing of 6 blocks, bf16, fused optimizer'
        >>> levers_in_words(Levers())
        'none'
    """
    num = levers.checkpointed_blocks
    blocks = f" of {num} block{'s' if num > 1 else ''}" if num else ""
    turned = (
        f"{levers.checkpointing} checkpointing{blocks}" if levers.checkpointing != "off" else "",
        levers.precision if levers.precision != "fp32" else "",
        f"{levers.optimizer_impl} optimizer" if levers.optimizer_impl != "default" else "",
        "offload to the host" if levers.offload == "cpu" else "",
    )
    return ", ".join(filter(None, turned)) or NO_LEVER


def timing_in_words(timing: Timing) -> str:
    """The median with its quartiles, the number of steps, and whether it is noisy.

    Example:
        >>> timing_in_words(timing_of([0.40, 0.41, 0.42]))
        '410 ms (405 to 415 ms, n=3; too few to know the noise)'
    """
    first, third = format_seconds(timing.first_quartile_s), format_seconds(timing.third_quartile_s)
    unit = third.partition(" ")[2]
    spread = f"{first.removesuffix(' ' + unit)} to {third}, " if timing.num > 1 else ""
    return f"{format_seconds(timing.median_s)} ({spread}n={timing.num}{_noise_in_words(timing)})"


def _noise_in_words(timing: Timing) -> str:
    if is_settled(timing):
        return ""
    if timing.interval_frac is None:
        return "; too few to know the noise"
    return f"; noisy: \u00b1{100 * timing.interval_frac:.2g} %"


def trial_cells(trials: Sequence[Trial]) -> Cells:
    """Trials as text, in the order run: `4` was probed, `4 x 3` is a plan's own optimizer step of three micro-batches.

    With a column of levers where any trial turns one.
    """
    turned = any(not is_default(trial.candidate.levers) for trial in trials)
    rows = zip(trials, trial_rows(trials), strict=True)
    return without_empty(TRIAL_HEADER, [_trial_cells(trial, row, turned) for trial, row in rows])


def _trial_cells(trial: Trial, row: dict[str, Any], turned: bool) -> tuple[str, ...]:
    offloaded = f" + {format_bytes(row['offloaded_bytes'])} on the host" if row["offloaded_bytes"] else ""
    return (
        _sizes_in_words(trial),
        levers_in_words(trial.candidate.levers) if turned else "",
        row["outcome"],
        format_bytes(row["peak_bytes"]) + offloaded,
        format_seconds(row["step_s"]),
        rate_in_words(row["samples_per_s"]),
        format_seconds(trial.wall_s),
    )


def _sizes_in_words(trial: Trial) -> str:
    """The size that was probed; of a plan's own steps also how many micro-batches make up each."""
    size = trial.candidate.micro_batch
    return str(size) if trial.purpose == "probe" else f"{size} x {ceil(trial.rows_per_step / size)}"


def outlook_cells(outlooks: Sequence[Outlook]) -> Cells:
    """What one optimizer step would take on each kind of GPU, as text."""
    rows = [
        (
            row.gpu,
            f"{row.micro_batch} x {row.accumulation_steps}" if row.fits else "does not fit",
            format_bytes(row.peak_bytes),
            format_bytes(row.total_bytes),
            levers_in_words(row.levers),
        )
        for row in outlooks
    ]
    return Cells(OUTLOOK_HEADER, tuple(rows))


def rate_in_words(rate: float | None) -> str:
    """Samples per second to four digits, "-" where not known."""
    if rate is None:
        return "-"
    return f"{rate:.4g}" if rate < 1e4 else f"{rate:.0f}"


def without_empty(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Cells:
    """The table without the columns that say nothing in any row."""
    kept = [column for column in range(len(header)) if not rows or any(row[column] for row in rows)]
    return Cells(tuple(header[column] for column in kept), tuple(tuple(row[column] for column in kept) for row in rows))
