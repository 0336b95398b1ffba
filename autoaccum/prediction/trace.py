"""What one optimizer step allocates and frees, in order: recorded on fake tensors, which take no memory.

The window that runs is the one that training runs. Fake tensors are private to torch: `torch._subclasses` is imported here
and nowhere else, and `self_test` notices when it changes. Knows nothing of devices, allocators or budgets.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autoaccum.batches.structure import cloned, tensors_in
from autoaccum.devices.virtual import StorageTracker, dense_parts, eager_only
from autoaccum.errors import AutoaccumError
from autoaccum.levers import Subject, applied, under_autocast
from autoaccum.preserve import random_states_kept
from autoaccum.probing import MICRO_BATCHES_PER_WINDOW, WINDOWS_PER_PROBE, older_objects_set_aside, scaler_for
from autoaccum.records import Levers, Phase
from autoaccum.window import Progress, run_window
from autoaccum.workload import Workload, step_hooks_suspended

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_AS_IT_IS, _HOST = Levers(), torch.device("cpu")
_UNTOLD = (torch.ops.aten.mkldnn_rnn_layer.default,)  # its workspace has no bytes on fake tensors
Kind = Literal["weights", "batch", "gradients", "optimizer state", "activations", "temporaries", "workspaces"]
KINDS: tuple[Kind, ...] = ("weights", "batch", "gradients", "optimizer state", "activations", "temporaries", "workspaces")


class NoFakeError(AutoaccumError):
    """What fake tensors cannot tell: a model that cannot be copied, an operation whose size they do not know."""


class Mark(NamedTuple):
    """From this event on, a phase of a micro-batch of a window runs."""

    event: int
    phase: Phase
    window: int
    micro_batch: int


class Trace(NamedTuple):
    """The allocations of a run.

    Attributes:
        rows: Of each micro-batch.
        events: In order; `i` allocates block i, `~i` frees it.
        sizes: Bytes asked for, of each block.
        kinds: What each block holds.
        marks: Where phases begin, ascending.
        flops: Of all that ran, by phase; matrix products, convolutions and attention, recomputation included.
    """

    rows: int
    events: tuple[int, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    marks: tuple[Mark, ...] = ()
    flops: dict[Phase, int] = {}  # noqa: RUF012 - a NamedTuple's default, never changed


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
        if operation in _UNTOLD and any(type(part).__module__ == _FAKE_TENSORS for part in out):
            raise NoFakeError(f"{operation}: fake tensors do not know its workspace")
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
        kinds = _kinds_by_life(self._events, self._marks, len(self._sizes)) | self._kinds
        trace = Trace(
            rows=rows,
            events=tuple(self._events),
            sizes=tuple(self._sizes),
            kinds=tuple(kinds[block] for block in range(len(self._sizes))),
            marks=tuple(self._marks),
            flops=dict(self._flops),
        )
        return _with_frees_in_order(_with_sums_in_place(trace, self._sums) if sums_in_place else trace)


def _with_sums_in_place(trace: Trace, sums: Mapping[int, int]) -> Trace:
    """The trace in which a sum takes the place of its first part, where that part is freed at once."""
    events: list[int] = []
    moved: dict[int, int] = {}
    kinds = list(trace.kinds)
    index = 0
    starts = {mark.event: at for at, mark in enumerate(trace.marks)}
    marks = list(trace.marks)
    while index < len(trace.events):
        if index in starts:
            marks[starts[index]] = marks[starts[index]]._replace(event=len(events))
        event = trace.events[index]
        first = sums.get(index)
        if first is not None and index + 1 < len(trace.events) and trace.events[index + 1] == ~first:
            moved[event] = moved.get(first, first)
            kinds[moved[event]] = kinds[event]  # a gradient is named when it is complete
            index += 2
            continue
        events.append(moved.get(event, event) if event >= 0 else ~moved.get(~event, ~event))
        index += 1
    return trace._replace(events=tuple(events), marks=tuple(marks), kinds=tuple(kinds))


def _with_frees_in_order(trace: Trace) -> Trace:
    """The trace with frees that follow one another sorted: what a C++ container held dies in an order that varies.

    Autocast's copies of weights do, at the end of its region. What the allocator has afterwards is the same.
    """
    events, starts = list(trace.events), {mark.event for mark in trace.marks}
    begin = 0
    for index in range(len(events) + 1):
        if index == len(events) or events[index] >= 0 or index in starts:
            events[begin:index] = sorted(events[begin:index])  # the latest block first, as a workspace goes
            begin = index if index < len(events) and events[index] < 0 else index + 1
    return trace._replace(events=tuple(events))


def _kinds_by_life(events: Sequence[int], marks: Sequence[Mark], num_blocks: int) -> dict[int, Kind]:
    """Activations are made in a forward pass and freed after it; everything else is a temporary."""
    kinds: dict[int, Kind] = dict.fromkeys(range(num_blocks), "temporaries")
    ends = [mark.event for mark in marks[1:]] + [len(events)]
    for mark, end in zip(marks, ends, strict=True):
        if mark.phase == "forward":
            inside = events[mark.event : end]
            freed = {~event for event in inside if event < 0}
            kinds.update({block: "activations" for block in inside if block >= 0 and block not in freed})
    return kinds


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


def fake_trace(
    workload: Workload,
    rows: int,
    *,
    host_batch: bool,
    sums_in_place: bool = False,
    adjusted: Callable[[Recorder, Optimizer], AbstractContextManager[None]] | None = None,
    levers: Levers = _AS_IT_IS,
    device: torch.device = _HOST,
) -> Trace:
    """Record a probe's windows on fake tensors in host memory. The model is neither run nor changed, and no copy is made.

    Args:
        workload: Its model may be on any device, the meta device included.
        rows: Of each micro-batch.
        host_batch: The batch lies in the memory that is recorded; else each micro-batch is copied there when its turn comes.
        sums_in_place: See `Recorder.trace`.
        adjusted: Entered while the windows run: what another device does differently.
        levers: Turned while the windows run.
        device: Which kind of device the levers are turned on.

    Raises:
        Exception: Whatever fake tensors refuse (`.item()`, shapes that depend on data, kernels without a fake version), and
            whatever the user's code raises.

    Leaves behind:
        Nothing, but for what the user's code changes outside of model, optimizer and generators.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # loads some 80 MiB of modules

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    put_back = [partial(_put_back, tensor, tensor.grad, _value_of(tensor)) for tensor in workload.resident()]
    try:
        with random_states_kept(), older_objects_set_aside(), _unlogged():
            with _deepcopied_by(partial(_fake_of, mode=mode)):
                batch, copied = _copied(workload, rows)
            # Copying a fake tensor as a real one is copied ends the process (torch 2.13), and averages of weights do copy.
            with mode, _deepcopied_by(_clone_of):
                return record_windows(
                    copied,
                    batch,
                    rows,
                    host_batch=host_batch,
                    sums_in_place=sums_in_place,
                    adjusted=adjusted,
                    levers=levers,
                    device=device,
                )
    finally:
        for restore in put_back:
            restore()


