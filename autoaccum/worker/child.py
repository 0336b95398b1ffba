"""The worker process: load the target, search, say what happens. Run as `python -m autoaccum.worker.child`."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import BinaryIO, final

import msgspec
import torch

from autoaccum.devices.virtual import VirtualDevice
from autoaccum.errors import AutoaccumError, NothingFitsError
from autoaccum.records import Candidate, PlanRecord, Trial
from autoaccum.targets import load_target
from autoaccum.tune import Request, probe_workload, tune_workload
from autoaccum.worker.messages import Bounded, Failed, Finished, Job, Message, Planned, Probed, Started

_PACKAGE = str(Path(__file__).resolve().parent.parent)


def main() -> int:
    """Read one job from standard input and answer on standard output; what the user prints goes to standard error."""
    line = sys.stdin.buffer.readline()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    channel = _Channel(answers)
    try:
        channel.say(_search(msgspec.json.decode(line, type=Job), channel))
    except KeyboardInterrupt:
        return 130
    except NothingFitsError as error:
        channel.say(Failed(kind="nothing fits", text=str(error)))
    except AutoaccumError as error:
        channel.say(Failed(kind="refused", text=str(error)))
    except Exception as error:  # noqa: BLE001 - the user's error, whatever it is, is shown by the parent
        channel.say(Failed(kind="user", text=users_traceback(error)))
    return 0


def _search(job: Job, channel: _Channel) -> Message:
    workload = load_target(job.target)
    device: object = job.device
    if job.device is not None and job.device.startswith("virtual:"):
        device = VirtualDevice(job.device.removeprefix("virtual:"))
    elif job.device is not None:
        workload.move_to(torch.device(job.device))
        device = workload.device
    request = msgspec.json.decode(job.request, type=Request)
    if request.target_batch is None:
        return Probed(result=probe_workload(workload, request, device=device, listener=channel, log=job.log))
    plan = tune_workload(workload, request, device=device, listener=channel, log=job.log)
    return Planned(plan=PlanRecord(**{name: getattr(plan, name) for name in PlanRecord.__struct_fields__}))


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


def _end_with_parent() -> None:
    """Standard input closes when the parent is gone, however it went: then nobody waits for this process."""
    sys.stdin.buffer.read()
    os._exit(1)


def users_traceback(error: Exception) -> str:
    """The traceback without this package's and the import system's frames: what is left is the user's own."""
    shown = traceback.TracebackException.from_exception(error)
    links: list[traceback.TracebackException | None] = [shown]
    while links:
        link = links.pop()
        if link is not None:
            outside = [frame for frame in link.stack if not frame.filename.startswith((_PACKAGE, "<frozen importlib"))]
            link.stack = traceback.StackSummary.from_list(outside)
            links += [link.__cause__, link.__context__]
    return "".join(shown.format()).rstrip()


if __name__ == "__main__":
    sys.exit(main())
