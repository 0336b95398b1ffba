"""How all tests run: files shared out between processes, one thread in each, and the same examples in every run.

No test needs another file to have run before it, or not to have run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, here and in every child process
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every child process would compile the library anew

import pytest
import torch
from hypothesis import settings

import autoaccum
from autoaccum.devices import AbstractDevice
from autoaccum.prediction.forecast import Traced, traced
from autoaccum.workload import Workload

settings.register_profile("autoaccum", deadline=None, derandomize=True, max_examples=100)  # CI machines stall
settings.load_profile("autoaccum")
torch.set_num_threads(1)  # doctests, which have no part in the fixtures below

RunChild = Callable[..., Any]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Two processes, or as many as `PYTEST_XDIST_AUTO_NUM_WORKERS` says; none of them for a single file or test.

    Every process loads torch and collects all tests, and a file is never shared out.
    """
    files = {argument.partition("::")[0] for argument in config.args}
    if len(files) == 1 and Path(*files).is_file():
        return 0
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else min(2, os.cpu_count() or 1)


@pytest.fixture
def one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All searches of a test are of one training step, which is traced for the first and known to the others."""
    known: dict[object, Traced] = {}

    def traced_once(workload: Workload, device: AbstractDevice, **more: Any) -> Traced:
        key = (type(device), more["levers"], more["multiple_of"])
        if key not in known:
            known[key] = traced(workload, device, **more)
        return known[key]

    monkeypatch.setattr("autoaccum.session.forecasts.traced", traced_once)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models are slower on several threads, and much slower where several processes have them."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not depend on the tests that ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def older_objects_set_aside() -> None:
    """Every search collects garbage, which is fast when modules and earlier tests' objects need not be looked at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_child() -> RunChild:
    """Run Python source in a process of its own, where limits, allocator settings and peaks are its own.

    The source gives its answer with `answer(value)`; what comes back is that value after JSON.
    """

    def run(source: str, **environment: str) -> Any:
        head = "import json, sys\ndef answer(value):\n    print('ANSWER ' + json.dumps(value), flush=True)\n"
        library = str(Path(autoaccum.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", head + textwrap.dedent(source)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, "PYTHONPATH": library, **environment},
        )
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert done.returncode == 0, f"the child ended with {done.returncode}:\n{done.stderr[-4000:]}"
        assert answers, f"the child answered nothing:\n{done.stdout[-4000:]}"
        return json.loads(answers[-1].removeprefix("ANSWER "))

    return run


_LIBRARY = str(Path(autoaccum.__file__).parents[1])


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m autoaccum` with some arguments to its end, in a folder, with its output as text."""

    def run(*args: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autoaccum", *args],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            env=_command_environment(environment),
        )

    return run


@pytest.fixture
def started_command() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `python -m autoaccum` as the leader of a process group; what still runs after the test is killed."""
    started = []

    def start(*args: str, folder: Path, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "autoaccum", *args],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
            env=_command_environment({}),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _command_environment(more: dict[str, str]) -> dict[str, str]:
    """One thread, because tiny models on several are slower; a wide page, so that no sentence breaks; buffers, as usual."""
    path = os.pathsep.join(filter(None, (more.pop("PYTHONPATH", ""), _LIBRARY)))
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONUNBUFFERED": "", "PYTHONPATH": path, **more}
