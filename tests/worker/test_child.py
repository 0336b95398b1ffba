"""Inside the worker: where the model goes, and what is left of a traceback."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
import torch

import autoaccum
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.virtual import VirtualDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.records import Fit
from autoaccum.targets import load_target
from autoaccum.worker import child
from autoaccum.worker.messages import Bounded, Finished, Job, Message, Planned, Probed, Started
from autoaccum.workload import Workload

TINY_GPT = "demo:gpt?layers=1&width=8&heads=1&vocabulary=16&seq_len=4"
LIBRARY = str(Path(autoaccum.__file__).parent)


def raised_by(source: str, file: str = "/home/someone/train.py") -> BaseException:
    """The exception that source raises when it is run as that file, on the way through this library's frames."""
    names = {"load_target": load_target}
    try:
        exec(compile(source, file, "exec"), names)
    except BaseException as error:  # noqa: BLE001 - any, to look at
        return error
    raise AssertionError("nothing was raised")


def test_own_frames_are_left_out() -> None:
    """Of an error in the user's code that this library called, only the user's frames are shown."""
    text = child.users_traceback(raised_by("def f():\n    1 / 0\nload_target('demo:nothing')"))
    assert 'File "/home/someone/train.py", line 3' in text
    assert LIBRARY not in text and "demos" not in text
    assert "InvalidRequestError" in text


def test_own_frames_of_causes_are_left_out() -> None:
    """Causes, contexts and the parts of a group are shown without this library's frames."""
    call = "load_target('demo:nothing')"
    chained = f"try:\n    {call}\nexcept ValueError as error:\n    raise KeyError('x') from error"
    grouped = (
        f"found = []\ntry:\n    {call}\nexcept ValueError as e:\n    found.append(e)\nraise ExceptionGroup('many', found)"
    )
    for source in (chained, grouped):
        text = child.users_traceback(raised_by(source))
        assert text.count("/home/someone/train.py") == 2
        assert LIBRARY not in text


def test_a_neighbour_with_a_similar_name_is_the_users() -> None:
    """A file in a folder whose name begins like this package's is shown."""
    file = f"{LIBRARY}_experiments/train.py"
    assert file in child.users_traceback(raised_by("1 / 0", file))


def test_a_message_that_is_no_unicode_can_be_sent() -> None:
    """A message with a lone surrogate, as a file name gives it, is escaped, so that it can be encoded."""
    text = child.users_traceback(raised_by("raise OSError('caf\\udce9')"))
    assert text.endswith("OSError: caf\\udce9")
    msgspec.json.encode(text)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Where workloads are moved to."""
    moved: list[torch.device] = []
    monkeypatch.setattr(Workload, "move_to", lambda _, device: moved.append(device))
    return moved


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_cpu_is_the_cpu(name: str, moves: list[torch.device]) -> None:
    """The CPU is found under its name with and without an index, and the model is moved there."""
    assert isinstance(child._device_named(name, load_target(TINY_GPT)), CpuDevice)
    assert moves == [torch.device("cpu")]


def test_virtual_device_has_the_size_in_its_name() -> None:
    """A virtual device is made with the capacity that is asked for."""
    device = child._device_named("virtual:3MiB", load_target(TINY_GPT))
    assert isinstance(device, VirtualDevice) and device.total_bytes() == 3 * 2**20


@pytest.mark.parametrize("name", ["toaster", "virtual:", "virtual:much", "xla", "cuda:99", "xpu:99"])
def test_no_such_device_is_said(name: str, moves: list[torch.device]) -> None:
    """A device that torch does not know or that is not here is refused by autoaccum, before the model is moved."""
    with pytest.raises(InvalidRequestError, match=r"is not a device|is not available|cannot be read as memory"):
        child._device_named(name, load_target(TINY_GPT))
    assert moves == []


def searched(**request: object) -> list[Message]:
    """The messages of a search that runs in this process."""
    pipe = io.BytesIO()
    raw = msgspec.Raw(json.dumps(request).encode())
    channel = child._Channel(pipe)
    channel.say(child._search(Job(target=TINY_GPT, device="virtual:4MiB", request=raw), channel))
    return [msgspec.json.decode(line, type=Message) for line in pipe.getvalue().splitlines()]


def test_every_step_of_a_search_is_said() -> None:
    """The bound comes first, each trial is announced before it ends, and the answer with all trials comes last."""
    bounded, *between, last = searched(max_micro_batch=2)
    assert bounded == Bounded(top=2)
    assert [type(message) for message in between] == [Started, Finished] * 2
    assert isinstance(last, Probed)
    assert last.result.trials == tuple(message.trial for message in between if isinstance(message, Finished))


def test_a_target_makes_it_a_plan() -> None:
    """With a target the answer is a plan, whose own step is announced as such."""
    *before, last = searched(target_batch=3, max_micro_batch=2)
    assert isinstance(last, Planned) and last.plan.micro_batch_sizes == (2, 1)
    assert [message.purpose for message in before if isinstance(message, Started)] == ["probe", "probe", "confirm"]


def test_a_log_is_not_run_again() -> None:
    """Trials of a worker that died are taken as they are: only what is missing is run."""
    done = [message.trial for message in searched(max_micro_batch=2) if isinstance(message, Finished)]
    pipe = io.BytesIO()
    job = Job(target=TINY_GPT, device="virtual:4MiB", request=msgspec.Raw(b'{"max_micro_batch": 4}'), log=tuple(done))
    answer = child._search(job, child._Channel(pipe))
    assert isinstance(answer, Probed)
    assert [t.candidate.micro_batch for t in answer.result.trials if isinstance(t.outcome, Fit)] == [1, 2, 4]
    assert pipe.getvalue().count(b'"started"') == 1
