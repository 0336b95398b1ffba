"""The command `predict`: a plan on the screen and in files, and what it says when there is none."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from autoaccum import Plan, cli
from autoaccum.errors import AutoaccumError
from autoaccum.prediction.gpus import GPUS
from autoaccum.records import PlanRecord
from autoaccum.workload import Workload

from .predictions import LARGE, SMALL, foreseen, traced_once


def run(*arguments: str) -> int:
    """Run the command line in this process, to its exit code."""
    with traced_once(GPT) if arguments[0] == GPT else nullcontext(), pytest.raises(SystemExit) as ended:
        cli.main(["predict", *arguments])
    return int(ended.value.code or 0)


GPT = "demo:gpt?layers=1&width=64&vocabulary=128&seq_len=16"


@pytest.mark.slow
def test_command_shows_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 0 and shows the plan and its prediction."""
    assert run(GPT, "--target-batch", "64", "--gpu", SMALL) == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown and SMALL in shown and "64 samples" in shown


def test_command_writes_json_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json - standard output is the plan, and nothing else."""
    assert run(GPT, "--target-batch", "64", "--gpu", SMALL, "--json", "-") == 0
    found = Plan.from_json(capsys.readouterr().out)
    assert (found.evidence, found.target_batch, foreseen(found).gpu) == ("predicted", 64, SMALL)


def test_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan, report and picture go to the files that are named."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = [tmp_path / name for name in ("plan.json", "plan.md", "step.svg")]
    options = [part for pair in zip(("--json", "--markdown", "--picture"), map(str, files), strict=True) for part in pair]
    assert run(GPT, "--target-batch", "64", "--gpu", SMALL, *options) == 0
    assert files[1].read_text() == Plan.load(files[0]).to_markdown()
    assert files[2].read_bytes().startswith(b"<?xml")


def test_command_takes_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """--gpu may be given several times: the table has a row for each."""
    assert run(GPT, "--target-batch", "64", "--gpu", LARGE, "--gpu", SMALL, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["prediction"]["outlooks"]
    assert [row["gpu"] for row in rows] == [SMALL, LARGE]


@pytest.mark.slow
def test_command_takes_all_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """--gpu all shows every listed GPU."""
    assert run(GPT, "--target-batch", "64", "--gpu", "all") == 0
    shown = capsys.readouterr().out
    assert [gpu.name for gpu in GPUS if gpu.name not in shown] == []


def test_command_passes_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option arrives under the name of its keyword."""
    seen: list[Any] = []

    def answer(*given: Any) -> str:
        seen.extend(given)
        return "stopped"

    monkeypatch.setattr("autoaccum.worker.child.predicted_target", answer)
    options = "--target-batch 9 --budget 80% --max-micro-batch 4 --multiple-of 2 --world-size 2 --levers none"
    run("demo:gpt", "--gpu", "24GiB", *options.split(), "--equal-micro-batches", "--picture", "p.svg")
    numbers = {
        "target_batch": 9,
        "budget": "80%",
        "levers": "none",
        "max_micro_batch": 4,
        "multiple_of": 2,
        "equal_micro_batches": True,
    }
    assert seen == ["demo:gpt", ("24GiB",), numbers, 2, "p.svg"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([GPT, "--target-batch", "64", "--gpu", "1GiB", "--budget", "300MiB"], 1, "is predicted to need"),
        ([GPT, "--target-batch", "64", "--gpu", "RTX 3600"], 2, "nearest are"),
        ([GPT, "--target-batch", "64", "--gpu", "RTX 3080"], 2, "several memory sizes"),
        ([GPT, "--target-batch", "64", "--gpu", SMALL, "--budget", "20GiB"], 2, "larger than the"),
        ([GPT, "--target-batch", "64", "--gpu", SMALL, "--picture", "step.gif"], 2, ".svg or .png"),
        ([GPT, "--target-batch", "64", "--gpu", SMALL, "--json", "nowhere/plan.json"], 2, "does not exist"),
        ([GPT, "--target-batch", "1", "--gpu", SMALL, "--world-size", "2"], 2, "world_size=2"),
        (["demo:gtp", "--target-batch", "64", "--gpu", SMALL], 2, "gtp"),
        ([GPT, "--gpu", SMALL], 2, "--target-batch"),
        ([GPT, "--target-batch", "64"], 2, "--gpu"),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_command_that_cannot_answer(arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit ends with 1, what is wrong with 2; the reason is on stderr alone."""
    assert run(*arguments) == code
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


TARGETS = """
import torch
from torch import nn


def failing():
    return Failing(), torch.randn(4, 8)


class Failing(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        print("printed by forward")
        raise LookupError("the table is damaged")


def meta():
    with torch.device("meta"):
        return nn.Linear(8, 8), torch.randn(4, 8, device="cpu")
"""


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file with targets."""
    path = tmp_path / "targets.py"
    path.write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    return path


def test_command_shows_the_users_error(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error in the user's code ends with 2, shown as the user's traceback; what the code prints is not the answer."""
    assert run(f"{targets}:failing", "--target-batch", "64", "--gpu", SMALL, "--json", "-") == 2
    shown = capsys.readouterr()
    assert "the table is damaged" in shown.err and "printed by forward" in shown.err and shown.out == ""


def test_command_takes_a_meta_model_and_check_does_not(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target on the meta device can be predicted; to check it, it needs values, which is said."""
    assert run(f"{targets}:meta", "--target-batch", "64", "--gpu", SMALL) == 0
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", f"{targets}:meta"])
    assert ended.value.code == 2
    assert "meta device and holds no values" in capsys.readouterr().err


def test_target_is_built_without_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A built-in target takes no memory for its weights: it is on the meta device when it is predicted."""
    seen: list[Workload] = []

    def look(workload: Workload, *args: Any, **more: Any) -> PlanRecord:
        seen.append(workload)
        raise AutoaccumError("seen")

    monkeypatch.setattr("autoaccum.worker.child.predict_workload", look)
    assert run("demo:gpt", "--target-batch", "64", "--gpu", SMALL) == 2
    assert {parameter.device.type for parameter in seen[0].module.parameters()} == {"meta"}
