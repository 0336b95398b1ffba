"""Batches, data sets, loaders and functions as sources of rows: the worst case first, and the user's own left alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autoaccum.batches import source_kinds
from autoaccum.batches.source_kinds import AbstractSource
from autoaccum.batches.sources import source_of
from autoaccum.errors import InvalidRequestError


class Items(Dataset[Any]):
    """A data set of given items that writes down which were asked for."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self.asked = items, []

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


class Stream(IterableDataset[Any]):
    """A data set that can only be iterated, without a length."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make, self.given = make, 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.make():
            self.given += 1
            yield item


class Table:
    """A data set like those of Hugging Face: rows as dicts, a length, features, and no base class of torch."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self.features = columns, dict.fromkeys(columns, "value")

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Graphs:
    """An opaque batch: a number of graphs in one structure."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def split_graphs(batch: Graphs, sizes: Sequence[int]) -> list[Graphs]:
    """Cut graphs; sizes have to sum to all of them and be above zero."""
    assert sum(sizes) == len(batch) and min(sizes) > 0
    ends = list(itertools.accumulate(sizes))
    return [Graphs(batch.numbers[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def pad(sequences: list[Tensor]) -> Tensor:
    """Sequences as one batch, rows first."""
    return pad_sequence(sequences, batch_first=True)


def time_first(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Sequences as one batch, time first, with a label for each."""
    return pad_sequence([item[0] for item in items]), torch.tensor([item[1] for item in items])


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def shapes(batches: list[Any]) -> list[tuple[int, ...]]:
    """The shapes of the first entries of micro-batches."""
    return [tuple((batch[0] if isinstance(batch, (tuple, list)) else batch).shape) for batch in batches]


FIFTY = TensorDataset(torch.arange(200.0).reshape(50, 4), torch.arange(50.0).reshape(50, 1))


# -- an example batch


@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_example_batch_gives_any_number_of_rows(rows: int, sizes: list[int]) -> None:
    """From an example of any size come micro-batches of any sizes, its rows going round through all of them."""
    source = source_of((torch.arange(rows * 2.0).reshape(rows, 2), torch.arange(rows)))
    parts = source.micro_batches(sizes)
    assert shapes(parts) == [(size, 2) for size in sizes]
    assert torch.cat([part[1] for part in parts]).tolist() == [row % rows for row in range(sum(sizes))]


def test_example_batch_does_not_bound_the_search() -> None:
    """An example batch is no data set: it has no length."""
    assert source_of(torch.zeros(3, 2)).length is None


def test_example_batch_is_not_shared() -> None:
    """Changing rows that were taken in place does not change the user's batch, nor rows taken later."""
    batch = {"x": torch.zeros(3, 2), "scale": torch.tensor(1.0)}
    source = source_of(batch)
    for taken in (source.take(3), source.micro_batches([2, 1])[0]):
        taken["x"].add_(1)
        taken["scale"].add_(1)
    assert batch["x"].sum() == 0 and batch["scale"] == 1 and source.take(3)["x"].sum() == 0


def test_example_batch_is_described() -> None:
    """The description says which leaves are cut and which are passed on whole."""
    source = source_of({"x": torch.zeros(3, 2), "y": torch.zeros(3), "table": torch.zeros(7)})
    assert source.description == "the sample's 3 rows: x (3, 2), y (3,); passed on whole: table (7,)"


def test_arrays_are_a_batch() -> None:
    """Numpy arrays are taken as a batch and stay numpy arrays."""
    parts = source_of((np.arange(6).reshape(3, 2), np.arange(3))).micro_batches([4, 1])
    assert [part[1].tolist() for part in parts] == [[0, 1, 2, 0], [1]]
    assert all(isinstance(entry, np.ndarray) for part in parts for entry in part)


