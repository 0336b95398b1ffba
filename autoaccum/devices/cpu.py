"""Host memory: the resident set of this process, with a real allocator failure where the platform can cap one.

The resident peak decides whether a trial fits. The limit is a loose net under it, because some kernels do not survive a
refused allocation (a convolution was seen to end the process), and because it counts address space, not memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, final

import psutil
import torch
from torch import Tensor

from autoaccum.devices.base import AbstractDevice, ErrorRow, Holder, Steadiness, Unit, Verdict, Watch
from autoaccum.devices.limits import ProcessLimit, cgroup_free_bytes, cgroup_limit_bytes, process_limit, status_bytes
from autoaccum.units import format_bytes

# glibc's mallopt parameters (malloc.h). With the default thresholds, which move, the peak of one size wanders by 30 % and
# a size that fitted fails after a larger one failed; with these it is affine in the batch (benchmarks/cpu_peaks.py).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_STEADY = {_M_MMAP_THRESHOLD: 64 * 2**10, _M_TRIM_THRESHOLD: 64 * 2**10, _M_TOP_PAD: 0}
# Setting a threshold ends glibc's adapting of it, so "as before" cannot be had; these are the values that adapting ends at
# (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits, twice that, DEFAULT_TOP_PAD in malloc.c): full speed, wandering peaks.
_USUAL = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 64 * 2**20, _M_TOP_PAD: 128 * 2**10}
# What the batch adds to the peak under the usual settings, as a multiple of what it adds under the steady ones: up to 1.98
# was seen (benchmarks/cpu_peaks.py).
_WANDERING = 2.0

_NET_FRAC = 0.25  # how far above the budget the net hangs: address space is more than memory
_NET_BYTES = 512 * 2**20  # room for thread stacks (8 MiB each) and for the arenas of a first parallel kernel
_SAMPLING_S = 0.002  # where a peak cannot be read, the resident set is read this often


@final
class CpuDevice(AbstractDevice):
    """The host's memory, as this process sees it: a container's limit counts as the machine's memory.

    Args:
        limit: Count what this limit counts. None: the resident set.
    """

    cautious: ClassVar[bool] = True
    is_host: ClassVar[bool] = True
    unit: ClassVar[Unit] = "pages"

    def __init__(self, limit: ProcessLimit | None = None) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self._limit = limit
        self._own_limit = limit or process_limit()  # as it is outside of `limited_to`

    def as_limited(self) -> CpuDevice:
        limit = self._own_limit
        return self if limit is None or limit.free_bytes() > self._free_on_host_bytes() else CpuDevice(limit)

    def limit_in_words(self) -> str:
        limit = self._own_limit
        return "" if limit is None else f"limited to {format_bytes(limit.limit_bytes)} by {limit.shell_command}"

    def description(self) -> str:
        parts = [platform.processor() or platform.machine(), f"{torch.get_num_threads()} threads", self.limit_in_words()]
        return ", ".join(part for part in parts if part)

    def total_bytes(self) -> int:
        known = [int(psutil.virtual_memory().total), cgroup_limit_bytes(), self._limit and self._limit.limit_bytes]
        return min(limit for limit in known if limit is not None)

    def free_bytes(self) -> int:
        limit = self._own_limit
        return self._free_on_host_bytes() if limit is None else min(self._free_on_host_bytes(), limit.free_bytes())

    def _free_on_host_bytes(self) -> int:
        available, in_group = int(psutil.virtual_memory().available), cgroup_free_bytes()
        return available if in_group is None else min(available, in_group)

    def reserve_bytes(self) -> int:
        return self.free_bytes() // 10  # where the host's memory is gone the kernel ends processes, it does not raise

    def held_bytes(self, resident: Sequence[Tensor]) -> int:
        return int(psutil.Process().memory_info().rss) if self._limit is None else status_bytes(self._limit.counter)

    def holders(self) -> tuple[Holder, ...]:
        found = []
        for process in psutil.process_iter(["pid", "name", "memory_info"]):
            memory = process.info["memory_info"]
            if memory is not None and process.pid != psutil.Process().pid:
                found.append(Holder(process.pid, process.info["name"] or "?", int(memory.rss)))
        return tuple(sorted(found, key=lambda holder: -(holder.held_bytes or 0)))

    @contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        if sys.platform != "linux":  # RLIMIT_DATA counts private mappings on Linux only
            yield
            return
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        room = max(0, budget_bytes - self.held_bytes(())) + int(budget_bytes * _NET_FRAC) + _NET_BYTES
        net = status_bytes("VmData") + room
        bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([net, *bounds]), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    @contextmanager
    def watched(self, resident: Sequence[Tensor]) -> Iterator[Watch]:
        watch = Watch()
        if _can_reset_peak():
            _reset_peak()
            try:
                yield watch
            finally:
                watch.peak_bytes = status_bytes("VmHWM") + self._not_resident_bytes()
        else:
            with _sampled(watch):
                yield watch
            watch.peak_bytes += self._not_resident_bytes()

    def _not_resident_bytes(self) -> int:
        """By how much what the limit counts is more than what is resident.

        The kernel keeps no peak of the former that can be reset. What a step takes and gives back is written to, so it was
        resident too: from the peak to now both have fallen by the same.
        """
        return 0 if self._limit is None else status_bytes(self._limit.counter) - status_bytes("VmRSS")

    @contextmanager
    def steadied(self) -> Iterator[Steadiness]:
        if not _has_glibc():
            yield Steadiness()
            return
        thresholds = _Thresholds()
        try:
            yield thresholds
        finally:
            thresholds.leave()

    def release(self) -> None:
        free_mkl_buffers()
        if _has_glibc():
            ctypes.CDLL(None).malloc_trim(0)

    def synchronize(self) -> None:
        pass

    def place(self, batch: Any) -> Any:
        return batch


@final
class _Thresholds(Steadiness):
    """glibc's thresholds: steady while probing, usual afterwards unless the plan needs them steady."""

    def __init__(self) -> None:
        self._after = _USUAL
        _set_thresholds(_STEADY)

    def settle(self, *, peak_bytes: int, held_bytes: int, budget_bytes: int | None) -> str | None:
        usual_peak_bytes = held_bytes + _WANDERING * (peak_bytes - held_bytes)
        if budget_bytes is not None and usual_peak_bytes <= budget_bytes:
            _set_thresholds(_USUAL)
            return None
        self._after = _STEADY
        return (
            f"With the C library's usual settings these steps may need up to {format_bytes(int(usual_peak_bytes))}. "
            "To stay inside the limit, train with MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 "
            "MALLOC_TOP_PAD_=0 in the environment (freed memory goes back at once, which is slower), or leave more room in "
            "the budget. The process that ran this search was left with these settings (mallopt)."
        )

    def leave(self) -> None:
        _set_thresholds(self._after)


