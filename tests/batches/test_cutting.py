"""Taking rows out: nothing lost, nothing added, containers kept, and no memory shared where it must not be."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoaccum.batches.cutting import narrow_rows, split_rows_of, take_rows
from autoaccum.batches.layout import Layout, find_layout
from autoaccum.batches.structure import (
    children_of,
    cloned,
    is_array,
    leaves_of,
    move,
    name_of,
    nodes_of,
    tensors_in,
)
from autoaccum.errors import InvalidRequestError

Path = tuple[str, ...]

fewer = settings(max_examples=50)  # a nested batch takes some milliseconds to make up


class Named(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    """A dataclass."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A frozen dataclass without a `__dict__`."""

    first: Any
    second: Any


class Fields(MutableMapping[str, Any]):
    """A mapping of one's own, whose shallow copy shares what it keeps its entries in."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


# -- batches of any structure


@functools.cache
def tensors_of(rows: int) -> st.SearchStrategy[Tensor]:
    """Tensors with this leading dimension, every element another one."""

    def make(rest: list[int], dtype: torch.dtype) -> Tensor:
        return torch.arange(rows * int(np.prod(rest, dtype=int))).reshape(rows, *rest).to(dtype)

    return st.builds(
        make, st.lists(st.integers(1, 3), max_size=2), st.sampled_from([torch.float32, torch.int64, torch.float64])
    )


@functools.cache
def items_of(rows: int) -> st.SearchStrategy[Any]:
    """Lists with an entry for every row."""
    entries = st.text(max_size=3) | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=2)
    images = st.integers(1, 3).map(lambda height: torch.arange(2 * height).reshape(2, height))
    targets = st.fixed_dictionaries({"boxes": st.integers(10, 13).map(lambda count: torch.ones(count, 4))})
    lists = [st.lists(kind, min_size=rows, max_size=rows) for kind in (entries, images, targets)]
    return st.one_of(*lists, lists[0].map(tuple))


@functools.cache
def batches_of(rows: int) -> st.SearchStrategy[Any]:
    """Batches of this many rows, nested in containers of every kind, with anything between the rows."""
    whole = st.sampled_from([None, 3, 2.5, "web", torch.tensor(2.0), torch.arange(63).reshape(21, 3), {}, [], ()])
    leaves = tensors_of(rows) | tensors_of(rows).map(Tensor.numpy) | items_of(rows) | whole

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        pairs = [st.builds(kind, inner, inner) for kind in (Named, Plain, Frozen, Slotted)]
        entries = st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
        mappings = [entries.map(kind) for kind in (dict, OrderedDict, UserDict, Fields)]
        lists = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(*pairs, *mappings, lists, lists.map(tuple))

    return st.builds(
        lambda anchor, rest: {"anchor": anchor, "rest": rest}, tensors_of(rows), st.recursive(leaves, nested, max_leaves=8)
    )


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[Any, Layout]:
    """A batch and where its rows are."""
    rows = draw(st.integers(5, 9))
    batch = draw(batches_of(rows))
    return batch, find_layout(batch, rows=rows)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Any, Layout, list[int]]:
    """A batch, where its rows are, and sizes that sum to them."""
    batch, layout = draw(cut_batches())
    cuts = sorted(draw(st.sets(st.integers(1, layout.rows - 1))))
    return batch, layout, [end - start for start, end in zip([0, *cuts], [*cuts, layout.rows], strict=True)]


def at(batch: Any, path: Path) -> Any:
    """The part of a batch that a path leads to."""
    for key in path:
        batch = dict(children_of(batch))[key]
    return batch


def is_cut(path: Path, layout: Layout) -> bool:
    """Whether the part is cut, or lies in a list that is."""
    return any(path[: len(cut)] == cut for cut in layout.cuts)


def same(one: Any, other: Any) -> bool:
    """Whether two parts are equal, of the same type and, for tensors, of the same dtype."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    parts, others = dict(children_of(one)), dict(children_of(other))
    if parts.keys() != others.keys() or bool(parts) != bool(others):
        return False
    return all(same(parts[key], others[key]) for key in parts) if parts else one == other


