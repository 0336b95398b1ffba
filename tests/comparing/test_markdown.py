"""The report of a comparison."""

from __future__ import annotations

from autoaccum.comparing.compare import compare
from autoaccum.comparing.markdown import comparison_markdown

from .runs import HALF, plan


def test_report_is_a_table_and_a_line() -> None:
    """The Markdown has a row for each measurement, with its interval, and ends with the verdict."""
    shown = comparison_markdown(compare(plan(peak=2**20), plan(peak=2**21), 0.05, base_name="a.json", new_name="b.json"))
    assert shown.splitlines() == [
        "## autoaccum compare",
        "",
        "Base `a.json`, new `b.json`.",
        "",
        "| setting | metric | base | new | change | verdict |",
        "|---|---|---|---|---|---|",
        "| plan: micro-batch 32, no levers | measured peak | 1.00 MiB | 2.00 MiB | +100.0 % | **regressed** |",
        "| plan: micro-batch 32, no levers | samples/s | 64 (63.37 to 64.65) | 64 (63.37 to 64.65) | +0.0 % | ok |",
        "| plan: micro-batch 32, no levers | largest micro-batch | 32 | 32 | +0.0 % | ok |",
        "",
        "**Failed**: 1 of 3 measurements regressed by more than 5 %.",
    ]


def test_levers_of_a_row_are_named() -> None:
    """A setting is shown with the levers that are turned, and two of them where they differ."""
    shown = comparison_markdown(compare(plan(levers=HALF), plan(), 0.05))
    assert "plan: micro-batch 32, checkpointing selective, checkpointed_blocks 2 -> micro-batch 32, no levers" in shown
