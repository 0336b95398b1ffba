"""Saved activations lie in host memory between the forward and the backward pass."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, final

import psutil
import torch
from torch import Tensor, nn

from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.records import Levers
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

    __slots__ = ("__weakref__", "copy", "device")

    def __init__(self, copy: Tensor, device: torch.device) -> None:
        self.copy, self.device = copy, device


@final
class HostShelf:
    """Where saved tensors lie, and how many bytes of them there are.

    An OSError says when the host has no room for more: larger micro-batches would need more still.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._weights = _storages(subject.module)
        self._room_bytes = int(psutil.virtual_memory().available * _OF_FREE_FRAC)
        self.held_bytes = 0

    def put(self, tensor: Tensor) -> Any:
        """What to keep in place of the tensor."""
        if not self._is_worth_moving(tensor):
            return tensor
        num_bytes = tensor.numel() * tensor.element_size()
        if self.held_bytes + num_bytes > self._room_bytes:
            text = f"offloaded activations need more than the {format_bytes(self._room_bytes)} of host memory that are free"
            raise OSError(errno.ENOMEM, text)
        with self._subject.off_device(), torch.no_grad():
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
        return self._counted(_Shelved(copy, tensor.device), num_bytes)

    def take(self, kept: Any) -> Tensor:
        """The tensor again."""
        if isinstance(kept, Tensor):
            return kept
        assert isinstance(kept, _Shelved)
        return torch.empty_like(kept.copy, device=kept.device).copy_(kept.copy, non_blocking=True)

    def _is_worth_moving(self, tensor: Tensor) -> bool:
        is_dense = tensor.layout == torch.strided and not isinstance(tensor, nn.Parameter)
        return (
            is_dense
            and tensor.numel() * tensor.element_size() >= self._subject.worth_moving_bytes
            and tensor.untyped_storage()._cdata not in self._weights
        )

    def _counted(self, shelved: _Shelved, num_bytes: int) -> _Shelved:
        self.held_bytes += num_bytes
        self._subject.note_host_bytes(self.held_bytes)
        weakref.finalize(shelved, self._let_go, num_bytes).atexit = False
        return shelved

    def _let_go(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


def _storages(module: nn.Module) -> set[int]:
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided}
