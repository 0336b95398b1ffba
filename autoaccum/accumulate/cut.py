"""How this rank's rows of one window are cut, and what a failure teaches about that. Runs nothing and undoes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from autoaccum.batches.pieces import AbstractShare, Piece
from autoaccum.batches.slicing import Slicer
from autoaccum.caps import Caps, Shape
from autoaccum.devices.base import Verdict


@final
class Cut:
    """The micro-batches of one window on this rank, cut as often as memory asks for.

    Args:
        slicer: How the batches of this training are cut.
        caps: What earlier windows have learned; what this one learns goes there.

    Attributes:
        pieces: Of the latest cut, in order.
    """

    def __init__(self, slicer: Slicer, caps: Caps) -> None:
        self._slicer, self._caps = slicer, caps
        self._share: AbstractShare | None = None
        self._limits_before: list[dict[str, Any]] | None = None
        self.pieces: tuple[Piece, ...] = ()

    def begin(self, batch: Any) -> None:
        """Look where the rows are.

        Raises:
            InvalidRequestError: When they cannot be told.
        """
        self._share = self._slicer.share(batch)

    def again(self) -> Callable[[], Iterator[Any]]:
        """Cut within the limits of now; gives how to make the micro-batches."""
        assert self._share is not None
        self.pieces, make = self._share.cut(self._caps.limit)
        return make

    def piece_at(self, index: int) -> Piece:
        """The micro-batch of this index; ranks in lockstep repeat the last one."""
        return self.pieces[min(index, len(self.pieces) - 1)]

    def limit_of(self, piece: Piece) -> float:
        """What is known to be too large for micro-batches of this shape."""
        return self._caps.limit(piece.shape)

    def in_words(self, piece: Piece) -> str:
        """The size of a micro-batch, in what it is cut by."""
        return f"{piece.size:g} rows" if self._slicer.cost is None else f"a cost of {piece.size:g}"

    def otherwise(self, piece: Piece, verdict: Verdict) -> str | None:
        """Learn from a piece that failed how to cut; why that is impossible, if it is."""
        assert self._share is not None
        slicer, floor = self._slicer, self._slicer.at_least
        self._limits_before = self._caps.state() if self._limits_before is None else self._limits_before
        if verdict is Verdict.FLOOR:
            slicer.at_least = max(floor, (piece.rows or 0) + 1)
        elif piece.cuttable:
            self._caps.fail(piece.shape, piece.size)
        else:
            rows = "a single row" if piece.rows == 1 else "a micro-batch that cannot be cut (batch_dim= or split= may help)"
            return f"it failed with {rows}."
        if self._share.cut(self._caps.limit).pieces != self.pieces:
            return None
        slicer.at_least = floor
        with_floor = f" with at least {floor} rows in each micro-batch" if floor > 1 else ""
        return f"these {sum(piece.rows or 0 for piece in self.pieces)} rows cannot be cut in another way{with_floor}."

    def forget(self) -> None:
        """What this window has learned from failures was not about the size."""
        if self._limits_before is not None:
            self._caps.load(self._limits_before)

    def lower(self, limit: float) -> None:
        """Take over what another rank needs. A failure of this rank's own says nothing about its other shapes."""
        for shape in self._shapes():
            self._caps.lower(shape, self._largest(shape), limit)

    def learn(self) -> None:
        """The window ran."""
        for shape in self._shapes():
            self._caps.run(shape, self._largest(shape))

    def _shapes(self) -> set[Shape]:
        return {piece.shape for piece in self.pieces}

    def _largest(self, shape: Shape) -> float:
        return max(piece.size for piece in self.pieces if piece.shape == shape)
