"""Samples that nobody has in mind: nested, empty, of odd types, of claimed sizes, holding themselves."""

from __future__ import annotations

import datetime
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from hostile.judging import Broken
from hostile.texts import texts
from hypothesis import strategies as st
from torch import Tensor

from autoaccum.batches.layout import find_layout
from autoaccum.batches.slicing import Slicer
from autoaccum.batches.sources import source_of
from autoaccum.batches.structure import leaves_of

MOST_ROWS = 10_000  # that are really cut; more would only take longer


@dataclass
class Pair:
    """A batch of two parts."""

    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    """A batch that cannot be changed."""

    first: Any


@dataclass
class Unset:
    """A batch of which a part was never set."""

    first: Any
    later: Any = field(init=False)


Named = namedtuple("Named", "first second")

TENSOR_TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
)
ARRAY_TYPES = ("float64", "int8", "complex128", "U3", "S3", "datetime64[s]", "bool", "object", "i4,f4", "V4")
shapes = st.lists(st.sampled_from((0, 1, 2, 3, 4, 7)), max_size=4)
tensors = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), shapes, st.sampled_from(TENSOR_TYPES))
arrays = st.builds(lambda shape, dtype: np.zeros(shape, dtype=dtype), shapes, st.sampled_from(ARRAY_TYPES))


def _nested_tensor() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)


def _deep(wrap: Callable[[Any], Any], times: int) -> Any:
    found: Any = torch.zeros(3, 2)
    for _ in range(times):
        found = wrap(found)
    return found


def _holding_itself(kind: str) -> Any:
    found: Any = {"x": torch.zeros(3)} if kind == "dict" else [torch.zeros(3)]
    found["self" if kind == "dict" else 0 : None if kind == "dict" else 0] = [found] if kind != "dict" else found
    return found


def _list_in_itself() -> Any:
    found: list[Any] = [torch.zeros(3, 2)]
    found.append(found)
    return found


def _dict_in_itself() -> Any:
    found: dict[str, Any] = {"x": torch.zeros(3, 2)}
    found["self"] = found
    return found


