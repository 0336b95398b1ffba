"""Puts everything back, bit for bit: the user's model, optimizer, random generators and modes.

A snapshot is taken once and restored after every trial. It takes no memory that a budget would miss: it lies in host memory
for a device, and in an unnamed temporary file where host memory itself is what is measured.
"""

from __future__ import annotations

import copy
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_Restore = Callable[[], None]


@contextmanager
def preserved(
    model: nn.Module, optimizer: Optimizer | None = None, *, device: torch.device, on_disk: bool = False
) -> Iterator[Snapshot]:
    """Give a snapshot that can be restored at any time, and restore it on the way out, whatever happened.

    Kept: parameters, buffers, gradients, `requires_grad`, train/eval flags, hooks, tensors that modules hold as plain
    attributes, optimizer state and parameter groups, the generators of python, numpy, torch and the device, grad mode,
    autocast, default dtype and the flags of `torch.backends`.

    Args:
        model: Its tensors are restored in place, so views and tied weights stay what they are.
        optimizer: The user's own, None where the probe makes one.
        device: Whose generator is kept, besides the CPU's.
        on_disk: Keep the bytes in a temporary file that has no name, so that nothing is left even after `kill -9`.
    """
    snapshot = Snapshot(model, optimizer, device=device, on_disk=on_disk)
    try:
        yield snapshot
    except BaseException as error:
        try:
            snapshot.restore()
        except RuntimeError as failure:  # a lost device context: the user's error matters more than this one
            error.add_note(f"autoaccum could not put the model back: {failure}")
        raise
    else:
        snapshot.restore()
    finally:
        snapshot.close()


