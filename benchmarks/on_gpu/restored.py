"""After a search, whatever its end: every bit of the state, and every byte of the allocator's, as before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import autoaccum
from autoaccum.devices.base import AbstractDevice
from autoaccum.workload import Workload

from .common import MIB, SMALLER_GPT, counters, emptied, is_cuda, on_device
from .failures import left

ROOM_BYTES = 2048 * MIB
TARGET_BATCH = 48


class BrokenError(Exception):
    """What a user's code raises."""


def run(device: AbstractDevice, target: str = SMALLER_GPT, room_bytes: int = ROOM_BYTES) -> Iterator[dict[str, Any]]:
    """One row for each way in which a search can end."""
    emptied(device)
    workload = on_device(target, device)
    model = workload.module
    optimizer = torch.optim.AdamW(model.parameters())
    train(workload, device, optimizer)  # its state is there, its gradients are, and what libraries keep
    resident = [*model.parameters(), *model.buffers(), *gradients(model), *state(optimizer)]
    for name, search in ENDS.items():
        before, bits = counters(device, resident), digest(model, optimizer, device)
        ended = search(workload, optimizer, device, device.held_bytes(resident) + room_bytes)
        after = counters(device, resident)
        same_bits = digest(model, optimizer, device) == bits
        yield {
            "case": name,
            "ended": ended,
            "left": left(before, after),
            "same_bits": same_bits,
            "ok": same_bits and before == after,
        }


def train(workload: Workload, device: AbstractDevice, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer step, and the gradients of a further pass."""
    for _ in range(2):
        workload.loss(device.place(workload.source.take(2))).backward()
        optimizer.step()


def probe(workload: Workload, optimizer: torch.optim.Optimizer, device: AbstractDevice, budget: int) -> str:
    """The exact limit, which runs out of memory."""
    return str(autoaccum.probe(workload.module, sample(workload), optimizer=optimizer, budget=budget, device=device))


def tune(workload: Workload, optimizer: torch.optim.Optimizer, device: AbstractDevice, budget: int) -> str:
    """A plan with the exact levers."""
    plan = autoaccum.autotune(
        workload.module,
        sample(workload),
        TARGET_BATCH,
        optimizer=optimizer,
        budget=budget,
        device=device,
        time_budget_s=20.0,
    )
    return f"{plan.accumulation_steps} micro-batches of at most {plan.micro_batch}"


def interrupted(workload: Workload, optimizer: torch.optim.Optimizer, device: AbstractDevice, budget: int) -> str:
    """An error of the user's own, in the backward pass of the fifth micro-batch."""
    calls = []

    def breaking(model: nn.Module, batch: Any) -> Tensor:
        loss = model(**batch)["loss"]
        calls.append(None)
        if len(calls) >= 5:
            loss.register_hook(_broken)
        return loss  # type: ignore[no-any-return]

    try:
        autoaccum.probe(
            workload.module,
            sample(workload),
            training_step=breaking,
            optimizer=optimizer,
            budget=budget,
            device=device,
        )
    except BrokenError:
        return "the user's error came out"
    return "the user's error was lost"


def _broken(gradient: Tensor) -> None:
    raise BrokenError


ENDS: dict[str, Callable[[Workload, torch.optim.Optimizer, AbstractDevice, int], str]] = {
    "probe": probe,
    "an error of the user's": interrupted,
    "autotune, exact levers": tune,
}


def sample(workload: Workload) -> Any:
    """Some rows on the host."""
    return workload.source.take(4)


def gradients(model: nn.Module) -> list[Tensor]:
    """Those that are there."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer keeps."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, device: AbstractDevice) -> str:
    """One number for every bit of weights, buffers, gradients, optimizer state and generators."""
    random = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device.torch_device)] if is_cuda(device) else [])]
    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers(), *gradients(model), *state(optimizer), *random):
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
