"""What is printed on a terminal: all of it, and texts from outside as they are."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from autoaccum.records import PlanRecord, ProbeResult, Trial
from autoaccum.report.settings import brief_cells
from autoaccum.report.tables import trial_cells
from autoaccum.report.terminal import show, show_settings, show_trials
from autoaccum.report.text import plan_lines, probe_lines


def console_of(width: int = 300, colour: bool = False) -> tuple[Console, io.StringIO]:
    page = io.StringIO()
    return Console(file=page, width=width, force_terminal=colour, color_system="standard" if colour else None), page


def words(text: str) -> str:
    """The text with every run of spaces and line breaks as one space."""
    return " ".join(text.split())


def test_plan_is_shown_whole(plan: PlanRecord) -> None:
    """Every trial, every setting, every fact and every warning of a plan is printed."""
    console, page = console_of()
    show(plan, console)
    shown = words(page.getvalue())
    for what, value in plan_lines(plan):
        assert what in shown and words(value) in shown
    for row in trial_cells(plan.trials).rows + brief_cells(plan).rows:
        assert " │ ".join(row).strip() in re.sub(r" +│ +", " │ ", page.getvalue())
    assert shown.index("Trials") < shown.index("Trade-offs") < shown.index("Largest micro-batch")


def test_result_is_shown_whole(result: ProbeResult) -> None:
    """Every fact and every warning of a probe's result is printed, after its trials."""
    console, page = console_of()
    show(result, console)
    shown = words(page.getvalue())
    assert all(words(value) in shown for _, value in probe_lines(result))
    assert shown.index("Trials") < shown.index("Largest micro-batch") < shown.index("Note")


@pytest.mark.parametrize("colour", [False, True])
def test_markup_is_not_interpreted(plan: PlanRecord, colour: bool) -> None:
    """Square brackets in a device's name or a warning are printed and not taken for colours."""
    console, page = console_of(colour=colour)
    show(plan, console)
    assert "[bold]GPU[/bold]" in page.getvalue() and "[red]e[/red]" in page.getvalue()


def test_an_unbalanced_bracket_is_no_error(bare_plan: PlanRecord) -> None:
    """A warning that would be broken markup is printed as it is."""
    console, page = console_of()
    show(msgspec.structs.replace(bare_plan, warnings=("[/nothing] was [open",)), console)
    assert "[/nothing] was [open" in page.getvalue()


def test_trials_have_every_column(trials: tuple[Trial, ...]) -> None:
    """The table of trials has a title and all columns."""
    console, page = console_of()
    show_trials(trials, console)
    header = page.getvalue().splitlines()[2]
    assert page.getvalue().startswith("Trials")
    assert [cell.strip() for cell in header.strip("┃").split("┃")] == list(trial_cells(trials).header)


def test_failures_are_red(trials: tuple[Trial, ...]) -> None:
    """On a terminal with colours, trials that did not fit are red, and those that fitted are not."""
    console, page = console_of(colour=True)
    show_trials(trials, console)
    lines = {line.split("│")[1]: line for line in page.getvalue().splitlines() if "│" in line}
    red = ["\x1b[31m" in line for line in lines.values()]
    assert red == [True, False, False, True, True, True, True, True, True, False, False]


def test_the_chosen_setting_is_marked(plan: PlanRecord) -> None:
    """The chosen setting comes first and is marked with a star, and no other one is."""
    console, page = console_of()
    show_settings(plan, console)
    marked = [line.split("│")[1].strip() for line in page.getvalue().splitlines() if line.count("│") > 3]
    assert marked == ["*", "", "", "", ""]


def test_the_chosen_setting_is_bold(plan: PlanRecord) -> None:
    """On a terminal with colours the chosen setting is bold, and what was left out is dim."""
    console, page = console_of(colour=True)
    show_settings(plan, console)
    lines = [line for line in page.getvalue().splitlines() if line.count("│") > 3]
    assert ["\x1b[1;32m" in line for line in lines] == [True] + [False] * 4
    assert ["\x1b[2m" in line for line in lines] == [False] * 3 + [True] * 2


def test_notes_and_advice_stand_below_the_settings(plan: PlanRecord) -> None:
    """Why a setting was left out, and then the advice, are printed below the trade-offs."""
    console, page = console_of()
    show_settings(plan, console)
    shown = words(page.getvalue())
    note = shown.index("Not run 1 setting: a | b <i>")
    assert shown.index("Trade-offs") < note < shown.index("Advice more <b>memory</b> would | help [red]e[/red]")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_a_narrow_terminal_loses_no_setting(plan: PlanRecord, width: int) -> None:
    """On a terminal of any width every number of every setting is printed, and no line is too long."""
    console, page = console_of(width)
    show_settings(plan, console)
    assert max(map(len, page.getvalue().splitlines())) <= width
    shown = "".join(page.getvalue().replace("│", " ").split())
    known = [word for row in brief_cells(plan).rows for cell in row[1:] for word in cell.split() if cell != "-"]
    assert [word for word in known if word not in shown] == []


def test_a_narrow_terminal_breaks_no_word(plan: PlanRecord) -> None:
    """Where columns would be narrower than their words, what a row says stands one after the other."""
    console, page = console_of(50)
    show_settings(plan, console)
    shown = words(page.getvalue().replace("│", " "))
    assert "*; levers: full checkpointing of 6 blocks, bf16; micro-batch x steps: 4 x 3;" in shown
    assert "optimizer step: 500 ms ±0%; speed: 2.00x" in shown


def test_eighty_columns_hold_both_tables(plan: PlanRecord) -> None:
    """The usual terminal shows trials and trade-offs in columns, with every number on one line."""
    console, page = console_of(80)
    show(plan, console)
    assert page.getvalue().count("┏") == 2
    assert max(map(len, page.getvalue().splitlines())) <= 80
    assert re.search(r"500 ms ±0% │ +2.00x │", page.getvalue())


def test_equal_reasons_are_said_once(plan: PlanRecord) -> None:
    """Settings that were left out for the same reason share a line; what was not run is counted."""
    left = next(setting for setting in plan.settings if setting.standing == "not run")
    console, page = console_of()
    show_settings(msgspec.structs.replace(plan, settings=(*plan.settings, left, left)), console)
    assert words(page.getvalue()).count("Not run 3 settings: a | b <i>") == 1


def test_no_settings_no_table(bare_plan: PlanRecord) -> None:
    """A plan without settings or advice prints nothing about them."""
    console, page = console_of()
    show_settings(bare_plan, console)
    assert page.getvalue() == ""


def test_no_trials_no_table() -> None:
    """Without trials nothing is printed."""
    console, page = console_of()
    show_trials((), console)
    assert page.getvalue() == ""


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_loses_no_word(plan: PlanRecord, width: int) -> None:
    """On a narrow terminal long sentences are broken into lines that fit, and none is cut off."""
    console, page = console_of(width)
    show(plan, console)
    assert max(map(len, page.getvalue().splitlines())) <= width
    shown = "".join(page.getvalue().split())
    assert [word for _, value in plan_lines(plan) for word in value.split() if word not in shown] == []


def test_plain_output_has_no_escape_codes(plan: PlanRecord) -> None:
    """Output that goes to a file has no colours in it."""
    console, page = console_of()
    show(plan, console)
    assert "\x1b" not in page.getvalue()


def test_standard_output_is_the_default(trials: tuple[Trial, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a console the table goes to standard output."""
    show_trials(trials)
    shown = capsys.readouterr()
    assert "Trials" in shown.out and shown.err == ""
