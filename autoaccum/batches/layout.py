"""Where the rows of a batch are. Where two readings are possible this is an error that names the leaves.

A time axis cut by mistake would run and give a wrong gradient, so nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoaccum.batches.carriers import Carrier, Cuts, carriers_of, described
from autoaccum.batches.ragged import laid_end_to_end
from autoaccum.batches.structure import covers, is_array, is_inside, is_plain_sequence, leaves_of, name_of, nodes_of
from autoaccum.errors import InvalidRequestError
from autoaccum.units import one_line, shown

BatchDim = int | str | Mapping[str | int, int | str | None] | None
ListsRead = Mapping[tuple[str, ...], str]

_REMEDY = (
    'Say where the rows are with batch_dim= (an int, "items" for the items of a list, or a mapping such as '
    '{"input_ids": 0, "state": 1, "images": "items", "table": None}; None passes a leaf on whole), '
    "or give the sample as a callable n -> batch."
)


class Layout(NamedTuple):
    """Where the rows of a batch are.

    `cuts` maps the path of a leaf to its dimension, that of a list to "items", of a packed sequence to "sequences".
    """

    rows: int
    cuts: Cuts


def find_layout(
    batch: Any,
    batch_dim: BatchDim = None,
    *,
    rows: int | None = None,
    may_be_empty: bool = False,
    read_before: ListsRead = MappingProxyType({}),
) -> Layout:
    """Where the rows of a batch are.

    Without `batch_dim` the rows are the leading dimension that the tensors share, or the items of lists (of images, of
    captions, of per-item dicts). A leaf that does not have it is passed on whole.

    Args:
        batch: A tensor, array, tuple, list, mapping, dataclass or named tuple, nested.
        batch_dim: The dimension that holds the rows: one for all tensors, or by leaf name. A name is the path of keys
            and indices joined by dots ("labels", "0", "1.boxes"); None passes that leaf, or that container, on whole;
            "items" says that the items of a list are the rows, alone for a sample that is that list.
        rows: How many rows the batch must have, where the caller knows.
        may_be_empty: Whether a batch of 0 rows is one.
        read_before: How the lists of other batches of the same stream were read, as `lists_read` gives it.

    Raises:
        InvalidRequestError: When there are no rows, or more than one reading is possible.
    """
    if not (batch_dim is None or batch_dim == "items" or isinstance(batch_dim, (int, Mapping))):
        raise InvalidRequestError(f"batch_dim={shown(batch_dim)} cannot be read. {_REMEDY}")
    nested = [name_of(path) for path, leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.is_nested]
    if nested:
        raise InvalidRequestError(f"leaf {shown(nested[0])} is a nested tensor, which cannot be cut; pass split=.")
    _refuse_equal_names(batch)
    if isinstance(batch_dim, Mapping):
        layout = _layout_by_name(batch, {str(name): dim for name, dim in batch_dim.items()}, rows, read_before)
    elif isinstance(batch_dim, str):
        layout = _layout_by_name(batch, {name_of(()): batch_dim}, rows, read_before)
    elif batch_dim is not None:
        layout = _layout_by_dim(batch, batch_dim)
    else:
        layout = _layout_by_vote(list(carriers_of(batch)), rows, read_before)
    _refuse_sparse_rows(batch, layout)
    if rows is not None and layout.rows != rows:
        raise InvalidRequestError(f"the batch has {layout.rows} rows where {rows} were asked for. {_REMEDY}")
    if layout.rows < 1 and not may_be_empty:
        raise InvalidRequestError("the sample is empty: it has 0 rows; expected a batch of at least one row.")
    return layout


def _refuse_equal_names(batch: Any) -> None:
    """Refuse keys that are two and read as one, such as 1 and "1": parts are known by what their keys read."""
    paths = Counter(path for path, _ in nodes_of(batch))
    twice = next((path for path, count in paths.items() if count > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"the sample has two parts named {shown(name_of(twice))}; expected keys that read unlike.")


def _refuse_sparse_rows(batch: Any, layout: Layout) -> None:
    """Refuse to cut a tensor that keeps only some of its numbers; passed on whole it may be one."""
    for path, leaf in leaves_of(batch):
        if path in layout.cuts and isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise InvalidRequestError(
                f"leaf {shown(name_of(path))} is a sparse tensor, which cannot be cut by rows; pass split=, "
                "give the sample as a callable n -> batch, or make it dense."
            )


def refuse_doubtful_layout(batch: Any, layout: Layout, batch_dim: BatchDim = None) -> None:
    """Refuse a layout that was found where a cut may tear what belongs together.

    The rows may as well be in another dimension, as in time-major batches, or be the tokens of sequences laid end to end.

    Raises:
        InvalidRequestError: With the names of the leaves and the remedy.
    """
    if batch_dim is None:
        _refuse_other_reading(batch, layout)
    if batch_dim is None or isinstance(batch_dim, Mapping):
        _refuse_hidden_rows(batch, layout, batch_dim)
        _refuse_laid_end_to_end(batch, layout, batch_dim)


def _layout_by_vote(carriers: list[Carrier], rows: int | None, read_before: ListsRead) -> Layout:
    with_tensors = [carrier for carrier in carriers if carrier.holds_tensors]
    voters = with_tensors or carriers
    if not voters:
        raise InvalidRequestError(f"the sample holds no tensor with a dimension of rows. {_REMEDY}")
    votes = Counter(size for carrier in voters for size in carrier.readings)
    if rows is not None and rows in votes:
        return Layout(rows, _cuts_for(carriers, rows, read_before))
    chosen = max(votes, key=lambda size: (votes[size], _is_items_of_records(voters, size), -_order(voters, size)))
    rivals = {size for size, count in votes.items() if size != chosen and count == votes[chosen]}
    doubted = all(chosen in carrier.doubtful for carrier in voters if chosen in carrier.readings)
    if doubted or (rivals and votes[chosen] < len(voters)):
        raise InvalidRequestError(f"the rows of the sample cannot be told: {described(voters)}. {_REMEDY}")
    return Layout(chosen, _cuts_for(carriers, chosen, read_before))


def _is_items_of_records(voters: list[Carrier], size: int) -> bool:
    """Whether a list of records has so many items: three boxes in each do not make three rows."""
    return any(next(iter(c.readings.items()), None) == (size, {c.path: "items"}) for c in voters)


def _order(voters: list[Carrier], size: int) -> int:
    """How early a reading comes among a carrier's own: its first is the preferred one."""
    return min(list(carrier.readings).index(size) for carrier in voters if size in carrier.readings)


