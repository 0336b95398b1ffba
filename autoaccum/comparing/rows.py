"""Which measurements of two runs belong together: those of the answer, of each setting, and of each trial."""

from __future__ import annotations

from collections.abc import Iterator

from autoaccum.comparing.figures import (
    candidate_of,
    chosen_in,
    headline_peak,
    is_foreseen,
    largest_size,
    measured_in,
    peak_of,
    rate_of,
    timing_in,
    trial_peaks,
)
from autoaccum.comparing.judging import judged, within_budgets
from autoaccum.comparing.records import Metric, Part, Row, Run
from autoaccum.comparing.words import code_span
from autoaccum.records import Candidate, PlanRecord, Setting


def headline_rows(base: Run, new: Run, allowed_frac: float) -> Iterator[Row]:
    """The answer itself, whatever was chosen: its peak, its rate, and the largest micro-batch.

    Peaks of different settings are not judged: a larger micro-batch inside the budget is no regression.
    """
    part: Part = "plan" if isinstance(base, PlanRecord) else "probe result"
    chosen = (chosen_in(base), chosen_in(new))
    is_same = chosen[0] == chosen[1]
    metric: Metric = "predicted_peak_bytes" if is_foreseen(base) else "peak_bytes"
    other = "" if is_same else "another setting was chosen" if part == "plan" else "it is that of another size"
    peaks = (headline_peak(base), headline_peak(new))
    yield from judged(part, metric, chosen, peaks, allowed_frac, unlike=other)
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord):
        rates = (rate_of(base.target_batch, timing_in(base)), rate_of(new.target_batch, timing_in(new)))
        found = judged(part, "samples_per_s", chosen, rates, allowed_frac)
        yield from found if is_same else (within_budgets(row, base, new) for row in found)
    sizes = (largest_size(base, is_base=True), largest_size(new, is_base=False))
    other = "" if base.levers == new.levers else "it is that of other levers"
    for row in judged(part, "max_micro_batch", chosen, sizes, allowed_frac, unlike=other):
        yield within_budgets(row, base, new)


def setting_rows(base: PlanRecord, new: PlanRecord, allowed_frac: float) -> Iterator[Row]:
    """The settings that are not the answer of both: those of both compared, the others listed."""
    of_base, of_new = measured_in(base), measured_in(new)
    for candidate in dict.fromkeys([*of_base, *of_new]):
        one, other = of_base.get(candidate), of_new.get(candidate)
        if one is not None and other is not None:
            if not candidate == chosen_in(base) == chosen_in(new):
                both = (candidate, candidate)
                peaks = (peak_of(base, candidate, one.peak_bytes), peak_of(new, candidate, other.peak_bytes))
                rates = (rate_of(base.target_batch, one.timing), rate_of(new.target_batch, other.timing))
                yield from judged("setting", "peak_bytes", both, peaks, allowed_frac)
                yield from judged("setting", "samples_per_s", both, rates, allowed_frac)
        elif one is not None:
            yield _lonely(candidate, base, one, new, is_base=True)
        elif other is not None:
            yield _lonely(candidate, new, other, base, is_base=False)


def _lonely(candidate: Candidate, run: PlanRecord, setting: Setting, missing_in: PlanRecord, *, is_base: bool) -> Row:
    """A setting that only one run measured, with what the other one says of it."""
    figure = peak_of(run, candidate, setting.peak_bytes)
    metric: Metric = "peak_bytes"
    if figure is None:
        figure, metric = rate_of(run.target_batch, setting.timing), "samples_per_s"
    said = [other for other in missing_in.settings if candidate_of(other) == candidate]
    return Row(
        part="setting",
        metric=metric,
        base_candidate=candidate if is_base else None,
        new_candidate=None if is_base else candidate,
        base=figure if is_base else None,
        new=None if is_base else figure,
        verdict="only in base" if is_base else "only in new",
        note="; ".join(
            (["chosen there"] if candidate == chosen_in(run) else [])
            + [f"{'new' if is_base else 'base'}: {other.standing}" for other in said]
            + [code_span(other.note) for other in said if other.note]
        ),
    )


def trial_rows(base: Run, new: Run, allowed_frac: float) -> Iterator[Row]:
    """The peaks of single trials of the same size, levers and purpose, but for those that rows above hold already."""
    of_base, of_new, above = trial_peaks(base), trial_peaks(new), _shown_above(base, new)
    parts: dict[str, Part] = {"probe": "probe trial", "confirm": "confirm trial"}
    for key in of_base:
        candidate, purpose = key
        if key not in of_new or candidate in above.get(purpose, ()):
            continue
        both = (of_base[key], of_new[key])
        if both[0].high is not None or both[1].high is not None:
            yield from judged(parts[purpose], "peak_bytes", (candidate, candidate), both, allowed_frac)


def _shown_above(base: Run, new: Run) -> dict[str, set[Candidate]]:
    """Candidates whose peak the headline or the settings compare, by the purpose of the trial that it is from."""
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord):
        return {"confirm": set(measured_in(base)) & set(measured_in(new))}
    return {"probe": {chosen_in(base)} & {chosen_in(new)}}