def joined(parts: list[Any], how: int | str) -> Any:
    """The parts of one leaf put together again."""
    if how == "items":
        return type(parts[0])([item for part in parts for item in part])
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=int(how))
    return torch.cat(parts, dim=int(how))


def memory_of(batch: Any) -> list[np.ndarray[Any, Any]]:
    """Every array of a batch, tensors as arrays on the same memory."""
    return [leaf.detach().numpy() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves_of(batch) if is_array(leaf)]


@pytest.mark.slow
@given(divisions())
@fewer
def test_micro_batches_put_together_are_the_batch(division: tuple[Any, Layout, list[int]]) -> None:
    """Every part that is cut comes back, row by row, when its pieces are put together in order."""
    batch, layout, sizes = division
    pieces = split_rows_of(batch, layout, sizes)
    assert len(pieces) == len(sizes)
    for path, how in layout.cuts.items():
        assert same(joined([at(piece, path) for piece in pieces], how), at(batch, path))


@given(divisions())
@fewer
def test_micro_batches_have_their_sizes(division: tuple[Any, Layout, list[int]]) -> None:
    """Each micro-batch has as many rows as its size, in every part that is cut."""
    batch, layout, sizes = division
    for piece, size in zip(split_rows_of(batch, layout, sizes), sizes, strict=True):
        for path, how in layout.cuts.items():
            part = at(piece, path)
            assert (len(part) if how == "items" else part.shape[int(how)]) == size


@given(divisions())
@fewer
def test_what_is_not_cut_is_passed_on_as_it_is(division: tuple[Any, Layout, list[int]]) -> None:
    """A leaf without rows is the very same object in every micro-batch."""
    batch, layout, sizes = division
    for piece in split_rows_of(batch, layout, sizes):
        for path, leaf in leaves_of(batch):
            assert is_cut(path, layout) or at(piece, path) is leaf


@given(divisions())
@fewer
def test_containers_keep_their_type(division: tuple[Any, Layout, list[int]]) -> None:
    """Every container of a micro-batch has the type and the keys of the user's, at any depth."""
    batch, layout, sizes = division
    for piece in split_rows_of(batch, layout, sizes):
        for path, node in nodes_of(batch):
            if not is_cut(path, layout):
                assert type(at(piece, path)) is type(node)
                assert [key for key, _ in children_of(at(piece, path))] == [key for key, _ in children_of(node)]


@given(divisions())
@fewer
def test_tensors_of_micro_batches_are_views(division: tuple[Any, Layout, list[int]]) -> None:
    """Cutting along the leading dimension copies no tensor."""
    batch, layout, sizes = division
    for piece in split_rows_of(batch, layout, sizes):
        for path in layout.cuts:
            part, whole = at(piece, path), at(batch, path)
            if isinstance(whole, Tensor):
                assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@given(divisions())
@fewer
def test_cutting_leaves_the_batch_alone(division: tuple[Any, Layout, list[int]]) -> None:
    """The user's batch holds the same objects after it was cut and after rows were taken."""
    batch, layout, sizes = division
    before = [(path, id(node)) for path, node in nodes_of(batch)]
    split_rows_of(batch, layout, sizes)
    take_rows(batch, layout, 3)
    assert [(path, id(node)) for path, node in nodes_of(batch)] == before


@given(cut_batches())
@fewer
def test_every_tensor_with_the_rows_is_cut(cut_batch: tuple[Any, Layout]) -> None:
    """No tensor whose leading dimension is the number of rows is passed on whole."""
    batch, layout = cut_batch
    for path, leaf in leaves_of(batch):
        if is_array(leaf) and leaf.ndim and leaf.shape[0] == layout.rows:
            assert is_cut(path, layout)


