"""What bounds a search."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.errors import InvalidRequestError
from autoaccum.request import ROWS_WITHOUT_BOUND, Request
from autoaccum.session.bounds import Bounds, bounds_of


def bounds(*, share: int | None = None, length: int | None = None, world_size: int = 1, **asked: Any) -> Bounds:
    return bounds_of(Request(**asked), share=share, length=length, world_size=world_size)


def test_share_of_the_target_bounds() -> None:
    """No micro-batch is larger than what a rank sees in one optimizer step."""
    assert bounds(target_batch=64, share=32, world_size=2)[:2] == (32, "target")


def test_data_bounds() -> None:
    """Nor larger than the data."""
    assert bounds(target_batch=64, share=64, length=10)[:2] == (10, "data")


def test_proportional_shares_leave_a_row_to_each_other_rank() -> None:
    """Where shares follow from what fits, one rank may take all but a row for each other one."""
    assert bounds(target_batch=64, share=16, world_size=4, shares="proportional").top == 61


def test_nothing_bounds() -> None:
    """Without target, data and maximum there is a bound all the same, and it is said."""
    found = bounds()
    assert found.top == ROWS_WITHOUT_BOUND and found.note is not None and "max_micro_batch" in found.note


def test_multiple_above_everything_is_refused() -> None:
    """A multiple that no allowed size has is an error that names both."""
    with pytest.raises(InvalidRequestError, match=r"multiple_of=8.*4 rows"):
        bounds(max_micro_batch=4, multiple_of=8)
