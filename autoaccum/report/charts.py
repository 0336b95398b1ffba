"""Pictures of speed: step time against memory, and throughput against micro-batch. What cannot be drawn is a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autoaccum.records import Levers, PlanRecord, Setting, Timing, Trial
from autoaccum.report import axes, drawing
from autoaccum.report.axes import BOTTOM_PX, TOP_PX, Axis
from autoaccum.report.drawing import NUM_COLOURS, Labels
from autoaccum.report.markup import Markup, joined, tag
from autoaccum.report.settings import ordered
from autoaccum.report.tables import levers_in_words, rate_in_words, trial_timing
from autoaccum.units import format_bytes, format_seconds

# -- step time against memory


class Point(NamedTuple):
    """A measured setting: its number in the table, whether it is the chosen one, and where it lies in the picture."""

    number: int
    name: str
    is_chosen: bool
    peak_bytes: int
    timing: Timing
    x: float = 0.0
    y: float = 0.0

    def __str__(self) -> str:
        return f"{self.number}: {self.name}, {format_bytes(self.peak_bytes)}, {format_seconds(self.timing.median_s)}"


def pareto_figure(plan: PlanRecord) -> Markup:
    """Optimizer step time against peak memory of every measured setting, with the front and the budget."""
    points = list(_points(ordered(plan.settings)))
    if not points:
        return drawing.missing("No setting was both run and timed, so there is no picture of step time against memory.")
    is_near = plan.budget_bytes <= axes.FAR * max(point.peak_bytes for point in points)
    peaks = [point.peak_bytes for point in points] + [plan.budget_bytes] * is_near
    times_s = [time_s for point in points for time_s in (point.timing.first_quartile_s, point.timing.third_quartile_s)]
    across = axes.across_axis(peaks, "peak memory", axes.BYTES, from_zero=False)
    up = axes.upright_axis(times_s, "optimizer step", axes.SECONDS, from_zero=False)
    points = [point._replace(x=across.at(point.peak_bytes), y=up.at(point.timing.median_s)) for point in points]
    front = front_of(points)
    budget = [_budget_line(across.at(plan.budget_bytes), plan.budget_bytes)] if is_near else []
    return drawing.figure(
        "Step time against memory",
        "Lower and further left is better. Numbers are the rows of the trade-offs, bars the quartiles."
        + ("" if is_near else f" The budget of {format_bytes(plan.budget_bytes)} is far to the right."),
        drawing.picture(
            "Optimizer step time against peak memory",
            f"From the least memory to the fastest: {'; '.join(map(str, front))}.",
            drawing.frame(across, up),
            *budget,
            _staircase(front),
            *_spreads_and_marks(points, front, up),
            _pareto_labels(points, front),
        ),
        _pareto_legend(is_near),
    )


def _points(settings: Iterable[Setting]) -> Iterable[Point]:
    for number, setting in enumerate(settings, 1):
        if setting.timing is not None and setting.timing.first_quartile_s > 0 and setting.peak_bytes:
            name, is_chosen = levers_in_words(setting.levers), setting.standing == "chosen"
            yield Point(number, name, is_chosen, setting.peak_bytes, setting.timing)


def front_of(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats in both memory and time, from the least memory to the fastest."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.timing.median_s)):
        if not front or point.timing.median_s < front[-1].timing.median_s:
            front.append(point)
    return front


def _budget_line(x: float, budget_bytes: int) -> Markup:
    label = drawing.label_at(x, TOP_PX - 7, f"budget {format_bytes(budget_bytes)}")
    return joined((drawing.line(x, TOP_PX - 3, x, BOTTOM_PX, "aa-limit"), label))


def _staircase(front: Sequence[Point]) -> Markup:
    """The front in steps: a straight line between two points would promise settings that are not there."""
    steps = "".join(f"H{point.x:.1f}V{point.y:.1f}" for point in front[1:])
    return tag("path", d=f"M{front[0].x:.1f} {front[0].y:.1f}{steps}", class_="aa-front")


def _spreads_and_marks(points: Sequence[Point], front: Sequence[Point], up: Axis) -> Iterable[Markup]:
    """From the last row of the table to the first, so that the chosen one is on top."""
    for point in reversed(points):
        ends = up.at(point.timing.first_quartile_s), up.at(point.timing.third_quartile_s)
        yield drawing.whisker(point.x, *ends, "aa-muted")
        yield tag("g", tag("title", str(point)), _dot(point.x, point.y, is_chosen=point.is_chosen, is_front=point in front))


def _dot(x: float, y: float, *, is_chosen: bool = False, is_front: bool = False) -> Markup:
    if is_chosen:
        ring = tag("circle", cx=x, cy=y, r=8, class_="aa-ring")
        return joined((ring, tag("circle", cx=x, cy=y, r=4.5, class_="aa-dot aa-accent")))
    return tag("circle", cx=x, cy=y, r=4.5, class_="aa-dot aa-c0" if is_front else "aa-hollow aa-muted")


def _pareto_labels(points: Sequence[Point], front: Sequence[Point]) -> Markup:
    """Numbers beside the points: the chosen one's first, then the front's, then those for which there is room."""
    labels = Labels((point.x, point.y) for point in points)
    by_weight = sorted(points, key=lambda point: (not point.is_chosen, point not in front))
    return joined(
        labels.beside(point.x, point.y, f"{point.number} chosen", "aa-label aa-strong", gap_px=11, always=True)
        if point.is_chosen
        else labels.beside(point.x, point.y, str(point.number))
        for point in by_weight
    )


def _pareto_legend(has_budget: bool) -> Markup:
    entries = [
        (_dot(8, 8, is_chosen=True), "chosen"),
        (_dot(8, 8, is_front=True), "none is both smaller and faster"),
        (_dot(8, 8), "measured"),
    ]
    return drawing.legend(entries + [(drawing.line(0, 8, 16, 8, "aa-limit"), "budget")] * has_budget)


# -- throughput against micro-batch


class Rate(NamedTuple):
    """Samples per second at one micro-batch: median and quartiles."""

    micro_batch: int
    low: float
    middle: float
    high: float


def throughput_figure(
    trials: Sequence[Trial], levers: Levers, settings: Sequence[Setting] = (), rows_per_step: int = 0
) -> Markup:
    """Throughput against micro-batch, one line per setting of the levers.

    Args:
        levers: Those whose line comes first.
        rows_per_step: Rows of one optimizer step on this rank, which the settings' times are of.
    """
    series = rates_of(trials, settings, rows_per_step)
    if not series:
        return drawing.missing("No optimizer step was timed, so there is no picture of throughput.")
    first = levers_in_words(levers)
    names = sorted(series, key=lambda name: (name != first, -max(rate.middle for rate in series[name])))
    shown, num_more = names[:NUM_COLOURS], len(names) - NUM_COLOURS
    rates = [rate for name in shown for rate in series[name]]
    across = axes.doubling_axis((rate.micro_batch for rate in rates), "micro-batch (rows)")
    up = axes.upright_axis((rate.high for rate in rates), "", axes.RATES)
    lines = [_rate_line(series[name], place, across, up) for place, name in enumerate(shown)]
    return drawing.figure(
        "Throughput against micro-batch",
        "Samples per second on one rank: medians, and quartiles as bars."
        + (f" {num_more} slower settings are not drawn." if num_more > 0 else ""),
        drawing.picture(
            "Throughput against micro-batch",
            _rates_in_words({name: series[name] for name in shown}),
            drawing.frame(across, up),
            *reversed(lines),
        ),
        drawing.legend((_rate_mark(8, 8, place), name) for place, name in enumerate(shown)),
    )


def rates_of(trials: Sequence[Trial], settings: Sequence[Setting], rows_per_step: int) -> dict[str, list[Rate]]:
    """Rates by levers in words, ascending in size. Of a size that was timed more than once, the plan's own step counts."""
    timed: dict[tuple[str, int], tuple[int, Timing]] = {}
    for trial in sorted(trials, key=lambda trial: trial.purpose == "confirm"):
        timing = trial_timing(trial)
        if timing is not None:
            timed[levers_in_words(trial.candidate.levers), trial.candidate.micro_batch] = trial.rows_per_step, timing
    for setting in settings:
        if setting.timing is not None:
            timed[levers_in_words(setting.levers), setting.micro_batch] = rows_per_step, setting.timing
    found: dict[str, list[Rate]] = {}
    for (name, micro_batch), (rows, timing) in sorted(timed.items(), key=lambda item: item[0][1]):
        if timing.first_quartile_s > 0 and micro_batch > 0:
            times_s = timing.third_quartile_s, timing.median_s, timing.first_quartile_s
            found.setdefault(name, []).append(Rate(micro_batch, *(rows / time_s for time_s in times_s)))
    return found


