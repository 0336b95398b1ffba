"""A block whose forward pass runs again in the backward pass, as if it had run once.

torch's checkpoint puts torch's generators back for the second run. What else a forward pass changes is put back here:
buffers (running statistics would be updated twice), other tensors and numbers that modules hold, and the generators of
Python and NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten


def _overloads(names: tuple[str, ...]) -> list[Any]:
    return [getattr(_aten, name).default for name in names if hasattr(_aten, name)]


# Operations whose results are kept rather than computed again: nearly all of a block's work, about half of its memory.
# As torchtitan's list for transformers, and convolutions.
SAVED_OPERATIONS = _overloads(
    (
        *("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "convolution", "_convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_fused_attention_overrideable", "mkldnn_rnn_layer", "_cudnn_rnn"),
    )
)


@final
class Recomputation:
    """Runs one block so that its activations are not kept.

    Args:
        block: Its modules' buffers and plain attributes are what a forward pass may change.
        selective: Keep the results of matrix products, convolutions and attention.
    """

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self._block, self._selective = block, selective
        self._changing: list[_Slot] | None = None  # learned in the first forward pass

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the block's forward."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(partial(function, **kwargs), *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the first run and for the second; the second may be entered several times."""
        before = _Before()
        modes: tuple[Any, Any] = nullcontext(), nullcontext()
        if self._selective:
            modes = create_selective_checkpoint_contexts(SAVED_OPERATIONS)  # type: ignore[no-untyped-call]
        return self._first_run(before, modes[0]), _SecondRun(before, modes[1])

    @contextmanager
    def _first_run(self, before: _Before, mode: AbstractContextManager[Any]) -> Iterator[None]:
        before.note(_slots(self._block) if self._changing is None else self._changing)
        with mode:
            yield
        if self._changing is None:
            before.drop_unchanged()
            self._changing = before.slots


class _Slot(NamedTuple):
    """Where a module holds a value."""

    registry: MutableMapping[str, Any]
    key: str

    def value(self) -> Any:
        return self.registry.get(self.key)


def _slots(block: nn.Module) -> list[_Slot]:
    """Every buffer, and every tensor or number that is a plain attribute."""
    found = []
    for module in block.modules():
        found += [_Slot(module._buffers, key) for key in module._buffers]
        found += [_Slot(vars(module), key) for key, value in vars(module).items() if _is_plain(value)]
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


class _Kept(NamedTuple):
    """A value before the forward pass, and of a tensor a copy."""

    slot: _Slot
    value: Any
    copy: Any

    def has_changed(self) -> bool:
        """By values: kernels write running statistics past torch's count of versions. Fake tensors have none."""
        now = self.slot.value()
        if isinstance(now, Tensor) and isinstance(self.value, Tensor):
            return now is not self.value or (type(now) is Tensor and not torch.equal(now, self.copy))
        return now is not self.value and now != self.value


@final
class _Before:
    """What a block held before its forward pass, as far as the pass changed it."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._generators = random.getstate(), np.random.get_state()

    @property
    def slots(self) -> list[_Slot]:
        return [kept.slot for kept in self._kept]

    def note(self, slots: list[_Slot]) -> None:
        for slot in slots:
            value = slot.value()
            copy = value.detach().clone() if isinstance(value, Tensor) else value
            self._kept.append(_Kept(slot, value, copy))

    def drop_unchanged(self) -> None:
        self._kept = [kept for kept in self._kept if kept.has_changed()]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """As it was before while inside, and afterwards as it is now: what is written inside is written to copies."""
        now = [(kept.slot, kept.slot.value()) for kept in self._kept]
        generators = random.getstate(), np.random.get_state()
        _set_generators(self._generators)
        for kept in self._kept:
            kept.slot.registry[kept.slot.key] = kept.copy.clone() if isinstance(kept.copy, Tensor) else kept.copy
        try:
            yield
        finally:
            for slot, value in now:
                slot.registry[slot.key] = value
            _set_generators(generators)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


@final
class _SecondRun:
    """Entered each time the block is computed again: twice where a graph is kept for two backward passes."""

    def __init__(self, before: _Before, mode: AbstractContextManager[Any]) -> None:
        self._before, self._mode = before, mode
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._before.put_back())
            stack.enter_context(self._mode)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
