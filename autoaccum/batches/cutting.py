"""Taking rows out of a batch, once it is known where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from autoaccum.batches.layout import Layout
from autoaccum.batches.packed_sequences import take_sequences
from autoaccum.batches.structure import (
    cloned,
    mapped,
    same_sequence,
)

# torch takes no rows out of these (NotImplementedError of index_select, torch 2.13); the bits are the same either way
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take_rows(batch: Any, layout: Layout, count: int, order: Sequence[int] | None = None) -> Any:
    """A copy of `count` rows, going round when the batch has fewer; nothing in it shares memory with the batch."""
    indices = torch.arange(count) % layout.rows
    if order is not None:
        indices = torch.tensor(order)[indices]

    def cut(leaf: Any, how: int | str | None) -> Any:
        if how == "items":
            return same_sequence(leaf, [cloned(leaf[index]) for index in indices.tolist()])
        if how == "sequences":
            return take_sequences(leaf, indices.tolist())
        if how is None:
            return cloned(leaf)
        if isinstance(leaf, np.ndarray):
            return np.take(leaf, indices.numpy(), axis=int(how))
        signed = _SIGNED.get(leaf.dtype)
        rows = leaf.detach() if signed is None else leaf.detach().view(signed)
        taken = rows.index_select(int(how), indices.to(leaf.device))
        taken = taken if signed is None else taken.view(leaf.dtype)
        return _in_format_of(leaf, taken).requires_grad_(leaf.requires_grad)

    return mapped(batch, layout.cuts, (), cut)


def _format_of(tensor: torch.Tensor) -> torch.memory_format | None:
    """The channels-last format that a tensor is in, which convolutions compute in; None for any other order."""
    for ndim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.ndim == ndim and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout):
            return layout
    return None


def _in_format_of(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    layout = _format_of(like)
    return tensor if layout is None else tensor.contiguous(memory_format=layout)


def narrow_rows(batch: Any, layout: Layout, start: int, count: int) -> Any:
    """Rows `start` to `start + count`, tensors as views; contiguous, because cuDNN refuses a state that is not."""

    def cut(leaf: Any, how: int | str | None) -> Any:
        if how is None:
            return leaf
        if how == "items":
            return same_sequence(leaf, list(leaf[start : start + count]))
        if how == "sequences":
            return take_sequences(leaf, range(start, start + count))
        if isinstance(leaf, np.ndarray):
            return np.take(leaf, np.arange(start, start + count), axis=int(how))
        part = leaf.narrow(int(how), start, count)
        return part if _format_of(part) is not None else part.contiguous()

    return mapped(batch, layout.cuts, (), cut)


def split_rows_of(batch: Any, layout: Layout, sizes: Sequence[int]) -> list[Any]:
    """The batch as micro-batches of these sizes, in order."""
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [narrow_rows(batch, layout, start, size) for start, size in zip(starts, sizes, strict=True)]
