"""What PyTorch's CUDA caching allocator reserves for a recorded trace of allocations, worked out without a GPU.

Follows c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.cpp of PyTorch 2.13 for one stream. Not followed:
`record_stream`, private pools of CUDA graphs, and `garbage_collection_threshold`, which acts only under a memory fraction.
Must never know what a trace comes from, nor import torch.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from autoaccum.errors import InvalidRequestError
from autoaccum.records import Record

MIB = 2**20

# Names and values from c10/core/AllocatorConfig.h
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every block is a multiple of it
SMALL_BYTES = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: what the small pool grows by
MIN_LARGE_ALLOC_BYTES = 10 * MIB  # kMinLargeAlloc: a request from here on gets a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: and that size is a multiple of this
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_: what a smaller request of the large pool gets a part of

_ROUNDUP_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: 1 MiB to 2 MiB, ..., 32 GiB and above
_NO_LIMIT_BYTES = 2**62
_ADDRESS_SPACE_BYTES = 2**50  # of an expandable segment; PyTorch takes 9/8 of the device's memory, which is never used up


class AllocatorSettings(Record, frozen=True, kw_only=True):
    """The settings of the allocator that change sizes, with PyTorch's defaults.

    `max_split_size_bytes`: blocks from here on are not split; None: all may be. `roundup_power2_divisions`: into how many
    steps the space between two powers of two is divided for rounding; 0 and 1 mean multiples of 512. As a tuple of
    (upper_mib, divisions) in rising order: the first whose `upper_mib` is above the size, else the last.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: int | tuple[tuple[int, int], ...] = 1
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES

    @staticmethod
    def parse(text: str) -> AllocatorSettings:
        """The settings that the text of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF makes; keys that change no sizes pass.

        Source: `parseArgs` in c10/core/AllocatorConfig.cpp, with its lower bounds.

        Raises:
            InvalidRequestError: When PyTorch would refuse the text, or it names an allocator that cannot be replayed.

        Example:
            >>> settings = AllocatorSettings.parse("expandable_segments:True, max_split_size_mb:64, backend:native")
            >>> settings.expandable_segments, settings.max_split_size_bytes
            (True, 67108864)
        """
        found = dict(_settings_in(text))
        if found.get("backend", "native") != "native":
            raise InvalidRequestError(
                f"the allocator setting backend:{found['backend']} cannot be replayed; expected backend:native."
            )
        large_segment_bytes = _bytes_of(found, "large_segment_size_mb", MIN_LARGE_ALLOC_BYTES + MIB) or LARGE_SEGMENT_BYTES
        return AllocatorSettings(
            expandable_segments=_truth_of(found, "expandable_segments"),
            max_split_size_bytes=_bytes_of(found, "max_split_size_mb", large_segment_bytes),
            roundup_power2_divisions=_divisions_of(found, "roundup_power2_divisions"),
            max_non_split_rounding_bytes=_bytes_of(found, "max_non_split_rounding_mb", large_segment_bytes)
            or large_segment_bytes,
            large_segment_bytes=large_segment_bytes,
        )


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


_DEFAULT_SETTINGS = AllocatorSettings()


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    limit_bytes: int | None = None,
    settings: AllocatorSettings = _DEFAULT_SETTINGS,
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
    allocator = _Allocator(settings, _NO_LIMIT_BYTES if limit_bytes is None else limit_bytes)
    live: dict[int, _Block | None] = {}
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


