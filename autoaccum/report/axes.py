"""What a picture is measured by: units, ticks at round numbers, axes, and labels that do not overlap. Knows no records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, log2, log10
from typing import NamedTuple

from autoaccum.report.markup import Markup, joined, tag

WIDTH_PX, HEIGHT_PX = 420, 300  # of the picture; a page scales it to 0.8 on a phone and to 1.2 beside another one
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 48, 404, 38, 254  # of the frame that the data is drawn in
LETTER_PX = 6.2  # a bit more than the mean width of a letter at the 11 px that pictures are labelled with
_LINE_PX = 13


class Unit(NamedTuple):
    """A unit and how much of the base unit it is."""

    name: str
    size: float


BYTES = (Unit("TiB", 2**40), Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10), Unit("B", 1))
SECONDS = (Unit("s", 1), Unit("ms", 1e-3), Unit("\u00b5s", 1e-6))
RATES = (Unit("million samples/s", 1e6), Unit("samples/s", 1))
EVENTS = (Unit("million", 1e6), Unit("", 1))


def fitting(units: Sequence[Unit], largest: float) -> Unit:
    """The largest unit of which there is at least one, else the smallest."""
    return next((unit for unit in units if largest >= unit.size), units[-1])


def nice_ticks(low: float, high: float, num: int = 5) -> list[float]:
    """About `num` round numbers (1, 2 or 5 times a power of ten apart) that enclose low to high.

    Example:
        >>> nice_ticks(0.3, 9.2), nice_ticks(7, 7)
        ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [6.0, 6.5, 7.0, 7.5, 8.0])
    """
    if not high > low:  # a single value gets room on both sides
        around = abs(low) / 10 or 1
        low, high = low - around, high + around
    rough = (high - low) / num
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    digits = max(0, 1 - floor(log10(step)))
    return [round(index * step, digits) for index in range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)]


def tick_text(value: float, step: float) -> str:
    """The value with the digits that tell neighbouring ticks apart."""
    return f"{value:,.{max(0, -floor(log10(step) + 1e-9))}f}"


class Axis(NamedTuple):
    """From values to pixels: `low` lies at `start_px`, `high` at `end_px`; ticks are values with their texts."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[tuple[float, str], ...]
    label: str
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """Where the value lies, in pixels."""
        low, high, value = (map(log2, (self.low, self.high, value))) if self.is_logarithmic else (self.low, self.high, value)
        return self.start_px + (value - low) / (high - low) * (self.end_px - self.start_px)


def linear_axis(
    values: Iterable[float], start_px: float, end_px: float, label: str, units: Sequence[Unit], *, from_zero: bool = True
) -> Axis:
    """An axis that encloses the values, with ticks at round numbers of the unit that fits."""
    known = list(values)
    unit = fitting(units, max(known))
    ticks = nice_ticks(0.0 if from_zero else min(known) / unit.size, max(known) / unit.size)
    ticks = [tick for tick in ticks if tick >= 0]
    texts = tuple((tick * unit.size, tick_text(tick, ticks[1] - ticks[0])) for tick in ticks)
    named = f"{label} ({unit.name})" if label and unit.name else label or unit.name
    return Axis(texts[0][0], texts[-1][0], start_px, end_px, texts, named)


def doubling_axis(values: Iterable[int], start_px: float, end_px: float, label: str) -> Axis:
    """An axis on which every doubling is as wide, with ticks at powers of two, or at the values where there are too few."""
    known = sorted(set(values))
    low, high = known[0] / 1.15, known[-1] * 1.15
    powers = [2**power for power in range(ceil(log2(low)), floor(log2(high)) + 1)]
    marked = powers if len(powers) > 1 else known
    axis = Axis(low, high, start_px, end_px, (), label, is_logarithmic=True)
    return axis._replace(ticks=tuple(_apart(axis, [(float(value), f"{value:,}") for value in marked])))


def _apart(axis: Axis, ticks: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Those ticks whose texts do not run into the one before."""
    free_from_px = float("-inf")
    for value, text in ticks:
        half_px = len(text) * LETTER_PX / 2
        if axis.at(value) - half_px >= free_from_px:
            free_from_px = axis.at(value) + half_px + LETTER_PX
            yield value, text


def text_at(x: float, y: float, text: str, class_: str = "aa-tick", anchor: str = "middle") -> Markup:
    """A line of text in a picture."""
    return tag("text", text, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line in a picture."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def frame(across: Axis, up: Axis) -> Markup:
    """Grid lines, ticks with their texts, and what the axes are; the upright one is named above its upper end."""
    rows = [
        line(LEFT_PX, up.at(value), RIGHT_PX, up.at(value), "aa-grid")
        + text_at(LEFT_PX - 6, up.at(value) + 4, text, anchor="end")
        for value, text in up.ticks
    ]
    columns = [
        line(across.at(value), BOTTOM_PX, across.at(value), BOTTOM_PX + 4, "aa-axis")
        + text_at(across.at(value), BOTTOM_PX + 17, text)
        for value, text in across.ticks
    ]
    named = text_at(2, 12, up.label, "aa-name", "start"), text_at(RIGHT_PX, HEIGHT_PX - 8, across.label, "aa-name", "end")
    base = line(LEFT_PX, BOTTOM_PX, RIGHT_PX, BOTTOM_PX, "aa-axis")
    return joined(map(Markup, (*rows, *columns, base, *named)))


class Box(NamedTuple):
    """A rectangle that is taken by a mark or a text, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def hits(self, other: Box) -> bool:
        """Whether the two share any place."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


_FRAME = Box(LEFT_PX, TOP_PX - 4, RIGHT_PX + 8, BOTTOM_PX)


class Labels:
    """Places texts beside their points where nothing else is; one that finds no place is left out."""

    def __init__(self, marks: Iterable[tuple[float, float]], radius_px: float = 6) -> None:
        self._taken = [Box(x - radius_px, y - radius_px, x + radius_px, y + radius_px) for x, y in marks]

    def beside(self, x: float, y: float, text: str, class_: str = "aa-label", gap_px: float = 8) -> Markup:
        """The text at the first free place: to the right of the point, to its left, above or below it."""
        width_px = len(text) * LETTER_PX
        for left, baseline in (
            (x + gap_px, y + 4),
            (x - gap_px - width_px, y + 4),
            (x - width_px / 2, y - gap_px),
            (x - width_px / 2, y + gap_px + 9),
        ):
            box = Box(left, baseline - _LINE_PX + 3, left + width_px, baseline + 3)
            inside = box.left >= _FRAME.left and box.right <= _FRAME.right and box.top >= _FRAME.top
            if inside and box.bottom <= _FRAME.bottom and not any(box.hits(other) for other in self._taken):
                self._taken.append(box)
                return text_at(left + width_px / 2, baseline, text, class_)
        return Markup()
