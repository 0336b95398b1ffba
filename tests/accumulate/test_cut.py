"""How a window is cut again after a failure, and what later windows know of it."""

from __future__ import annotations

import pytest
import torch

from autoaccum.accumulate.cut import Cut
from autoaccum.batches.slicing import Slicer
from autoaccum.caps import Caps
from autoaccum.devices.base import Verdict


def cut_of(rows: int, slicer: Slicer, caps: Caps | None = None) -> Cut:
    """A window of so many rows, cut for the first time."""
    cut = Cut(slicer, Caps() if caps is None else caps)
    cut.begin(torch.zeros(rows, 2))
    cut.again()
    return cut


def sizes(cut: Cut) -> list[int | None]:
    """Rows of every micro-batch."""
    return [piece.rows for piece in cut.pieces]


def test_failed_size_is_cut_smaller() -> None:
    """After running out of memory the next cut is within half the size that failed."""
    cut = cut_of(8, Slicer(8))
    assert cut.otherwise(cut.piece_at(0), Verdict.TOO_LARGE) is None
    cut.again()
    assert sizes(cut) == [4, 4]


def test_later_windows_know_the_limit() -> None:
    """What one window has learned holds for the next one."""
    caps, slicer = Caps(), Slicer(8)
    cut = cut_of(8, slicer, caps)
    cut.otherwise(cut.piece_at(0), Verdict.TOO_LARGE)
    assert sizes(cut_of(8, slicer, caps)) == [4, 4]


def test_what_was_not_the_size_is_forgotten() -> None:
    """When the failure turns out to be of another kind, limits are as before the window."""
    caps, slicer = Caps(), Slicer(8)
    cut = cut_of(8, slicer, caps)
    cut.otherwise(cut.piece_at(0), Verdict.UNCLEAR)
    cut.forget()
    assert sizes(cut_of(8, slicer, caps)) == [8]


def test_floor_makes_micro_batches_larger() -> None:
    """A size that is too small to run is not used again."""
    cut = cut_of(7, Slicer(3))
    assert sizes(cut) == [3, 2, 2]
    assert cut.otherwise(cut.piece_at(1), Verdict.FLOOR) is None
    cut.again()
    assert sizes(cut) == [4, 3]


def test_single_row_cannot_be_cut() -> None:
    """Of one row nothing smaller can be made, and nothing is learned."""
    caps = Caps()
    cut = cut_of(2, Slicer(1), caps)
    assert cut.otherwise(cut.piece_at(0), Verdict.TOO_LARGE) == "it failed with a single row."
    assert caps.state() == []


def test_floor_that_changes_nothing_is_taken_back() -> None:
    """Where no other cut is possible, the floor is what it was."""
    slicer = Slicer(4)
    cut = cut_of(4, slicer)
    assert "these 4 rows cannot be cut in another way" in str(cut.otherwise(cut.piece_at(0), Verdict.FLOOR))
    assert slicer.at_least == 1


def test_limit_of_another_rank_is_taken_over() -> None:
    """A rank that ran its own window goes by the limit of the one that did not."""
    cut = cut_of(8, Slicer(8))
    cut.lower(3)
    cut.again()
    assert sizes(cut) == [3, 3, 2]


@pytest.mark.parametrize("index", [1, 5])
def test_ranks_in_lockstep_repeat_the_last_piece(index: int) -> None:
    """An index beyond the window's own micro-batches is that of its last one."""
    cut = cut_of(7, Slicer(4))
    assert cut.piece_at(index) is cut.pieces[1]
