"""Plans and probe results in plain words: for `str(plan)`, for the terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from autoaccum.records import (
    CheckResult,
    Environment,
    Fit,
    Levers,
    MemoryAccount,
    Outlook,
    PlanRecord,
    Prediction,
    ProbeResult,
    Skipped,
)
from autoaccum.report.markup import without_controls
from autoaccum.report.settings import setting_cells, setting_notes
from autoaccum.report.tables import Cells, is_default, levers_in_words, timing_in_words, trial_cells, without_empty
from autoaccum.units import format_bytes, format_seconds

_MARKDOWN = re.compile(r"[\\`*_\[\]~|]")  # what means something in Markdown anywhere in a line
_BLOCK = re.compile(r"^(\d{0,9})([#+=.)-])")  # and where one begins: an item of a list can be a heading or a list again

_LIMITS = {
    "memory": "memory",
    "target": "the target itself: everything fits at once",
    "data": "the length of the data",
    "caller": "what the caller allowed",
    "host": "the loader or the host's memory",
    "other": "a limit other than memory",
}


def check_text(result: CheckResult) -> str:
    """Whether accumulation is exact, by how much it is not, and why."""
    rows = " + ".join(map(str, result.micro_batch_sizes))
    lines = [
        "exact: accumulated gradients are those of the whole batch" if result.exact else "not exact",
        f"  relative error {result.relative_error:.2g}, norm ratio {result.norm_ratio:.6g} "
        f"({rows} rows against {sum(result.micro_batch_sizes)}, {result.dtype})",
    ]
    lines += [*(f"  - {reason}" for reason in result.reasons), *(f"  note: {note}" for note in result.notes)]
    return without_controls("\n".join(lines))


def plan_lines(plan: PlanRecord) -> list[tuple[str, str]]:
    """The plan as (what, value) pairs, in the order to read them."""
    found = plan.prediction
    lines = plan_facts(plan)
    if found is not None:
        lines.append(("Not modelled", "; ".join(found.not_modelled)))
    return _readable(lines + _environment_lines(plan.environment) + _outlook_lines(found.outlooks if found else ()))


def plan_facts(plan: PlanRecord) -> list[tuple[str, str]]:
    """What the plan is and what it rests on, without where it was found and what it leaves out."""
    lines = [
        ("Plan", plan_in_words(plan)),
        ("Largest micro-batch", _limit_in_words(plan.max_micro_batch, plan, "the next size of use for this target")),
        ("Memory", _plan_memory_in_words(plan)),
    ]
    if plan.prediction is not None:
        lines += _prediction_lines(plan.prediction)
    elif plan.memory is not None:
        lines.append(("Of that", _account_in_words(plan.memory)))
    if plan.step_time_s is not None:
        lines.append(("Speed", _speed_in_words(plan)))
    if plan.objective == "memory":
        lines.append(("Objective", "the lowest peak, and the fastest among equals"))
    return [*lines, ("Levers", levers_in_words(plan.levers))]


def plan_in_words(plan: PlanRecord) -> str:
    """The micro-batches of one optimizer step on this rank, and what they make up."""
    ranks = f" on rank {plan.rank} of {plan.world_size}" if plan.world_size > 1 else ""
    return f"{_sizes_in_words(plan.micro_batch_sizes)}{ranks} = one optimizer step of {plan.effective_batch} samples"


def _speed_in_words(plan: PlanRecord) -> str:
    step = format_seconds(plan.step_time_s) if plan.timing is None else timing_in_words(plan.timing)
    rate = f"{plan.samples_per_s:.4g} samples/s" if plan.samples_per_s else "-"
    return f"{step} per optimizer step, {rate}"


def skipped_in_words(skipped: Skipped) -> str:
    """A level that was left out, and why."""
    return f"{skipped.lever} {skipped.level}: {skipped.reason}"


def _plan_memory_in_words(plan: PlanRecord) -> str:
    found = plan.prediction
    if found is None:
        foreseen = f" ({format_bytes(plan.predicted_peak_bytes)} was predicted)" if plan.predicted_peak_bytes else ""
        return _memory_in_words(plan.measured_peak_bytes, plan.budget_bytes) + foreseen
    return (
        f"predicted peak {format_bytes(found.peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)}, "
        f"between {format_bytes(found.low_bytes)} and {format_bytes(found.high_bytes)}, in the {found.phase} phase"
    )


def _prediction_lines(found: Prediction) -> list[tuple[str, str]]:
    parts = ", ".join(f"{kind} {format_bytes(held)}" for kind, held in found.parts)
    return [
        ("Of that", parts),
        ("Work", f"{found.flops_per_step / 1e12:.4g} TFLOP per optimizer step and rank"),
    ]


def _outlook_lines(outlooks: Sequence[Outlook]) -> list[tuple[str, str]]:
    lines = []
    for row in outlooks:
        fits = f"{row.accumulation_steps} micro-batches of at most {row.micro_batch}" if row.fits else "does not fit"
        peak = f"{format_bytes(row.peak_bytes)} of {format_bytes(row.total_bytes)}"
        lines.append((row.gpu, f"{fits}, {peak}, levers: {levers_in_words(row.levers)}"))
    return lines


def probe_lines(result: ProbeResult) -> list[tuple[str, str]]:
    """The probe's result as (what, value) pairs, in the order to read them."""
    return _readable(probe_facts(result) + _environment_lines(result.environment))


