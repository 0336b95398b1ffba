"""What a loss is a mean over, counted in labels, rows, or by the loss itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.batches.weights import Weigher, tokens
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


# -- the weight of a micro-batch

TARGET = torch.tensor([0, 1, IGNORED, 1])
PAIR = (torch.zeros(4, 2), TARGET)


@pytest.mark.parametrize("loss_fn", [None, lambda output, target: output.sum(), nn.CTCLoss()], ids=["none", "own", "other"])
def test_rows_are_the_weight_of_a_loss_that_is_not_known(loss_fn: Any) -> None:
    """With "samples" and a loss that says nothing, rows are counted and the batch is not looked at."""
    weigher = Weigher("samples", loss_fn)
    assert (weigher.counts_rows, weigher.summed) == (True, False)
    assert weigher(object(), 7) == 7.0


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), functional.cross_entropy], ids=["module", "function"])
@pytest.mark.parametrize("make", [tuple, list], ids=["tuple", "list"])
def test_loss_of_torch_is_asked_what_it_divides_by(loss_fn: Any, make: Callable[[Any], Any]) -> None:
    """With "samples", one of torch's losses counts the target, the last part of the batch, and not the rows."""
    weigher = Weigher("samples", loss_fn)
    assert (weigher.counts_rows, weigher.summed) == (False, False)
    assert weigher(make(PAIR), 4) == 3.0
    assert weigher(make((torch.zeros(4), torch.ones(4), TARGET)), 4) == 3.0


def test_class_weights_are_the_weight() -> None:
    """With class weights the weight is their sum over the labels that count."""
    weigher = Weigher("samples", nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0])))
    assert weigher(PAIR, 4) == 4.5


@pytest.mark.parametrize("batch", [{"x": PAIR[0], "y": TARGET}, TARGET, (), (TARGET, {"y": TARGET}), object()], ids=type)
def test_rows_are_counted_where_there_is_no_target(batch: Any) -> None:
    """Where the batch has no tensor for a target, the rows are counted."""
    assert Weigher("samples", nn.CrossEntropyLoss())(batch, 4) == 4.0


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(reduction="sum"), functools.partial(functional.mse_loss, reduction="sum")])
def test_loss_that_is_a_sum(loss_fn: Any) -> None:
    """A loss that is a sum is known as one, and its weight needs only the rows."""
    weigher = Weigher("samples", loss_fn)
    assert (weigher.summed, weigher.counts_rows) == (True, True)
    assert weigher((torch.zeros(4, 9), torch.zeros(4, 9)), 4) == 4.0


def test_weight_that_is_given_wins_over_the_loss() -> None:
    """A weight of the user's own is believed, whatever the loss divides by; it makes a sum no sum."""
    weigher = Weigher(lambda batch: 17, nn.CrossEntropyLoss(reduction="sum"))
    assert (weigher.summed, weigher.counts_rows) == (False, False)
    assert weigher(PAIR, 4) == 17.0


def test_tokens_as_a_weight() -> None:
    """`tokens` is such a weight, and gets the whole micro-batch."""
    assert Weigher(tokens("labels"))({"labels": TARGET}, 4) == 3.0


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        (torch.tensor(2.5), 2.5),
        (torch.tensor([3]), 3.0),
        (torch.tensor(True), 1.0),
        (0, 0.0),
        (True, 1.0),
        (functional.one_hot(torch.tensor(1)).sum(), 1.0),
    ],
    ids=str,
)
def test_weight_is_a_float(given: Any, weight: float) -> None:
    """Numbers, and tensors that are one number, become a float; zero is a weight."""
    found = Weigher(lambda batch: given)(PAIR, 4)
    assert found == weight and type(found) is float


@pytest.mark.parametrize(
    "given",
    [
        float("nan"),
        float("inf"),
        -1,
        -1e-9,
        None,
        "many",
        [3],
        torch.tensor([1.0, 2.0]),
        torch.tensor(float("nan")),
        torch.tensor(-1),
        torch.zeros(1, device="meta"),
    ],
    ids=str,
)
def test_what_is_no_weight_is_refused(given: Any) -> None:
    """What is not a finite number of at least zero is refused, with what came instead."""
    with pytest.raises(InvalidRequestError, match=r"weight= gave .* for a micro-batch; expected a finite number >= 0"):
        Weigher(lambda batch: given)(PAIR, 4)


def test_error_of_a_weight_is_the_users_own() -> None:
    """An error inside the user's function comes out as it is."""

    def failing(batch: Any) -> float:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Weigher(failing)(PAIR, 4)


@pytest.mark.parametrize("weight", ["tokens", "", None, 3, ["samples"]], ids=str)
def test_unknown_weight_is_refused(weight: Any) -> None:
    """A weight that is neither "samples" nor a function is refused, with what there is."""
    with pytest.raises(InvalidRequestError, match=r"is unknown; expected 'samples', autoaccum\.tokens\('labels'\)"):
        Weigher(weight)
