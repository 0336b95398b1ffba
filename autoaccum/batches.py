"""Any sample -> n rows -> micro-batches -> weights.

Decides which parts of a batch belong to single rows and how to cut them. What is cut keeps its container type; what does
not belong to rows is passed on whole. Where two readings are possible this is an error that names the leaves: a time axis
cut by mistake would run and give a wrong gradient. Knows nothing of models, memory or devices.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, default_collate

from autoaccum.errors import InvalidRequestError

BatchDim = int | Mapping[str | int, int | None] | None
SplitFn = Callable[[Any, Sequence[int]], Sequence[Any]]

_ITEMS_LOOKED_AT = 2000  # enough to meet the long tail of a shuffled data set; spread evenly over a longer one
_LOOKING_TIME_S = 3.0  # decoding images can take milliseconds each; the search itself takes seconds
_CHANNELS = (1, 3, 4)  # a first dimension of this size in a list of 3-d tensors may be colour channels

_REMEDY = (
    'Say where the rows are with batch_dim= (an int, or a mapping such as {"input_ids": 0, "state": 1, "table": None}; '
    "None passes a leaf on whole), or give the sample as a callable n -> batch."
)


class Layout(NamedTuple):
    """Where the rows of a batch are: `cuts` maps the path of a leaf to its dimension, or to "items" for a list."""

    rows: int
    cuts: Mapping[tuple[str, ...], int | str]


# ---------------------------------------------------------------------------------------------------------------------
# Finding the rows


class _Carrier(NamedTuple):
    """Something that may hold the rows: every reading is a number of rows with the cuts that go with it."""

    path: tuple[str, ...]
    readings: Mapping[int, Mapping[tuple[str, ...], int | str]]
    holds_tensors: bool


def find_layout(batch: Any, batch_dim: BatchDim = None, *, rows: int | None = None) -> Layout:
    """Where the rows of a batch are.

    Without `batch_dim` the rows are the leading dimension that the tensors share, or the items of lists (of images, of
    captions, of per-item dicts). A leaf that does not have it is passed on whole.

    Args:
        batch: A tensor, array, tuple, list, mapping, dataclass or named tuple, nested.
        batch_dim: The dimension that holds the rows: one for all tensors, or by leaf name. A name is the path of keys and
            indices joined by dots ("labels", "0", "1.boxes"); None passes that leaf on whole.
        rows: How many rows the batch must have, where the caller knows.

    Raises:
        InvalidRequestError: When there are no rows, or more than one reading is possible.
    """
    if isinstance(batch_dim, Mapping):
        layout = _layout_by_name(batch, {str(name): dim for name, dim in batch_dim.items()}, rows)
    elif batch_dim is not None:
        layout = _layout_by_dim(batch, batch_dim)
    else:
        layout = _layout_by_vote(list(_carriers(batch, ())), rows)
    if rows is not None and layout.rows != rows:
        raise InvalidRequestError(f"the batch has {layout.rows} rows where {rows} were asked for. {_REMEDY}")
    if layout.rows < 1:
        raise InvalidRequestError("the sample is empty: it has 0 rows; expected a batch of at least one row.")
    return layout


def _layout_by_vote(carriers: list[_Carrier], rows: int | None) -> Layout:
    with_tensors = [carrier for carrier in carriers if carrier.holds_tensors]
    voters = with_tensors or carriers
    if not voters:
        raise InvalidRequestError(f"the sample holds no tensor with a dimension of rows. {_REMEDY}")
    votes = Counter(size for carrier in voters for size in carrier.readings)
    if rows is not None and rows in votes:
        chosen = rows
    else:
        chosen = max(votes, key=lambda size: (votes[size], -_order(voters, size)))
        _refuse_ambiguity(voters, votes, chosen)
    cuts: dict[tuple[str, ...], int | str] = {}
    for carrier in carriers:
        cuts.update(carrier.readings.get(chosen, {}))
    return Layout(chosen, cuts)


def _order(voters: list[_Carrier], size: int) -> int:
    """How early a reading comes among a carrier's own: its first is the preferred one."""
    return min(list(carrier.readings).index(size) for carrier in voters if size in carrier.readings)


