"""Telling batches of sequences laid end to end, with a leaf that says where each of them begins or how long it is."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoaccum.batches.carriers import Cuts
from autoaccum.batches.structure import is_array, is_inside, leaves_of, name_of

_NAMED_STARTS = re.compile(r"offset|ptr|split|start|cu_?seq", re.IGNORECASE)
_NAMED_LENGTHS = re.compile(r"len|size|num|atoms|nodes", re.IGNORECASE)


class Laid(NamedTuple):
    """A leaf that says where the sequences lie, another one by which that is known, and how many they are."""

    bounds: tuple[str, ...]
    other: tuple[str, ...]
    num: int


def laid_end_to_end(batch: Any, cuts: Cuts, settled: Container[str] = ()) -> Laid | None:
    """Sequences that a cut by rows would tear, because one of the two leaves is cut and the other passed on whole.

    Reads the numbers of integer leaves with one dimension, which waits for the device where they are not on the host.

    Args:
        batch: The batch, nested.
        cuts: How it would be cut.
        settled: The names of leaves of which the caller said what they are.
    """
    lists = {path for path, how in cuts.items() if isinstance(how, str)}
    arrays = [(path, leaf) for path, leaf in leaves_of(batch) if is_array(leaf) and leaf.ndim and not is_inside(path, lists)]
    totals = {(len(leaf), path in cuts): path for path, leaf in reversed(arrays) if len(leaf) > 1}
    for path, leaf in arrays:
        others = [total for total, is_cut in totals if is_cut != (path in cuts) and total != len(leaf)]
        if not others or name_of(path) in settled or not _may_be_bounds(leaf):
            continue
        values = torch.as_tensor(leaf).long()
        if path in cuts and int(values[0]) == 0 and set(values.diff().tolist()) == {0, 1} and int(values[-1]) + 1 in others:
            num = int(values[-1]) + 1  # for each entry, to which sequence it belongs
            return Laid(path, totals[num, False], num)
        found = next((total for total in others if _are_bounds(values, total, name_of(path))), None)
        if found is not None:
            has_both_ends = len(values) > 1 and int(values[0]) == 0 and int(values[-1]) == found
            return Laid(path, totals[found, path not in cuts], len(values) - has_both_ends)
    return None


def _may_be_bounds(leaf: Any) -> bool:
    if leaf.ndim != 1 or not len(leaf):
        return False
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "iu"
    is_integer = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex or leaf.dtype == torch.bool)
    return is_integer and not leaf.is_meta and leaf.layout is torch.strided


def _are_bounds(values: Tensor, total: int, name: str) -> bool:
    """Whether these numbers say where sequences lie that have so many entries in all."""
    first, last, steps = int(values[0]), int(values[-1]), values.diff()
    if _NAMED_LENGTHS.search(name) and bool((values >= 0).all()) and int(values.sum()) == total:
        return True
    if not len(steps) or first < 0 or bool((steps < 0).any()) or bool((steps == 1).all()):  # an index of the rows rises by 1
        return False
    rises = bool((steps > 0).all())
    if last == total:  # ends, with the first start or without; labels in order are more than there are classes
        return (first == 0 and (rises or total > len(values))) or (rises and len(steps) > 1)
    return first == 0 and last < total and _NAMED_STARTS.search(name) is not None