@given(st.integers(1, 4).flatmap(lambda rows: st.tuples(st.just(rows), batches_of(rows))))
@fewer
def test_few_rows_are_cut_or_refused(batch_of_rows: tuple[int, Any]) -> None:
    """Where rows are as few as inputs, channels or items, every tensor that has them is cut, or nothing is."""
    rows, batch = batch_of_rows
    try:
        layout = find_layout(batch, rows=rows)
    except InvalidRequestError:
        return
    tensors = [path for path, leaf in leaves_of(batch) if is_array(leaf) and leaf.ndim and leaf.shape[0] == rows]
    assert layout.rows == rows and all(is_cut(path, layout) for path in tensors)
    one_each = split_rows_of(batch, layout, [1] * rows)
    assert all(
        same(joined([at(piece, path) for piece in one_each], how), at(batch, path)) for path, how in layout.cuts.items()
    )


@given(cut_batches(), st.integers(1, 25))
@fewer
def test_taken_rows_go_round(cut_batch: tuple[Any, Layout], count: int) -> None:
    """Any number of rows can be taken; row i is row i modulo the rows there are."""
    batch, layout = cut_batch
    taken = take_rows(batch, layout, count)
    for path, how in layout.cuts.items():
        part, whole = at(taken, path), at(batch, path)
        assert type(part) is type(whole)
        assert (len(part) if how == "items" else part.shape[int(how)]) == count
        for row in range(count):
            one, other = part[row], whole[row % layout.rows]
            assert same(one, other) if is_array(whole) or how == "items" else one == other


@given(cut_batches(), st.integers(1, 25))
@fewer
def test_taken_rows_share_no_memory_with_the_batch(cut_batch: tuple[Any, Layout], count: int) -> None:
    """No array and no list or dict of the rows taken is the user's own, cut or not."""
    batch, layout = cut_batch
    taken = take_rows(batch, layout, count)
    assert not any(np.shares_memory(one, other) for one in memory_of(batch) for other in memory_of(taken) if one.size)
    mutable = (list, dict, MutableMapping)
    own = {id(node) for path, node in nodes_of(batch) if isinstance(node, mutable) and not is_cut(path[:-1], layout)}
    assert not own & {id(node) for _, node in nodes_of(taken)}


@given(cut_batches(), st.integers(10, 25))
@fewer
def test_repeated_rows_are_copies_of_their_own(cut_batch: tuple[Any, Layout], count: int) -> None:
    """A row that is taken twice does not share its tensors with itself."""
    batch, layout = cut_batch
    arrays = [array for array in memory_of(take_rows(batch, layout, count)) if array.size]
    assert not any(np.shares_memory(one, other) for index, one in enumerate(arrays) for other in arrays[:index])


@given(cut_batches())
@fewer
def test_what_is_not_cut_is_copied(cut_batch: tuple[Any, Layout]) -> None:
    """A leaf without rows is equal to the user's in the rows taken."""
    batch, layout = cut_batch
    taken = take_rows(batch, layout, 2)
    assert all(same(at(taken, path), leaf) for path, leaf in leaves_of(batch) if not is_cut(path, layout))


@given(cut_batches(), st.integers(1, 25))
@fewer
def test_taken_rows_keep_containers(cut_batch: tuple[Any, Layout], count: int) -> None:
    """Every container of the rows taken has the type of the user's."""
    batch, layout = cut_batch
    taken = take_rows(batch, layout, count)
    assert all(type(at(taken, path)) is type(node) for path, node in nodes_of(batch) if not is_cut(path[:-1], layout))


# -- single facts

B = 12


