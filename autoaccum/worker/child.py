"""The worker process: load the target, search, say what happens. Run as `python -m autoaccum.worker`."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, BinaryIO, final

import msgspec
import torch

from autoaccum.checking.split import check_workload
from autoaccum.devices import device_for
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import AutoaccumError, NothingFitsError
from autoaccum.predicting import predict_workload
from autoaccum.prediction.gpu_names import gpus_for
from autoaccum.records import Candidate, CheckResult, PlanRecord, Trial
from autoaccum.request import Request
from autoaccum.targets import load_target
from autoaccum.tune import probe_workload, tune_workload
from autoaccum.worker.messages import Bounded, Failed, Finished, Job, Message, Planned, Probed, Started
from autoaccum.workload import Workload

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep


def main() -> int:
    """Read one job from standard input and answer on standard output; what the user prints goes to standard error."""
    line = sys.stdin.buffer.readline()
    channel = _Channel(_own_pipes())
    try:
        channel.say(_search(msgspec.json.decode(line, type=Job), channel))
    except NothingFitsError as error:
        channel.say(Failed(kind="nothing fits", text=str(error)))
    except AutoaccumError as error:
        channel.say(Failed(kind="refused", text=str(error)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's error, whatever it is, is shown by the parent
        channel.say(Failed(kind="user", text=users_traceback(error)))
    return 0


def _search(job: Job, channel: _Channel) -> Message:
    workload = load_target(job.target)
    device = None if job.device is None else _device_named(job.device, workload)
    request = msgspec.json.decode(job.request, type=Request)
    if request.target_batch is None:
        return Probed(result=probe_workload(workload, request, device=device, listener=channel, log=job.log))
    plan = tune_workload(workload, request, device=device, listener=channel, log=job.log)
    return Planned(plan=PlanRecord(**{name: getattr(plan, name) for name in PlanRecord.__struct_fields__}))


def checked_target(target: str, rows: int, device: str | None) -> CheckResult | str:
    """Whether accumulation is exact for a target, in this process; the user's own error as text.

    Raises:
        AutoaccumError: When the target or the device cannot be used.
    """
    try:
        with _answer_apart():
            workload = load_target(target)
            chosen = None if device is None else _device_named(device, workload)
            return check_workload(workload, rows, chosen)
    except AutoaccumError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's error, whatever it is, is shown by the caller
        return users_traceback(error)


def predicted_target(
    target: str, gpus: Sequence[str], numbers: dict[str, Any], world_size: int, picture: str | None
) -> PlanRecord | str:
    """The plan for GPUs that are not here, in this process; the user's own error as text.

    Raises:
        AutoaccumError: When the target or a GPU cannot be used, or nothing fits.
    """
    try:
        with _answer_apart():
            named = gpus_for(gpus[0] if len(gpus) == 1 else list(gpus))
            workload = load_target(target, without_values=True)
            return predict_workload(workload, Request(**numbers), named, world_size=world_size, picture=picture)
    except AutoaccumError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's error, whatever it is, is shown by the caller
        return users_traceback(error)


def _device_named(name: str, workload: Workload) -> AbstractDevice:
    """The device that the user names, with the model moved there."""
    try:
        place = torch.device("cpu" if name.startswith("virtual:") else name)
    except RuntimeError:
        place = workload.device  # `device_for` says what is wrong with the name
    has_index = place.type in ("cuda", "xpu")
    device = device_for(name, torch.device(place.type, place.index or 0) if has_index else torch.device(place.type))
    workload.move_to(device.torch_device)
    return device


@contextmanager
def _answer_apart() -> Iterator[None]:
    """What the user's code prints, also below Python, goes to standard error: it is not the answer."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except OSError:  # there is no standard output
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # what C code has printed and not written yet would come out afterwards
        os.dup2(kept, 1)
        os.close(kept)


def _own_pipes() -> BinaryIO:
    """The pipe to the parent, out of reach of the user's code: its input is empty, its output goes to standard error."""
    parent_is_there, answers = os.dup(0), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # written line by line, so that nothing printed is lost when this process dies
    if hasattr(os, "register_at_fork"):  # a loader process that outlives this one must not keep the parent waiting
        os.register_at_fork(after_in_child=answers.close)
    threading.Thread(target=_end_with_parent, args=(parent_is_there,), daemon=True).start()
    return answers


@final
class _Channel:
    """Says each message at once, so that the parent knows what was running when this process dies."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers

    def say(self, message: Message) -> None:
        self._answers.write(msgspec.json.encode(message) + b"\n")
        self._answers.flush()

    def bounded(self, top: int) -> None:
        """No size above this one will be tried."""
        self.say(Bounded(top=top))

    def started(self, candidate: Candidate, purpose: str) -> None:
        """A trial begins."""
        self.say(Started(candidate=candidate, purpose=purpose))

    def finished(self, trial: Trial) -> None:
        """A trial is over."""
        self.say(Finished(trial=trial))


def _end_with_parent(parent_is_there: int) -> None:
    """The pipe closes when the parent is gone, however it went: then nobody waits for this process."""
    while os.read(parent_is_there, 4096):
        pass
    os._exit(1)


def users_traceback(error: BaseException) -> str:
    """The traceback without this package's and the import system's frames: what is left is the user's own."""
    shown = traceback.TracebackException.from_exception(error)
    links: list[traceback.TracebackException | None] = [shown]
    while links:
        link = links.pop()
        if link is not None:
            outside = [frame for frame in link.stack if not frame.filename.startswith((_PACKAGE, "<frozen importlib"))]
            link.stack = traceback.StackSummary.from_list(outside)
            links += [link.__cause__, link.__context__, *(link.exceptions or ())]
    text = "".join(shown.format()).rstrip()
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, from file names, are no JSON
