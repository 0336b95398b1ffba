"""Walking nested batches: what is a container, what is a leaf, and how to build the like of it again.

Knows nothing of rows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autoaccum.errors import InvalidRequestError

_DEEPEST = 100  # containers in containers; Python itself gives up at a few hundred


def mapped(
    node: Any,
    cuts: Mapping[tuple[str, ...], int | str],
    path: tuple[str, ...],
    leaf_fn: Callable[[Any, int | str | None], Any],
) -> Any:
    """The same structure with `leaf_fn(leaf, how it is cut)` in place of every leaf and of every list cut by items."""
    if path in cuts:
        return leaf_fn(node, cuts[path])
    if isinstance(node, PackedSequence):  # its `batch_sizes` stay on the host
        changeable = {name: getattr(node, name) for name in ("data", "sorted_indices", "unsorted_indices")}
        return node._replace(**{name: leaf_fn(part, None) for name, part in changeable.items() if part is not None})
    children = [] if is_array(node) else list(children_of(node))
    if not children:
        return leaf_fn(node, None)
    changed = [(key, mapped(child, cuts, (*path, key), leaf_fn)) for key, child in children]
    return rebuilt(node, changed)


def rebuilt(node: Any, changed: list[tuple[str, Any]]) -> Any:
    """A container of the same type with these parts in place of its own."""
    values = [value for _, value in changed]
    rebuilt: Any
    if isinstance(node, MutableMapping):
        if isinstance(node, (dict, UserDict)):
            rebuilt = copy.copy(node)  # keeps a BatchEncoding a BatchEncoding; its __copy__ does not share the data
        else:  # a shallow copy of any other mapping may share what it keeps its entries in
            rebuilt = copy.deepcopy(node, {id(value): value for value in node.values()})
        for key, value in zip(list(node), values, strict=True):
            rebuilt[key] = value
        return rebuilt
    if isinstance(node, Mapping):
        return dict(zip(node, values, strict=True))
    if dataclasses.is_dataclass(node):
        rebuilt = copy.copy(node)
        for name, value in changed:
            object.__setattr__(rebuilt, name, value)  # also where the dataclass is frozen
        return rebuilt
    return same_sequence(node, values)


def same_sequence(node: Any, values: list[Any]) -> Any:
    """The values as a list, tuple or named tuple of the same type."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):  # the only mark that a named tuple has
        return type(node)(*values)
    return type(node)(values)


def children_of(node: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container with their names; nothing for a leaf."""
    if isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, tuple) and hasattr(node, "_fields"):
        yield from zip(node._fields, node, strict=True)
    elif isinstance(node, (tuple, list)):
        yield from ((str(index), value) for index, value in enumerate(node))
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        set_names = (field.name for field in dataclasses.fields(node) if hasattr(node, field.name))  # one may never be set
        yield from ((name, getattr(node, name)) for name in set_names)


def leaves_of(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every leaf with its path, in order."""
    children = [] if is_array(node) else list(children_of(node))
    if not children:
        yield path, node
        return
    refuse_endless(path)
    for key, child in children:
        yield from leaves_of(child, (*path, key))


def nodes_of(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every container and every leaf with its path, containers first."""
    yield path, node
    refuse_endless(path)
    if not is_array(node):
        for key, child in children_of(node):
            yield from nodes_of(child, (*path, key))


def refuse_endless(path: tuple[str, ...]) -> None:
    """Refuse to look deeper than any batch is: a container that holds itself has no end.

    Raises:
        InvalidRequestError: With the remedy.
    """
    if len(path) > _DEEPEST:
        raise InvalidRequestError(
            f"the sample is nested more than {_DEEPEST} deep, or holds itself; expected tensors in a few containers. "
            "Take out what the model does not read."
        )


def is_array(node: Any) -> bool:
    """Whether it has a shape that may hold rows; a nested tensor has none."""
    return isinstance(node, np.ndarray) or (isinstance(node, Tensor) and not node.is_nested)


def is_plain_sequence(node: Any) -> bool:
    """A list or tuple, not a named tuple."""
    return isinstance(node, (tuple, list)) and not hasattr(node, "_fields")


def cloned(node: Any) -> Any:
    """A copy that shares no tensor memory."""
    if isinstance(node, Tensor):
        return node.detach().clone().requires_grad_(node.requires_grad)
    if isinstance(node, np.ndarray):
        return node.copy()
    children = [(key, cloned(child)) for key, child in children_of(node)]
    return rebuilt(node, children) if children or isinstance(node, (MutableMapping, list)) else node


def name_of(path: tuple[str, ...]) -> str:
    """The name of a leaf as the user writes it."""
    return ".".join(path) or "batch"


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device; the host does not wait for what comes from pinned memory.

    Nothing is pinned here: pinning pageable memory first takes as long as copying it. A loader with `pin_memory=True` does
    that in its own thread.
    """
    waits = device.type == "cpu"  # what is copied to the host may be read before it has arrived
    return mapped(
        batch, {}, (), lambda leaf, how: leaf.to(device, non_blocking=not waits) if isinstance(leaf, Tensor) else leaf
    )


def tensors_in(batch: Any) -> list[Tensor]:
    """Every tensor in the batch, in order."""
    return [leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def is_inside(path: tuple[str, ...], of: Container[tuple[str, ...]]) -> bool:
    """Whether the path, or a container around it, is one of those; as fast for a hundred thousand of them as for one."""
    return any(path[:depth] in of for depth in range(len(path) + 1))


def covers(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    """Whether the outer path is the inner one or a container around it."""
    return inner[: len(outer)] == outer


def item_size(item: Any) -> int:
    """How large an item is, in elements; only compared with its like."""
    total = 0
    for _, leaf in leaves_of(item):
        if isinstance(leaf, Tensor):
            total += leaf.numel()
        elif isinstance(leaf, np.ndarray):
            total += leaf.size
        else:
            total += len(leaf) if isinstance(leaf, (str, bytes)) else 1
    return total
