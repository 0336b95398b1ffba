"""Each measurement in a process of its own: a copy of one that has loaded every tool, so that all start from the same."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_fork(job: Callable[[], dict[str, Any]], limit_s: float, log: Path) -> dict[str, Any]:
    """What the job returns, or `{"error": ...}` where its process raised, died, or took longer than the limit.

    Args:
        job: Runs in a copy of this process, which must not have other threads nor have touched a GPU.
        log: What the copy prints is appended here.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _run(job, writing, log)
    os.close(writing)
    try:
        return _awaited(pid, reading, limit_s)
    finally:
        os.close(reading)


def _run(job: Callable[[], dict[str, Any]], writing: int, log: Path) -> None:
    """Never returns."""
    os.setsid()  # what it starts itself is ended with it
    with log.open("a") as shown:
        os.dup2(shown.fileno(), 1)
        os.dup2(shown.fileno(), 2)
    try:
        try:
            said = job()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is this tool's result
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        os.write(writing, json.dumps(said).encode())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _awaited(pid: int, reading: int, limit_s: float) -> dict[str, Any]:
    try:
        said = _heard(reading, limit_s)
    except BaseException as error:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if isinstance(error, TimeoutError):
            return {"error": f"not done after {limit_s:.0f} s", "timed_out": True}
        raise
    _, status = os.waitpid(pid, 0)
    if said:
        return dict(json.loads(said))
    code = os.waitstatus_to_exitcode(status)
    return {"error": f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"}


def _heard(reading: int, limit_s: float) -> bytes:
    """All that the copy says until it ends."""
    said, end = b"", time.monotonic() + limit_s
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(reading, 65536)
        if not part:
            return said
        said += part
