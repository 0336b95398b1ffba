"""A trial of a process on its own knows no other ranks."""

from __future__ import annotations

import torch

from autoaccum.company import Company
from autoaccum.window import Progress


def test_alone_nothing_is_added() -> None:
    """Alone, a rank runs its own micro-batches, each with its rows as weight, where they are."""
    company = Company(num_micro_batches=5)
    rows = [torch.zeros(3), torch.zeros(2)]
    assert company.padded(rows, (3, 2)) == (rows, [3.0, 2.0])
    assert company.placing(torch.neg, Progress(), 2) is torch.neg


def test_alone_nothing_is_exchanged() -> None:
    """Alone, there is nobody to be called off by, and no memory for reduced gradients."""
    company = Company()
    with company.on_trial():
        company.settle()
    assert not company.was_called_off and company.reducing() is None
