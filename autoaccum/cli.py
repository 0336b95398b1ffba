"""The command line: options -> a search in a worker process -> a report. Thin: nothing is decided here.

Exit codes: 0 done, 1 nothing fits or a gate failed, 2 the call or the target is wrong, 130 interrupted, 143 terminated.
torch is not imported here.
"""

from __future__ import annotations

import sys
from math import isfinite
from typing import Any

import click

from autoaccum.cli_reports import check_writable, saved_run, write_named, write_reports
from autoaccum.comparing.compare import compare
from autoaccum.comparing.markdown import comparison_markdown
from autoaccum.comparing.reading import parse_max_regression
from autoaccum.errors import AutoaccumError, NothingFitsError
from autoaccum.records import to_json
from autoaccum.report.following import following
from autoaccum.signals import ending_at_once
from autoaccum.worker.parent import WorkerError, search_in_worker

_TARGET_HELP = """TARGET is what to train: file.py:function or package.module:function (no arguments; returns an
autoaccum.Workload or (model, sample)), demo:gpt, demo:resnet, "hf:llama?hidden_size=256&num_hidden_layers=4&seq_len=128", or
"torchvision:resnet50?image=224"."""


_LEVERS_HELP = 'Which may be turned: none, exact, all, or names such as "checkpointing,precision".'


def _levers(context: click.Context, option: click.Parameter, given: str | None) -> str | list[str] | None:
    """One word, or names between commas; what they mean is checked where they are used."""
    return given.split(",") if given is not None and "," in given else given


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="autoaccum")
def cli() -> None:
    """Find, before training, how to take one optimizer step at a chosen effective batch inside a memory budget."""


@cli.command("probe", epilog=_TARGET_HELP)
@click.argument("target")
@click.option("--target-batch", type=int, help="Samples per optimizer step. Without it: only how many fit.")
@click.option(
    "--budget", help='All this process may hold on the device: "8GiB", "80%". Default: what is free, less a reserve.'
)
@click.option("--device", help='"cpu", "cuda:0", "virtual:8GiB". Default: where the target puts its model.')
@click.option(
    "--levers", callback=_levers, metavar="LEVERS", help=_LEVERS_HELP + " Default: exact (without a target: none)."
)
@click.option(
    "--objective", type=click.Choice(["throughput", "memory"]), default="throughput", show_default=True, help="What is best."
)
@click.option("--max-micro-batch", type=int, help="No micro-batch above this many samples.")
@click.option(
    "--multiple-of", type=int, default=1, show_default=True, help="Micro-batches but the last are multiples of this."
)
@click.option("--equal-micro-batches", is_flag=True, help="One size for all micro-batches (HF Trainer, DeepSpeed).")
@click.option("--time-budget", "time_budget_s", type=float, metavar="SECONDS", help="Try no further size after this.")
@click.option("--storage", metavar="URL|FILE", help="Keep the trials in an Optuna storage, and go on from those there.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Remember the plan; the same call then costs one probe.",
)
@click.option("--inexact", is_flag=True, help="Without a target: stop when the limit is known to within 5 %.")
@click.option("--json", "json_path", metavar="FILE", help="Write a Plan (without a target a ProbeResult); - for stdout.")
@click.option("--html", "html_path", metavar="FILE", help="Write a page; - for stdout.")
@click.option("--markdown", "markdown_path", metavar="FILE", help="Write a report; - for stdout.")
@click.option("--progress/--no-progress", default=None, help="Show a bar. Default: when stderr is a terminal.")
def probe_command(
    target: str,
    device: str | None,
    json_path: str | None,
    html_path: str | None,
    markdown_path: str | None,
    progress: bool | None,
    **numbers: Any,
) -> None:
    """Search with real training steps and print the trials and the plan."""
    check_writable(json_path, html_path, markdown_path)
    if numbers["levers"] is None:
        numbers["levers"] = "none" if numbers["target_batch"] is None else "exact"
    if numbers["time_budget_s"] is not None and not isfinite(numbers["time_budget_s"]):
        raise click.UsageError("--time-budget is not a number of seconds.")  # JSON would turn it into "no limit"
    request = {**{name: value for name, value in numbers.items() if name != "inexact"}, "exact": not numbers["inexact"]}
    with following(progress) as follower:
        found = search_in_worker(target, request, device, follower)
    write_reports(found, json_path, html_path, markdown_path)


