"""Bytes, shares and seconds: what is read, what is refused, and what people get to see."""

from __future__ import annotations

import math
import string
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from autoaccum.errors import InvalidRequestError
from autoaccum.units import Share, format_bytes, format_seconds, one_line, parse_size, shown

MOST = 2**62
BYTES_OF = {
    "": 1,
    "B": 1,
    "k": 10**3,
    "kB": 10**3,
    "Ki": 2**10,
    "KiB": 2**10,
    "M": 10**6,
    "MB": 10**6,
    "Mi": 2**20,
    "MiB": 2**20,
    "G": 10**9,
    "GB": 10**9,
    "Gi": 2**30,
    "GiB": 2**30,
    "T": 10**12,
    "TB": 10**12,
    "Ti": 2**40,
    "TiB": 2**40,
    "P": 10**15,
    "PB": 10**15,
    "Pi": 2**50,
    "PiB": 2**50,
}
decimals = st.from_regex(r"[0-9]{0,6}\.[0-9]{1,6}|[0-9]{1,9}\.?", fullmatch=True, alphabet=string.digits + ".")
blanks = st.text(alphabet=" \t\n", max_size=3)


@given(st.integers(1, MOST))
@example(MOST)
def test_whole_bytes_are_taken_as_they_are(num_bytes: int) -> None:
    """A whole number above zero stands for that many bytes."""
    assert parse_size(num_bytes) == num_bytes


@given(st.integers(1, 2**53))
def test_whole_floats_are_whole_bytes(num_bytes: int) -> None:
    """A float without a fraction stands for that many bytes, as an int."""
    parsed = parse_size(float(num_bytes))
    assert parsed == num_bytes and type(parsed) is int


@given(st.integers(1, MOST))
def test_digits_are_bytes(num_bytes: int) -> None:
    """Digits without a unit are bytes, exactly."""
    assert parse_size(str(num_bytes)) == num_bytes


@given(decimals, st.sampled_from(sorted(BYTES_OF)), blanks, blanks, blanks)
@example("2.3", "kB", "", "", "")
@example("1.005", "GB", "", "", "")
def test_number_times_unit(number: str, unit: str, before: str, between: str, after: str) -> None:
    """A size in text is the exact product of its number and its unit, rounded down to a byte."""
    exact = math.floor(Fraction(number) * BYTES_OF[unit])
    assume(1 <= exact <= MOST)
    assert parse_size(before + number + between + unit + after) == exact


@given(st.sampled_from(sorted(BYTES_OF)), st.data())
def test_case_does_not_matter(unit: str, data: st.DataObject) -> None:
    """A unit may be written in any mixture of capital and small letters."""
    written = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in unit)
    assert parse_size(f"3{written}") == 3 * BYTES_OF[unit]


@given(st.integers(1, 10**6))
@example(10**6)
def test_percent_is_a_share(hundredths_of_ppm: int) -> None:
    """A percentage above zero and up to 100 is a share of the device, not a number of bytes."""
    parsed = parse_size(f"{hundredths_of_ppm / 10_000:.4f}%")
    assert isinstance(parsed, Share)
    assert parsed.frac == pytest.approx(hundredths_of_ppm / 10**6, rel=1e-9)


@pytest.mark.parametrize("text", ["0%", "0.0 %", "100.1%", "250%", "101 %"])
def test_impossible_share_is_refused(text: str) -> None:
    """A share of nothing, or of more than everything, is refused."""
    with pytest.raises(InvalidRequestError, match="outside 0 % to 100 %"):
        parse_size(text)


@pytest.mark.parametrize("value", [0, -1, 0.0, -8e9, "0", "0 GiB", "0.4", "0.0001kB", pytest.param(-(10**5000), id="long")])
def test_nothing_is_no_budget(value: object) -> None:
    """A size that is not at least one byte is refused."""
    with pytest.raises(InvalidRequestError, match="not above zero"):
        parse_size(value)


@pytest.mark.parametrize("value", [MOST + 1, "5000 PiB", pytest.param(10**5000, id="long"), 1e300, "9" * 60])
def test_more_than_can_be_counted_is_refused(value: object) -> None:
    """A size that a signed 64-bit counter cannot add up is refused, however long it is."""
    with pytest.raises(InvalidRequestError, match="more than any device holds"):
        parse_size(value)


@pytest.mark.parametrize("value", ["8 gigs", "8GiBs", "8X", "8bytes", "8iB", "3EB"])
def test_unknown_unit_is_named(value: str) -> None:
    """An unknown unit is refused and named in the error."""
    with pytest.raises(InvalidRequestError, match=f"unknown unit '{value.lstrip('8 3')}'"):
        parse_size(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        [],
        {},
        b"8GiB",
        1.5,
        1j,
        math.nan,
        math.inf,
        -math.inf,
        object(),
        "",
        "   ",
        "GiB",
        "%",
        "-8GiB",
        "+8GiB",
        "8GiB 2",
        "1e9",
        "0x10",
        "1,5GiB",
        "1 000",
        "8\u00a0GiB",
        "8\u212aB",
        "\u0668GiB",
        "\uff18GiB",
        "8GiB\x00",
        "nan",
        "inf",
        "80%%",
        "1.2.3GiB",
        ".",
        "8G iB",
    ],
)
def test_what_is_no_size_is_refused(value: object) -> None:
    """What cannot be read as a size is refused with the forms that can."""
    with pytest.raises(InvalidRequestError, match="cannot be read as memory; expected a size such as"):
        parse_size(value)


