"""Cutting one window's rows into micro-batches while training, as often as memory asks for.

The batch stays where it is and is never written to; a micro-batch is made when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, final

from torch import Tensor

from autoaccum.batches.cutting import narrow_rows, take_rows
from autoaccum.batches.layout import BatchDim, Layout, find_layout, lists_read, refuse_doubtful_layout
from autoaccum.batches.opaque import SplitFn, opaque_length, parts_of
from autoaccum.batches.packing import pack, refuse_above
from autoaccum.batches.pieces import AbstractShare, LimitFn, Piece, Pieces, Window, renewed, shape_of
from autoaccum.batches.structure import is_array, leaves_of, nodes_of
from autoaccum.errors import InvalidRequestError
from autoaccum.schedule import balanced, split_rows, steps_for

CostFn = Callable[[Any], float]

_LAYOUTS_KEPT = 64


@final
class Slicer:
    """How the batches of one training run are cut.

    Args:
        micro_batch: The most rows of a micro-batch; infinite where only the cost counts.
        batch_dim: See `find_layout`.
        split: `split(batch, sizes) -> list of micro-batches`, for batches that cannot be cut by rows.
        multiple_of: Every micro-batch but a window's last is a multiple of it.
        at_least: The fewest rows that the model runs at all (2 where BatchNorm refuses one).
        planned: The sizes to use for a window of exactly their sum, while nothing has failed.
        cost: What a micro-batch costs; with it, `max_cost` is the limit instead of rows.
        refuse: Raises where the caller knows a reason to doubt what was found without `batch_dim`.
    """

    def __init__(
        self,
        micro_batch: float,
        *,
        batch_dim: BatchDim = None,
        split: SplitFn | None = None,
        multiple_of: int = 1,
        at_least: int = 1,
        planned: tuple[int, ...] = (),
        cost: CostFn | None = None,
        max_cost: float = inf,
        refuse: Callable[[Any], None] | None = None,
    ) -> None:
        self.micro_batch, self.batch_dim, self.split = micro_batch, batch_dim, split
        self.multiple_of, self.at_least, self.planned = multiple_of, at_least, planned
        self.cost, self.max_cost = cost, max_cost
        self.refuse = refuse
        self._layouts: dict[Any, Layout] = {}
        self._lists_read: dict[tuple[str, ...], str] = {}  # of earlier batches, for those that may be read in two ways

    def share(self, batch: Any) -> AbstractShare:
        """What is to be cut: a whole batch, or a `Window` of ready micro-batches; None and no rows are an empty share.

        Raises:
            InvalidRequestError: When the rows cannot be told.
        """
        if isinstance(batch, Window):
            return _ReadyShare(self, batch.micro_batches)
        if _has_no_rows(batch, self.batch_dim):
            return _ReadyShare(self, ())
        return _RowShare(self, batch, self.layout(batch)) if self.split is None else _SplitShare(self, batch)

    def layout(self, batch: Any) -> Layout:
        """Where the rows are; looked for once for all batches that are built alike.

        Raises:
            InvalidRequestError: When they cannot be told.
        """
        built = tuple(
            (path, type(node), (node.shape, node.dtype) if is_array(node) else None) for path, node in nodes_of(batch)
        )
        known = self._layouts.get(built)
        if known is None:
            known = find_layout(batch, self.batch_dim, read_before=self._lists_read)
            refuse_doubtful_layout(batch, known, self.batch_dim)
            if self.refuse is not None and self.batch_dim is None:
                self.refuse(batch)
            news = lists_read(batch, known)
            # A new one for every batch: lists of items of all sizes. And one that may be read otherwise from now on.
            if len(self._layouts) >= _LAYOUTS_KEPT or not news.items() <= self._lists_read.items():
                self._layouts.clear()
            self._lists_read |= news
            self._layouts[built] = known
        return known

    def sizes(self, rows: int, limit: float) -> tuple[int, ...]:
        """Near even sizes over these rows, none above the limit."""
        limit = min(limit, self.micro_batch)
        if self.planned and rows == sum(self.planned) and limit >= max(self.planned):
            return self.planned
        if limit >= rows:
            return (rows,)
        multiple_of = self.multiple_of if limit >= self.multiple_of else 1  # memory wins over a convenience
        sizes = split_rows(rows, steps_for(rows, int(limit), multiple_of), multiple_of)
        if min(sizes) < self.at_least:  # a few rows above the limit may run, these cannot
            sizes = balanced(rows, max(1, min(rows // self.at_least, len(sizes))))
        return sizes


@final
class _RowShare(AbstractShare):
    """A batch whose rows can be seen."""

    def __init__(self, slicer: Slicer, batch: Any, layout: Layout) -> None:
        self._slicer, self._batch, self._layout = slicer, batch, layout
        self.rows, self._shape = layout.rows, shape_of(batch, layout)
        self._costs: list[float] | None = None
        leaves = dict(leaves_of(batch)) if layout.cuts else {}
        self._cuts_views = all(
            how == "items" or (how == 0 and isinstance(leaves[path], Tensor) and leaves[path].is_contiguous())
            for path, how in layout.cuts.items()
        )

    def cut(self, limit_of: LimitFn) -> Pieces:
        if self._slicer.cost is not None:
            return self._cut_by_cost(limit_of(()))
        sizes = self._slicer.sizes(self._layout.rows, limit_of(self._shape))
        pieces = tuple(Piece(size, size, self._shape, size > 1) for size in sizes)
        if not self._cuts_views:
            return Pieces(pieces, lambda: map(renewed, self._in_order(sizes)))
        made = list(self._in_order(sizes))  # views take no memory, and making them twice takes time
        return Pieces(pieces, lambda: map(renewed, made))

    def _in_order(self, sizes: Sequence[int]) -> Iterator[Any]:
        start = 0
        for size in sizes:
            yield narrow_rows(self._batch, self._layout, start, size)
            start += size

    def first(self, sizes: Sequence[int]) -> list[Any]:
        return list(self._in_order(sizes))

    def _cut_by_cost(self, limit: float) -> Pieces:
        if self._costs is None:
            self._costs = [self._cost([row]) for row in range(self._layout.rows)]
            refuse_above(self._costs, self._slicer.max_cost)
        packed = pack(self._costs, self._cost, min(limit, self._slicer.max_cost))
        pieces = tuple(Piece(len(rows), self._cost(rows), (), len(rows) > 1, tuple(rows)) for rows in packed)
        return Pieces(pieces, lambda: (self._taken(rows) for rows in packed))

    def _taken(self, rows: Sequence[int]) -> Any:
        return take_rows(self._batch, self._layout, len(rows), rows)

    def _cost(self, rows: Sequence[int]) -> float:
        assert self._slicer.cost is not None
        cost = float(self._slicer.cost(self._taken(rows)))
        if not 0 <= cost < inf:
            raise InvalidRequestError(f"cost= gave {cost} for a micro-batch; expected a finite number >= 0.")
        return cost


@final
class _SplitShare(AbstractShare):
    """A batch that only the user's `split` may cut."""

    def __init__(self, slicer: Slicer, batch: Any) -> None:
        self._slicer, self._batch = slicer, batch
        try:
            self._count = find_layout(batch, slicer.batch_dim).rows
        except InvalidRequestError:
            self._count = opaque_length(batch)
        self.rows = self._count

    def cut(self, limit_of: LimitFn) -> Pieces:
        sizes = self._slicer.sizes(self._count, limit_of(()))
        parts = self.first(sizes)
        return Pieces(tuple(Piece(size, size, (), size > 1) for size in sizes), lambda: iter(parts))

    def first(self, sizes: Sequence[int]) -> list[Any]:
        assert self._slicer.split is not None
        return parts_of(self._slicer.split, self._batch, sizes, self._count - sum(sizes))


