"""The command line: exit codes, what goes to which stream and file, and what a user sees of a broken target."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import msgspec
import psutil
import pytest

import autoaccum
from autoaccum import Plan, ProbeResult, cli
from autoaccum.comparing.records import Comparison
from autoaccum.records import CheckResult, Environment, PlanRecord, from_json, to_json
from autoaccum.worker import child
from autoaccum.worker.parent import WorkerError

Command = Callable[..., CompletedProcess[str]]
Start = Callable[..., Popen[bytes]]

TINY_GPT = "demo:gpt?layers=1&width=32&vocabulary=64&seq_len=16"

TARGET = """
import os, signal, sys, time
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inside=lambda: None):
        super().__init__()
        self.linear, self.inside = nn.Linear(8, 8), inside

    def forward(self, x):
        self.inside()
        return self.linear(x).square().mean()


def quiet():
    return Net(), torch.randn(4, 8)


def noisy():
    print("printed by the function")
    os.write(1, b"written to descriptor 1\\n")
    print("read:", repr(sys.stdin.read()))
    return Net(lambda: print("printed by forward")), torch.randn(4, 8)


def sleepy():
    def inside():
        print("running", flush=True)
        time.sleep(100)
    return Net(inside), torch.randn(4, 8)


def deadly():
    def inside():
        print("printed before the death")
        os.kill(os.getpid(), signal.SIGKILL)
    return Net(inside), torch.randn(4, 8)


def leaving():
    sys.exit("leaving for good")


def failing():
    return compute(None)


def compute(value):
    return value + 1


def failing_forward():
    def inside():
        try:
            {}["column"]
        except KeyError as error:
            raise LookupError("the table is damaged") from error
    return Net(inside), torch.randn(4, 8)
