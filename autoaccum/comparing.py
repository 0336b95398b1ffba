"""Two saved runs, measurement by measurement: what became worse by more than is allowed, and what is only noise.

Every measurement is a `Figure`: a value, and the ends between which it may lie. A row counts as a regression only where the
kindest ends of both are further apart than allowed. Pure: reads text, measures nothing, and knows no device. Every text from
a file stands in a Markdown code span, where it cannot be markup.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Literal

import msgspec

from autoaccum.errors import InvalidRequestError
from autoaccum.records import (
    LARGEST,
    SCHEMA_VERSION,
    Candidate,
    Environment,
    Fit,
    Levers,
    OutOfMemory,
    PlanRecord,
    ProbeResult,
    Record,
    Setting,
    Timing,
    from_json,
    numbers_in,
    plain,
)
from autoaccum.timing import timing_of
from autoaccum.units import format_bytes, one_line, shown

Run = PlanRecord | ProbeResult
Part = Literal["plan", "probe result", "setting", "probe trial", "confirm trial"]
Metric = Literal["peak_bytes", "predicted_peak_bytes", "samples_per_s", "max_micro_batch"]
Verdict = Literal[
    "ok",
    "improved",
    "regressed",
    "too noisy to tell",
    "too coarse to tell",
    "not compared",
    "only in base",
    "only in new",
]
JUDGED = ("ok", "improved", "regressed", "too noisy to tell", "too coarse to tell")  # the verdicts on two measurements

# By what half the quartile distance is multiplied for the 99 % interval of the median of 3 to 5 steps, which is too few for
# an interval that assumes nothing; fewer say nothing. Source: two million draws of normal noise each, quartiles as
# `timing_of` takes them. With the 95 % interval one in a thousand comparisons of equal runs failed at 15 % of noise.
_WIDENED = {3: 12.2, 4: 6.7, 5: 9.9}
_ROUNDING_FRAC = 1e-9  # exactly as much as is allowed is allowed, however the floats round
_SHORTEST_S = 1e-9
_BREAKING = re.compile(r"[`|\\]")  # what could end a code span, or the table cell around it
_NOT_COMPARED = ("memory", "prediction", "timeline")  # parts of a file whose numbers are not looked at


class Figure(Record, frozen=True, kw_only=True):
    """A measurement, and the ends between which it may lie; `high` None: anything above is possible."""

    value: float
    low: float
    high: float | None

    @property
    def top(self) -> float:
        """The upper end."""
        return inf if self.high is None else self.high


class Row(Record, frozen=True, kw_only=True):
    """One measurement in both runs, and what came of it.

    `part`: what was measured: the plan (its chosen setting), the probe's result, another setting, or a single trial.
    `change_frac`: new over base, less one; None where one of them is missing. `note` is a sentence in Markdown.
    """

    part: Part
    metric: Metric
    base_candidate: Candidate | None = None
    new_candidate: Candidate | None = None
    base: Figure | None = None
    new: Figure | None = None
    change_frac: float | None = None
    verdict: Verdict
    note: str = ""


class Comparison(Record, frozen=True, kw_only=True, tag_field="record", tag="autoaccum.Comparison"):
    """Two runs against each other. `passed`: no row regressed. `notes` are sentences in Markdown."""

    schema_version: int = SCHEMA_VERSION
    base_name: str
    new_name: str
    max_regression_frac: float
    passed: bool
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


# -- what comes in


_SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)( ?%)?", re.ASCII)


def parse_max_regression(value: str) -> float:
    """The fraction that a text such as "5%" or "0.05" stands for, from 0 to below 1.

    Raises:
        InvalidRequestError: When it cannot be read, could mean two things, or is 100 % or more.

    Example:
        >>> parse_max_regression("5%"), parse_max_regression("5 %"), parse_max_regression("0.05")
        (0.05, 0.05, 0.05)
    """
    expected = 'expected a share from 0 % to below 100 %, such as "5%" or "0.05"'
    match = _SHARE.fullmatch(value.strip()) if len(value) <= 32 else None
    if match is None:
        raise InvalidRequestError(f"max_regression={shown(value)} cannot be read; {expected}.")
    number, is_percent = float(match[1]), match[2] is not None
    if not is_percent and number >= 1:
        raise InvalidRequestError(
            f"max_regression={shown(value)} could mean {match[1]} % or {match[1]} times as much; write a % sign: {expected}."
        )
    if number >= 100:
        raise InvalidRequestError(f"max_regression={shown(value)} would allow everything; {expected}.")
    return number / 100 if is_percent else number


class _Tag(msgspec.Struct):
    record: str = ""


def read_run(text: bytes | str, name: str) -> Run:
    """The Plan or ProbeResult that a file holds; nothing in it is ever evaluated.

    Args:
        name: What the file is called in the error.

    Raises:
        InvalidRequestError: When it is damaged, of a newer schema, something else, or holds numbers that cannot be.
    """
    tag = ""
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):  # `from_json` says what is wrong
        tag = msgspec.json.decode(text, type=_Tag).record
    kind: type[PlanRecord] | type[ProbeResult] = ProbeResult if tag == "autoaccum.ProbeResult" else PlanRecord
    try:
        run = from_json(text, kind)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{one_line(name)}: {one_line(str(error), 400)}") from None
    used = {name: value for name, value in plain(run).items() if name not in _NOT_COMPARED}
    if not all(0 <= number <= LARGEST for number in numbers_in(used)):
        raise InvalidRequestError(f"{one_line(name)}: a size, time or count is negative or beyond reason. Was it edited?")
    return run


# -- the comparison


def compare(
    base: Run,
    new: Run,
    max_regression_frac: float,
    *,
    base_name: str = "base",
    new_name: str = "new",
    allow_different_environments: bool = False,
) -> Comparison:
    """Put every measurement that two runs share side by side and say which became worse by more than allowed.

    Args:
        max_regression_frac: What is allowed, as a fraction: how much a peak may grow, and a rate or a size may fall.
        base_name: What the runs are called in errors and in the report.
        allow_different_environments: Compare although device, model, optimizer, torch, Python or world size differ.

    Raises:
        InvalidRequestError: When the runs cannot be compared; the message lists what differs.
    """
    names = f"{one_line(base_name)} and {one_line(new_name)}"
    _refuse_unlike(base, new, names)
    notes = _environment_notes(base.environment, new.environment, names, allow_different_environments)
    rows = [*_headline(base, new, max_regression_frac)]
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord):
        rows += _setting_rows(base, new, max_regression_frac)
    rows += _trial_rows(base, new, max_regression_frac)
    if not any(row.verdict in JUDGED for row in rows):
        raise InvalidRequestError(f"{names} have no measurement in common; probe both with the same sizes and budget.")
    return Comparison(
        base_name=one_line(base_name),
        new_name=one_line(new_name),
        max_regression_frac=max_regression_frac,
        passed=all(row.verdict != "regressed" for row in rows),
        rows=tuple(rows),
        notes=(*notes, *_request_notes(base, new)),
    )


def _refuse_unlike(base: Run, new: Run, names: str) -> None:
    if isinstance(base, PlanRecord) != isinstance(new, PlanRecord):
        kinds = ["a Plan" if isinstance(run, PlanRecord) else "a ProbeResult" for run in (base, new)]
        raise InvalidRequestError(
            f"{names} are {kinds[0]} and {kinds[1]}, which measure different things; give both runs the same --target-batch "
            "or none."
        )
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord) and base.target_batch != new.target_batch:
        raise InvalidRequestError(
            f"{names} take optimizer steps of target_batch={base.target_batch} and {new.target_batch} samples; expected the "
            "same --target-batch in both."
        )
    if (base.evidence == "predicted") != (new.evidence == "predicted"):
        raise InvalidRequestError(
            f"of {names} one was measured and the other only predicted; compare two runs of `autoaccum probe` or two of "
            "`autoaccum predict`."
        )


def _conditions(environment: Environment) -> dict[str, object]:
    """What must be the same for two measurements to be alike. Which of several equal devices was used does not matter."""
    return {
        "device": environment.device.partition(":")[0],
        "device_name": environment.device_name,
        "model": environment.model,
        "optimizer": environment.optimizer,
        "torch_version": environment.torch_version,
        "python_version": ".".join(environment.python_version.split(".")[:2]),  # the interpreter is part of a host's peak
        "world_size": environment.world_size,
    }


def _environment_notes(base: Environment | None, new: Environment | None, names: str, allowed: bool) -> list[str]:
    """What differs beside the measurements; refused where it makes them unlike and that is not allowed."""
    if base is None or new is None:
        if allowed:
            return ["At least one run does not say where it was measured."]
        raise InvalidRequestError(
            f"of {names} at least one does not say where it was measured (environment); expected files of "
            "`autoaccum probe --json`, or pass --allow-different-environments."
        )
    unlike = _differences(_conditions(base), _conditions(new))
    if unlike and not allowed:
        listed = "; ".join(f"{name} is {_shown(one)} and {_shown(other)}" for name, (one, other) in unlike.items())
        raise InvalidRequestError(
            f"{names} were not measured under the same conditions: {listed}. Measure both on one machine with one set of "
            "versions, or pass --allow-different-environments."
        )
    beside = ("batch", "driver", "platform", "autoaccum_version")  # these alone refuse nothing
    told = _differences(*({name: getattr(run, name) for name in beside} for run in (base, new)))
    return [
        f"{name} differs: {_code(one)} in base, {_code(other)} in new." for name, (one, other) in (unlike | told).items()
    ]


def _request_notes(base: Run, new: Run) -> list[str]:
    """What was asked for differently, and what follows from that."""
    notes = []
    if base.budget_bytes != new.budget_bytes:
        notes.append(
            f"The budgets differ ({format_bytes(base.budget_bytes)} in base, {format_bytes(new.budget_bytes)} in new), and "
            "the largest micro-batch and the choice depend on it; give both runs the same budget."
        )
    for name in ("multiple_of", "equal_micro_batches", "objective", "rank"):
        one, other = getattr(base, name, None), getattr(new, name, None)
        if one != other:
            notes.append(f"{name} differs: {_code(one)} in base, {_code(other)} in new.")
    if isinstance(base, PlanRecord) and _chosen(base) != _chosen(new):
        notes.append(
            f"Another setting was chosen: {_words(_chosen(base))} in base, {_words(_chosen(new))} in new; their peaks are "
            "shown and not judged."
        )
    return notes


def _differences(base: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    return {name: (base[name], new[name]) for name in base if base[name] != new[name]}


# -- rows


def _headline(base: Run, new: Run, allowed_frac: float) -> Iterator[Row]:
    """The answer itself, whatever was chosen: its peak, its rate, and the largest micro-batch.

    Peaks of different settings are not judged: a larger micro-batch inside the budget is no regression.
    """
    part: Part = "plan" if isinstance(base, PlanRecord) else "probe result"
    chosen = (_chosen(base), _chosen(new))
    is_same = chosen[0] == chosen[1]
    metric: Metric = "predicted_peak_bytes" if base.evidence == "predicted" else "peak_bytes"
    other = "" if is_same else "another setting was chosen" if part == "plan" else "it is that of another size"
    peaks = (_headline_peak(base), _headline_peak(new))
    yield from _rows(part, metric, chosen, peaks, allowed_frac, unlike=other)
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord):
        rates = (_rate(base.target_batch, _plan_timing(base)), _rate(new.target_batch, _plan_timing(new)))
        found = _rows(part, "samples_per_s", chosen, rates, allowed_frac)
        yield from found if is_same else (_within_budgets(row, base, new) for row in found)
    sizes = (_size(base, is_base=True), _size(new, is_base=False))
    other = "" if base.levers == new.levers else "it is that of other levers"
    for row in _rows(part, "max_micro_batch", chosen, sizes, allowed_frac, unlike=other):
        yield _within_budgets(row, base, new)


def _setting_rows(base: PlanRecord, new: PlanRecord, allowed_frac: float) -> Iterator[Row]:
    """The settings that are not the answer of both: those of both compared, the others listed."""
    of_base, of_new = _measured(base), _measured(new)
    for candidate in dict.fromkeys([*of_base, *of_new]):
        one, other = of_base.get(candidate), of_new.get(candidate)
        if one is not None and other is not None:
            if not candidate == _chosen(base) == _chosen(new):
                both = (candidate, candidate)
                peaks = (_peak(base, candidate, one.peak_bytes), _peak(new, candidate, other.peak_bytes))
                rates = (_rate(base.target_batch, one.timing), _rate(new.target_batch, other.timing))
                yield from _rows("setting", "peak_bytes", both, peaks, allowed_frac)
                yield from _rows("setting", "samples_per_s", both, rates, allowed_frac)
        elif one is not None:
            yield _lonely(candidate, base, one, new, is_base=True)
        elif other is not None:
            yield _lonely(candidate, new, other, base, is_base=False)


def _lonely(candidate: Candidate, run: PlanRecord, setting: Setting, missing_in: PlanRecord, *, is_base: bool) -> Row:
    """A setting that only one run measured, with what the other one says of it."""
    figure = _peak(run, candidate, setting.peak_bytes)
    metric: Metric = "peak_bytes"
    if figure is None:
        figure, metric = _rate(run.target_batch, setting.timing), "samples_per_s"
    said = [other for other in missing_in.settings if _candidate(other) == candidate]
    return Row(
        part="setting",
        metric=metric,
        base_candidate=candidate if is_base else None,
        new_candidate=None if is_base else candidate,
        base=figure if is_base else None,
        new=None if is_base else figure,
        verdict="only in base" if is_base else "only in new",
        note="; ".join(
            (["chosen there"] if candidate == _chosen(run) else [])
            + [f"{'new' if is_base else 'base'}: {other.standing}" for other in said]
            + [_code(other.note) for other in said if other.note]
        ),
    )


def _trial_rows(base: Run, new: Run, allowed_frac: float) -> Iterator[Row]:
    """The peaks of single trials of the same size, levers and purpose, but for those that rows above hold already."""
    of_base, of_new, above = _trial_peaks(base), _trial_peaks(new), _shown_above(base, new)
    parts: dict[str, Part] = {"probe": "probe trial", "confirm": "confirm trial"}
    for key in of_base:
        candidate, purpose = key
        if key not in of_new or candidate in above.get(purpose, ()):
            continue
        both = (of_base[key], of_new[key])
        if both[0].high is not None or both[1].high is not None:
            yield from _rows(parts[purpose], "peak_bytes", (candidate, candidate), both, allowed_frac)


def _shown_above(base: Run, new: Run) -> dict[str, set[Candidate]]:
    """Candidates whose peak the headline or the settings compare, by the purpose of the trial that it is from."""
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord):
        return {"confirm": set(_measured(base)) & set(_measured(new))}
    return {"probe": {_chosen(base)} & {_chosen(new)}}


def _rows(
    part: Part,
    metric: Metric,
    candidates: tuple[Candidate, Candidate],
    figures: tuple[Figure | None, Figure | None],
    allowed_frac: float,
    *,
    unlike: str = "",
) -> Iterator[Row]:
    """The row of one measurement, or none where neither run has it. `unlike`: why it is shown and not judged."""
    base, new = figures
    note, change_frac = unlike, None
    if base is None and new is None:
        return
    if base is None or new is None:
        verdict: Verdict = "only in new" if base is None else "only in base"
    else:
        change_frac = new.value / base.value - 1
        verdict = "not compared" if unlike else _verdict(metric, base, new, allowed_frac)
        note = unlike or _reason(metric, verdict, base, new)
    yield Row(
        part=part,
        metric=metric,
        base_candidate=candidates[0],
        new_candidate=candidates[1],
        base=base,
        new=new,
        change_frac=change_frac,
        verdict=verdict,
        note=note,
    )


def _verdict(metric: Metric, base: Figure, new: Figure, allowed_frac: float) -> Verdict:
    """What two measurements say, whatever they are between their ends; "too ... to tell" where that depends."""
    less, more = 1 - allowed_frac - _ROUNDING_FRAC, 1 + allowed_frac + _ROUNDING_FRAC
    if metric in ("samples_per_s", "max_micro_batch"):
        regressed, improved, is_kept = new.top < base.low * less, new.low > base.top * more, new.low >= base.top * less
    else:
        regressed, improved, is_kept = new.low > base.top * more, new.top < base.low * less, new.top <= base.low * more
    if regressed:
        return "regressed"
    if improved:
        return "improved"
    if is_kept:
        return "ok"
    is_coarse = metric == "max_micro_batch" or (metric == "peak_bytes" and None in (base.high, new.high))
    return "too coarse to tell" if is_coarse else "too noisy to tell"


def _reason(metric: Metric, verdict: Verdict, base: Figure, new: Figure) -> str:
    """What a row's figures leave unsaid."""
    if metric == "max_micro_batch" and verdict == "too coarse to tell":
        tried = f"sizes up to {new.top:.0f} were not tried" if new.high else "memory is not what limits the new one"
        return f"{tried}, so how much was lost is not known"
    if metric == "peak_bytes" and None in (base.high, new.high):
        return f"did not fit in {'base' if base.high is None else 'new'}"
    if metric == "samples_per_s" and None in (base.high, new.high):
        return "too few optimizer steps were timed"
    return ""


