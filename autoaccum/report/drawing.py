"""What all pictures are drawn with, as SVG: frames, lines, labels that do not overlap, legends. The page has the colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autoaccum.report.axes import BOTTOM_PX, HEIGHT_PX, LEFT_PX, LETTER_PX, RIGHT_PX, TOP_PX, WIDTH_PX, Axis
from autoaccum.report.markup import Markup, joined, tag

NUM_COLOURS = 8  # more cannot be told apart
_BOLD_PX = 10  # by how much a bold label is wider, to either side


def figure(title: str, text: str, picture: Markup, legend: Markup, class_: str = "aa-figure") -> Markup:
    """A picture with its title, a sentence on how to read it, and what its marks mean."""
    caption = tag("figcaption", tag("h3", title), tag("p", text))
    return tag("figure", caption, picture, legend, class_=class_)


def picture(title: str, words: str, *layers: Markup) -> Markup:
    """The SVG of layers over one another; `words` are what is heard in place of it."""
    view = f"0 0 {WIDTH_PX} {HEIGHT_PX}"
    return tag("svg", tag("title", title), tag("desc", words), *layers, viewBox=view, role="img", class_="aa-picture")


def missing(sentence: str) -> Markup:
    """What stands in place of a picture that cannot be drawn."""
    return tag("p", sentence, class_="aa-missing")


def legend(entries: Iterable[tuple[Markup, str]]) -> Markup:
    """What marks of up to 16 x 16 pixels mean; it is no part of the picture, so that it wraps on a narrow page."""
    items = (tag("li", tag("svg", mark, viewBox="0 0 16 16", aria_hidden="true"), text) for mark, text in entries)
    return tag("ul", *items, class_="aa-legend")


def text_at(x: float, y: float, text: str, class_: str = "aa-tick", anchor: str = "middle") -> Markup:
    """A line of text; `y` is what its letters stand on."""
    return tag("text", text, x=x, y=y, class_=class_, text_anchor=anchor)


def label_at(x: float, y: float, text: str, class_: str = "aa-label") -> Markup:
    """A line of text in the middle of `x`, moved to the side where it would leave the frame."""
    half_px = len(text) * LETTER_PX / 2 + _BOLD_PX
    return text_at(min(max(x, LEFT_PX + half_px), WIDTH_PX - half_px), y, text, class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def whisker(x: float, low: float, high: float, class_: str) -> Markup:
    """An upright line with a bar at both ends: a spread."""
    bars = f"M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
    return tag("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}{bars}", class_=f"aa-whisker {class_}")


def frame(across: Axis, up: Axis) -> Markup:
    """Grid lines, ticks with their texts, and what the axes are; the upright one is named above its upper end."""
    rows = (
        joined((line(LEFT_PX, y, RIGHT_PX, y, "aa-grid"), text_at(LEFT_PX - 6, y + 4, text, anchor="end")))
        for y, text in ((up.at(value), text) for value, text in up.ticks)
    )
    columns = (
        joined((line(x, BOTTOM_PX, x, BOTTOM_PX + 4, "aa-axis"), text_at(_kept(x, text), BOTTOM_PX + 17, text)))
        for x, text in ((across.at(value), text) for value, text in across.ticks)
    )
    base = line(LEFT_PX, BOTTOM_PX, RIGHT_PX, BOTTOM_PX, "aa-axis")
    names = text_at(2, 12, up.label, anchor="start"), text_at(RIGHT_PX, HEIGHT_PX - 8, across.label, anchor="end")
    return joined((*rows, *columns, base, *names))


def _kept(x: float, text: str) -> float:
    """The middle of the text of a tick, moved to the left where it would be cut off."""
    return min(x, WIDTH_PX - len(text) * LETTER_PX / 2)


class Box(NamedTuple):
    """A rectangle that is taken by a mark or a text, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def hits(self, other: Box) -> bool:
        """Whether the two share any place."""
        is_beside = self.right <= other.left or other.right <= self.left
        return not is_beside and self.top < other.bottom and other.top < self.bottom

    def is_inside(self, other: Box) -> bool:
        """Whether no part of it is outside the other one."""
        return (
            other.left <= self.left and self.right <= other.right and other.top <= self.top and self.bottom <= other.bottom
        )


_FRAME = Box(LEFT_PX, TOP_PX - 4, WIDTH_PX - 4, BOTTOM_PX)


class Labels:
    """Puts texts beside their points where nothing else is; one that finds no place is left out."""

    def __init__(self, marks: Iterable[tuple[float, float]], radius_px: float = 6) -> None:
        self._taken = [Box(x - radius_px, y - radius_px, x + radius_px, y + radius_px) for x, y in marks]

    def beside(
        self, x: float, y: float, text: str, class_: str = "aa-label", gap_px: float = 8, *, always: bool = False
    ) -> Markup:
        """The text at the first free place: to the right of the point, to its left, above or below it.

        Args:
            always: Whether it covers marks rather than be left out.
        """
        width_px = len(text) * LETTER_PX
        places = [Box(left, base - 10, left + width_px, base + 3) for left, base in _places(x, y, width_px, gap_px)]
        inside = [box for box in places if box.is_inside(_FRAME)]
        free = [box for box in inside if not any(map(box.hits, self._taken))]
        if not (free or (always and inside)):
            return Markup()
        box = (free or inside)[0]
        self._taken.append(box)
        return text_at(box.left, box.bottom - 3, text, class_, "start")


def _places(x: float, y: float, width_px: float, gap_px: float) -> Sequence[tuple[float, float]]:
    middle = x - width_px / 2
    return (x + gap_px, y + 4), (x - gap_px - width_px, y + 4), (middle, y - gap_px), (middle, y + gap_px + 9)
