"""A history that torch's CUDA allocator recorded of itself, as the events that `allocator.replay` takes."""

from __future__ import annotations

from collections.abc import Iterable


def events_of(entries: Iterable[tuple[int, int, str]]) -> tuple[list[int], list[int]]:
    """Events and sizes of a recorded history, from an allocator that was empty when the recording began.

    Args:
        entries: (address, bytes, action) of every entry of `torch.cuda.memory._snapshot()["device_traces"][index]`, in
            order. Only "alloc" and "free_completed" count: requests to free, segments and failures follow from them.

    Raises:
        KeyError: When a block is freed that was not allocated: the recording began too late, or dropped its oldest entries.

    Example:
        >>> events_of([(7, 100, "segment_alloc"), (7, 10, "alloc"), (7, 10, "free_completed"), (7, 20, "alloc")])
        ([0, -1, 1], [10, 20])
    """
    events: list[int] = []
    sizes: list[int] = []
    number_at: dict[int, int] = {}
    for address, num_bytes, action in entries:
        if action == "alloc":
            number_at[address] = len(sizes)
            events.append(len(sizes))
            sizes.append(num_bytes)
        elif action == "free_completed":
            events.append(~number_at.pop(address))
    return events, sizes