ODD_LEAVES: tuple[Callable[[], Any], ...] = (
    lambda: torch.zeros(3, 2).to_sparse(),
    lambda: torch.zeros(3, 2).to_sparse_csr(),
    lambda: torch.quantize_per_tensor(torch.zeros(3, 2), 0.1, 0, torch.qint8),
    lambda: torch.zeros(3, 2, device="meta"),
    lambda: torch.zeros(1, 2).expand(10**9, 2),
    lambda: torch.zeros(1).expand(10**15),
    lambda: torch.zeros(3, 1).expand(3, 10**6),
    lambda: torch.full((3, 2), float("nan")),
    lambda: torch.zeros(3, 2, requires_grad=True) * 2,
    lambda: torch.nn.Parameter(torch.zeros(3, 2)),
    lambda: torch.zeros(3, 3, 8, 8).to(memory_format=torch.channels_last),
    lambda: torch.zeros(3, 2).as_subclass(torch.Tensor),
    lambda: torch.zeros(4, 3).t(),
    lambda: torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)]),
    _nested_tensor,
    lambda: np.ma.masked_array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
    lambda: np.broadcast_to(np.zeros(1), (10**12,)),
    lambda: np.float64(3),
    lambda: torch.Size([3, 2]),
    lambda: range(3),
    lambda: range(10**18),
    lambda: iter([1, 2, 3]),
    lambda: (x for x in range(3)),
    lambda: {1, 2, 3},
    lambda: frozenset("abc"),
    lambda: deque([torch.zeros(2), torch.zeros(2)]),
    lambda: memoryview(b"abc"),
    lambda: bytearray(b"abc"),
    object,
    lambda: torch.nn.Linear(2, 2),
    lambda: partial(torch.zeros),
    lambda: Decimal("NaN"),
    lambda: datetime.datetime.now(datetime.UTC),
    lambda: 10**5000,
    lambda: float("inf"),
    lambda: None,
    lambda: ...,
)
ODD_WHOLES: tuple[Callable[[], Any], ...] = (
    partial(_deep, lambda inner: [inner], 50),
    partial(_deep, lambda inner: {"a": inner}, 50),
    partial(_deep, lambda inner: [inner], 3_000),
    partial(_deep, lambda inner: {"a": inner}, 3_000),
    partial(_deep, lambda inner: (inner,), 5_000),
    partial(_deep, Frozen, 5_000),
    _list_in_itself,
    _dict_in_itself,
    lambda: {"x" * 10**6: torch.zeros(3), "y": torch.zeros(2)},
    lambda: {"\x1b[31m": torch.zeros(3), "y": torch.zeros(2)},
    lambda: {1: torch.zeros(4, 3), "1": torch.zeros(2, 3)},
    lambda: {"a.b": torch.zeros(4), "a": {"b": torch.zeros(4, 2)}},
    lambda: {None: torch.zeros(3), (1, 2): torch.zeros(3)},
    lambda: [torch.zeros(3)] * 3_000,
    lambda: [[torch.zeros(2)], [torch.zeros(2), torch.zeros(3)]],
    lambda: lambda rows: torch.zeros(rows, 2),
    lambda: lambda rows: torch.zeros(rows + 1, 2),
    lambda: lambda rows: None,
    lambda: lambda rows: _list_in_itself(),
    lambda: torch.utils.data.TensorDataset(torch.zeros(0, 2)),
    lambda: torch.utils.data.DataLoader([], batch_size=2),
)
keys = texts | st.integers(-2, 5) | st.none() | st.tuples(st.integers(0, 1))
leaves = (
    tensors | tensors | arrays | st.sampled_from(ODD_LEAVES).map(lambda make: make()) | texts | st.integers() | st.floats()
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    mappings = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        mappings,
        mappings.map(OrderedDict),
        mappings.map(UserDict),
        mappings.map(MappingProxyType),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Unset, inner),
        st.builds(Named, inner, inner),
    )


batches = st.recursive(leaves, _containers, max_leaves=6) | st.sampled_from(ODD_WHOLES).map(lambda make: make())
dims = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.integers(-3, 3),
    st.sampled_from(("items", "rows", 1.5, 10**30, "x" * 10**5, [], True)),
    st.dictionaries(
        st.sampled_from(("0", "1", "first", "a.b", "batch", 0, None)) | texts,
        st.sampled_from((0, 1, -1, None, "items", 10**30, "x", 0.5)),
        max_size=2,
    ),
)
CASES = st.tuples(batches, dims)


def check(case: tuple[Any, Any]) -> None:
    """Any three rows of it, and the same rows cut in two; what is cut in a training loop has all its rows."""
    sample, batch_dim = case
    source = source_of(sample, batch_dim)
    if not source.description.strip() or len(source.description) > 5000:
        raise Broken("a description that is empty or endless")
    parts = source.micro_batches([2, 1])
    if len(parts) != 2:
        raise Broken("another number of micro-batches than was asked for")
    whole = source.take(3)
    if source.cuts_views:
        rows = (
            find_layout(whole, batch_dim, rows=3).rows,
            [find_layout(p, batch_dim, rows=n).rows for p, n in zip(parts, (2, 1), strict=True)],
        )
        if rows != (3, [2, 1]):
            raise Broken("other rows than were asked for")
    _check_window(sample, batch_dim)


def _check_window(sample: Any, batch_dim: Any) -> None:
    share = Slicer(2, batch_dim=batch_dim).share(sample)
    if share.rows is None or share.rows > MOST_ROWS:
        return
    cut = share.cut(lambda shape: 2)
    made = list(cut.make())
    if [piece.rows for piece in cut.pieces] and sum(piece.rows or 0 for piece in cut.pieces) != share.rows:
        raise Broken("micro-batches that are not the whole batch")
    if len(made) != len(cut.pieces) or any(not list(leaves_of(part)) for part in made):
        raise Broken("other micro-batches than were announced")