def _rates_in_words(series: dict[str, list[Rate]]) -> str:
    best = {name: max(rates, key=lambda rate: rate.middle) for name, rates in series.items()}
    texts = [f"{name}: {rate_in_words(rate.middle)} samples/s at {rate.micro_batch} rows" for name, rate in best.items()]
    return f"The fastest size of each setting: {'; '.join(texts)}."


def _rate_line(rates: Sequence[Rate], place: int, across: Axis, up: Axis) -> Markup:
    xs = [across.at(rate.micro_batch) for rate in rates]
    path = "L".join(f"{x:.1f} {up.at(rate.middle):.1f}" for x, rate in zip(xs, rates, strict=True))
    parts = [tag("path", d=f"M{path}", class_=f"aa-line aa-c{place}")]
    for x, rate in zip(xs, rates, strict=True):
        words = f"{rate.micro_batch} rows: {rate_in_words(rate.middle)} samples/s"
        parts.append(drawing.whisker(x, up.at(rate.low), up.at(rate.high), f"aa-c{place}"))
        parts.append(tag("g", tag("title", words), _rate_mark(x, up.at(rate.middle), place)))
    return joined(parts)


_SHAPES = ("m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "m-3.6-3.6h7.2v7.2h-7.2z", "m0-4.8l4.6 8h-9.2z", "m0-5l5 5l-5 5l-5-5z")


def _rate_mark(x: float, y: float, place: int) -> Markup:
    """Shapes tell lines apart where colours do not."""
    return tag("path", d=f"M{x:.1f} {y:.1f}{_SHAPES[place % len(_SHAPES)]}", class_=f"aa-dot aa-c{place}")