@cli.command("predict", epilog=_TARGET_HELP)
@click.argument("target")
@click.option("--target-batch", type=int, required=True, help="Samples per optimizer step, over all ranks.")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    required=True,
    metavar="NAME|BYTES",
    help='"RTX 3060 12GB", "24GiB", or all: which is the smallest that trains this. May be given several times.',
)
@click.option("--budget", help='All the process may hold on the GPU: "8GiB", "80%". Default: all of it.')
@click.option("--levers", callback=_levers, metavar="LEVERS", help=_LEVERS_HELP + " Default: none.")
@click.option("--max-micro-batch", type=int, help="No micro-batch above this many samples.")
@click.option("--multiple-of", type=int, default=1, show_default=True, help="Micro-batches but the last: multiples of this.")
@click.option("--equal-micro-batches", is_flag=True, help="One size for all micro-batches (HF Trainer, DeepSpeed).")
@click.option("--world-size", type=int, default=1, show_default=True, help="Ranks that train together, a GPU each.")
@click.option("--json", "json_path", metavar="FILE", help="Write a Plan; - for stdout.")
@click.option("--html", "html_path", metavar="FILE", help="Write a page; - for stdout.")
@click.option("--markdown", "markdown_path", metavar="FILE", help="Write a report; - for stdout.")
@click.option("--picture", metavar="FILE", help="Draw the memory over one optimizer step: .svg or .png.")
def predict_command(
    target: str,
    gpus: tuple[str, ...],
    world_size: int,
    json_path: str | None,
    html_path: str | None,
    markdown_path: str | None,
    picture: str | None,
    **numbers: Any,
) -> None:
    """Say what would fit on a GPU that is not here. Nothing is run, and a built-in target takes no memory."""
    check_writable(json_path, html_path, markdown_path)
    numbers["levers"] = numbers["levers"] or "none"
    with ending_at_once():
        from autoaccum.worker.child import predicted_target

    found = predicted_target(target, gpus, numbers, world_size, picture)
    if isinstance(found, str):
        raise WorkerError("user", found, ())
    write_reports(found, json_path, html_path, markdown_path)


@cli.command("check", epilog=_TARGET_HELP)
@click.argument("target")
@click.option("--rows", type=click.IntRange(min=2), default=16, show_default=True, help="How many samples to compare.")
@click.option("--device", help='"cpu", "cuda:0". Default: where the target puts its model.')
@click.option("--json", "json_path", metavar="FILE", help="Write a CheckResult; - for stdout.")
def check_command(target: str, rows: int, device: str | None, json_path: str | None) -> None:
    """Say whether accumulation is exact for this model and loss, and if not, why. Exit code 1 if not."""
    check_writable(json_path)
    with ending_at_once():
        from autoaccum.worker.child import checked_target

    found = checked_target(target, rows, device)
    if isinstance(found, str):
        raise WorkerError("user", found, ())
    if json_path == "-":
        click.echo(to_json(found))
    else:
        from autoaccum.report.text import check_text

        click.echo(check_text(found))
        if json_path is not None:
            write_named(json_path, to_json(found))
    if not found.exact:
        raise click.exceptions.Exit(1)


@cli.command("compare")
@click.argument("base")
@click.argument("new")
@click.option(
    "--max-regression", default="5%", show_default=True, metavar="SHARE", help='How much worse is allowed: "5%", "0.05".'
)
@click.option(
    "--allow-different-environments", is_flag=True, help="Compare although device, model, optimizer or versions differ."
)
@click.option("--json", "json_path", metavar="FILE", help="Write a Comparison; - for stdout, instead of the table.")
@click.option("--markdown", "markdown_path", metavar="FILE", help="Write the table to a file as well.")
def compare_command(
    base: str,
    new: str,
    max_regression: str,
    allow_different_environments: bool,
    json_path: str | None,
    markdown_path: str | None,
) -> None:
    """Compare two saved runs: peaks, samples/s, largest micro-batch. Exit code 1 if one is worse by more than allowed.

    BASE and NEW are files of `autoaccum probe --json`. The table is Markdown.
    """
    check_writable(json_path, markdown_path)
    found = compare(
        saved_run(base),
        saved_run(new),
        parse_max_regression(max_regression),
        base_name=base,
        new_name=new,
        allow_different_environments=allow_different_environments,
    )
    if json_path != "-":
        click.echo(comparison_markdown(found), nl=False)
    for path, text in ((json_path, to_json(found)), (markdown_path, comparison_markdown(found))):
        if path not in (None, "-"):
            write_named(str(path), text)
    if json_path == "-":
        click.echo(to_json(found))
    if not found.passed:
        raise click.exceptions.Exit(1)


@cli.command("report")
@click.argument("run")
@click.option("--html", "html_path", metavar="FILE", help="Write a page; - for stdout.")
@click.option("--markdown", "markdown_path", metavar="FILE", help="Write a report; - for stdout.")
def report_command(run: str, html_path: str | None, markdown_path: str | None) -> None:
    """Render a saved run again. RUN is a file of `autoaccum probe --json`; nothing is run."""
    check_writable(html_path, markdown_path)
    write_reports(saved_run(run), None, html_path, markdown_path)


@cli.command()
def doctor() -> None:
    """Show the devices, their memory, the driver, the allocator, and who else holds memory."""
    from autoaccum.report.doctor import examine

    for line in examine():
        click.echo(line)


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(_run(args))


def _run(args: list[str] | None) -> int:
    try:
        code = cli.main(args=args, prog_name="autoaccum", standalone_mode=False)
    except click.exceptions.Exit as request:  # --help and --version
        return request.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return 2
    except WorkerError as error:
        return _report_failure(error)
    except (AutoaccumError, OSError) as error:
        click.echo(f"autoaccum: {error}", err=True)
        return 1 if isinstance(error, NothingFitsError) else 2
    return code if isinstance(code, int) else 0  # click returns the code of an Exit that a command raised


def _report_failure(error: WorkerError) -> int:
    if error.kind == "nothing fits":
        from rich.console import Console

        from autoaccum.report.terminal import show_trials

        show_trials(error.trials, Console(stderr=True))
    click.echo(str(error) if error.kind == "user" else f"autoaccum: {error}", err=True)
    return 1 if error.kind == "nothing fits" else 2