def _refuse_ambiguity(voters: list[_Carrier], votes: Counter[int], chosen: int) -> None:
    unanimous = votes[chosen] == len(voters)
    rivals = [size for size, count in votes.items() if size != chosen and count == votes[chosen]]
    image_like = [
        carrier
        for carrier in voters
        if unanimous and len(carrier.readings) > 1 and chosen in _CHANNELS and _is_list_of_images(carrier, chosen)
    ]
    if (rivals and not unanimous) or image_like:
        raise InvalidRequestError(f"the rows of the sample cannot be told: {_described(voters)}. {_REMEDY}")


def _is_list_of_images(carrier: _Carrier, chosen: int) -> bool:
    """A list of tensors that share their first dimension, which is as small as a number of colour channels."""
    return all(path != carrier.path for path in carrier.readings[chosen]) and len(carrier.readings[chosen]) > 1


def _described(carriers: list[_Carrier]) -> str:
    return ", ".join(f"{_name(c.path)} has {' or '.join(map(str, c.readings))} rows" for c in carriers[:8])


def _carriers(node: Any, path: tuple[str, ...]) -> Iterator[_Carrier]:
    if _is_array(node):
        if node.ndim:
            yield _Carrier(path, {int(node.shape[0]): {path: 0}}, True)
        return
    children = list(_children(node))
    if not _is_plain_sequence(node):
        for key, child in children:
            yield from _carriers(child, (*path, key))
        return
    inner = [carrier for key, child in children for carrier in _carriers(child, (*path, key))]
    with_tensors = [carrier for carrier in inner if carrier.holds_tensors]
    as_items = {len(children): {path: "items"}} if children else {}
    if not with_tensors:
        if children:
            yield _Carrier(path, as_items, False)
        return
    if not _alike([child for _, child in children]):
        yield from inner
        return
    shared = set.intersection(*(set(carrier.readings) for carrier in with_tensors))
    inside = {size: {k: v for c in inner for k, v in c.readings.get(size, {}).items()} for size in sorted(shared)}
    mappings = isinstance(children[0][1], Mapping)  # a list of dicts is a list of items, as detection models take
    yield _Carrier(path, {**as_items, **inside} if mappings else {**inside, **as_items}, True)


def _alike(children: list[Any]) -> bool:
    """Whether the elements of a list could be the items of as many rows: same type, same keys or length, same ndim."""

    def kind(child: Any) -> tuple[Any, ...]:
        if _is_array(child):
            return ("array", child.ndim, str(child.dtype))
        inner = tuple(sorted(map(str, child))) if isinstance(child, Mapping) else len(list(_children(child)))
        return (type(child), inner)

    return len({kind(child) for child in children}) == 1


def _layout_by_dim(batch: Any, batch_dim: int) -> Layout:
    dims: dict[str, int | None] = {}
    for path, leaf in _leaves(batch):
        if _is_array(leaf) and leaf.ndim:
            dims[_name(path)] = batch_dim
    return _layout_by_name(batch, dims, None)


def _layout_by_name(batch: Any, dims: Mapping[str, int | None], rows: int | None) -> Layout:
    named = {_name(path): (path, leaf) for path, leaf in _leaves(batch)}
    unknown = [name for name in dims if name not in named]
    if unknown:
        raise InvalidRequestError(
            f"batch_dim names {unknown[0]!r}, which the sample lacks; its leaves: {sorted(named)}."
        )
    cuts: dict[tuple[str, ...], int | str] = {}
    sizes: dict[str, int] = {}
    for name, dim in dims.items():
        path, leaf = named[name]
        if dim is None:
            continue
        if not _is_array(leaf) or not -leaf.ndim <= dim < leaf.ndim:
            shape = tuple(leaf.shape) if _is_array(leaf) else type(leaf).__name__
            raise InvalidRequestError(f"leaf {name!r} {shape} has no dimension {dim}. {_REMEDY}")
        cuts[path] = dim % leaf.ndim
        sizes[name] = int(leaf.shape[dim])
    others = [c for c in _carriers(batch, ()) if not any(_covers(named[name][0], c.path) for name in dims)]
    if not sizes:
        return _layout_by_vote(others, rows)
    if len(set(sizes.values())) > 1:
        raise InvalidRequestError(f"batch_dim gives different numbers of rows: {sizes}. {_REMEDY}")
    found = next(iter(sizes.values()))
    for carrier in others:
        cuts.update(carrier.readings.get(found, {}))
    return Layout(found, cuts)


