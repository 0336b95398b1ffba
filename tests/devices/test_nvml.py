"""NVIDIA's management library, with a stub in its place: there is no driver on most machines that run these tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import psutil
import pynvml
import pytest

from autoaccum.devices import nvml
from autoaccum.devices.base import Holder

UUID = "0a1b2c3d-0000-1111-2222-333344445555"
NO_SUCH_PID = 2**22 + 1  # above the largest that Linux gives out


class Process(NamedTuple):
    pid: int
    usedGpuMemory: int | None  # noqa: N815 - NVML's own name


class Library:
    """A stub of NVML that notes how often it was opened and closed."""

    def __init__(self) -> None:
        self.handles = {f"GPU-{UUID}": "card"}
        self.compute: list[Process] = []
        self.graphics: list[Process] = []
        self.opened = self.closed = 0
        self.failing: set[str] = set()

    def open(self) -> None:
        self._fail("init", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def handle(self, uuid: str) -> str:
        if uuid not in self.handles:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.handles[uuid]

    def compute_processes(self, handle: str) -> list[Process]:
        assert handle in self.handles.values()
        self._fail("compute", pynvml.NVML_ERROR_NO_PERMISSION)
        return self.compute

    def graphics_processes(self, handle: str) -> list[Process]:
        assert handle in self.handles.values()
        return self.graphics

    def version(self) -> str:
        self._fail("version", pynvml.NVML_ERROR_UNKNOWN)
        return "570.86.15"

    def _fail(self, what: str, code: int) -> None:
        if what in self.failing:
            raise pynvml.NVMLError(code)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stub, in place of the functions that are used."""
    stub = Library()
    replaced: dict[str, Callable[..., object]] = {
        "nvmlInit": stub.open,
        "nvmlShutdown": stub.close,
        "nvmlDeviceGetHandleByUUID": stub.handle,
        "nvmlDeviceGetComputeRunningProcesses": stub.compute_processes,
        "nvmlDeviceGetGraphicsRunningProcesses": stub.graphics_processes,
        "nvmlSystemGetDriverVersion": stub.version,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(pynvml, name, function)
    return stub


def test_holders_come_the_largest_first(library: Library) -> None:
    """Every process with memory on the device is listed with its bytes, the largest first, whatever it does there."""
    library.compute = [Process(NO_SUCH_PID, 100), Process(NO_SUCH_PID + 1, 300)]
    library.graphics = [Process(NO_SUCH_PID + 2, 200)]
    assert [holder.held_bytes for holder in nvml.holders(UUID)] == [300, 200, 100]


def test_process_in_both_lists_counts_once(library: Library) -> None:
    """A process that computes and draws is one holder."""
    library.compute = library.graphics = [Process(NO_SUCH_PID, 100)]
    assert nvml.holders(UUID) == (Holder(NO_SUCH_PID, "?", 100),)


def test_holder_has_its_name(library: Library) -> None:
    """A process of this machine is listed under its name, this one included."""
    library.compute = [Process(os.getpid(), 100)]
    assert nvml.holders(UUID) == (Holder(os.getpid(), psutil.Process().name(), 100),)


def test_holder_without_a_name(library: Library) -> None:
    """A process that cannot be seen from here, as from inside a container, has a question mark for a name."""
    library.compute = [Process(NO_SUCH_PID, 100)]
    assert nvml.holders(UUID)[0].name == "?"


def test_holder_of_unknown_size(library: Library) -> None:
    """Where the driver does not tell how much a process holds, that is not known, and it comes last."""
    library.compute = [Process(NO_SUCH_PID, None), Process(NO_SUCH_PID + 1, 5)]
    assert [holder.held_bytes for holder in nvml.holders(UUID)] == [5, None]


def test_instance_of_a_divided_card(library: Library) -> None:
    """A UUID that no whole card has is looked up as one of a MIG instance."""
    library.handles = {f"MIG-{UUID}": "instance"}
    library.compute = [Process(NO_SUCH_PID, 100)]
    assert nvml.holders(UUID) == (Holder(NO_SUCH_PID, "?", 100),)


@pytest.mark.parametrize("failing", ["init", "compute", "handle"])
def test_holders_that_are_not_known(library: Library, failing: str) -> None:
    """Without a driver, without the right to ask, or for an unknown device nobody is known to hold memory."""
    library.compute = [Process(NO_SUCH_PID, 100)]
    library.failing = {failing}
    if failing == "handle":
        library.handles = {}
    assert nvml.holders(UUID) == ()


def test_driver_version(library: Library) -> None:
    """The driver's version is what the library says."""
    assert nvml.driver_version() == "570.86.15"


@pytest.mark.parametrize("failing", ["init", "version"])
def test_driver_version_that_is_not_known(library: Library, failing: str) -> None:
    """Without a driver, or where it does not say, the version is not known."""
    library.failing = {failing}
    assert nvml.driver_version() is None


@pytest.mark.parametrize("failing", ["none", "compute", "version"])
def test_library_is_closed_as_often_as_opened(library: Library, failing: str) -> None:
    """Every question closes the library again, also when the answer is an error."""
    library.failing = {failing}
    nvml.holders(UUID)
    nvml.driver_version()
    assert library.opened == library.closed == 2


def test_real_library_answers() -> None:
    """The library of this machine, with or without a driver, answers for a device that does not exist: nobody."""
    assert nvml.holders(UUID) == ()
