"""Host memory: what the kernel says about it, the net under a trial, and peaks that repeat."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from autoaccum.devices import cpu
from autoaccum.devices.cpu import CpuDevice, host_allocator
from autoaccum.devices.limits import ProcessLimit, status_bytes

MIB = 2**20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="data limits, /proc and mallopt are Linux's")
RunChild = Callable[..., Any]


def test_container_limit_is_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit below the machine's memory is the device's total."""
    monkeypatch.setattr(cpu, "cgroup_limit_bytes", lambda: 3 * MIB)
    assert CpuDevice().total_bytes() == 3 * MIB


def test_container_limit_above_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit above the machine's memory does not count."""
    monkeypatch.setattr(cpu, "cgroup_limit_bytes", lambda: 2**60)
    assert CpuDevice().total_bytes() == psutil.virtual_memory().total


def test_container_room_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the container still allows, where that is least, is what is free; a tenth of it stays in reserve."""
    monkeypatch.setattr(cpu, "cgroup_free_bytes", lambda: 5000)
    assert CpuDevice().free_bytes() == 5000
    assert CpuDevice().reserve_bytes() == 500


# -- the device in this process


def test_held_is_the_resident_set() -> None:
    """What is held is the whole resident set, interpreter and libraries included."""
    assert CpuDevice().held_bytes(()) == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)


def test_placing_is_nothing() -> None:
    """A micro-batch is on the host already: the very object comes back."""
    batch = {"input": torch.ones(2)}
    assert CpuDevice().place(batch) is batch


def test_search_must_be_careful() -> None:
    """Far above the budget the kernel ends processes, so the device asks for a careful search, and host memory counts."""
    assert CpuDevice.cautious and CpuDevice.is_host


def test_allocator_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment that change peaks are named."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert "MALLOC_ARENA_MAX=2" in host_allocator()


@on_linux
@pytest.mark.parametrize("error", [None, KeyError("lables"), KeyboardInterrupt()], ids=["none", "error", "interrupt"])
def test_resource_limit_comes_back(error: BaseException | None) -> None:
    """The process's limit on data is another one inside, and exactly the old one after success, an error or Ctrl-C."""
    import resource

    device, before = CpuDevice(), resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with device.limited_to(device.held_bytes(()) + 100 * MIB):
            assert resource.getrlimit(resource.RLIMIT_DATA) != before
            if error is not None:
                raise error
    except (KeyError, KeyboardInterrupt) as caught:
        assert caught is error
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@on_linux
def test_net_hangs_above_the_budget() -> None:
    """The limit leaves at least the budget's room over what is mapped, since address space is more than memory."""
    import resource

    device = CpuDevice()
    with device.limited_to(device.held_bytes(()) + 300 * MIB):
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        room = soft - status_bytes("VmData")
    assert 300 * MIB + cpu._NET_BYTES <= room <= 300 * MIB + cpu._NET_BYTES + 0.5 * soft


def test_a_process_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing limits the process the device is the same one."""
    monkeypatch.setattr(cpu, "process_limit", lambda: None)
    device = CpuDevice()
    assert device.as_limited() is device


@on_linux
def test_a_limit_above_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that leaves more than the machine has free does not count."""
    monkeypatch.setattr(cpu, "process_limit", lambda: ProcessLimit(2**60, "VmData", "ulimit -d"))
    device = CpuDevice()
    assert device.as_limited() is device


@on_linux
@pytest.mark.slow
def test_limited_peak_is_what_the_limit_counts(run_child: RunChild) -> None:
    """The peak is that of the limited counter, and a step's temporary memory counts although it is given back.

    In a process of its own, which has no hole in its heap that the tensor could lie in; Python's own memory grows and
    shrinks by a MiB.
    """
    added = run_child(
        """
        import torch
        from autoaccum.devices.cpu import CpuDevice
        from autoaccum.devices.limits import ProcessLimit, status_bytes
        device = CpuDevice(ProcessLimit(2**60, "VmData", "ulimit -d"))
        with device.steadied():
            device.release()
            before = status_bytes("VmData")
            with device.watched(()) as watch:
                tensor = torch.ones(512 * 2**20, dtype=torch.uint8)
                del tensor
        answer(watch.peak_bytes - before)
        """
    )
    assert 500 * MIB <= added <= 524 * MIB


@on_linux
@pytest.mark.skipif(cpu._mkl_free_buffers() is None, reason="this torch has no MKL, or hides its functions")
def test_buffers_of_matrix_products_are_released(run_child: RunChild) -> None:
    """What MKL keeps after a product of matrices is given back, so that no size pays for those that were tried before."""
    held, left = run_child(
        """
        import torch
        from autoaccum.devices.cpu import CpuDevice
        from autoaccum.devices.limits import status_bytes
        device = CpuDevice()
        with device.steadied():
            one, other = torch.ones(256, 64), torch.ones(64, 256)
            device.release()
            before = status_bytes("VmData")
            one @ other
            held = status_bytes("VmData") - before
            left = []
            for _ in range(3):  # Python may take a MiB meanwhile
                device.release()
                left.append(status_bytes("VmData") - before)
            answer([held, min(left)])
        """
    )
    assert held > 2 * MIB
    assert left < held / 2


