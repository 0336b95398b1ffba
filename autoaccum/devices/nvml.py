"""What NVIDIA's management library knows: who holds memory on a device, and the driver's version.

Every question has "not known" as an answer: in a container, on MIG or without the driver NVML often cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pynvml

from autoaccum.devices.base import Holder


def holders(uuid: str) -> tuple[Holder, ...]:
    """Every process with memory on the device of this UUID, this one included, the largest first; empty if not known."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handle = _handle(uuid)
        processes = [*_asked(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)]
        processes += _asked(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
    held = {process.pid: process.usedGpuMemory for process in processes}
    found = [Holder(pid, _process_name(pid), None if size is None else int(size)) for pid, size in held.items()]
    return tuple(sorted(found, key=lambda holder: -(holder.held_bytes or 0)))


def driver_version() -> str | None:
    """The version of the NVIDIA driver, None where there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _asked(question: Callable[[object], list[Any]], handle: object) -> list[Any]:
    """The answer, or nothing where this device cannot tell."""
    try:
        return question(handle)
    except pynvml.NVMLError:
        return []


def _handle(uuid: str) -> object:
    """By UUID, so that CUDA_VISIBLE_DEVICES does not matter; a MIG instance has a UUID of its own kind."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # of another container or user, or gone
        return "?"
