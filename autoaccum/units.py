"""Bytes, shares and seconds, to and from text. One function per unit.

Knows nothing of devices: a share ("80%") stays a share until a device says what it is a share of.
"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Real
from typing import NamedTuple

from autoaccum.errors import InvalidRequestError

# IEC 80000-13: a binary prefix carries an i. The bare letters follow SI, as Kubernetes quantities do.
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{prefix + suffix: 1000**power for power, prefix in enumerate("kmgtp", 1) for suffix in ("", "b")},
    **{prefix + suffix: 1024**power for power, prefix in enumerate("kmgtp", 1) for suffix in ("i", "ib")},
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[A-Za-z]*)\s*", re.ASCII)
_EXPECTED = 'expected a size such as "8GiB", "8GB", "512MiB", a share such as "80%", or a whole number of bytes'


class Share(NamedTuple):
    """A fraction of a device's total memory, above 0 and at most 1."""

    frac: float


def parse_size(value: object, name: str = "budget") -> int | Share:
    """Bytes, or the share of a device, that a number or a text stands for.

    Args:
        value: Bytes as an int, or text: "8GiB" (2**30 each), "8GB" (10**9 each), "80%".
        name: What the value is called in the error.

    Raises:
        InvalidRequestError: When it cannot be read, is not above zero, or is a share above 100 %.

    Example:
        >>> parse_size("2GiB"), parse_size("1.5 kB"), parse_size("80%")
        (2147483648, 1500, Share(frac=0.8))
    """
    if isinstance(value, Real) and not isinstance(value, bool) and value == value // 1:
        return _positive(int(value // 1), value, name)  # type: ignore[call-overload]  # 8e9 is a whole number too
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) and len(value) <= 64 else None
    if match is None:
        raise InvalidRequestError(f"{name}={shown(value)} cannot be read as memory; {_EXPECTED}.")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise InvalidRequestError(f"{name}={shown(value)} is outside 0 % to 100 %; {_EXPECTED}.")
        return Share(number / 100)
    if unit not in _UNIT_BYTES:
        raise InvalidRequestError(f"{name}={shown(value)} has the unknown unit {match[2]!r}; {_EXPECTED}.")
    return _positive(int(Fraction(match[1]) * _UNIT_BYTES[unit]), value, name)  # a float would lose bytes


def format_bytes(num_bytes: int | None) -> str:
    """Bytes as people read them, in binary units; "-" where not known.

    Example:
        >>> format_bytes(512), format_bytes(1536 * 2**20), format_bytes(None)
        ('512 B', '1.50 GiB', '-')
    """
    if num_bytes is None:
        return "-"
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 999.5 or unit == "TiB":
            break
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.2f} {unit}"


def format_seconds(seconds: float | None) -> str:
    """Seconds with a fitting unit; "-" where not known.

    Example:
        >>> format_seconds(0.00042), format_seconds(0.25), format_seconds(75)
        ('0.42 ms', '250 ms', '75.0 s')
    """
    if seconds is None:
        return "-"
    if seconds >= 0.9995:  # what would be shown as 1000 ms
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms"


def _positive(num_bytes: int, value: object, name: str) -> int:
    if num_bytes <= 0:
        raise InvalidRequestError(f"{name}={shown(value)} is not above zero; {_EXPECTED}.")
    if num_bytes > 2**62:  # what a signed 64-bit counter of bytes can still add up
        raise InvalidRequestError(f"{name}={shown(value)} is more than any device holds; {_EXPECTED}.")
    return num_bytes


def shown(value: object, most: int = 80) -> str:
    """The value as an error shows it: as Python writes it, in one line, shortened to `most` letters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes out no whole number of more than 4300 digits, and no endless nest
        text = f"a {type(value).__name__} too long to show"
    return _shortened(text, most) if text.isprintable() else one_line(text, most)


def one_line(text: str, most: int = 80) -> str:
    r"""The text in one line of at most `most` letters, without characters that a terminal or a log would obey.

    Example:
        >>> one_line("red:\n\x1b[31m")
        'red: ?[31m'
    """
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text[: 4 * most].split()))
    return _shortened(line, most)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
