"""A GPU of any size, made of host memory: counts the live storages and runs out at a capacity.

For tests, for CI and for trying a budget that is not at hand. It counts what tensors hold, each storage rounded as the
caching allocator rounds it; it has no segments, no context and no library workspaces.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from autoaccum.batches.structure import cloned, tensors_in
from autoaccum.devices.base import AbstractDevice, Holder, Watch
from autoaccum.errors import InvalidRequestError
from autoaccum.shards import local_part
from autoaccum.units import format_bytes, parse_size, shown

_BLOCK_BYTES = 512  # kMinBlockSize in c10/core/AllocatorConfig.h: every request is rounded up to it


class Observer(Protocol):
    """Told of every storage that comes and goes, in order. `key` names a storage while it lives."""

    def allocated(self, key: int, num_bytes: int) -> None:
        """A storage of so many bytes, before any rounding."""

    def freed(self, key: int) -> None:
        """Its last reference is gone, or it is about to get another size."""


@final
class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that are alive, and raises in the very operation that takes them above the capacity.

    A storage is counted from the first operation that makes or touches it until its last reference dies. Memory that a
    kernel uses inside is not seen. Works on fake tensors as on real ones.

    Args:
        capacity_bytes: None: no limit.
        observer: Told of every storage; None: nobody.

    Attributes:
        live_bytes: Held by the storages now alive.
        peak_bytes: The most that was held at once.
    """

    def __init__(self, capacity_bytes: int | None = None, observer: Observer | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity_bytes, self._observer = capacity_bytes, observer
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        self._emptied: set[int] = set()  # storages that get another size without an operation
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        self.count(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))
        out = func(*args, **kwargs)
        self.count(leaf for leaf in tree_iter((out, args)) if isinstance(leaf, Tensor))  # args: resize_ and set_
        if func.namespace == "fsdp":  # whole parameters are written by its own operations, and emptied by none
            written = tree_iter(kwargs.get("out", ()))
            self._emptied.update(leaf.untyped_storage()._cdata for leaf in written if isinstance(leaf, Tensor))
        return out

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors from now on.

        Raises:
            torch.OutOfMemoryError: When they take the total above the capacity.
        """
        for tensor in tensors:
            for part in dense_parts(tensor):
                self._count_storage(part.untyped_storage())

    def close(self) -> None:
        """Stop following: storages that live on, such as those of parameters, let go of the tracker."""
        while self._finalizers:  # a collection may take entries out in between
            self._finalizers.popitem()[1].detach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing while inside: what runs there runs on the host."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, _rounded(storage.nbytes())
        known = self._sizes.get(key)
        if known == size:
            return
        if known is None:
            self._finalizers[key] = weakref.finalize(storage, self._forget, key)
            self._finalizers[key].atexit = False
        grown = size - (known or 0)
        self._sizes[key] = size
        if self._observer is not None:
            if known is not None:
                self._observer.freed(key)
            self._observer.allocated(key, storage.nbytes())
        self.live_bytes += grown
        if grown > 0 and self._emptied and self.live_bytes > self.peak_bytes:
            self._look_again()
        if self.capacity_bytes is not None and grown > 0 and self.live_bytes > self.capacity_bytes:
            raise torch.OutOfMemoryError(
                f"virtual device out of memory. Tried to allocate {format_bytes(grown)}. The device has a capacity of "
                f"{format_bytes(self.capacity_bytes)}, of which {format_bytes(self.live_bytes - grown)} is in use."
            )
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _look_again(self) -> None:
        """Storages that were emptied in place; the next operation that touches them counts them again."""
        for key in self._emptied & self._finalizers.keys():
            found = self._finalizers[key].peek()
            if found is not None and found[0].nbytes() == 0 and self._sizes[key]:
                self.live_bytes -= self._sizes[key]
                self._sizes[key] = 0
                if self._observer is not None:
                    self._observer.freed(key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)
        self._finalizers.pop(key, None)
        self._emptied.discard(key)
        if self._observer is not None:
            self._observer.freed(key)


def eager_only() -> AbstractContextManager[Any]:
    """Compiled models run eagerly inside.

    Under a dispatch mode Dynamo marks the code it meets as never to be compiled, and keeps that mark afterwards.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the values; a sparse tensor has no storage of its own, a distributed one a part of it here."""
    tensor = local_part(tensor)
    if tensor.layout == torch.strided:
        yield tensor
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


@final
class VirtualDevice(AbstractDevice):
    """A device of a chosen size on which any CPU model runs and really runs out of memory.

    Counts live storages, parameters included, each rounded up to 512 bytes. A batch stays on the host, as a loader's
    does; each micro-batch is copied to the device when its turn comes.

    Args:
        capacity_bytes: Its total memory: bytes, or text such as "8GiB".

    Example:
        >>> VirtualDevice("2GiB").total_bytes()
        2147483648
    """

    def __init__(self, capacity_bytes: int | str) -> None:
        size = parse_size(capacity_bytes, "capacity_bytes")
        if not isinstance(size, int):
            raise InvalidRequestError(f"capacity_bytes={shown(capacity_bytes)} is a share; expected a size such as '8GiB'.")
        self._capacity_bytes = size
        self._limit_bytes = size
        self._tracker: StorageTracker | None = None
        self.name = f"virtual:{format_bytes(size)}"
        self.torch_device = torch.device("cpu")

    def description(self) -> str:
        return f"virtual device of {format_bytes(self._capacity_bytes)} in host memory"

    def total_bytes(self) -> int:
        return self._capacity_bytes

    def free_bytes(self) -> int:
        return self._capacity_bytes

    def reserve_bytes(self) -> int:
        return 0

    def held_bytes(self, resident: Sequence[Tensor]) -> int:
        tracker = StorageTracker()
        tracker.count(resident)
        tracker.close()
        return tracker.live_bytes

    def holders(self) -> tuple[Holder, ...]:
        return ()

    @contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        before = self._limit_bytes
        self._limit_bytes = min(before, budget_bytes)
        try:
            yield
        finally:
            self._limit_bytes = before

    @contextmanager
    def watched(self, resident: Sequence[Tensor]) -> Iterator[Watch]:
        watch, tracker = Watch(), StorageTracker(self._limit_bytes)
        try:
            tracker.count(resident)
            self._tracker = tracker
            with eager_only(), tracker:
                yield watch
        finally:
            self._tracker = None
            tracker.close()
            watch.peak_bytes = watch.peak_allocated_bytes = tracker.peak_bytes

    def release(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def off_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._tracker is None else self._tracker.paused()

    def place(self, batch: Any) -> Any:
        if self._tracker is None:
            return cloned(batch)
        with self._tracker.paused():  # the batch it is cut from stays on the host and must not be counted
            placed = cloned(batch)
        self._tracker.count(tensors_in(placed))
        return placed
