"""Where the rows of a batch are. Where two readings are possible this is an error that names the leaves.

A time axis cut by mistake would run and give a wrong gradient, so nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from autoaccum.batches.structure import (
    children_of,
    covers,
    is_array,
    is_plain_sequence,
    leaves_of,
    name_of,
)
from autoaccum.errors import InvalidRequestError

BatchDim = int | Mapping[str | int, int | None] | None

_CHANNELS = (1, 3, 4)  # a first dimension of this size in a list of 3-d tensors may be colour channels
_REMEDY = (
    'Say where the rows are with batch_dim= (an int, or a mapping such as {"input_ids": 0, "state": 1, "table": None}; '
    "None passes a leaf on whole), or give the sample as a callable n -> batch."
)


class Layout(NamedTuple):
    """Where the rows of a batch are: `cuts` maps the path of a leaf to its dimension, or to "items" for a list."""

    rows: int
    cuts: Mapping[tuple[str, ...], int | str]


class Carrier(NamedTuple):
    """Something that may hold the rows: every reading is a number of rows with the cuts that go with it."""

    path: tuple[str, ...]
    readings: Mapping[int, Mapping[tuple[str, ...], int | str]]
    holds_tensors: bool


def find_layout(batch: Any, batch_dim: BatchDim = None, *, rows: int | None = None) -> Layout:
    """Where the rows of a batch are.

    Without `batch_dim` the rows are the leading dimension that the tensors share, or the items of lists (of images, of
    captions, of per-item dicts). A leaf that does not have it is passed on whole.

    Args:
        batch: A tensor, array, tuple, list, mapping, dataclass or named tuple, nested.
        batch_dim: The dimension that holds the rows: one for all tensors, or by leaf name. A name is the path of keys
            and indices joined by dots ("labels", "0", "1.boxes"); None passes that leaf on whole.
        rows: How many rows the batch must have, where the caller knows.

    Raises:
        InvalidRequestError: When there are no rows, or more than one reading is possible.
    """
    if isinstance(batch_dim, Mapping):
        layout = _layout_by_name(batch, {str(name): dim for name, dim in batch_dim.items()}, rows)
    elif batch_dim is not None:
        layout = _layout_by_dim(batch, batch_dim)
    else:
        layout = _layout_by_vote(list(carriers_of(batch)), rows)
    if rows is not None and layout.rows != rows:
        raise InvalidRequestError(f"the batch has {layout.rows} rows where {rows} were asked for. {_REMEDY}")
    if layout.rows < 1:
        raise InvalidRequestError("the sample is empty: it has 0 rows; expected a batch of at least one row.")
    return layout


def _layout_by_vote(carriers: list[Carrier], rows: int | None) -> Layout:
    with_tensors = [carrier for carrier in carriers if carrier.holds_tensors]
    voters = with_tensors or carriers
    if not voters:
        raise InvalidRequestError(f"the sample holds no tensor with a dimension of rows. {_REMEDY}")
    votes = Counter(size for carrier in voters for size in carrier.readings)
    if rows is not None and rows in votes:
        chosen = rows
    else:
        chosen = max(votes, key=lambda size: (votes[size], -_order(voters, size)))
        _refuse_ambiguity(voters, votes, chosen)
    cuts: dict[tuple[str, ...], int | str] = {}
    for carrier in carriers:
        cuts.update(carrier.readings.get(chosen, {}))
    return Layout(chosen, cuts)


def _order(voters: list[Carrier], size: int) -> int:
    """How early a reading comes among a carrier's own: its first is the preferred one."""
    return min(list(carrier.readings).index(size) for carrier in voters if size in carrier.readings)


def _refuse_ambiguity(voters: list[Carrier], votes: Counter[int], chosen: int) -> None:
    unanimous = votes[chosen] == len(voters)
    rivals = [size for size, count in votes.items() if size != chosen and count == votes[chosen]]
    image_like = [
        carrier
        for carrier in voters
        if unanimous and len(carrier.readings) > 1 and chosen in _CHANNELS and _is_list_of_images(carrier, chosen)
    ]
    if (rivals and not unanimous) or image_like:
        raise InvalidRequestError(f"the rows of the sample cannot be told: {described(voters)}. {_REMEDY}")


def _is_list_of_images(carrier: Carrier, chosen: int) -> bool:
    """A list of tensors that share their first dimension, which is as small as a number of colour channels."""
    return all(path != carrier.path for path in carrier.readings[chosen]) and len(carrier.readings[chosen]) > 1


def described(carriers: list[Carrier]) -> str:
    """In words: the numbers of rows that each part could have."""
    return ", ".join(f"{name_of(c.path)} has {' or '.join(map(str, c.readings))} rows" for c in carriers[:8])


def carriers_of(node: Any, path: tuple[str, ...] = ()) -> Iterator[Carrier]:
    """The parts of a batch that may hold its rows, each with its readings, the preferred one first."""
    if is_array(node):
        if node.ndim:
            yield Carrier(path, {int(node.shape[0]): {path: 0}}, True)
        return
    children = list(children_of(node))
    if not is_plain_sequence(node):
        for key, child in children:
            yield from carriers_of(child, (*path, key))
        return
    inner = [carrier for key, child in children for carrier in carriers_of(child, (*path, key))]
    with_tensors = [carrier for carrier in inner if carrier.holds_tensors]
    as_items = {len(children): {path: "items"}} if children else {}
    if not with_tensors:
        if children:
            yield Carrier(path, as_items, False)
        return
    if not _alike([child for _, child in children]):
        yield from inner
        return
    shared = set.intersection(*(set(carrier.readings) for carrier in with_tensors))
    inside = {size: {k: v for c in inner for k, v in c.readings.get(size, {}).items()} for size in sorted(shared)}
    mappings = isinstance(children[0][1], Mapping)  # a list of dicts is a list of items, as detection models take
    yield Carrier(path, {**as_items, **inside} if mappings else {**inside, **as_items}, True)


