"""Trials and answers on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.records import Fit, PlanRecord, ProbeResult, Trial
from autoaccum.report.tables import TABLE_HEADER, table_rows
from autoaccum.report.text import plan_lines, probe_lines


def show(found: PlanRecord | ProbeResult, console: Console | None = None) -> None:
    """Print the trials and what they add up to."""
    console = console or Console()
    show_trials(found.trials, console)
    lines = plan_lines(found) if isinstance(found, PlanRecord) else probe_lines(found)
    grid = Table.grid(padding=(0, 2))
    for what, value in lines:
        grid.add_row(Text(what, style="bold"), Text(value))
    for warning in found.warnings:
        grid.add_row(Text("Note", style="yellow"), Text(warning))
    console.print(grid)


def show_trials(trials: Sequence[Trial], console: Console | None = None) -> None:
    """Print one row per trial, in the order run."""
    if not trials:
        return
    table = Table(title="Trials", title_justify="left")
    for name in TABLE_HEADER:
        table.add_column(name, justify="left" if name == "outcome" else "right")
    for trial, row in zip(trials, table_rows(trials), strict=True):
        table.add_row(*map(Text, row), style="" if isinstance(trial.outcome, Fit) else "red")
    (console or Console()).print(table)
