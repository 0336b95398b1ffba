"""A small model, a batch for it, and what a check of them says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from autoaccum import Accumulator
from autoaccum.records import CheckResult

ROWS = 20
IGNORED = -100


def build(*between: nn.Module) -> nn.Sequential:
    """Six inputs, three outputs, and something between two layers; the same each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def checked(model: nn.Module, data: Any = None, *, micro_batch: int = 4, **options: Any) -> CheckResult:
    if "training_step" not in options:
        options.setdefault("loss_fn", nn.CrossEntropyLoss())
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=micro_batch, **options)
    return acc.check(batch() if data is None else data)


def one_reason(result: CheckResult) -> str:
    """The only reason of a check that was not exact."""
    assert not result.exact
    (reason,) = result.reasons
    return reason


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, values: Tensor) -> Tensor:
        return self.run(values)