"""

FILES = {
    "target.py": TARGET,
    "syntax.py": "def build(:\n    pass\n",
    "at_import.py": "import beside\n",
    "beside.py": "raise OSError('the data folder is missing')\n",
}

VIRTUAL = ("--device", "virtual:4MiB", "--max-micro-batch", "2")

CASES: dict[str, tuple[str, ...]] = {
    "plan": (
        "target.py:noisy",
        "--target-batch",
        "5",
        "--levers",
        "none",
        *VIRTUAL,
        "--json",
        "p.json",
        "--markdown",
        "p.md",
        "--progress",
    ),
    "probe": ("target.py:noisy", *VIRTUAL, "--json", "-"),
    "markdown": ("target.py:quiet", *VIRTUAL, "--markdown", "-"),
    "nothing fits": (TINY_GPT, "--device", "virtual:200KiB", "--json", "-"),
    "dies": ("target.py:deadly", *VIRTUAL),
    "forward": ("target.py:failing_forward", "--device", "virtual:4MiB"),
    "no function": ("target.py:queit",),
}

RARE_CASES: dict[str, tuple[str, ...]] = {
    "small budget": (TINY_GPT, "--device", "virtual:4MiB", "--budget", "20KiB"),
    "at import": ("at_import.py:build",),
    "exit": ("target.py:leaving",),
    "device": (TINY_GPT, "--device", "toaster"),
    "syntax": ("syntax.py:build",),
    "function": ("target.py:failing",),
    "no transformers": ("hf:llama?hidden_size=32",),
    "no torchvision": ("torchvision:resnet50?image=32",),
}

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in ("torchvision", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with targets."""
    folder = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that keeps the optional libraries from being imported."""
    folder = tmp_path_factory.mktemp("blocking")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return folder


def run_all(
    cases: dict[str, tuple[str, ...]], command: Command, folder: Path, blocking: Path
) -> dict[str, CompletedProcess[str]]:
    """Each case loads torch, so two run at a time."""

    def run(name: str) -> CompletedProcess[str]:
        more = {"PYTHONPATH": str(blocking)} if name in ("no torchvision", "no transformers") else {}
        return command("probe", *cases[name], folder=folder, **more)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(run, cases), strict=True))


@pytest.fixture(scope="module")
def runs(command: Command, folder: Path, blocking: Path) -> dict[str, CompletedProcess[str]]:
    """Every case, run to its end."""
    return run_all(CASES, command, folder, blocking)


@pytest.fixture(scope="module")
def rare_runs(command: Command, folder: Path, blocking: Path) -> dict[str, CompletedProcess[str]]:
    """Those of which another one shows much the same."""
    return run_all(RARE_CASES, command, folder, blocking)


def with_rare_ones(*rows: tuple[str, ...]) -> list[Any]:
    """Rows that begin with a case, with the fixture that has run it."""
    return [
        pytest.param("rare_runs", *row, marks=pytest.mark.slow) if row[0] in RARE_CASES else pytest.param("runs", *row)
        for row in rows
    ]


# -- without a search


@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.parametrize("arguments", [["--help"], ["probe", "--help"], ["--version"]])
def test_help_imports_no_large_library(how: str, arguments: list[str]) -> None:
    """Help and version are shown without importing torch, pandas, optuna or numpy."""
    script = shutil.which("autoaccum", path=str(Path(sys.executable).parent))
    if how == "script" and script is None:
        pytest.skip("the console script is not installed beside this interpreter")
    start = [str(script)] if how == "script" else ["-m", "autoaccum"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *start, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert done.returncode == 0 and "autoaccum.cli" in imported
    assert not {name.partition(".")[0] for name in imported} & {"torch", "pandas", "optuna", "numpy"}


def test_the_side_that_waits_imports_no_torch() -> None:
    """The command's own process reports a search and draws its progress without importing torch."""
    used = (
        "autoaccum.cli, autoaccum.comparing, autoaccum.worker.parent, autoaccum.report.terminal, autoaccum.report.text, "
        "autoaccum.report.progress"
    )
    source = f"import sys, {used}; print(sorted({{'torch', 'pandas', 'optuna'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Usage"),
        (["probe"], "TARGET"),
        (["tune", "demo:gpt"], "tune"),
        (["probe", "demo:gpt", "--budgets", "1GiB"], "--budget"),
        (["probe", "demo:gpt", "--target-batch", "many"], "--target-batch"),
        (["probe", "demo:gpt", "--json", "nowhere/plan.json"], "'nowhere/plan.json' does not exist"),
        (["probe", "demo:gpt", "--markdown", "nowhere/plan.md"], "'nowhere/plan.md' does not exist"),
        (["probe", "demo:gpt", "--json", "."], "is a folder"),
        (["probe", "demo:gpt", "--json", "-", "--markdown", "-"], "only one report"),
        (["probe", "demo:gpt", "--cache", __file__], "is a file"),
        (["check"], "TARGET"),
        (["check", "demo:gpt", "--rows", "1"], "--rows"),
        (["check", "demo:gpt", "--rows", "many"], "--rows"),
        (["check", "demo:gpt", "--json", "nowhere/check.json"], "'nowhere/check.json' does not exist"),
        (["check", "demo:gpt", "--json", "."], "is a folder"),
        (["compare", "base.json"], "NEW"),
        (["compare", "a.json", "b.json", "--json", "-", "--markdown", "-"], "only one report"),
        (["report"], "RUN"),
        (["report", "run.json", "--html", "nowhere/run.html"], "'nowhere/run.html' does not exist"),
        (["report", "run.json", "--html", "one.html", "--markdown", "one.html"], "go to one file"),
    ],
)
def test_usage_errors_end_before_anything_runs(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A call that is wrong as written ends with 2 and says what is wrong, without a worker being started."""

    def search(*args: object) -> None:
        raise AssertionError("a search was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "search_in_worker", search)
    monkeypatch.setattr(child, "checked_target", search)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_option_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option of `probe` arrives in the request under the name of its keyword."""
    seen: list[object] = []

    def search(target: str, request: object, device: str | None, follower: object) -> None:
        seen.extend((target, request, device))
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "search_in_worker", search)
    options = "--target-batch 9 --budget 80% --device cpu --max-micro-batch 4 --multiple-of 2 --time-budget 1.5"
    options += " --objective memory --storage runs.log --cache plans"
    with pytest.raises(SystemExit):
        cli.main(["probe", "demo:gpt", *options.split(), "--equal-micro-batches", "--inexact", "--levers", "none"])
    assert seen == [
        "demo:gpt",
        {
            "target_batch": 9,
            "budget": "80%",
            "levers": "none",
            "objective": "memory",
            "max_micro_batch": 4,
            "multiple_of": 2,
            "equal_micro_batches": True,
            "time_budget_s": 1.5,
            "storage": "runs.log",
            "cache": "plans",
            "exact": False,
        },
        "cpu",
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerError("nothing fits", "too large", ()), 1),
        (WorkerError("refused", "not possible", ()), 2),
        (WorkerError("user", "Traceback", ()), 2),
        (autoaccum.InvalidRequestError("not possible"), 2),
        (PermissionError("the file is locked"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_code_of_every_end(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way a search can end has its exit code, and its text is on stderr alone."""

    def search(*args: object) -> None:
        raise error

    monkeypatch.setattr(cli, "search_in_worker", search)
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe", "demo:gpt"])
    shown = capsys.readouterr()
    assert ended.value.code == code and shown.out == ""
    assert (str(error) or "interrupted") in shown.err


@pytest.mark.slow
def test_doctor_names_devices_and_memory(command: Command, tmp_path: Path) -> None:
    """`autoaccum doctor` ends with 0 and shows the versions, the CPU's memory and whether there is a GPU."""
    done = command("doctor", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^autoaccum .+, torch .+, Python 3", done.stdout)
    assert re.search(r"memory: [\d.]+ [KMGT]iB in all, [\d.]+ [KMGT]iB free, [\d.]+ [KMGT]iB held", done.stdout)
    assert "CUDA" in done.stdout


# -- a search that succeeds


@pytest.mark.slow
def test_plan_ends_with_zero(runs: dict[str, CompletedProcess[str]]) -> None:
    """A search with a target that finds a plan ends with 0."""
    assert runs["plan"].returncode == 0, runs["plan"].stderr


@pytest.mark.slow
def test_plan_is_shown_in_words(runs: dict[str, CompletedProcess[str]]) -> None:
    """Standard output has the table of trials and the plan."""
    shown = runs["plan"].stdout
    assert "Trials" in shown and " 2 x 3 " in shown
    assert "2 x 2 + 1 (3 micro-batches) = one optimizer step of 5 samples" in shown


@pytest.mark.slow
def test_plan_file_loads_again(runs: dict[str, CompletedProcess[str]], folder: Path) -> None:
    """The JSON file of a search with a target is a Plan, with the trials that were run."""
    plan = Plan.load(folder / "p.json")
    assert runs["plan"].returncode == 0
    assert (plan.target_batch, plan.micro_batch_sizes, plan.limited_by) == (5, (2, 2, 1), "caller")
    assert [trial.purpose for trial in plan.trials] == ["probe", "probe", "confirm"]


@pytest.mark.slow
def test_markdown_file_holds_the_plan(runs: dict[str, CompletedProcess[str]], folder: Path) -> None:
    """The Markdown file is the report of the plan in the JSON file."""
    assert runs["plan"].returncode == 0
    assert (folder / "p.md").read_text() == Plan.load(folder / "p.json").to_markdown()


@pytest.mark.slow
def test_no_temporary_file_is_left(runs: dict[str, CompletedProcess[str]], folder: Path) -> None:
    """After all runs the user's folder has the user's files, the two reports and nothing else."""
    assert len(runs) == len(CASES)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {*FILES, "p.json", "p.md"}


@pytest.mark.slow
def test_probe_json_on_stdout_loads_again(runs: dict[str, CompletedProcess[str]]) -> None:
    """Without a target, `--json -` writes a ProbeResult to stdout and nothing else, whatever the user's code prints."""
    result = ProbeResult.from_json(runs["probe"].stdout)
    assert runs["probe"].returncode == 0
    assert (result.max_micro_batch, result.limited_by) == (2, "caller")


@pytest.mark.slow
@pytest.mark.parametrize("line", ["printed by the function", "written to descriptor 1", "read: ''", "printed by forward"])
def test_what_the_user_prints_is_shown(runs: dict[str, CompletedProcess[str]], line: str) -> None:
    """What the user's code prints goes to stderr, and its standard input is empty."""
    assert line in runs["probe"].stderr.splitlines()
    assert line in runs["plan"].stderr.splitlines()


@pytest.mark.slow
def test_a_search_is_silent_on_stderr(runs: dict[str, CompletedProcess[str]]) -> None:
    """A search whose target prints nothing leaves stderr empty."""
    assert runs["markdown"].stderr == ""


@pytest.mark.slow
def test_markdown_on_stdout(runs: dict[str, CompletedProcess[str]]) -> None:
    """`--markdown -` writes the report to stdout and no table for the terminal."""
    assert runs["markdown"].returncode == 0
    assert runs["markdown"].stdout.startswith("## autoaccum probe\n")
    assert "━" not in runs["markdown"].stdout


@pytest.mark.slow
def test_bar_on_a_terminal(started_command: Start, folder: Path) -> None:
    """Where stderr is a terminal, a bar shows the micro-batch being tried without being asked for."""
    ours, theirs = pty.openpty()
    process = started_command("probe", "target.py:quiet", *VIRTUAL, folder=folder, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(60) == 0
    assert b"trying micro-batch 1" in shown and b"\x1b[" in shown


# -- a search that finds nothing, or cannot start


@pytest.mark.slow
def test_nothing_fits_ends_with_one(runs: dict[str, CompletedProcess[str]]) -> None:
    """When not even one row fits, the exit code is 1 and stderr says what was missing."""
    assert runs["nothing fits"].returncode == 1
    assert "micro_batch=1 does not fit into 200 KiB on virtual:200 KiB" in runs["nothing fits"].stderr


@pytest.mark.slow
def test_nothing_fits_shows_the_trials_beside_the_error(runs: dict[str, CompletedProcess[str]]) -> None:
    """The trials of a search that found nothing are on stderr, so that stdout holds no half of an answer."""
    assert "out of memory in optimizer" in runs["nothing fits"].stderr
    assert runs["nothing fits"].stdout == ""


@pytest.mark.slow
def test_death_at_every_size_ends_with_one(runs: dict[str, CompletedProcess[str]]) -> None:
    """When the worker dies at every size, the exit code is 1 and the signal that killed it is named."""
    assert runs["dies"].returncode == 1
    assert "SIGKILL" in runs["dies"].stderr and "worker process died" in runs["dies"].stderr


@pytest.mark.slow
def test_what_was_printed_before_a_death_is_shown(runs: dict[str, CompletedProcess[str]]) -> None:
    """What the user's code printed just before its process was killed is not lost."""
    assert "printed before the death" in runs["dies"].stderr.splitlines()


@pytest.mark.parametrize(
    ("ran", "case", "said"),
    with_rare_ones(
        ("small budget", "is less than this process already holds on virtual:4.00 MiB"),
        ("device", "device='toaster' is not a device"),
        ("no function", "target.py has no function 'queit'; it has: "),
        ("no torchvision", 'python -m pip install "autoaccum[vision]"'),
        ("no transformers", 'python -m pip install "autoaccum[hf]"'),
    ),
)
def test_what_cannot_be_done_is_one_line(ran: str, case: str, said: str, request: pytest.FixtureRequest) -> None:
    """A request that cannot be satisfied ends with 2 and a single line on stderr, without a traceback."""
    done = request.getfixturevalue(ran)[case]
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("autoaccum: ") and len(done.stderr.splitlines()) == 1
    assert said in done.stderr


@pytest.mark.slow
def test_a_missing_function_is_told_what_there_is(runs: dict[str, CompletedProcess[str]]) -> None:
    """The error about a misspelt function lists the functions of the file, and not what it imported."""
    assert "quiet, sleepy" in runs["no function"].stderr
    assert "torch" not in runs["no function"].stderr


@pytest.mark.parametrize(
    ("ran", "case", "file", "error"),
    with_rare_ones(
        ("syntax", "syntax.py", "SyntaxError: "),
        ("at import", "beside.py", "OSError: the data folder is missing"),
        ("function", "target.py", "TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'"),
        ("forward", "target.py", "LookupError: the table is damaged"),
        ("exit", "target.py", "SystemExit: leaving for good"),
    ),
)
def test_broken_target_shows_the_users_own_traceback(
    ran: str, case: str, file: str, error: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    """An error of the user's code ends with 2 and shows its traceback, with the user's file and none of this library."""
    done = request.getfixturevalue(ran)[case]
    assert done.returncode == 2 and done.stdout == ""
    assert error in done.stderr and file in done.stderr
    assert str(Path(autoaccum.__file__).parent) + os.sep not in done.stderr
    assert "importlib" not in done.stderr


@pytest.mark.slow
def test_the_cause_of_an_error_is_shown(runs: dict[str, CompletedProcess[str]]) -> None:
    """The traceback of an error in forward has its cause, and a note about the micro-batch that was tried."""
    assert "KeyError: 'column'" in runs["forward"].stderr
    assert "raised while autoaccum probed micro_batch=1 (forward phase)" in runs["forward"].stderr


def test_a_file_name_that_is_not_text(command: Command, folder: Path) -> None:
    """A target whose name is not UTF-8 is refused with 2 and a line, not with a traceback."""
    done = command("probe", os.fsdecode(b"caf\xe9.py:build"), folder=folder)
    assert done.returncode == 2
    assert "is not UTF-8 text" in done.stderr and "Traceback" not in done.stderr


# -- interrupted


@pytest.mark.slow
@pytest.mark.parametrize("who", ["group", *(pytest.param(who, marks=pytest.mark.slow) for who in ("parent", "worker"))])
def test_interrupt_ends_with_130(started_command: Start, folder: Path, who: str) -> None:
    """SIGINT to the process group, to the command alone or to its worker ends with 130, a word, and no worker left."""
    process = started_command("probe", "target.py:sleepy", *VIRTUAL, folder=folder)
    assert process.stderr is not None and process.stderr.readline() == b"running\n"
    (worker,) = psutil.Process(process.pid).children()
    if who == "group":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid if who == "parent" else worker.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err.strip()) == (b"", b"interrupted")
    assert psutil.wait_procs([worker], timeout=10)[1] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads the libraries of the worker from Linux' /proc")
def test_interrupt_while_torch_is_imported(started_command: Start, folder: Path) -> None:
    """Ctrl-C before the worker has loaded torch ends with 130 and shows no traceback."""
    process = started_command("probe", "target.py:quiet", folder=folder)
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        maps = "".join(Path(f"/proc/{c.pid}/maps").read_text() for c in psutil.Process(process.pid).children())
        if "libtorch" in maps:
            break
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err.strip()) == (b"", b"interrupted")


@pytest.mark.slow
def test_interrupt_that_the_target_raises(command: Command, tmp_path: Path) -> None:
    """A target that raises KeyboardInterrupt itself ends as Ctrl-C does, without a traceback."""
    (tmp_path / "target.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    done = command("probe", "target.py:build", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "interrupted")


@pytest.mark.slow
def test_plan_record_is_what_the_worker_answers(runs: dict[str, CompletedProcess[str]], folder: Path) -> None:
    """The JSON of the command line has every field of a plan and no other."""
    assert runs["plan"].returncode == 0
    written = json.loads((folder / "p.json").read_text())
    assert set(written) == {"record", *PlanRecord.__struct_fields__}


# -- check

CHECKED = """
import ctypes
import os

import torch
from torch import nn
from torch.nn import functional

import autoaccum


def exact():
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    return autoaccum.Workload(model, (torch.randn(4, 8), torch.randint(3, (4,))), loss_fn=functional.cross_entropy)


def mixing():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return autoaccum.Workload(model, (torch.randn(4, 8), torch.randint(3, (4,))), loss_fn=functional.cross_entropy)


def failing():
    return [][1]


class Failing(nn.Linear):
    def forward(self, x):
        raise LookupError("the table is damaged")


def failing_forward():
    return Failing(8, 3), torch.randn(4, 8)


def printing():
    os.write(1, b"written to descriptor 1\\n")
    ctypes.CDLL(None).printf(b"printed by C\\n")
    return exact()
"""

Check = Callable[..., tuple[object, str, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run `autoaccum check` on a target of a user's file, in the user's folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "checked", raising=False)
    (tmp_path / "checked.py").write_text(CHECKED)

    def run(target: str, *options: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["check", target, *options])
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return run


def test_exact_accumulation_ends_with_zero(check: Check) -> None:
    """Where accumulation is exact, `check` says so and ends with 0, and compares 16 rows unless told otherwise."""
    code, out, err = check("checked.py:exact")
    assert (code, err) == (0, "")
    assert out.startswith("exact: ") and "(11 + 5 rows against 16, float64)" in out


def test_accumulation_that_is_not_exact_ends_with_one(check: Check) -> None:
    """Where it is not, `check` names the layer and ends with 1."""
    code, out, err = check("checked.py:mixing")
    assert (code, err) == (1, "")
    assert out.startswith("not exact\n") and "  - Layer 1: BatchNorm" in out


def test_check_of_as_many_rows_as_asked_for(check: Check) -> None:
    """With `--rows`, so many rows are compared."""
    assert "(7 + 3 rows against 10, float64)" in check("checked.py:exact", "--rows", "10")[1]


def test_check_on_the_device_asked_for(check: Check) -> None:
    """With `--device`, the model is checked there."""
    assert check("checked.py:exact", "--device", "cpu")[0] == 0


@pytest.mark.parametrize(("target", "code"), [("exact", 0), ("mixing", 1)])
def test_check_as_json_on_stdout(check: Check, target: str, code: int) -> None:
    """`--json -` writes a CheckResult to stdout and nothing else; the exit code is the same."""
    ended, out, err = check(f"checked.py:{target}", "--json", "-")
    result = msgspec.json.decode(out, type=CheckResult)
    assert (ended, err) == (code, "")
    assert (result.exact, bool(result.reasons), result.micro_batch_sizes) == (code == 0, code == 1, (11, 5))


@pytest.mark.parametrize(("target", "code"), [("exact", 0), ("mixing", 1)])
def test_check_as_json_in_a_file(check: Check, tmp_path: Path, target: str, code: int) -> None:
    """`--json FILE` writes the CheckResult, also of a check that ends with 1, beside the text on stdout."""
    ended, out, _ = check(f"checked.py:{target}", "--json", "check.json")
    assert ended == code and "relative error" in out
    assert msgspec.json.decode((tmp_path / "check.json").read_bytes(), type=CheckResult).exact == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["checked.py:exakt"], "checked.py has no function 'exakt'; it has: "),
        (["nowhere.py:exact"], "there is no file 'nowhere.py'"),
        (["checked.py:exact", "--device", "toaster"], "device='toaster' is not a device"),
        (
            ["checked.py:mixing", "--rows", "3"],
            "a check splits its batch in two, and the model runs with no split of 3 rows",
        ),
    ],
    ids=["no function", "no file", "no device", "too few rows"],
)
def test_target_that_cannot_be_checked_is_one_line(check: Check, arguments: list[str], said: str) -> None:
    """A target or a device that there is not ends with 2 and a single line on stderr."""
    code, out, err = check(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"autoaccum: {said}") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "error"),
    [("failing", "IndexError: list index out of range"), ("failing_forward", "LookupError: the table is damaged")],
)
def test_error_of_a_checked_target_is_the_users_own(check: Check, target: str, error: str) -> None:
    """An error of the user's code ends with 2 and shows its traceback, with none of this library's frames."""
    code, out, err = check(f"checked.py:{target}")
    assert (code, out) == (2, "")
    assert err.startswith("Traceback") and error in err and "checked.py" in err
    assert str(Path(autoaccum.__file__).parent) + os.sep not in err


@pytest.mark.skipif(os.name != "posix", reason="looks for the C library as POSIX has it")
@pytest.mark.parametrize("subcommand", ["check", "predict"])
def test_what_c_code_prints_is_not_the_answer(
    subcommand: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a target writes to descriptor 1, and prints with buffers of the C library, is on stderr; stdout is JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "checked", raising=False)
    (tmp_path / "checked.py").write_text(CHECKED)
    more = ["--target-batch", "8", "--gpu", "1GiB"] if subcommand == "predict" else []
    with pytest.raises(SystemExit) as ended:
        cli.main([subcommand, "checked.py:printing", *more, "--json", "-"])
    shown = capfd.readouterr()
    assert not ended.value.code
    json.loads(shown.out)
    assert "written to descriptor 1" in shown.err and "printed by C" in shown.err


# -- compare and report

SAVED_ENVIRONMENT = Environment(
    device="cpu",
    device_name="x86_64",
    model="Net",
    optimizer="AdamW",
    batch="4 rows",
    python_version="3.12.3",
    torch_version="2.13.0",
    autoaccum_version="1.0.0",
    platform="Linux",
)


def saved(peak_bytes: int, **environment: Any) -> str:
    """A plan with this measured peak, as JSON text."""
    plan = PlanRecord(
        target_batch=8,
        world_size=1,
        effective_batch=8,
        micro_batch=8,
        accumulation_steps=1,
        micro_batch_sizes=(8,),
        max_micro_batch=8,
        limited_by="target",
        evidence="measured",
        budget_bytes=2**30,
        measured_peak_bytes=peak_bytes,
        environment=msgspec.structs.replace(SAVED_ENVIRONMENT, **environment),
    )
    return to_json(plan)


Saved = Callable[..., tuple[object, str, str]]


@pytest.fixture
def saved_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Saved:
    """Run a command in a folder with saved plans; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "base.json": saved(1000),
        "same.json": saved(1000),
        "worse.json": saved(1100),
        "elsewhere.json": saved(1000, device_name="arm64"),
        "damaged.json": saved(1000)[:-50],
    }.items():
        (tmp_path / name).write_text(text)

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return run


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["base.json", "same.json"], 0),
        (["base.json", "worse.json"], 1),
        (["base.json", "worse.json", "--max-regression", "20%"], 0),
        (["base.json", "worse.json", "--max-regression", "0.2"], 0),
        (["worse.json", "base.json"], 0),
        (["base.json", "elsewhere.json", "--allow-different-environments"], 0),
    ],
)
def test_comparison_ends_with_one_where_something_is_worse(saved_files: Saved, arguments: list[str], code: int) -> None:
    """`compare` shows a Markdown table and ends with 1 where a row regressed by more than allowed, else with 0."""
    ended, out, err = saved_files("compare", *arguments)
    assert (ended, err) == (code, "")
    assert out.startswith("## autoaccum compare\n") and "| measured peak |" in out
    assert out.splitlines()[-1].startswith("**Failed**" if code else "**Passed**")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["base.json", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (["base.json", "."], "Is a directory"),
        (["base.json", "damaged.json"], "damaged.json: the JSON cannot be read"),
        (["base.json", "elsewhere.json"], "device_name is 'x86_64' and 'arm64'"),
        (["base.json", "same.json", "--max-regression", "5"], "could mean 5 % or 5 times as much"),
        (["base.json", "same.json", "--max-regression", "-5%"], "cannot be read"),
    ],
)
def test_what_cannot_be_compared_ends_with_two(saved_files: Saved, arguments: list[str], said: str) -> None:
    """Files that are damaged or not alike, and a share that is none, end with 2 and a single line on stderr."""
    ended, out, err = saved_files("compare", *arguments)
    assert (ended, out) == (2, "")
    assert err.startswith("autoaccum: ") and said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(("new", "code"), [("same.json", 0), ("worse.json", 1)])
def test_comparison_as_json_on_stdout(saved_files: Saved, new: str, code: int) -> None:
    """`compare --json -` writes a Comparison to stdout and nothing else; the exit code is the same."""
    ended, out, _ = saved_files("compare", "base.json", new, "--json", "-")
    found = from_json(out, Comparison)
    assert (ended, found.passed, found.base_name, found.new_name) == (code, code == 0, "base.json", new)


def test_comparison_in_files(saved_files: Saved, tmp_path: Path) -> None:
    """`compare` that fails has written its files, and the Markdown file is what stdout shows."""
    ended, out, _ = saved_files("compare", "base.json", "worse.json", "--json", "c.json", "--markdown", "c.md")
    assert ended == 1 and (tmp_path / "c.md").read_text() == out
    assert not from_json((tmp_path / "c.json").read_bytes(), Comparison).passed


def test_saved_plan_is_shown_again(saved_files: Saved) -> None:
    """`report` without options shows the plan of a file on the terminal and ends with 0."""
    ended, out, err = saved_files("report", "base.json")
    assert (ended, err) == (0, "") and "one optimizer step of 8 samples" in out


def test_saved_plan_as_a_page(saved_files: Saved, tmp_path: Path) -> None:
    """`report --html FILE --markdown FILE` writes both reports of a saved plan."""
    assert saved_files("report", "base.json", "--html", "p.html", "--markdown", "p.md")[0] == 0
    assert "one optimizer step of 8 samples" in (tmp_path / "p.html").read_text()
    assert (tmp_path / "p.md").read_text() == Plan.load(tmp_path / "base.json").to_markdown()


def test_saved_report_on_stdout(saved_files: Saved) -> None:
    """`report --markdown -` writes the report to stdout and nothing else."""
    ended, out, _ = saved_files("report", "base.json", "--markdown", "-")
    assert ended == 0 and out.startswith("## autoaccum plan")


def test_saved_probe_as_a_page(saved_files: Saved, tmp_path: Path) -> None:
    """A saved ProbeResult is rendered as well."""
    result = ProbeResult(
        max_micro_batch=7, limited_by="memory", evidence="exact", measured_peak_bytes=1000, budget_bytes=2000
    )
    (tmp_path / "probe.json").write_text(result.to_json())
    assert saved_files("report", "probe.json", "--html", "probe.html")[0] == 0
    assert "7" in (tmp_path / "probe.html").read_text()


@pytest.mark.parametrize("name", ["damaged.json", "nowhere.json", "."])
def test_file_that_is_no_run_cannot_be_reported(saved_files: Saved, tmp_path: Path, name: str) -> None:
    """`report` of what is no saved run ends with 2 and a single line, and writes nothing."""
    ended, out, err = saved_files("report", name, "--html", "p.html")
    assert (ended, out, len(err.splitlines())) == (2, "", 1)
    assert not (tmp_path / "p.html").exists()
