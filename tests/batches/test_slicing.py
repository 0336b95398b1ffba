"""One window's rows in micro-batches: the sizes, and the micro-batches themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoaccum.batches import slicing
from autoaccum.batches.layout import find_layout
from autoaccum.batches.pieces import AbstractShare, Piece, Pieces, Window
from autoaccum.batches.slicing import Slicer
from autoaccum.batches.sources import source_of
from autoaccum.caps import Shape
from autoaccum.errors import InvalidRequestError


def unlimited(shape: Shape) -> float:
    """Where nothing has failed."""
    return inf


def at_most(limit: float) -> Callable[[Shape], float]:
    """One limit for every shape."""
    return lambda shape: limit


def sizes_of(pieces: Pieces) -> list[Any]:
    """The rows of every piece."""
    return [piece.rows for piece in pieces.pieces]


class Opaque:
    """A batch that cannot be looked into, such as a graph."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)


class Uncountable:
    """A batch without a length."""


def split_opaque(batch: Opaque, sizes: Sequence[int]) -> list[Opaque]:
    """How its owner cuts it."""
    starts = np.cumsum([0, *sizes]).tolist()
    return [Opaque(batch.values[start : start + size]) for start, size in zip(starts, sizes, strict=False)]


class Pair(NamedTuple):
    """A named tuple as a batch."""

    inputs: Tensor
    target: Tensor


# -- the sizes


@given(rows=st.integers(1, 300), micro_batch=st.integers(1, 40), limit=st.integers(1, 40) | st.just(inf))
def test_sizes_are_near_even_and_within_the_limit(rows: int, micro_batch: int, limit: float) -> None:
    """The sizes add up to the rows, differ by at most one, are as few as can be, and none is above either limit."""
    sizes, most = Slicer(micro_batch).sizes(rows, limit), min(micro_batch, limit)
    assert sum(sizes) == rows and min(sizes) >= 1
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-rows // most)


@given(rows=st.integers(1, 300), units=st.integers(1, 6), multiple_of=st.integers(1, 16))
def test_all_but_the_last_are_multiples(rows: int, units: int, multiple_of: int) -> None:
    """With `multiple_of`, every micro-batch but the last is a multiple of it, and none is above the limit."""
    sizes = Slicer(units * multiple_of, multiple_of=multiple_of).sizes(rows, inf)
    assert sum(sizes) == rows and max(sizes) <= units * multiple_of
    assert all(size % multiple_of == 0 for size in sizes[:-1])


def test_memory_wins_over_a_multiple() -> None:
    """Where memory allows less than one multiple, the sizes are no multiples any more."""
    assert Slicer(16, multiple_of=8).sizes(14, 5) == (5, 5, 4)


@given(rows=st.integers(2, 200), limit=st.integers(2, 40), at_least=st.integers(2, 5))
def test_none_has_too_few_rows(rows: int, limit: int, at_least: int) -> None:
    """With `at_least`, no micro-batch has fewer rows, as far as the window has that many; those beyond the limit are few."""
    sizes = Slicer(limit, at_least=at_least).sizes(rows, inf)
    assert sum(sizes) == rows
    assert min(sizes) >= min(at_least, rows)
    assert max(sizes) <= max(limit, 2 * at_least - 1)


def test_a_rest_of_one_row_is_spread() -> None:
    """Where the model refuses one row, a window is cut so that none is left alone."""
    assert Slicer(2).sizes(5, inf) == (2, 2, 1)
    assert Slicer(2, at_least=2).sizes(5, inf) == (3, 2)


@pytest.mark.parametrize(
    ("rows", "limit", "expected"),
    [
        (11, inf, (4, 3, 4)),
        (11, 4, (4, 3, 4)),
        (11, 3, (3, 3, 3, 2)),
        (12, inf, (4, 4, 4)),
        (10, inf, (4, 3, 3)),
        (3, inf, (3,)),
    ],
    ids=["planned", "limit as planned", "limit below", "more rows", "fewer rows", "one micro-batch"],
)
def test_planned_sizes(rows: int, limit: float, expected: tuple[int, ...]) -> None:
    """The plan's sizes are used for a window of exactly their sum, as long as none of them is above the limit."""
    assert Slicer(4, planned=(4, 3, 4)).sizes(rows, limit) == expected


