"""What a window changes besides gradients, and how to go back to its start: random generators and buffers.

Costs little enough to be done before every window: a copy is kept only of small buffers, and of large ones that have been
seen to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from autoaccum.preserve import generators_in, keep_generator, keep_random_states, without_repeats

_SMALL_BYTES = 64 * 1024  # BatchNorm's statistics; masks and tables of positions are larger and never change


class _Kept(NamedTuple):
    """A place for a buffer, what was there, and its values where they are kept."""

    registry: dict[str, Tensor | None]
    name: str
    buffer: Tensor | None
    version: int | None
    copy: Tensor | None

    def changed(self) -> bool:
        """Whether the values have changed. By their version, and where a copy is at hand by themselves as well."""
        if self.buffer is None:
            return False
        if self.copy is not None and self.copy.layout == torch.strided:  # writing to `.data` leaves the version as it was
            return not torch.equal(without_repeats(self.buffer), self.copy)
        return self.version is None or self.buffer._version != self.version

    def is_replaced(self) -> bool:
        """Whether another tensor is in the buffer's place."""
        return self.registry.get(self.name) is not self.buffer


@final
class Rewinder:
    """Marks the start of a window and goes back to it.

    Args:
        module: Its buffers are kept, and the generators that it holds.
        device: Whose generator is kept besides the CPU's.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._registries = [part._buffers for part in module.modules()]
        self._generators = generators_in(map(vars, module.modules()))
        self._random: list[Callable[[], None]] = []
        self._buffers: list[_Kept] = []
        self._moving: set[tuple[int, str]] = set()  # large buffers that are known to change
        self._knows_moving = False

    def mark(self) -> None:
        """This is where `rewind` goes back to."""
        self._random = keep_random_states(self._device) + [keep_generator(one) for one in self._generators]
        with torch.no_grad():
            self._buffers = [
                self._kept(registry, name, buffer) for registry in self._registries for name, buffer in registry.items()
            ]

    def _kept(self, registry: dict[str, Tensor | None], name: str, buffer: Tensor | None) -> _Kept:
        if buffer is None:
            return _Kept(registry, name, None, None, None)
        moves = not self._knows_moving or (id(registry), name) in self._moving
        moves = moves or buffer.is_inference() or buffer.layout != torch.strided or buffer.nbytes <= _SMALL_BYTES
        version = None if buffer.is_inference() else buffer._version
        return _Kept(registry, name, buffer, version, without_repeats(buffer).clone() if moves else None)

    def learn(self) -> None:
        """After a window that went through: which large buffers it changed. The first one tells which are to be copied."""
        if self._knows_moving:
            changed = [kept for kept in self._buffers if kept.copy is None and kept.changed()]
        else:
            changed = [kept for kept in self._buffers if kept.changed()]
            self._knows_moving = True
        self._moving |= {(id(kept.registry), kept.name) for kept in changed}

    def changed(self) -> list[Tensor]:
        """The buffers as they were put in their places, of those whose values have changed since the mark."""
        return [kept.buffer for kept in self._buffers if kept.buffer is not None and (kept.changed() or kept.is_replaced())]

    def rewind(self) -> list[str]:
        """Put generators and buffers back.

        Returns:
            The names of buffers that could not be put back: large ones that changed for the first time.
        """
        unkept = [kept for kept in self._buffers if kept.copy is None and kept.changed()]
        self._moving |= {(id(kept.registry), kept.name) for kept in unkept}
        for kept in self._buffers:
            kept.registry[kept.name] = kept.buffer  # where another tensor, or a first one, has been put in its place
            if kept.buffer is not None and kept.copy is not None and kept.changed():
                with torch.inference_mode(kept.buffer.is_inference()), torch.no_grad():
                    without_repeats(kept.buffer).copy_(kept.copy)
        for put_back in self._random:
            put_back()
        return [kept.name for kept in unkept]
