"""A few rows of a trainer's data, with labels as different as there are: what is weighed wrongly shows on unlike rows."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.batches.cutting import split_rows_of
from autoaccum.batches.layout import find_layout
from autoaccum.batches.sources import source_of
from autoaccum.batches.structure import is_array, leaves_of
from autoaccum.errors import InvalidRequestError

_ROWS = 8  # at once
_ROWS_IN_ALL = 16
_LOOKED_AT = 64
_NONE = object()


class Rows(NamedTuple):
    """The same rows as one batch, and cut into uneven micro-batches in two ways.

    Over one cut the micro-batches may happen to have equally many labels, and a mean of their means to be right.
    """

    whole: Any
    cuts: list[list[Any]]


def few_rows(loader_or_sample: Any, at_most: int) -> list[Rows]:
    """Batches of a few rows, at least two in each, in which the labels are as different as there are.

    Raises:
        InvalidRequestError: When there are not two, or they cannot be divided.
    """
    count = max(2, min(_ROWS, at_most))
    if isinstance(loader_or_sample, DataLoader):
        items = _unlike_items(loader_or_sample)
        if items is not None:
            return [_collated(group, loader_or_sample.collate_fn) for group in _chained(items, count)]
    whole = source_of(loader_or_sample).varied(count)
    layout = find_layout(whole)
    return [Rows(whole, [split_rows_of(whole, layout, sizes) for sizes in _uneven(layout.rows)])]


def _chained(items: list[Any], count: int) -> Iterator[list[Any]]:
    """Groups of so many, each of which begins with the last one of the group before.

    Where all groups are weighed rightly because their rows weigh the same, all rows do.
    """
    count = min(count, len(items))
    for start in range(0, max(1, len(items) - 1), count - 1):
        group = items[start : start + count]
        yield group if len(group) == count else items[-count:]


def _unlike_items(loader: DataLoader[Any]) -> list[Any] | None:
    """Some with many and with few labels in turn, of all classes; None where the loader does not collate items."""
    if loader.batch_size is None and loader.batch_sampler is None:
        return None
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        items = list(islice(iter(dataset), _LOOKED_AT))
    else:
        looked_at = min(len(dataset), _LOOKED_AT)
        items = [dataset[position * len(dataset) // looked_at] for position in range(looked_at)]
    if len(items) < 2:
        raise InvalidRequestError(f"the training data has {len(items)} rows; expected at least 2.")
    by_class: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        by_class[_class_of(item)].append(item)
    in_turn = [item for turn in zip_longest(*by_class.values(), fillvalue=_NONE) for item in turn if item is not _NONE]
    ordered = sorted(in_turn, key=_num_labels, reverse=True)
    if _num_labels(ordered[0]) == _num_labels(ordered[-1]):
        return ordered[:_ROWS_IN_ALL]  # still in turn
    half = min(_ROWS_IN_ALL, len(ordered)) // 2
    most, fewest = ordered[:half], ordered[half:]
    fewest = sorted(fewest, key=_num_labels)[: min(_ROWS_IN_ALL, len(ordered)) - half]
    return list(chain.from_iterable(zip(most, fewest, strict=False))) + fewest[half:]


def _class_of(item: Any) -> tuple[Any, ...]:
    """The whole numbers that an item holds one by one: its class, the place of an answer."""
    found = []
    for path, leaf in leaves_of(item):
        if is_array(leaf) and (leaf.numel() if isinstance(leaf, Tensor) else leaf.size) == 1:
            leaf = leaf.item()
        if isinstance(leaf, int):
            found.append((path, leaf))
    return tuple(found)


def _num_labels(item: Any) -> int:
    labels = item.get("labels") if hasattr(item, "get") else None
    if labels is None:
        labels = item.get("input_ids") if hasattr(item, "get") else None
    try:
        return int((torch.as_tensor(labels) != -100).sum())
    except (TypeError, ValueError, RuntimeError):
        return 0


def _collated(items: list[Any], collate: Any) -> Rows:
    """Collated once, since collators may draw at random, and cut; where a batch cannot be cut, collated apart."""
    whole = collate(copy.deepcopy(items))
    try:
        layout = find_layout(whole, rows=len(items))
    except InvalidRequestError:
        return Rows(whole, [[collate(copy.deepcopy(part)) for part in _cut(items, sizes)] for sizes in _uneven(len(items))])
    return Rows(whole, [split_rows_of(whole, layout, sizes) for sizes in _uneven(len(items))])


def _cut(items: list[Any], sizes: list[int]) -> list[list[Any]]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [items[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _uneven(count: int) -> list[list[int]]:
    """Two cuts into micro-batches of different sizes: equal ones hide wrong weights."""
    found = {2: [1, 1], 3: [2, 1], 4: [3, 1], 5: [3, 2], 6: [3, 2, 1], 7: [4, 2, 1]}.get(count, [3, count - 5, 2])
    return [found, found[::-1]]
