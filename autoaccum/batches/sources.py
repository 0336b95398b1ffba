"""A sample of any kind -> what gives its rows. Knows the kinds of samples, not how rows are taken from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, default_collate

from autoaccum.batches.layout import BatchDim
from autoaccum.batches.opaque import SplitFn
from autoaccum.batches.source_kinds import (
    AbstractSource,
    BatchSource,
    CallableSource,
    ItemSource,
    SplitSource,
    looked_at,
)
from autoaccum.batches.structure import children_of, item_size
from autoaccum.errors import InvalidRequestError


def source_of(sample: Any, batch_dim: BatchDim = None, split: SplitFn | None = None) -> AbstractSource:
    """Turn any supported sample into a source of rows.

    Args:
        sample: A batch of any size >= 1, a `Dataset`, a `DataLoader`, or a callable `n -> batch`. A loader is never
            iterated: its data set and its collate function are used, so no worker starts and no sampler advances.
        batch_dim: See `find_layout`.
        split: `split(batch, sizes) -> list of micro-batches` for batches that cannot be cut by rows.

    Raises:
        InvalidRequestError: When it holds no rows, or they cannot be told.
    """
    if sample is None or isinstance(sample, (str, bytes)) or (isinstance(sample, (list, tuple, dict)) and not sample):
        what = f"an empty {type(sample).__name__}" if isinstance(sample, (list, tuple, dict)) else repr(sample)[:60]
        raise InvalidRequestError(
            f"the sample is {what}; expected a batch (tensors, in tuples, lists or mappings), a Dataset, a DataLoader, or a "
            "callable n -> batch."
        )
    if isinstance(sample, DataLoader):
        return _source_of_loader(sample, batch_dim, split)
    if _is_dataset(sample):
        return ItemSource(sample, default_collate, batch_dim, split)
    if callable(sample) and not isinstance(sample, torch.nn.Module) and not list(children_of(sample)):
        return CallableSource(sample, batch_dim, split)
    if split is not None:
        return SplitSource(sample, split, batch_dim)
    return BatchSource(sample, batch_dim)


def _is_dataset(sample: Any) -> bool:
    """A torch data set, or a Hugging Face one, which is not a subclass of it but has the same two methods."""
    if isinstance(sample, Dataset):
        return True
    container = isinstance(sample, (Tensor, np.ndarray, Mapping, list, tuple, str, bytes)) or bool(list(children_of(sample)))
    return not container and hasattr(sample, "__getitem__") and hasattr(sample, "__len__") and hasattr(sample, "features")


def _source_of_loader(loader: DataLoader[Any], batch_dim: BatchDim, split: SplitFn | None) -> AbstractSource:
    collate = loader.collate_fn
    if loader.batch_size is None and loader.batch_sampler is None:  # the data set yields ready batches
        largest = max(looked_at(_ready_batches(loader)), key=item_size, default=None)
        if largest is None:
            raise InvalidRequestError("the sample is an empty data set; expected at least one batch.")
        largest = collate(largest)
        return SplitSource(largest, split, batch_dim) if split is not None else BatchSource(largest, batch_dim)
    sampler = _sampler_of(loader)
    indices = list(sampler.indices) if isinstance(sampler, SubsetRandomSampler) else None
    return ItemSource(loader.dataset, collate, batch_dim, split, indices)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What draws the rows: a batch sampler that was given has its own, inside of another one that divides it over ranks."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    return getattr(batches, "sampler", loader.sampler)


def _ready_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader that does no batching itself, without its workers and without its sampler's randomness."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        yield from dataset
    elif isinstance(loader.sampler, BatchSampler):  # a data set that is asked for many items at once
        whole = list(range(len(dataset)))
        size = loader.sampler.batch_size
        yield from (dataset[whole[start : start + size]] for start in range(0, len(whole), size))
    else:
        yield from (dataset[index] for index in range(len(dataset)))
