"""Sequences in one PackedSequence: counted, taken out whole, and in the order in which they were packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from autoaccum.batches.cutting import split_rows_of, take_rows
from autoaccum.batches.layout import find_layout
from autoaccum.batches.packed_sequences import lengths_of, num_sequences
from autoaccum.batches.structure import move

LENGTHS = [3, 9, 5, 1, 7]


def sequences(lengths: list[int]) -> list[Tensor]:
    """Sequences of these lengths, whose numbers tell them apart."""
    return [10 * number + torch.arange(float(length)) for number, length in enumerate(lengths)]


def unpacked(packed: PackedSequence) -> list[list[float]]:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    return [row[:length].tolist() for row, length in zip(padded, lengths.tolist(), strict=True)]


@pytest.mark.parametrize("lengths", [LENGTHS, sorted(LENGTHS, reverse=True), [4, 4, 4, 4, 4]])
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_are_cut_by_sequences(lengths: list[int], enforce_sorted: bool) -> None:
    """Parts of a packed sequence hold its sequences whole and in the order in which they were packed."""
    enforce_sorted = enforce_sorted and lengths == sorted(lengths, reverse=True)
    batch = (pack_sequence(sequences(lengths), enforce_sorted=enforce_sorted), torch.arange(5))
    parts = split_rows_of(batch, find_layout(batch), [2, 2, 1])
    expected = [row.tolist() for row in sequences(lengths)]
    assert [row for packed, _ in parts for row in unpacked(packed)] == expected
    assert [labels.tolist() for _, labels in parts] == [[0, 1], [2, 3], [4]]
    assert all((packed.sorted_indices is None) == enforce_sorted for packed, _ in parts)


def test_packed_sequences_are_repeated() -> None:
    """More sequences than there are go round, in any order, and share no memory with the user's."""
    batch = pack_sequence(sequences(LENGTHS), enforce_sorted=False)
    taken = take_rows(batch, find_layout(batch), 7, [1, 4, 2, 0, 3])
    assert [len(row) for row in unpacked(taken)] == [9, 7, 5, 3, 1, 9, 7]
    assert taken.data.data_ptr() != batch.data.data_ptr()


def test_packed_sequence_moves_without_its_batch_sizes() -> None:
    """On another device the numbers are there, and `batch_sizes` stays on the host, where torch wants it."""
    moved = move({"x": pack_sequence(sequences(LENGTHS), enforce_sorted=False)}, torch.device("meta"))["x"]
    assert moved.data.is_meta and moved.sorted_indices.is_meta and not moved.batch_sizes.is_meta


def test_lengths_are_those_of_the_packed() -> None:
    """There are as many as were packed, and their lengths come in that order, not in the one they are kept in."""
    packed = pack_sequence(sequences(LENGTHS), enforce_sorted=False)
    assert (num_sequences(packed), lengths_of(packed).tolist()) == (5, LENGTHS)