def _cuts_for(carriers: list[Carrier], rows: int, read_before: ListsRead) -> dict[tuple[str, ...], int | str]:
    """How each part is cut for this number of rows; where both is possible, like another list that is cut by items."""
    cuts: dict[tuple[str, ...], int | str] = {}
    list_beside = any("items" in c.readings.get(rows, {}).values() for c in carriers if c.holds_tensors)
    for carrier in carriers:
        cuts.update(_cuts_of(carrier, rows, read_before.get(carrier.path), list_beside))
    return cuts


def _cuts_of(carrier: Carrier, rows: int, read_before: str | None, list_beside: bool) -> Cuts:
    """Where a list can be read in two ways, as the lists of earlier batches, or like another list that is cut by items."""
    by_items, inside = carrier.by_items.get(rows), carrier.readings.get(rows) or carrier.partly.get(rows, {})
    # Two tensors of two rows each are two inputs or views far more often than two bags of two.
    either = carrier.either.get(rows) if rows > 2 or read_before else None
    open_cuts = by_items or either
    if not open_cuts:
        return inside
    if read_before and carrier.path in open_cuts:
        return open_cuts if read_before == "items" else inside
    if not list_beside:
        raise InvalidRequestError(
            f"{one_line(name_of(carrier.path))} can be {rows} items, or {rows} rows within every item. {_REMEDY}"
        )
    return open_cuts


def lists_read(batch: Any, layout: Layout) -> dict[tuple[str, ...], str]:
    """How lists inside a batch were read, "items" or "rows", where their lengths leave no doubt: later ones may."""
    found = {}
    for path, node in nodes_of(batch):
        if not path or not is_plain_sequence(node) or not node:
            continue
        if layout.cuts.get(path) == "items":
            if not all(is_array(item) and item.ndim and len(item) == len(node) for item in node):
                found[path] = "items"
        elif len(node) != layout.rows and any(covers(cut, path) for cut in layout.cuts):
            found[path] = "rows"
    return found


def _layout_by_dim(batch: Any, batch_dim: int) -> Layout:
    dims: dict[str, int | str | None] = {}
    for path, leaf in leaves_of(batch):
        if is_array(leaf) and leaf.ndim:
            dims[name_of(path)] = batch_dim
    return _layout_by_name(batch, dims, None, {})


