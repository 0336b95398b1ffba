"""What a picture is measured by: units, ticks at round numbers, and axes. Knows no records and draws nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, log2, log10
from typing import NamedTuple

WIDTH_PX, HEIGHT_PX = 420, 300  # of a picture; a page shows it at 0.8 of that on a phone, and at 1.2 beside another one
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 48, 404, 38, 254  # of the frame inside it that the data is drawn in
FAR = 1.6  # a limit that is this much above all that is drawn would press a picture flat, and is named instead
LETTER_PX = 6.8  # the mean width of a letter at the 12.5 px that phones show pictures with, in a wide font


class Unit(NamedTuple):
    """A unit, and how much of the base unit it is."""

    name: str
    size: float


BYTES = (Unit("TiB", 2**40), Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10), Unit("B", 1))
SECONDS = (Unit("s", 1), Unit("ms", 1e-3), Unit("\u00b5s", 1e-6))
RATES = (Unit("million samples/s", 1e6), Unit("thousand samples/s", 1e3), Unit("samples/s", 1))
COUNTS = (Unit("million", 1e6), Unit("", 1))


def fitting(units: Sequence[Unit], largest: float) -> Unit:
    """The largest unit of which there is at least one, else the smallest."""
    return next((unit for unit in units if largest >= unit.size), units[-1])


def nice_ticks(low: float, high: float, num: int = 5) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that enclose low to high in about `num` steps.

    Example:
        >>> nice_ticks(0.3, 9.2), nice_ticks(7, 7)
        ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [6.0, 6.5, 7.0, 7.5, 8.0])
    """
    if not high > low:  # a single value gets room on both sides
        around = abs(low) / 10 or 1
        low, high = low - around, high + around
    step = _nice_step((high - low) / num)
    digits = _digits(step)
    return [round(index * step, digits) for index in range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)]


def _nice_step(at_least: float) -> float:
    power = 10.0 ** floor(log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * 0.999)


def _digits(step: float) -> int:
    """How many digits after the point tell multiples of the step apart."""
    return max(0, -floor(log10(step) + 1e-9))


class Axis(NamedTuple):
    """From values to pixels: `low` lies at `start_px` and `high` at `end_px`; ticks are values with their texts."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[tuple[float, str], ...]
    label: str
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """Where the value lies, in pixels."""
        low, high = self.low, self.high
        if self.is_logarithmic:
            low, high, value = log2(low), log2(high), log2(value)
        return self.start_px + (value - low) / (high - low) * (self.end_px - self.start_px)


def across_axis(values: Iterable[float], label: str, units: Sequence[Unit], *, from_zero: bool = True) -> Axis:
    """A level axis that encloses the values, none of them below zero, with round ticks in the unit that fits."""
    return _linear_axis(list(values), LEFT_PX, RIGHT_PX, label, units, from_zero)


def upright_axis(values: Iterable[float], label: str, units: Sequence[Unit], *, from_zero: bool = True) -> Axis:
    """An upright axis that encloses the values, none of them below zero, with round ticks in the unit that fits."""
    return _linear_axis(list(values), BOTTOM_PX, TOP_PX, label, units, from_zero)


def _linear_axis(
    values: Sequence[float], start_px: float, end_px: float, label: str, units: Sequence[Unit], from_zero: bool
) -> Axis:
    unit = fitting(units, max(values))
    low = 0.0 if from_zero else min(values) / unit.size
    ticks = [tick for tick in nice_ticks(low, max(values) / unit.size) if tick >= 0]
    digits = _digits(ticks[1] - ticks[0])
    texts = tuple((tick * unit.size, f"{tick:,.{digits}f}") for tick in ticks)
    named = f"{label} ({unit.name})" if label and unit.name else label or unit.name
    return Axis(texts[0][0], texts[-1][0], start_px, end_px, texts, named)


def doubling_axis(values: Iterable[int], label: str) -> Axis:
    """A level axis on which every doubling is as wide, with ticks at powers of two, or at the values where those are few."""
    known = sorted(set(values))
    low, high = known[0] / 1.15, known[-1] * 1.15
    powers = [2**power for power in range(ceil(log2(low)), floor(log2(high)) + 1)]
    axis = Axis(low, high, LEFT_PX, RIGHT_PX, (), label, is_logarithmic=True)
    texts = [(float(value), f"{value:,}") for value in (powers if len(powers) > 1 else known)]
    return axis._replace(ticks=tuple(_apart(axis, texts)))


def events_axis(num: int, label: str) -> Axis:
    """A level axis from 0 to exactly `num`, with ticks at round whole numbers."""
    axis = across_axis([num], label, COUNTS)
    return axis._replace(high=num, ticks=tuple((at, text) for at, text in axis.ticks if at <= num and at == int(at)))


def _apart(axis: Axis, ticks: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Those ticks whose texts do not run into the one before."""
    free_from_px = float("-inf")
    for value, text in ticks:
        half_px = len(text) * LETTER_PX / 2
        if axis.at(value) - half_px >= free_from_px:
            free_from_px = axis.at(value) + half_px + LETTER_PX
            yield value, text