def test_time_first_example_is_refused() -> None:
    """A time-major example is refused, also where it has as many time steps as rows."""
    for steps in (20, 12):
        sample = (torch.zeros(steps, 12, 5), torch.zeros(2, 12, 7), torch.zeros(steps, 12).long())
        with pytest.raises(InvalidRequestError, match="batch_dim="):
            source_of(sample)
        assert source_of(sample, 1).take(3)[0].shape == (steps, 3, 5)


@pytest.mark.parametrize("sample", [3, "text", None, b"bytes", torch.nn.Linear(2, 2), object(), {}, [], torch.tensor(1.0)])
def test_no_sample_at_all_is_refused(sample: Any) -> None:
    """What holds no rows is refused, a module included, with the remedy."""
    with pytest.raises(InvalidRequestError, match="callable n -> batch"):
        source_of(sample)


# -- data sets


def test_length_of_a_data_set_bounds_the_search() -> None:
    """A data set's length is known, with and without a loader around it."""
    assert source_of(FIFTY).length == source_of(DataLoader(FIFTY, batch_size=8)).length == 50


def test_rows_of_a_data_set_are_collated() -> None:
    """Items of a data set are put together as a loader would, going round beyond its length."""
    x, y = source_of(FIFTY).take(53)
    assert x.shape == (53, 4) and y.flatten().tolist() == [*range(50), 0, 1, 2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_micro_batches_of_a_data_set(sizes: list[int]) -> None:
    """Micro-batches of a data set have their sizes and follow each other."""
    parts = source_of(FIFTY).micro_batches(sizes)
    assert [len(part[0]) for part in parts] == sizes
    assert torch.cat([part[1] for part in parts]).flatten().tolist() == list(range(sum(sizes)))


def test_data_set_is_not_shared() -> None:
    """A model that changes its inputs in place does not change a data set that lies in memory."""
    images = [torch.zeros(3, 4, 4) for _ in range(5)]
    source = source_of(DataLoader(Items(images), batch_size=2, collate_fn=list))
    for image in source.take(7):
        image.add_(1)
    assert sum(float(image.sum()) for image in images) == 0


def test_items_of_one_size_are_said_to_be() -> None:
    """The description says how many items were looked at and that they are alike."""
    assert source_of(FIFTY).description == "50 items looked at (all of one size)"


@pytest.mark.parametrize(
    "sample",
    [
        Items([]),
        TensorDataset(torch.zeros(0, 4)),
        Stream(lambda: iter(())),
        DataLoader(Items([])),
        DataLoader(Stream(lambda: iter(()))),
        DataLoader(Items([]), batch_size=None),
        DataLoader(Stream(lambda: iter(())), batch_size=None),
        Table({"x": []}),
        DataLoader(FIFTY, sampler=SubsetRandomSampler([])),
    ],
)
def test_empty_data_set_is_refused(sample: Any) -> None:
    """A data set without an item is refused as empty, whatever it is wrapped in."""
    with pytest.raises(InvalidRequestError, match="empty data set"):
        source_of(sample)


def test_hugging_face_data_set() -> None:
    """An object with a length, items and features is a data set, although it is none of torch's."""
    source = source_of(Table({"input_ids": [torch.full((4,), row) for row in range(6)], "label": list(range(6))}))
    assert source.length == 6
    batch = source.take(3)
    assert batch["input_ids"].shape == (3, 4) and batch["label"].tolist() == [0, 1, 2]


def test_error_of_a_data_set_is_the_user_s() -> None:
    """An exception that the data set raises comes out as it is."""

    class Broken(Items):
        def __getitem__(self, index: int) -> Any:
            raise OSError("file is gone")

    with pytest.raises(OSError, match=r"^file is gone$"):
        source_of(Broken([1]))


# -- the worst case


def sequences() -> list[Tensor]:
    """Two hundred short sequences and a long one at the end."""
    return [torch.full((8 + index % 25,), index) for index in range(200)] + [torch.full((512,), 200)]


def test_longest_sequence_comes_first() -> None:
    """The longest item is in every probe, also in one of a single row, although it is the last of the data set."""
    source = source_of(DataLoader(Items(sequences()), batch_size=128, collate_fn=pad))
    assert source.take(1).shape == (1, 512) and source.take(8).shape == (8, 512)


def test_next_longest_follow() -> None:
    """After the longest item come the next longest, not copies of it."""
    batch = source_of(DataLoader(Items(sequences()), collate_fn=pad)).take(9)
    assert [int((row != 0).sum()) for row in batch] == [512] + [32] * 8


def test_worst_case_is_described() -> None:
    """The description says how many items were looked at and from which size to which."""
    source = source_of(DataLoader(Items(sequences()), collate_fn=pad))
    assert source.description == "201 items looked at (sizes 8 to 512, the largest first)"


def test_micro_batches_are_padded_like_the_window() -> None:
    """A window is collated once and then cut, so every micro-batch is as long as the longest item."""
    parts = source_of(DataLoader(Items(sequences()), collate_fn=pad)).micro_batches([4, 3])
    assert shapes(parts) == [(4, 512), (3, 512)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 40))