# -- batches whose rows can be seen

BATCHES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda rows: torch.arange(rows * 3.0).reshape(rows, 3),
    "array": lambda rows: np.arange(rows * 3.0).reshape(rows, 3),
    "pair": lambda rows: (torch.arange(rows * 3.0).reshape(rows, 3), torch.arange(rows)),
    "named tuple": lambda rows: Pair(torch.arange(rows * 3.0).reshape(rows, 3), torch.arange(rows)),
    "dict": lambda rows: {"x": torch.arange(rows * 2).reshape(rows, 2), "texts": [f"text {row}" for row in range(rows)]},
    "nested": lambda rows: {"inner": (torch.arange(rows), {"deep": torch.arange(rows) * 2}), "whole": torch.tensor(7.0)},
    "list of dicts": lambda rows: [{"image": torch.full((3, 4, 4 + row), row), "id": row} for row in range(rows)],
}


def flat(batch: Any) -> list[Any]:
    """Every value in a batch, in order, without what is passed on whole."""
    if isinstance(batch, dict):
        return [value for key, part in batch.items() if key != "whole" for value in flat(part)]
    if isinstance(batch, (list, tuple)):
        return [value for part in batch for value in flat(part)]
    return batch.flatten().tolist() if isinstance(batch, (Tensor, np.ndarray)) else [batch]


@pytest.mark.parametrize("kind", list(BATCHES))
def test_micro_batches_hold_every_row_once(kind: str) -> None:
    """The micro-batches of any kind of batch have its type and hold every value of it, each once."""
    batch = BATCHES[kind](7)
    share = Slicer(3).share(batch)
    pieces = share.cut(unlimited)
    made = list(pieces.make())
    assert (share.rows, sizes_of(pieces), len(made)) == (7, [3, 2, 2], 3)
    assert {type(micro_batch) for micro_batch in made} == {type(batch)}
    assert sorted(map(str, flat(made))) == sorted(map(str, flat(batch)))


def test_rows_stay_in_order() -> None:
    """Without a cost, the micro-batches are the batch's rows in their order."""
    rows = torch.arange(7)
    assert torch.equal(torch.cat(list(Slicer(3).share(rows).cut(unlimited).make())), rows)


def test_whole_parts_come_with_every_micro_batch() -> None:
    """What has no rows is passed on to every micro-batch as it is."""
    batch = BATCHES["nested"](4)
    assert [micro_batch["whole"] is batch["whole"] for micro_batch in Slicer(2).share(batch).cut(unlimited).make()] == [
        True,
        True,
    ]


def test_rows_in_another_dimension() -> None:
    """With `batch_dim=1` the rows are cut along dimension 1, and the micro-batches are contiguous."""
    batch = torch.arange(4 * 5 * 2).reshape(4, 5, 2)
    share = Slicer(2, batch_dim=1).share(batch)
    made = list(share.cut(unlimited).make())
    assert share.rows == 5
    assert [tuple(part.shape) for part in made] == [(4, 2, 2), (4, 2, 2), (4, 1, 2)]
    assert torch.equal(torch.cat(made, 1), batch) and all(part.is_contiguous() for part in made)


def test_limit_of_the_batchs_own_shape_is_asked_for() -> None:
    """The limit is looked up under the shape of the batch, and each piece carries that shape."""
    asked: list[Shape] = []

    def limit_of(shape: Shape) -> float:
        asked.append(shape)
        return 2

    pieces = Slicer(8).share({"ids": torch.zeros(5, 16), "labels": torch.zeros(5)}).cut(limit_of)
    assert asked == [(("ids", (16,)), ("labels", ()))]
    assert pieces.pieces == (Piece(2, 2, asked[0], True), Piece(2, 2, asked[0], True), Piece(1, 1, asked[0], False))


