"""Where the rows are found, what is left whole, and what is refused because two readings are possible."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoaccum.batches.layout import Layout, describe, find_layout, refuse_doubtful_layout, shared_second_dim
from autoaccum.errors import InvalidRequestError

B = 12


def zeros(*shape: int) -> Tensor:
    """A float tensor of this shape."""
    return torch.zeros(*shape)


def labels(*shape: int) -> Tensor:
    """A tensor of whole numbers of this shape."""
    return torch.zeros(*shape, dtype=torch.long)


def boxes(number: int) -> dict[str, Tensor]:
    """The targets of one image with that many objects."""
    return {"boxes": zeros(number, 4), "labels": labels(number)}


def image(height: int, channels: int = 3) -> Tensor:
    """An image of this height."""
    return zeros(channels, height, 20)


def cuts_of(batch: Any, batch_dim: Any = None, rows: int | None = None) -> tuple[int, dict[str, int | str]]:
    """The number of rows, and how each part is cut by its name."""
    layout = find_layout(batch, batch_dim, rows=rows)
    return layout.rows, {".".join(path): how for path, how in layout.cuts.items()}


def refused(batch: Any, batch_dim: Any = None) -> str:
    """The error that a sample batch is refused with."""
    with pytest.raises(InvalidRequestError) as caught:
        refuse_doubtful_layout(batch, find_layout(batch, batch_dim), batch_dim)
    return str(caught.value)


class Named(NamedTuple):
    """A named tuple as a batch."""

    pixels: Tensor
    target: Tensor
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass as a batch."""

    pixels: Tensor
    target: Tensor
    scale: float


@pytest.mark.parametrize(
    ("batch", "cuts"),
    [
        (zeros(B, 4), {"": 0}),
        (np.zeros((B, 4)), {"": 0}),
        ((zeros(B, 4), labels(B)), {"0": 0, "1": 0}),
        ([zeros(B, 4), labels(B)], {"0": 0, "1": 0}),
        ([zeros(B, 4)], {"0": 0}),
        ((zeros(B, 4), zeros(B, 4)), {"0": 0, "1": 0}),
        ({"x": zeros(B, 4), "y": labels(B)}, {"x": 0, "y": 0}),
        (OrderedDict(x=zeros(B, 4), y=np.zeros(B)), {"x": 0, "y": 0}),
        ({1: zeros(B, 4), 2: labels(B)}, {"1": 0, "2": 0}),
        (Named(zeros(B, 4), labels(B), 2.0), {"pixels": 0, "target": 0}),
        (Frozen(zeros(B, 4), labels(B), 2.0), {"pixels": 0, "target": 0}),
        (((zeros(B, 4), zeros(B, 4), zeros(B, 4)), labels(B)), {"0.0": 0, "0.1": 0, "0.2": 0, "1": 0}),
        (((zeros(B, 4), zeros(B, 4)), (zeros(B, 4), zeros(B, 4))), {"0.0": 0, "0.1": 0, "1.0": 0, "1.1": 0}),
        ({"in": {"x": zeros(B, 4)}, "out": (labels(B), None)}, {"in.x": 0, "out.0": 0}),
    ],
)
def test_leading_dimension_that_tensors_share(batch: Any, cuts: dict[str, int]) -> None:
    """In every kind of container the rows are the leading dimension that the tensors share."""
    assert cuts_of(batch) == (B, cuts)


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize(
    "make",
    [
        lambda n: (zeros(n, 10), zeros(n, 10)),
        lambda n: [zeros(n, 10), zeros(n, 10)],
        lambda n: (zeros(n, 10), zeros(n, 10), zeros(n, 10)),
        lambda n: (zeros(n), zeros(n)),
        lambda n: (zeros(n, 3, 8, 8), zeros(n, 3, 8, 8)),
        lambda n: ((zeros(n, 2), zeros(n, 2)), labels(n)),
        lambda n: {"x": [zeros(n, 5), zeros(n, 5)], "y": labels(n)},
        lambda n: {"x": (zeros(n, 4, 6), zeros(n, 4, 6)), "y": zeros(n, 4, 6)} if n != 2 else {"x": zeros(n)},
    ],
)
def test_as_many_rows_as_tensors_is_no_trap(make: Any, rows: int) -> None:
    """Inputs side by side are cut by their rows, also where there are just as many rows as inputs, or one."""
    batch = make(rows)
    found, cuts = cuts_of(batch)
    assert found == rows and set(cuts.values()) == {0}