def _within_budgets(row: Row, base: Run, new: Run) -> Row:
    """The row as it is, unless a different budget explains what changed."""
    is_smaller, is_larger = new.budget_bytes < base.budget_bytes, new.budget_bytes > base.budget_bytes
    if not ((row.verdict == "regressed" and is_smaller) or (row.verdict == "improved" and is_larger)):
        return row
    size = "smaller" if is_smaller else "larger"
    return msgspec.structs.replace(row, verdict="not compared", note=f"the new budget is {size}")


# -- figures


def _chosen(run: Run) -> Candidate:
    size = run.micro_batch if isinstance(run, PlanRecord) else run.max_micro_batch
    return Candidate(micro_batch=size, levers=run.levers)


def _candidate(setting: Setting) -> Candidate:
    return Candidate(micro_batch=setting.micro_batch, levers=setting.levers)


def _measured(plan: PlanRecord) -> dict[Candidate, Setting]:
    """The settings that ran, the chosen one first; a plan without settings has that one."""
    ran = [setting for setting in plan.settings if setting.standing in ("chosen", "measured")]
    chosen = Setting(
        levers=plan.levers,
        standing="chosen",
        micro_batch=plan.micro_batch,
        accumulation_steps=plan.accumulation_steps,
        peak_bytes=plan.measured_peak_bytes,
        timing=_plan_timing(plan),
    )
    both = [chosen, *(setting for setting in ran if _candidate(setting) != _chosen(plan))]
    return {_candidate(setting): setting for setting in both if setting.peak_bytes or setting.timing}


