"""A sample of any kind -> any number of rows. The largest items are used: a probe must see the worst case."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar, final

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, default_collate

from autoaccum.batches.cutting import split_rows_of, take_rows
from autoaccum.batches.layout import (
    BatchDim,
    Layout,
    carriers_of,
    describe,
    described,
    find_layout,
    refuse_doubtful_layout,
)
from autoaccum.batches.structure import (
    children_of,
    cloned,
    is_array,
    is_inside,
    leaves_of,
    nodes_of,
    tensors_in,
)
from autoaccum.errors import InvalidRequestError
from autoaccum.units import format_bytes

SplitFn = Callable[[Any, Sequence[int]], Sequence[Any]]
T = TypeVar("T")

_ITEMS_LOOKED_AT = 2000  # enough to meet the long tail of a shuffled data set; spread evenly over a longer one
_LOOKING_TIME_S = 3.0  # decoding images can take milliseconds each; the search itself takes seconds


class AbstractSource(ABC):
    """Gives any number of rows in the user's own form.

    Attributes:
        length: How many distinct rows there are, None when not known or when the rows are only an example.
        description: In words, what the probe batch is made of.
        distinct: How many different rows it can give, None when as many as are asked for.
        cuts_views: Micro-batches are views of one batch, so that the whole of it stays in memory.
    """

    length: int | None
    description: str
    distinct: int | None = None
    cuts_views: ClassVar[bool] = False

    @abstractmethod
    def take(self, count: int) -> Any:
        """A fresh batch of `count` rows that shares no memory with the user's."""

    def varied(self, count: int) -> Any:
        """A fresh batch of `count` rows from all over the data, not the largest ones."""
        return self.take(count)

    @abstractmethod
    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        """A batch of `sum(sizes)` rows as micro-batches."""


@final
class BatchSource(AbstractSource):
    """An example batch, whose rows are repeated."""

    cuts_views: ClassVar[bool] = True

    length = None

    def __init__(self, batch: Any, batch_dim: BatchDim) -> None:
        self._batch = batch
        self._layout = find_layout(batch, batch_dim)
        refuse_doubtful_layout(batch, self._layout, batch_dim)
        _refuse_beyond_host(batch, self._layout)
        self.distinct = self._layout.rows
        self._order = _largest_rows_first(batch, self._layout)
        self.description = "the sample's " + describe(batch, self._layout) + (", the largest first" if self._order else "")

    def take(self, count: int) -> Any:
        return take_rows(self._batch, self._layout, count, self._order)

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        return split_rows_of(self.take(sum(sizes)), self._layout, sizes)


@final
class SplitSource(AbstractSource):
    """A batch that only the caller's `split(batch, sizes)` may cut (graphs, packed sequences).

    Where its rows can be seen they are repeated as needed; an opaque batch has as many as its length says.
    """

    def __init__(self, batch: Any, split: SplitFn, batch_dim: BatchDim) -> None:
        self._batch, self._split = batch, split
        try:
            self._layout: Layout | None = find_layout(batch, batch_dim)
        except InvalidRequestError:
            self._layout = None
        self.length = None if self._layout else opaque_length(batch)
        self.distinct = rows = self._layout.rows if self._layout else self.length
        self.description = f"{type(batch).__name__} of {rows} rows, cut by split="

    def take(self, count: int) -> Any:
        return self.micro_batches([count])[0]

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        if self._layout:
            return parts_of(self._split, take_rows(self._batch, self._layout, sum(sizes)), sizes)
        rest = (self.length or 0) - sum(sizes)
        if rest >= 0:
            return parts_of(self._split, copy.deepcopy(self._batch), sizes, rest)
        if len(sizes) == 1:
            raise InvalidRequestError(f"the sample has {self.length} rows where {sizes[0]} were asked for.")
        return [self.take(size) for size in sizes]


def opaque_length(batch: Any) -> int:
    """The rows of a batch that cannot be looked into; a container's length would be that of its parts."""
    if not list(children_of(batch)):
        try:
            return len(batch)
        except TypeError:
            pass
    raise InvalidRequestError(
        f"the rows of a sample of type {type(batch).__name__} cannot be counted; give the sample as a callable n -> batch."
    )