def _copied(workload: Workload, rows: int) -> tuple[Any, Workload]:
    batch = workload.source.take(rows)
    try:
        return copy.deepcopy(batch), workload.copied()
    except Exception as error:
        raise NoFakeError(f"the model or batch cannot be copied: {type(error).__name__}: {error}") from error


def _value_of(tensor: Tensor) -> Tensor | None:
    """The value of a single number on the host: fake tensors change these for real."""
    return tensor.detach().clone() if tensor.ndim == 0 and tensor.device.type == "cpu" else None


def _put_back(tensor: Tensor, gradient: Tensor | None, value: Tensor | None) -> None:
    """Undo what a training step does that reaches for the real model: fake gradients, and numbers that counted on."""
    if tensor.is_leaf and tensor.grad is not gradient:
        tensor.grad = gradient
    if value is not None and not torch.equal(tensor.detach(), value):
        with torch.no_grad():
            tensor.copy_(value)


def record_windows(
    workload: Workload,
    batch: Any,
    rows: int,
    *,
    host_batch: bool,
    sums_in_place: bool = False,
    adjusted: Callable[[Recorder, Optimizer], AbstractContextManager[None]] | None = None,
    levers: Levers = _AS_IT_IS,
    device: torch.device = _HOST,
) -> Trace:
    """Record a probe's windows as they run on this workload, whatever its tensors are. It is changed by that."""
    workload.set_training_mode()
    for parameter in workload.module.parameters():
        parameter.grad = None
    recorder = Recorder()

    def place(micro_batch: Any) -> Any:
        if host_batch:
            return micro_batch
        with recorder.paused():  # the batch that it is cut from stays on the host
            placed = cloned(micro_batch)
        recorder.hold(tensors_in(placed), "batch")
        return placed

    with ExitStack() as stack:
        stack.enter_context(recorder.recording())
        recorder.hold([*workload.module.parameters(), *workload.module.buffers()], "weights")
        if workload.own_optimizer is not None:
            recorder.hold(_state_of(workload.own_optimizer), "optimizer state")
        if host_batch:
            recorder.hold(tensors_in(batch), "batch")
        optimizer = workload.make_optimizer()
        stack.enter_context(step_hooks_suspended(optimizer))
        stack.enter_context(_holdings_noted(recorder, optimizer))
        subject = Subject(workload.module, device, optimizer, off_device=recorder.paused, worth_moving_bytes=0)
        # First the levers: what is adjusted is where neither they nor the user have chosen.
        stack.enter_context(applied(levers, subject))
        stack.enter_context(adjusted(recorder, optimizer) if adjusted is not None else nullcontext())
        scaler = scaler_for(levers, _HOST)
        for recorder.window in range(WINDOWS_PER_PROBE):
            loss = run_window(  # it lives on through the next window, as in a probe
                [batch] * MICRO_BATCHES_PER_WINDOW,
                [rows] * MICRO_BATCHES_PER_WINDOW,
                loss=under_autocast(workload.loss, levers, device),
                optimizer=optimizer,
                place=place,
                progress=recorder.progress,
                module=workload.module,
                scaler=scaler,
            )
            gc.collect()
        del loss
        return recorder.trace(rows, sums_in_place=sums_in_place)


