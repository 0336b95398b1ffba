"""The settings of the caching allocator: how their text is read, and how requests are rounded by them."""

from __future__ import annotations

import re

import pytest

from autoaccum.errors import InvalidRequestError
from autoaccum.prediction.allocator import replay
from autoaccum.prediction.allocator_settings import AllocatorSettings, rounded_bytes

from .replays import MIB


def test_rounding_in_divisions_of_a_power_of_two() -> None:
    """With 4 divisions 5000 bytes are rounded to 5120, the first of 4096, 5120, 6144, 7168 that suffices."""
    quarters = AllocatorSettings(roundup_power2_divisions=4)
    assert replay([0], [5000], settings=quarters).peak_allocated_bytes == 5120
    assert rounded_bytes(7169, quarters) == 8192
    assert rounded_bytes(4096, quarters) == 4096


def test_rounding_of_small_requests_ignores_divisions() -> None:
    """Up to 512 bytes times the divisions a request is rounded to 512 as ever."""
    quarters = AllocatorSettings(roundup_power2_divisions=4)
    assert [rounded_bytes(size, quarters) for size in (1, 1100, 2048, 2049)] == [512, 1536, 2048, 2560]


def test_rounding_by_size_intervals() -> None:
    """Each size is rounded with the divisions of the first interval that ends above it, or of the last."""
    by_size = AllocatorSettings(roundup_power2_divisions=((2, 0), (4, 2), (8, 1)))
    sizes = (MIB + 1, 2 * MIB + 1, 5 * MIB + 1, 65 * MIB + 1)
    assert [rounded_bytes(size, by_size) for size in sizes] == [MIB + 512, 3 * MIB, 5 * MIB + 512, 65 * MIB + 512]


def test_no_text() -> None:
    """An empty text gives PyTorch's defaults."""
    assert AllocatorSettings.parse("") == AllocatorSettings()


def test_all_keys() -> None:
    """Every key that changes sizes is read, spaces are ignored, and keys that change none pass."""
    text = (
        "expandable_segments:True, max_split_size_mb:64, roundup_power2_divisions:4, max_non_split_rounding_mb:40, "
        "large_segment_size_mb:30, garbage_collection_threshold:0.8, pinned_use_background_threads:True, backend:native,"
    )
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=64 * MIB,
        roundup_power2_divisions=4,
        max_non_split_rounding_bytes=40 * MIB,
        large_segment_bytes=30 * MIB,
    )


def test_large_segment_sets_the_slack() -> None:
    """Where only the size of large segments is given, the slack for oversize blocks is the same."""
    assert AllocatorSettings.parse("large_segment_size_mb:30").max_non_split_rounding_bytes == 30 * MIB


@pytest.mark.parametrize(
    ("text", "by_interval"),
    [
        ("[64:8,256:4,1024:4,>:1]", [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1]),
        ("[256:1,512:2,1024:4,>:8]", [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]),
        ("[>:4]", [0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        ("[1:2,131072:4]", [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4]),
        ("[256:2,64:8,>:4]", [2, 2, 2, 2, 2, 2, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        ("[64:8,]", [8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("[]", [0] * 16),
    ],
)
def test_list_of_divisions(text: str, by_interval: list[int]) -> None:
    """A list names intervals from 1 MiB to 2, ..., from 32 GiB on, as PyTorch 2.13 was seen to read it; gaps mean 0."""
    parsed = AllocatorSettings.parse(f"roundup_power2_divisions:{text},expandable_segments:True")
    assert parsed.roundup_power2_divisions == tuple((2 << number, each) for number, each in enumerate(by_interval))
    assert parsed.expandable_segments


def test_other_allocator_cannot_be_replayed() -> None:
    """The driver's own pool is refused, as it does not work this way."""
    with pytest.raises(InvalidRequestError, match="backend:cudaMallocAsync cannot be replayed"):
        AllocatorSettings.parse("backend:cudaMallocAsync")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("expandable_segments:true", "expandable_segments:true"),
        ("max_split_size_mb", "'max_split_size_mb'"),
        ("max_split_size_mb:", "'max_split_size_mb:'"),
        ("max_split_size_mb=64", "'max_split_size_mb=64'"),
        ("max_split_size_mb:x", "max_split_size_mb has 'x'"),
        ("max_split_size_mb:19", "max_split_size_mb:19 is too small; expected 20"),
        ("large_segment_size_mb:30,max_split_size_mb:25", "max_split_size_mb:25 is too small; expected 30"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 is too small; expected 11"),
        ("max_non_split_rounding_mb:5", "max_non_split_rounding_mb:5 is too small; expected 20"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions has 3"),
        ("roundup_power2_divisions:0", "roundup_power2_divisions has 0"),
        ("roundup_power2_divisions:[3:4]", "roundup_power2_divisions has 3"),
        ("roundup_power2_divisions:[64:3]", "roundup_power2_divisions has 3"),
        ("roundup_power2_divisions:[64]", "roundup_power2_divisions has ''"),
        ("roundup_power2_divisions:[64:8", "roundup_power2_divisions has '[64:8'"),
    ],
)
def test_text_that_pytorch_refuses(text: str, named: str) -> None:
    """What PyTorch refuses is refused, and what is wrong is named."""
    with pytest.raises(InvalidRequestError, match=f"the allocator setting {re.escape(named)}"):
        AllocatorSettings.parse(text)