def test_entries_that_are_not_per_row() -> None:
    """Lists with an entry per row are cut; a text, numbers, a scalar and a shared table are passed on whole."""
    batch = {
        "image": zeros(B, 3, 8, 8),
        "target": labels(B),
        "captions": [f"caption {row}" for row in range(B)],
        "spans": [[1, 2, 3]] * B,
        "names": ("left", "right"),
        "source": "web",
        "temperature": torch.tensor(2.0),
        "epoch": 3,
        "nothing": None,
        "empty": [],
        "prompt": zeros(21, 5),
    }
    assert cuts_of(batch) == (B, {"image": 0, "target": 0, "captions": "items", "spans": "items"})


def test_a_shared_table_of_the_batch_length_is_cut_unless_named() -> None:
    """A table that happens to have the batch length counts as rows; with None it is passed on whole."""
    batch = {"image": zeros(B, 3), "target": labels(B), "prompt": zeros(B, 5)}
    assert cuts_of(batch)[1] == {"image": 0, "target": 0, "prompt": 0}
    assert cuts_of(batch, {"prompt": None}) == (B, {"image": 0, "target": 0})


def test_none_works_by_index_in_a_tuple_of_alike_tensors() -> None:
    """In a tuple, the index names what is passed on whole, also beside a tensor of the same shape."""
    assert cuts_of((zeros(B, 4), zeros(B, 4)), {1: None}) == (B, {"0": 0})


def test_none_works_for_a_list() -> None:
    """A list of the batch length that holds no rows, such as class names, is passed on whole by its name."""
    batch = {"x": zeros(B, 4), "classes": [f"class {number}" for number in range(B)]}
    assert cuts_of(batch) == (B, {"x": 0, "classes": "items"})
    assert cuts_of(batch, {"classes": None}) == (B, {"x": 0})


def test_none_works_for_a_container() -> None:
    """A dict of shared tensors is passed on whole by its name, and nothing in it is taken for hidden rows."""
    batch = {"x": zeros(B, 4), "y": labels(B), "shared": {"a": zeros(B, 4), "b": zeros(3, B)}}
    layout = find_layout(batch, {"shared": None})
    assert dict(layout.cuts) == {("x",): 0, ("y",): 0}
    assert refuse_doubtful_layout(batch, layout, {"shared": None}) is None


def test_batch_encoding_is_a_mapping_of_leaves() -> None:
    """A BatchEncoding, which is no dict and whose length is its number of entries, is read by its entries."""
    transformers = pytest.importorskip("transformers", reason="the optional dependency transformers is not installed")
    batch = transformers.BatchEncoding({"input_ids": labels(B, 2), "attention_mask": labels(B, 2)})
    assert cuts_of(batch) == (B, {"input_ids": 0, "attention_mask": 0})


# -- lists of items, as detection models take them


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("outer", [tuple, list])
@pytest.mark.parametrize("inner", [tuple, list])
@pytest.mark.parametrize("size", ["same size", "own size"])
@pytest.mark.parametrize("objects", ["none to two", "two each", "as many as images"])
def test_images_and_their_targets(number: int, outer: Any, inner: Any, size: str, objects: str) -> None:
    """Any number of images beside as many target dicts is cut by items, however many objects they show."""
    heights = [16 if size == "same size" else 16 + index for index in range(number)]
    counts = {"none to two": [i % 3 for i in range(number)], "two each": [2] * number}.get(objects, [number] * number)
    batch = outer([inner(image(height) for height in heights), inner(boxes(count) for count in counts)])
    assert cuts_of(batch) == (number, {"0": "items", "1": "items"})


