"""Which free block serves a request, what is split off it, and what merges."""

from __future__ import annotations

from autoaccum.prediction.allocator import replay

from .replays import EXPANDABLE, MIB, run


def test_rest_of_exactly_1_mib_is_not_split_off() -> None:
    """In the large pool a rest of 1 MiB stays with the block, and counts as allocated but not as requested."""
    outcome = run([0], [19])  # a segment of 20 MiB
    assert outcome.peak_allocated_bytes == 20 * MIB
    assert outcome.peak_requested_bytes == 19 * MIB


def test_rest_above_1_mib_is_split_off() -> None:
    """In the large pool a rest of 1 MiB and 512 bytes becomes a block of its own."""
    assert replay([0], [19 * MIB - 512]).peak_allocated_bytes == 19 * MIB - 512


def test_rest_is_used_by_later_requests() -> None:
    """What was split off serves a later request without a new segment."""
    assert run([0, 1], [9, 11]).peak_reserved_bytes == 20 * MIB


def test_rest_of_512_bytes_is_split_off_in_the_small_pool() -> None:
    """In the small pool even a rest of 512 bytes becomes a block: 1 MiB, 1 MiB less 512, and 512 bytes share a segment."""
    outcome = replay([0, 1, 2], [MIB, MIB - 512, 512])
    assert (outcome.peak_allocated_bytes, outcome.peak_reserved_bytes) == (2 * MIB, 2 * MIB)


def test_best_fit_is_the_smallest_that_suffices() -> None:
    """Of free blocks of 14 and 12 MiB a request of 11.5 takes the 12, so that one of 14 needs no new segment."""
    assert run([0, 1, ~0, ~1, 2, 3], [14, 12, 11.5, 14]).peak_reserved_bytes == 26 * MIB


def test_best_fit_of_equals_is_the_lowest_address() -> None:
    """Of the first and third quarter of a segment a request takes the first, so that the last two can merge to 10 MiB."""
    assert run([0, 1, 2, 3, ~0, ~2, 4, ~3, 5], [5, 5, 5, 5, 5, 10]).peak_reserved_bytes == 20 * MIB


def test_pools_do_not_mix() -> None:
    """A small request finds nothing in a free large block, nor a large request in a free small segment."""
    assert run([0, ~0, 1], [20, 0.5]).peak_reserved_bytes == 22 * MIB
    assert run([0, ~0, 1], [1, 1.5]).peak_reserved_bytes == 22 * MIB


def test_freed_blocks_merge_with_both_neighbours() -> None:
    """Three blocks of one segment, the middle one freed last, are one block of 20 MiB again."""
    assert run([0, 1, 2, ~0, ~2, ~1, 3], [6, 6, 6, 20]).peak_reserved_bytes == 20 * MIB


def test_blocks_do_not_merge_across_segments() -> None:
    """Two free segments of 20 MiB do not serve a request of 40."""
    assert run([0, 1, ~0, ~1, 2], [20, 20, 40]).peak_reserved_bytes == 80 * MIB


def test_expandable_segment_prefers_a_block_that_cannot_grow() -> None:
    """A request of 8 MiB takes the free 10 in the middle, not the 8 at the end, which can grow to 28 with one handle."""
    events = [0, 1, 2, ~0, 3, 4]  # 10 free, then 22 and then 8 to the end of two handles
    assert run(events, [10, 11, 11, 8, 28], settings=EXPANDABLE).peak_reserved_bytes == 60 * MIB
