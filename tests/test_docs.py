"""The README is true: its commands and options exist, its code runs, its arguments are the real ones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import click
import pytest

import autoaccum
from autoaccum.cli import cli

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


@pytest.mark.parametrize(
    "changes", [pytest.param({}, id="as it stands", marks=pytest.mark.slow), pytest.param(SMALL, id="in small")]
)
def test_python_in_the_readme_runs(changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks run one after the other."""
    monkeypatch.chdir(tmp_path)
    blocks = "\0".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
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


def test_the_two_commands_are_in_the_readme() -> None:
    """The two commands that must work on a fresh machine stand there as they are tested."""
    assert "python -m pip install . && autoaccum probe demo:gpt --target-batch 64 --budget 2GiB" in README
    assert 'python -m pip install ".[test]" && python -m pytest' in README