@pytest.mark.parametrize("number", range(1, 8))
def test_images_and_targets_by_name(number: int) -> None:
    """In a dict as well, images stay with their targets, and a caption per image with both."""
    batch = {
        "images": [image(16)] * number,
        "targets": [boxes(index % 3) for index in range(number)],
        "captions": ["a cat"] * number,
        "size": (16, 20),
    }
    expected: dict[str, int | str] = {"images": "items", "targets": "items", "captions": "items"}
    if number == 2:
        expected["size"] = "items"  # a list of the batch length counts as rows
    assert cuts_of(batch) == (number, expected)


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("objects", [0, 1, 2, 3, 5])
def test_stacked_images_with_a_list_of_targets(number: int, objects: int) -> None:
    """Stacked images beside a list of target dicts are cut together, with any number of objects each."""
    batch = {"pixel_values": zeros(number, 3, 8, 8), "labels": [boxes(objects)] * number}
    assert cuts_of(batch) == (number, {"pixel_values": 0, "labels": "items"})


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("objects", [1, 2, 3, 5])
def test_list_of_pairs_of_image_and_target(number: int, objects: int) -> None:
    """A list of (image, dict) pairs is a list of items."""
    assert cuts_of([(image(16), boxes(objects))] * number) == (number, {"": "items"})


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize(
    "item", [(zeros(7), torch.tensor(1)), (zeros(3, 5, 5), 1), {"x": zeros(7), "y": 1}, ("a", zeros(7))]
)
def test_list_of_uncollated_items(number: int, item: Any) -> None:
    """A list of items that hold a number or a text beside their tensor is cut by items."""
    assert cuts_of([item] * number) == (number, {"": "items"})


def test_list_of_dicts_of_different_sizes() -> None:
    """A list of per-item dicts whose tensors share no length is cut by items."""
    assert cuts_of([{"image": image(16), "boxes": zeros(2, 4)}, {"image": image(17), "boxes": zeros(1, 4)}]) == (
        2,
        {"": "items"},
    )


def test_sequences_of_different_length() -> None:
    """A list of sequences of different length is cut by items."""
    assert cuts_of([zeros(5), zeros(7), zeros(3)]) == (3, {"": "items"})


def test_point_clouds_with_labels() -> None:
    """A list of arrays of different length is cut by items where the labels confirm its number."""
    assert cuts_of(([zeros(5, 3), zeros(7, 3), zeros(6, 3)], labels(3))) == (3, {"0": "items", "1": 0})


def test_only_lists() -> None:
    """Without any tensor, the items of a list are the rows."""
    assert cuts_of(["one", "two", "three"]) == (3, {"": "items"})
    assert cuts_of({"text": ["one", "two"], "language": "en"}) == (2, {"text": "items"})


def test_scalars_per_row() -> None:
    """A list of scalar tensors beside a tensor of rows is cut by items."""
    assert cuts_of({"x": zeros(5, 2), "y": [torch.tensor(1.0)] * 5}) == (5, {"x": 0, "y": "items"})


def test_pairs_of_encodings_with_labels() -> None:
    """A list of encodings, as contrastive models take it, is cut inside where the labels confirm their rows."""
    batch = ([{"ids": labels(8, 5), "mask": zeros(8, 5)}, {"ids": labels(8, 6), "mask": zeros(8, 6)}], zeros(8))
    assert cuts_of(batch) == (8, {"0.0.ids": 0, "0.0.mask": 0, "0.1.ids": 0, "0.1.mask": 0, "1": 0})


def test_a_table_beside_an_input() -> None:
    """In a tuple of an input and a table of another length, the input is still cut where the rows are known."""
    batch = {"in": (zeros(B, 4), zeros(21, 4)), "x": zeros(B), "y": labels(B)}
    assert cuts_of(batch) == (B, {"in.0": 0, "x": 0, "y": 0})


def test_list_of_mappings_is_a_list_of_rows() -> None:
    """A sample that is a list of per-item dicts has as many rows as items, also where all their tensors are as long."""
    assert find_layout([{"ids": labels(7)}] * 5) == Layout(5, {(): "items"})


def test_items_can_be_named() -> None:
    """A list whose reading is in doubt is settled by saying that its items are the rows."""
    images = [image(16)] * 4
    assert find_layout(images, "items") == Layout(4, {(): "items"})
    assert find_layout({"images": images, "table": zeros(9)}, {"images": "items", "table": None}).rows == 4