def _covers(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    """Whether the outer path is the inner one or a container around it."""
    return inner[: len(outer)] == outer


def _refuse_hidden_rows(batch: Any, layout: Layout, batch_dim: Mapping[str | int, int | None] | None) -> None:
    """A tensor passed on whole must not have the rows in another dimension, as the start state of an RNN has."""
    declared = {str(name) for name in batch_dim or ()}
    for path, leaf in _leaves(batch):
        if not _is_array(leaf) or _name(path) in declared or any(_covers(path, cut) for cut in layout.cuts):
            continue
        if layout.rows in leaf.shape and layout.rows > 1:
            raise InvalidRequestError(
                f"leaf {_name(path)!r} {tuple(leaf.shape)} has no leading dimension of {layout.rows} rows, but another one of "
                f"that length. {_REMEDY}"
            )


def _refuse_other_reading(batch: Any) -> None:
    """Where the leading dimensions differ, no other length may be common to all tensors: that could be the rows."""
    shapes = [leaf.shape for _, leaf in _leaves(batch) if _is_array(leaf) and leaf.ndim]
    leading = {int(shape[0]) for shape in shapes}
    in_all = set.intersection(*(set(map(int, shape)) for shape in shapes)) - leading - {1} if shapes else set()
    if len(leading) > 1 and in_all:
        raise InvalidRequestError(
            f"every tensor has a dimension of {max(in_all)}, but not as the leading one: the rows may be there. {_REMEDY}"
        )


def shared_second_dim(batch: Any) -> int | None:
    """The length of dimension 1 where every tensor has one and all agree: then dimension 0 could as well be time."""
    shapes = [leaf.shape for _, leaf in _leaves(batch) if _is_array(leaf) and leaf.ndim]
    seconds = {int(shape[1]) if len(shape) > 1 else None for shape in shapes}
    return seconds.pop() if len(seconds) == 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# Cutting


def take_rows(batch: Any, layout: Layout, count: int) -> Any:
    """A copy of `count` rows, going round when the batch has fewer; nothing in it shares memory with the batch."""
    indices = torch.arange(count) % layout.rows

    def cut(leaf: Any, how: int | str | None) -> Any:
        if how == "items":
            return _same_sequence(leaf, [_cloned(leaf[index]) for index in indices.tolist()])
        if how is None:
            return _cloned(leaf)
        if isinstance(leaf, np.ndarray):
            return np.take(leaf, indices.numpy(), axis=int(how))
        return leaf.detach().index_select(int(how), indices.to(leaf.device)).requires_grad_(leaf.requires_grad)

    return _mapped(batch, layout.cuts, (), cut)


def narrow_rows(batch: Any, layout: Layout, start: int, count: int) -> Any:
    """Rows `start` to `start + count`, as views; contiguous, because cuDNN refuses a state that is not."""

    def cut(leaf: Any, how: int | str | None) -> Any:
        if how is None:
            return leaf
        if how == "items":
            return _same_sequence(leaf, list(leaf[start : start + count]))
        if isinstance(leaf, np.ndarray):
            return np.take(leaf, np.arange(start, start + count), axis=int(how))
        return leaf.narrow(int(how), start, count).contiguous()

    return _mapped(batch, layout.cuts, (), cut)


def split_rows_of(batch: Any, layout: Layout, sizes: Sequence[int]) -> list[Any]:
    """The batch as micro-batches of these sizes, in order."""
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [narrow_rows(batch, layout, start, size) for start, size in zip(starts, sizes, strict=True)]


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device."""
    return _mapped(batch, {}, (), lambda leaf, how: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def clone(batch: Any) -> Any:
    """The batch with every tensor copied."""
    return _mapped(batch, {}, (), lambda leaf, how: _cloned(leaf))


def tensors_in(batch: Any) -> list[Tensor]:
    """Every tensor in the batch, in order."""
    return [leaf for _, leaf in _leaves(batch) if isinstance(leaf, Tensor)]


def describe(batch: Any, layout: Layout) -> str:
    """In words: which leaves are cut, and which are passed on whole."""
    whole = [
        _name(path) + (f" {tuple(leaf.shape)}" if _is_array(leaf) else "")
        for path, leaf in _leaves(batch)
        if not any(_covers(path, cut) for cut in layout.cuts)
    ]
    arrays = {path: leaf for path, leaf in _leaves(batch) if path in layout.cuts and _is_array(leaf)}
    cut = [
        f"{_name(path)} {tuple(arrays[path].shape)}" + (f" along dimension {how}" if how else "")
        if path in arrays
        else f"the items of {_name(path)}"
        for path, how in layout.cuts.items()
    ]
    return f"{layout.rows} rows: {_listed(cut)}" + (f"; passed on whole: {_listed(whole)}" if whole else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _mapped(
    node: Any,
    cuts: Mapping[tuple[str, ...], int | str],
    path: tuple[str, ...],
    leaf_fn: Callable[[Any, int | str | None], Any],
) -> Any:
    """The same structure with `leaf_fn(leaf, how it is cut)` in place of every leaf and of every list cut by items."""
    if path in cuts:
        return leaf_fn(node, cuts[path])
    children = list(_children(node))
    if _is_array(node) or not children:
        return leaf_fn(node, None)
    changed = [(key, _mapped(child, cuts, (*path, key), leaf_fn)) for key, child in children]
    return _rebuilt(node, changed)


def _rebuilt(node: Any, changed: list[tuple[str, Any]]) -> Any:
    values = [value for _, value in changed]
    if isinstance(node, MutableMapping):
        rebuilt = copy.copy(node)  # keeps a BatchEncoding a BatchEncoding; its __copy__ does not share the data
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
    return _same_sequence(node, values)


def _same_sequence(node: Any, values: list[Any]) -> Any:
    if isinstance(node, tuple) and hasattr(node, "_fields"):  # the only mark that a named tuple has
        return type(node)(*values)
    return type(node)(values)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container with their names; nothing for a leaf."""
    if isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, tuple) and hasattr(node, "_fields"):
        yield from zip(node._fields, node, strict=True)
    elif isinstance(node, (tuple, list)):
        yield from ((str(index), value) for index, value in enumerate(node))
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        yield from ((field.name, getattr(node, field.name)) for field in dataclasses.fields(node))


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = list(_children(node))
    if _is_array(node) or not children:
        yield path, node
        return
    for key, child in children:
        yield from _leaves(child, (*path, key))


