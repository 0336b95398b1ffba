"""Micro-batches of windows: every row once, on one rank, in the user's order, and as many micro-batches on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from autoaccum.choose import schedule_for
from autoaccum.errors import InvalidRequestError
from autoaccum.integrations import window_loader
from autoaccum.integrations.window_loader import WindowLoader, WindowSampler, WindowSchedule


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(0, 90))
def test_every_row_is_on_one_rank_once(target: int, world: int, micro_batch: int, multiple_of: int, rows: int) -> None:
    """Windows follow each other in order, whatever the sizes; ranks have equal numbers of micro-batches, none too large."""
    micro_batch = max(micro_batch, multiple_of)
    schedule = WindowSchedule(max(target, world), world, micro_batch, multiple_of)
    given_out, counts = [], []
    for rank in range(world):
        sampler = WindowSampler(_Order(range(rows)), schedule, rank, drop_last=False)
        batches = list(_alone(sampler))
        counts.append(len(batches))
        assert len(batches) == len(sampler) == len(sampler.rows)
        assert all(1 <= len(batch) <= micro_batch for batch in batches)
        given_out += [row for batch, real in zip(batches, sampler.rows, strict=True) for row in batch[:real]]
    assert sorted(given_out) == list(range(rows))
    assert len(set(counts)) == 1


class _Order(list[int]):
    """A sampler that is a list."""


def _alone(sampler: WindowSampler) -> Any:
    """What the sampler gives when all ranks have the same order, without asking the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_loader, "_of_first_rank", list)
        yield from sampler


@pytest.mark.parametrize(("target", "world", "limit"), [(110, 1, 40), (10, 2, 2), (97, 3, 8), (12, 4, 3)])
def test_whole_window_has_the_plans_sizes(target: int, world: int, limit: int) -> None:
    """What a plan for so many ranks says is what every rank is given."""
    planned = schedule_for(target, world, limit, at_least=1, multiple_of=1, equal=False).sizes
    schedule = WindowSchedule(target, world, max(max(of_rank) for of_rank in planned))
    assert tuple(schedule.sizes(target, rank) for rank in range(world)) == planned


def test_shuffled_order_is_that_of_the_users_loader() -> None:
    """With the same seed, the rows come in the order of the loader that was given, with its generator."""

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True, generator=generator)

    of_user = [torch.cat([batch[0] for batch in each]).tolist() for each in [loader()] for _ in range(2)]
    windows = WindowLoader(loader(), WindowSchedule(10, micro_batch=3), rank=0)
    ours = [torch.cat([batch[0] for batch in windows]).tolist() for _ in range(2)]
    assert ours == of_user
    assert sorted(ours[0]) == list(range(23)) and ours[0] != ours[1]


def test_settings_of_the_loader_are_kept() -> None:
    """Collate function, workers and their settings are those of the user."""

    def collate(items: list[Any]) -> Tensor:
        return torch.stack([item[0] for item in items]) + 100

    own = DataLoader(
        TensorDataset(torch.arange(7)), batch_size=7, collate_fn=collate, num_workers=1, persistent_workers=True, timeout=9
    )
    windows = WindowLoader(own, WindowSchedule(4, micro_batch=2), rank=0)
    assert [batch.tolist() for batch in windows] == [[100, 101], [102, 103], [104, 105], [106]]
    kept = ("num_workers", "persistent_workers", "timeout", "prefetch_factor", "dataset", "collate_fn")
    assert all(getattr(windows.loader, name) == getattr(own, name) for name in kept)
    windows._iterator._shutdown_workers()
    windows._iterator = None


def test_drop_last_drops_an_incomplete_window() -> None:
    """As a loader with the effective batch as its batch size would."""
    loader = DataLoader(TensorDataset(torch.arange(11)), batch_size=2, drop_last=True)
    windows = WindowLoader(loader, WindowSchedule(4, micro_batch=3), rank=0)
    assert [batch[0].tolist() for batch in windows] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(windows) == 4


def test_rows_are_told_as_they_are_taken() -> None:
    """A micro-batch without rows of its own holds a row that counts as none."""
    sampler = WindowSampler(_Order(range(5)), WindowSchedule(4, world_size=2, micro_batch=1), rank=1, drop_last=False)
    assert list(_alone(sampler)) == [[2], [3], [4]]
    assert list(sampler.rows) == [1, 1, 0]


def test_distributed_sampler_gives_way_to_the_order_over_all_ranks() -> None:
    """Its seed and epoch stay, its part and its padding go."""
    data = TensorDataset(torch.arange(7))
    own: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
    own.set_epoch(4)
    windows = WindowLoader(DataLoader(data, sampler=own), WindowSchedule(4, 2, 2), rank=1)
    assert windows.sampler is not None and sorted(windows.sampler) == list(range(7))
    assert (windows.sampler.seed, windows.sampler.epoch) == (3, 4)


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


def test_stream_is_cut_by_its_own_loader() -> None:
    """A stream has no order to divide; its batches get the micro-batch's size, and tell their rows themselves."""
    windows = WindowLoader(DataLoader(_Stream(), batch_size=5), WindowSchedule(6, micro_batch=3), rank=0)
    assert [len(batch) for batch in windows] == [3, 3, 1]
    assert windows.take_rows() is None


class _OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1])


class _OwnBatches(BatchSampler):
    pass


DATA = TensorDataset(torch.arange(8))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([torch.zeros(2)], "the training data is a list"),
        (DataLoader(DATA, batch_size=None), "makes its batches itself"),
        (_OwnLoader(DATA, batch_size=2), "_OwnLoader iterates in a way of its own"),
        (DataLoader(DATA, batch_sampler=_OwnBatches(SequentialSampler(DATA), 2, False)), "the batch sampler _OwnBatches"),
    ],
)
def test_loader_that_batches_in_its_own_way_is_refused(loader: Any, message: str) -> None:
    """What it does beside giving rows would be lost; the message says what to give instead."""
    with pytest.raises(InvalidRequestError, match=message + r".*[Gg]ive a torch DataLoader"):
        WindowLoader(loader, WindowSchedule(4), rank=0)


def test_batch_that_is_none_is_refused() -> None:
    """A framework would pass over it, and the weights of the others would be taken for wrong ones."""
    windows = WindowLoader(DataLoader(DATA, collate_fn=lambda items: None), WindowSchedule(4), rank=0)
    with pytest.raises(InvalidRequestError, match="the collate function returned None"):
        next(iter(windows))


def test_sampler_without_a_length_is_cut_as_well() -> None:
    """Its windows come as it goes, on one rank."""
    sampler = WindowSampler(iter([4, 2, 9]), WindowSchedule(2, micro_batch=1), rank=0, drop_last=False)
    assert list(sampler) == [[4], [2], [9]]