@pytest.mark.parametrize(
    "batch",
    [
        [image(16)] * 5,
        [image(16)] * 3,
        (image(16), image(16)),
        [image(16), image(17)],
        [(image(16), image(16))] * 5,
        [(image(16), image(16, channels=1))] * 5,
        [[image(16)] * 5, [image(16, channels=1)] * 5],
        ([image(16)] * 3, labels(3)),
        [zeros(5, 3), zeros(7, 3)],
        (zeros(5), zeros(7)),
        ({"ids": labels(8, 5)}, {"ids": labels(8, 5)}),
        (zeros(B, 4), zeros(21, 4)),
        (zeros(B, 4), zeros(21, 5)),
        {"x": zeros(B, 4), "y": labels(21)},
        {"x": zeros(5, 4), "y": labels(5), "u": zeros(7, 4), "v": labels(7)},
    ],
)
def test_two_readings_are_an_error(batch: Any) -> None:
    """Where the rows can be found in two ways, this is an error that offers both remedies."""
    text = refused(batch)
    assert "rows" in text and "batch_dim=" in text and "callable n -> batch" in text


def test_error_names_the_leaves_and_their_numbers() -> None:
    """The error about two readings says which part could have how many rows."""
    assert "x has 12 rows, y has 21 rows" in refused({"x": zeros(12, 4), "y": labels(21)})


def test_error_stays_readable() -> None:
    """The error about a batch of a thousand leaves does not list them all."""
    assert len(refused({f"leaf{number}": zeros(number + 2, 4) for number in range(1000)})) < 1000
    assert len(refused([zeros(number + 2, 3) for number in range(1000)])) < 1000


@pytest.mark.parametrize(
    "batch",
    [3, "text", None, torch.tensor(1.0), {}, [], (), {"epoch": 3}, {"tag": "web", "scale": torch.tensor(1.0)}, object()],
)
def test_no_rows_at_all(batch: Any) -> None:
    """A sample without a dimension of rows is refused with the remedy."""
    assert "holds no tensor with a dimension of rows" in refused(batch)


@pytest.mark.parametrize("batch", [zeros(0, 4), (zeros(0, 4), labels(0)), {"x": np.zeros((0, 3))}])
def test_an_empty_batch_is_refused(batch: Any) -> None:
    """A batch of no rows is refused as empty."""
    assert "empty: it has 0 rows" in refused(batch)


# -- the batch is not dimension 0

T = 20


@pytest.mark.parametrize(
    "batch",
    [
        (zeros(T, B, 5), zeros(2, B, 7), labels(T, B)),
        (zeros(T, B, 5), zeros(2, B, 7)),
        (zeros(T, B, 5), (zeros(2, B, 7), zeros(2, B, 7)), labels(T, B)),
        {"x": zeros(T, B, 5), "state": zeros(2, B, 7), "y": labels(T, B)},
        (zeros(T, B, 5), labels(B)),
        (zeros(T, B, 5), labels(T, B), labels(B)),
        (zeros(T, B, 5), zeros(T - 3, B, 5)),
    ],
)
def test_time_first_is_refused(batch: Any) -> None:
    """A time-major batch is not cut along its time axis but refused with the remedy."""
    assert "batch_dim=" in refused(batch)


@pytest.mark.parametrize(
    "batch",
    [
        (zeros(B, B, 5), zeros(2, B, 7), labels(B, B)),
        (zeros(B, B, 5), zeros(2, B, 7)),
        (zeros(B, B, 5), (zeros(2, B, 7), zeros(2, B, 7)), labels(B, B)),
        {"x": zeros(B, B, 5), "state": zeros(2, B, 7), "y": labels(B, B)},
        (zeros(B, B, 5), labels(B), zeros(2, B, 7)),
    ],
)
def test_as_many_time_steps_as_rows_is_refused(batch: Any) -> None:
    """Where time and rows are equally long and a state has them in the second dimension, nothing is guessed."""
    assert "batch_dim=" in refused(batch)


