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


def test_python_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks run one after the other as they stand."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
    plan = names["plan"]
    assert isinstance(plan, autoaccum.Plan)
    assert plan.accumulation_steps > 1
    assert (tmp_path / "plan.json").is_file()


def test_the_two_commands_are_in_the_readme() -> None:
    """The two commands that must work on a fresh machine stand there as they are tested."""
    assert "python -m pip install . && autoaccum probe demo:gpt --target-batch 64 --budget 2GiB" in README
    assert 'python -m pip install ".[test]" && python -m pytest' in README
