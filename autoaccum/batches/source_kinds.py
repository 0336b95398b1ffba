"""What gives any number of rows: an example batch, one that only `split` can cut, a function, a data set.

The largest items are used: a probe must see the worst case.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar, final

import psutil
from torch import Tensor
from torch.utils.data import IterableDataset

from autoaccum.batches.carriers import carriers_of, described
from autoaccum.batches.cutting import split_rows_of, take_rows
from autoaccum.batches.layout import BatchDim, Layout, describe, find_layout, refuse_doubtful_layout
from autoaccum.batches.opaque import SplitFn, opaque_length, parts_of
from autoaccum.batches.packed_sequences import lengths_of
from autoaccum.batches.ragged import laid_end_to_end
from autoaccum.batches.structure import cloned, is_array, is_inside, item_size, leaves_of, nodes_of, tensors_in
from autoaccum.errors import InvalidRequestError
from autoaccum.units import format_bytes

_ITEMS_LOOKED_AT = 2000  # enough to meet the long tail of a shuffled data set; spread evenly over a longer one


_LOOKING_TIME_S = 3.0  # decoding images can take milliseconds each; the search itself takes seconds


T = TypeVar("T")


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
    """A batch that only the caller's `split(batch, sizes)` may cut (graphs, nested tensors).

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
            nested = [leaf for _, leaf in leaves_of(self._batch) if isinstance(leaf, Tensor) and leaf.is_nested]
            known = {id(leaf): leaf.detach().clone() for leaf in nested}  # those that are strided cannot be deep-copied
            return parts_of(self._split, copy.deepcopy(self._batch, known), sizes, rest)
        if len(sizes) == 1:
            raise InvalidRequestError(f"the sample has {self.length} rows where {sizes[0]} were asked for.")
        return [self.take(size) for size in sizes]


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
    """The order of rows by what their items hold, where lists of items or packed sequences differ in size; else None."""
    if not any(isinstance(how, str) for how in layout.cuts.values()):
        return None
    sizes = [0] * layout.rows
    for path, node in nodes_of(batch):
        how = layout.cuts.get(path)
        if how == "items":
            sizes = [size + item_size(item) for size, item in zip(sizes, node, strict=True)]
        elif how == "sequences":
            sizes = [size + length for size, length in zip(sizes, lengths_of(node).tolist(), strict=True)]
    if len(set(sizes)) <= 1:
        return None
    return sorted(range(layout.rows), key=lambda row: (-sizes[row], row))


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
    if parts and count not in sizes and not _holds_sequences(batch, count):
        raise InvalidRequestError(
            f"the sample function was asked for {count} rows and returned other ones: {described(parts)}."
        )


def _holds_sequences(batch: Any, count: int) -> bool:
    """Whether so many sequences are laid end to end in it."""
    try:
        laid = laid_end_to_end(batch, find_layout(batch).cuts)
    except InvalidRequestError:
        return False
    return laid is not None and laid.num == count


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
        sizes = {index: item_size(item) for index, item in looked_at((i, self._dataset[i]) for i in chosen)}
        return len(indices), sizes

    def _look_at_stream(self) -> tuple[int | None, dict[int, int]]:
        stream = iter(enumerate(self._dataset))
        self._kept = dict(looked_at(stream))
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


def looked_at(items: Iterable[T]) -> Iterator[T]:
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