def _alike(children: list[Any]) -> bool:
    """Whether the elements of a list could be the items of as many rows: same type, same keys or length, same ndim."""

    def kind(child: Any) -> tuple[Any, ...]:
        if is_array(child):
            return ("array", child.ndim, str(child.dtype))
        inner = tuple(sorted(map(str, child))) if isinstance(child, Mapping) else len(list(children_of(child)))
        return (type(child), inner)

    return len({kind(child) for child in children}) == 1


def _layout_by_dim(batch: Any, batch_dim: int) -> Layout:
    dims: dict[str, int | None] = {}
    for path, leaf in leaves_of(batch):
        if is_array(leaf) and leaf.ndim:
            dims[name_of(path)] = batch_dim
    return _layout_by_name(batch, dims, None)


def _layout_by_name(batch: Any, dims: Mapping[str, int | None], rows: int | None) -> Layout:
    named = {name_of(path): (path, leaf) for path, leaf in leaves_of(batch)}
    unknown = [name for name in dims if name not in named]
    if unknown:
        raise InvalidRequestError(f"batch_dim names {unknown[0]!r}, which the sample lacks; its leaves: {sorted(named)}.")
    cuts: dict[tuple[str, ...], int | str] = {}
    sizes: dict[str, int] = {}
    for name, dim in dims.items():
        path, leaf = named[name]
        if dim is None:
            continue
        if not is_array(leaf) or not -leaf.ndim <= dim < leaf.ndim:
            shape = tuple(leaf.shape) if is_array(leaf) else type(leaf).__name__
            raise InvalidRequestError(f"leaf {name!r} {shape} has no dimension {dim}. {_REMEDY}")
        cuts[path] = dim % leaf.ndim
        sizes[name] = int(leaf.shape[dim])
    others = [c for c in carriers_of(batch) if not any(covers(named[name][0], c.path) for name in dims)]
    if not sizes:
        return _layout_by_vote(others, rows)
    if len(set(sizes.values())) > 1:
        raise InvalidRequestError(f"batch_dim gives different numbers of rows: {sizes}. {_REMEDY}")
    found = next(iter(sizes.values()))
    for carrier in others:
        cuts.update(carrier.readings.get(found, {}))
    return Layout(found, cuts)


def refuse_hidden_rows(batch: Any, layout: Layout, batch_dim: Mapping[str | int, int | None] | None) -> None:
    """Refuse to pass a tensor on whole that has the rows in another dimension, as the start state of an RNN has."""
    declared = {str(name) for name in batch_dim or ()}
    for path, leaf in leaves_of(batch):
        if not is_array(leaf) or name_of(path) in declared or any(covers(path, cut) for cut in layout.cuts):
            continue
        if layout.rows in leaf.shape and layout.rows > 1:
            raise InvalidRequestError(
                f"leaf {name_of(path)!r} {tuple(leaf.shape)} has no leading dimension of {layout.rows} rows, "
                f"but another one of that length. {_REMEDY}"
            )


def refuse_other_reading(batch: Any) -> None:
    """Refuse to guess where leading dimensions differ but another length is common to all tensors."""
    shapes = [leaf.shape for _, leaf in leaves_of(batch) if is_array(leaf) and leaf.ndim]
    leading = {int(shape[0]) for shape in shapes}
    in_all = set.intersection(*(set(map(int, shape)) for shape in shapes)) - leading - {1} if shapes else set()
    if len(leading) > 1 and in_all:
        raise InvalidRequestError(
            f"every tensor has a dimension of {max(in_all)}, but not as the leading one: the rows may be there. " + _REMEDY
        )


def shared_second_dim(batch: Any) -> int | None:
    """The length of dimension 1 where every tensor has one and all agree: then dimension 0 could as well be time."""
    shapes = [leaf.shape for _, leaf in leaves_of(batch) if is_array(leaf) and leaf.ndim]
    seconds = {int(shape[1]) if len(shape) > 1 else None for shape in shapes}
    return seconds.pop() if len(seconds) == 1 else None


def describe(batch: Any, layout: Layout) -> str:
    """In words: which leaves are cut, and which are passed on whole."""
    whole = [
        name_of(path) + (f" {tuple(leaf.shape)}" if is_array(leaf) else "")
        for path, leaf in leaves_of(batch)
        if not any(covers(path, cut) for cut in layout.cuts)
    ]
    arrays = {path: leaf for path, leaf in leaves_of(batch) if path in layout.cuts and is_array(leaf)}
    cut = [
        f"{name_of(path)} {tuple(arrays[path].shape)}" + (f" along dimension {how}" if how else "")
        if path in arrays
        else f"the items of {name_of(path)}"
        for path, how in layout.cuts.items()
    ]
    return f"{layout.rows} rows: {_listed(cut)}" + (f"; passed on whole: {_listed(whole)}" if whole else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