@on_linux
def test_the_limit_is_named() -> None:
    """What a plan was made on says that the process was limited, and by what."""
    assert "limited to 3.00 GiB by ulimit -d" in CpuDevice(ProcessLimit(3 * 2**30, "VmData", "ulimit -d")).description()


def test_sampling_sees_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel's peak cannot be reset, a thread's samples see an allocation that lives for half a second."""
    monkeypatch.setattr(cpu, "_can_reset_peak", lambda: False)
    device = CpuDevice()
    device.release()
    before = device.held_bytes(())
    stop = threading.Event()
    with device.watched(()) as watch:
        tensor = torch.ones(256 * MIB, dtype=torch.uint8)
        stop.wait(0.5)
        del tensor
    assert 240 * MIB <= watch.peak_bytes - before <= 300 * MIB


def test_sampling_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that samples is gone when the watch is left, also by an error."""
    monkeypatch.setattr(cpu, "_can_reset_peak", lambda: False)

    def is_running() -> bool:
        return any(thread.name == "autoaccum-resident-set" for thread in threading.enumerate())

    with pytest.raises(KeyError), CpuDevice().watched(()):
        assert is_running()
        raise KeyError("lables")
    assert not is_running()


def test_peak_that_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that does not let the peak be reset is noticed."""

    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cpu, "_reset_peak", refuse)
    assert not cpu._can_reset_peak()


# -- in processes of their own


@pytest.fixture(scope="module")
def refused(run_child: RunChild) -> dict[str, Any]:
    """What a process sees that runs out inside the limit: a plain allocation, a training step, and a smaller one."""
    answer: dict[str, Any] = run_child(
        """
        import resource, torch
        from torch import nn
        from autoaccum.devices import ERROR_ROWS, CpuDevice
        from autoaccum.devices.base import recognise
        from autoaccum.window import Progress, run_window

        device, seen = CpuDevice(), {}
        model = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows):
            progress = Progress()
            try:
                run_window([torch.ones(rows, 16)], [rows], loss=lambda batch: model(batch).mean(), optimizer=optimizer,
                           place=device.place, progress=progress)
            except RuntimeError as error:
                return [recognise(error, ERROR_ROWS).verdict.name, progress.phase, type(error).__name__]
            return "ran"

        def verdict(num_bytes):
            try:
                torch.empty(num_bytes, dtype=torch.uint8)
            except RuntimeError as error:
                return recognise(error, ERROR_ROWS).verdict.name
            return "ran"

        step(8)
        with device.limited_to(device.held_bytes(()) + 2**28):
            seen["allocation"] = verdict(2**32)
            seen["step"] = step(2**18)  # 4 GiB of hidden values
            seen["smaller step"] = step(256)
        seen["allocation after"] = verdict(2**32)
        outer = device.held_bytes(()) + 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (outer, resource.RLIM_INFINITY))
        with device.limited_to(2**40):
            seen["limit inside"] = resource.getrlimit(resource.RLIMIT_DATA)[0] == outer
        seen["limit after"] = resource.getrlimit(resource.RLIMIT_DATA) == (outer, resource.RLIM_INFINITY)
        answer(seen)
        """
    )
    return answer


@pytest.mark.slow
@on_linux
def test_refused_allocation(refused: dict[str, Any]) -> None:
    """An allocation far above the budget really fails in torch, and is recognised."""
    assert refused["allocation"] == "TOO_LARGE"


@on_linux
def test_refused_step(refused: dict[str, Any]) -> None:
    """A training step far above the budget really fails in its forward pass, and is recognised."""
    assert refused["step"] == ["TOO_LARGE", "forward", "RuntimeError"]


@on_linux
def test_smaller_step_after_it(refused: dict[str, Any]) -> None:
    """A step that fits runs after the one that failed, inside the same limit."""
    assert refused["smaller step"] == "ran"


@on_linux
def test_allocation_after_the_limit(refused: dict[str, Any]) -> None:
    """The allocation that failed inside the limit works after it."""
    assert refused["allocation after"] == "ran"


@on_linux
def test_limit_of_the_caller_is_never_raised(refused: dict[str, Any]) -> None:
    """A budget above the caller's own `ulimit -d` leaves that in force, inside and afterwards."""
    assert refused["limit inside"] and refused["limit after"]


