"""What this machine offers: devices, memory, driver, allocator, and who else holds memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version

import torch

from autoaccum.devices.accelerator import MpsDevice, XpuDevice
from autoaccum.devices.base import AbstractDevice
from autoaccum.devices.cpu import CpuDevice, host_allocator
from autoaccum.devices.cuda import CudaDevice, allocator_in_words, toolkit
from autoaccum.devices.limits import cgroup_limit_bytes
from autoaccum.prediction.fake_tensors import self_test
from autoaccum.units import format_bytes

_HOLDERS_SHOWN = 5


def examine() -> Iterator[str]:
    """Lines of text, as soon as each is known."""
    yield f"autoaccum {version('autoaccum')}, torch {torch.__version__}, Python {platform.python_version()}"
    yield f"system: {platform.platform()}"
    cpu = CpuDevice()
    yield from _device_lines(cpu)
    limit = cgroup_limit_bytes()
    yield f"  control group limit: {format_bytes(limit) if limit else 'none'}"
    yield f"  allocator: {host_allocator()}"
    if torch.cuda.is_available():
        yield f"CUDA: {toolkit()}"
        for index in range(torch.cuda.device_count()):
            device = CudaDevice(index)
            yield from _device_lines(device)
            yield f"  context: {format_bytes(device.context_bytes())}"
            yield f"  allocator: {torch.cuda.get_allocator_backend()}, {allocator_in_words(os.environ)}"
    else:
        built = torch.version.cuda or torch.version.hip
        yield f"CUDA: no device ({'torch is built for ' + built if built else 'torch is built without CUDA'})"
        yield f"  allocator settings in the environment: {allocator_in_words(os.environ)}"
    wrong = self_test()
    yield f"predictions: {'fake tensors work' if wrong is None else 'fake tensors of this torch do not work: ' + wrong}"
    if torch.xpu.is_available():
        for index in range(torch.xpu.device_count()):
            yield from _device_lines(XpuDevice(index))
    if torch.backends.mps.is_available():
        yield from _device_lines(MpsDevice())


def _device_lines(device: AbstractDevice) -> Iterator[str]:
    yield f"{device.name}: {device.description()}"
    total, free, held = device.total_bytes(), device.free_bytes(), device.held_bytes(())
    yield f"  memory: {format_bytes(total)} in all, {format_bytes(free)} free, {format_bytes(held)} held by this process"
    for holder in device.holders()[:_HOLDERS_SHOWN]:
        yield f"  also held: {format_bytes(holder.held_bytes)} by {holder.name} (pid {holder.pid})"
