"""The measurements of a run as figures: each with the ends between which it may lie, by what the run itself repeated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from autoaccum.comparing.records import Figure, Run
from autoaccum.records import Candidate, Fit, OutOfMemory, PlanRecord, Setting, Timing
from autoaccum.timing import timing_of

# By what half the quartile distance is multiplied for the 99 % interval of the median of 3 to 5 steps, which is too few for
# an interval that assumes nothing; fewer say nothing. Source: two million draws of normal noise each, quartiles as
# `timing_of` takes them. With the 95 % interval one in a thousand comparisons of equal runs failed at 15 % of noise.
_WIDENED = {3: 12.2, 4: 6.7, 5: 9.9}
_SHORTEST_S = 1e-9


def chosen_in(run: Run) -> Candidate:
    """The setting that a run answers with."""
    size = run.micro_batch if isinstance(run, PlanRecord) else run.max_micro_batch
    return Candidate(micro_batch=size, levers=run.levers)


def candidate_of(setting: Setting) -> Candidate:
    """What ran in a setting."""
    return Candidate(micro_batch=setting.micro_batch, levers=setting.levers)


def measured_in(plan: PlanRecord) -> dict[Candidate, Setting]:
    """The settings that ran, the chosen one first; a plan without settings has that one."""
    ran = [setting for setting in plan.settings if setting.standing in ("chosen", "measured")]
    chosen = Setting(
        levers=plan.levers,
        standing="chosen",
        micro_batch=plan.micro_batch,
        accumulation_steps=plan.accumulation_steps,
        peak_bytes=plan.measured_peak_bytes,
        timing=timing_in(plan),
    )
    both = [chosen, *(setting for setting in ran if candidate_of(setting) != chosen_in(plan))]
    return {candidate_of(setting): setting for setting in both if setting.peak_bytes or setting.timing}


def timing_in(plan: PlanRecord) -> Timing | None:
    """How long the plan's own optimizer step took: as recorded, else from the trials that ran it."""
    if plan.timing is not None:
        return plan.timing
    times_s = [
        time_s
        for trial in plan.trials
        if trial.purpose == "confirm" and trial.candidate == chosen_in(plan) and isinstance(trial.outcome, Fit)
        if trial.rows_per_step == sum(plan.micro_batch_sizes)
        for time_s in trial.outcome.step_times_s
    ]
    return timing_of(times_s or ([] if plan.step_time_s is None else [plan.step_time_s]))


def rate_of(rows: int, timing: Timing | None) -> Figure | None:
    """Rows per second, between the ends of the median's interval."""
    if timing is None or timing.median_s < _SHORTEST_S or rows < 1:
        return None
    off = timing.interval_frac
    if off is None:
        off = _WIDENED[timing.num] * _quartiles_frac(timing) if timing.num in _WIDENED else inf
    rate = rows / timing.median_s
    return Figure(value=rate, low=rate / (1 + off), high=rate / (1 - off) if off < 1 else None)


def _quartiles_frac(timing: Timing) -> float:
    """Half the distance of the quartiles, as a fraction of the median."""
    return abs(timing.third_quartile_s - timing.first_quartile_s) / 2 / timing.median_s


def is_foreseen(run: Run) -> bool:
    """Whether nothing ran: a search may also end with a largest size that is only predicted, but has trials."""
    return run.evidence == "predicted" and not run.trials


def headline_peak(run: Run) -> Figure | None:
    """The peak of a run's answer, a predicted one where nothing ran."""
    if is_foreseen(run):
        return _exactly(run.predicted_peak_bytes) if isinstance(run, PlanRecord) else None
    return peak_of(run, chosen_in(run), run.measured_peak_bytes)


def peak_of(run: Run, candidate: Candidate, peak_bytes: int | None) -> Figure | None:
    """A recorded peak, between the ends of what trials of its kind measured."""
    if not peak_bytes:
        return None
    kinds = [peaks for (of, _), peaks in _fit_peaks(run).items() if of == candidate and peak_bytes in peaks]
    peaks = [peak_bytes, *(peak for kind in kinds for peak in kind)]
    return Figure(value=peak_bytes, low=min(peaks), high=max(peaks))


def _fit_peaks(run: Run) -> dict[tuple[Candidate, str], list[int]]:
    """The peaks of all trials that ran to their end, by candidate and purpose."""
    found: dict[tuple[Candidate, str], list[int]] = defaultdict(list)
    for trial in run.trials:
        match trial.outcome:
            case Fit(peak_bytes=peak) | OutOfMemory(cause="budget", peak_bytes=int(peak)) if peak > 0:
                found[trial.candidate, trial.purpose].append(peak)
            case _:
                pass
    return found


def trial_peaks(run: Run) -> dict[tuple[Candidate, str], Figure]:
    """The peak of every candidate and purpose; of those that ran out of memory only that it is above the budget."""
    found = {key: Figure(value=max(peaks), low=min(peaks), high=max(peaks)) for key, peaks in _fit_peaks(run).items()}
    for trial in run.trials:
        key = (trial.candidate, trial.purpose)
        if isinstance(trial.outcome, OutOfMemory) and trial.outcome.cause == "allocator" and run.budget_bytes > 0:
            known = found.get(key, _exactly(run.budget_bytes))
            assert known is not None
            found[key] = Figure(value=max(known.value, run.budget_bytes), low=known.low, high=None)
    return found


def largest_size(run: Run, *, is_base: bool) -> Figure | None:
    """The largest micro-batch known to fit; in the new run, up to where larger ones are not known to fail.

    Where something else than memory ended the search, nothing is known of larger ones.
    """
    size = run.max_micro_batch
    if is_base or size < 1:
        return _exactly(size)
    return Figure(value=size, low=size, high=max(size, _ceiling(run) - 1) if run.limited_by == "memory" else None)


def _ceiling(run: Run) -> int:
    """The smallest size above the largest fitting one that does not fit."""
    size = run.max_micro_batch
    failed = [
        trial.candidate.micro_batch
        for trial in run.trials
        if isinstance(trial.outcome, OutOfMemory) and trial.candidate.levers == run.levers
    ]
    above = [other for other in failed if other > size]
    return min([*above, *_following(run)], default=size + 1)


def _following(run: Run) -> Sequence[int]:
    """The next size that the plan's search would have taken: the largest micro-batch of one micro-batch less."""
    if not isinstance(run, PlanRecord):
        return ()
    if run.equal_micro_batches:
        return (run.max_micro_batch + run.multiple_of,)
    units = -(-sum(run.micro_batch_sizes) // run.multiple_of)
    steps = -(-units // max(1, run.max_micro_batch // run.multiple_of))
    return (-(-units // (steps - 1)) * run.multiple_of,) if steps > 1 else ()


def _exactly(value: int | None) -> Figure | None:
    return Figure(value=value, low=value, high=value) if value else None