def _is_array(node: Any) -> bool:
    return isinstance(node, (Tensor, np.ndarray))


def _is_plain_sequence(node: Any) -> bool:
    return isinstance(node, (tuple, list)) and not hasattr(node, "_fields")


def _cloned(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.detach().clone().requires_grad_(node.requires_grad)
    if isinstance(node, np.ndarray):
        return node.copy()
    children = list(_children(node))
    return _rebuilt(node, [(key, _cloned(child)) for key, child in children]) if children else node


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path) or "batch"


# ---------------------------------------------------------------------------------------------------------------------
# Sources: a sample of any kind that gives n rows


class AbstractSource(ABC):
    """Gives any number of rows in the user's own form.

    Attributes:
        length: How many distinct rows there are, None when not known or when the rows are only an example.
        description: In words, what the probe batch is made of.
    """

    length: int | None
    description: str

    @abstractmethod
    def take(self, count: int) -> Any:
        """A fresh batch of `count` rows that shares no memory with the user's."""

    @abstractmethod
    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        """A batch of `sum(sizes)` rows as micro-batches."""


@final
class BatchSource(AbstractSource):
    """An example batch, whose rows are repeated."""

    length = None

    def __init__(self, batch: Any, batch_dim: BatchDim) -> None:
        self._batch = batch
        self._layout = find_layout(batch, batch_dim)
        if batch_dim is None:
            _refuse_other_reading(batch)
        if not isinstance(batch_dim, int):
            _refuse_hidden_rows(batch, self._layout, batch_dim)
        self.description = "the sample's " + describe(batch, self._layout)

    def take(self, count: int) -> Any:
        return take_rows(self._batch, self._layout, count)

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        return split_rows_of(self.take(sum(sizes)), self._layout, sizes)