@pytest.fixture(scope="module")
def settled(run_child: RunChild) -> dict[str, Any]:
    """Whether eight megabytes come from a mapping of its own (steady) or from the heap (usual), all along a search."""
    answer: dict[str, Any] = run_child(
        """
        import ctypes, torch
        from autoaccum.devices import CpuDevice
        from autoaccum.devices.cpu import _WANDERING, _has_glibc

        needed = int(100 + 100 * _WANDERING)  # of a peak of 200 bytes, 100 of which were held before

        class Mallinfo2(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks "
                        "fordblks keepcost".split()]

        libc = ctypes.CDLL(None)
        if not _has_glibc() or not hasattr(libc, "mallinfo2"):
            answer({})
            raise SystemExit
        libc.mallinfo2.restype = Mallinfo2

        def is_steady():
            libc.malloc_trim(0)  # free memory at the top of the heap would serve either way
            before = libc.mallinfo2().hblks
            kept = torch.empty(2**23, dtype=torch.uint8)
            return libc.mallinfo2().hblks > before

        device, seen = CpuDevice(), {}
        with device.steadied() as steadiness:
            seen["probing"] = is_steady()
            seen["ample: said"] = steadiness.settle(peak_bytes=200, held_bytes=100, budget_bytes=needed)
            seen["ample: now"] = is_steady()
        seen["ample: after"] = is_steady()
        for name, budget in (("tight", needed - 1), ("unknown", None)):
            with device.steadied() as steadiness:
                seen[name + ": said"] = steadiness.settle(peak_bytes=200, held_bytes=100, budget_bytes=budget)
                seen[name + ": now"] = is_steady()
            seen[name + ": after"] = is_steady()
        with device.steadied():
            pass
        seen["unsettled: after"] = is_steady()
        try:
            with device.steadied():
                raise KeyError
        except KeyError:
            seen["error: after"] = is_steady()
        answer({**seen, "needed": f"{needed} B"})
        """
    )
    if not answer:
        pytest.skip("this C library is not a glibc with mallinfo2, so its settings cannot be seen")
    return answer


@pytest.mark.slow
@on_linux
def test_steady_while_probing(settled: dict[str, Any]) -> None:
    """While a search runs, a megabyte gets a mapping of its own, which goes back to the system when it is freed."""
    assert settled["probing"]


@on_linux
def test_usual_where_there_is_room(settled: dict[str, Any]) -> None:
    """With room for wandering peaks the usual settings are chosen, at once and without a word."""
    assert settled["ample: said"] is None
    assert not settled["ample: now"]
    assert not settled["ample: after"]


@on_linux
@pytest.mark.parametrize("case", ["tight", "unknown"])
def test_steady_where_there_is_none(settled: dict[str, Any], case: str) -> None:
    """With one byte less, or an unknown budget, the steady settings stay, also after the search, and it is said."""
    assert settled[f"{case}: now"]
    assert settled[f"{case}: after"]
    assert settled["needed"] in settled[f"{case}: said"]
    assert "MALLOC_MMAP_THRESHOLD_=65536" in settled[f"{case}: said"]


@on_linux
@pytest.mark.parametrize("case", ["unsettled", "error"])
def test_usual_where_nothing_was_settled(settled: dict[str, Any], case: str) -> None:
    """A search that ends without an answer leaves the usual settings."""
    assert not settled[f"{case}: after"]


_PEAKS = """
import sys, torch
from torch import nn
from autoaccum.devices import CpuDevice
from autoaccum.window import Progress, run_window

device = CpuDevice()

def peaks(model, shape, sizes):
    def peak(rows):
        optimizer, batch = torch.optim.AdamW(model.parameters()), torch.ones(rows, *shape)
        device.release()
        with device.watched(()) as watch:
            for _ in range(2):
                run_window([batch, batch], [rows, rows], loss=lambda placed: model(placed).pow(2).mean(),
                           optimizer=optimizer, place=device.place, progress=Progress())
        return watch.peak_bytes
    peak(sizes[0])  # loads the libraries
    return [peak(rows) for rows in sizes]

with device.steadied():
    answer(PEAKS)
"""
_MODELS = {
    "mlp": "peaks(nn.Sequential(nn.Linear(16, 2048), nn.GELU(), nn.Linear(2048, 16)), (16,), (8192, 2048, 6144, 4096))",
    "transformer": "peaks(nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 1, "
    "enable_nested_tensor=False), (64, 64), (256, 64, 192, 128))",
}


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("model", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_peaks_lie_on_a_line(run_child: RunChild, model: str) -> None:
    """Under steady settings peaks of other sizes lie on the line through the largest and the smallest, within 3 %."""
    largest, smallest, *others = run_child(_PEAKS.replace("PEAKS)", _MODELS[model] + ")"))
    per_step = (largest - smallest) / 3
    assert per_step > 24 * MIB
    for steps, peak in zip((2, 1), others, strict=True):
        assert peak == pytest.approx(smallest + steps * per_step, rel=0.03)
        assert abs(peak - smallest - steps * per_step) < 0.5 * per_step