def _plan_timing(plan: PlanRecord) -> Timing | None:
    """How long the plan's own optimizer step took: as recorded, else from the trials that ran it."""
    if plan.timing is not None:
        return plan.timing
    times_s = [
        time_s
        for trial in plan.trials
        if trial.purpose == "confirm" and trial.candidate == _chosen(plan) and isinstance(trial.outcome, Fit)
        if trial.rows_per_step == sum(plan.micro_batch_sizes)
        for time_s in trial.outcome.step_times_s
    ]
    return timing_of(times_s or ([] if plan.step_time_s is None else [plan.step_time_s]))


def _rate(rows: int, timing: Timing | None) -> Figure | None:
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


def _headline_peak(run: Run) -> Figure | None:
    if run.evidence == "predicted":
        return _exactly(run.predicted_peak_bytes) if isinstance(run, PlanRecord) else None
    return _peak(run, _chosen(run), run.measured_peak_bytes)


def _peak(run: Run, candidate: Candidate, peak_bytes: int | None) -> Figure | None:
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


def _trial_peaks(run: Run) -> dict[tuple[Candidate, str], Figure]:
    """The peak of every candidate and purpose; of those that ran out of memory only that it is above the budget."""
    found = {key: Figure(value=max(peaks), low=min(peaks), high=max(peaks)) for key, peaks in _fit_peaks(run).items()}
    for trial in run.trials:
        key = (trial.candidate, trial.purpose)
        if isinstance(trial.outcome, OutOfMemory) and trial.outcome.cause == "allocator" and run.budget_bytes > 0:
            known = found.get(key, _exactly(run.budget_bytes))
            assert known is not None
            found[key] = Figure(value=max(known.value, run.budget_bytes), low=known.low, high=None)
    return found