def _layout_by_name(batch: Any, dims: Mapping[str, int | str | None], rows: int | None, read_before: ListsRead) -> Layout:
    named = {name_of(path): (path, node) for path, node in nodes_of(batch)}
    unknown = [name for name in dims if name not in named]
    if unknown:
        leaves = sorted(one_line(name_of(path)) for path, _ in leaves_of(batch))
        raise InvalidRequestError(
            f"batch_dim names {shown(unknown[0])}, which the sample lacks; its leaves: {shown(leaves, 300)}."
        )
    cuts: dict[tuple[str, ...], int | str] = {}
    sizes: dict[str, int] = {}
    for name, dim in dims.items():
        path, leaf = named[name]
        if dim is None:
            continue
        if dim == "items" and is_plain_sequence(leaf):
            cuts[path], sizes[name] = "items", len(leaf)
            continue
        if not is_array(leaf) or not isinstance(dim, int) or not -leaf.ndim <= dim < leaf.ndim:
            shape = shown(tuple(leaf.shape)) if is_array(leaf) else type(leaf).__name__
            raise InvalidRequestError(f"leaf {shown(name)} {shape} has no dimension {shown(dim)}. {_REMEDY}")
        cuts[path] = dim % leaf.ndim
        sizes[name] = int(leaf.shape[dim])
    others = list(carriers_of(batch, settled={named[name][0] for name in dims}))
    if not sizes:
        return _layout_by_vote(others, rows, read_before)
    if len(set(sizes.values())) > 1:
        raise InvalidRequestError(f"batch_dim gives different numbers of rows: {shown(sizes, 300)}. {_REMEDY}")
    found = next(iter(sizes.values()))
    return Layout(found, {**cuts, **_cuts_for(others, found, read_before)})


def _refuse_hidden_rows(batch: Any, layout: Layout, batch_dim: Mapping[str | int, int | str | None] | None) -> None:
    """Refuse to pass a tensor on whole that has the rows in another dimension, as the start state of an RNN has."""
    declared = [f"{name}." for name in batch_dim or ()]
    for path, leaf in leaves_of(batch):
        if not is_array(leaf) or is_inside(path, layout.cuts):
            continue
        if layout.rows in leaf.shape and layout.rows > 1 and not f"{name_of(path)}.".startswith((*declared,)):
            raise InvalidRequestError(
                f"leaf {shown(name_of(path))} {shown(tuple(leaf.shape))} has no leading dimension of {layout.rows} rows, "
                f"but another one of that length. {_REMEDY}"
            )


def _refuse_laid_end_to_end(batch: Any, layout: Layout, batch_dim: Mapping[str | int, int | str | None] | None) -> None:
    """Refuse to cut sequences that are laid end to end by tokens, or to part them from where they begin."""
    laid = laid_end_to_end(batch, layout.cuts, {str(name) for name in batch_dim or ()})
    if laid is not None:
        bounds, other = shown(name_of(laid.bounds)), shown(name_of(laid.other))
        raise InvalidRequestError(
            f"leaf {bounds} says, beside leaf {other}, that {laid.num} sequences are laid end to end: cut by rows they "
            "would be torn apart. Pass split=, or give the sample as a callable n -> batch and train with a Window of ready "
            f"micro-batches and weight=. If {bounds} is something else, name it in batch_dim=."
        )


def _refuse_other_reading(batch: Any, layout: Layout) -> None:
    """Refuse to guess where some tensors lack the rows found, but another length is common to all of them."""
    lists = {path for path, how in layout.cuts.items() if isinstance(how, str)}
    shapes = [leaf.shape for path, leaf in leaves_of(batch) if is_array(leaf) and leaf.ndim and not is_inside(path, lists)]
    in_all = set.intersection(*(set(map(int, shape)) for shape in shapes)) - {layout.rows, 1} if shapes else set()
    if in_all and any(shape[0] != layout.rows for shape in shapes):
        raise InvalidRequestError(
            f"every tensor has a dimension of {max(in_all)}, but only some have a leading one of {layout.rows}: "
            f"the rows may be there. {_REMEDY}"
        )


def shared_second_dim(batch: Any) -> int | None:
    """The length of dimension 1 where every tensor has one and all agree: then dimension 0 could as well be time."""
    shapes = [leaf.shape for _, leaf in leaves_of(batch) if is_array(leaf) and leaf.ndim]
    seconds = {int(shape[min(1, len(shape) - 1)]) for shape in shapes}  # one dimension of that length tells nothing either
    return seconds.pop() if len(seconds) == 1 and any(len(shape) > 1 for shape in shapes) else None


def describe(batch: Any, layout: Layout) -> str:
    """In words: which leaves are cut, and which are passed on whole."""
    whole = [
        one_line(name_of(path)) + (f" {tuple(leaf.shape)}" if is_array(leaf) else "")
        for path, leaf in leaves_of(batch)
        if not is_inside(path, layout.cuts)
    ]
    arrays = {path: leaf for path, leaf in leaves_of(batch) if path in layout.cuts and is_array(leaf)}
    cut = [
        f"{one_line(name_of(path))} {tuple(arrays[path].shape)}" + (f" along dimension {how}" if how else "")
        if path in arrays
        else f"the {how} of {one_line(name_of(path))}"
        for path, how in layout.cuts.items()
    ]
    return f"{layout.rows} rows: {_listed(cut)}" + (f"; passed on whole: {_listed(whole)}" if whole else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