def _refuse_beyond_host(batch: Any, layout: Layout) -> None:
    """Refuse rows that cannot be copied: an expanded tensor holds one number and claims any size."""
    claimed = 0
    for path, leaf in leaves_of(batch):
        if is_array(leaf) and not (isinstance(leaf, Tensor) and leaf.is_meta):
            num = leaf.numel() if isinstance(leaf, Tensor) else leaf.size
            claimed += num * leaf.itemsize // (layout.rows if is_inside(path, layout.cuts) else 1)
    held = psutil.virtual_memory().total
    if claimed > held:
        raise InvalidRequestError(
            f"a micro-batch of one row would take {format_bytes(claimed)} where this machine has {format_bytes(held)}; "
            "expand tensors inside the training step, or leave out what it does not read."
        )


def _largest_rows_first(batch: Any, layout: Layout) -> list[int] | None:
    """The order of rows by what their items hold, where lists of items differ in size; else None."""
    if "items" not in layout.cuts.values():
        return None
    sizes = [0] * layout.rows
    for path, node in nodes_of(batch):
        if layout.cuts.get(path) == "items":
            sizes = [size + item_size(item) for size, item in zip(sizes, node, strict=True)]
    if len(set(sizes)) <= 1:
        return None
    return sorted(range(layout.rows), key=lambda row: (-sizes[row], row))


def parts_of(split: SplitFn, batch: Any, sizes: Sequence[int], rest: int = 0) -> list[Any]:
    """What the caller's `split` makes of the batch, without the part that holds the rest."""
    wanted = [*sizes, rest] if rest else list(sizes)
    parts = list(split(batch, wanted))
    if len(parts) != len(wanted):
        raise InvalidRequestError(f"split(batch, {wanted}) gave {len(parts)} micro-batches; expected {len(wanted)}.")
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
        return batch if self._opaque else cloned(batch)  # the function may hand out views of data that it keeps

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        return [self.take(size) for size in sizes]


def _check_row_count(batch: Any, count: int, batch_dim: BatchDim) -> None:
    """Refuse a batch in which nothing has the number of rows that was asked for."""
    if batch_dim is not None:
        find_layout(batch, batch_dim, rows=count)
        return
    parts = list(carriers_of(batch))
    sizes = {size for part in parts for size in part.readings}
    sizes |= {int(size) for tensor in tensors_in(batch) for size in tensor.shape}
    if parts and count not in sizes:
        raise InvalidRequestError(
            f"the sample function was asked for {count} rows and returned other ones: {described(parts)}."
        )