def _readable(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names come from models, devices and files: what a terminal would obey is not among them."""
    return [(without_controls(what), without_controls(value)) for what, value in lines]


def probe_facts(result: ProbeResult) -> list[tuple[str, str]]:
    """What fits and what that rests on, without where it was found."""
    lines = [
        ("Largest micro-batch", _limit_in_words(result.max_micro_batch, result, "the next size")),
        ("Memory", _memory_in_words(result.measured_peak_bytes, result.budget_bytes)),
    ]
    if result.memory is not None:
        lines.append(("Of that", _account_in_words(result.memory)))
    return lines if is_default(result.levers) else [*lines, ("Levers", levers_in_words(result.levers))]


def plan_text(plan: PlanRecord) -> str:
    """The plan as a few lines of text."""
    return _as_text([*plan_lines(plan), *(("Advice", text) for text in plan.advice)], plan.warnings)


def plan_markdown(plan: PlanRecord) -> str:
    """The plan, its trade-offs and its trials as Markdown."""
    head = ["## autoaccum plan", "", *_markdown_table(("", ""), plan_lines(plan))]
    return _as_markdown(
        head,
        _section("Trade-offs", _settings_table(plan)),
        _section("Advice", _markdown_list(plan.advice)),
        _section("Trials", _table_of(trial_cells(plan.trials))),
        _section("Left out", _markdown_list([skipped_in_words(skipped) for skipped in plan.skipped])),
        _section("Notes", _markdown_list(plan.warnings)),
    )


def probe_markdown(result: ProbeResult) -> str:
    """The probe's result and its trials as Markdown."""
    return _as_markdown(
        ["## autoaccum probe", "", *_markdown_table(("", ""), probe_lines(result))],
        _section("Trials", _table_of(trial_cells(result.trials))),
        _section("Notes", _markdown_list(result.warnings)),
    )


def _as_text(lines: Sequence[tuple[str, str]], warnings: Sequence[str]) -> str:
    width = max(len(what) for what, _ in lines)
    body = [f"{what:<{width}}  {value}" for what, value in lines]
    return without_controls("\n".join(body + [f"{'Note':<{width}}  {text}" for text in warnings]))


def _as_markdown(*sections: Sequence[str]) -> str:
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    """The lines under a heading; without lines there is no heading either."""
    return [f"### {title}", "", *lines] if lines else []


def _settings_table(plan: PlanRecord) -> list[str]:
    """The chosen row is bold from end to end."""
    cells = setting_cells(plan)
    noted = [(*row, note) for row, note in zip(cells.rows, setting_notes(plan), strict=True)]
    header, rows = without_empty((*cells.header, "note"), [tuple(map(_cell, row)) for row in noted])
    bold = [tuple(f"**{cell}**" if cell else "" for cell in row) if row[0] == "chosen" else row for row in rows]
    return _markdown_rows(header, bold) if rows else []


def _table_of(cells: Cells) -> list[str]:
    return _markdown_table(*cells) if cells.rows else []


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return _markdown_rows(header, [tuple(map(_cell, row)) for row in rows])


def _markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of cells that are Markdown already."""
    head = "| " + " | ".join(header) + " |" if any(header) else "| " * len(header) + "|"
    return [head, "|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows)]


def _markdown_list(texts: Sequence[str]) -> list[str]:
    return ["- " + _BLOCK.sub(r"\1\\\2", _cell(text)) for text in texts]


def _cell(text: str) -> str:
    """Text that is shown as it is: it cannot break out of a Markdown cell, and is neither Markdown nor HTML."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", " ".join(without_controls(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _sizes_in_words(sizes: Sequence[int]) -> str:
    groups = [(size, len(list(group))) for size, group in groupby(sizes)]
    parts = [f"{count} x {size}" if count > 1 else str(size) for size, count in groups]
    return f"{' + '.join(parts)} ({len(sizes)} micro-batch{'es' if len(sizes) > 1 else ''})"


def _limit_in_words(size: int, found: PlanRecord | ProbeResult, following: str) -> str:
    tried = [trial for trial in found.trials if trial.candidate.levers == found.levers]
    failed = [trial.candidate.micro_batch for trial in tried if not isinstance(trial.outcome, Fit)]
    above = [other for other in failed if other > size]
    if found.evidence == "predicted":
        basis = "predicted: it was not run with these levers" if found.trials else "predicted: nothing was run"
    elif found.evidence == "exact":
        named = f", {min(above)}," if above else ""
        basis = f"exact: it ran, and {following}{named} ran and failed"
    elif above:
        basis = f"measured: it ran, and {min(above)} failed; sizes between them were not tried"
    elif found.limited_by == "memory" and found.levers == Levers():
        basis = f"measured: it ran, and the peaks of smaller sizes show that {following} cannot fit"
    else:
        basis = "measured: it ran, and no larger size was tried"
    return f"{size}, limited by {_LIMITS[found.limited_by]} ({basis})"


def _memory_in_words(peak_bytes: int | None, budget_bytes: int) -> str:
    if peak_bytes is None:
        return f"budget {format_bytes(budget_bytes)}, peak not measured"
    return f"measured peak {format_bytes(peak_bytes)} of a budget of {format_bytes(budget_bytes)}"


def _account_in_words(account: MemoryAccount) -> str:
    weights = account.trainable_bytes + account.frozen_bytes
    text = f"weights {format_bytes(weights)}, gradients {format_bytes(account.gradient_bytes)}"
    return text + f", optimizer state {format_bytes(account.optimizer_state_bytes)}"


def _environment_lines(environment: Environment | None) -> list[tuple[str, str]]:
    if environment is None:
        return []
    return [
        ("Model", f"{environment.model}, optimizer {environment.optimizer}"),
        ("Probed with", environment.batch),
        ("Device", f"{environment.device} ({environment.device_name}), torch {environment.torch_version}"),
    ]