@pytest.mark.parametrize("steps", [T, B])
def test_dimension_given_for_all(steps: int) -> None:
    """With one dimension for all tensors, every tensor is cut along it."""
    batch = (zeros(steps, B, 5), zeros(2, B, 7), labels(steps, B))
    layout = find_layout(batch, 1)
    assert (layout.rows, dict(layout.cuts)) == (B, {("0",): 1, ("1",): 1, ("2",): 1})
    refuse_doubtful_layout(batch, layout, 1)


@pytest.mark.parametrize("steps", [T, B])
def test_dimension_given_by_name(steps: int) -> None:
    """With dimensions by name, each is cut along its own, and what is not named along its leading one."""
    batch = {"x": zeros(steps, B, 5), "state": zeros(2, B, 7), "y": labels(B), "captions": ["a"] * B}
    assert cuts_of(batch, {"x": 1, "state": 1}) == (B, {"x": 1, "state": 1, "y": 0, "captions": "items"})


def test_dimension_given_by_index_of_a_nested_tuple() -> None:
    """A leaf of a nested tuple is named by its indices, joined by a dot; a plain index may be an int."""
    batch = (zeros(T, B, 5), (zeros(2, B, 7), zeros(2, B, 7)), labels(B))
    assert cuts_of(batch, {0: 1, "1.0": 1, "1.1": 1}) == (B, {"0": 1, "1.0": 1, "1.1": 1, "2": 0})


def test_dimension_of_one_of_two_alike_tensors() -> None:
    """Naming one of two tensors of the same kind leaves the other with its leading dimension."""
    assert cuts_of((zeros(5, B), zeros(B, 4)), {0: 1}) == (B, {"0": 1, "1": 0})


def test_negative_dimension() -> None:
    """A dimension may be counted from the end."""
    assert cuts_of(zeros(T, 5, B), -1) == (B, {"": 2})


def test_a_single_tensor_is_named_batch() -> None:
    """A sample that is one tensor is named "batch"."""
    assert cuts_of(zeros(T, B), {"batch": 1}) == (B, {"": 1})


def test_a_state_that_is_not_named_is_refused() -> None:
    """A tensor that has the rows in another dimension and is not named is refused by its name."""
    assert "leaf 'state' (2, 12, 7)" in refused({"x": zeros(B, T, 5), "y": labels(B), "state": zeros(2, B, 7)})


def test_one_row_is_not_looked_for_elsewhere() -> None:
    """A sample of a single row is not refused for a dimension of length one in something else."""
    batch = {"x": zeros(1, 4), "y": labels(1), "table": zeros(5, 1)}
    refuse_doubtful_layout(batch, layout := find_layout(batch))
    assert ("table",) not in layout.cuts


def test_a_state_that_is_named_none_is_taken_as_it_is() -> None:
    """None for that tensor says that it is meant to be passed on whole."""
    batch = {"x": zeros(B, T, 5), "y": labels(B), "state": zeros(2, B, 7)}
    layout = find_layout(batch, {"state": None})
    refuse_doubtful_layout(batch, layout, {"state": None})
    assert ("state",) not in layout.cuts


@pytest.mark.parametrize(
    ("batch_dim", "text"),
    [
        ({"inputs": 0}, "batch_dim names 'inputs', which the sample lacks; its leaves: ['scale', 'x', 'y']"),
        ({"x": 3}, "leaf 'x' (12, 20, 5) has no dimension 3"),
        ({"x": -4}, "leaf 'x' (12, 20, 5) has no dimension -4"),
        ({"scale": 0}, "leaf 'scale' float has no dimension 0"),
        ({"x": 1, "y": 0}, "batch_dim gives different numbers of rows: {'x': 20, 'y': 12}"),
        (1, "leaf 'y' (12,) has no dimension 1"),
        ({"x": None, "y": None}, "holds no tensor with a dimension of rows"),
    ],
)
def test_impossible_dimension_is_refused(batch_dim: Any, text: str) -> None:
    """A name that is not there, a dimension that is not there, or numbers that differ are refused by name."""
    assert text in refused({"x": zeros(12, 20, 5), "y": labels(12), "scale": 2.0}, batch_dim)