def test_a_share_is_cut_again_from_its_start() -> None:
    """After a limit has shrunk the same share is cut again, and holds all its rows again."""
    rows = torch.arange(8)
    share = Slicer(8).share(rows)
    first = share.cut(unlimited).make()
    next(first)
    again = share.cut(at_most(3))
    assert sizes_of(again) == [3, 3, 2]
    assert torch.equal(torch.cat(list(again.make())), rows)


def test_micro_batches_are_made_when_their_turn_comes() -> None:
    """A micro-batch is made when it is asked for, so that only one of them need be in memory."""
    batch = np.zeros((4, 2))
    made = Slicer(2).share(batch).cut(unlimited).make()
    first = next(made)
    batch += 1
    assert first.sum() == 0 and next(made).sum() == 4


def test_micro_batches_of_tensors_are_views() -> None:
    """Micro-batches of a tensor share its memory: the batch is not copied."""
    batch = torch.zeros(4, 2)
    assert [part.data_ptr() for part in Slicer(2).share(batch).cut(unlimited).make()] == [
        batch[0].data_ptr(),
        batch[2].data_ptr(),
    ]


@pytest.mark.parametrize("kind", list(BATCHES))
@pytest.mark.parametrize("ready", [False, True], ids=["batch", "window"])
def test_the_batch_is_not_written_to(kind: str, ready: bool) -> None:
    """Cutting and making micro-batches leaves the batch as it was, its tensors by their version as well."""
    batch, like = BATCHES[kind](5), BATCHES[kind](5)
    given = Window([batch]) if ready else batch
    list(Slicer(2).share(given).cut(at_most(2)).make())
    assert str(batch) == str(like)
    assert all(tensor._version == 0 for tensor in flat_tensors(batch))


def flat_tensors(batch: Any) -> list[Tensor]:
    """Every tensor in a batch."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return [tensor for part in batch for tensor in flat_tensors(part)]
    return [batch] if isinstance(batch, Tensor) else []


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_popping_from_a_micro_batch_does_no_harm(micro_batch: int) -> None:
    """A step that pops its labels out of a micro-batch finds them again when the window is replayed."""
    batch = {"x": torch.zeros(4, 2), "labels": torch.arange(4), "names": {"first": 1}}
    share = Slicer(micro_batch).share(batch)
    for _ in range(2):
        for part in share.cut(unlimited).make():
            part.pop("labels")
            part["names"].pop("first")
    assert set(batch) == {"x", "labels", "names"} and batch["names"] == {"first": 1}


def test_first_rows() -> None:
    """`first` gives the first rows in parts of the sizes asked for, and leaves out the rest."""
    parts = Slicer(1).share(torch.arange(9)).first([3, 2])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4]]


def test_doubtful_rows_are_refused() -> None:
    """Where the rows may be in another dimension nothing is guessed."""
    start_state = torch.zeros(2, 4, 5)
    for batch in ((torch.zeros(6, 4, 3), torch.zeros(4)), (torch.zeros(4, 3), torch.zeros(4), start_state)):
        with pytest.raises(InvalidRequestError, match="batch_dim="):
            Slicer(2).share(batch)


@pytest.mark.parametrize("kind", list(BATCHES))
def test_batches_that_came_before_do_not_matter(kind: str) -> None:
    """A slicer that has seen many other batches cuts the next one as a new slicer does."""
    used = Slicer(3)
    for other in BATCHES.values():
        for rows in (1, 5, 7, *range(10, 24)):
            used.share(other(rows))
    found, expected = (slicer.share(BATCHES[kind](7)).cut(unlimited) for slicer in (used, Slicer(3)))
    assert found.pieces == expected.pieces
    assert str([*found.make()]) == str([*expected.make()])


def test_rows_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are built alike have their rows looked for once, others each for themselves."""
    looked: list[int] = []
    monkeypatch.setattr(slicing, "find_layout", lambda *args, **more: looked.append(1) or find_layout(*args, **more))
    slicer = Slicer(3)
    for batch in (torch.zeros(7, 2), torch.ones(7, 2), torch.zeros(8, 2), torch.zeros(7, 2).long(), (torch.zeros(7, 2),)):
        slicer.share(batch)
        slicer.share(Window([batch]))
    assert len(looked) == 4


