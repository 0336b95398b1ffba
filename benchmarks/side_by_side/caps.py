"""A real memory cap on this process: `RLIMIT_DATA` on the host, a memory fraction on a GPU."""

from __future__ import annotations

import ctypes
import gc
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from autoaccum.devices.cpu import free_mkl_buffers

# glibc's default thresholds move while a process runs, so that the memory which one size takes depends on what ran before.
# These are the ones that autoaccum sets while it searches, and that it tells its user to train with; here every process has
# them from its start, for all tools alike.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}  # malloc.h

_GROWN_BYTES = 64 * 2**20  # more than the Python objects of any tool here take


def grow_arenas() -> list[bytes]:
    """Take memory for Python's small objects beforehand, so that what the cap counts from then on are tensors, as on a GPU.

    Python takes objects of up to 512 bytes from arenas of 1 MiB, which are given back when all of an arena is free. Without
    this, what one tool's own objects take moved the limit by a few rows.

    Returns:
        One object for each page of the arenas, to be held.
    """
    objects = [bytes(479) for _ in range(_GROWN_BYTES // 512)]
    return objects[::7]


@dataclass(frozen=True)
class Cap:
    """What the processes of one benchmark may hold.

    Attributes:
        floor_bytes: What the process held that they are all copies of; on a GPU they begin with nothing.
    """

    device: torch.device
    floor_bytes: int

    @staticmethod
    def from_here(device: torch.device) -> Cap:
        """Counted from what this process holds now."""
        release(device)
        return Cap(device, 0 if device.type == "cuda" else _data_bytes())

    @contextmanager
    def allows(self, room_bytes: int) -> Iterator[None]:
        """While inside, this process is refused what goes beyond so much above the floor."""
        limit_bytes = self.limit_bytes(room_bytes)
        release(self.device)
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(limit_bytes / total, self.device)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def limit_bytes(self, room_bytes: int) -> int:
        """What this process may hold in all."""
        return self.floor_bytes + room_bytes


def release(device: torch.device) -> None:
    """Give back what nothing holds any longer, and set the allocator as at the start: autoaccum leaves it otherwise."""
    gc.collect()
    free_mkl_buffers()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif _has_glibc():
        libc = ctypes.CDLL(None)
        for name, value in ALLOCATOR.items():
            libc.mallopt(_MALLOPT[name], int(value))
        libc.malloc_trim(0)


def _data_bytes() -> int:
    """What `RLIMIT_DATA` counts: private writable mappings (proc(5), VmData)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise LookupError("/proc/self/status has no VmData")


def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