@contextmanager
def _holdings_noted(recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """Before each step what the gradients are, after it what the optimizer has made."""

    def before(optimizer: Optimizer, *_: Any) -> None:
        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        recorder.hold(found, "gradients")

    def after(optimizer: Optimizer, *_: Any) -> None:
        recorder.hold(_state_of(optimizer), "optimizer state")

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


@contextmanager
def _unlogged() -> Iterator[None]:
    """Fake tensors log every operation that they refuse; here that is no error, and the reason is told elsewhere."""
    logger = logging.getLogger(_FAKE_TENSORS)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _deepcopied_by(copied: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While inside, `copy.deepcopy` copies every tensor that it meets with this function, wherever that is kept."""

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            memo[id(tensor)] = copied(tensor)
        return memo[id(tensor)]

    kept = Tensor.__deepcopy__, nn.Parameter.__deepcopy__
    Tensor.__deepcopy__ = nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__deepcopy__, nn.Parameter.__deepcopy__ = kept  # type: ignore[method-assign]


def _fake_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if tensor.device.type != "cpu":
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    if tensor.ndim == 0 and not isinstance(tensor, nn.Parameter):
        # Optimizers read their step count, models their temperature: a value that is known can be read.
        return mode.fake_tensor_converter.from_real_tensor(mode, tensor.detach().clone(), make_constant=True)
    return mode.from_tensor(tensor)


def _clone_of(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        made = tensor.detach().clone()
    return (
        nn.Parameter(made, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else made.requires_grad_(tensor.requires_grad)
    )


def load_fake_tensors() -> None:
    """Load what fake tensors need, so that copies of this process have it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode()


def is_refusal(error: BaseException) -> bool:
    """Whether fake tensors refuse what was asked of them, rather than the user's code being wrong."""
    own = isinstance(error, NoFakeError)
    own = own or type(error).__module__ in (_FAKE_TENSORS, "torch.fx.experimental.symbolic_shapes")
    return own or any(word in str(error).lower() for word in ("fake", "meta", "tensor subclass", "python dispatch"))


def self_test() -> str | None:
    """What is wrong with fake tensors in this torch, None when a training step on them takes what is known from theory."""
    try:
        model = nn.Linear(64, 32, bias=False)
        workload = Workload(
            model, torch.zeros(2, 64), optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9)
        )
        trace = fake_trace(workload, 2, host_batch=True)
    except Exception as error:  # noqa: BLE001 - whatever a changed torch raises
        return f"{type(error).__name__}: {error}"
    matrix = 64 * 32 * 4
    held = {kind: sum(s for s, k in zip(trace.sizes, trace.kinds, strict=True) if k == kind) for kind in KINDS}
    expected = {"weights": matrix, "batch": 2 * 64 * 4, "gradients": WINDOWS_PER_PROBE * matrix, "optimizer state": matrix}
    wrong = [f"{kind} {held[kind]}, not {size}" for kind, size in expected.items() if held[kind] != size]  # type: ignore[index]
    return "; ".join(wrong) or None