def bags(*lengths: int) -> dict[str, Any]:
    """A list of point sets of these lengths, and a label for each."""
    return {"bags": [torch.zeros(length, 3) for length in lengths], "y": torch.zeros(len(lengths))}


def test_lists_are_read_as_those_before() -> None:
    """As many bags as each has points are cut by bags once a batch has shown that they are bags, and not before."""
    slicer = Slicer(2)
    with pytest.raises(InvalidRequestError, match="can be 4 items, or 4 rows within every item"):
        slicer.share(bags(4, 4, 4, 4))
    assert slicer.layout(bags(2, 5, 3)).cuts[("bags",)] == "items"
    for size in (4, 2):
        assert slicer.layout(bags(*[size] * size)).cuts[("bags",)] == "items"


def test_inputs_side_by_side_are_read_as_those_before() -> None:
    """Three views of a batch are cut by their rows, also in a last batch of three rows."""
    slicer = Slicer(2)
    views = {"views": [torch.zeros(8, 3)] * 3, "y": torch.zeros(8)}
    assert slicer.layout(views).rows == 8
    last = {"views": [torch.zeros(3, 3)] * 3, "y": torch.zeros(3)}
    assert slicer.layout(last).cuts == {("views", "0"): 0, ("views", "1"): 0, ("views", "2"): 0, ("y",): 0}


def test_what_is_learned_of_lists_changes_what_was_guessed() -> None:
    """Two bags of two points were read as two inputs; after bags that leave no doubt they are bags."""
    slicer = Slicer(2)
    assert slicer.layout(bags(2, 2)).cuts[("bags", "0")] == 0
    slicer.layout(bags(5, 7, 6))
    assert slicer.layout(bags(2, 2)).cuts[("bags",)] == "items"


def test_doubtful_rows_are_refused_each_time() -> None:
    """A batch that was refused once is refused again."""
    slicer = Slicer(2)
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            slicer.share((torch.zeros(6, 4, 3), torch.zeros(4)))


# -- nothing to do


@pytest.mark.parametrize(
    "empty",
    [
        None,
        [],
        (),
        {},
        torch.zeros(0, 3),
        np.zeros((0, 3)),
        (torch.zeros(0, 3), torch.zeros(0)),
        {"ids": torch.zeros(0, 3), "scale": torch.tensor(2.0)},
        Window([]),
    ],
    ids=["None", "list", "tuple", "dict", "tensor", "array", "pair", "with a number", "window"],
)
def test_an_empty_share_has_no_pieces(empty: Any) -> None:
    """None, an empty container, a batch of 0 rows and an empty window are no micro-batches at all."""
    pieces = Slicer(2).share(empty).cut(unlimited)
    assert pieces.pieces == () and list(pieces.make()) == []


@pytest.mark.parametrize("made_with", [{"split": split_opaque}, {"cost": len, "max_cost": 4}], ids=["split", "cost"])
def test_an_empty_batch_needs_no_callback(made_with: dict[str, Any]) -> None:
    """Neither `split` nor `cost` is asked about a batch without rows."""
    assert Slicer(2, **made_with).share(torch.zeros(0, 3)).cut(unlimited).pieces == ()


def test_rows_without_features_are_rows() -> None:
    """A tensor of rows that hold nothing still has its rows."""
    assert Slicer(2).share(torch.zeros(3, 0)).rows == 3


# -- cut by the user


def test_only_split_cuts_an_opaque_batch() -> None:
    """With `split`, its parts are the micro-batches, of the sizes it was asked for."""
    share = Slicer(3, split=split_opaque).share(Opaque(range(7)))
    pieces = share.cut(unlimited)
    assert (share.rows, sizes_of(pieces)) == (7, [3, 2, 2])
    assert [part.values for part in pieces.make()] == [[0, 1, 2], [3, 4], [5, 6]]