def test_no_rows_are_larger_than_those_taken(lengths: list[int], count: int) -> None:
    """No other choice of as many items is larger than the one taken."""
    batch = source_of(DataLoader(Items([torch.ones(length) for length in lengths]), collate_fn=pad)).take(count)
    largest = sorted(lengths * (count // len(lengths) + 1), reverse=True) if count > len(lengths) else sorted(lengths)[::-1]
    assert batch.shape[1] == max(lengths)
    assert len(batch) == count and (count > len(lengths) or batch.sum() == sum(largest[:count]))


def test_size_of_an_item_counts_everything_in_it() -> None:
    """Texts, arrays and nested tensors count towards the size of an item."""
    items = [
        {"text": "short", "x": torch.ones(3), "y": np.ones(2)},
        {"text": "a much longer text", "x": torch.ones(3), "y": np.ones(2)},
        {"text": "short", "x": torch.ones(3), "y": np.ones(40)},
    ]
    source = source_of(
        DataLoader(
            Items(items), collate_fn=lambda batch: {"y": [len(item["text"] + "y" * len(item["y"])) for item in batch]}
        )
    )
    assert source.take(3)["y"] == [45, 20, 7]


def test_long_data_set_is_looked_at_evenly() -> None:
    """Of a long data set about two thousand items are looked at, over its whole length, the last one included."""
    dataset = Items(range(100_000))
    source = source_of(dataset)
    assert len(set(dataset.asked)) <= 2001 and 99_999 in dataset.asked
    assert max(later - earlier for earlier, later in itertools.pairwise(sorted(dataset.asked))) <= 50
    assert source.length == 100_000 and " of 100000 items looked at" in source.description


def test_looking_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at slow items stops in time, and has looked at the last item before."""
    monkeypatch.setattr(source_kinds, "_LOOKING_TIME_S", -1.0)
    dataset = Items(sequences())
    assert source_of(DataLoader(dataset, collate_fn=pad)).take(1).shape == (1, 512)
    assert dataset.asked == [200, 200]


# -- streams


def test_stream_without_a_length() -> None:
    """An iterable data set that says no length gives rows, and has the length at which it ended."""
    stream = Stream(lambda: ((torch.full((4,), float(row)), torch.zeros(1)) for row in range(50)))
    for sample in (stream, DataLoader(stream, batch_size=8)):
        source = source_of(sample)
        assert source.length == 50
        assert source.take(52)[0][:, 0].tolist() == [*range(50), 0, 1]


def test_endless_stream_is_left() -> None:
    """Of an endless stream about two thousand items are looked at."""
    stream = Stream(lambda: (torch.ones(1 + index % 7) for index in itertools.count()))
    assert source_of(DataLoader(stream, batch_size=4, collate_fn=pad)).take(2).shape == (2, 7)
    assert stream.given <= 2001
    assert source_of(stream).length is None


def test_items_of_a_stream_are_not_shared_between_batches() -> None:
    """Changing rows taken from a stream in place does not change those taken later."""
    source = source_of(DataLoader(Stream(lambda: iter([torch.zeros(3)] * 4)), collate_fn=list))
    source.take(2)[0].add_(1)
    assert all(float(item.sum()) == 0 for item in source.take(4))


# -- loaders


def test_loader_is_not_iterated() -> None:
    """A loader's random state is as it was, so that the user's epoch is the one it would have been."""
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(FIFTY, batch_size=8, shuffle=True, generator=generator)
    before, own = generator.get_state(), torch.get_rng_state()
    source_of(loader).micro_batches([3, 3])
    assert torch.equal(generator.get_state(), before) and torch.equal(torch.get_rng_state(), own)


def test_no_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader with a worker is used without starting it."""

    def refuse(loader: Any) -> None:
        raise AssertionError("the loader was iterated")

    monkeypatch.setattr(DataLoader, "__iter__", refuse)
    loader = DataLoader(FIFTY, batch_size=8, num_workers=1, persistent_workers=True)
    assert source_of(loader).take(3)[0].shape == (3, 4)


@pytest.mark.parametrize("indices", [[3, 7, 11], torch.tensor([3, 7, 11])], ids=["list", "tensor"])
def test_subset_sampler_gives_its_rows_only(indices: Any) -> None:
    """With a SubsetRandomSampler only its items are used, and their number is the length."""
    source = source_of(DataLoader(FIFTY, batch_size=2, sampler=SubsetRandomSampler(indices)))
    assert source.length == 3 and sorted(source.take(3)[1].flatten().tolist()) == [3, 7, 11]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Subset(FIFTY, [3, 7, 11]), batch_size=2),
        DataLoader(TensorDataset(FIFTY.tensors[0][:3]), batch_size=2, drop_last=True, shuffle=True),
        DataLoader(TensorDataset(FIFTY.tensors[0][:3]), sampler=WeightedRandomSampler([1.0, 1.0, 1.0], 90)),
        DataLoader(TensorDataset(FIFTY.tensors[0][:3]), batch_sampler=BatchSampler(RandomSampler(range(3)), 2, False)),
    ],
    ids=["subset", "drop_last", "weighted", "batch_sampler"],
)
def test_length_is_that_of_the_distinct_rows(loader: DataLoader[Any]) -> None:
    """Whatever the sampler, the length is the number of distinct items."""
    source = source_of(loader)
    assert source.length == 3 and source.take(2)[0].shape == (2, 4)


