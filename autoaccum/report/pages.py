"""Plans and probe results as HTML: one page that needs nothing else, or a fragment for a notebook. No scripts.

Texts become markup through `markup.tag` only, which escapes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoaccum.records import Environment, Fit, PlanRecord, ProbeResult, Trial, plain
from autoaccum.report import drawing
from autoaccum.report.charts import pareto_figure, throughput_figure
from autoaccum.report.markup import Markup, escaped, joined, tag
from autoaccum.report.settings import setting_cells, setting_notes
from autoaccum.report.stacks import timeline_figure
from autoaccum.report.style import STYLE
from autoaccum.report.tables import COLUMNS_OF_WORDS, levers_in_words, outlook_cells, rate_in_words, trial_cells
from autoaccum.report.text import plan_facts, plan_in_words, probe_facts, skipped_in_words
from autoaccum.units import format_bytes, format_seconds

_STANDINGS = {"chosen": "aa-chosen", "measured": "aa-measured"}
_COLUMNS = {"standing": "aa-short", "outcome": "aa-words aa-outcome"}
_TRIALS_OPEN = 30  # a longer log is folded up
_MESSAGE_LETTERS = 300  # of an error in the log; an allocator's message has its numbers within them


def plan_html(plan: PlanRecord) -> str:
    """The plan as a whole HTML page that needs no other file and no network."""
    return _document("autoaccum plan", _plan_body(plan))


def plan_fragment(plan: PlanRecord) -> str:
    """The same as a fragment with its own styles, for a notebook or another page."""
    return _fragment("autoaccum plan", _plan_body(plan))


def probe_html(result: ProbeResult) -> str:
    """The probe's result as a whole HTML page that needs no other file and no network."""
    return _document("autoaccum probe", _probe_body(result))


def _document(title: str, body: Markup) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>body{{margin:0}}\n{STYLE}</style>"
    )
    main = tag("main", tag("h1", title), body, class_="aa-main")
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body class="autoaccum">{main}</body></html>\n'


def _fragment(title: str, body: Markup) -> str:
    inside = tag("div", tag("h1", title), body, class_="aa-main")
    return tag("div", tag("style", Markup(STYLE)), inside, class_="autoaccum")


def _plan_body(plan: PlanRecord) -> Markup:
    prediction = plan.prediction
    rows = sum(plan.micro_batch_sizes)
    throughput = throughput_figure(plan.trials, plan.levers, plan.settings, rows)
    figures = pareto_figure(plan), throughput, timeline_figure(plan.timeline)
    return joined(
        (
            tag("p", plan_in_words(plan), class_="aa-lead"),
            _tiles(_plan_tiles(plan)),
            _facts(plan_facts(plan)[1:]),
            _notes(plan.warnings),
            _section("Trade-offs", *_trade_offs(plan)),
            _figures(figures),
            _section("Other GPUs", *([_outlooks(plan)] if prediction and prediction.outlooks else [])),
            _section("Not modelled by the prediction", _list(prediction.not_modelled if prediction else ())),
            _section("Trials", _trials(plan.trials)),
            _section("Left out", _list([skipped_in_words(skipped) for skipped in plan.skipped])),
            _section("Environment", _environment(plan.environment)),
        )
    )


def _probe_body(result: ProbeResult) -> Markup:
    peak = format_bytes(result.measured_peak_bytes)
    tiles = [
        ("Largest micro-batch", str(result.max_micro_batch), f"{result.evidence}, limited by {result.limited_by}"),
        ("Peak memory", peak, f"of {format_bytes(result.budget_bytes)}"),
        ("Levers", levers_in_words(result.levers), ""),
    ]
    return joined(
        (
            tag("p", str(result), class_="aa-lead"),
            _tiles(tiles),
            _facts(probe_facts(result)),
            _notes(result.warnings),
            _figures([throughput_figure(result.trials, result.levers)]),
            _section("Trials", _trials(result.trials)),
            _section("Environment", _environment(result.environment)),
        )
    )


def _plan_tiles(plan: PlanRecord) -> Iterable[tuple[str, str, str]]:
    """The plan's main numbers: what, how much, and what that rests on."""
    steps = plan.accumulation_steps
    yield "Micro-batch", str(plan.micro_batch), f"rows, in {steps} accumulation step{'s' if steps > 1 else ''}"
    budget = f"of {format_bytes(plan.budget_bytes)}"
    if plan.measured_peak_bytes is not None:
        yield "Peak memory", format_bytes(plan.measured_peak_bytes), f"{budget}, measured"
    elif plan.predicted_peak_bytes is not None:
        yield "Peak memory", format_bytes(plan.predicted_peak_bytes), f"{budget}, predicted"
    if plan.step_time_s is not None:
        steps_timed = "median" if plan.timing is None else f"median of {plan.timing.num} steps"
        yield "Optimizer step", format_seconds(plan.step_time_s), steps_timed
    if plan.samples_per_s is not None:
        yield (
            "Throughput",
            rate_in_words(plan.samples_per_s),
            "samples/s over all ranks" if plan.world_size > 1 else "samples/s",
        )


def _tiles(tiles: Iterable[tuple[str, str, str]]) -> Markup:
    shown = [
        tag("div", tag("dt", what), tag("dd", value), tag("dd", note, class_="aa-small"), class_="aa-tile")
        for what, value, note in tiles
    ]
    return tag("dl", *shown, class_="aa-tiles")


def _facts(lines: Iterable[tuple[str, str]]) -> Markup:
    pairs = (joined((tag("dt", what), tag("dd", value))) for what, value in lines)
    return tag("dl", *pairs, class_="aa-card aa-facts")