def test_split_parts_have_one_limit() -> None:
    """An opaque batch has no shape: its limit is that of all such batches."""
    asked: list[Shape] = []

    def limit_of(shape: Shape) -> float:
        asked.append(shape)
        return 2

    pieces = Slicer(9, split=split_opaque).share(Opaque(range(5))).cut(limit_of)
    assert asked == [()] and sizes_of(pieces) == [2, 2, 1]
    assert [piece.cuttable for piece in pieces.pieces] == [True, True, False]


def test_split_is_used_where_rows_can_be_seen_as_well() -> None:
    """With `split`, a tensor is cut by it and not along its rows."""

    def backwards(batch: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(batch.flip(0).split(list(sizes)))

    made = Slicer(3, split=backwards).share(torch.arange(5)).cut(unlimited).make()
    assert [part.tolist() for part in made] == [[4, 3, 2], [1, 0]]


def test_first_of_a_split_leaves_a_rest() -> None:
    """`first` asks `split` for the whole batch and leaves out what was not wanted."""

    def strict(batch: Opaque, sizes: Sequence[int]) -> list[Opaque]:
        assert sum(sizes) == len(batch), "a split need not know how to leave rows out"
        return split_opaque(batch, sizes)

    parts = Slicer(1, split=strict).share(Opaque(range(9))).first([3, 2])
    assert [part.values for part in parts] == [[0, 1, 2], [3, 4]]


def test_split_that_gives_too_few_parts_is_refused() -> None:
    """A `split` that loses rows is an error and not a shorter window."""
    share = Slicer(2, split=lambda batch, sizes: split_opaque(batch, sizes)[:-1]).share(Opaque(range(5)))
    with pytest.raises(InvalidRequestError, match="split"):
        share.cut(unlimited)


def test_an_opaque_batch_without_split_is_refused() -> None:
    """A batch that cannot be looked into is no batch without `split`."""
    with pytest.raises(InvalidRequestError, match="no tensor"):
        Slicer(2).share(Opaque(range(5)))


def test_a_batch_that_cannot_be_counted_is_refused() -> None:
    """Even with `split`, it must be known how many rows there are."""
    with pytest.raises(InvalidRequestError, match="type Uncountable cannot be counted"):
        Slicer(2, split=split_opaque).share(Uncountable())


def split_nested(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Micro-batches of these sizes, of the same layout."""
    nested, labels = batch
    parts, start = [], 0
    for size in sizes:
        rows = list(nested.unbind()[start : start + size])
        parts.append((torch.nested.nested_tensor(rows, layout=nested.layout), labels[start : start + size]))
        start += size
    return parts


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_beside_others_are_cut_by_split(layout: torch.layout) -> None:
    """There are as many rows as the nested tensor has, in training and for a search."""
    rows = [torch.full((length, 2), float(length)) for length in (3, 1, 4, 2, 5)]
    batch = (torch.nested.nested_tensor(rows, layout=layout), torch.arange(5))
    cut = Slicer(2, split=split_nested).share(batch).cut(unlimited)
    assert [[len(row) for row in nested.unbind()] for nested, _ in cut.make()] == [[3, 1], [4, 2], [5]]
    taken = source_of(batch, split=split_nested).micro_batches([3, 2])
    assert [labels.tolist() for _, labels in taken] == [[0, 1, 2], [3, 4]]


# -- ready micro-batches


def test_ready_micro_batches_are_taken_as_they_are() -> None:
    """Ready micro-batches keep their sizes, above `micro_batch` as well, and their order."""
    ready = [torch.arange(5), torch.arange(1), torch.arange(3)]
    share = Slicer(2, multiple_of=4, at_least=2).share(Window(ready))
    pieces = share.cut(unlimited)
    assert share.rows is None
    assert sizes_of(pieces) == [5, 1, 3]
    assert [part.tolist() for part in pieces.make()] == [batch.tolist() for batch in ready]
    assert [piece.cuttable for piece in pieces.pieces] == [True, False, True]


def test_ready_micro_batches_are_cut_after_a_failure() -> None:
    """Those above the limit of their shape are cut, near even, and those of other shapes are left alone."""
    ready = [torch.zeros(5, 8), torch.ones(5, 2), torch.zeros(2, 8)]
    limits: dict[Shape, float] = {(("batch", (8,)),): 2}
    pieces = Slicer(9).share(Window(ready)).cut(lambda shape: limits.get(shape, inf))
    assert sizes_of(pieces) == [2, 2, 1, 5, 2]
    assert [tuple(part.shape) for part in pieces.make()] == [(2, 8), (2, 8), (1, 8), (5, 2), (2, 8)]


@pytest.mark.parametrize(("opaque", "rows"), [(Opaque(range(4)), 4), (Uncountable(), None)], ids=["counted", "not"])
def test_opaque_micro_batches_are_passed_through(opaque: Any, rows: int | None) -> None:
    """An opaque micro-batch is the same object, counted where it has a length, and is never cut."""
    pieces = Slicer(2).share(Window([opaque])).cut(at_most(1))
    assert [*pieces.make()] == [opaque]
    assert pieces.pieces == (Piece(rows, rows or 1, (), False),)


def test_ready_opaque_micro_batches_are_cut_by_split() -> None:
    """With `split`, an opaque micro-batch above the limit is cut by it."""
    pieces = Slicer(9, split=split_opaque).share(Window([Opaque(range(5)), Opaque(range(2))])).cut(at_most(2))
    assert sizes_of(pieces) == [2, 2, 1, 2]
    assert [part.values for part in pieces.make()] == [[0, 1], [2, 3], [4], [0, 1]]


def test_ready_micro_batches_that_split_cuts_have_one_limit() -> None:
    """With `split`, ready micro-batches have the limit of all that it cuts, whatever can be seen of them."""
    asked: list[Shape] = []

    def limit_of(shape: Shape) -> float:
        asked.append(shape)
        return inf

    share = Slicer(9, split=split_opaque).share(Window([torch.zeros(3, 8), Opaque(range(3))]))
    assert {piece.shape for piece in share.cut(limit_of).pieces} == {()} == set(asked)


def test_ready_micro_batches_whose_rows_are_doubtful_are_not_cut() -> None:
    """Where the rows cannot be told, a ready micro-batch is run whole."""
    doubtful = (torch.zeros(6, 4, 3), torch.zeros(4))
    (piece,) = Slicer(2).share(Window([doubtful])).cut(at_most(1)).pieces
    assert (piece.rows, piece.cuttable) == (None, False)


def test_ready_micro_batches_are_not_cut_by_rows_where_a_cost_counts() -> None:
    """A limit that is a cost is none of rows."""
    (piece,) = Slicer(inf, cost=len, max_cost=4).share(Window([torch.zeros(9, 2)])).cut(at_most(1)).pieces
    assert (piece.rows, piece.cuttable) == (9, False)


def test_popping_from_a_ready_micro_batch_does_no_harm() -> None:
    """Ready micro-batches come in new containers, each time, with the same tensors in them."""
    ready = [{"x": torch.zeros(4, 2), "labels": torch.arange(4), "meta": [{"id": 1}]}]
    pieces = Slicer(8).share(Window(ready)).cut(unlimited)
    for _ in range(2):
        (part,) = pieces.make()
        assert part["x"] is ready[0]["x"] and part["labels"] is ready[0]["labels"]
        part.pop("labels")
        part["meta"][0].pop("id")
    assert set(ready[0]) == {"x", "labels", "meta"} and ready[0]["meta"] == [{"id": 1}]


def test_a_window_is_no_whole_batch() -> None:
    """The first rows of ready micro-batches are refused: there is no whole batch to compare with."""
    with pytest.raises(InvalidRequestError, match="no whole batch"):
        Slicer(2).share(Window([torch.zeros(3)])).first([2])


def test_batch_dim_holds_for_ready_micro_batches() -> None:
    """`batch_dim` says where the rows of ready micro-batches are, too."""
    ready = torch.arange(4 * 5).reshape(4, 5)
    pieces = Slicer(9, batch_dim=1).share(Window([ready])).cut(at_most(3))
    assert sizes_of(pieces) == [3, 2]
    assert torch.equal(torch.cat(list(pieces.make()), 1), ready)


# -- by cost


def padded_cost(batch: dict[str, Tensor]) -> int:
    """Rows times the longest of them."""
    return int(len(batch["lengths"]) * batch["lengths"].max())


def padded_share(lengths: Sequence[int], max_cost: float, cost: Callable[[Any], Any] = padded_cost) -> AbstractShare:
    """Rows of these lengths, cut by cost."""
    return Slicer(inf, cost=cost, max_cost=max_cost).share({"lengths": torch.tensor(lengths)})


@given(st.lists(st.integers(1, 20), min_size=1, max_size=15), st.integers(20, 60), st.integers(1, 60))
def test_no_micro_batch_costs_more(lengths: list[int], max_cost: int, learned: int) -> None:
    """By cost, every row is run once, no micro-batch of several rows is above either limit, and each says its cost."""
    pieces = padded_share(lengths, max_cost).cut(at_most(learned))
    made = list(pieces.make())
    assert sorted(torch.cat([part["lengths"] for part in made]).tolist()) == sorted(lengths)
    assert [piece.size for piece in pieces.pieces] == [padded_cost(part) for part in made]
    assert all(piece.size <= min(max_cost, learned) for piece in pieces.pieces if piece.cuttable)
    assert all(piece.cuttable == (len(part["lengths"]) > 1) for piece, part in zip(pieces.pieces, made, strict=True))


def test_positions_say_which_rows() -> None:
    """By cost, each piece says which rows of the batch it holds, so that outputs can be put back in order."""
    lengths = torch.tensor([1, 9, 2, 5, 4])
    pieces = padded_share(lengths.tolist(), 10).cut(unlimited)
    for piece, part in zip(pieces.pieces, pieces.make(), strict=True):
        assert torch.equal(part["lengths"], lengths[list(piece.positions or ())])
        assert piece.rows == len(part["lengths"])


def test_limit_of_costs_is_one_for_all_shapes() -> None:
    """A cost says what a batch needs, whatever its shape, so there is one limit."""
    asked: list[Shape] = []

    def limit_of(shape: Shape) -> float:
        asked.append(shape)
        return inf

    assert {piece.shape for piece in padded_share([1, 2, 3], 4).cut(limit_of).pieces} == {()}
    assert asked == [()]


def test_a_row_above_the_limit_is_refused() -> None:
    """A row that costs more than `max_cost` on its own is named."""
    with pytest.raises(InvalidRequestError, match="row 1 costs 11, above max_cost=10"):
        padded_share([1, 11, 2], 10).cut(unlimited)


def test_a_row_above_a_learned_limit_is_run_alone() -> None:
    """A row above what memory seems to allow, but within `max_cost`, is run alone and cannot be cut."""
    pieces = padded_share([9, 1], 10).cut(at_most(5))
    assert [(piece.rows, piece.size, piece.cuttable) for piece in pieces.pieces] == [(1, 9, False), (1, 1, False)]


@pytest.mark.parametrize("cost", [float("nan"), inf, -1])
def test_a_cost_that_is_no_number_is_refused(cost: float) -> None:
    """A cost that is not finite or below zero is refused with its value."""
    with pytest.raises(InvalidRequestError, match=f"cost= gave {float(cost)}"):
        padded_share([1, 2], 10, cost=lambda batch: cost).cut(unlimited)


def test_cost_of_single_rows_is_asked_once() -> None:
    """A replay does not ask again what every single row costs."""
    asked: list[int] = []

    def cost(batch: dict[str, Tensor]) -> int:
        asked.append(len(batch["lengths"]))
        return padded_cost(batch)

    share = padded_share([3, 3, 3, 3], 12, cost)
    share.cut(unlimited)
    first = asked.count(1)
    share.cut(unlimited)
    assert first >= 4 and asked.count(1) == first
