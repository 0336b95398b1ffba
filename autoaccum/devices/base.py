"""What autoaccum asks of a device, and how an error is recognised as running out of memory.

To add a device: write one final class in this folder, give it its table of errors, list both in `devices/__init__.py`;
the contract suite in tests/devices then runs over it. A device knows nothing of micro-batches, trials or plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from autoaccum.errors import InvalidRequestError

Unit = Literal["storages", "pages", "segments"]


class Verdict(Enum):
    """What an error says about the size that was tried."""

    TOO_LARGE = "memory ran out"
    UNCLEAR = "often memory, not always: believed only when a smaller size runs"
    CEILING = "a limit of an index or a launch: larger sizes fail as well"
    HOST = "the loader or the host's memory gave out: larger sizes fail as well"
    FLOOR = "too few rows to run at all: smaller sizes fail as well"
    DEAD = "the device context is lost: nothing more can be run in this process"


class ErrorRow(NamedTuple):
    """One way an error shows: its class, the texts that must all be in it (lower case), and where that is known from.

    The class `Exception` stands for itself and for a library's own classes, but for none that Python derives from it.
    """

    verdict: Verdict
    error: type[BaseException]
    texts: tuple[str, ...]
    source: str


class Holder(NamedTuple):
    """A process that holds memory on a device."""

    pid: int
    name: str
    held_bytes: int | None


class Watch:
    """What was measured between entering and leaving `watched`, in bytes. `peak_bytes` counts against the budget."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.peak_allocated_bytes: int | None = None
        self.peak_reserved_bytes: int | None = None
        self.allocator_retries = 0


