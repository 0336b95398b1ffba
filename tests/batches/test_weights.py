"""What a loss is a mean over, counted in labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoaccum.batches.weights import tokens
from autoaccum.errors import InvalidRequestError

IGNORED = -100
rows_of_labels = st.integers(1, 8).flatmap(
    lambda length: st.lists(
        st.lists(st.sampled_from([IGNORED, 0, 1, 7, -1]), min_size=length, max_size=length), min_size=1, max_size=6
    )
)


@given(rows_of_labels)
def test_valid_labels_are_counted(rows: list[list[int]]) -> None:
    """The weight is the number of labels that are not ignored."""
    valid = sum(label != IGNORED for row in rows for label in row)
    assert tokens("labels")({"labels": torch.tensor(rows)}) == valid


@given(rows_of_labels)
def test_shift_leaves_out_the_first_position(rows: list[list[int]]) -> None:
    """With shift, the first label of every row does not count, as a causal model predicts nothing there."""
    valid = sum(label != IGNORED for row in rows for label in row[1:])
    assert tokens("labels", shift=True)({"labels": torch.tensor(rows)}) == valid


@given(rows_of_labels, st.data())
def test_micro_batches_add_up(rows: list[list[int]], data: st.DataObject) -> None:
    """The weights of micro-batches sum to the weight of the whole batch, wherever it is cut."""
    cut = data.draw(st.integers(0, len(rows)))
    weight, labels = tokens("labels", shift=True), torch.tensor(rows)
    assert weight({"labels": labels[:cut]}) + weight({"labels": labels[cut:]}) == weight({"labels": labels})


@given(rows_of_labels, st.sampled_from([0, 1, 7, -1]))
def test_another_label_can_be_the_ignored_one(rows: list[list[int]], ignored: int) -> None:
    """With `ignore_index`, that label does not count and -100 does."""
    valid = sum(label != ignored for row in rows for label in row)
    assert tokens("labels", ignore_index=ignored)({"labels": torch.tensor(rows)}) == valid


@given(rows_of_labels)
def test_ready_shifted_labels_are_counted_as_they_are(rows: list[list[int]]) -> None:
    """A ready `shift_labels` entry is counted instead of the key, without shifting again."""
    batch = {"labels": torch.tensor([[1, 1, 1]]), "shift_labels": torch.tensor(rows)}
    assert tokens("labels", shift=True)(batch) == sum(label != IGNORED for row in rows for label in row)


class Pair(NamedTuple):
    """A named tuple as a batch."""

    inputs: Tensor
    labels: Tensor


@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: [x, y], Pair], ids=["tuple", "list", "named tuple"])
@pytest.mark.parametrize("key", [1, -1])
def test_labels_of_a_tuple_by_index(make: Any, key: int) -> None:
    """In a tuple or a list the labels are found by their index."""
    assert tokens(key)(make(torch.zeros(2, 3), torch.tensor([[1, IGNORED], [2, 3]]))) == 3


def test_labels_of_a_batch_encoding() -> None:
    """In a BatchEncoding, which is no dict, the labels and ready shifted labels are found by name."""
    transformers = pytest.importorskip("transformers", reason="the optional dependency transformers is not installed")
    batch = transformers.BatchEncoding({"labels": torch.tensor([[1, 2, IGNORED]])})
    assert tokens("labels", shift=True)(batch) == 1
    batch["shift_labels"] = torch.tensor([[2, 3, 4]])
    assert tokens("labels", shift=True)(batch) == 3


def test_weight_is_a_plain_int() -> None:
    """The weight is a Python int, also where every label is ignored."""
    weight = tokens("labels")({"labels": torch.full((2, 3), IGNORED)})
    assert weight == 0 and type(weight) is int


def test_a_missing_name() -> None:
    """A key that the batch lacks is refused with the names that it has."""
    with pytest.raises(InvalidRequestError, match=r"tokens\('label'\) finds no labels: the micro-batch has \['labels'\]"):
        tokens("label")({"labels": torch.ones(2, 2)})


def test_one_label_per_row() -> None:
    """Labels of one dimension are counted as well."""
    assert tokens("labels")({"labels": torch.tensor([1, IGNORED, 0])}) == 2
