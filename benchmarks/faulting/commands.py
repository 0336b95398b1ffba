"""One run of the command line, struck by something on its way, and what is wrong with how it ended.

Each command runs in a folder and a TMPDIR of its own, as the leader of a session: whatever is left there afterwards is seen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

import autoaccum

_LIBRARY = str(Path(autoaccum.__file__).parents[1])
_PATIENCE_S = 120.0
_LINGER_S = 8.0  # so long may what a command has started need to notice that it is gone

TARGET = """
import os, signal, time, torch
from torch import nn
from autoaccum import Workload

PLACE, STEP, KIND = os.environ.get("FAULT", "::").split(":")
calls = {}

def passing(place):
    calls[place] = calls.get(place, 0) + 1
    if place == PLACE and calls[place] == int(STEP):
        if KIND == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        if KIND == "user's exception":
            raise KeyError("mine")
        if KIND == "Ctrl-C":
            raise KeyboardInterrupt
        os.kill(os.getpid(), getattr(signal, KIND))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        passing("forward")
        time.sleep(0.001)
        out = self.linear(x)
        out.register_hook(lambda gradient: passing("backward"))
        return out

class SGD(torch.optim.SGD):
    def step(self, closure=None):
        passing("optimizer step")
        super().step(closure)

def build():
    passing("target")
    model = Net()
    return Workload(model, torch.ones(4, 8), training_step=lambda model, batch: model(batch).pow(2).mean(),
                    optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9))
"""

PROBE = (
    "probe",
    "target.py:build",
    "--device",
    "virtual:2MiB",
    "--target-batch",
    "40",
    "--max-micro-batch",
    "8",
    "--levers",
    "none",
    "--json",
    "p.json",
)
CHECK = ("check", "target.py:build", "--json", "p.json")
PREDICT = ("predict", "target.py:build", "--target-batch", "16", "--gpu", "1GiB", "--json", "p.json")


class Ended(NamedTuple):
    """How a command ended, and what it left.

    Attributes:
        files: In its folder, but for the target.
    """

    code: int
    out: str
    err: str
    wall_s: float
    temporary: list[str]
    files: dict[str, bytes]
    orphans: list[str]


Strike = Callable[[subprocess.Popen[str]], None]


def run(
    folder: Path, arguments: Sequence[str], strike: Strike | None = None, *, start: Sequence[str] = (), **environment: str
) -> Ended:
    """Run a command in a folder, strike, and look at what is left.

    Args:
        start: What stands before the interpreter.
    """
    (folder / "target.py").write_text(TARGET)
    temporary = folder.parent / f"{folder.name}-tmp"
    temporary.mkdir(exist_ok=True)
    begun = time.monotonic()
    more = {"PYTHONPATH": _LIBRARY, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [*start, sys.executable, "-m", "autoaccum", *arguments],
        cwd=folder,
        env={**os.environ, **more, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if strike is not None:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            strike(process)
    try:
        out, err = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += "\nIT HANGS"
    wall_s = time.monotonic() - begun
    return Ended(
        process.returncode,
        out,
        err,
        wall_s,
        [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")],  # torch's own
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "target.py"},
        _orphans(process.pid),
    )


def _orphans(session: int) -> list[str]:
    """What still runs of a session after a while; it is ended here."""
    give_up = time.monotonic() + _LINGER_S
    while (left := _of_session(session)) and time.monotonic() < give_up:
        time.sleep(0.05)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline())[-60:])
            process.kill()
    return names


def _of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess, psutil.AccessDenied):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def misbehaved(ended: Ended, codes: Collection[int], word: str = "", *, kept: bytes | None = None) -> list[str]:
    """What is wrong with how it ended.

    Args:
        codes: The exit codes that are right.
        word: Has to be in what it says on standard error.
        kept: What the report file held before; it has to hold that or a whole report.
    """
    problems = []
    if ended.code not in codes:
        problems.append(f"exit code {ended.code} instead of {sorted(codes)}: {ended.err[-300:]!r}")
    if word and word not in ended.err:
        problems.append(f"says {ended.err[-300:]!r}")
    if "Traceback" in ended.err and word != "Traceback":
        problems.append(f"shows a traceback: {ended.err[-300:]!r}")
    if "IT HANGS" in ended.err:
        problems.append("it hangs")
    problems += [f"temporary file {name}" for name in ended.temporary]
    problems += [f"file {name}" for name in ended.files if name != "p.json"]
    report = ended.files.get("p.json")
    if report is not None and report != kept and not _is_whole(report):
        problems.append(f"a broken report of {len(report)} bytes")
    return problems + [f"still runs: {name}" for name in ended.orphans]


def _is_whole(report: bytes) -> bool:
    try:
        return isinstance(json.loads(report), dict)
    except ValueError:
        return False
