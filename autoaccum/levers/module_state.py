"""What a forward pass may change, noted before it and put back for another one: buffers, plain attributes, generators.

Running statistics would be updated twice otherwise. Knows nothing of checkpointing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

_SMALL_BYTES = 64 * 1024  # as in rewind.py: statistics; masks and tables of positions are larger and never change
_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_NUMBERS, _CONTAINERS = (int, float, str, type(None)), (list, dict, set)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


class Slot(NamedTuple):
    """Where a module holds a value."""

    registry: MutableMapping[str, Any]
    key: str

    def is_same(self, other: Slot) -> bool:
        return self.registry is other.registry and self.key == other.key

    def value(self) -> Any:
        return self.registry.get(self.key)


def slots_of(modules: Sequence[nn.Module]) -> list[Slot]:
    """Every buffer, and every plain attribute that can be copied: numbers, tensors, lists, generators."""
    found = []
    for module in modules:
        found += [Slot(module._buffers, key) for key in module._buffers]
        found += [Slot(vars(module), key) for key, value in vars(module).items() if _is_plain(key, value)]
    return found


def _is_plain(key: str, value: Any) -> bool:
    if key in _REGISTRIES or isinstance(value, nn.Parameter):
        return False
    return isinstance(value, (*_NUMBERS, Tensor, torch.Generator, *_GENERATORS)) or type(value) in _CONTAINERS


def _copied(value: Any) -> Any:
    """A copy that what is written to the value does not reach; of lists and dicts the tensors in them as well."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        made = torch.Generator(value.device)
        made.set_state(value.get_state())
        return made
    if isinstance(value, _GENERATORS):
        return copy.deepcopy(value)
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)(_copied(part) for part in value)
    return value


class _Kept(NamedTuple):
    """A value before the forward pass, and a copy of it. `may_drop`: it is large and may be one that never changes."""

    slot: Slot
    value: Any
    copy: Any
    may_drop: bool

    def has_changed(self) -> bool:
        """By values: kernels write running statistics past torch's count of versions. Fake tensors have none."""
        now = self.slot.value()
        is_comparable = type(now) is Tensor and now.layout == torch.strided
        return now is not self.value or (is_comparable and not torch.equal(now, self.copy))


@final
class Before:
    """What a block held before its forward pass."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._kept: list[_Kept] = []
        self._generators = random.getstate(), np.random.get_state()

    def note(self, slots: Sequence[Slot], large: Sequence[Slot] | None) -> None:
        """Copy what is small, and of what is large these; with None all, as long as it is not known what changes."""
        for slot in slots:
            value = slot.value()
            is_large = isinstance(value, Tensor) and value.numel() * value.element_size() > _SMALL_BYTES
            if not is_large or large is None or any(slot.is_same(other) for other in large):
                self._kept.append(_Kept(slot, value, _copied(value), is_large))

    def drop_unchanged(self) -> list[Slot]:
        """Let go of large copies that are not needed; gives where the others belong."""
        self._kept = [kept for kept in self._kept if not kept.may_drop or kept.has_changed()]
        return [kept.slot for kept in self._kept if kept.may_drop]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """As it was before while inside, and afterwards as it is now: what is written inside is written to copies."""
        now = [(registry, dict(registry)) for module in self._modules for registry in (vars(module), module._buffers)]
        generators = random.getstate(), np.random.get_state()
        _set_generators(self._generators)
        for kept in self._kept:
            if kept.copy is not kept.value or kept.slot.value() is not kept.value:
                kept.slot.registry[kept.slot.key] = _copied(kept.copy)
        try:
            yield
        finally:
            for registry, values in now:
                if len(registry) > len(values):  # made by the second run, with its graph
                    for key in registry.keys() - values.keys():
                        del registry[key]
                registry.update(values)
            _set_generators(generators)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
