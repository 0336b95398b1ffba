"""What the sections share: a device in a known state, its counters, and models on it."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoaccum.devices.base import AbstractDevice
from autoaccum.records import Trial
from autoaccum.targets import load_target
from autoaccum.workload import Workload

MIB, GIB = 2**20, 2**30
GPT = "demo:gpt?layers=8&width=512&heads=8&seq_len=512"
SMALLER_GPT = "demo:gpt?layers=4&width=512&heads=8&seq_len=256"  # where many settings are traced
RESNET = "demo:resnet?image=128&width=64&blocks=2"


class Counters(NamedTuple):
    """Bytes in tensors, and bytes that the allocator has from the device."""

    allocated_bytes: int
    reserved_bytes: int


def is_cuda(device: AbstractDevice) -> bool:
    """Whether torch's caching allocator owns the memory."""
    return device.torch_device.type == "cuda"


def emptied(device: AbstractDevice) -> None:
    """Give back what no tensor holds, the workspaces of cuBLAS included, so that an allocator begins as in a new process."""
    gc.collect()
    if is_cuda(device):
        torch._C._cuda_clearCublasWorkspaces()
    device.release()


def counters(device: AbstractDevice, resident: list[Tensor]) -> Counters:
    """What is held now, after a collection; `resident` is all that a virtual device counts."""
    gc.collect()
    device.release()
    if not is_cuda(device):
        held = device.held_bytes(resident)
        return Counters(held, held)
    place = device.torch_device
    return Counters(torch.cuda.memory_allocated(place), torch.cuda.memory_reserved(place))


def on_device(target: str, device: AbstractDevice) -> Workload:
    """A built-in target with its model on the device."""
    torch.manual_seed(0)
    workload = load_target(target)
    workload.move_to(device.torch_device)
    return workload


def outcome_of(trial: Trial) -> dict[str, Any]:
    """A trial in few words."""
    outcome = trial.outcome
    phase = getattr(outcome, "phase", None)
    kind = getattr(outcome, "cause", None) or getattr(outcome, "bound", "fits")
    return {"rows": trial.candidate.micro_batch, "outcome": kind, "phase": phase}