def rounded_bytes(asked_bytes: int, settings: AllocatorSettings = _DEFAULT_SETTINGS) -> int:
    """Bytes of the block that a request of `asked_bytes` is rounded up to.

    Source: `round_size` and `roundup_power2_next_division` in CUDACachingAllocator.cpp.

    Example:
        >>> rounded_bytes(1), rounded_bytes(513), rounded_bytes(5000, AllocatorSettings(roundup_power2_divisions=4))
        (512, 1024, 5120)
    """
    divisions = settings.roundup_power2_divisions
    if isinstance(divisions, tuple):
        divisions = next((each for upper_mib, each in divisions if asked_bytes < upper_mib * MIB), divisions[-1][1])
    step = MIN_BLOCK_BYTES
    if divisions > 1 and asked_bytes > MIN_BLOCK_BYTES * divisions:
        step = 2 ** (asked_bytes.bit_length() - 1) >> (divisions.bit_length() - 1)
    return max(1, -(-asked_bytes // step)) * step


# -- blocks and pools


class _Block:
    """A range of addresses in a segment, in use unless marked otherwise, between its neighbours in the segment."""

    __slots__ = ("address", "after", "asked", "before", "is_free", "is_mapped", "pool", "size")

    def __init__(self, pool: _Pool, address: int, size: int, *, is_mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.asked = pool, address, size, 0
        self.is_mapped, self.is_free = is_mapped, False
        self.before: _Block | None = None
        self.after: _Block | None = None

    def cut(self, size: int) -> _Block:
        """Keep the first `size` bytes; the rest is a new block after this one, as mapped as this one, not marked free."""
        rest = _Block(self.pool, self.address + size, self.size - size, is_mapped=self.is_mapped)
        self.size = size
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after = rest
        return rest

    def swallow(self, neighbour: _Block) -> None:
        """Take the whole range of a neighbour, which is a block no more."""
        self.size += neighbour.size
        if neighbour is self.after:
            self.after = neighbour.after
            if self.after is not None:
                self.after.before = self
        else:
            self.address, self.before = neighbour.address, neighbour.before
            if self.before is not None:
                self.before.after = self

    @property
    def is_whole_segment(self) -> bool:
        """Nothing else is in its segment."""
        return self.before is None and self.after is None


class _Pool:
    """The free blocks of the small or of the large pool: `order` by (size, address), `at` by address.

    `unmapped`: ranges of an expandable segment without memory, by address.
    """

    def __init__(self, settings: AllocatorSettings, *, is_small: bool) -> None:
        self.order: list[tuple[int, int]] = []
        self.at: dict[int, _Block] = {}
        self.next_address = 0
        self.segment_bytes = SMALL_SEGMENT_BYTES if is_small else settings.large_segment_bytes
        self.is_expandable = settings.expandable_segments
        self.unmapped = [_Block(self, 0, _ADDRESS_SPACE_BYTES, is_mapped=False)] if self.is_expandable else []
        self.oversize_bytes = settings.max_split_size_bytes or _NO_LIMIT_BYTES
        self.oversize_slack_bytes = settings.max_non_split_rounding_bytes
        # should_split: elsewhere >= 512, in plain segments of the large pool > 1 MiB, and never for an oversize request
        eager = is_small or self.is_expandable
        self.least_rest_bytes = MIN_BLOCK_BYTES if eager else SMALL_BYTES + 1
        self.split_below_bytes = _NO_LIMIT_BYTES if eager else self.oversize_bytes

    def add(self, block: _Block) -> None:
        """Put a block among the free ones."""
        block.is_free = True
        insort(self.order, (block.size, block.address))
        self.at[block.address] = block

    def remove(self, block: _Block) -> None:
        """Take a block out of the free ones."""
        block.is_free = False
        del self.order[bisect_left(self.order, (block.size, block.address))]
        del self.at[block.address]

    def add_merged(self, block: _Block) -> None:
        """Put a block among the free ones, as one with the free ones on either side."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self.remove(neighbour)
                block.swallow(neighbour)
        self.add(block)

    def take_best(self, size: int) -> _Block | None:
        """The smallest free block of at least `size`, of those the one at the lowest address (`get_free_block`)."""
        order = self.order
        index = bisect_left(order, (size, 0))
        if index == len(order):
            return None
        if self.is_expandable:
            index = self._least_growable(index)
        found, address = order[index]
        if size < self.oversize_bytes <= found:
            return None
        if size >= self.oversize_bytes and found >= size + self.oversize_slack_bytes:
            return None
        del order[index]
        block = self.at.pop(address)
        block.is_free = False
        return block

    def _least_growable(self, index: int) -> int:
        """A block that can still grow is left alone while the next larger one can grow less."""
        while index + 1 < len(self.order) and self._growable_size(index + 1) < self._growable_size(index):
            index += 1
        return index

    def _growable_size(self, index: int) -> int:
        """Bytes of a free block and of the unmapped range behind it."""
        block = self.at[self.order[index][1]]
        after = block.after
        return block.size if after is None or after.is_mapped else block.size + after.size


class _Allocator:
    """Both pools, and what they have reserved of the limit."""

    def __init__(self, settings: AllocatorSettings, limit_bytes: int) -> None:
        self.settings, self.limit_bytes = settings, limit_bytes
        self.small, self.large = _Pool(settings, is_small=True), _Pool(settings, is_small=False)
        self.allocated_bytes = self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = self.flushes = 0
        self._rounded: dict[int, int] = {}  # a trace asks for few different sizes

    def allocate(self, asked_bytes: int) -> _Block | None:
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

    def free(self, block: _Block) -> None:
        """Keep the block for later requests (`free_block`)."""
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.asked
        block.pool.add_merged(block)

    def _new_block(self, pool: _Pool, size: int) -> _Block | None:
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

    def _new_segment(self, pool: _Pool, size: int) -> _Block | None:
        """A segment as `get_allocation_size` sizes it."""
        num_bytes = pool.segment_bytes
        if size >= MIN_LARGE_ALLOC_BYTES:
            num_bytes = _rounded_up(size, ROUND_LARGE_BYTES)
        if not self._reserve(num_bytes):
            return None
        address = pool.next_address
        pool.next_address += num_bytes
        return _Block(pool, address, num_bytes)

    def _release(self, block: _Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Give back oversize blocks: one that suffices, else from the largest on (`release_available_cached_blocks`)."""
        if pool.oversize_bytes == _NO_LIMIT_BYTES or pool.is_expandable:  # in expandable segments PyTorch asserts instead
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

    def _map_room(self, pool: _Pool, size: int) -> _Block | None:
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

    def _map(self, block: _Block, size: int) -> bool:
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

    def _unmap(self, block: _Block) -> None:
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


def _taken(live: dict[int, _Block | None], number: int, index: int) -> _Block | None:
    """The block of this number, which is live no more; None for one of 0 bytes."""
    if number not in live:
        raise ValueError(f"event {index} frees block {number}, which is not allocated.")
    return live.pop(number)


def _rounded_up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


def _address(block: _Block) -> int:
    return block.address


def _start_of_room(unmapped: _Block) -> _Block:
    """The free block before an unmapped range, where there is one, else the range."""
    before = unmapped.before
    return before if before is not None and before.is_free else unmapped


def _room(block: _Block, enough: int) -> int:
    """Bytes from the start of a block to the next one in use, counted until there are enough."""
    room, each = 0, block
    while room < enough and (each.is_free or not each.is_mapped):
        room += each.size
        if each.after is None:
            break
        each = each.after
    return room


# -- the text of the settings


def _settings_in(text: str) -> Iterator[tuple[str, str]]:
    """Every key and its value: "a:1,b:[64:8,>:1]" has the keys a and b."""
    for item in re.split(r",(?![^\[]*\])", "".join(text.split())):
        key, colon, value = item.partition(":")
        if item and not (key and colon and value):
            raise InvalidRequestError(f"the allocator setting {item!r} cannot be read; expected key:value.")
        if item:
            yield key, value


def _bytes_of(found: dict[str, str], key: str, least_bytes: int) -> int | None:
    value = found.get(key)
    if value is None:
        return None
    num_bytes = _number(key, value) * MIB
    if num_bytes < least_bytes:
        raise InvalidRequestError(
            f"the allocator setting {key}:{value} is too small; expected {least_bytes // MIB} or more."
        )
    return num_bytes


def _truth_of(found: dict[str, str], key: str) -> bool:
    value = found.get(key, "False")
    if value not in ("True", "False"):
        raise InvalidRequestError(f"the allocator setting {key}:{value} cannot be read; expected True or False.")
    return value == "True"


def _divisions_of(found: dict[str, str], key: str) -> int | tuple[tuple[int, int], ...]:
    """One number, or the division of each of PyTorch's intervals, 0 where the text names none."""
    value = found.get(key, "1")
    if not value.startswith("["):
        return _power_of_two(key, value)
    if not value.endswith("]"):
        raise InvalidRequestError(f"the allocator setting {key} has {value!r}; expected a closing bracket.")
    by_interval = [0] * _ROUNDUP_INTERVALS
    last: int | None = None
    for item in filter(None, value.strip("[]").split(",")):
        lower_mib, _, text = item.partition(":")
        divisions = _power_of_two(key, text) if text != "0" else 0
        if lower_mib == ">":
            start = (last or 0) + 1
            by_interval[start:] = [divisions] * (_ROUNDUP_INTERVALS - start)
            continue
        interval = min(_power_of_two(key, lower_mib).bit_length(), _ROUNDUP_INTERVALS) - 1
        start = 0 if last is None else interval  # the first one holds for all smaller sizes as well
        by_interval[start : interval + 1] = [divisions] * (interval + 1 - start)
        last = interval
    return tuple((2 << interval, divisions) for interval, divisions in enumerate(by_interval))


def _power_of_two(key: str, text: str) -> int:
    number = _number(key, text)
    if number < 1 or number & (number - 1):
        raise InvalidRequestError(f"the allocator setting {key} has {text}; expected a power of two.")
    return number


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InvalidRequestError(f"the allocator setting {key} has {text!r}; expected a whole number.")
    return int(text)
