"""The picture of memory over one optimizer step, stacked by what holds it. Predicted, and said to be so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from autoaccum.records import Timeline
from autoaccum.report import axes, drawing
from autoaccum.report.axes import BOTTOM_PX, LEFT_PX, LETTER_PX, RIGHT_PX, TOP_PX, Axis
from autoaccum.report.drawing import NUM_COLOURS
from autoaccum.report.markup import Markup, joined, tag
from autoaccum.units import format_bytes

_MOST_COLUMNS = 320  # about one a pixel
_CLEAR_PX = 20  # a label needs that much between its point and a line above it


class Columns(NamedTuple):
    """The events that are drawn, and what every kind holds after each of them; `totals` are the sums."""

    num_events: int
    events: list[int]
    held_bytes: dict[str, list[int]]
    totals: list[int]

    @property
    def peak_place(self) -> int:
        """The column at which most is held."""
        return self.totals.index(max(self.totals))


def timeline_figure(timeline: Timeline | None) -> Markup:
    """Memory over one optimizer step, with the phases, the peak and the limit; its legend is a table."""
    columns = None if timeline is None else columns_of(timeline)
    if timeline is None or columns is None:
        return drawing.missing("The memory of a step was not predicted in detail, so there is no picture of it.")
    peak_bytes, limit_bytes = max(columns.totals), timeline.limit_bytes
    drawn_bytes = limit_bytes if limit_bytes is not None and limit_bytes <= axes.FAR * peak_bytes else None
    across = axes.events_axis(columns.num_events, "allocations and frees, in order")
    up = axes.upright_axis([1.1 * peak_bytes, 1.08 * (drawn_bytes or 0)], "allocated", axes.BYTES)
    far = "" if limit_bytes == drawn_bytes else f" The limit of {format_bytes(limit_bytes)} is far above."
    return drawing.figure(
        "Memory over one optimizer step",
        f"{timeline.title}. Predicted, not measured; forward, backward and optimizer are shaded ever darker.{far}",
        drawing.picture(
            "Memory over one optimizer step by what holds it",
            _in_words(timeline, columns),
            _phases(timeline, across),
            drawing.frame(across, up),
            *_areas(columns, across, up),
            _limit_and_peak(columns, across, up, drawn_bytes),
        ),
        _legend(columns),
        class_="aa-figure aa-wide",
    )


def columns_of(timeline: Timeline) -> Columns | None:
    """At most one column a pixel: of each column's events, the one at which most is held. None where nothing ever is."""
    num = min(map(len, timeline.held_bytes.values()), default=0)
    totals = [sum(held) for held in zip(*timeline.held_bytes.values(), strict=False)]
    if max(totals, default=0) <= 0:
        return None
    count = min(num, _MOST_COLUMNS)
    bounds = pairwise(place * num // count for place in range(count + 1))
    events = [max(range(begin, end), key=totals.__getitem__) for begin, end in bounds]
    held = {kind: [row[event] for event in events] for kind, row in timeline.held_bytes.items()}
    return Columns(num, events, held, [totals[event] for event in events])


def _phases(timeline: Timeline, across: Axis) -> Markup:
    """A shade for each phase, with its name above where that is narrow enough."""
    begins = [across.at(min(max(event, 0), across.high)) for event, _ in timeline.phases]
    shown = []
    for (_, phase), (left, right) in zip(timeline.phases, pairwise([*begins, RIGHT_PX]), strict=True):
        if right > left:
            size = {"x": left, "y": TOP_PX, "width": right - left, "height": BOTTOM_PX - TOP_PX}
            shown.append(tag("rect", **size, class_=f"aa-{phase}"))
        if right - left > len(phase) * LETTER_PX:
            shown.append(drawing.text_at((left + right) / 2, TOP_PX - 6, phase))
    return joined(shown)


def _areas(columns: Columns, across: Axis, up: Axis) -> Iterable[Markup]:
    count = len(columns.events)
    edges = [across.at(place * columns.num_events / count) for place in range(count + 1)]
    below = [0] * count
    for place, held in enumerate(columns.held_bytes.values()):
        above = [low + more for low, more in zip(below, held, strict=True)]
        if any(held):
            path = _outline(edges, list(map(up.at, above)), list(map(up.at, below)))
            yield tag("path", d=path, class_=f"aa-area aa-c{place % NUM_COLOURS}")
        below = above


def _outline(edges: Sequence[float], tops: Sequence[float], bottoms: Sequence[float]) -> str:
    """Along the steps of a layer to the right, and back along those of the layer below."""
    there, back = _stairs(tops, edges[1:-1]), _stairs(bottoms[::-1], edges[-2:0:-1])
    return f"M{edges[0]:.1f} {tops[0]:.1f}{there}H{edges[-1]:.1f}V{bottoms[-1]:.1f}{back}H{edges[0]:.1f}Z"


def _stairs(levels: Sequence[float], edges: Sequence[float]) -> str:
    """Straight to an edge and there to the next level; edges without a step are passed over."""
    steps = zip(edges, pairwise(round(level, 1) for level in levels), strict=True)
    return "".join(f"H{edge:.1f}V{level:g}" for edge, (before, level) in steps if level != before)


def _limit_and_peak(columns: Columns, across: Axis, up: Axis, limit_bytes: int | None) -> Markup:
    """The line of the limit and the mark of the peak, with their labels in different halves or heights."""
    peak_bytes = max(columns.totals)
    x, y = across.at(columns.events[columns.peak_place]), up.at(peak_bytes)
    mark = tag("path", d=f"M{x:.1f} {y:.1f}l-4-6h8z", class_="aa-dot")
    if limit_bytes is None:
        return joined((mark, _peak_label(x, y - 10, peak_bytes)))
    limit_y = up.at(limit_bytes)
    is_left = x > (LEFT_PX + RIGHT_PX) / 2
    label_x, anchor = (LEFT_PX + 4, "start") if is_left else (RIGHT_PX - 4, "end")
    label = drawing.text_at(label_x, limit_y - 5, f"limit {format_bytes(limit_bytes)}", "aa-label", anchor)
    is_clear = abs(y - 10 - limit_y) > _CLEAR_PX
    peak_label = _peak_label(x, y - 10 if is_clear else min(limit_y - 5, y - 10), peak_bytes)
    return joined((drawing.line(LEFT_PX, limit_y, RIGHT_PX, limit_y, "aa-limit"), mark, label, peak_label))


def _peak_label(x: float, y: float, peak_bytes: int) -> Markup:
    return drawing.label_at(x, y, f"peak {format_bytes(peak_bytes)}", "aa-label aa-strong")


def _in_words(timeline: Timeline, columns: Columns) -> str:
    place = columns.peak_place
    begun = [phase for event, phase in timeline.phases if event <= columns.events[place]]
    parts = [f"{kind} {format_bytes(held[place])}" for kind, held in columns.held_bytes.items() if held[place]]
    where = f" in the {begun[-1]} phase" if begun else ""
    return f"The peak of {format_bytes(columns.totals[place])} is{where}: {', '.join(parts)}."


def _legend(columns: Columns) -> Markup:
    """What each colour is, and how much of it; from the uppermost layer down, as in the picture."""
    place = columns.peak_place
    layers = [
        _legend_row(tag("span", class_=f"aa-swatch aa-c{colour % NUM_COLOURS}"), kind, held[place], max(held))
        for colour, (kind, held) in enumerate(columns.held_bytes.items())
        if any(held)
    ]
    names = (tag("th", name, scope="col", class_="aa-num") for name in ("at the peak", "at most"))
    head = tag("thead", tag("tr", tag("td"), tag("th", "held by", scope="col"), *names))
    total = _legend_row(Markup(), "in all", columns.totals[place], columns.totals[place])
    return tag("table", head, tag("tbody", *reversed(layers), total), class_="aa-table aa-legend-table")


def _legend_row(swatch: Markup, kind: str, *held_bytes: int) -> Markup:
    cells = (tag("td", format_bytes(held), class_="aa-num") for held in held_bytes)
    return tag("tr", tag("td", swatch), tag("th", kind, scope="row"), *cells)
