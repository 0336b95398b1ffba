"""Faults of the command line: signals at any time, a killed worker, a full disk, a read-only cache, a target that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil

from faulting.commands import CHECK, PREDICT, PROBE, Strike, misbehaved, run
from faulting.record import Case

COMMAND_KINDS = ("Ctrl-C", "SIGTERM", "kill -9", "user's exception", "out of memory", "disk full", "read-only cache")

# -- signals


def _sent(number: int, after_s: float, to: str) -> Strike:
    def strike(process: subprocess.Popen[str]) -> None:
        time.sleep(after_s)
        if to == "worker":
            workers = [child for child in psutil.Process(process.pid).children() if "autoaccum.worker" in child.cmdline()]
            if not workers:
                raise ProcessLookupError
            workers[0].send_signal(number)
        elif to == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)

    return strike


class _Signal(NamedTuple):
    """A signal, who gets it, and how the command has to end."""

    kind: str
    number: int
    to: str
    codes: tuple[int, ...]
    word: str = ""


_ENDING_S = 2.0  # Python itself takes so long to end on a busy machine; a signal is then too late to stop anything

_SIGNALS = (
    _Signal("Ctrl-C", signal.SIGINT, "group", (130,), "interrupted"),
    _Signal("SIGTERM", signal.SIGTERM, "command", (143,), "terminated"),
    _Signal("SIGTERM", signal.SIGTERM, "group", (143,), "terminated"),
    _Signal("kill -9", signal.SIGKILL, "command", (-9,)),
    _Signal("kill -9", signal.SIGKILL, "worker", (0, 2)),  # a trial that did not fit; outside of trials, a refusal
    _Signal("SIGTERM", signal.SIGTERM, "worker", (0, 2)),  # a refusal, unless it has answered already
)


def signal_cases(kinds: Collection[str], times: int) -> Iterator[Case]:
    """Signals at evenly spaced times over a whole run of `probe`, and over the start of `check` and `predict`."""
    if not {sent.kind for sent in _SIGNALS} & set(kinds):
        return
    with TemporaryDirectory() as place:
        folder = Path(place) / "work"
        folder.mkdir()
        clean = run(folder, PROBE)
        whole = clean.files["p.json"]
        for sent in _SIGNALS:
            for index in range(times) if sent.kind in kinds else ():
                after_s = clean.wall_s * (index + 0.5) / times
                yield from _signalled(folder, PROBE, sent, after_s, whole)
        for arguments in (CHECK, PREDICT):
            for sent in _SIGNALS[:2]:
                for after_s in (0.2, 2.5) if sent.kind in kinds else ():
                    yield from _signalled(folder, arguments, sent, after_s, whole)
        ended = run(folder, PROBE)
        yield Case("autoaccum probe", "none", "after all of these", 0, tuple(misbehaved(ended, (0,))))


def _signalled(folder: Path, arguments: Sequence[str], sent: _Signal, after_s: float, whole: bytes) -> Iterator[Case]:
    (folder / "p.json").write_bytes(whole)
    arrived: list[bool] = []

    def strike(process: subprocess.Popen[str]) -> None:
        _sent(sent.number, after_s, sent.to)(process)
        arrived.append(process.poll() is None)

    ended = run(folder, arguments, strike)
    if not arrived or (ended.code == 0 and sent.to != "worker" and ended.wall_s < after_s + _ENDING_S):
        return  # all was done before
    problems = misbehaved(ended, sent.codes, sent.word, kept=whole)
    yield Case(f"autoaccum {arguments[0]}", sent.kind, f"sent to the {sent.to}, after s", round(after_s, 2), tuple(problems))


# -- a target that fails


_ENDS: dict[str, tuple[tuple[int, ...], str]] = {
    "out of memory": ((0, 1), ""),
    "user's exception": ((2,), "Traceback"),
    "Ctrl-C": ((130,), "interrupted"),
    "SIGKILL": ((0, 1, 2), ""),  # every worker dies at that call: a size or none may be left
    "SIGTERM": ((2,), "by signal 15"),
}


def target_cases(kinds: Collection[str], times: int) -> Iterator[Case]:
    """Faults inside of the target: at its making, in a forward or backward pass, in an optimizer's step."""
    names = {"SIGKILL": "kill -9", "SIGTERM": "SIGTERM"}
    with TemporaryDirectory() as place:
        folder = Path(place) / "work"
        folder.mkdir()
        for fault, (codes, word) in _ENDS.items():
            for part in ("target", "forward", "backward", "optimizer step"):
                steps = range(1, 1 + (1 if part == "target" else times)) if names.get(fault, fault) in kinds else ()
                for step in steps:
                    ended = run(folder, PROBE, FAULT=f"{part}:{step * step}:{fault}")
                    expected = ((2,), "Traceback") if part == "target" and fault == "out of memory" else (codes, word)
                    problems = misbehaved(ended, *expected)
                    yield Case(
                        "autoaccum probe", names.get(fault, fault), f"{part} of the target", step * step, tuple(problems)
                    )