def test_known_number_of_rows_decides() -> None:
    """Where the caller knows the number of rows, the reading with that number is taken."""
    assert cuts_of({"x": zeros(12, 4), "table": zeros(21, 5)}, rows=21) == (21, {"table": 0})
    assert cuts_of([zeros(7, 3), zeros(7, 3)], rows=2) == (2, {"": "items"})


def test_another_number_of_rows_is_refused() -> None:
    """A batch without that number of rows is refused with both numbers."""
    with pytest.raises(InvalidRequestError, match="the batch has 12 rows where 13 were asked for"):
        find_layout((zeros(12, 4), labels(12)), rows=13)


@pytest.mark.parametrize("lengths", [[5, 4, 2], [2, 5, 4], [3, 3, 3], [1]])
def test_packed_sequences_are_rows(lengths: list[int]) -> None:
    """The rows of a packed sequence are its sequences, by itself and beside labels, whatever the lengths."""
    packed = torch.nn.utils.rnn.pack_sequence([zeros(length, 3) for length in lengths], enforce_sorted=False)
    assert cuts_of(packed) == (len(lengths), {"": "sequences"})
    assert cuts_of((packed, labels(len(lengths)))) == (len(lengths), {"0": "sequences", "1": 0})
    assert "sequences of" in describe(packed, find_layout(packed))


def test_packed_sequences_beside_other_numbers_are_refused() -> None:
    """Sequences and labels of different number are an error."""
    packed = torch.nn.utils.rnn.pack_sequence([zeros(5, 3), zeros(4, 3)])
    assert "batch_dim=" in refused((packed, labels(3)))


@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_one_tensor_is_never_ambiguous(rows: int, rest: list[int]) -> None:
    """A single tensor is cut along its leading dimension, whatever its shape."""
    tensor = zeros(rows, *rest)
    layout = find_layout(tensor)
    refuse_doubtful_layout(tensor, layout)
    assert layout == (rows, {(): 0})


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from([tuple, list, dict]),
)
def test_rows_are_shared_or_refused(shapes: list[list[int]], container: Any) -> None:
    """For tensors of any shapes, everything that is cut has the rows found, or the batch is refused."""
    tensors = [zeros(*shape) for shape in shapes]
    batch = container(tensors) if container is not dict else {f"leaf{i}": tensor for i, tensor in enumerate(tensors)}
    leaves = dict(enumerate(tensors)) if container is not dict else {f"leaf{i}": tensor for i, tensor in enumerate(tensors)}
    named = {(str(name),): tensor for name, tensor in leaves.items()}
    try:
        layout = find_layout(batch)
        refuse_doubtful_layout(batch, layout)
    except InvalidRequestError:
        return
    if layout.cuts == {(): "items"}:
        assert layout.rows == len(tensors)
        return
    assert all(how == 0 and named[path].shape[0] == layout.rows for path, how in layout.cuts.items())
    assert all(path in layout.cuts for path, tensor in named.items() if tensor.shape[0] == layout.rows)


# -- in words


def test_description_says_what_is_cut_and_what_is_not() -> None:
    """The description names what is cut, along which dimension, and what is passed on whole."""
    batch = {"x": zeros(T, B, 5), "captions": ["a"] * B, "scale": 2.0, "table": zeros(21, 5)}
    layout = find_layout(batch, {"x": 1, "table": None})
    assert describe(batch, layout) == (
        "12 rows: x (20, 12, 5) along dimension 1, the items of captions; passed on whole: scale, table (21, 5)"
    )


def test_description_of_many_leaves_is_short() -> None:
    """The description of a batch of a hundred leaves names six and counts the others; six leaves are all named."""
    six = {f"leaf{number}": zeros(B) for number in range(6)}
    assert describe(six, find_layout(six)).endswith("leaf4 (12,), leaf5 (12,)")
    batch = {f"leaf{number:03}": zeros(B) for number in range(100)}
    assert describe(batch, find_layout(batch)).endswith("leaf005 (12,) and 94 more")


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ((zeros(B, T, 5), labels(B, T)), T),
        ((zeros(B, T, 5), labels(B)), None),
        ((zeros(B, T, 5), labels(B, T + 1)), None),
        ({"x": zeros(B, T), "scale": torch.tensor(1.0), "tag": "web"}, T),
        ({"tag": "web"}, None),
    ],
)
def test_shared_second_dimension(batch: Any, length: int | None) -> None:
    """The second dimension is reported where every tensor has one and all agree."""
    assert shared_second_dim(batch) == length