@final
class SplitSource(AbstractSource):
    """An opaque batch that only the caller's `split(batch, sizes)` can cut (graphs, packed sequences)."""

    def __init__(self, batch: Any, split: SplitFn) -> None:
        self._batch, self._split = batch, split
        try:
            self.length = len(batch)
        except TypeError:
            raise InvalidRequestError(
                f"a sample of type {type(batch).__name__} has no length, so its rows cannot be counted; "
                "give the sample as a callable n -> batch."
            ) from None
        self.description = f"{type(batch).__name__} of {self.length} rows, cut by split="

    def take(self, count: int) -> Any:
        return self.micro_batches([count])[0]

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        rest = (self.length or 0) - sum(sizes)
        parts = list(self._split(copy.deepcopy(self._batch), [*sizes, rest] if rest else list(sizes)))
        if len(parts) < len(sizes):
            raise InvalidRequestError(
                f"split(batch, {list(sizes)}) gave {len(parts)} micro-batches; expected {len(sizes)}."
            )
        return parts[: len(sizes)]


@final
class CallableSource(AbstractSource):
    """The caller's own function of the number of rows."""

    length = None
    description = "what the sample function returns for that many rows"

    def __init__(self, function: Callable[[int], Any], batch_dim: BatchDim, split: SplitFn | None) -> None:
        self._function, self._batch_dim, self._opaque = function, batch_dim, split is not None

    def take(self, count: int) -> Any:
        batch = self._function(count)
        if not self._opaque:
            _check_row_count(batch, count, self._batch_dim)
        return batch

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        return [self.take(size) for size in sizes]


def _check_row_count(batch: Any, count: int, batch_dim: BatchDim) -> None:
    """Refuse a batch in which nothing has the number of rows that was asked for."""
    if batch_dim is not None:
        find_layout(batch, batch_dim, rows=count)
        return
    carriers = list(_carriers(batch, ()))
    sizes = {size for carrier in carriers for size in carrier.readings}
    sizes |= {int(size) for tensor in tensors_in(batch) for size in tensor.shape}
    if carriers and count not in sizes:
        raise InvalidRequestError(
            f"the sample function was asked for {count} rows and returned other ones: {_described(carriers)}."
        )