class AbstractDevice(ABC):
    """A place that holds memory, of which this process may use a part.

    Attributes:
        name: As the user writes it: "cpu", "cuda:0", "virtual:8.00 GiB".
        torch_device: Where the tensors are.
        cautious: Running far past the budget is dangerous here, so the search must approach it slowly.
        is_host: What lies in host memory counts against the budget.
        unit: What memory is handed out in, for predictions: "storages" one by one, "pages" of the host, or "segments" of
            torch's caching allocator.
    """

    name: str
    torch_device: torch.device
    cautious: ClassVar[bool] = False
    is_host: ClassVar[bool] = False
    unit: ClassVar[Unit] = "storages"

    @abstractmethod
    def description(self) -> str:
        """The hardware in words."""

    @abstractmethod
    def total_bytes(self) -> int:
        """All the memory there is for one process."""

    @abstractmethod
    def free_bytes(self) -> int:
        """What this process could still take, beyond what it holds."""

    @abstractmethod
    def reserve_bytes(self) -> int:
        """What a budget chosen by autoaccum leaves free, for fragmentation and for others."""

    @abstractmethod
    def held_bytes(self, resident: Sequence[Tensor]) -> int:
        """What counts against the budget now. `resident`: the model's and the optimizer's tensors."""

    @abstractmethod
    def holders(self) -> tuple[Holder, ...]:
        """Other processes that hold memory here, the largest first; empty where that cannot be seen."""

    @abstractmethod
    def limited_to(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Make allocations beyond the budget fail while inside, as far as the platform can; the old limit comes back."""

    @abstractmethod
    def watched(self, resident: Sequence[Tensor]) -> AbstractContextManager[Watch]:
        """Measure the peak while inside."""

    @abstractmethod
    def release(self) -> None:
        """Give memory that no tensor uses back to the system."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued has run."""

    @abstractmethod
    def place(self, batch: Any) -> Any:
        """A micro-batch on this device, as a training loop would put it there."""

    def as_limited(self) -> AbstractDevice:
        """The device of which all that this process may have is asked: where it has a limit of its own, as that counts."""
        return self

    def limit_in_words(self) -> str:
        """The limit of this process's own, empty where it has none."""
        return ""

    def driver(self) -> str:
        """The version of the device's driver, empty where there is none."""
        return ""

    def off_device(self) -> AbstractContextManager[None]:
        """What is made inside lies in host memory and does not count on this device."""
        return nullcontext()

    @contextmanager
    def steadied(self) -> Iterator[Steadiness]:
        """Make peaks repeatable while inside."""
        yield Steadiness()


class Steadiness:
    """What a device does to make its peaks repeatable. Here: nothing needs doing."""

    def settle(self, *, peak_bytes: int, held_bytes: int, budget_bytes: int | None) -> str | None:
        """Choose the settings that training will run under, now and after the search; says what is left behind.

        Args:
            peak_bytes: Measured under the steady settings at the size that training will use.
            held_bytes: Before the first trial.
            budget_bytes: What training may hold; None where an allocation failed before any budget was reached.
        """
        return None


def gpu_reserve_bytes(total_bytes: int) -> int:
    """What a budget chosen by autoaccum leaves free on a GPU: a margin for fragmentation, and for a display."""
    return max(total_bytes // 50, 256 * 2**20)


# Errors that no single device owns.
COMMON_ROWS = (
    ErrorRow(Verdict.TOO_LARGE, torch.OutOfMemoryError, (), "torch.OutOfMemoryError, raised by every torch allocator"),
    ErrorRow(Verdict.TOO_LARGE, MemoryError, (), "Python and NumPy; pybind11 turns std::bad_alloc into it"),
    ErrorRow(
        Verdict.FLOOR,
        ValueError,
        ("expected more than 1 value per channel when training",),
        "torch.nn.functional.batch_norm; ultralytics PR #26224",
    ),
    ErrorRow(
        Verdict.FLOOR,
        InvalidRequestError,
        ("the loss is nan with a micro-batch of one row",),
        "autoaccum.probing; torch.std and torch.var of a single row are NaN",
    ),
    ErrorRow(
        Verdict.HOST,
        RuntimeError,
        ("dataloader worker", "killed by signal"),
        "torch/utils/data/_utils/signal_handling.py",
    ),
    ErrorRow(Verdict.HOST, RuntimeError, ("dataloader worker", "exited unexpectedly"), "torch/utils/data/dataloader.py"),
    ErrorRow(Verdict.HOST, RuntimeError, ("no space left on device (28)",), "shared memory of the loader, shm_open"),
    ErrorRow(Verdict.HOST, OSError, ("[errno 12]",), "ENOMEM: the host refuses a process, a mapping or a file"),
    ErrorRow(
        Verdict.CEILING,
        RuntimeError,
        ("more than int_max elements",),
        "torch.nonzero and upsampling kernels; torch-max-mem 0.1.6",
    ),
    ErrorRow(Verdict.CEILING, RuntimeError, ("32-bit index math",), "ATen canUse32BitIndexMath checks"),
    ErrorRow(Verdict.CEILING, RuntimeError, ("canuse32bitindexmath",), "ATen canUse32BitIndexMath checks"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("out of memory",), "a back end whose wording is not in a table yet"),
)


def recognise(error: BaseException, rows: Sequence[ErrorRow], handled: Sequence[BaseException] = ()) -> ErrorRow | None:
    """The first row that fits the error or one of the errors behind it; None for an error of the user's own.

    A lost context wins over everything else, a certain row over an unclear one. Errors behind count, because code that
    catches an out-of-memory error and raises its own was still out of memory. `handled` are errors that were there before:
    a search may be started in the handler of an out-of-memory error, which then stands behind every later one.
    """
    if not isinstance(error, Exception):
        return None  # Ctrl-C while an out-of-memory error is handled is still Ctrl-C
    known = {id(earlier) for earlier in handled}
    texts = [(behind, str(behind).lower()) for behind in chain_of(error) if id(behind) not in known]
    found = [
        row
        for row in rows
        if any(_is_of(behind, row.error) and all(part in text for part in row.texts) for behind, text in texts)
    ]
    return min(found, key=lambda row: _PRECEDENCE.index(row.verdict), default=None)


def _is_of(error: BaseException, wanted: type[BaseException]) -> bool:
    """Whether the error is of the class that a row asks for."""
    if wanted is not Exception:
        return isinstance(error, wanted)
    # A ValueError about memory is the user's own, and a RuntimeError has rows of its own.
    of_python = {known for known in type(error).__mro__ if known.__module__ == "builtins"}
    return of_python == {Exception, BaseException, object}


_PRECEDENCE = (Verdict.DEAD, Verdict.TOO_LARGE, Verdict.CEILING, Verdict.HOST, Verdict.FLOOR, Verdict.UNCLEAR)


def chain_of(error: BaseException) -> list[BaseException]:
    """The error, what it came from, what it was raised in the handling of, and the members of groups; each once."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is None or any(current is known for known in found):
            continue
        found.append(current)
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
    return found