def _notes(warnings: Sequence[str]) -> Markup:
    if not warnings:
        return Markup()
    return _section("Notes", tag("ul", *(tag("li", text) for text in warnings), class_="aa-list aa-notes"))


def _list(texts: Sequence[str]) -> Markup:
    return tag("ul", *(tag("li", text) for text in texts), class_="aa-list") if texts else Markup()


def _section(title: str, *parts: Markup) -> Markup:
    """The parts under a heading; without any there is no heading either."""
    return tag("section", tag("h2", title), *parts) if any(parts) else Markup()


def _figures(figures: Sequence[Markup]) -> Markup:
    """Pictures beside one another, and below them why some are missing."""
    drawn = [figure for figure in figures if figure.startswith("<figure")]
    missing = [sentence for sentence in figures if sentence not in drawn]
    grid = [tag("div", *drawn, class_="aa-figures")] if drawn else []
    return _section("Pictures", *grid, *missing)


def _trade_offs(plan: PlanRecord) -> Iterable[Markup]:
    if plan.settings:
        yield _settings(plan)
    else:
        yield drawing.missing("No other setting of the levers was looked at.")
    yield _list(plan.advice)


def _settings(plan: PlanRecord) -> Markup:
    """The trade-offs, numbered as in the picture; a note stands below its levers. What was not run is folded up."""
    cells, notes = setting_cells(plan), setting_notes(plan)
    shown = [
        tag("tr", *_setting_row(str(number), cells.header, row, note), class_=_STANDINGS.get(row[0], "aa-left-out"))
        for number, (row, note) in enumerate(zip(cells.rows, notes, strict=True), 1)
    ]
    header = ("#", *cells.header)
    num_left = sum(row[0] == "not run" for row in cells.rows)  # the last ones
    tables = [_framed("Trade-offs", header, shown[: len(shown) - num_left])]
    if num_left:
        summary = tag("summary", f"{num_left} more setting{'s' if num_left > 1 else ''}, not run")
        tables.append(tag("details", summary, _framed("Settings that were not run", header, shown[-num_left:])))
    return tag("div", *tables, class_="aa-card")


def _setting_row(number: str, header: Sequence[str], row: Sequence[str], note: str) -> Iterable[Markup]:
    yield _number_cell("#", number)
    for name, text in zip(header, row, strict=True):
        marked = f"\u2605 {text}" if (name, text) == ("standing", "chosen") else text
        yield _cell(name, marked, note if name == "levers" else "")


def _outlooks(plan: PlanRecord) -> Markup:
    header, rows = outlook_cells(plan.prediction.outlooks if plan.prediction else ())
    shown = [tag("tr", *(_cell(name, text) for name, text in zip(header, row, strict=True))) for row in rows]
    return tag("div", _framed("Other GPUs", header, shown), class_="aa-card")


def _trials(trials: Sequence[Trial]) -> Markup:
    """The log of trials; an error's text stands below its outcome, and a long log is folded up."""
    if not trials:
        return drawing.missing("Nothing was run.")
    header, rows = trial_cells(trials)
    shown = [
        tag("tr", *_trial_row(trial, header, row), class_="aa-fits" if isinstance(trial.outcome, Fit) else "aa-failed")
        for trial, row in zip(trials, rows, strict=True)
    ]
    summary = tag("summary", f"{len(trials)} trial{'s' if len(trials) > 1 else ''}, in the order run")
    state = {"open": ""} if len(trials) <= _TRIALS_OPEN else {}
    return tag("details", summary, _framed("Trials", header, shown), class_="aa-card", **state)


def _trial_row(trial: Trial, header: Sequence[str], row: Sequence[str]) -> Iterable[Markup]:
    message = "" if isinstance(trial.outcome, Fit) else _shortened(trial.outcome.message)
    for name, text in zip(header, row, strict=True):
        yield _cell(name, text, message if name == "outcome" else "")


def _shortened(text: str) -> str:
    return text if len(text) <= _MESSAGE_LETTERS else text[: _MESSAGE_LETTERS - 3] + "..."


def _environment(environment: Environment | None) -> Markup:
    if environment is None:
        return Markup()
    return _facts((name.replace("_", " "), str(value)) for name, value in plain(environment).items() if value != "")


def _framed(title: str, header: Sequence[str], rows: Sequence[Markup]) -> Markup:
    """A table that scrolls in its own frame where it is wider than the page; on a phone each row is a card."""
    head = tag("tr", *(tag("th", name, scope="col", class_=_column_class(name)) for name in header))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="aa-table")
    return tag("div", table, class_="aa-scroll", tabindex="0", role="region", aria_label=title)


def _column_class(name: str) -> str:
    return _COLUMNS.get(name, "aa-words") if name in COLUMNS_OF_WORDS else "aa-num"


def _cell(name: str, text: str, below: str = "") -> Markup:
    """A cell of the column of that name, with more in small letters below it."""
    if name not in COLUMNS_OF_WORDS:
        return _number_cell(name, text)
    words = tag("span", text, *([_small(below)] if below else []))
    return tag("td", words, class_=_column_class(name), data_column=name)


def _number_cell(name: str, text: str) -> Markup:
    """What stands in brackets after a number goes below it, in small letters."""
    number, opened, more = text.partition(" (")
    small = map(_small, more.removesuffix(")").split("; ")) if opened else ()
    return tag("td", tag("span", number, *small), class_="aa-num", data_column=name)


def _small(text: str) -> Markup:
    return tag("span", text, class_="aa-small")
