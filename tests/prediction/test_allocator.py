"""The rules of the CUDA caching allocator one by one, with figures derived by hand; any trace, against a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.prediction.allocator import Replay, replay
from autoaccum.prediction.allocator_settings import AllocatorSettings
from autoaccum.prediction.history import events_of

from .replays import EXPANDABLE, MIB, run

PLAIN = AllocatorSettings()


# -- rounding, and what a new segment holds


def test_block_of_one_byte() -> None:
    """One byte takes a block of 512 bytes in a segment of 2 MiB."""
    assert replay([0], [1]) == Replay(
        fits=True,
        peak_allocated_bytes=512,
        peak_reserved_bytes=2 * MIB,
        peak_requested_bytes=1,
        peak_event=0,
        flushes=0,
        failed_event=None,
    )


def test_block_of_513_bytes() -> None:
    """513 bytes take the next multiple of 512."""
    assert replay([0], [513]).peak_allocated_bytes == 1024


def test_block_of_no_bytes() -> None:
    """A block of 0 bytes can be allocated and freed, and nothing is allocated or reserved for it."""
    outcome = replay([0, ~0, 0], [0], limit_bytes=0)
    assert outcome.fits
    assert (outcome.peak_allocated_bytes, outcome.peak_reserved_bytes, outcome.flushes) == (0, 0, 0)


def test_empty_trace() -> None:
    """A trace without events fits and needs nothing."""
    outcome = replay([], [])
    assert (outcome.fits, outcome.peak_reserved_bytes, outcome.peak_event) == (True, 0, 0)


@pytest.mark.parametrize(
    ("asked_bytes", "segment_mib"),
    [
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB - 511, 10),  # rounded to 10 MiB, and then a segment of its own
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (33 * MIB, 34),
    ],
)
def test_segment_for_a_request(asked_bytes: int, segment_mib: int) -> None:
    """Up to 1 MiB a segment has 2 MiB, below 10 MiB it has 20 MiB, from there on the request's bytes in steps of 2 MiB."""
    assert replay([0], [asked_bytes]).peak_reserved_bytes == segment_mib * MIB


def test_large_segments_of_another_size() -> None:
    """The segment for requests below 10 MiB has the size that is set."""
    assert run([0], [2], settings=AllocatorSettings(large_segment_bytes=24 * MIB)).peak_reserved_bytes == 24 * MIB


def test_block_can_be_allocated_again() -> None:
    """A block that was freed may be allocated again, and takes the memory that it had."""
    assert run([0, ~0, 0, ~0, 0], [30]).peak_reserved_bytes == 30 * MIB


# -- the limit


def test_limit_that_just_suffices() -> None:
    """A limit of what is reserved without one changes nothing."""
    assert run([0, 1], [30, 12], limit_mib=42) == run([0, 1], [30, 12])


def test_flush_gives_free_segments_back() -> None:
    """When a segment of 30 MiB finds no room beside a free one of 20, that one is given back, once."""
    outcome = run([0, ~0, 1], [20, 30], limit_mib=32)
    assert (outcome.fits, outcome.flushes, outcome.peak_reserved_bytes) == (True, 1, 30 * MIB)


def test_flush_empties_both_pools() -> None:
    """A request of the large pool gets the memory of free small segments as well."""
    outcome = run([0, ~0, 1], [0.5, 30], limit_mib=31)
    assert (outcome.fits, outcome.flushes) == (True, 1)


@pytest.mark.parametrize(("limit_mib", "fits"), [(49, False), (50, True)])
def test_flush_keeps_segments_that_are_used_in_part(limit_mib: int, fits: bool) -> None:
    """A segment of 20 MiB with 5 in use stays reserved, so that 30 more need a limit of 50."""
    outcome = run([0, 1, ~1, 2], [5, 20, 30], limit_mib=limit_mib)
    assert (outcome.fits, outcome.flushes) == (fits, 1)


def test_out_of_memory() -> None:
    """When a flush does not help, the replay ends at that event, with the peaks until then."""
    outcome = run([0, 1, 2, ~0], [20, 30, 12], limit_mib=40)
    assert (outcome.fits, outcome.failed_event, outcome.flushes) == (False, 1, 1)
    assert (outcome.peak_allocated_bytes, outcome.peak_reserved_bytes) == (20 * MIB, 20 * MIB)


