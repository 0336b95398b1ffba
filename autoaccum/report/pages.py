"""Plans as HTML. Every text from outside is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autoaccum.records import PlanRecord
from autoaccum.report.tables import TABLE_HEADER, table_rows
from autoaccum.report.text import plan_lines


def plan_html(plan: PlanRecord) -> str:
    """The plan and its trials as an HTML fragment, for a notebook or a page."""
    facts = "".join(f"<tr><th>{escape(what)}</th><td>{escape(value)}</td></tr>" for what, value in plan_lines(plan))
    head = "".join(f"<th>{escape(name)}</th>" for name in TABLE_HEADER)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in table_rows(plan.trials))
    notes = "".join(f"<li>{escape(text)}</li>" for text in plan.warnings)
    return (
        f"<h3>autoaccum plan</h3><table>{facts}</table>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" + (f"<ul>{notes}</ul>" if notes else "")
    )


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)
