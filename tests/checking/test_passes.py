"""A whole batch and an uneven split of it."""

from __future__ import annotations

from .models import build, checked


def test_split_is_uneven() -> None:
    """Two thirds and one third: halves would hide a wrong weight in more than half of all orders."""
    assert checked(build()).micro_batch_sizes == (14, 6)
