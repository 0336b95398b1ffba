"""What the command line reads and writes: saved runs, and reports to files or to stdout. torch is not imported here."""

from __future__ import annotations

import os
from pathlib import Path

import click

from autoaccum.comparing.reading import read_run
from autoaccum.files import read_bounded, write_whole
from autoaccum.records import PlanRecord, ProbeResult, to_json


def write_reports(
    found: PlanRecord | ProbeResult, json_path: str | None, html_path: str | None, markdown_path: str | None
) -> None:
    """Everything that was asked for, "-" to stdout; on the terminal where nothing else goes there."""
    if "-" not in (json_path, html_path, markdown_path):
        from autoaccum.report.terminal import show

        show(found)
    for path, render in ((json_path, to_json), (html_path, _html), (markdown_path, _markdown)):
        if path == "-":
            click.echo(render(found))
        elif path is not None:
            write_named(path, render(found))


def write_named(path: str, text: str) -> None:
    """Write a whole file, or say by its name why not."""
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise click.ClickException(f"{path} could not be written: {error.strerror or error}") from None


def check_writable(*paths: str | None) -> None:
    """Refuse a report that could not be written before the search, not after it."""
    if paths.count("-") > 1:
        raise click.UsageError("only one report can go to stdout (-); give the others file names.")
    named = [Path(path).resolve() for path in paths if path not in (None, "-")]
    if len(set(named)) < len(named):
        raise click.UsageError("several reports would go to one file; give them names of their own.")
    if "" in paths:
        raise click.UsageError("a report's file name is empty.")
    for path in paths:
        if path not in (None, "-") and not os.access(Path(str(path)).absolute().parent, os.W_OK):
            raise click.UsageError(f"the folder of {path!r} does not exist or cannot be written to.")
        if path not in (None, "-") and Path(str(path)).is_dir():
            raise click.UsageError(f"{path!r} is a folder; expected a file name.")


def _markdown(found: PlanRecord | ProbeResult) -> str:
    from autoaccum.report.text import plan_markdown, probe_markdown

    return plan_markdown(found) if isinstance(found, PlanRecord) else probe_markdown(found)


def saved_run(path: str) -> PlanRecord | ProbeResult:
    """The run that a file holds; a file that cannot be read is an OSError, which ends with 2."""
    return read_run(read_bounded(Path(path)), path)


def _html(found: PlanRecord | ProbeResult) -> str:
    from autoaccum.report.pages import plan_html, probe_html

    return plan_html(found) if isinstance(found, PlanRecord) else probe_html(found)
