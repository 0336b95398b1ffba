"""What a window changes besides gradients, and how to go back to its start: random generators and buffers.

Costs little enough to be done before every window: a copy is kept only of small buffers, and of large ones that have been
seen to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from autoaccum.preserve import keep_random_states

_SMALL_BYTES = 64 * 1024  # BatchNorm's statistics; masks and tables of positions are larger and never change


class _Kept(NamedTuple):
    registry: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None


@final
class Rewinder:
    """Marks the start of a window and goes back to it.

    Args:
        module: Its buffers are kept.
        device: Whose generator is kept besides the CPU's.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._registries = [part._buffers for part in module.modules()]
        self._random: list[Callable[[], None]] = []
        self._buffers: list[_Kept] = []
        self._moving: set[tuple[int, str]] = set()  # large buffers that are known to change
        self._is_first = True

    def mark(self) -> None:
        """This is where `rewind` goes back to."""
        self._learn()
        self._random = keep_random_states(self._device)
        self._buffers = []
        with torch.no_grad():
            for registry in self._registries:
                for name, buffer in registry.items():
                    if buffer is not None:
                        self._buffers.append(self._kept(registry, name, buffer))

    def _kept(self, registry: dict[str, Tensor | None], name: str, buffer: Tensor) -> _Kept:
        moves = self._is_first or (id(registry), name) in self._moving
        moves = moves or buffer.is_inference() or buffer.layout != torch.strided or buffer.nbytes <= _SMALL_BYTES
        version = 0 if buffer.is_inference() else buffer._version
        return _Kept(registry, name, buffer, version, buffer.clone() if moves else None)

    def _learn(self) -> None:
        """Which large buffers the last window changed. One that first changes in a later window shows by its version."""
        for kept in self._buffers:
            if self._is_first and kept.copy is not None and kept.buffer.layout == torch.strided:
                # The content as well, because writing to `.data` leaves the version as it was.
                changed = not torch.equal(kept.buffer, kept.copy)
            else:
                changed = not kept.buffer.is_inference() and kept.buffer._version != kept.version
            if changed:
                self._moving.add((id(kept.registry), kept.name))
        self._is_first = self._is_first and not self._buffers

    def rewind(self) -> list[str]:
        """Put generators and buffers back.

        Returns:
            The names of buffers that could not be put back: large ones that changed for the first time.
        """
        lost = []
        with torch.no_grad():
            for kept in self._buffers:
                kept.registry[kept.name] = kept.buffer  # where another tensor has been put in its place
                if kept.copy is not None:
                    kept.buffer.copy_(kept.copy)
                elif kept.buffer._version != kept.version:
                    lost.append(kept.name)
        for put_back in self._random:
            put_back()
        return lost