def test_entries_of_every_kind_in_three_parts() -> None:
    """Images, lists and tuples of the batch length come in parts of four; the rest comes whole in every part."""
    table, scale = torch.randn(21, 5), torch.tensor(2.0)
    batch = {
        "image": torch.randn(B, 3, 8, 8),
        "target": torch.arange(B),
        "captions": [f"caption {row}" for row in range(B)],
        "spans": ([1, 2, 3],) * B,
        "source": "web",
        "scale": scale,
        "epoch": 3,
        "table": table,
    }
    parts = split_rows_of(batch, find_layout(batch), [4, 4, 4])
    for number, part in enumerate(parts):
        rows = slice(4 * number, 4 * number + 4)
        assert torch.equal(part["image"], batch["image"][rows]) and torch.equal(part["target"], batch["target"][rows])
        assert part["captions"] == batch["captions"][rows] and part["spans"] == batch["spans"][rows]
        assert (part["source"], part["epoch"]) == ("web", 3) and part["scale"] is scale and part["table"] is table


def test_batch_encoding_stays_one() -> None:
    """A BatchEncoding is cut into BatchEncodings that a model can be called with by `**`, and is not changed itself."""
    transformers = pytest.importorskip("transformers", reason="the optional dependency transformers is not installed")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(24).view(B, 2), "attention_mask": torch.ones(B, 2)})
    layout = find_layout(batch)
    parts = split_rows_of(batch, layout, [5, 5, 2])
    assert [type(part) for part in parts] == [transformers.BatchEncoding] * 3
    assert [dict(**part)["input_ids"].shape for part in parts] == [(5, 2), (5, 2), (2, 2)]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), torch.arange(24).view(B, 2))
    assert batch["input_ids"].shape == take_rows(batch, layout, B)["input_ids"].shape == (B, 2)


def test_model_output_stays_one() -> None:
    """A ModelOutput, a dict and a dataclass at once, is cut into ModelOutputs whose attributes are cut as well."""
    outputs = pytest.importorskip(
        "transformers.modeling_outputs", reason="the optional dependency transformers is not installed"
    )
    batch = outputs.BaseModelOutput(last_hidden_state=torch.randn(B, 3))
    part = narrow_rows(batch, find_layout(batch), 2, 4)
    assert type(part) is outputs.BaseModelOutput
    assert torch.equal(part.last_hidden_state, batch.last_hidden_state[2:6])
    assert torch.equal(part["last_hidden_state"], part.last_hidden_state)


def test_defaultdict_keeps_its_default() -> None:
    """A defaultdict is cut into defaultdicts with the same default."""
    batch = defaultdict(list, {"x": torch.zeros(B, 2)})
    part = narrow_rows(batch, find_layout(batch), 0, 4)
    assert type(part) is defaultdict and part["missing"] == []


def test_read_only_mapping_becomes_a_dict() -> None:
    """A mapping that cannot be written to is cut into plain dicts."""
    part = narrow_rows(batch := MappingProxyType({"x": torch.arange(B)}), find_layout(batch), 3, 2)
    assert type(part) is dict and part["x"].tolist() == [3, 4]


def test_images_stay_with_their_targets() -> None:
    """Lists of images and of targets are cut together, also around an image without objects."""
    images = [torch.full((3, 16 + 4 * index, 20), float(index)) for index in range(6)]
    targets = [{"boxes": torch.rand(index % 3, 4), "labels": torch.full((index % 3,), index)} for index in range(6)]
    batch = (images, targets)
    parts = split_rows_of(batch, find_layout(batch), [2, 2, 2])
    assert [[int(image[0, 0, 0]) for image in part[0]] for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [
        [target is targets[index] for index, target in enumerate(part[1], 2 * number)] for number, part in enumerate(parts)
    ] == [[True, True]] * 3
    assert all(type(part) is tuple and type(part[0]) is list for part in parts)


def test_time_first_is_cut_along_its_batch_dimension() -> None:
    """With the dimension given by name, a time-major input and its state are cut by rows and keep all time steps."""
    steps, layers = 20, 2
    batch = {"x": torch.randn(steps, B, 5), "state": torch.randn(layers, B, 7), "y": torch.randint(0, 4, (steps, B))}
    layout = find_layout(batch, {"x": 1, "state": 1, "y": 1})
    parts = split_rows_of(batch, layout, [4, 4, 4])
    for name, whole in batch.items():
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), whole)