@pytest.mark.parametrize("boxes", [2, 3, 8])
def test_items_of_records_are_the_rows(boxes: int) -> None:
    """Images beside a list of as many targets are as many rows, however many channels and boxes there are."""
    batch = ([torch.rand(3, 8, 8)] * 8, [{"boxes": torch.rand(boxes, 4)} for _ in range(8)])
    assert find_layout(batch) == Layout(8, {("0",): "items", ("1",): "items"})


def test_nested_tensor_is_refused() -> None:
    """A nested tensor has no rows that could be cut."""
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged)
    with pytest.raises(InvalidRequestError, match=r"leaf 'x' is a nested tensor.*split="):
        find_layout({"x": nested})


def nested_deep(depth: int, wrap: Callable[[Any], Any]) -> Any:
    found: Any = zeros(B, 2)
    for _ in range(depth):
        found = wrap(found)
    return found


def holding_itself() -> list[Any]:
    found: list[Any] = [zeros(B, 2)]
    found.append(found)
    return found


@pytest.mark.parametrize(
    "batch",
    [
        nested_deep(50_000, lambda inner: [inner]),
        nested_deep(50_000, lambda inner: {"a": inner}),
        nested_deep(101, lambda inner: (inner,)),
        holding_itself(),
    ],
    ids=["lists", "mappings", "tuples", "itself"],
)
def test_endless_nesting_is_refused(batch: Any) -> None:
    """A batch without end is refused in words, not by the interpreter's own limit."""
    with pytest.raises(InvalidRequestError, match="nested more than 100 deep, or holds itself"):
        find_layout(batch)


def test_deep_nesting_is_read() -> None:
    """Nesting as it may well occur is no obstacle."""
    assert find_layout(nested_deep(50, lambda inner: {"a": inner})).rows == B


def test_keys_that_read_alike_are_refused() -> None:
    """Parts are known by what their keys read, so that 1 and "1" in one mapping cannot be told apart."""
    with pytest.raises(InvalidRequestError, match="two parts named '1'"):
        find_layout({1: zeros(4, 3), "1": zeros(4, 2)})


def test_sparse_rows_are_refused() -> None:
    """A sparse tensor that would be cut is refused with the remedy."""
    with pytest.raises(InvalidRequestError, match="leaf 'x' is a sparse tensor"):
        find_layout({"x": zeros(B, 2).to_sparse(), "y": zeros(B)})


def test_sparse_table_is_passed_on() -> None:
    """A sparse tensor that belongs to no row is no obstacle."""
    layout = find_layout({"table": zeros(3, 2).to_sparse(), "x": zeros(B), "y": zeros(B)})
    assert set(layout.cuts) == {("x",), ("y",)}


@pytest.mark.parametrize("name", ["x" * 10**6, "\x1b[31m", "a\nb"], ids=["long", "escape", "lines"])
@pytest.mark.parametrize("batch_dim", [None, {"z": 0}, 7])
def test_error_with_names_is_one_short_line(name: str, batch_dim: Any) -> None:
    """Names are shown shortened and without control characters, whatever is wrong."""
    with pytest.raises(InvalidRequestError) as caught:
        find_layout({name: zeros(3), "y": zeros(2)}, batch_dim)
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_part_that_was_never_set_is_left_alone() -> None:
    """A dataclass may have a part that is only set later."""

    @dataclasses.dataclass
    class Batch:
        x: Tensor
        later: Tensor = dataclasses.field(init=False)

    assert find_layout(Batch(zeros(B, 2))) == Layout(B, {("x",): 0})


def test_many_leaves_are_looked_at_once() -> None:
    """Twenty thousand tensors in a list take a moment: no pair of them is compared."""
    layout = find_layout([zeros(3)] * 20_000, "items")
    begun_s = time.process_time()
    refuse_doubtful_layout([zeros(3)] * 20_000, Layout(3, {(str(place),): 0 for place in range(20_000)}))
    assert layout.rows == 20_000 and time.process_time() - begun_s < 10