@given(st.text() | st.text(alphabet="0123456789.%kKmMgGtTpPiIbB eE+-_,\n\t\u0663\u212a"))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Any text is either a size above zero or an InvalidRequestError, nothing else."""
    try:
        parsed = parse_size(text)
    except InvalidRequestError:
        return
    assert 0 < parsed.frac <= 1 if isinstance(parsed, Share) else 1 <= parsed <= MOST


@given(st.floats() | st.integers() | st.none() | st.binary() | st.complex_numbers() | st.lists(st.integers()))
def test_any_value_is_read_or_refused(value: object) -> None:
    """Any object is either bytes or an InvalidRequestError, nothing else."""
    try:
        parsed = parse_size(value)
    except InvalidRequestError:
        return
    assert parsed == value


@given(st.text(alphabet="0123456789", min_size=65, max_size=10_000))
def test_error_stays_short(text: str) -> None:
    """The error about a very long text shows its beginning only."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_size(text)
    assert len(str(caught.value)) < 300


def test_error_uses_the_caller_s_name() -> None:
    """The error names the value as the caller calls it, and shows it."""
    with pytest.raises(InvalidRequestError, match="reserve='lots'"):
        parse_size("lots", "reserve")


@given(st.integers(1024, MOST))
def test_shown_bytes_can_be_read_again(num_bytes: int) -> None:
    """What is shown for a number of bytes reads as that number to within the digits shown."""
    assert parse_size(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@given(st.integers(1, 1023))
def test_few_bytes_are_shown_exactly(num_bytes: int) -> None:
    """Below one KiB every byte is shown."""
    assert parse_size(format_bytes(num_bytes)) == num_bytes


@given(st.integers(1024, 999 * 2**40))
def test_shown_bytes_are_short(num_bytes: int) -> None:
    """Up to the largest unit, the number in front of it stays below 1000."""
    assert float(format_bytes(num_bytes).split()[0]) < 1000


@given(st.integers(1, MOST))
def test_negative_headroom_is_shown_with_its_sign(num_bytes: int) -> None:
    """A negative number of bytes is shown as the positive one with a minus."""
    assert format_bytes(-num_bytes) == "-" + format_bytes(num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (8 * 2**30, "8.00 GiB"),
        (100 * 2**20, "100 MiB"),
        (141 * 2**30, "141 GiB"),
        (2**52, "4096 TiB"),
    ],
)
def test_bytes_as_shown(num_bytes: int, text: str) -> None:
    """Bytes are shown with three digits and the binary unit that fits."""
    assert format_bytes(num_bytes) == text


def test_unknown_is_a_dash() -> None:
    """What is not known is shown as a dash, in both units."""
    assert (format_bytes(None), format_seconds(None)) == ("-", "-")


@given(st.floats(1e-6, 1e6))
@example(0.9996)
@example(0.99949)
def test_shown_seconds_can_be_read_again(seconds: float) -> None:
    """What is shown for a time is that time to within half a percent, and never in powers of ten."""
    text = format_seconds(seconds)
    number, unit = text.split()
    assert float(number) * {"s": 1, "ms": 1e-3}[unit] == pytest.approx(seconds, rel=0.0051)
    assert "e" not in number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (1.0, "1 s"), (2.345, "2.35 s"), (3600, "3600.0 s")],
)
def test_seconds_as_shown(seconds: float, text: str) -> None:
    """Times are shown in milliseconds below one second and in seconds from there on."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    "value",
    ["a" * 10**6, 10**5000, [[0] * 10**4], "\x1b[31m\n" * 100],
    ids=["text", "number", "list", "control"],
)
def test_value_in_an_error_is_one_short_line(value: object) -> None:
    """Whatever it is, no more than 80 letters of it are shown, in one line, without control characters."""
    text = shown(value)
    assert 0 < len(text) <= 80 and text.isprintable()


def test_endless_value_in_an_error_is_named() -> None:
    """What Python cannot write out, because it is nested without end, is named by its type."""
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "a list too long to show"


@given(st.text() | st.text(alphabet="\x00\x1b\x85\u202e\u2028\r\n\ta "), st.integers(3, 200))
def test_line_of_a_text_is_short_and_printable(text: str, most: int) -> None:
    """Any text becomes one line of at most so many letters, which a terminal only shows."""
    line = one_line(text, most)
    assert len(line) <= most and line.isprintable()