def test_larger_limit_can_be_worse() -> None:
    """A trace may fit at 70 MiB and not at 90, where the first block is not flushed and a small one comes to lie in it."""
    events, sizes_mib = [0, ~0, 1, 2, ~1, 3], [40.0, 50.0, 12.0, 58.0]
    assert run(events, sizes_mib, limit_mib=70).fits  # flush 40; 50 + 12; flush 50; 12 + 58
    assert not run(events, sizes_mib, limit_mib=90).fits  # 40 + 50, the 12 inside the 40; flush 50; 40 + 58 > 90


def test_peak_event_is_the_first() -> None:
    """Of several events with the highest allocated sum the first is named."""
    assert run([0, 1, ~1, 1], [3, 4]).peak_event == 1


# -- max_split_size, here 64 MiB


OVERSIZE = AllocatorSettings(max_split_size_bytes=64 * MIB)


@pytest.mark.parametrize(
    ("asked_mib", "reserved_mib"),
    [
        (30, 130),  # the oversize block may not be split
        (80, 180),  # would waste 20 MiB
        (81, 100),  # wastes 19 MiB
    ],
)
def test_oversize_block(asked_mib: int, reserved_mib: int) -> None:
    """A free block of 100 MiB serves no request below 64 MiB and none that would waste 20 MiB or more."""
    assert run([0, ~0, 1], [100, asked_mib], settings=OVERSIZE).peak_reserved_bytes == reserved_mib * MIB


def test_oversize_block_is_allocated_whole() -> None:
    """An oversize request takes an oversize block whole: 81 MiB asked for are 100 allocated."""
    assert run([0, ~0, 1, 2], [100, 81, 2], settings=OVERSIZE).peak_allocated_bytes == 102 * MIB


def test_other_slack_for_oversize_blocks() -> None:
    """How much may be wasted can be set: with 40 MiB the block of 100 serves a request of 80."""
    wide = AllocatorSettings(max_split_size_bytes=64 * MIB, max_non_split_rounding_bytes=40 * MIB)
    assert run([0, ~0, 1], [100, 80], settings=wide).peak_reserved_bytes == 100 * MIB


def test_oversize_block_is_given_back_without_a_flush() -> None:
    """At the limit one oversize block that suffices is given back first, which counts as no flush."""
    outcome = run([0, ~0, 1], [100, 80], settings=OVERSIZE, limit_mib=150)
    assert (outcome.fits, outcome.flushes, outcome.peak_reserved_bytes) == (True, 0, 100 * MIB)


@pytest.mark.parametrize(("asked_mib", "flushes"), [(130, 0), (141, 1)])
def test_oversize_blocks_are_given_back_from_the_largest(asked_mib: int, flushes: int) -> None:
    """Where no single block suffices the largest go first; only when they are too little is the cache flushed."""
    outcome = run([0, 1, ~0, ~1, 2], [70, 70, asked_mib], settings=OVERSIZE, limit_mib=150)
    assert (outcome.fits, outcome.flushes) == (True, flushes)


# -- expandable segments


@pytest.mark.parametrize(("asked_bytes", "mapped_mib"), [(1, 2), (MIB + 1, 20), (20 * MIB, 20), (30 * MIB, 40)])
def test_expandable_segment_maps_whole_handles(asked_bytes: int, mapped_mib: int) -> None:
    """The small pool maps handles of 2 MiB, the large pool handles of 20 MiB."""
    assert replay([0], [asked_bytes], settings=EXPANDABLE).peak_reserved_bytes == mapped_mib * MIB


def test_expandable_segment_of_larger_handles() -> None:
    """The handles of the large pool are as large as its segments are set to be."""
    larger = AllocatorSettings(expandable_segments=True, large_segment_bytes=32 * MIB)
    assert run([0], [30], settings=larger).peak_reserved_bytes == 32 * MIB