@final
class ItemSource(AbstractSource):
    """A data set, and how its items are put together. The largest of the items looked at are used."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], batch_dim: BatchDim, indices: Any = None
    ) -> None:
        self._dataset, self._collate, self._batch_dim = dataset, collate, batch_dim
        self._kept: dict[int, Any] = {}
        if isinstance(dataset, IterableDataset):
            self.length, sizes = None, self._look_at_stream()
        else:
            self.length, sizes = self._look_at_items(range(len(dataset)) if indices is None else indices)
        if not sizes:
            raise InvalidRequestError("the sample is an empty data set; expected at least one item.")
        self._order = sorted(sizes, key=lambda index: -sizes[index])
        spread = {sizes[self._order[0]], sizes[self._order[-1]]}
        of = f" of {self.length}" if self.length is not None and self.length > len(sizes) else ""
        sized = f"sizes {min(spread)} to {max(spread)}, the largest first" if len(spread) > 1 else "all of one size"
        self.description = f"{len(sizes)}{of} items looked at ({sized})"

    def _look_at_items(self, indices: Sequence[int]) -> tuple[int, dict[int, int]]:
        step = max(1, -(-len(indices) // _ITEMS_LOOKED_AT))
        started, sizes = time.monotonic(), {}
        for index in (*indices[::step], *indices[-1:]):  # the last one too: sorted data sets end with the longest
            sizes[index] = _item_size(self._dataset[index])
            if time.monotonic() - started > _LOOKING_TIME_S:
                break
        return len(indices), sizes

    def _look_at_stream(self) -> dict[int, int]:
        started, sizes = time.monotonic(), {}
        for index, item in enumerate(islice(iter(self._dataset), _ITEMS_LOOKED_AT)):
            self._kept[index] = item
            sizes[index] = _item_size(item)
            if time.monotonic() - started > _LOOKING_TIME_S:
                break
        return sizes

    def take(self, count: int) -> Any:
        chosen = [self._order[position % len(self._order)] for position in range(count)]
        items = [copy.deepcopy(self._kept[index]) if index in self._kept else self._dataset[index] for index in chosen]
        return self._collate(items)

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        batch = self.take(sum(sizes))
        try:
            layout = find_layout(batch, self._batch_dim, rows=sum(sizes))
        except InvalidRequestError:  # a collate function may build what cannot be cut: then it builds each micro-batch
            return [self.take(size) for size in sizes]
        return split_rows_of(batch, layout, sizes)


def _item_size(item: Any) -> int:
    """How large an item is, in elements; only compared with its like."""
    total = 0
    for _, leaf in _leaves(item):
        if isinstance(leaf, Tensor):
            total += leaf.numel()
        elif isinstance(leaf, np.ndarray):
            total += leaf.size
        else:
            total += len(leaf) if isinstance(leaf, (str, bytes)) else 1
    return total


def source_of(sample: Any, batch_dim: BatchDim = None, split: SplitFn | None = None) -> AbstractSource:
    """Turn any supported sample into a source of rows.

    Args:
        sample: A batch of any size >= 1, a `Dataset`, a `DataLoader`, or a callable `n -> batch`. A loader is never
            iterated: its data set and its collate function are used, so no worker starts and no sampler advances.
        batch_dim: See `find_layout`.
        split: `split(batch, sizes) -> list of micro-batches` for batches that cannot be cut by rows.

    Raises:
        InvalidRequestError: When it holds no rows, or they cannot be told.
    """
    if isinstance(sample, DataLoader):
        return _source_of_loader(sample, batch_dim, split)
    if _is_dataset(sample):
        return ItemSource(sample, default_collate, batch_dim)
    if callable(sample) and not isinstance(sample, torch.nn.Module) and not list(_children(sample)):
        return CallableSource(sample, batch_dim, split)
    if split is not None:
        return SplitSource(sample, split)
    return BatchSource(sample, batch_dim)


def _is_dataset(sample: Any) -> bool:
    """A torch data set, or a foreign one (Hugging Face `datasets`) that has the same two methods and is no container."""
    if isinstance(sample, Dataset):
        return True
    container = (
        _is_array(sample) or isinstance(sample, (Mapping, list, tuple, str, bytes)) or bool(list(_children(sample)))
    )
    return (
        not container and hasattr(sample, "__getitem__") and hasattr(sample, "__len__") and hasattr(sample, "features")
    )


def _source_of_loader(loader: DataLoader[Any], batch_dim: BatchDim, split: SplitFn | None) -> AbstractSource:
    collate = loader.collate_fn
    if loader.batch_size is None and loader.batch_sampler is None:  # the data set yields ready batches
        ready = islice(iter(loader.dataset), _ITEMS_LOOKED_AT) if isinstance(loader.dataset, IterableDataset) else ()
        batches = list(ready) or [loader.dataset[0]]
        largest = collate(max(batches, key=_item_size))
        return SplitSource(largest, split) if split is not None else BatchSource(largest, batch_dim)
    indices = list(loader.sampler.indices) if isinstance(loader.sampler, SubsetRandomSampler) else None
    return ItemSource(loader.dataset, collate, batch_dim, indices)


# ---------------------------------------------------------------------------------------------------------------------
# Weights: what the loss is a mean over


@final
class Tokens:
    """Counts the labels of a micro-batch that the loss is a mean over. Made by `tokens`."""

    def __init__(self, key: str | int, ignore_index: int, shift: bool) -> None:
        self.key, self.ignore_index, self.shift = key, ignore_index, shift

    def __call__(self, batch: Any) -> int:
        """Valid labels of this micro-batch."""
        ready = isinstance(batch, Mapping) and "shift_labels" in batch
        labels = batch["shift_labels"] if ready else batch[self.key]
        if self.shift and not ready:
            labels = labels[..., 1:]
        return int((labels != self.ignore_index).sum())


def tokens(key: str | int, ignore_index: int = -100, shift: bool = False) -> Tokens:
    """Weigh micro-batches by their valid labels, for a loss that is a mean over tokens.

    Args:
        key: Where the labels are in a batch: a name, or an index for tuples. A ready `shift_labels` entry is counted
            instead, as it is.
        ignore_index: Labels of this value do not count.
        shift: Leave out the first position, as causal language models do inside.

    Example:
        >>> import torch
        >>> tokens("labels")({"labels": torch.tensor([[5, 7, -100], [2, -100, -100]])})
        3
    """
    return Tokens(key, ignore_index, shift)
