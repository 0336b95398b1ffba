"""Saved activations lie in host memory between the forward and the backward pass."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, final

import psutil
import torch
from torch import Tensor, nn

from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.records import Levers
from autoaccum.shards import is_sharded
from autoaccum.units import format_bytes

_OF_FREE_FRAC = 0.9  # of the host memory that is free; pinned memory cannot be swapped out


@final
class Offload(AbstractLever):
    """What the backward pass needs is moved to pinned host memory and back. Weights stay."""

    name: ClassVar[str] = "offload"
    levels: ClassVar[tuple[str, ...]] = ("off", "cpu")

    def reason_against(self, level: str, subject: Subject) -> str | None:
        if level != "off" and subject.is_host:
            return "the model is in host memory already"
        if level != "off" and is_sharded(subject.module):
            return "FSDP frees whole weights itself, and copies of them would be moved to the host as well"
        return None

    @contextmanager
    def applied(self, levers: Levers, subject: Subject) -> Iterator[None]:
        if levers.offload == "off":
            yield
            return
        shelf = HostShelf(subject)
        with torch.autograd.graph.saved_tensors_hooks(shelf.put, shelf.take):
            yield


class _Shelved:
    """A tensor that lies on the host."""

    __slots__ = ("__weakref__", "copy", "device", "shape")

    def __init__(self, copy: Tensor, device: torch.device, shape: torch.Size) -> None:
        self.copy, self.device, self.shape = copy, device, shape


class _Stayed(NamedTuple):
    """A tensor that stays where it is, without its graph: its own node would keep that, and itself, alive for ever."""

    tensor: Tensor
    version: int


class _There(NamedTuple):
    """A storage, of which a part has been moved."""

    storage: weakref.ref[torch.UntypedStorage]
    shelved: weakref.ref[_Shelved]


@final
class HostShelf:
    """Where saved tensors lie, and how many bytes of them there are. What several operations need lies there once.

    An OSError says when the host has no room for more: larger micro-batches would need more still.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._weights = _storages(subject.module)
        self._room_bytes = int(psutil.virtual_memory().available * _OF_FREE_FRAC)
        self._there: dict[tuple[Any, ...], _There] = {}
        self.held_bytes = 0

    def put(self, tensor: Tensor) -> Any:
        """What to keep in place of the tensor."""
        if not self._is_worth_moving(tensor):
            return _Stayed(tensor.detach(), _version_of(tensor))
        key = _key_of(tensor)
        there = self._there.get(key)
        shelved = None if there is None or there.storage() is None else there.shelved()
        if shelved is None:
            shelved = self._moved(tensor)
            self._there[key] = _There(weakref.ref(tensor.untyped_storage()), weakref.ref(shelved))
        return shelved

    def take(self, kept: Any) -> Tensor:
        """The tensor again.

        Raises:
            RuntimeError: When one that stayed was changed in place, which torch sees only where there are no hooks.
        """
        if isinstance(kept, _Stayed):
            if _version_of(kept.tensor) != kept.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {tuple(kept.tensor.shape)}."
                )
            return kept.tensor
        assert isinstance(kept, _Shelved)
        made = torch.empty_like(kept.copy, device=kept.device).copy_(kept.copy, non_blocking=True)
        return made.expand(kept.shape)

    def _is_worth_moving(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or isinstance(tensor, nn.Parameter):
            return False
        part = _without_repeats(tensor)
        is_large = part.numel() * part.element_size() >= self._subject.worth_moving_bytes
        return is_large and tensor.untyped_storage()._cdata not in self._weights

    def _moved(self, tensor: Tensor) -> _Shelved:
        part = _without_repeats(tensor.detach())
        num_bytes = part.numel() * part.element_size()
        if self.held_bytes + num_bytes > self._room_bytes:
            text = f"offloaded activations need more than the {format_bytes(self._room_bytes)} of host memory that are free"
            raise OSError(errno.ENOMEM, text)
        with self._subject.off_device(), torch.no_grad():
            copy = torch.empty_like(part, device="cpu", pin_memory=tensor.is_cuda)
            copy.copy_(part, non_blocking=tensor.is_cuda)
        shelved = _Shelved(copy, tensor.device, tensor.shape)
        self.held_bytes += num_bytes
        self._subject.note_host_bytes(self.held_bytes)
        weakref.finalize(shelved, self._let_go, num_bytes).atexit = False
        return shelved

    def _let_go(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


def _key_of(tensor: Tensor) -> tuple[Any, ...]:
    """The same for two tensors that are the same view of the same storage, with nothing written in between."""
    place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
    return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg(), _version_of(tensor))


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _without_repeats(tensor: Tensor) -> Tensor:
    """One of each dimension that `expand` made."""
    for dim in range(tensor.ndim):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _storages(module: nn.Module) -> set[int]:
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided}
