"""Writes a trace of what runs: every storage that comes and goes, in which phase, and what it holds.

Knows nothing of models, devices or allocators.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoaccum.devices.virtual import StorageTracker, dense_parts, eager_only
from autoaccum.prediction.trace import Kind, Mark, Trace, kinds_by_life, with_frees_in_order, with_sums_in_place
from autoaccum.records import Phase
from autoaccum.window import Progress


@final
class Recorder:
    """Writes a trace: every storage that comes and goes while `recording`, and what it is told they hold.

    Example:
        >>> recorder = Recorder()
        >>> with recorder.recording():
        ...     doubled = torch.ones(256) * 2
        >>> recorder.trace(rows=1).sizes
        (1024, 1024)
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self.window = 0
        self._tracker = StorageTracker(observer=self)
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._kinds: dict[int, Kind] = {}
        self._marks: list[Mark] = []
        self._flops: dict[Phase, int] = {}
        self._sums: dict[int, int] = {}  # event that makes the sum of two gradients -> block of the first of them
        self._block_of: dict[int, int] = {}
        self.listeners: list[Listener] = []
        self.notes: set[frozenset[str]] = set()  # of those who listen

    def allocated(self, key: int, num_bytes: int) -> None:
        """See `Observer`."""
        self._note_phase()
        self._block_of[key] = len(self._sizes)
        self._events.append(len(self._sizes))
        self._sizes.append(num_bytes)

    def freed(self, key: int) -> None:
        """See `Observer`."""
        self._note_phase()
        block = self._block_of.pop(key, None)
        if block is not None:
            self._events.append(~block)

    def _note_phase(self) -> None:
        now = (self.progress.phase, self.window, self.progress.index)
        if not self._marks or self._marks[-1][1:] != now:
            self._marks.append(Mark(len(self._events), *now))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow what runs inside. The garbage collector waits: when it runs would differ between two traces."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with eager_only(), self._tracker, _Operations(self._ran):
                yield
        finally:
            self._tracker.close()
            if was_enabled:
                gc.enable()

    def _ran(self, operation: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase = self.progress.phase
        formula = flop_registry.get(operation.overloadpacket)
        if formula is not None:
            self._flops[phase] = self._flops.get(phase, 0) + int(formula(*args, **kwargs, out_val=out))
        if operation is torch.ops.aten.add.Tensor and phase == "backward" and not torch.is_grad_enabled():
            self._note_sum(args[0], out)
        for listener in self.listeners:
            listener(operation, args, out)

    def _note_sum(self, first: Any, out: Tensor) -> None:
        blocks = [self._block_of.get(part.untyped_storage()._cdata) for part in (first, out) if isinstance(part, Tensor)]
        if len(blocks) == 2 and None not in blocks and self._events[-1] == blocks[1] and first.shape == out.shape:
            self._sums[len(self._events) - 1] = int(blocks[0] or 0)

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Tell this listener of every operation that runs inside, after it ran."""
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    def paused(self) -> AbstractContextManager[None]:
        """Follow nothing inside: what runs there runs on the host."""
        return self._tracker.paused()

    def hold(self, tensors: Sequence[Tensor], kind: Kind) -> None:
        """These tensors are there, and this is what they hold."""
        self._tracker.count(tensors)
        for tensor in tensors:
            for part in dense_parts(tensor):
                block = self._block_of.get(part.untyped_storage()._cdata)
                if block is not None:
                    self._kinds.setdefault(block, kind)

    def workspace(self, num_bytes: int, *, kept: bool) -> None:
        """A library takes so much for itself, for ever or for this operation only."""
        key = -len(self._sizes) - 1
        self.allocated(key, num_bytes)
        self._kinds[len(self._sizes) - 1] = "workspaces"
        if not kept:
            self.freed(key)

    def trace(self, rows: int, *, sums_in_place: bool = False) -> Trace:
        """What was recorded. Blocks nobody named are activations when they outlive the forward pass that made them.

        Args:
            rows: Of each micro-batch.
            sums_in_place: The backward pass adds the gradients of a tensor that was used twice in place, where nothing else
                holds the first one (`accumulate` in torch/csrc/autograd/input_buffer.cpp). Under any dispatch mode, as while
                recording and on a virtual device, it does not.
        """
        kinds = kinds_by_life(self._events, self._marks, len(self._sizes)) | self._kinds
        trace = Trace(
            rows=rows,
            events=tuple(self._events),
            sizes=tuple(self._sizes),
            kinds=tuple(kinds[block] for block in range(len(self._sizes))),
            marks=tuple(self._marks),
            flops=dict(self._flops),
        )
        return with_frees_in_order(with_sums_in_place(trace, self._sums) if sums_in_place else trace)


Listener = Callable[[Any, Any, Any], None]  # operation, arguments, result


@final
class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every operation after it ran. `FlopCounterMode` also hangs hooks on modules, which keep gradients alive."""

    def __init__(self, ran: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._ran(func, args, kwargs, out)
        return out
