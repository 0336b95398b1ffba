"""What the rows of one window become: micro-batches with their sizes and shapes, and what can make them again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from autoaccum.batches.layout import Layout
from autoaccum.batches.structure import covers, is_array, item_size, leaves_of, mapped, name_of
from autoaccum.caps import Shape


@final
class Window:
    """The ready micro-batches of one optimizer step, in order. Made by `Accumulator.windows`, or by hand.

    Args:
        micro_batches: Taken as they are; opaque ones (graphs, nested tensors) included. May be empty.

    Example:
        >>> import torch
        >>> len(Window([torch.randn(2, 3), torch.randn(1, 3)]))
        2
    """

    def __init__(self, micro_batches: Sequence[Any]) -> None:
        self.micro_batches = tuple(micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.micro_batches)


class Piece(NamedTuple):
    """A micro-batch to be: how many rows, what counts against the limit, the shape that the limit belongs to.

    Attributes:
        rows: None where they cannot be counted.
        size: Rows, or the cost.
        cuttable: Whether it can be made smaller.
        positions: Which rows of the batch, None where they are the next ones in order.
    """

    rows: int | None
    size: float
    shape: Shape
    cuttable: bool
    positions: tuple[int, ...] | None = None


class Pieces(NamedTuple):
    """A window, cut: its pieces, and how to make the micro-batches, in the same order, each time it is called."""

    pieces: tuple[Piece, ...]
    make: Callable[[], Iterator[Any]]


LimitFn = Callable[[Shape], float]


class AbstractShare(ABC):
    """This rank's rows of one window.

    Attributes:
        rows: How many, None for ready micro-batches.
    """

    rows: int | None

    @abstractmethod
    def cut(self, limit_of: LimitFn) -> Pieces:
        """Cut into micro-batches, none above the limit of its shape."""

    @abstractmethod
    def first(self, sizes: Sequence[int]) -> list[Any]:
        """The first rows, in parts of these sizes."""


def shape_of(batch: Any, layout: Layout) -> Shape:
    """The parts of a batch, each with its shape without the rows; items of lists by the size of the largest one."""
    shape: list[tuple[str, tuple[int, ...]]] = []
    leaves = dict(leaves_of(batch))
    for path, how in layout.cuts.items():
        if how == "items":
            inner = [leaf for at, leaf in leaves.items() if covers(at, path) and is_array(leaf)]
            shape.append((name_of(path), (_largest_item(inner),)))
        elif how == "sequences":
            shape.append((name_of(path), (_power_of_two(int(leaves[(*path, "batch_sizes")].numel())),)))
        else:
            sizes = leaves[path].shape
            shape.append((name_of(path), tuple(int(size) for dim, size in enumerate(sizes) if dim != how)))
    return tuple(shape)


def _largest_item(arrays: Sequence[Any]) -> int:
    """Elements of the largest one, up to the next power of two: every image size as a shape of its own teaches nothing."""
    return _power_of_two(max((item_size(array) for array in arrays), default=0))


def _power_of_two(size: int) -> int:
    return 1 << size.bit_length()


def renewed(batch: Any) -> Any:
    """The same leaves in new containers: a step that pops its labels must find them again in a replay."""
    if isinstance(batch, Tensor) or (type(batch) is tuple and all(isinstance(part, Tensor) for part in batch)):
        return batch  # nothing can be taken out of these
    return mapped(batch, {}, (), lambda leaf, how: leaf)
