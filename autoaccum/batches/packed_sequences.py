"""Sequences of different length that torch keeps in one PackedSequence: how many there are, and taking some of them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def num_sequences(packed: PackedSequence) -> int:
    """How many sequences it holds."""
    return int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0


def lengths_of(packed: PackedSequence) -> Tensor:
    """The length of each sequence, in the order in which they were packed."""
    return _padded(packed)[1]


def take_sequences(packed: PackedSequence, indices: Sequence[int]) -> PackedSequence:
    """A copy of these sequences, packed in this order; sorted inside only where the user's are, or have to be."""
    padded, lengths = _padded(packed)
    taken = lengths[list(indices)]
    is_sorted = packed.sorted_indices is None and bool((taken[1:] <= taken[:-1]).all())
    rows = padded.index_select(0, torch.as_tensor(list(indices), device=padded.device))
    return pack_padded_sequence(rows, taken, batch_first=True, enforce_sorted=is_sorted)


def _padded(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    return pad_packed_sequence(packed._replace(data=packed.data.detach()), batch_first=True)
