"""A process of its own: what it returns comes back, and what it does stays there."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

import psutil
import pytest
import torch

from autoaccum.prediction.apart import ProcessDiedError, apart, can_run_apart

pytestmark = pytest.mark.skipif(not can_run_apart(), reason="only Linux copies processes")


def test_answer_comes_back() -> None:
    """What the function returns is what is given."""
    assert apart(lambda: {"sizes": (1, 2, 3)}) == {"sizes": (1, 2, 3)}


def test_what_changes_there_stays_there() -> None:
    """A list that the function adds to is as it was."""
    seen: list[int] = []
    assert apart(lambda: seen.append(1) or len(seen)) == 1
    assert seen == []


def test_modules_loaded_there_are_not_loaded_here() -> None:
    """What is imported in the other process is not loaded in this one."""
    name = next(name for name in ("pyclbr", "tabnanny", "sched") if name not in sys.modules)
    assert apart(lambda: importlib.import_module(name).__name__) == name
    assert name not in sys.modules


def test_parallel_kernels_run_there() -> None:
    """A kernel that would use all threads does not wait for threads that were not copied."""
    values = torch.ones(2048, 2048)
    assert float((values @ values).sum()) == 2048.0**3  # the threads are there
    assert apart(lambda: float((values * 2).index_select(0, torch.arange(2048)).sum())) == 2 * 2048.0**2


@pytest.mark.parametrize("end", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)], ids=["exit", "kill"])
def test_death_is_told(end: object) -> None:
    """A process that ends without an answer is an error, and does not take this one with it."""
    assert callable(end)
    with pytest.raises(ProcessDiedError, match="ended without an answer"):
        apart(end)


def test_no_process_is_left() -> None:
    """The other process is gone when its answer is there."""
    pid = apart(os.getpid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_killed_parent_leaves_no_process() -> None:
    """Where the process that waits is killed, the other one ends as well, whatever it is at."""
    receiver, sender = os.pipe()

    def work() -> None:
        os.write(sender, os.getpid().to_bytes(8, "little"))
        time.sleep(60)

    waiting = os.fork()
    if waiting == 0:
        try:
            apart(work)
        finally:
            os._exit(1)
    pid = int.from_bytes(os.read(receiver, 8), "little")
    os.kill(waiting, signal.SIGKILL)
    os.waitpid(waiting, 0)
    os.close(receiver)
    os.close(sender)
    _, alive = psutil.wait_procs([psutil.Process(pid)], timeout=20) if psutil.pid_exists(pid) else ([], [])
    assert [left for left in alive if left.status() != psutil.STATUS_ZOMBIE] == []