def test_loader_of_ready_batches() -> None:
    """Of a data set that yields ready batches the largest is used, cut by its rows."""
    batches = [(torch.zeros(4, length), torch.zeros(4)) for length in (5, 9, 7)]
    for sample in (Items(batches), Stream(lambda: iter(batches))):
        source = source_of(DataLoader(sample, batch_size=None))
        assert source.length is None and shapes(source.micro_batches([3, 2])) == [(3, 9), (2, 9)]


def test_endless_loader_of_ready_batches_is_left() -> None:
    """Of an endless stream of ready batches about two thousand are looked at, and none is kept but the largest."""
    stream = Stream(lambda: (torch.zeros(2, 1 + index % 5) for index in itertools.count()))
    assert source_of(DataLoader(stream, batch_size=None)).take(3).shape == (3, 5)
    assert stream.given <= 2001


def test_loader_that_asks_for_many_items_at_once() -> None:
    """With a batch sampler as sampler the data set is asked for whole batches, as the loader would."""
    loader = DataLoader(FIFTY, sampler=BatchSampler(SequentialSampler(FIFTY), 8, False), batch_size=None)
    assert shapes(source_of(loader).micro_batches([3, 2])) == [(3, 4), (2, 4)]


def test_loader_of_detection_items() -> None:
    """A loader that collates images and targets into tuples of lists gives micro-batches of whole items."""
    items = [(torch.rand(3, 16 + 4 * index, 20), {"boxes": torch.rand(index % 3, 4), "number": index}) for index in range(6)]
    source = source_of(DataLoader(Items(items), batch_size=2, collate_fn=lambda batch: tuple(zip(*batch, strict=True))))
    parts = source.micro_batches([2, 2, 2])
    assert [[target["number"] for target in targets] for _, targets in parts] == [[5, 4], [3, 2], [1, 0]]
    assert all(image.shape[1] == 16 + 4 * target["number"] for part in parts for image, target in zip(*part, strict=True))


