"""Trials, trade-offs and answers on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.records import Fit, PlanRecord, ProbeResult, Trial
from autoaccum.report.settings import setting_cells, setting_notes
from autoaccum.report.tables import COLUMNS_OF_WORDS, Cells, trial_cells
from autoaccum.report.text import plan_lines, probe_lines

_STYLES = {"chosen": "bold green", "measured": ""}  # of trade-offs; the others were left out
_ANY_WIDTH = 10_000  # so wide that it breaks nothing
_MARK = "* "  # seen without colours, and in every encoding


def show(found: PlanRecord | ProbeResult, console: Console | None = None) -> None:
    """Print the trials, the trade-offs and what they add up to."""
    console = console or Console()
    show_trials(found.trials, console)
    if isinstance(found, PlanRecord):
        show_settings(found, console)
    lines = plan_lines(found) if isinstance(found, PlanRecord) else probe_lines(found)
    grid = _grid(lines)
    for warning in found.warnings:
        grid.add_row(Text("Note", style="yellow"), Text(warning))
    console.print(grid)


def show_trials(trials: Sequence[Trial], console: Console | None = None) -> None:
    """Print one row per trial, in the order run."""
    if not trials:
        return
    console = console or Console()
    cells = trial_cells(trials)
    table = _table("Trials", cells, console.width)
    for trial, row in zip(trials, cells.rows, strict=True):
        table.add_row(*map(Text, row), style="" if isinstance(trial.outcome, Fit) else "red")
    console.print(table)


def show_settings(plan: PlanRecord, console: Console | None = None) -> None:
    """Print every setting of the levers, the chosen one marked, and below them the notes and the advice."""
    console = console or Console()
    cells, notes = setting_cells(plan), setting_notes(plan)
    if cells.rows:
        console.print(_settings_table(cells, console))
    said = [(row[0].capitalize(), f"{row[1]}: {note}") for row, note in zip(cells.rows, notes, strict=True) if note]
    said += [("Advice", text) for text in plan.advice]
    if said:
        console.print(_grid(said))


def _settings_table(cells: Cells, console: Console) -> Table:
    """One row per setting, or, where a terminal is too narrow for whole words, its numbers below its levers."""
    wide = _table("Trade-offs", cells, console.width)
    narrow = Table(title="Trade-offs", title_justify="left", show_header=False)
    for standing, *row in cells.rows:
        marked, style = (_MARK + standing if standing == "chosen" else standing), _STYLES.get(standing, "dim")
        wide.add_row(*map(Text, (marked, *row)), style=style)
        known = [f"{name}: {cell}" for name, cell in zip(cells.header[2:], row[1:], strict=True) if cell != "-"]
        narrow.add_row(Text(marked), Text(f"{row[0]}\n{'; '.join(known)}"), style=style, end_section=True)
    needed = console.measure(wide, options=console.options.update(max_width=_ANY_WIDTH)).minimum
    return wide if needed <= console.width else narrow


def _table(title: str, cells: Cells, width: int) -> Table:
    """An empty table for a terminal of that width; levers keep their share of it, where others are broken."""
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(cells.header):
        longest = max((len(row[place]) for row in cells.rows), default=0)
        kept = min(longest, width // 4) if name == "levers" else None
        justify: Literal["left", "right"] = "left" if name in COLUMNS_OF_WORDS else "right"
        table.add_column(name, justify=justify, overflow="fold", width=kept)
    return table


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for what, value in lines:
        grid.add_row(Text(what, style="bold"), Text(value))
    return grid
