"""What every lever is: a thing that can be turned for memory or speed, and turned back without a trace.

To add a lever: write one final class in this folder, its field in `records.Levers`, its line in `levers/__init__.py`; the
contract suite in tests/levers then runs over it. A lever knows nothing of budgets, trials or plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.records import Levers


def _unnoted(num_bytes: int) -> None:
    """Nobody counts."""


class Subject(NamedTuple):
    """What levers are turned on.

    Attributes:
        module: The model, without wrappers of data parallelism.
        device: Whose kernels run. On fake tensors in host memory, the GPU that they stand for.
        optimizer: None where none is at hand; then what concerns it is left alone.
        off_device: What is made inside of it lies in host memory and does not count on the device.
        note_host_bytes: Is told how many bytes lie in host memory, whenever more are moved there.
        is_host: Host memory is what counts, so that nothing is won by moving there.
        is_here: The device can be asked what it supports; of one that is not here, everything is believed.
        worth_moving_bytes: Smaller tensors stay on the device: moving them costs more time than they take room.
    """

    module: nn.Module
    device: torch.device
    optimizer: Optimizer | None = None
    off_device: Callable[[], AbstractContextManager[None]] = nullcontext
    note_host_bytes: Callable[[int], None] = _unnoted
    is_host: bool = False
    is_here: bool = True
    worth_moving_bytes: int = 64 * 2**10


class AbstractLever(ABC):
    """One thing to turn.

    Attributes:
        name: Its field in `records.Levers`.
        levels: Its positions; the first one is how the caller has it.
        keeps_numerics: Turning it does not change what is learned, but for rounding.
    """

    name: ClassVar[str]
    levels: ClassVar[tuple[str, ...]]
    keeps_numerics: ClassVar[bool] = True

    @abstractmethod
    def reason_against(self, level: str, subject: Subject) -> str | None:
        """Why this level cannot be used here, as a sentence without its full stop; None where it can."""

    @abstractmethod
    def applied(self, levers: Levers, subject: Subject) -> AbstractContextManager[None]:
        """Turn it while inside. On the way out everything is as it was: module tree, hooks, keys and values."""
