"""Plans and probe results in plain words: for `str(plan)`, for the terminal and for Markdown."""

from __future__ import annotations

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
)
from autoaccum.report.tables import TABLE_HEADER, table_rows
from autoaccum.units import format_bytes, format_seconds

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
    return "\n".join(
        [*lines, *(f"  - {reason}" for reason in result.reasons), *(f"  note: {note}" for note in result.notes)]
    )


def plan_lines(plan: PlanRecord) -> list[tuple[str, str]]:
    """The plan as (what, value) pairs, in the order to read them."""
    ranks = f" on rank {plan.rank} of {plan.world_size}" if plan.world_size > 1 else ""
    lines = [
        ("Plan", f"{_sizes_in_words(plan.micro_batch_sizes)}{ranks} = one optimizer step of {plan.effective_batch} samples"),
        ("Largest micro-batch", _limit_in_words(plan.max_micro_batch, plan, "the next size of use for this target")),
        ("Memory", _plan_memory_in_words(plan)),
    ]
    if plan.prediction is not None:
        lines += _prediction_lines(plan.prediction)
    elif plan.memory is not None:
        lines.append(("Of that", _account_in_words(plan.memory)))
    if plan.step_time_s is not None:
        rate = f"{plan.samples_per_s:.4g} samples/s" if plan.samples_per_s else "-"
        lines.append(("Speed", f"{format_seconds(plan.step_time_s)} per optimizer step, {rate}"))
    lines.append(("Levers", _levers_in_words(plan.levers)))
    lines += _environment_lines(plan.environment)
    return lines + _outlook_lines(() if plan.prediction is None else plan.prediction.outlooks)


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
        ("Not modelled", "; ".join(found.not_modelled)),
    ]


def _outlook_lines(outlooks: Sequence[Outlook]) -> list[tuple[str, str]]:
    lines = []
    for row in outlooks:
        fits = f"{row.accumulation_steps} micro-batches of at most {row.micro_batch}" if row.fits else "does not fit"
        peak = f"{format_bytes(row.peak_bytes)} of {format_bytes(row.total_bytes)}"
        lines.append((row.gpu, f"{fits}, {peak}, levers: {_levers_in_words(row.levers)}"))
    return lines


def probe_lines(result: ProbeResult) -> list[tuple[str, str]]:
    """The probe's result as (what, value) pairs, in the order to read them."""
    lines = [
        ("Largest micro-batch", _limit_in_words(result.max_micro_batch, result, "the next size")),
        ("Memory", _memory_in_words(result.measured_peak_bytes, result.budget_bytes)),
    ]
    if result.memory is not None:
        lines.append(("Of that", _account_in_words(result.memory)))
    return lines + _environment_lines(result.environment)


def plan_text(plan: PlanRecord) -> str:
    """The plan as a few lines of text."""
    return _as_text(plan_lines(plan), plan.warnings)


def probe_text(result: ProbeResult) -> str:
    """The probe's result as a few lines of text."""
    return _as_text(probe_lines(result), result.warnings)


def plan_markdown(plan: PlanRecord) -> str:
    """The plan and its trials as Markdown."""
    return _as_markdown("autoaccum plan", plan_lines(plan), plan.warnings, table_rows(plan.trials))


def probe_markdown(result: ProbeResult) -> str:
    """The probe's result and its trials as Markdown."""
    return _as_markdown("autoaccum probe", probe_lines(result), result.warnings, table_rows(result.trials))


def _as_text(lines: Sequence[tuple[str, str]], warnings: Sequence[str]) -> str:
    width = max(len(what) for what, _ in lines)
    body = [f"{what:<{width}}  {value}" for what, value in lines]
    return "\n".join(body + [f"{'Note':<{width}}  {text}" for text in warnings])


def _as_markdown(
    title: str, lines: Sequence[tuple[str, str]], warnings: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> str:
    parts = [f"## {title}", "", "| | |", "|---|---|"]
    parts += [f"| {_cell(what)} | {_cell(value)} |" for what, value in lines]
    parts += ["", "### Trials", "", "| " + " | ".join(TABLE_HEADER) + " |", "|" + "---|" * len(TABLE_HEADER)]
    parts += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    if warnings:
        parts += ["", "### Notes", "", *(f"- {_cell(text)}" for text in warnings)]
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Text that cannot break out of a Markdown cell or smuggle HTML into a page."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|")
    return " ".join(escaped.split())


def _sizes_in_words(sizes: Sequence[int]) -> str:
    groups = [(size, len(list(group))) for size, group in groupby(sizes)]
    parts = [f"{count} x {size}" if count > 1 else str(size) for size, count in groups]
    return f"{' + '.join(parts)} ({len(sizes)} micro-batch{'es' if len(sizes) > 1 else ''})"


def _limit_in_words(size: int, found: PlanRecord | ProbeResult, following: str) -> str:
    above = [
        t.candidate.micro_batch for t in found.trials if t.candidate.micro_batch > size and not isinstance(t.outcome, Fit)
    ]
    if found.evidence == "predicted":
        basis = "predicted: nothing was run"
    elif found.evidence == "exact":
        named = f", {min(above)}," if above else ""
        basis = f"exact: it ran, and {following}{named} ran and failed"
    elif above:
        basis = f"measured: it ran, and {min(above)} failed; sizes between them were not tried"
    elif found.limited_by == "memory":
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


def _levers_in_words(levers: Levers) -> str:
    defaults = Levers()
    turned = [
        f"{name} {getattr(levers, name)}"
        for name in Levers.__struct_fields__
        if getattr(levers, name) != getattr(defaults, name)
    ]
    return ", ".join(turned) or "none used"


def _environment_lines(environment: Environment | None) -> list[tuple[str, str]]:
    if environment is None:
        return []
    return [
        ("Model", f"{environment.model}, optimizer {environment.optimizer}"),
        ("Probed with", environment.batch),
        ("Device", f"{environment.device} ({environment.device_name}), torch {environment.torch_version}"),
    ]
