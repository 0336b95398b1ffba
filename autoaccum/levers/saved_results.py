"""Results of a block's expensive operations, kept in its first run and taken in its second: selective checkpointing."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


@final
class Results:
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
class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first run: keeps results."""

    def __init__(self, results: Results) -> None:
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
class Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The second run: takes results instead of computing them."""

    def __init__(self, results: Results) -> None:
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