@final
class Snapshot:
    """What was found, and how to put it back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, *, device: torch.device, on_disk: bool) -> None:
        self._vault = _Vault(on_disk)
        kept: dict[int, Tensor] = {}
        self._restores: list[_Restore] = []
        for module in model.modules():
            self._restores.append(_keep_module(module))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    kept.setdefault(id(tensor), tensor)
        if optimizer is not None:
            self._restores.append(_keep_optimizer(optimizer))
            for tensor in tree_leaves([list(optimizer.state.values()), optimizer.param_groups]):
                if isinstance(tensor, Tensor):
                    kept.setdefault(id(tensor), tensor)
        self._tensors = [_keep_tensor(tensor, self._vault) for tensor in kept.values()]
        self._ambient = [*_keep_random_states(device), *(_keep_setting(*setting) for setting in _settings(device.type))]

    def restore(self) -> None:
        """Put everything back; Ctrl-C waits until that is done."""
        with _uninterrupted(), torch.no_grad():
            for put_back in (*self._restores, *self._tensors, *self._ambient):
                put_back()

    def close(self) -> None:
        """Let go of the kept bytes."""
        self._vault.close()


# The module's own registries of hooks, in torch.nn.Module.__init__.
_HOOK_REGISTRIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_TENSOR_HOOK_REGISTRIES = ("_backward_hooks", "_post_accumulate_grad_hooks")
_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOK_REGISTRIES)


def _keep_module(module: nn.Module) -> _Restore:
    registries = {name: dict(vars(module)[name]) for name in _REGISTRIES if name in vars(module)}
    training = module.training
    attributes = _tensor_attributes(module)

    def put_back() -> None:
        for name, before in registries.items():
            _refill(vars(module)[name], before)
        module.training = training
        for name in _tensor_attributes(module):
            if name not in attributes:
                delattr(module, name)
        for name, value in attributes.items():
            object.__setattr__(module, name, value)

    return put_back


def _tensor_attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes that hold tensors, such as a remembered attention map: they would keep a trial's memory alive."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _REGISTRIES and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }


def _refill(registry: MutableMapping[Any, Any], before: dict[Any, Any]) -> None:
    """Restore a registry in place, keeping its identity and order."""
    unchanged = list(registry) == list(before) and all(registry[key] is value for key, value in before.items())
    if not unchanged:
        registry.clear()
        registry.update(before)


def _keep_tensor(tensor: Tensor, vault: _Vault) -> _Restore:
    gradient, requires_grad = (tensor.grad if tensor.is_leaf else None), tensor.requires_grad
    hooks = {name: dict(getattr(tensor, name) or {}) for name in _TENSOR_HOOK_REGISTRIES}
    values = tensor.detach()  # shares the storage, also after the user's step put another one in its place
    slot = vault.put(values)

    def put_back() -> None:
        if not tensor.is_set_to(values):
            tensor.data = values
        vault.take_into(slot, values)
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient
        for name, before in hooks.items():
            if getattr(tensor, name) is not None:
                _refill(getattr(tensor, name), before)

    return put_back


_COUNTERS = (int, float, str, type(None))  # plain attributes, such as the marks that learning rate schedulers set


def _keep_optimizer(optimizer: Optimizer) -> _Restore:
    leaves, structure = tree_flatten(dict(optimizer.state))
    leaves = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, _COUNTERS)}

    def put_back() -> None:
        fresh = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
        optimizer.state.clear()
        optimizer.state.update(tree_unflatten(fresh, structure))
        for group, before in zip(optimizer.param_groups, groups, strict=False):
            group.clear()
            group.update(before, params=list(before["params"]))
        del optimizer.param_groups[len(groups) :]
        for name in [name for name, value in vars(optimizer).items() if isinstance(value, _COUNTERS) and name not in plain]:
            delattr(optimizer, name)
        vars(optimizer).update(plain)

    return put_back


def _keep_random_states(device: torch.device) -> list[_Restore]:
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    restores: list[_Restore] = [
        lambda: random.setstate(python_state),
        lambda: np.random.set_state(numpy_state),
        lambda: torch.set_rng_state(torch_state),
    ]
    if device.type != "cpu":
        generators = torch.get_device_module(device)
        device_state = generators.get_rng_state(device)
        restores.append(lambda: generators.set_rng_state(device_state, device))
    return restores


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _settings(device_type: str) -> list[_Setting]:
    """Process-wide and thread-wide modes that a training step may change."""
    found = [
        _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
        _Setting(torch.get_default_dtype, torch.set_default_dtype),
        _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _Setting(torch.get_num_threads, torch.set_num_threads),
    ]
    for kind in {"cpu", device_type}:
        found.append(_Setting(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        found.append(_Setting(partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    for name in ("enabled", "benchmark", "deterministic"):
        found.append(_Setting(partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name)))
    return found


def _keep_setting(get: Callable[[], Any], set_: Callable[[Any], Any]) -> _Restore:
    before = get()

    def put_back() -> None:
        if get() != before:
            set_(before)

    return put_back


@final
class _Vault:
    """Keeps the values of tensors, in host memory or in a file without a name."""

    def __init__(self, on_disk: bool) -> None:
        self._file = tempfile.TemporaryFile(prefix="autoaccum-") if on_disk else None  # noqa: SIM115 - closed by close()

    def put(self, tensor: Tensor) -> Tensor | int:
        """Keep a copy of the values; gives the copy, or where in the file it is."""
        if self._file is None or not _is_plain(tensor):
            return tensor.to("cpu", copy=True)
        offset = self._file.seek(0, 2)
        self._file.write(_bytes_of(tensor.contiguous()))
        return offset

    def take_into(self, kept: Tensor | int, tensor: Tensor) -> None:
        """Write the kept values into the tensor."""
        if self._file is None or isinstance(kept, Tensor):
            tensor.copy_(torch.as_tensor(kept))
            return
        target = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._file.seek(kept)
        self._file.readinto(_bytes_of(target))
        if target is not tensor:
            tensor.copy_(target)

    def close(self) -> None:
        """Drop everything kept."""
        if self._file is not None:
            self._file.close()


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of the storage are the values: no subclass, no sparse layout, no lazy conjugation."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C while inside; it is raised on the way out."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # Python delivers signals to the main thread only, and cannot put back a handler that it did not set
        return
    pending: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)
