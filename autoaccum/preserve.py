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
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autoaccum.errors import AutoaccumError
from autoaccum.shards import local_part

_Restore = Callable[[], None]


@contextmanager
def preserved(
    model: nn.Module, optimizer: Optimizer | None = None, *, device: torch.device, on_disk: bool = False
) -> Iterator[Snapshot]:
    """Give a snapshot that can be restored at any time, and restore it on the way out, whatever happened.

    Kept: parameters, buffers, gradients, `requires_grad`, train/eval flags, hooks, tensors that modules hold as plain
    attributes or in lists and dicts there, optimizer state and parameter groups, the generators of python, numpy, torch and
    the device, grad mode, autocast, default dtype and the flags of `torch.backends`.

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


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put the generators of python, numpy and torch back: looking at a data set may draw from them."""
    put_back = keep_random_states(torch.device("cpu"))
    try:
        yield
    finally:
        for restore in put_back:
            restore()


@final
class Snapshot:
    """What was found, and how to put it back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, *, device: torch.device, on_disk: bool) -> None:
        self._vault = _Vault(on_disk)
        self._restores = [_keep_module(module) for module in model.modules()]
        if optimizer is not None:
            self._restores.append(_keep_optimizer(optimizer))
        try:
            self._tensors = [_keep_tensor(tensor, self._vault) for tensor in _tensors_of(model, optimizer)]
            self._vault.flush()
        except BaseException:
            self._vault.close()  # there may be no room for all of it
            raise
        self._ambient = [*keep_random_states(device), *(_keep_setting(*setting) for setting in _settings(device.type))]

    def restore(self) -> None:
        """Put everything back; Ctrl-C waits until that is done.

        Raises:
            RuntimeError: The first error of a part that could not be put back, after all other parts were.
        """
        failures: list[RuntimeError] = []
        with _uninterrupted():
            with torch.no_grad():
                _run_all((*self._restores, *self._tensors), failures)
            _run_all(self._ambient, failures)  # grad mode is one of them, and leaving `no_grad` sets it as well
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Let go of the kept bytes."""
        self._vault.close()


def _run_all(restores: Iterable[_Restore], failures: list[RuntimeError]) -> None:
    """What can be put back is, even where a lost device refuses its part."""
    for put_back in restores:
        try:
            put_back()
        except RuntimeError as failure:
            failures.append(failure)


