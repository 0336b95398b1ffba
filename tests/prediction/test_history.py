"""A recorded history as events: what counts in it, and what cannot be replayed."""

from __future__ import annotations

import pytest

from autoaccum.prediction.history import events_of


def test_an_address_that_is_used_again_is_another_block() -> None:
    """A block that lies where an earlier one lay has a number of its own."""
    assert events_of([(7, 10, "alloc"), (7, 10, "free_completed"), (7, 20, "alloc")]) == ([0, ~0, 1], [10, 20])


@pytest.mark.parametrize("action", ["free_requested", "segment_alloc", "segment_free", "segment_map", "snapshot", "oom"])
def test_other_entries_do_not_count(action: str) -> None:
    """What only says what the allocator did of itself, or was asked before it did it, is no event."""
    assert events_of([(7, 10, "alloc"), (7, 10, action)]) == ([0], [10])


def test_a_history_that_began_too_late() -> None:
    """A block that is freed and was never allocated is an error, since a replay would be of something else."""
    with pytest.raises(KeyError):
        events_of([(7, 10, "free_completed")])