def _set_thresholds(values: dict[int, int]) -> None:
    libc = ctypes.CDLL(None)
    for parameter, value in values.items():
        libc.mallopt(parameter, value)


def free_mkl_buffers() -> None:
    """Have Intel MKL give back what it keeps; nothing where torch is built without it.

    MKL keeps the buffers of matrix products, of several MiB each and others for other shapes, so that what a size takes
    would depend on the sizes that were tried before it.
    """
    free_buffers = _mkl_free_buffers()
    if free_buffers is not None:
        free_buffers()


@cache
def _mkl_free_buffers() -> Callable[[], object] | None:
    """The function `mkl_free_buffers` of oneMKL, which has its internal name in torch's own library."""
    if sys.platform != "linux" or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library.mkl_serv_free_buffers
    except (OSError, AttributeError):
        return None


def _has_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _can_reset_peak() -> bool:
    """Whether the kernel lets a process reset its resident peak; some sandboxes do not offer the file."""
    try:
        _reset_peak()
    except OSError:
        return False
    return True


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets VmHWM to the present resident set


@contextmanager
def _sampled(watch: Watch) -> Iterator[None]:
    """Follow the resident set from a thread. A peak shorter than the interval can be missed."""
    process, stopped = psutil.Process(), threading.Event()

    def follow() -> None:
        while not stopped.is_set():
            watch.peak_bytes = max(watch.peak_bytes, int(process.memory_info().rss))
            time.sleep(_SAMPLING_S)

    watch.peak_bytes = int(process.memory_info().rss)
    thread = threading.Thread(target=follow, name="autoaccum-resident-set", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        watch.peak_bytes = max(watch.peak_bytes, int(process.memory_info().rss))


def host_allocator() -> str:
    """The C library's allocator in words, with the settings that change peaks."""
    library, number = platform.libc_ver()
    settings = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(("MALLOC_", "LD_PRELOAD"))]
    known = f"{library} {number}" if library else f"that of {platform.system()}"
    capped = "allocations can be capped" if sys.platform == "linux" else "allocations cannot be capped here"
    return ", ".join([known, capped, *settings])


CPU_ROWS = (
    ErrorRow(
        Verdict.TOO_LARGE, RuntimeError, ("defaultcpuallocator: can't allocate memory",), "c10/core/impl/alloc_cpu.cpp"
    ),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("defaultcpuallocator: not enough memory",), "alloc_cpu.cpp on Windows"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("$ torch: not enough memory: you tried to",), "aten/src/TH/THGeneral.cpp"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("bad allocation",), "std::bad_alloc as Microsoft's library words it"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("std::bad_alloc",), "C++ allocations below the Python bindings"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cannot allocate memory",), "strerror(ENOMEM) of mmap and shm_open"),
    ErrorRow(
        Verdict.UNCLEAR,
        RuntimeError,
        ("could not create a primitive",),
        "oneDNN under RLIMIT_DATA, seen with torch 2.13",
    ),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("could not create a memory",), "oneDNN memory objects"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("could not initialize a memory",), "oneDNN memory objects"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("could not execute a primitive",), "oneDNN scratch memory"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("can't start new thread",), "a thread's stack is a mapping like any other"),
)
