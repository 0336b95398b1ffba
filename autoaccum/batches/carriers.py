"""The parts of a batch that may hold its rows, and how many rows each could have. `layout` decides between the readings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.nn.utils.rnn import PackedSequence

from autoaccum.batches.packed_sequences import num_sequences
from autoaccum.batches.structure import (
    children_of,
    covers,
    is_array,
    is_plain_sequence,
    leaves_of,
    name_of,
    refuse_endless,
)
from autoaccum.units import one_line

_CHANNELS = (1, 3, 4)  # a first dimension of this size in a list of 3-d tensors may be colour channels


Cuts = Mapping[tuple[str, ...], int | str]


class Carrier(NamedTuple):
    """Something that may hold the rows: every reading is a number of rows with the cuts that go with it.

    Attributes:
        doubtful: Readings that another part of the batch has to confirm.
        by_items: The other cuts of a reading that is two in one: three images of three channels are three rows both ways.
        partly: Cuts of those parts that have a number of rows which not all parts share.
        either: A list of as many tensors as each of them has rows, by its items: bags of instances, or inputs side by side.
    """

    path: tuple[str, ...]
    readings: Mapping[int, Cuts]
    holds_tensors: bool
    doubtful: frozenset[int] = frozenset()
    by_items: Mapping[int, Cuts] = MappingProxyType({})
    partly: Mapping[int, Cuts] = MappingProxyType({})
    either: Mapping[int, Cuts] = MappingProxyType({})


def carriers_of(node: Any, path: tuple[str, ...] = (), settled: Collection[tuple[str, ...]] = ()) -> Iterator[Carrier]:
    """The parts of a batch that may hold its rows, each with its readings, the preferred one first.

    Args:
        node: The batch, or a part of it.
        path: Where that part is.
        settled: Paths about which nothing is left to be told; a list that holds one is not a list of rows.
    """
    if path in settled:
        return
    refuse_endless(path)
    if is_array(node):
        if node.ndim:
            yield Carrier(path, {int(node.shape[0]): {path: 0}}, True)
        return
    if isinstance(node, PackedSequence):
        yield Carrier(path, {num_sequences(node): {path: "sequences"}}, True)
        return
    children = [child for _, child in children_of(node)]
    inner = [carrier for key, child in children_of(node) for carrier in carriers_of(child, (*path, key), settled)]
    with_tensors = [carrier for carrier in inner if carrier.holds_tensors]
    partly_settled = any(covers(done, path) for done in settled)
    if not is_plain_sequence(node) or partly_settled or (with_tensors and not _are_items(children)):
        yield from inner
    elif not with_tensors:
        if children:
            yield Carrier(path, {len(children): {path: "items"}}, False)
    else:
        yield _carrier_of_list(node, path, children, inner)


def _carrier_of_list(node: Any, path: tuple[str, ...], children: list[Any], inner: list[Carrier]) -> Carrier:
    """The readings of a list that holds tensors: its items are the rows, or its items share the rows inside."""
    voters = [carrier.readings for carrier in inner if carrier.holds_tensors]
    inside = {
        size: _merged(c.readings.get(size) or c.partly.get(size, {}) for c in inner)
        for size in {size: None for c in inner for size in (*c.readings, *c.partly)}
    }
    shared = {size: cuts for size, cuts in inside.items() if all(size in readings for readings in voters)}
    partly = {size: cuts for size, cuts in inside.items() if size not in shared}
    as_items: Mapping[int, Cuts] = {len(children): {path: "items"}}
    if all(_is_record(child) for child in children):
        evident = all(is_plain_sequence(child) or _has_a_whole_part(child) for child in children)
        # A sample that is a list of mappings is what detection models and unpadded features come as.
        sure = evident or (isinstance(node, list) and not path) or not shared.keys() - as_items.keys()
        doubtful = frozenset() if sure else frozenset(as_items)
        return Carrier(path, {**as_items, **shared, **as_items}, True, doubtful, partly=partly)
    doubts = frozenset(_doubts(node, children, shared))
    by_items = {
        size: _merged(c.by_items.get(size) or c.readings.get(size, {}) for c in inner)
        for size in shared
        if any(size in c.by_items for c in inner)
    }
    both_ways = {size: cuts for size, cuts in as_items.items() if size in doubts and size in shared}
    readings = {**shared, **as_items, **shared}
    # The batch itself is what a DataLoader's collate function makes a list of: its parts stand side by side.
    either = {size: cuts for size, cuts in as_items.items() if path and size in shared and size not in both_ways}
    return Carrier(path, readings, True, doubts - both_ways.keys(), {**by_items, **both_ways}, partly, either)


def _doubts(node: Any, children: list[Any], shared: Mapping[int, Cuts]) -> Iterator[int]:
    """The numbers of rows of a list that something else in the batch has to confirm."""
    shapes = [leaf.shape for child in children for _, leaf in leaves_of(child) if is_array(leaf)]
    image_like = len(children) > 1 and all(len(shape) == 3 for shape in shapes)
    for size, cuts in shared.items():
        if image_like and size in _CHANNELS:  # images with these channels, or a batch with these rows
            yield size
        if isinstance(node, list) and "items" in cuts.values():  # a list of pairs, or a pair of lists
            yield size
    if not shared and (isinstance(node, tuple) or set.intersection(*(set(shape) for shape in shapes)) - {1}):
        yield len(children)  # items of any length, or an input beside something else, or batches with time first


def _merged(several: Iterable[Cuts]) -> Cuts:
    return {path: how for cuts in several for path, how in cuts.items()}


def _is_record(child: Any) -> bool:
    """Whether it looks like a single row, so that a list of its like is a list of rows, as detection models take.

    That is a mapping, a dataclass, a named tuple, or a tuple of unlike things of which one cannot hold rows of its own.
    """
    if not is_plain_sequence(child):
        return not is_array(child)
    return not _alike(list(child)) and (_has_a_whole_part(child) or any(isinstance(part, Mapping) for part in child))


def _has_a_whole_part(child: Any) -> bool:
    """Whether some part is a number or a text: a batch of rows would have a tensor or a list of them."""
    return any(
        not part.ndim if is_array(part) else isinstance(part, (str, bytes, int, float)) for _, part in children_of(child)
    )


def _are_items(children: list[Any]) -> bool:
    """Whether the elements of a list could be as many rows; lists of unlike things side by side are columns of rows."""
    in_columns = all(is_plain_sequence(child) and child and _alike(list(child)) for child in children)
    return _alike(children) and not (in_columns and not _alike([child[0] for child in children]))


def _alike(children: list[Any]) -> bool:
    """Whether the elements of a list could be the items of as many rows: same type, same keys or length, same ndim."""

    def kind(child: Any) -> tuple[Any, ...]:
        if is_array(child):
            return ("array", child.ndim, str(child.dtype))
        inner = tuple(sorted(map(str, child))) if isinstance(child, Mapping) else len(list(children_of(child)))
        return (type(child), inner)

    return len({kind(child) for child in children}) == 1


def described(carriers: list[Carrier]) -> str:
    """In words: the numbers of rows that each part could have."""
    possible = [(name_of(c.path), list({**c.readings, **c.partly})[:4]) for c in carriers[:8]]
    return ", ".join(f"{one_line(name)} has {' or '.join(map(str, sizes))} rows" for name, sizes in possible)