@pytest.mark.parametrize("length", [20, 6])
@pytest.mark.parametrize("sizes", [[3, 3], [2, 2, 2]])
def test_loader_with_time_first(length: int, sizes: list[int]) -> None:
    """A loader that collates time first gives micro-batches of whole sequences, also with as many steps as rows."""
    items = [(torch.arange(1, length + 1), label) for label in range(6)]
    parts = source_of(DataLoader(Items(items), collate_fn=time_first)).micro_batches(sizes)
    assert shapes(parts) == [(length, size) for size in sizes]
    assert all(torch.equal(x, torch.arange(1, length + 1)[:, None].expand(-1, len(y))) for x, y in parts)


@pytest.mark.parametrize("length", [20, 6])
def test_loader_with_time_first_and_its_dimension(length: int) -> None:
    """With the dimension given, a loader's time-major batch is cut along it."""
    items = [(torch.full((length,), label), label) for label in range(6)]
    source = source_of(DataLoader(Items(items), collate_fn=time_first), batch_dim={0: 1, 1: 0})
    parts = source.micro_batches([4, 2])
    assert [x[0].tolist() for x, _ in parts] == [y.tolist() for _, y in parts] == [[0, 1, 2, 3], [4, 5]]


def test_collate_function_that_builds_what_cannot_be_cut() -> None:
    """Where a collated batch cannot be cut, every micro-batch is collated on its own."""
    source = source_of(DataLoader(Items(list(range(10))), collate_fn=Graphs))
    assert [part.numbers for part in source.micro_batches([3, 2])] == [[0, 1, 2], [0, 1]]


def test_own_split_wins_over_rows() -> None:
    """With `split`, a loader's batch is cut by it, also where it could be cut by rows."""

    def halves(batch: list[Tensor], sizes: Sequence[int]) -> list[Any]:
        return [("own", size) for size in sizes]

    assert source_of(DataLoader(FIFTY), split=halves).micro_batches([2, 3]) == [("own", 2), ("own", 3)]
    assert source_of(FIFTY, split=halves).micro_batches([2, 3]) == [("own", 2), ("own", 3)]


def test_own_split_of_a_loader_of_graphs() -> None:
    """With `split`, a loader's opaque batch is collated once and cut by it."""
    source = source_of(DataLoader(Items(list(range(10))), collate_fn=Graphs), split=split_graphs)
    assert [part.numbers for part in source.micro_batches([3, 2])] == [[0, 1, 2], [3, 4]]


# -- opaque batches


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_opaque_batch_is_cut_by_split(sizes: list[int]) -> None:
    """An opaque batch gives micro-batches of any sizes that are each within its length."""
    source = source_of(Graphs(range(6)), split=split_graphs)
    assert source.length == 6
    assert [len(part) for part in source.micro_batches(sizes)] == sizes


def test_opaque_batch_is_cut_in_order() -> None:
    """Micro-batches within the length of an opaque batch hold its rows in order."""
    source = source_of(Graphs(range(6)), split=split_graphs)
    assert [part.numbers for part in source.micro_batches([1, 3])] == [[0], [1, 2, 3]]
    assert source.take(6).numbers == [0, 1, 2, 3, 4, 5]


