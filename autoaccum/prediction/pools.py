"""The caching allocator's small and large pool: ranges of memory that are cut, merged, and found again by size.

Must never import torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from autoaccum.prediction.allocator_settings import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings

NO_LIMIT_BYTES = 2**62
_ADDRESS_SPACE_BYTES = 2**50  # of an expandable segment; PyTorch takes 9/8 of the device's memory, which is never used up


class Block:
    """A range of addresses in a segment, in use unless marked otherwise, between its neighbours in the segment."""

    __slots__ = ("address", "after", "asked", "before", "is_free", "is_mapped", "pool", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, is_mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.asked = pool, address, size, 0
        self.is_mapped, self.is_free = is_mapped, False
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest is a new block after this one, as mapped as this one, not marked free."""
        rest = Block(self.pool, self.address + size, self.size - size, is_mapped=self.is_mapped)
        self.size = size
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after = rest
        return rest

    def swallow(self, neighbour: Block) -> None:
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


class Pool:
    """The free blocks of the small or of the large pool: `order` by (size, address), `at` by address.

    `unmapped`: ranges of an expandable segment without memory, by address.
    """

    def __init__(self, settings: AllocatorSettings, *, is_small: bool) -> None:
        self.order: list[tuple[int, int]] = []
        self.at: dict[int, Block] = {}
        self.next_address = 0
        self.segment_bytes = SMALL_SEGMENT_BYTES if is_small else settings.large_segment_bytes
        self.is_expandable = settings.expandable_segments
        self.unmapped = [Block(self, 0, _ADDRESS_SPACE_BYTES, is_mapped=False)] if self.is_expandable else []
        self.oversize_bytes = settings.max_split_size_bytes or NO_LIMIT_BYTES
        self.oversize_slack_bytes = settings.max_non_split_rounding_bytes
        # should_split: elsewhere >= 512, in plain segments of the large pool > 1 MiB, and never for an oversize request
        eager = is_small or self.is_expandable
        self.least_rest_bytes = MIN_BLOCK_BYTES if eager else SMALL_BYTES + 1
        self.split_below_bytes = NO_LIMIT_BYTES if eager else self.oversize_bytes

    def add(self, block: Block) -> None:
        """Put a block among the free ones."""
        block.is_free = True
        insort(self.order, (block.size, block.address))
        self.at[block.address] = block

    def remove(self, block: Block) -> None:
        """Take a block out of the free ones."""
        block.is_free = False
        del self.order[bisect_left(self.order, (block.size, block.address))]
        del self.at[block.address]

    def add_merged(self, block: Block) -> None:
        """Put a block among the free ones, as one with the free ones on either side."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self.remove(neighbour)
                block.swallow(neighbour)
        self.add(block)

    def take_best(self, size: int) -> Block | None:
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
