"""What PyTorch's CUDA caching allocator reserves for a recorded trace of allocations, worked out without a GPU.

Follows c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13 for one stream. Not followed: `record_stream`, private
pools of CUDA graphs, and `garbage_collection_threshold`, which acts only under a memory fraction.
Must never know what a trace comes from, nor import torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from autoaccum.prediction.allocator_settings import (
    DEFAULT_SETTINGS,
    MIN_LARGE_ALLOC_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
    rounded_bytes,
)
from autoaccum.prediction.pools import NO_LIMIT_BYTES, Block, Pool
from autoaccum.records import Record


class Replay(Record, frozen=True, kw_only=True):
    """What a trace needed, up to its end or to the event at which it ran out of memory.

    `fits`: False when memory ran out even after a flush, at `failed_event`. `peak_allocated_bytes`: the blocks in use, as
    torch.cuda.max_memory_allocated; `peak_event` is where it was reached first (0 when nothing was allocated).
    `peak_reserved_bytes`: as torch.cuda.max_memory_reserved. `peak_requested_bytes`: as asked for, not rounded.
    `flushes`: how often the cache had to be given back, as num_alloc_retries.
    """

    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_event: int
    flushes: int
    failed_event: int | None


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    limit_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> Replay:
    """What the allocator, empty at the start, reserves for a trace.

    Which of two free blocks of one size is taken depends on their addresses. Segments are taken to lie in the order in which
    they were made, which CUDA does not promise. A larger limit can do worse: what is not flushed can get in the way.

    Args:
        events: In order of time: i >= 0 allocates block i, ~i (negative) frees it. A freed block may be allocated again.
        sizes: Bytes that block i asks for; 0 bytes allocates nothing.
        limit_bytes: The most that may be reserved at once, as a full device refuses; None: no limit. For expandable segments
            a memory fraction refuses by other figures, by the request's plain segment instead of the handles that it maps.
        settings: How the allocator is set.

    Raises:
        ValueError: When a block is allocated twice, is freed without having been allocated, or has a negative size.
        IndexError: When a block has no entry in `sizes`.

    Example:
        >>> outcome = replay([0, 1, ~0, 2], sizes=[4 * 2**20, 600, 3 * 2**20])
        >>> outcome.peak_allocated_bytes - 4 * 2**20, outcome.peak_reserved_bytes // 2**20
        (1024, 22)
    """
    allocator = _Allocator(settings, NO_LIMIT_BYTES if limit_bytes is None else limit_bytes)
    live: dict[int, Block | None] = {}
    peak_allocated_bytes = peak_event = 0
    failed_event = None
    for index, entry in enumerate(events):
        if entry < 0:
            block = _taken(live, ~entry, index)
            if block is not None:
                allocator.free(block)
            continue
        asked = sizes[entry]
        if entry in live or asked < 0:
            raise ValueError(f"event {index} allocates block {entry} of {asked} bytes; expected a free block of 0 or more.")
        live[entry] = block = allocator.allocate(asked) if asked else None
        if asked and block is None:
            failed_event = index
            break
        if allocator.allocated_bytes > peak_allocated_bytes:
            peak_allocated_bytes, peak_event = allocator.allocated_bytes, index
    return Replay(
        fits=failed_event is None,
        peak_allocated_bytes=peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_event=peak_event,
        flushes=allocator.flushes,
        failed_event=failed_event,
    )


class _Allocator:
    """Both pools, and what they have reserved of the limit."""

    def __init__(self, settings: AllocatorSettings, limit_bytes: int) -> None:
        self.settings, self.limit_bytes = settings, limit_bytes
        self.small, self.large = Pool(settings, is_small=True), Pool(settings, is_small=False)
        self.allocated_bytes = self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = self.flushes = 0
        self._rounded: dict[int, int] = {}  # a trace asks for few different sizes

    def allocate(self, asked_bytes: int) -> Block | None:
        """A block of at least as many bytes, None when memory has run out (`malloc`)."""
        size = self._rounded.get(asked_bytes)
        if size is None:
            size = self._rounded[asked_bytes] = rounded_bytes(asked_bytes, self.settings)
        pool = self.small if size <= SMALL_BYTES else self.large
        block = pool.take_best(size) or self._new_block(pool, size)
        if block is None:
            return None
        if block.size - size >= pool.least_rest_bytes and size < pool.split_below_bytes:
            pool.add(block.cut(size))
        block.asked = asked_bytes
        self.allocated_bytes += block.size
        self.requested_bytes += asked_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        return block

    def free(self, block: Block) -> None:
        """Keep the block for later requests (`free_block`)."""
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.asked
        block.pool.add_merged(block)

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """Memory from the device, if need be after giving cached memory back, first a little of it, then all."""
        grow = self._map_room if pool.is_expandable else self._new_segment
        block = grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = grow(pool, size)
        if block is None:
            self.flushes += 1
            self._flush()
            block = grow(pool, size)
        return block

    def _reserve(self, num_bytes: int) -> bool:
        if self.reserved_bytes + num_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _flush(self) -> None:
        """Give back what no block in use touches (`release_cached_blocks`)."""
        for pool in (self.large, self.small):
            for _, address in tuple(pool.order):
                block = pool.at[address]
                if pool.is_expandable:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    # -- plain segments

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        """A segment as `get_allocation_size` sizes it."""
        num_bytes = pool.segment_bytes
        if size >= MIN_LARGE_ALLOC_BYTES:
            num_bytes = _rounded_up(size, ROUND_LARGE_BYTES)
        if not self._reserve(num_bytes):
            return None
        address = pool.next_address
        pool.next_address += num_bytes
        return Block(pool, address, num_bytes)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back oversize blocks: one that suffices, else from the largest on (`release_available_cached_blocks`)."""
        if pool.oversize_bytes == NO_LIMIT_BYTES or pool.is_expandable:  # in expandable segments PyTorch asserts instead
            return False
        wanted = max(size, pool.oversize_bytes)
        sufficient = bisect_left(pool.order, (wanted, 0))
        if sufficient < len(pool.order):
            self._release(pool.at[pool.order[sufficient][1]])
            return True
        released = 0
        while released < wanted and pool.order and pool.order[-1][0] >= pool.oversize_bytes:
            found, address = pool.order[-1]
            self._release(pool.at[address])
            released += found
        return released >= wanted

    # -- expandable segments: memory comes and goes in handles of `segment_bytes`, at any place of the one segment of a pool

    def _map_room(self, pool: Pool, size: int) -> Block | None:
        """Map what is missing at the lowest address with enough room (`try_allocate_expandable_block`)."""
        block = next(start for start in map(_start_of_room, pool.unmapped) if _room(start, size) >= size)
        while not block.is_mapped or block.size < size:
            have = block.size if block.is_mapped else 0
            # what follows a free block is unmapped here: two free neighbours would be one
            block = block.after if have and block.after is not None else block
            if not self._map(block, min(size - have, block.size)):
                return None
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the first `size` bytes of an unmapped range with whole handles and make them free (`map_block`)."""
        pool = block.pool
        num_bytes = _rounded_up(size, pool.segment_bytes)
        if not self._reserve(num_bytes):
            return False
        pool.unmapped.remove(block)
        if num_bytes < block.size:
            insort(pool.unmapped, block.cut(num_bytes), key=_address)
        block.is_mapped = True
        pool.add_merged(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole handles inside a free block (`unmap_block`)."""
        pool = block.pool
        begin = _rounded_up(block.address, pool.segment_bytes)
        end = (block.address + block.size) // pool.segment_bytes * pool.segment_bytes
        if begin >= end:
            return
        pool.remove(block)
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        if begin > block.address:
            whole = block.cut(begin - block.address)
            pool.add(block)
            block = whole
        self.reserved_bytes -= block.size
        block.is_mapped = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_mapped:
                pool.unmapped.remove(neighbour)
                block.swallow(neighbour)
        insort(pool.unmapped, block, key=_address)


def _taken(live: dict[int, Block | None], number: int, index: int) -> Block | None:
    """The block of this number, which is live no more; None for one of 0 bytes."""
    if number not in live:
        raise ValueError(f"event {index} frees block {number}, which is not allocated.")
    return live.pop(number)


def _rounded_up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


def _address(block: Block) -> int:
    return block.address


def _start_of_room(unmapped: Block) -> Block:
    """The free block before an unmapped range, where there is one, else the range."""
    before = unmapped.before
    return before if before is not None and before.is_free else unmapped


def _room(block: Block, enough: int) -> int:
    """Bytes from the start of a block to the next one in use, counted until there are enough."""
    room, each = 0, block
    while room < enough and (each.is_free or not each.is_mapped):
        room += each.size
        if each.after is None:
            break
        each = each.after
    return room