def test_opaque_batch_is_not_shared() -> None:
    """What is cut is a copy of the user's batch."""
    batch = Graphs(range(3))
    source_of(batch, split=lambda graphs, sizes: [graphs for _ in sizes]).take(2).numbers.clear()
    assert batch.numbers == [0, 1, 2]


def test_more_rows_than_an_opaque_batch_has_are_refused() -> None:
    """More rows than an opaque batch holds are refused, for it cannot be repeated."""
    with pytest.raises(InvalidRequestError, match="has 6 rows where 7 were asked for"):
        source_of(Graphs(range(6)), split=split_graphs).take(7)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_split_that_gives_another_number_of_parts_is_refused(number: int) -> None:
    """A `split` that gives more or fewer micro-batches than sizes is refused with both numbers."""
    source = source_of(Graphs(range(5)), split=lambda batch, sizes: [batch] * number)
    with pytest.raises(InvalidRequestError, match=rf"split\(batch, \[2, 3\]\) gave {number} micro-batches; expected 2"):
        source.micro_batches([2, 3])


def test_opaque_batch_without_a_length_is_refused() -> None:
    """An opaque batch that cannot be counted is refused by its type."""
    with pytest.raises(InvalidRequestError, match="type object cannot be counted"):
        source_of(object(), split=split_graphs)


# -- functions


def test_function_is_asked_for_every_micro_batch() -> None:
    """A function is asked for each micro-batch by its number of rows."""
    asked: list[int] = []

    def make(rows: int) -> Tensor:
        asked.append(rows)
        return torch.zeros(rows, 4)

    assert shapes(source_of(make).micro_batches([3, 3, 2])) == [(3, 4), (3, 4), (2, 4)]
    assert asked == [3, 3, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: torch.zeros(rows + 1, 4),
        lambda rows: (torch.zeros(8, 4), torch.zeros(8)),
        lambda rows: np.zeros((rows - 1, 4)),
        lambda rows: {"x": torch.zeros(2 * rows, 4), "tag": "web"},
        lambda rows: [torch.zeros(7)] * (rows - 1),
        lambda rows: ["text"] * (rows + 1),
    ],
)
def test_function_with_another_number_of_rows_is_refused(make: Callable[[int], Any]) -> None:
    """A function that returns another number of rows than asked is refused with the number."""
    with pytest.raises(InvalidRequestError, match="asked for 5 rows and returned other ones"):
        source_of(make).take(5)


