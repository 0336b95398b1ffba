"""Faults that strike in this process at a chosen call: what they raise, and what comes out when all is well.

A clean run counts how often every part of the work is called; each of these calls can then be made to fail.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import autoaccum

USERS, KILLED = "user's exception", "kill -9"
NEIGHBOUR, WRONG_CLOCK = "another process takes memory", "clock goes backwards"
PARTS = ("data", "forward", "loss", "backward", "optimizer made", "optimizer step", "scheduler step", "weight")
OF_PREDICTION = " of the prediction"
ANYWHERE = "any function of autoaccum"
_PACKAGE = str(Path(autoaccum.__file__).parent)
_BACK_S = 3600.0  # by so much the clocks go wrong


class UsersError(Exception):
    """What the user's own code raises."""


class Terminated(SystemExit):
    """What a program raises in its own handler of SIGTERM."""


class Injector:
    """Counts the calls of every part, and strikes at one of them.

    Attributes:
        calls: How often each part was called since `arm`.
        struck: Whether the fault has struck in this process.
        raised: What the fault raised; None for one that raises nothing by itself.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._process, self._shared = os.getpid(), mmap.mmap(-1, 4 * (1 + len(PARTS)))
        self.disarm()

    def __deepcopy__(self, memo: dict[int, Any]) -> Injector:
        """One for all copies of a model."""
        return self

    def arm(self, place: str, step: int, fault: Callable[[Injector], None]) -> None:
        """Strike at the n-th call of this part, counted from now."""
        self.disarm()
        self._place, self._step, self._fault = place, step, fault

    def disarm(self) -> None:
        """Strike no more, and count anew."""
        self.calls.clear()
        self.struck, self.raised = False, None
        self._shared[:] = bytes(len(self._shared))
        self.room: int | None = None
        self._place, self._step = "", 0

    def passing(self, place: str, rows: int = 0) -> None:
        """A part is called, with so many rows; in the process that traces it has another name."""
        if os.getpid() != self._process:
            place = self._in_trace(place)
        self.calls[place] += 1
        if place == self._place and self.calls[place] == self._step:
            self.struck = True
            self._shared[0] = 1
            self._fault(self)
        if self.room is not None and rows > self.room:
            raise out_of_memory()

    def _in_trace(self, part: str) -> str:
        """The calls of a process that ends are told to this one."""
        at = 4 * (1 + PARTS.index(part))
        calls = 1 + int.from_bytes(self._shared[at : at + 4])
        self._shared[at : at + 4] = calls.to_bytes(4)
        return part + OF_PREDICTION

    def count_in_trace(self, part: str) -> int:
        """How often the process that traces called this part."""
        at = 4 * (1 + PARTS.index(part))
        return int.from_bytes(self._shared[at : at + 4])

    @property
    def has_struck(self) -> bool:
        """Whether the fault has struck, here or in the process that traces."""
        return self._shared[0] == 1

    def fail(self, error: BaseException) -> None:
        """Raise this, and keep it to be looked for."""
        self.raised = error
        raise error


def out_of_memory() -> Exception:
    """As the allocator raises it."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def _interrupted(injector: Injector) -> None:
    signal.raise_signal(signal.SIGINT)


def _terminated(injector: Injector) -> None:
    signal.raise_signal(signal.SIGTERM)


def _neighbour(injector: Injector) -> None:
    injector.room = 2


def _nothing(injector: Injector) -> None:
    """The clock is wrong from here on; see `_clocks`."""


def _killed(injector: Injector) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KINDS: dict[str, Callable[[Injector], None]] = {
    "out of memory": lambda injector: injector.fail(out_of_memory()),
    USERS: lambda injector: injector.fail(UsersError("the user's own")),
    "Ctrl-C": _interrupted,
    "SIGTERM, with a handler": _terminated,
    KILLED: _killed,
    NEIGHBOUR: _neighbour,
    WRONG_CLOCK: _nothing,
}

STOPS: dict[str, type[BaseException]] = {"Ctrl-C": KeyboardInterrupt, "SIGTERM, with a handler": Terminated}


def evenly(count: int, at_most: int) -> list[int]:
    """Numbers from 1 to `count`: all of them, or so many, evenly spaced."""
    if count <= at_most:
        return list(range(1, count + 1))
    return [1 + round(index * (count - 1) / max(1, at_most - 1)) for index in range(at_most)]


def watching(injector: Injector, place: str) -> AbstractContextManager[None]:
    """What counts the calls of this part; parts of the user's count themselves."""
    watches = {"boundary": _boundaries, "clock": _clocks, ANYWHERE: _every_call}
    return watches[place](injector) if place in watches else nullcontext()


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises, as in a program that cleans up after itself."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _boundaries(injector: Injector) -> Iterator[None]:
    """Counts where garbage is collected, as after every trial and before every replay."""
    collect = gc.collect

    def counted(*args: Any) -> int:
        injector.passing("boundary")
        return collect(*args)

    gc.collect = counted
    try:
        yield
    finally:
        gc.collect = collect


@contextmanager
def _clocks(injector: Injector) -> Iterator[None]:
    """Counts how often clocks are read; once the fault has struck, all of them are an hour behind."""
    names = ("monotonic", "perf_counter", "time")
    real = {name: getattr(time, name) for name in names}

    def wrong(name: str) -> Callable[[], float]:
        def read() -> float:
            injector.passing("clock")
            late: float = real[name]()
            return late - _BACK_S if injector.struck else late

        return read

    for name in names:
        setattr(time, name, wrong(name))
    try:
        yield
    finally:
        for name in names:
            setattr(time, name, real[name])


@contextmanager
def _every_call(injector: Injector) -> Iterator[None]:
    """Counts every call of a function of autoaccum: a signal may come anywhere."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name != "<genexpr>":  # Python itself
            # swallows what comes while one is closed
            injector.passing(ANYWHERE)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
