"""A probe's windows, recorded on fake tensors, which take no memory.

Fake tensors are private to torch: `torch._subclasses` is imported here and nowhere else, and `self_test` notices when it
changes. Knows nothing of devices, allocators or budgets.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.errors import AutoaccumError
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.recording import HOST, Adjusted, record_windows
from autoaccum.prediction.trace import KINDS, Trace
from autoaccum.preserve import random_states_kept
from autoaccum.probing import WINDOWS_PER_PROBE, older_objects_set_aside
from autoaccum.records import AS_IT_IS, Levers
from autoaccum.workload import Workload

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_UNTOLD = (torch.ops.aten.mkldnn_rnn_layer.default,)  # its workspace has no bytes on fake tensors


class NoFakeError(AutoaccumError):
    """What fake tensors cannot tell: a model that cannot be copied, an operation whose size they do not know."""


def fake_trace(
    workload: Workload,
    rows: int,
    *,
    host_batch: bool,
    sums_in_place: bool = False,
    adjusted: Adjusted | None = None,
    levers: Levers = AS_IT_IS,
    device: torch.device = HOST,
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
                    adjusted=partial(_refusing_untold, adjusted),
                    levers=levers,
                    device=device,
                )
    finally:
        for restore in put_back:
            restore()


@contextmanager
def _refusing_untold(adjusted: Adjusted | None, recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
    """What is adjusted, and besides a refusal of what fake tensors cannot tell."""
    with recorder.heard_by(_refuse_untold), nullcontext() if adjusted is None else adjusted(recorder, optimizer):
        yield


def _refuse_untold(operation: Any, args: Any, out: Any) -> None:
    if operation in _UNTOLD and any(type(part).__module__ == _FAKE_TENSORS for part in out):
        raise NoFakeError(f"{operation}: fake tensors do not know its workspace")


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