def test_function_with_another_number_of_rows_in_a_known_dimension_is_refused() -> None:
    """Where the dimension is given, the rows are counted there and nowhere else."""
    source = source_of(lambda rows: torch.zeros(rows, 3), batch_dim=1)
    with pytest.raises(InvalidRequestError, match="has 3 rows where 5 were asked for"):
        source.take(5)


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 20])
def test_function_may_put_rows_in_any_dimension(rows: int) -> None:
    """A function may return time-major batches, also where a coincidence would make them ambiguous."""

    def make(count: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(12, count, 5), torch.zeros(2, count, 7)

    assert source_of(make).take(rows)[0].shape == (12, rows, 5)
    assert source_of(make, batch_dim={0: 1, 1: 1}).take(rows)[0].shape == (12, rows, 5)


def test_function_may_return_arrays() -> None:
    """A function may return numpy arrays."""
    assert source_of(lambda rows: (np.zeros((rows, 2)), np.zeros(rows))).take(4)[0].shape == (4, 2)


def test_function_with_split_may_return_anything() -> None:
    """With `split`, what a function returns is opaque and not counted."""
    assert source_of(lambda rows: Graphs(range(rows)), split=split_graphs).take(3).numbers == [0, 1, 2]


def test_function_s_own_error_comes_out() -> None:
    """An exception of the function comes out as it is."""
    with pytest.raises(ZeroDivisionError):
        source_of(lambda rows: rows // 0).take(1)


def test_object_with_a_call_method_is_a_function() -> None:
    """An object that can be called is a function of the number of rows."""

    class Maker:
        def __call__(self, rows: int) -> Tensor:
            return torch.zeros(rows, 2)

    assert source_of(Maker()).take(3).shape == (3, 2)


# -- what all sources promise

EVERY_SOURCE: list[Callable[[], AbstractSource]] = [
    lambda: source_of((torch.zeros(3, 4), torch.zeros(3))),
    lambda: source_of(FIFTY),
    lambda: source_of(DataLoader(FIFTY, batch_size=7)),
    lambda: source_of(Stream(lambda: iter([(torch.zeros(4), torch.zeros(1))] * 9))),
    lambda: source_of(lambda rows: (torch.zeros(rows, 4), torch.zeros(rows))),
    lambda: source_of(DataLoader(Items([(torch.zeros(6, 4), torch.zeros(6))]), batch_size=None)),
]


@pytest.mark.parametrize("make", EVERY_SOURCE)
@pytest.mark.parametrize("sizes", [[1], [5], [2, 1], [3, 3, 2]])
def test_every_source_gives_the_sizes_asked_for(make: Callable[[], AbstractSource], sizes: list[int]) -> None:
    """Every source gives one micro-batch per size, each with that many rows."""
    assert [len(part[0]) for part in make().micro_batches(sizes)] == sizes


@pytest.mark.parametrize("make", EVERY_SOURCE)
def test_every_source_gives_fresh_batches(make: Callable[[], AbstractSource]) -> None:
    """No two batches of a source lie in the same memory."""
    source = make()
    first, second = source.take(3), source.take(3)
    assert not shares_memory(first[0], second[0])


@pytest.mark.parametrize("make", EVERY_SOURCE)
def test_every_source_says_what_it_is(make: Callable[[], AbstractSource]) -> None:
    """Every source has a description for the report."""
    assert "rows" in make().description or "items looked at" in make().description


def test_sample_is_left_as_it_was() -> None:
    """Making a source and taking from it does not change the user's nested batch."""
    batch = {"x": torch.rand(3, 2), "meta": {"tags": ["a", "b", "c"], "more": (torch.rand(3), None)}}
    before = copy.deepcopy(batch)
    source_of(batch).micro_batches([2, 5])
    assert torch.equal(batch["x"], before["x"]) and batch["meta"]["tags"] == before["meta"]["tags"]
    assert torch.equal(batch["meta"]["more"][0], before["meta"]["more"][0])


@pytest.mark.parametrize(
    ("sample", "said"), [(None, "None"), ("data", "'data'"), ([], "an empty list"), ({}, "an empty dict")]
)
def test_what_is_no_sample_is_named(sample: Any, said: str) -> None:
    """Nothing, a text or an empty collection is refused with what it is and what was expected."""
    with pytest.raises(InvalidRequestError, match=f"the sample is {said}; expected a batch"):
        source_of(sample)


@pytest.mark.parametrize(
    "sample",
    [
        {"x": torch.zeros(3, 2), "y": torch.zeros(3), "table": torch.zeros(1, 1).expand(1, 10**15)},
        torch.zeros(3, 1).expand(3, 10**15),
        np.broadcast_to(np.zeros((3, 1)), (3, 10**14)),
    ],
    ids=["passed on whole", "rows", "array"],
)
def test_rows_larger_than_the_machine_are_refused(sample: Any) -> None:
    """An expanded tensor holds one number and claims any size; a copy of a row of it would not fit anywhere."""
    with pytest.raises(InvalidRequestError, match="a micro-batch of one row would take"):
        source_of(sample)


def test_many_rows_that_take_no_memory_are_none() -> None:
    """An expanded tensor of any number of small rows is an example batch like another one."""
    assert source_of(torch.zeros(1, 2).expand(10**12, 2)).take(3).shape == (3, 2)