# -- disks


def disk_cases(kinds: Collection[str]) -> Iterator[Case]:
    """Files that cannot be written to their end, wherever the command line writes."""
    if "disk full" in kinds:
        with TemporaryDirectory() as place:
            yield from _full(Path(place))
    if "read-only cache" in kinds:
        with TemporaryDirectory() as place:
            yield from _read_only(Path(place))


def _full(place: Path) -> Iterator[Case]:
    folder = place / "work"
    folder.mkdir()
    cpu = ("probe", "target.py:build", "--device", "cpu", "--target-batch", "8", "--no-progress")
    virtual = PROBE[:-2]
    limited = ("prlimit", "--fsize={}:{}")
    runs: list[tuple[str, Sequence[str], int, tuple[int, ...], str]] = [
        ("--json", (*virtual, "--json", "p.json"), 4096, (2,), "could not be written"),
        ("--html", (*virtual, "--html", "p.html"), 4096, (2,), "could not be written"),
        ("--markdown", (*virtual, "--markdown", "p.md"), 100, (2,), "could not be written"),
        ("snapshot of the state", cpu, 100, (2,), "TMPDIR"),
        ("cache", (*virtual, "--cache", "kept", "--json", "-"), 2048, (0,), ""),
        ("storage, SQLite", (*virtual, "--storage", "sqlite:///runs.db"), 8192, (2,), "storage"),
        ("storage, journal", (*virtual, "--storage", "runs.log"), 300, (2,), "storage"),
        ("storage, journal", (*virtual, "--storage", "runs.log"), 6000, (2,), "storage"),
    ]
    for name, arguments, most_bytes, codes, word in runs:
        start = [part.format(most_bytes, most_bytes) for part in limited]
        ended = run(folder, arguments, start=start)
        databases = [file for file in ended.files if file.startswith("runs.")]
        for file in databases:
            (folder / file).unlink()
        shown = ended._replace(files={n: text for n, text in ended.files.items() if n not in databases})
        yield Case("autoaccum probe", "disk full", name, most_bytes, tuple(misbehaved(shown, codes, word)))
    for name, arguments in (
        ("--json /dev/full", (*virtual, "--json", "/dev/full")),
        ("--json -", (*virtual, "--json", "-")),
    ):
        start = () if name != "--json -" else ("sh", "-c", 'exec "$@" > /dev/full', "sh")
        ended = run(folder, arguments, start=start)
        yield Case("autoaccum probe", "disk full", name, 0, tuple(misbehaved(ended, (2,), "No space left")))


def _read_only(place: Path) -> Iterator[Case]:
    folder = place / "work"
    folder.mkdir()
    (folder / "file").write_text("no folder")
    for cache in ("/proc/here", "file/below", "/dev/null/below"):
        (folder / "file").write_text("no folder")
        ended = run(folder, (*PROBE[:-2], "--cache", cache, "--json", "-"))
        shown = ended._replace(files={})
        problems = misbehaved(shown, (0,))
        if "could not be remembered" not in ended.out:
            problems.append("the plan does not say that it could not be remembered")
        yield Case("autoaccum probe", "read-only cache", cache, 0, tuple(problems))


def command_cases(kinds: Collection[str], times: int) -> Iterator[Case]:
    """Everything that the command line is put through.

    Args:
        kinds: See `COMMAND_KINDS`.
        times: Each signal is sent so often, at evenly spaced times of a run.
    """
    yield from signal_cases(kinds, times)
    yield from target_cases(kinds, max(1, times // 4))
    yield from disk_cases(kinds)
