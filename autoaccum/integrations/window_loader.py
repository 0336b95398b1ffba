"""A user's DataLoader, giving micro-batches instead: windows of the effective batch, in its own order, shared by all ranks.

Every rank gives the same number of micro-batches in every window, which frameworks that talk in each of them need. Where the
last window of an epoch has too few rows for that, a rank gives a row again, which is said to be no row at all. Knows nothing
of any framework, of losses or of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from autoaccum.errors import InvalidRequestError
from autoaccum.schedule import shares, split_rows, steps_for


class WindowSchedule(NamedTuple):
    """How the rows of a window are divided over ranks and micro-batches.

    Attributes:
        target_batch: Rows of a whole window, over all ranks.
        micro_batch: The most rows of a micro-batch; None: a rank's share in one piece.
    """

    target_batch: int
    world_size: int = 1
    micro_batch: int | None = None
    multiple_of: int = 1

    def sizes(self, rows: int, rank: int) -> tuple[int, ...]:
        """Of this rank's micro-batches in a window of so many rows; as many on every rank, some of 0 rows.

        Example:
            >>> WindowSchedule(10, world_size=2, micro_batch=2).sizes(5, rank=1)
            (1, 1)
            >>> WindowSchedule(10, world_size=2, micro_batch=2).sizes(1, rank=1)
            (0,)
        """
        of_ranks = shares(rows, self.world_size)
        share, largest = of_ranks[rank], of_ranks[0]
        steps = steps_for(largest, largest if self.micro_batch is None else self.micro_batch, self.multiple_of)
        sizes = split_rows(share, min(steps, share), self.multiple_of) if share else ()
        return sizes + (0,) * (steps - len(sizes))

    def cut(self, window: Sequence[Any], rank: int) -> Iterator[Sequence[Any]]:
        """This rank's part of the window, in micro-batches; those of 0 rows are empty."""
        start = sum(shares(len(window), self.world_size)[:rank])
        for size in self.sizes(len(window), rank):
            yield window[start : start + size]
            start += size

    def count(self, rows: int) -> int:
        """The micro-batches of each rank in an epoch of so many rows; the last window may be short."""
        whole, rest = divmod(rows, self.target_batch)
        return whole * self.steps + (len(self.sizes(rest, 0)) if rest else 0)

    @property
    def steps(self) -> int:
        """The micro-batches of each rank in a whole window."""
        return len(self.sizes(self.target_batch, 0))


@final
class WindowSampler:
    """A batch sampler whose batches are micro-batches. All ranks take the order that the sampler gives on the first one.

    Attributes:
        rows: Of the micro-batches given out so far and not yet taken from here.
    """

    def __init__(self, sampler: Any, schedule: WindowSchedule, rank: int, *, drop_last: bool) -> None:
        self.sampler, self.schedule, self.rank, self.drop_last = sampler, schedule, rank, drop_last
        self.rows: deque[int] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.rows.clear()
        order = iter(self.sampler) if self.schedule.world_size == 1 else iter(_of_first_rank(list(self.sampler)))
        while window := list(islice(order, self.schedule.target_batch)):
            if self.drop_last and len(window) < self.schedule.target_batch:
                return
            for piece in self.schedule.cut(window, self.rank):
                self.rows.append(len(piece))
                yield list(piece) or window[:1]

    def __len__(self) -> int:
        rows, target = len(self.sampler), self.schedule.target_batch
        return self.schedule.count(rows // target * target if self.drop_last else rows)


def _of_first_rank(order: list[Any]) -> list[Any]:
    """The same for all ranks; drawn on each of them, so that their generators move alike."""
    held = [order]
    dist.broadcast_object_list(held, src=0)
    return held[0]


@final
class WindowLoader:
    """What stands in for the user's DataLoader. No DataLoader itself, so that a framework leaves its sampler as it is.

    Args:
        loader: The user's own. Its data set, sampler, collate function, workers, generator and `drop_last` are kept, which
            here drops an incomplete window.
        schedule: Of the windows. Over a stream, which has no sampler, every batch has `micro_batch` rows.

    Raises:
        InvalidRequestError: When it makes its batches in a way of its own.
    """

    def __init__(self, loader: Any, schedule: WindowSchedule, rank: int) -> None:
        refuse_own_batching(loader, schedule.world_size)
        self.dataset, self.sampler, self.windows = loader.dataset, None, None
        if isinstance(loader.dataset, IterableDataset):
            largest = schedule.micro_batch or max(schedule.sizes(schedule.target_batch, rank))
            self.loader = _like(loader, batch_size=largest, drop_last=loader.drop_last)
            return
        self.sampler = _over_all_ranks(loader.sampler)
        self.windows = WindowSampler(self.sampler, schedule, rank, drop_last=loader.drop_last)
        self.loader = _like(loader, batch_sampler=self.windows)

    def take_rows(self) -> int | None:
        """The rows of the micro-batch that comes next to training; None where only the batch itself tells."""
        return None if self.windows is None else self.windows.rows.popleft()

    @property
    def worker_init_fn(self) -> Any:
        """A framework may set one, to seed workers."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    @property
    def _iterator(self) -> Any:
        """Where a framework finds workers that it has to shut down."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if batch is None:
                raise InvalidRequestError("the collate function returned None; expected a batch for every micro-batch.")
            yield batch

    def __len__(self) -> int:
        return len(self.loader)


def refuse_own_batching(loader: Any, world_size: int) -> None:
    """Refuse a loader whose batches cannot be made smaller from outside.

    Raises:
        InvalidRequestError: With the remedy.
    """
    remedy = "Give a torch DataLoader with batch_size=, shuffle= or sampler=; which batch size does not matter."
    if not isinstance(loader, DataLoader):
        raise InvalidRequestError(
            f"the training data is a {type(loader).__name__}; expected one torch DataLoader, whose batches can be made "
            f"smaller. {remedy}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise InvalidRequestError(f"{type(loader).__name__} iterates in a way of its own, which would be lost. {remedy}")
    if loader.batch_size is None and loader.batch_sampler is None:
        raise InvalidRequestError(f"the data set makes its batches itself (batch_size=None). {remedy}")
    if isinstance(loader.dataset, IterableDataset):
        return
    if type(loader.batch_sampler) is not BatchSampler:
        name = type(loader.batch_sampler).__name__
        raise InvalidRequestError(f"the batch sampler {name} decides itself which rows make a batch. {remedy}")
    if world_size > 1 and isinstance(loader.sampler, DistributedSampler) and type(loader.sampler) is not DistributedSampler:
        raise InvalidRequestError(f"the sampler {type(loader.sampler).__name__} divides over ranks in its own way. {remedy}")


def _over_all_ranks(sampler: Any) -> Any:
    """The whole order instead of one rank's part of it: windows divide it."""
    if type(sampler) is not DistributedSampler or sampler.num_replicas == 1:
        return sampler
    whole: Any = DistributedSampler(sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed)
    whole.set_epoch(sampler.epoch)
    return whole


def _like(loader: DataLoader[Any], **batching: Any) -> DataLoader[Any]:
    """The same loader, batching otherwise."""
    has_workers = loader.num_workers > 0
    if loader.pin_memory_device:  # newer versions of torch warn of it, and ignore it
        batching["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if has_workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if has_workers else None,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
        **batching,
    )
