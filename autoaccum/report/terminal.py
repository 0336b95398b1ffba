"""Trials, trade-offs and answers on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.records import Fit, PlanRecord, ProbeResult, Trial
from autoaccum.report.settings import brief_cells, ordered, setting_notes
from autoaccum.report.tables import COLUMNS_OF_WORDS, Cells, levers_in_words, trial_cells
from autoaccum.report.text import plan_lines, probe_lines

_BETWEEN = 3  # a line and two spaces
_STYLES = {"chosen": "bold green", "measured": ""}  # of trade-offs; the others were left out


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
    """Print one row per trial, in the order run; a narrow terminal leaves out how many samples each ran per second."""
    if not trials:
        return
    console = console or Console()
    cells = trial_cells(trials)
    styles = ["" if isinstance(trial.outcome, Fit) else "red" for trial in trials]
    brief = cells if _widths(cells, console.width) else _without("samples/s", cells)
    console.print(_table("Trials", brief, styles, console.width) or _cards("Trials", cells, styles))


def show_settings(plan: PlanRecord, console: Console | None = None) -> None:
    """Print the settings that were measured or are not allowed, the chosen one marked, and below them notes and advice."""
    console = console or Console()
    cells = brief_cells(plan)
    if cells.rows:
        shown = [setting for setting in ordered(plan.settings) if setting.standing != "not run"]
        styles = [_STYLES.get(setting.standing, "dim") for setting in shown]
        console.print(_table("Trade-offs", cells, styles, console.width) or _cards("Trade-offs", cells, styles))
    said = [*_reasons(plan), *(("Advice", text) for text in plan.advice)]
    if said:
        console.print(_grid(said))


def _reasons(plan: PlanRecord) -> list[tuple[str, str]]:
    """Why settings were left out: the same reason is said once, and what was not run is counted."""
    alike: dict[tuple[str, str], list[str]] = {}
    for setting, note in zip(ordered(plan.settings), setting_notes(plan), strict=True):
        if note:
            alike.setdefault((setting.standing, note), []).append(levers_in_words(setting.levers))
    said = []
    for (standing, note), levers in alike.items():
        num = len(levers)
        which = f"{num} setting{'s' if num > 1 else ''}" if standing == "not run" else "; ".join(dict.fromkeys(levers))
        said.append((standing.capitalize(), f"{which}: {note}"))
    return said


def _without(name: str, cells: Cells) -> Cells:
    kept = [place for place, column in enumerate(cells.header) if column != name]
    header, *rows = (tuple(row[place] for place in kept) for row in (cells.header, *cells.rows))
    return Cells(header, tuple(rows))


def _cards(title: str, cells: Cells, styles: Sequence[str]) -> Table:
    """For a terminal too narrow for columns: what each row says, one after the other."""
    table = Table(title=title, title_justify="left", show_header=False)
    for row, style in zip(cells.rows, styles, strict=True):
        known = [f"{name}: {cell}" if name else cell for name, cell in zip(cells.header, row, strict=True) if cell != "-"]
        table.add_row(Text("; ".join(filter(None, known))), style=style, end_section=True)
    return table


def _table(title: str, cells: Cells, styles: Sequence[str], width: int) -> Table | None:
    """None where a terminal of that width would break words or numbers."""
    widths = _widths(cells, width)
    if widths is None:
        return None
    table = Table(title=title, title_justify="left")
    for name, column_width in zip(cells.header, widths, strict=True):
        justify: Literal["left", "right"] = "left" if name in COLUMNS_OF_WORDS else "right"
        table.add_column(name, justify=justify, width=column_width)
    for row, style in zip(cells.rows, styles, strict=True):
        table.add_row(*map(Text, row), style=style)
    return table


def _widths(cells: Cells, width: int) -> list[int] | None:
    """Of each column: numbers whole, and words and names on as few lines as the terminal has room for."""
    columns = list(zip(cells.header, *cells.rows, strict=True))
    whole = [max(map(len, column)) for column in columns]
    least = [_least_width(name, cells_below) for name, *cells_below in columns]
    left = width - sum(least) - _BETWEEN * len(columns) - 1
    if left < 0:
        return None
    widths = []
    for most, needed in zip(whole, least, strict=True):
        widths.append(min(most, needed + left))
        left -= widths[-1] - needed
    return widths


def _least_width(name: str, cells: Sequence[str]) -> int:
    words = [word for cell in cells for word in cell.split()] if name in COLUMNS_OF_WORDS else cells
    return max(map(len, [*words, *name.split()]), default=0)


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for what, value in lines:
        grid.add_row(Text(what, style="bold"), Text(value))
    return grid
