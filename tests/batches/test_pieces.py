"""A window of ready micro-batches, and the shape that a limit belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.batches.layout import find_layout
from autoaccum.batches.pieces import Window, shape_of
from autoaccum.caps import Shape


def test_a_window_counts_and_gives_its_micro_batches() -> None:
    """A window has a length, gives its micro-batches in order, and does not change with the list it came from."""
    given = ["a", "b"]
    window = Window(given)
    given.append("c")
    assert (len(window), list(window), window.micro_batches) == (2, ["a", "b"], ("a", "b"))


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (torch.zeros(4, 3, 2), (("batch", (3, 2)),)),
        (torch.zeros(4), (("batch", ()),)),
        ((torch.zeros(4, 3), torch.zeros(4)), (("0", (3,)), ("1", ()))),
        ({"a": {"b": torch.zeros(4, 5)}, "c": torch.zeros(4)}, (("a.b", (5,)), ("c", ()))),
        ({"x": np.zeros((4, 6)), "number": torch.tensor(1.0)}, (("x", (6,)),)),
    ],
    ids=["tensor", "one dimension", "pair", "nested", "with a number"],
)
def test_shape_leaves_out_the_rows(batch: Any, shape: Shape) -> None:
    """The shape has every part with rows by name, without the rows, and nothing that is passed on whole."""
    assert shape_of(batch, find_layout(batch)) == shape


def test_shape_of_a_time_major_batch() -> None:
    """Where the rows are dimension 1, the shape has the others."""
    batch = torch.zeros(7, 4, 3)
    assert shape_of(batch, find_layout(batch, 1)) == (("batch", (7, 3)),)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_shape_does_not_depend_on_the_rows(rows: int) -> None:
    """Batches of different numbers of rows have one shape, so that what one teaches holds for the other."""
    batch = {"x": torch.zeros(rows, 3), "y": torch.zeros(rows)}
    assert shape_of(batch, find_layout(batch)) == (("x", (3,)), ("y", ()))


def test_items_of_lists_count_by_the_largest() -> None:
    """A list of items has the size of its largest item, rounded so that a few pixels more are the same shape."""

    def shape(*widths: int) -> Shape:
        images = [{"image": torch.zeros(3, 8, width), "box": torch.zeros(4)} for width in widths]
        return shape_of(images, find_layout(images))

    assert shape(30, 40) == shape(40, 30) == shape(40, 41) == (("batch", (1024,)),)
    assert shape(90, 30) == (("batch", (4096,)),)


def test_items_of_text_are_a_shape_of_their_own() -> None:
    """Texts beside tensors are a part of the shape that says nothing about their size."""
    batch = {"x": torch.zeros(2, 3), "texts": ["a", "longer"]}
    assert dict(shape_of(batch, find_layout(batch)))["x"] == (3,)
