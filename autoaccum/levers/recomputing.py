"""A block whose forward pass runs again in the backward pass, as if it had run once.

torch's checkpoint puts torch's generators back for the second run. What else a forward pass changes is put back here:
buffers (running statistics would be updated twice), what modules hold as plain attributes, and all other generators.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

_aten = torch.ops.aten


def _overloads(names: tuple[str, ...]) -> list[Any]:
    return [getattr(_aten, name).default for name in names if hasattr(_aten, name)]


# Operations whose results are kept rather than computed again: nearly all of a block's work, about half of its memory.
# As torchtitan's list for transformers, and convolutions.
SAVED_OPERATIONS = frozenset(
    _overloads(
        (
            *("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "convolution", "_convolution"),
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
            *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
            *("_scaled_dot_product_fused_attention_overrideable", "mkldnn_rnn_layer", "_cudnn_rnn"),
        )
    )
)

_SMALL_BYTES = 64 * 1024  # as in rewind.py: statistics; masks and tables of positions are larger and never change


@final
class Recomputation:
    """Runs one block so that its activations are not kept.

    Args:
        block: Its modules' buffers and plain attributes are what a forward pass may change.
        selective: Keep the results of matrix products, convolutions and attention.
    """

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self._selective = selective
        self._modules = list(block.modules())
        self._slots: list[_Slot] = []
        self._num_places = -1
        self._large: list[_Slot] | None = None  # those that change, learned in the first forward pass

    def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the block's forward."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if isinstance(function, partial):  # transformers binds the keywords so
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        results = _Results() if self._selective else None
        # Keywords go as arguments: torch saves those, and looks only at them for the devices whose generators it puts back.
        call = _Call(function, len(args), tuple(kwargs))
        out = checkpoint(call, *args, *kwargs.values(), use_reentrant=False, context_fn=partial(self._contexts, results))
        call.raise_error()
        if results is not None:
            results.let_go_of(out)
        return out

    def _contexts(self, results: _Results | None) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the first run and for the second; the second may be entered several times."""
        before = _Before(self._modules)
        first = nullcontext() if results is None else _Keeping(results)
        return self._first_run(before, first), _SecondRun(before, results)

    @contextmanager
    def _first_run(self, before: _Before, mode: AbstractContextManager[Any]) -> Iterator[None]:
        before.note(self._all_slots(), self._large)
        with mode:
            yield
        if self._large is None:
            self._large = before.drop_unchanged()

    def _all_slots(self) -> list[_Slot]:
        """Looked for again when modules have got more attributes."""
        num_places = sum(len(vars(module)) + len(module._buffers) for module in self._modules)
        if num_places != self._num_places:
            self._slots, self._num_places = _slots(self._modules), num_places
        return self._slots


@final
class _Call:
    """A function of keywords, as one of arguments alone.

    An error of the first run comes out later: older checkpoints (torch 2.6) leave their hooks and modes on when one passes
    through them, for as long as anybody holds its traceback.
    """

    def __init__(self, function: Callable[..., Any], num_args: int, names: tuple[str, ...]) -> None:
        self._function, self._num_args, self._names = function, num_args, names
        self._error: BaseException | None = None
        self._is_first = True

    def __call__(self, *args: Any) -> Any:
        named = dict(zip(self._names, args[self._num_args :], strict=True))
        if not self._is_first:
            return self._function(*args[: self._num_args], **named)
        self._is_first = False
        try:
            return self._function(*args[: self._num_args], **named)
        except BaseException as error:  # noqa: BLE001 - raised again as soon as checkpoint has returned
            self._error = error
            return None

    def raise_error(self) -> None:
        """Raise the error of the first run, if there was one."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads here


class _Slot(NamedTuple):
    """Where a module holds a value."""

    registry: MutableMapping[str, Any]
    key: str

    def is_same(self, other: _Slot) -> bool:
        return self.registry is other.registry and self.key == other.key

    def value(self) -> Any:
        return self.registry.get(self.key)


def _slots(modules: Sequence[nn.Module]) -> list[_Slot]:
    """Every buffer, and every plain attribute that can be copied: numbers, tensors, lists, generators."""
    found = []
    for module in modules:
        found += [_Slot(module._buffers, key) for key in module._buffers]
        found += [_Slot(vars(module), key) for key, value in vars(module).items() if _is_plain(key, value)]
    return found


_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_NUMBERS, _CONTAINERS = (int, float, str, type(None)), (list, dict, set)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


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

    slot: _Slot
    value: Any
    copy: Any
    may_drop: bool

    def has_changed(self) -> bool:
        """By values: kernels write running statistics past torch's count of versions. Fake tensors have none."""
        now = self.slot.value()
        is_comparable = type(now) is Tensor and now.layout == torch.strided
        return now is not self.value or (is_comparable and not torch.equal(now, self.copy))


@final
class _Before:
    """What a block held before its forward pass."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._kept: list[_Kept] = []
        self._generators = random.getstate(), np.random.get_state()

    def note(self, slots: Sequence[_Slot], large: Sequence[_Slot] | None) -> None:
        """Copy what is small, and of what is large these; with None all, as long as it is not known what changes."""
        for slot in slots:
            value = slot.value()
            is_large = isinstance(value, Tensor) and value.numel() * value.element_size() > _SMALL_BYTES
            if not is_large or large is None or any(slot.is_same(other) for other in large):
                self._kept.append(_Kept(slot, value, _copied(value), is_large))

    def drop_unchanged(self) -> list[_Slot]:
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


@final
class _SecondRun:
    """Entered each time the block is computed again: twice where a graph is kept for two backward passes."""

    def __init__(self, before: _Before, results: _Results | None) -> None:
        self._before, self._results = before, results
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._before.put_back())
            if self._results is not None:
                stack.enter_context(_Reusing(self._results))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@final
class _Results:
    """Results of the saved operations of one forward pass, in order. What is written to afterwards is not among them.

    torch's own `create_selective_checkpoint_contexts` notices such writes by the version of a tensor, which views made by
    `_unsafe_view` do not share (`scores = q @ k; scores += mask` is computed with the mask added twice), and then raises;
    and it computes a block again only once.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._places: dict[int, list[tuple[Any, int]]] = defaultdict(list)  # storage -> what lies in it
        self._counts: dict[Any, int] = defaultdict(int)

    def keep(self, operation: Any, out: Any) -> None:
        index = self._counts[operation]
        self._counts[operation] += 1
        self._kept[operation][index] = tree_map(_detached, out)
        for storage in _storages(out):
            self._places[storage].append((operation, index))

    def let_go_of(self, tensors: Any) -> None:
        """These are written to, or may be by others."""
        for storage in _storages(tensors):
            for operation, index in self._places.pop(storage, ()):
                self._kept[operation].pop(index, None)

    def take(self, operation: Any, index: int) -> Any:
        """The result, once; None where it has to be computed again."""
        return self._kept[operation].pop(index, None)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _storages(tree: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


@final
class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first run: keeps results."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAVED_OPERATIONS:
            self._results.keep(func, out)
        elif func._schema.is_mutable:
            self._results.let_go_of(_written(func, args, kwargs))
        return out


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    arguments = func._schema.arguments
    named = [(argument, kwargs.get(argument.name)) for argument in arguments if argument.kwarg_only]
    pairs = [*zip(arguments, args, strict=False), *named]
    return [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]


@final
class _Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The second run: takes results instead of computing them."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._counts: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPERATIONS:
            index = self._counts[func]
            self._counts[func] += 1
            kept = self._results.take(func, index)
            if kept is not None:
                return kept
        return func(*args, **(kwargs or {}))
