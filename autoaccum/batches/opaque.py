"""Batches that cannot be looked into: only the caller's `split` cuts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autoaccum.batches.structure import children_of, leaves_of
from autoaccum.errors import InvalidRequestError

SplitFn = Callable[[Any, Sequence[int]], Sequence[Any]]


def opaque_length(batch: Any) -> int:
    """The rows of a batch that cannot be looked into; a container's length would be that of its parts.

    Where it holds nested tensors, as many as the first of them has.
    """
    nested = next((leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.is_nested), None)
    if nested is not None:
        return int(nested.size(0))
    if not list(children_of(batch)):
        try:
            return len(batch)
        except TypeError:
            pass
    raise InvalidRequestError(
        f"the rows of a sample of type {type(batch).__name__} cannot be counted; say where they are with batch_dim= "
        "(None for a part that is passed on whole), or give the sample as a callable n -> batch."
    )


def parts_of(split: SplitFn, batch: Any, sizes: Sequence[int], rest: int = 0) -> list[Any]:
    """What the caller's `split` makes of the batch, without the part that holds the rest."""
    wanted = [*sizes, rest] if rest else list(sizes)
    parts = list(split(batch, wanted))
    if len(parts) != len(wanted):
        raise InvalidRequestError(f"split(batch, {wanted}) gave {len(parts)} micro-batches; expected {len(wanted)}.")
    return parts[: len(sizes)]
