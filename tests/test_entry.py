"""Signals have their meaning from the first moment of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Command = Callable[..., CompletedProcess[str]]


@pytest.mark.skipif(os.name != "posix", reason="sends itself POSIX signals")
@pytest.mark.parametrize(("name", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_signal_while_the_command_line_is_imported(
    command: Command, tmp_path: Path, name: str, code: int, word: str
) -> None:
    """A signal while a library is imported ends with its code and a word, and shows no traceback."""
    (tmp_path / "click.py").write_text(f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(20)\n")
    done = command("doctor", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{word}\n")


@pytest.mark.skipif(os.name != "posix", reason="sends itself POSIX signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_after_the_command_is_done(command: Command, tmp_path: Path, name: str) -> None:
    """A signal that comes while Python ends does not take the exit code of what was done, and shows nothing."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.{name}))\n"
    )
    done = command("--version", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("autoaccum")