def test_expandable_segment_grows_at_its_end() -> None:
    """Blocks of 30, 15 and 15 MiB take 60 MiB, as the last handle of each is filled by the next."""
    assert run([0, 1, 2], [30, 15, 15], settings=EXPANDABLE).peak_reserved_bytes == 60 * MIB


def test_expandable_segment_grows_a_free_block() -> None:
    """Where 30 MiB were freed a request of 50 maps one more handle, while plain segments reserve 50 more."""
    assert run([0, ~0, 1], [30, 50], settings=EXPANDABLE).peak_reserved_bytes == 60 * MIB
    assert run([0, ~0, 1], [30, 50]).peak_reserved_bytes == 80 * MIB


def test_expandable_segment_splits_small_rests() -> None:
    """In expandable segments a rest of 512 bytes is split off in the large pool too, even from oversize requests."""
    both = AllocatorSettings(expandable_segments=True, max_split_size_bytes=64 * MIB)
    assert replay([0], [80 * MIB - 512], settings=both).peak_allocated_bytes == 80 * MIB - 512


@pytest.mark.parametrize(("limit_mib", "fits"), [(59, False), (60, True)])
def test_expandable_segment_unmaps_whole_handles_only(limit_mib: int, fits: bool) -> None:
    """Of 30 MiB freed in front of a block one handle of 20 is unmapped, so that 35 more, 40 mapped, need a limit of 60."""
    outcome = run([0, 1, ~0, 2], [30, 10, 35], settings=EXPANDABLE, limit_mib=limit_mib)
    assert (outcome.fits, outcome.flushes) == (fits, 1)


def test_expandable_segment_fills_the_lowest_gap() -> None:
    """After handles were unmapped a request maps at the lowest address with room, even where that takes more handles.

    70 and 10 are mapped (80), the 70 freed; 90 would make 180 > 160, so 60 are unmapped: 20 + 100. Then 25 go to the gap,
    which takes two handles (160), and not to the end, where 10 are free and one would do (140).
    """
    outcome = run([0, 1, ~0, 2, 3], [70, 10, 90, 25], settings=EXPANDABLE, limit_mib=160)
    assert (outcome.fits, outcome.flushes, outcome.peak_reserved_bytes) == (True, 1, 160 * MIB)


# -- traces that cannot be


@pytest.mark.parametrize("events", [[~0], [0, ~0, ~0], [0, 0], [1]])
def test_trace_that_cannot_be(events: list[int]) -> None:
    """Freeing what is not allocated, allocating twice, and a size below zero raise ValueError that names the event."""
    with pytest.raises(ValueError, match=f"event {len(events) - 1} "):
        replay(events, [100, -1])


# -- any trace


SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(1, 4).map(lambda quarter: quarter * MIB // 4),
    st.integers(MIB - 600, 12 * MIB),
    st.integers(1, 60).map(lambda size: size * MIB),
)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A well-formed trace: sizes from a few, and frees of any live block."""
    menu = draw(st.lists(SIZES, min_size=1, max_size=6))
    events: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for choice in draw(st.lists(st.integers(0, 2**16), max_size=60)):
        if live and choice % 5 < 2:
            events.append(~live.pop(choice % len(live)))
        else:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(menu[choice % len(menu)])
    return events, sizes


ALL_SETTINGS = st.sampled_from(
    [PLAIN, EXPANDABLE, OVERSIZE, AllocatorSettings(roundup_power2_divisions=2, large_segment_bytes=24 * MIB)]
)
LIMITS = st.one_of(st.none(), st.integers(0, 400).map(lambda size: size * MIB))


@given(traces(), ALL_SETTINGS, LIMITS)
def test_order_of_the_peaks(trace: tuple[list[int], list[int]], how: AllocatorSettings, limit_bytes: int | None) -> None:
    """At their peaks limit >= reserved >= allocated >= requested >= 0."""
    outcome = replay(*trace, limit_bytes=limit_bytes, settings=how)
    assert outcome.peak_reserved_bytes >= outcome.peak_allocated_bytes >= outcome.peak_requested_bytes >= 0
    assert limit_bytes is None or outcome.peak_reserved_bytes <= limit_bytes
    assert outcome.fits == (outcome.failed_event is None)


@given(traces(), ALL_SETTINGS, LIMITS)
def test_without_a_flush_the_limit_changes_nothing(
    trace: tuple[list[int], list[int]], how: AllocatorSettings, limit_bytes: int | None
) -> None:
    """What fits without giving memory back is as without a limit, and so it is at the unlimited peak and above."""
    unlimited = replay(*trace, settings=how)
    assert unlimited.fits
    assert replay(*trace, limit_bytes=unlimited.peak_reserved_bytes, settings=how) == unlimited
    limited = replay(*trace, limit_bytes=limit_bytes, settings=how)
    if limit_bytes is not None and limit_bytes >= unlimited.peak_reserved_bytes:
        assert limited == unlimited
    if how is not OVERSIZE and not limited.flushes:  # there memory is given back without a flush as well
        assert limited == unlimited


@given(traces(), ALL_SETTINGS, LIMITS)
def test_numbers_of_blocks_mean_nothing(
    trace: tuple[list[int], list[int]], how: AllocatorSettings, limit_bytes: int | None
) -> None:
    """Other numbers for the same blocks give the same result."""
    events, sizes = trace
    moved = [entry + 3 if entry >= 0 else entry - 3 for entry in events]
    expected = replay(events, sizes, limit_bytes=limit_bytes, settings=how)
    assert replay(moved, [0, 0, 0, *sizes], limit_bytes=limit_bytes, settings=how) == expected


@given(traces(), st.sampled_from([PLAIN, EXPANDABLE]))
def test_free_cache_serves_every_block_again(trace: tuple[list[int], list[int]], how: AllocatorSettings) -> None:
    """Once all was freed, any one block of the trace is allocated from the cache."""
    events, sizes = trace
    events = [*events, *(~number for number in range(len(sizes)) if ~number not in events)]
    before = replay(events, sizes, settings=how)
    for number in range(len(sizes)):
        assert replay([*events, number], sizes, settings=how).peak_reserved_bytes == before.peak_reserved_bytes


class PlainModel:
    """The allocator without free lists, blocks and merging: free is what no used range covers, found anew each time."""

    def __init__(self, expandable: bool, limit: int) -> None:
        self.expandable, self.limit, self.peak, self.end = expandable, limit, 0, {True: 0, False: 0}
        self.segments: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by pool; small is True
        self.used: dict[bool, dict[int, int]] = {True: {}, False: {}}

    def runs(self, small: bool) -> list[tuple[int, int]]:
        """Ranges with memory; the handles of expandable segments join."""
        if not self.expandable:
            return sorted(self.segments[small])
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self.segments[small]):
            joined[-1:] = [(joined[-1][0], stop)] if joined and joined[-1][1] == start else [*joined[-1:], (start, stop)]
        return joined

    def gaps(self, small: bool) -> Iterator[tuple[int, int, int]]:
        """(size, start, bytes that it can grow to) of everything free."""
        runs = self.runs(small)
        for number, (start, stop) in enumerate(runs):
            room = (runs[number + 1][0] if number + 1 < len(runs) else 2**50) - stop if self.expandable else 0
            cuts = [
                (start, start),
                *((at, at + size) for at, size in sorted(self.used[small].items()) if start <= at < stop),
            ]
            for (_, low), (high, _) in pairwise([*cuts, (stop, stop)]):
                if high > low:
                    yield high - low, low, high - low + (room if high == stop else 0)

    def found(self, small: bool, size: int) -> int | None:
        """Where the best fit is."""
        free = sorted(gap for gap in self.gaps(small) if gap[0] >= size)
        while self.expandable and len(free) > 1 and free[1][2] < free[0][2]:
            del free[0]
        return free[0][1] if free else None

    def grown(self, small: bool, size: int) -> int | None:
        """Where there is room after new memory was taken; None when it cannot be."""
        step = 2 * MIB if small else 20 * MIB
        if not self.expandable:
            taken = -(-size // (2 * MIB)) * 2 * MIB if size >= 10 * MIB else step
            start, self.end[small] = self.end[small], self.end[small] + taken
            return start if self.reserve(small, [(start, start + taken)]) else None
        used = sorted(self.used[small].items())
        unmapped = [stop for _, stop in self.runs(small)]
        if (0, step) not in self.segments[small]:
            unmapped.insert(0, 0)
        for begin in unmapped:
            start = next((low for length, low, _ in self.gaps(small) if low + length == begin), begin)
            if next((at for at, _ in used if at >= start), 2**50) - start >= size:
                break
        group: list[tuple[int, int]] = []
        for at in range(start // step * step, start + size, step):  # each range without memory is mapped at once or not
            if (at, at + step) not in self.segments[small]:
                group.append((at, at + step))
            elif not self.reserve(small, group):
                return None
            else:
                group = []
        return start if self.reserve(small, group) else None

    def reserve(self, small: bool, ranges: list[tuple[int, int]]) -> bool:
        """Take memory for ranges, unless that is more than the limit."""
        total = sum(stop - start for start, stop in [*self.segments[True], *self.segments[False], *ranges])
        if total > self.limit:
            return False
        self.segments[small] += ranges
        self.peak = max(self.peak, total)
        return True

    def flush(self) -> None:
        """Give back every segment or handle that no used range touches."""
        for small, used in self.used.items():
            self.segments[small] = [
                (start, stop)
                for start, stop in self.segments[small]
                if any(at < stop and start < at + size for at, size in used.items())
            ]

    def replay(self, events: Iterable[int], sizes: list[int]) -> tuple[int, int, int | None]:
        """Peak of reserved bytes, flushes, and the event that failed."""
        flushes = 0
        live: dict[int, int] = {}
        for index, entry in enumerate(events):
            size = -(-sizes[max(entry, ~entry)] // 512) * 512
            small = size <= MIB
            if size == 0:
                continue
            if entry < 0:
                del self.used[small][live.pop(~entry)]
                continue
            start = self.found(small, size)
            if start is None:
                start = self.grown(small, size)
            if start is None:
                self.flush()
                flushes, start = flushes + 1, self.grown(small, size)
            if start is None:
                return self.peak, flushes, index
            whole = next((length for length, low, _ in self.gaps(small) if low == start), size)
            is_split = whole - size > (511 if small or self.expandable else MIB)
            self.used[small][start] = size if is_split else whole
            live[entry] = start
        return self.peak, flushes, None


@settings(max_examples=400)
@given(traces(), st.booleans(), LIMITS)
def test_same_as_a_plain_model(trace: tuple[list[int], list[int]], expandable: bool, limit_bytes: int | None) -> None:
    """Free lists, splitting, merging and unmapping amount to what a search through all free ranges gives."""
    outcome = replay(*trace, limit_bytes=limit_bytes, settings=EXPANDABLE if expandable else PLAIN)
    expected = PlainModel(expandable, 2**62 if limit_bytes is None else limit_bytes).replay(*trace)
    assert (outcome.peak_reserved_bytes, outcome.flushes, outcome.failed_event) == expected


# -- a real history


CHILD = """
import torch

torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for rows in (4, 16, 9):
    model(torch.randn(rows, 128, 256, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
stats = torch.cuda.memory_stats()
trace = torch.cuda.memory._snapshot()["device_traces"][0]
entries = [(entry["addr"], entry["size"], entry["action"]) for entry in trace]
peaks = [stats[name + "_bytes.all.peak"] for name in ("allocated", "reserved", "requested")]
answer([peaks, entries])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no cuda device in this process")
@pytest.mark.parametrize("text", ["expandable_segments:False", "expandable_segments:True", "roundup_power2_divisions:4"])
def test_same_as_a_gpu(run_child: Callable[..., Any], text: str) -> None:
    """The peaks of a replayed history of training are those of the allocator that recorded it."""
    peaks, entries = run_child(CHILD, PYTORCH_CUDA_ALLOC_CONF=text)
    outcome = replay(*events_of(entries), settings=AllocatorSettings.parse(text))
    assert [outcome.peak_allocated_bytes, outcome.peak_reserved_bytes, outcome.peak_requested_bytes] == peaks