@final
class ItemSource(AbstractSource):
    """A data set, and how its items are put together. The largest of the items looked at are used."""

    cuts_views: ClassVar[bool] = True

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        batch_dim: BatchDim,
        split: SplitFn | None = None,
        indices: Any = None,
    ) -> None:
        self._dataset, self._collate, self._batch_dim, self._split = dataset, collate, batch_dim, split
        self._kept: dict[int, Any] = {}
        if isinstance(dataset, IterableDataset):
            self.length, sizes = self._look_at_stream()
        else:
            self.length, sizes = self._look_at_items(range(len(dataset)) if indices is None else indices)
        if not sizes:
            raise InvalidRequestError("the sample is an empty data set; expected at least one item.")
        self._order = sorted(sizes, key=lambda index: (-sizes[index], index))
        self.distinct = len(self._order)
        spread = {sizes[self._order[0]], sizes[self._order[-1]]}
        of = f" of {self.length}" if self.length is not None and self.length > len(sizes) else ""
        sized = f"sizes {min(spread)} to {max(spread)}, the largest first" if len(spread) > 1 else "all of one size"
        self.description = f"{len(sizes)}{of} items looked at ({sized})"

    def _look_at_items(self, indices: Sequence[int]) -> tuple[int, dict[int, int]]:
        step = max(1, -(-len(indices) // _ITEMS_LOOKED_AT))
        chosen = (*indices[-1:], *indices[:-1:step])  # the last one first: sorted data sets end with the longest
        sizes = {index: item_size(item) for index, item in _looked_at((i, self._dataset[i]) for i in chosen)}
        return len(indices), sizes

    def _look_at_stream(self) -> tuple[int | None, dict[int, int]]:
        stream = iter(enumerate(self._dataset))
        self._kept = dict(_looked_at(stream))
        ended = len(self._kept) <= _ITEMS_LOOKED_AT and next(stream, None) is None  # then its length is known after all
        return len(self._kept) if ended else None, {index: item_size(item) for index, item in self._kept.items()}

    def take(self, count: int) -> Any:
        chosen = [self._order[position % len(self._order)] for position in range(count)]
        return self._collate([self._item(index) for index in chosen])

    def varied(self, count: int) -> Any:
        known = sorted(self._order)
        count = min(count, len(known))
        chosen = [known[position * len(known) // count] for position in range(count)]
        return self._collate([self._item(index) for index in chosen])

    def _item(self, index: int) -> Any:
        return copy.deepcopy(self._kept[index]) if index in self._kept else cloned(self._dataset[index])

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        batch = self.take(sum(sizes))
        if self._split is not None:
            return parts_of(self._split, batch, sizes)
        try:
            layout = find_layout(batch, self._batch_dim, rows=sum(sizes))
            refuse_doubtful_layout(batch, layout, self._batch_dim)
        except InvalidRequestError:  # a collate function may build what cannot be cut: then it builds each micro-batch
            return [self.take(size) for size in sizes]
        if self._batch_dim is None and not _holds_one_row(self.take(1), layout):
            return [self.take(size) for size in sizes]
        return split_rows_of(batch, layout, sizes)


def _looked_at(items: Iterable[T]) -> Iterator[T]:
    """The first items, as long as the time for looking lasts; at least one, where there is one."""
    started = time.monotonic()
    for item in islice(items, _ITEMS_LOOKED_AT + 1):
        yield item
        if time.monotonic() - started > _LOOKING_TIME_S:
            return


def _holds_one_row(batch: Any, layout: Layout) -> bool:
    """Whether a batch of one row has length one wherever this layout cuts: a time axis that happens to fit has not."""
    leaves = dict(leaves_of(batch))
    return all(leaves[path].shape[int(how)] == 1 for path, how in layout.cuts.items() if is_array(leaves.get(path)))


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
    if sample is None or isinstance(sample, (str, bytes)) or (isinstance(sample, (list, tuple, dict)) and not sample):
        what = f"an empty {type(sample).__name__}" if isinstance(sample, (list, tuple, dict)) else repr(sample)[:60]
        raise InvalidRequestError(
            f"the sample is {what}; expected a batch (tensors, in tuples, lists or mappings), a Dataset, a DataLoader, or a "
            "callable n -> batch."
        )
    if isinstance(sample, DataLoader):
        return _source_of_loader(sample, batch_dim, split)
    if _is_dataset(sample):
        return ItemSource(sample, default_collate, batch_dim, split)
    if callable(sample) and not isinstance(sample, torch.nn.Module) and not list(children_of(sample)):
        return CallableSource(sample, batch_dim, split)
    if split is not None:
        return SplitSource(sample, split, batch_dim)
    return BatchSource(sample, batch_dim)


def _is_dataset(sample: Any) -> bool:
    """A torch data set, or a Hugging Face one, which is not a subclass of it but has the same two methods."""
    if isinstance(sample, Dataset):
        return True
    container = is_array(sample) or isinstance(sample, (Mapping, list, tuple, str, bytes)) or bool(list(children_of(sample)))
    return not container and hasattr(sample, "__getitem__") and hasattr(sample, "__len__") and hasattr(sample, "features")


def _source_of_loader(loader: DataLoader[Any], batch_dim: BatchDim, split: SplitFn | None) -> AbstractSource:
    collate = loader.collate_fn
    if loader.batch_size is None and loader.batch_sampler is None:  # the data set yields ready batches
        largest = max(_looked_at(_ready_batches(loader)), key=item_size, default=None)
        if largest is None:
            raise InvalidRequestError("the sample is an empty data set; expected at least one batch.")
        largest = collate(largest)
        return SplitSource(largest, split, batch_dim) if split is not None else BatchSource(largest, batch_dim)
    sampler = _sampler_of(loader)
    indices = list(sampler.indices) if isinstance(sampler, SubsetRandomSampler) else None
    return ItemSource(loader.dataset, collate, batch_dim, split, indices)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What draws the rows: a batch sampler that was given has its own, inside of another one that divides it over ranks."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    return getattr(batches, "sampler", loader.sampler)


def _ready_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader that does no batching itself, without its workers and without its sampler's randomness."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        yield from dataset
    elif isinstance(loader.sampler, BatchSampler):  # a data set that is asked for many items at once
        whole = list(range(len(dataset)))
        size = loader.sampler.batch_size
        yield from (dataset[whole[start : start + size]] for start in range(0, len(whole), size))
    else:
        yield from (dataset[index] for index in range(len(dataset)))
