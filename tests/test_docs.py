"""The README is true: its commands and options exist, its code runs, its arguments are the real ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import autoaccum
from autoaccum.cli import cli
from autoaccum.integrations import frameworks

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_command_is_in_the_readme(command: str) -> None:
    """Every command is named, and has help."""
    assert f"autoaccum {command}" in README
    assert cli.commands[command].help


@pytest.mark.parametrize(
    "option",
    sorted(
        {
            opt
            for name in ("probe", "check", "predict")
            for p in cli.commands[name].params
            if isinstance(p, click.Option)
            for opt in p.opts
        }
    ),
)
def test_option_is_in_the_readme(option: str) -> None:
    """Every option of probe, check and predict is named."""
    assert option in README


def test_options_in_the_readme_exist() -> None:
    """No option is named that does not exist."""
    known = {opt for command in cli.commands.values() for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - {"--index-url"}
    assert named <= known


@pytest.mark.parametrize(
    "function",
    [autoaccum.autotune, autoaccum.probe, autoaccum.predict, autoaccum.Accumulator],
    ids=lambda function: function.__name__,
)
def test_argument_is_in_the_readme(function: object) -> None:
    """Every argument of the public functions is named."""
    assert callable(function)
    missing = [name for name in inspect.signature(function).parameters if name not in README]
    assert missing == []


FRAMEWORKS = re.findall(r"## Frameworks\n.*?(?=\n## )", README, re.DOTALL)[0]


def python_in(text: str) -> list[str]:
    """The Python blocks of a part of the README."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


SMALL = {  # the same with a model, a batch and a budget that take less time
    "Linear(512, 2048)": "Linear(64, 256)",
    "Linear(2048, 10)": "Linear(256, 10)",
    "randn(8, 512)": "randn(8, 64)",
    "randn(16, 512)": "randn(16, 64)",
    "randn(4096, 512)": "randn(512, 64)",
    "(4096,)": "(512,)",
    "target_batch=4096": "target_batch=512",
    "virtual:64MiB": "virtual:1MiB",
    "num_layers=6": "num_layers=2",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [pytest.param({}, id="as it stands", marks=pytest.mark.slow), pytest.param(SMALL, id="in small")]
)
def test_python_in_the_readme_runs(changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks run one after the other."""
    monkeypatch.chdir(tmp_path)
    blocks = "\0".join(python_in(README.replace(FRAMEWORKS, "")))
    for old, new in changes.items():
        assert old in blocks
        blocks = blocks.replace(old, new)
    names: dict[str, object] = {}
    for block in blocks.split("\0"):
        exec(block, names)
    plan = names["plan"]
    assert isinstance(plan, autoaccum.Plan)
    assert plan.accumulation_steps > 1
    assert (tmp_path / "plan.json").is_file()


BEFORE = {  # what a user of the framework has already
    "lightning.pytorch": """
class Net(__import__("lightning").pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)
    def training_step(self, batch, batch_idx):
        return loss_fn(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
""",
    "torch.distributed.fsdp": """
import tempfile
torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
""",
    "deepspeed": """
import os
os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu")
import deepspeed.ops.op_builder.cpu as built
built.ShareMemCommBuilder.is_compatible = lambda *args, **kwargs: False  # it would be compiled first
""",
}
AFTER = {  # what shows that it has trained
    "transformers": "trainer.state.global_step == 3 and 'in this trainer' in str(plan.warnings)",
    "accelerate": "plan.effective_batch == 256 and accelerator.sync_gradients",
    "lightning.pytorch": "tuning.plan.effective_batch == 256 and trainer.global_step == 3",
    "lightning.fabric": "plan.effective_batch == 256 and acc.state_dict()['windows'] == 3",
    "deepspeed": "engine.train_batch_size() == 256 and engine.global_steps >= 2",
    "torch.distributed.fsdp": "acc.step((torch.randn(rows, 16), torch.randint(4, (rows,)))).weight == 256",
}
# Python's own end may meet a thread of gloo that still holds a tensor, which aborts the process.
END = """
if torch.distributed.is_initialized():
    __import__("os")._exit(0)
"""


def test_every_framework_is_in_the_readme() -> None:
    """Every framework that autoaccum knows has lines of its own, and its extra is named."""
    for name, known in frameworks.FRAMEWORKS.items():
        assert any(name.split(".")[0] in block for block in python_in(FRAMEWORKS))
        assert known.extra in FRAMEWORKS and (known.minimum in FRAMEWORKS or name in ("accelerate", "deepspeed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["accelerate", *(pytest.param(name, marks=pytest.mark.slow) for name in AFTER if name != "accelerate")]
)
def test_lines_for_a_framework_train(name: str, run_child: Callable[..., Any], tmp_path: Path) -> None:
    """The lines that stand under Frameworks run as they stand, after the ones that they go on from, and have trained."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    common, *blocks = python_in(FRAMEWORKS)
    (block,) = (block for block in blocks if f"from {name} import" in block or f"import {name}\n" in block)
    source = [f"import os; os.chdir({str(tmp_path)!r})", "import torch, autoaccum", common, BEFORE.get(name, ""), block]
    assert run_child("\n".join([*source, f"answer(bool({AFTER[name]}))", END])) is True


def test_the_two_commands_are_in_the_readme() -> None:
    """The two commands that must work on a fresh machine stand there as they are tested."""
    assert "python -m pip install . && autoaccum probe demo:gpt --target-batch 64 --budget 2GiB" in README
    assert 'python -m pip install ".[test]" && python -m pytest' in README
