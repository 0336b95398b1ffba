"""The side that starts worker processes and outlives them. Does not import torch.

A worker that dies during a trial is a trial that did not fit: it goes into the log, and a new worker goes on from there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from autoaccum.errors import AutoaccumError
from autoaccum.records import OutOfMemory, PlanRecord, ProbeResult, Trial
from autoaccum.report.following import Follower
from autoaccum.units import shown
from autoaccum.worker.messages import Bounded, Failed, Finished, Job, Message, Planned, Probed, Started

# Cached oneDNN primitives hold memory for every shape that was tried: with one of them, convnet peaks are repeatable.
_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1"}
# How a process ends when memory is refused to code that cannot bear it, or when the kernel takes it: anything else, such as
# an exit code or a request to terminate, says nothing about the size.
_DEATHS_OF_MEMORY = [getattr(signal, name) for name in ("SIGKILL", "SIGABRT", "SIGSEGV", "SIGBUS") if hasattr(signal, name)]
_GRACE_S = 10.0  # for a worker to put things back and leave after Ctrl-C
_MOST_WORKERS = 30  # each death lowers the ceiling, so a sound search ends long before

F = TypeVar("F", PlanRecord, ProbeResult)


class WorkerError(AutoaccumError):
    """The search in the worker ended with an error, whose text is for people.

    Attributes:
        kind: "nothing fits", "refused" or "user".
        trials: What was run before.
    """

    def __init__(self, kind: str, text: str, trials: tuple[Trial, ...]) -> None:
        super().__init__(text)
        self.kind, self.trials = kind, trials


def search_in_worker(
    target: str, request: Mapping[str, object], device: str | None, follower: Follower
) -> PlanRecord | ProbeResult:
    """Search in a worker process, with a new one wherever a trial kills it.

    A worker that dies before its first trial may have died of tracing the target for a prediction, which runs the user's
    code as well: the next one searches without.

    Args:
        target: See `autoaccum.targets`.
        request: The fields of a `request.Request`.
        device: As the user writes it, None for the model's.

    Raises:
        WorkerError: When the search ended with an error.
    """
    log: list[Trial] = []
    predicts = bool(request.get("predict", True))
    note: tuple[str, ...] = ()
    for _ in range(_MOST_WORKERS):
        raw = msgspec.Raw(msgspec.json.encode({**request, "predict": predicts}))
        job = Job(target=target, device=device, request=raw, log=tuple(log))
        running: Started | None = None
        before = len(log)
        with _worker(job) as process:
            for message in _messages(process):
                match message:
                    case Bounded():
                        follower.bounded(message.top)
                    case Started():
                        running = message
                        follower.started(message.candidate, message.purpose)
                    case Finished():
                        running = None
                        log.append(message.trial)
                        follower.finished(message.trial)
                    case Planned():
                        return _with_note(message.plan, note)
                    case Probed():
                        return _with_note(message.result, note)
                    case Failed():
                        raise WorkerError(message.kind, message.text, tuple(log))
            code = process.wait()
        if code in (130, -signal.SIGINT):
            raise KeyboardInterrupt
        if running is None and predicts and len(log) == before:
            predicts, note = False, (f"No prediction: the worker process ended {_ending(code)} while it was made.",)
            continue
        if running is None or -code not in _DEATHS_OF_MEMORY:
            size = "before it ran a trial" if running is None and not log else "outside any trial"
            where = size if running is None else f"during the trial of micro_batch={running.candidate.micro_batch}"
            raise WorkerError("refused", f"the worker process ended {_ending(code)} {where}.", tuple(log))
        log.append(_died(running, code))
        follower.finished(log[-1])
    raise WorkerError("refused", f"{_MOST_WORKERS} worker processes died one after the other.", tuple(log))


def _with_note(found: F, note: tuple[str, ...]) -> F:
    return msgspec.structs.replace(found, warnings=(*found.warnings, *note))


def _died(running: Started, code: int) -> Trial:
    return Trial(
        candidate=running.candidate,
        outcome=OutOfMemory(cause="process", message=f"the worker process ended {_ending(code)} during this trial"),
        wall_s=0.0,
        rows_per_step=running.candidate.micro_batch,
        purpose="confirm" if running.purpose == "confirm" else "probe",
    )


def _ending(code: int) -> str:
    if code < 0:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    return f"with exit code {code}"


@contextmanager
def _worker(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    try:
        line = msgspec.json.encode(job) + b"\n"
    except UnicodeEncodeError:
        raise WorkerError("refused", f"target {shown(job.target)} is not UTF-8 text; rename the file.", job.log) from None
    process = subprocess.Popen(
        [sys.executable, "-m", "autoaccum.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**_ENVIRONMENT, **os.environ},
    )
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # a worker that died at once is reported by its exit code
            process.stdin.write(line)
            process.stdin.flush()
        yield process
    finally:
        _end(process)


def _messages(process: subprocess.Popen[bytes]) -> Iterator[Message]:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            yield msgspec.json.decode(line, type=Message)
        except msgspec.DecodeError:
            return  # a line cut short by the death of the worker


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes, wait a while, and make sure that the worker is gone."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:  # whatever signal comes meanwhile
        if process.poll() is None:
            process.kill()
            process.wait()
