"""Read by the type checker only: the public names as a user writes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoaccum


def step(model: nn.Module, batch: Tensor) -> Tensor:
    """A training step of the user's own."""
    loss: Tensor = model(batch).mean()
    return loss


def uses() -> None:
    """Every call type-checks, and every field has the type that the documentation says."""
    model = nn.Linear(2, 2)
    plan: autoaccum.Plan = autoaccum.autotune(
        model, torch.randn(2, 2), 8, training_step=step, budget="80%", weight=autoaccum.tokens("labels")
    )
    sizes: tuple[int, ...] = plan.micro_batch_sizes
    peak: int | None = plan.measured_peak_bytes
    result: autoaccum.ProbeResult = autoaccum.probe(model, lambda count: torch.randn(count, 2), device="cpu")
    largest: int = result.max_micro_batch
    workload = autoaccum.Workload(model, torch.randn(2, 2), optimizer=torch.optim.SGD)
    device = autoaccum.VirtualDevice(8 * 2**30)
    again: autoaccum.Plan = autoaccum.Plan.from_json(plan.to_json())
    print(sizes, peak, largest, workload, device, again)