@final
class _ReadyShare(AbstractShare):
    """Ready micro-batches: taken as they are, cut only where one of their shape has run out of memory before."""

    rows = None

    def __init__(self, slicer: Slicer, micro_batches: Sequence[Any]) -> None:
        self._slicer, self._micro_batches = slicer, micro_batches
        self._layouts = [self._layout(batch) for batch in micro_batches]

    def _layout(self, batch: Any) -> Layout | None:
        try:
            return self._slicer.layout(batch)
        except InvalidRequestError:
            return None

    def cut(self, limit_of: LimitFn) -> Pieces:
        ready = zip(self._micro_batches, self._layouts, strict=True)
        cuts = [self._sizes(batch, layout, limit_of) for batch, layout in ready]
        return Pieces(tuple(piece for pieces in cuts for piece in pieces), lambda: self._made(cuts))

    def _sizes(self, batch: Any, layout: Layout | None, limit_of: LimitFn) -> tuple[Piece, ...]:
        shape = () if layout is None or self._slicer.split is not None else shape_of(batch, layout)
        rows = _opaque_rows(batch) if layout is None else layout.rows
        uncuttable = layout is None and self._slicer.split is None
        if rows is None or uncuttable or self._slicer.cost is not None:
            return (Piece(rows, rows or 1, shape, False),)
        limit = limit_of(shape)
        sizes = (rows,) if limit >= rows else split_rows(rows, steps_for(rows, int(limit)))
        return tuple(Piece(size, size, shape, size > 1) for size in sizes)

    def first(self, sizes: Sequence[int]) -> list[Any]:
        if not self._micro_batches:
            raise InvalidRequestError("the batch is empty; expected one with rows.")
        raise InvalidRequestError("a window of ready micro-batches is no whole batch; expected a batch that can be cut.")

    def _made(self, cuts: Sequence[Sequence[Piece]]) -> Iterator[Any]:
        for batch, layout, pieces in zip(self._micro_batches, self._layouts, cuts, strict=True):
            if len(pieces) == 1:
                yield renewed(batch)
            elif self._slicer.split is not None:
                yield from parts_of(self._slicer.split, batch, [piece.rows or 0 for piece in pieces])
            else:
                assert layout is not None
                yield from _RowShare(self._slicer, batch, layout)._in_order([piece.rows or 0 for piece in pieces])


def _has_no_rows(batch: Any, batch_dim: BatchDim) -> bool:
    """Nothing at all, empty containers, or tensors without rows."""
    if batch is None:
        return True
    leaves = [leaf for _, leaf in leaves_of(batch)]
    if not any(is_array(leaf) for leaf in leaves):
        return all(isinstance(leaf, (list, tuple, dict)) and not leaf for leaf in leaves)
    if not any(is_array(leaf) and 0 in leaf.shape for leaf in leaves):
        return False
    try:
        return find_layout(batch, batch_dim, may_be_empty=True).rows == 0
    except InvalidRequestError:
        return False  # whoever looks closer says what is wrong


def _opaque_rows(batch: Any) -> int | None:
    try:
        return opaque_length(batch)
    except InvalidRequestError:
        return None