def test_cut_state_is_contiguous() -> None:
    """A state that is cut along its second dimension is contiguous, as cuDNN demands."""
    batch = {"x": torch.randn(20, B, 5), "state": torch.randn(2, B, 7)}
    part = narrow_rows(batch, find_layout(batch, 1), 4, 4)
    assert part["state"].is_contiguous() and part["x"].is_contiguous()


def test_rows_are_taken_along_their_dimension() -> None:
    """Rows in another dimension than the first are repeated along that one, in tensors and in arrays."""
    batch = {"x": torch.arange(6).reshape(2, 3), "y": np.arange(6).reshape(2, 3)}
    taken = take_rows(batch, find_layout(batch, 1), 5)
    assert taken["x"].tolist() == taken["y"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_taken_rows_are_leaves_that_require_what_the_batch_requires(requires_grad: bool) -> None:
    """Rows taken of a tensor that requires a gradient require one, without a history."""
    batch = {"x": torch.zeros(4, 2, requires_grad=requires_grad), "table": torch.zeros(9, requires_grad=requires_grad)}
    taken = take_rows(batch, find_layout(batch, {"table": None}), 6)
    assert all(taken[name].requires_grad is requires_grad and taken[name].is_leaf for name in batch)


def test_gradients_flow_through_a_cut() -> None:
    """A gradient taken in a micro-batch arrives in the user's input."""
    x = torch.zeros(4, 2, requires_grad=True)
    narrow_rows({"x": x}, find_layout({"x": x}), 1, 2)["x"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("make", [Plain, Frozen, Slotted], ids=lambda kind: kind.__name__)
def test_dataclass_is_cut_without_its_constructor(make: Any) -> None:
    """Dataclasses of every kind are cut into new ones; the user's stays as it was."""
    batch = make(torch.arange(B), "web")
    part = narrow_rows(batch, find_layout(batch), 2, 3)
    assert (type(part), part.first.tolist(), part.second) == (make, [2, 3, 4], "web")
    assert batch.first.shape == (B,)


def test_move_keeps_the_structure() -> None:
    """Moving a batch moves its tensors and leaves everything else as it is."""
    array, text = np.zeros(3), "web"
    batch = {"x": torch.zeros(3), "inner": Named([torch.ones(2)], text), "array": array}
    moved = move(batch, torch.device("meta"))
    assert [tensor.device.type for tensor in tensors_in(moved)] == ["meta", "meta"]
    assert type(moved["inner"]) is Named and moved["inner"].second is text and moved["array"] is array
    assert [tensor.device.type for tensor in tensors_in(batch)] == ["cpu", "cpu"]


def test_clone_of_an_empty_container_is_another_one() -> None:
    """An empty list or dict is copied too, so that what a model appends does not reach the user."""
    batch = {"x": torch.zeros(2), "found": [], "losses": {}}
    copied = cloned(batch)
    assert copied["found"] is not batch["found"] and copied["losses"] is not batch["losses"]


def test_names_of_leaves() -> None:
    """A leaf is named by its keys and indices joined by dots, and a lone tensor is named batch."""
    assert [name_of(path) for path, _ in leaves_of({"a": (1, {"b": 2}), "c": Named(3, 4)})] == [
        "a.0",
        "a.1.b",
        "c.first",
        "c.second",
    ]
    assert [name_of(path) for path, _ in leaves_of(torch.zeros(1))] == ["batch"]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_rows_are_taken(dtype: torch.dtype) -> None:
    """Whole numbers without a sign, as in 16-bit images, come out as they went in, the largest ones too."""
    batch = torch.tensor([[1, 2], [3, torch.iinfo(dtype).max if dtype != torch.uint64 else 2**63]], dtype=dtype)
    taken = take_rows(batch, find_layout(batch), 3)
    assert taken.dtype == dtype and taken.tolist() == [*batch.tolist(), batch.tolist()[0]]