def _tensors_of(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors whose values are kept, each once."""
    found: list[Any] = []
    for module in model.modules():
        found += [*module._parameters.values(), *module._buffers.values()]
        found += [leaf for leaf in tree_leaves(_plain_attributes(module)) if isinstance(leaf, Tensor) and leaf.is_leaf]
    if optimizer is not None:
        found += tree_leaves([list(optimizer.state.values()), optimizer.param_groups])
    held = {id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}
    gradients = [tensor.grad for tensor in held.values() if tensor.is_leaf and tensor.grad is not None]
    return list((held | {id(gradient): gradient for gradient in gradients}).values())


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
# What registering and removing leaves in a module besides: the mode, names of buffers, which kind of hook is in use.
_MARKS = ("training", "_non_persistent_buffers_set", "_is_full_backward_hook")


def _keep_module(module: nn.Module) -> _Restore:
    registries = {name: dict(vars(module)[name]) for name in _REGISTRIES if name in vars(module)}
    marks = {name: copy.copy(vars(module)[name]) for name in _MARKS if name in vars(module)}
    attributes = _plain_attributes(module)
    had_tensors = {name for name, value in attributes.items() if _holds_tensors(value)}
    contents = _keep_contents(list(attributes.values()))

    def put_back() -> None:
        for name, before in registries.items():
            _refill(vars(module)[name], before)
        vars(module).update((name, copy.copy(mark)) for name, mark in marks.items())
        for name in had_tensors.union(name for name, value in _plain_attributes(module).items() if _holds_tensors(value)):
            if name in attributes:
                object.__setattr__(module, name, attributes[name])
            else:
                del vars(module)[name]  # `delattr` would take a parameter of that name that has just been put back
        for refill in contents:
            refill()

    return put_back


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What the module holds besides its registries: a remembered attention map there would keep a trial's memory alive."""
    return {name: value for name, value in vars(module).items() if name not in (*_REGISTRIES, *_MARKS)}


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _keep_contents(nodes: Iterable[Any]) -> list[_Restore]:
    """How to empty lists and dicts, nested ones as well, of the tensors that were put into them, and to refill them."""
    found: list[_Restore] = []
    for node in nodes:
        if type(node) in (list, dict):
            found.append(partial(_put_contents_back, node, copy.copy(node)))
        if isinstance(node, (list, tuple, dict)):
            found += _keep_contents(node.values() if isinstance(node, dict) else node)
    return found


def _put_contents_back(node: Any, before: Any) -> None:
    if not _holds_tensors(node) and not _holds_tensors(before):
        return  # numbers and names are the user's business
    if isinstance(node, dict):
        _refill(node, before)
    else:
        node[:] = before


def _refill(registry: MutableMapping[Any, Any], before: dict[Any, Any]) -> None:
    """Restore a registry in place, keeping its identity and order."""
    unchanged = list(registry) == list(before) and all(registry[key] is value for key, value in before.items())
    if not unchanged:
        registry.clear()
        registry.update(before)


def _keep_tensor(tensor: Tensor, vault: _Vault) -> _Restore:
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    gradient = tensor.grad if is_leaf else None
    hooks = {name: dict(getattr(tensor, name) or {}) for name in _TENSOR_HOOK_REGISTRIES}
    # Shares the storage, also after the user's step put another one in its place. Where there is no such thing as one
    # storage, the tensor itself is written.
    here = local_part(tensor)  # of a distributed tensor, this rank's own part
    values = here.detach() if _has_own_storage(here) else here
    slot = vault.put(without_repeats(values.detach()))

    def put_back() -> None:
        if here is tensor and values is not tensor and not tensor.is_set_to(values):
            tensor.data = values
        vault.take_into(slot, without_repeats(values))
        if is_leaf:
            if not tensor.is_leaf and not tensor._is_view():
                tensor.detach_()  # written to in place with a graph, which it would keep alive
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = gradient
        for name, before in hooks.items():
            if getattr(tensor, name) is not None:
                _refill(getattr(tensor, name), before)

    return put_back


def _has_own_storage(tensor: Tensor) -> bool:
    """Whether one storage of its own holds the values: no sparse layout, no quantizer, no subclass around other tensors."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not is_traceable_wrapper_subclass(tensor)


def without_repeats(values: Tensor) -> Tensor:
    """The same memory without the dimensions that `expand` made, which cannot be written to."""
    if values.layout == torch.strided:
        for dim in reversed(range(values.ndim)):
            if values.stride(dim) == 0 and values.shape[dim] > 1:
                values = values.select(dim, 0)
    return values


_COUNTERS = (int, float, str, type(None))  # plain attributes, such as the marks that learning rate schedulers set


def _keep_optimizer(optimizer: Optimizer) -> _Restore:
    leaves, structure = tree_flatten(dict(optimizer.state))
    leaves = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    own_groups = list(optimizer.param_groups)
    groups = [dict(group, params=list(group["params"])) for group in own_groups]
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, _COUNTERS)}

    def put_back() -> None:
        fresh = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
        optimizer.state.clear()
        optimizer.state.update(tree_unflatten(fresh, structure))
        for group, before in zip(own_groups, groups, strict=True):
            group.clear()
            group.update(before, params=list(before["params"]))
        optimizer.param_groups[:] = own_groups
        for name in [name for name, value in vars(optimizer).items() if isinstance(value, _COUNTERS) and name not in plain]:
            delattr(optimizer, name)
        vars(optimizer).update(plain)

    return put_back


def keep_random_states(device: torch.device) -> list[_Restore]:
    """How to put the generators of python, numpy, torch and the device back as they are now."""
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
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        found.append(_attribute_setting(torch.backends.cudnn, name))
    if hasattr(torch.backends, "fp32_precision"):  # since torch 2.9; after the old names, which set some of these
        places = [attrgetter(place)(torch.backends) for place in _PRECISION_PLACES]
        found += [_attribute_setting(place, "fp32_precision") for place in (torch.backends, *places)]
    return found


# Outer ones first: the inner ones follow them. `mkldnn` itself is left out, its setter sets all of them (torch 2.13).
_PRECISION_PLACES = ("cudnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def _attribute_setting(owner: object, name: str) -> _Setting:
    return _Setting(partial(getattr, owner, name), partial(setattr, owner, name))


_UNREADABLE = object()


def _keep_setting(get: Callable[[], Any], set_: Callable[[Any], Any]) -> _Restore:
    before = _read(get)

    def put_back() -> None:
        if before is not _UNREADABLE and _read(get) != before:
            set_(before)

    return put_back


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # torch does not tell a precision by its old name once it was set by its new one
        return _UNREADABLE


@final
class _Vault:
    """Keeps the values of tensors, in host memory or in a file without a name."""

    def __init__(self, on_disk: bool) -> None:
        with _naming_the_folder():
            self._file = tempfile.TemporaryFile(prefix="autoaccum-") if on_disk else None  # noqa: SIM115 - closed by close()

    def put(self, tensor: Tensor) -> Tensor | int:
        """Keep a copy of the values; gives the copy, or where in the file it is."""
        if self._file is None or not _is_plain(tensor):
            return tensor.to("cpu", copy=True)
        with _naming_the_folder():
            offset = self._file.seek(0, 2)
            self._file.write(_bytes_of(tensor.contiguous()))
        return offset

    def flush(self) -> None:
        """Everything is written, so that taking it back needs no room."""
        if self._file is not None:
            with _naming_the_folder():
                self._file.flush()

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
            with suppress(OSError):  # what could not be written is not needed any more
                self._file.close()


@contextmanager
def _naming_the_folder() -> Iterator[None]:
    """A disk that is full or read-only is told with the remedy."""
    try:
        yield
    except OSError as error:
        raise AutoaccumError(
            "the model's weights and optimizer state could not be kept in a temporary file, for after the search: "
            f"{error.strerror or error}. Make room, or set TMPDIR to a folder on a disk with as many bytes as they take."
        ) from error


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of the storage are the values: no subclass, no sparse layout, no lazy conjugation."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The contiguous tensor's own memory, without a copy."""
    row = tensor.detach().as_strided((tensor.numel(),), (1,))  # a dimension of size 1 may have any stride
    return memoryview(row.view(torch.uint8).numpy())  # type: ignore[arg-type]


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
