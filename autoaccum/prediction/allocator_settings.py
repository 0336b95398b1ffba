"""What sizes the CUDA caching allocator works with: PyTorch's constants, the settings that change them, and rounding.

Follows c10/core/AllocatorConfig.h and .cpp of PyTorch 2.13. Must never import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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


DEFAULT_SETTINGS = AllocatorSettings()


def rounded_bytes(asked_bytes: int, settings: AllocatorSettings = DEFAULT_SETTINGS) -> int:
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