def _size(run: Run, *, is_base: bool) -> Figure | None:
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


# -- what goes out


_METRICS: dict[Metric, str] = {
    "peak_bytes": "measured peak",
    "predicted_peak_bytes": "predicted peak",
    "samples_per_s": "samples/s",
    "max_micro_batch": "largest micro-batch",
}
_HEADER = ("setting", "metric", "base", "new", "change", "verdict")


def comparison_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown: a table, what else differs, and the verdict in one line."""
    lines = [
        "## autoaccum compare",
        "",
        f"Base {_code(comparison.base_name)}, new {_code(comparison.new_name)}.",
        "",
        "| " + " | ".join(_HEADER) + " |",
        "|" + "---|" * len(_HEADER),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in comparison.rows]
    if comparison.notes:
        lines += ["", *(f"- {note}" for note in comparison.notes)]
    return "\n".join([*lines, "", verdict_line(comparison)]) + "\n"


def verdict_line(comparison: Comparison) -> str:
    """Whether the gate is passed and what that rests on, in one line of Markdown."""
    judged = [row.verdict for row in comparison.rows if row.verdict in JUDGED]
    regressed, unclear = judged.count("regressed"), sum(verdict.endswith("to tell") for verdict in judged)
    limit = f"by more than {100 * comparison.max_regression_frac:g} %"
    if regressed:
        text = f"**Failed**: {regressed} of {len(judged)} measurements regressed {limit}"
    else:
        text = f"**Passed**: none of {len(judged)} measurements is known to have regressed {limit}"
    text += f", {judged.count('improved')} improved" if "improved" in judged else ""
    return text + (f", and {unclear} cannot be told." if unclear else ".")


def _cells(row: Row) -> tuple[str, ...]:
    ends = [candidate for candidate in dict.fromkeys((row.base_candidate, row.new_candidate)) if candidate is not None]
    change = "-" if row.change_frac is None else f"{100 * row.change_frac:+.1f} %"
    if row.metric == "peak_bytes" and row.base is not None and row.new is not None:
        change = ("at least " if row.new.high is None else "at most " if row.base.high is None else "") + change
    verdict = f"**{row.verdict}**" if row.verdict in ("regressed", "improved") else row.verdict
    return (
        f"{row.part}: " + " -> ".join(map(_words, ends)),
        _METRICS[row.metric],
        _figure_in_words(row.metric, row.base),
        _figure_in_words(row.metric, row.new),
        change,
        verdict + (f" ({row.note})" if row.note else ""),
    )


def _figure_in_words(metric: Metric, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    words = [_amount(metric, number) for number in (figure.value, figure.low, figure.top)]
    if metric == "max_micro_batch":
        return words[0]
    if figure.high is None:
        return f"more than {words[1]}" if metric == "peak_bytes" else f"about {words[0]}"
    return words[0] if words[1] == words[2] else f"{words[0]} ({words[1]} to {words[2]})"


def _amount(metric: Metric, number: float) -> str:
    if metric in ("peak_bytes", "predicted_peak_bytes"):
        return "-" if number == inf else format_bytes(int(number))
    return f"{number:.4g}" if metric == "samples_per_s" else f"{number:.0f}"


def _words(candidate: Candidate) -> str:
    """A candidate in Markdown."""
    default = Levers()
    turned = []
    for name in Levers.__struct_fields__:
        value = getattr(candidate.levers, name)
        if value != getattr(default, name):
            turned.append(f"{name} {_code(', '.join(value)) if isinstance(value, tuple) else value}")
    return f"micro-batch {candidate.micro_batch}, {', '.join(turned) or 'no levers'}"


def _code(value: object) -> str:
    """Anything as a code span, in which nothing is markup."""
    text = _BREAKING.sub("?", one_line(str(value)))
    return f"`{text or '-'}`"


def _shown(value: object) -> str:
    return shown(one_line(value) if isinstance(value, str) else value)
