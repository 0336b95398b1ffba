"""A comparison as Markdown: the table, what else differs, and the verdict in one line."""

from __future__ import annotations

from math import inf

from autoaccum.comparing.records import JUDGED, Comparison, Figure, Metric, Row
from autoaccum.comparing.words import code_span, in_words
from autoaccum.units import format_bytes

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
        f"Base {code_span(comparison.base_name)}, new {code_span(comparison.new_name)}.",
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
        f"{row.part}: " + " -> ".join(map(in_words, ends)),
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
