"""Plans as HTML: complete, sound, alone, small, and with every text from outside escaped; read back from a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree
from collections.abc import Callable
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from autoaccum.records import (
    Environment,
    Fit,
    Levers,
    Outlook,
    OutOfMemory,
    Phase,
    PlanRecord,
    Prediction,
    ProbeResult,
    Setting,
    Skipped,
    Timeline,
    Trial,
)
from autoaccum.report.pages import plan_fragment, plan_html, probe_html
from autoaccum.report.settings import ordered, setting_cells
from autoaccum.report.stacks import columns_of
from autoaccum.report.tables import trial_cells
from autoaccum.report.text import plan_facts, probe_facts
from autoaccum.timing import timing_of

GIB = 2**30
HOSTILE = "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(2)> & a | b\n# c\x00\x1b[31m"
SHOWN = "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(2)> & a | b\n# c\ufffd\ufffd[31m"


class Reader(HTMLParser):
    """The tags of a page with their attributes, the text of each, and whether all are closed in order."""

    ALONE = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[tuple[str, int]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        found = self.texts.setdefault(tag, [])
        found.append("")
        if tag not in self.ALONE:
            self.open.append((tag, len(found) - 1))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for tag, place in self.open:
            self.texts[tag][place] += data


@pytest.fixture
def hostile(plan: PlanRecord) -> PlanRecord:
    """A plan in which every text that can hold anything holds markup."""
    return msgspec.structs.replace(
        plan,
        settings=tuple(
            msgspec.structs.replace(s, note=HOSTILE, levers=msgspec.structs.replace(s.levers, block_names=(HOSTILE,)))
            for s in plan.settings
        ),
        trials=tuple(
            t if isinstance(t.outcome, Fit) else msgspec.structs.replace(t, outcome=with_message(t)) for t in plan.trials
        ),
        advice=(HOSTILE,),
        warnings=(HOSTILE,),
        skipped=(Skipped(lever=HOSTILE, level=HOSTILE, reason=HOSTILE),),
        timeline=Timeline(title=HOSTILE, held_bytes={HOSTILE: (1, 2, 3)}, phases=((0, "data"),), limit_bytes=4),
        environment=Environment(**dict.fromkeys(Environment.__struct_fields__, HOSTILE) | {"world_size": 1}),
        prediction=prediction_of(HOSTILE),
    )


def with_message(trial: Trial) -> Any:
    return msgspec.structs.replace(trial.outcome, message=HOSTILE)


def prediction_of(text: str) -> Prediction:
    """A prediction whose texts are that one."""
    return Prediction(
        gpu=text,
        total_bytes=12 * GIB,
        peak_bytes=8 * GIB,
        low_bytes=7 * GIB,
        high_bytes=9 * GIB,
        allocated_bytes=6 * GIB,
        parts=((text, 6 * GIB),),
        phase="backward",
        flops_per_step=10**12,
        not_modelled=(text, "the rest"),
        outlooks=(Outlook(gpu=text, total_bytes=GIB, fits=False, peak_bytes=2 * GIB),),
    )


@pytest.fixture
def large() -> PlanRecord:
    """A plan with 500 trials, 100 settings and a timeline of 2,000 events of 7 kinds."""
    levers = [Levers(checkpointing="full", checkpointed_blocks=number) for number in range(1, 101)]
    times = [tuple(1.0 + number / 50 + step / 500 for step in range(12)) for number in range(100)]
    settings = [
        Setting(
            levers=one,
            standing="measured" if number else "chosen",
            micro_batch=8 + number,
            accumulation_steps=4,
            peak_bytes=GIB * (200 - number) // 20,
            timing=timing_of(times[number]),
            note="It is slower than the chosen one, and needs as much memory.",
        )
        for number, one in enumerate(levers)
    ]
    message = "CUDA out of memory. " * 40
    return PlanRecord(
        target_batch=32,
        world_size=1,
        effective_batch=32,
        micro_batch=8,
        accumulation_steps=4,
        micro_batch_sizes=(8,) * 4,
        max_micro_batch=8,
        limited_by="memory",
        evidence="exact",
        levers=levers[0],
        budget_bytes=12 * GIB,
        measured_peak_bytes=10 * GIB,
        settings=tuple(settings),
        trials=tuple(some_trial(number, levers[number // 5], times[number // 5], message) for number in range(500)),
        timeline=Timeline(
            title="One step",
            held_bytes={
                f"kind {kind}": tuple((kind + event * 7919) % 997 * 2**20 for event in range(2000)) for kind in range(7)
            },
            phases=tuple((500 * number, phase) for number, phase in enumerate(get_args(Phase))),
            limit_bytes=6 * GIB,
        ),
    )


def some_trial(number: int, levers: Levers, times_s: tuple[float, ...], message: str) -> Trial:
    fit = Fit(peak_bytes=number * 2**20, step_times_s=times_s)
    failure = OutOfMemory(cause="allocator", phase="backward", message=message)
    candidate = {"micro_batch": 2 ** (number % 5), "levers": levers}
    known = {"candidate": candidate, "outcome": msgspec.to_builtins(failure if number % 5 == 4 else fit)}
    return msgspec.convert(known | {"wall_s": 2.0, "rows_per_step": 32}, Trial)


# -- the page


@pytest.mark.parametrize("show", [plan_html, plan_fragment])
def test_every_tag_is_closed(show: Callable[[PlanRecord], str], plan: PlanRecord, bare_plan: PlanRecord) -> None:
    """Pages and fragments are well formed, with everything in them and with next to nothing."""
    assert Reader(show(plan)).open == [] and Reader(show(bare_plan)).open == []


def test_page_is_whole(plan: PlanRecord) -> None:
    """The page is a whole document that says its encoding, its language and that it fits a phone."""
    page = plan_html(plan)
    assert page.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">')
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert Reader(page).texts["title"][0] == "autoaccum plan" and Reader(page).texts["h1"] == ["autoaccum plan"]


def test_fragment_is_no_document(plan: PlanRecord) -> None:
    """The fragment has no part of a document, and brings its styles, all of which are below its own class."""
    page = Reader(plan_fragment(plan))
    assert page.tags[0] == "div" and not set(page.tags) & {"html", "head", "body", "meta", "main"}
    (style,) = page.texts["style"]
    rules = re.findall(r"(?:^|[{}])\s*([^{}@]+)\{", re.sub(r"@media[^{]*\{", "}", style))
    assert len(rules) > 50
    assert {part.split(" ")[0].strip() for rule in rules for part in rule.split(",")} == {".autoaccum"}


@pytest.mark.parametrize("show", [plan_html, plan_fragment])
def test_nothing_is_loaded_and_nothing_runs(show: Callable[[PlanRecord], str], hostile: PlanRecord) -> None:
    """There is no script, no handler and no address of anything: neither in the markup nor in the styles."""
    text = show(hostile)
    page = Reader(text)
    assert not set(page.tags) & {"script", "img", "link", "iframe", "object", "embed", "a", "image", "use", "base", "form"}
    assert not {name for name, _ in page.attributes} & {"src", "href", "xlink:href", "srcset", "action", "data", "style"}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "http" not in text and "<script" not in text and "url(" not in text and "@import" not in text


@pytest.mark.parametrize("show", [plan_html, plan_fragment])
def test_no_text_becomes_markup(show: Callable[[PlanRecord], str], hostile: PlanRecord, plan: PlanRecord) -> None:
    """Texts with tags, quotes and control characters are shown as they are and add no tag and no attribute."""
    tame = msgspec.structs.replace(plan, prediction=prediction_of("x"))
    assert set(Reader(show(hostile)).tags) == set(Reader(show(tame)).tags)
    assert {name for name, _ in Reader(show(hostile)).attributes} == {name for name, _ in Reader(show(tame)).attributes}


def test_every_hostile_text_is_shown(hostile: PlanRecord) -> None:
    """Each text from outside is on the page, whole: warnings, advice, notes, messages, names, and those in pictures."""
    page = Reader(plan_html(hostile))
    assert SHOWN in page.texts["li"] and page.texts["li"].count(SHOWN) >= 3  # advice, warning, not modelled
    assert sum(cell == SHOWN for cell in page.texts["dd"]) == len(Environment.__struct_fields__) - 1
    assert sum(cell == SHOWN for cell in page.texts["span"]) >= len(hostile.settings) + 4  # notes and messages
    assert SHOWN in page.texts["th"] and any(SHOWN in text for text in page.texts["desc"])
    assert any(text.startswith(SHOWN) for text in page.texts["p"]) and f"{SHOWN} {SHOWN}: {SHOWN}" in page.texts["li"]


def test_pictures_are_sound_xml(hostile: PlanRecord) -> None:
    """Every picture and every mark of a legend can be read as XML."""
    drawn = re.findall(r"<svg.*?</svg>", plan_html(hostile), re.DOTALL)
    roots = [xml.etree.ElementTree.fromstring(text) for text in drawn]
    assert [root.attrib.get("role") for root in roots].count("img") == 3


def test_pictures_have_titles_and_descriptions(plan: PlanRecord) -> None:
    """What cannot be seen can be heard: every picture begins with a title and a description."""
    for text in re.findall(r'<svg[^>]*role="img".*?</svg>', plan_html(plan), re.DOTALL):
        first, second, *_ = xml.etree.ElementTree.fromstring(text)
        assert (first.tag, second.tag) == ("title", "desc") and first.text and second.text


def test_facts_are_complete(plan: PlanRecord) -> None:
    """The page has every fact of the plan: the first as its headline, the others in a list."""
    page = Reader(plan_html(plan))
    (_, headline), *facts = plan_facts(plan)
    assert headline in page.texts["p"]
    assert all(what in page.texts["dt"] and value in page.texts["dd"] for what, value in facts)


def test_settings_are_complete(plan: PlanRecord) -> None:
    """The table of trade-offs has every cell of every setting, numbered, and the chosen one has a star."""
    cells = Reader(plan_html(plan)).texts["td"]
    header, rows = setting_cells(plan)
    for number, row in enumerate(rows, 1):
        standing = "\u2605 chosen" if row[0] == "chosen" else row[0]
        place = cells.index(str(number))
        shown = cells[place : place + len(header) + 1]
        assert shown[:2] == [str(number), standing] and shown[2].startswith(row[1])
        assert [as_shown(cell) for cell in row[2:]] == shown[3:]


def test_settings_that_were_not_run_are_folded_up(plan: PlanRecord) -> None:
    """They come last and are many: a summary says how many, and the table above ends before them."""
    page, left = plan_html(plan), [setting for setting in plan.settings if setting.standing == "not run"]
    above, below = page.split(f"<summary>{len(left)} more setting", 1)
    assert left and ">not run<" not in above
    assert below.split("</details>")[0].count(">not run<") == len(left)


def as_shown(cell: str) -> str:
    """A cell as the page shows it: what was in brackets or after a semicolon is on lines of its own."""
    return cell.replace(" (", "").replace("; ", "").removesuffix(")")


def test_trials_are_complete(plan: PlanRecord) -> None:
    """The log has every cell of every trial, and the errors' texts."""
    text = " ".join(Reader(plan_html(plan)).texts["td"])
    for row in trial_cells(plan.trials).rows:
        assert all(as_shown(cell) in text for cell in row)
    assert "CUDA out of memory.\nTried to allocate" in text


def test_long_messages_are_shortened(large: PlanRecord) -> None:
    """Of an error's text no more than 300 letters are shown, with dots where it goes on."""
    messages = [text for text in Reader(plan_html(large)).texts["span"] if text.startswith("CUDA")]
    assert {len(text) for text in messages} == {300} and all(text.endswith("...") for text in messages)


@pytest.mark.parametrize(("num", "is_open"), [(30, True), (31, False)])
def test_a_long_log_is_folded_up(large: PlanRecord, num: int, is_open: bool) -> None:
    """A log of more than 30 trials is folded up, and can be opened without a script."""
    page = plan_html(msgspec.structs.replace(large, trials=large.trials[:num]))
    assert (re.search(r"<details[^>]* open", page) is not None) == is_open


def test_environment_is_complete(plan: PlanRecord, environment: Environment) -> None:
    """Everything that is known of the environment is in the page's last list."""
    page = Reader(plan_html(plan))
    known = {name.replace("_", " "): value for name, value in msgspec.structs.asdict(environment).items() if value != ""}
    assert page.texts["dt"][-len(known) :] == list(known)
    assert page.texts["dd"][-len(known) :] == [str(value) for value in known.values()]


def test_predictions_are_shown(bare_plan: PlanRecord) -> None:
    """A predicted plan has its peak, other GPUs and what is not modelled; pictures that need a run are sentences."""
    plan = msgspec.structs.replace(bare_plan, prediction=prediction_of("x"), predicted_peak_bytes=8 * GIB)
    page = Reader(plan_html(plan))
    assert {"Other GPUs", "Not modelled by the prediction"} <= set(page.texts["h2"])
    assert "of 100 MiB, predicted" in page.texts["dd"] and "the rest" in page.texts["li"]
    assert len([text for text in page.texts["p"] if "there is no picture" in text]) == 3


def test_what_is_not_there_has_no_heading(bare_plan: PlanRecord) -> None:
    """Without warnings, advice, skipped levers or an environment there is no heading of them; the rest is a sentence."""
    page = Reader(plan_html(bare_plan))
    assert page.texts["h2"] == ["Trade-offs", "Pictures", "Trials"] and "ul" not in page.tags
    assert {"No other setting of the levers was looked at.", "Nothing was run."} <= set(page.texts["p"])


def test_page_of_a_probe(result: ProbeResult) -> None:
    """The page of a probe has its facts, its trials and its picture, well formed and escaped."""
    page = Reader(probe_html(result))
    assert page.open == [] and page.texts["title"][0] == "autoaccum probe" and "script" not in page.tags
    assert all(what in page.texts["dt"] and value in page.texts["dd"] for what, value in probe_facts(result))
    assert page.texts["h3"] == ["Throughput against micro-batch"] and result.warnings[0] in page.texts["li"]


def test_large_plans_are_small_pages(large: PlanRecord) -> None:
    """A plan with 500 trials, 100 settings and 2,000 events is drawn in less than two seconds, into less than 1 MB."""
    began_s = time.process_time()
    page = plan_html(large)
    assert time.process_time() - began_s < 2.0
    assert len(page.encode()) < 1_000_000
    columns = large.timeline and columns_of(large.timeline)
    assert columns is not None and columns.num_events == 2000


# -- in a browser


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on PATH")

# runs beside the page, not in it: how wide it is, and which texts of its pictures clash or are cut off
LOOK = """
addEventListener('load', () => {
  const page = document.querySelector('iframe').contentDocument;
  const found = {width: page.documentElement.scrollWidth, texts: 0, clashes: [], outside: []};
  for (const svg of page.querySelectorAll('svg[role=img]')) {
    const whole = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].filter(text => text.textContent);
    const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
    found.texts += boxes.length;
    boxes.forEach(([one, a], place) => {
      if (a.left < whole.left - 1 || a.right > whole.right + 1 || a.top < whole.top - 1 || a.bottom > whole.bottom + 1)
        found.outside.push(one);
      for (const [other, b] of boxes.slice(place + 1))
        if (a.left + 1 < b.right && b.left + 1 < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
          found.clashes.push([one, other]);
    });
  }
  document.body.setAttribute('data-found', JSON.stringify(found));
});
"""


def dump(path: Path) -> str:
    """What a browser has made of the file."""
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options += f" --disable-component-update --disable-sync --user-data-dir={path.parent / 'browser'} --dump-dom"
    command = [str(BROWSER), *options.split(), path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, check=True).stdout


def looked_at(page: str, width_px: int, folder: Path) -> Any:
    """What `LOOK` finds where the window is that wide."""
    frame = f'<iframe srcdoc="{escape(page)}" style="width:{width_px}px;height:900px;border:0"></iframe>'
    path = folder / f"look{width_px}.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}<script>{LOOK}</script>", encoding="utf-8")
    found = re.search(r'data-found="([^"]*)"', dump(path))
    assert found is not None
    return json.loads(unescape(found[1]))


@needs_browser
def test_a_browser_reads_the_numbers_back(plan: PlanRecord, tmp_path: Path) -> None:
    """A browser without a network finds every number of the plan's settings and trials in the page that was written."""
    path = tmp_path / "plan.html"
    path.write_text(plan_html(plan), encoding="utf-8")
    page = Reader(dump(path))
    cells = page.texts["td"]
    for number, (setting, row) in enumerate(zip(ordered(plan.settings), setting_cells(plan).rows, strict=True), 1):
        shown = cells[cells.index(str(number)) :][3:6]
        assert shown == [f"{setting.micro_batch} x {setting.accumulation_steps}", *map(as_shown, row[3:5])]
    assert {"22.00 MiB", "500 ms", "44"} <= set(page.texts["dd"])
    rows = trial_cells(plan.trials).rows
    assert cells[-len(rows) * 7 :][3::7] == [row[3] for row in rows]


@needs_browser
def test_no_hostile_text_runs_in_a_browser(hostile: PlanRecord, tmp_path: Path) -> None:
    """A browser finds no script and no image in a page whose texts are full of them."""
    path = tmp_path / "plan.html"
    path.write_text(plan_html(hostile), encoding="utf-8")
    page = Reader(dump(path).replace("<br>", ""))
    assert not set(page.tags) & {"script", "img"} and SHOWN in page.texts["li"]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width_px", [360, 1200])
@pytest.mark.parametrize("name", ["plan", "large"])
def test_page_fits_its_window(name: str, width_px: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """On a phone and on a desk the page is not wider than its window, and no text of a picture is cut off or overlaps."""
    found = looked_at(plan_html(request.getfixturevalue(name)), width_px, tmp_path)
    assert found["width"] <= width_px and found["texts"] > 30
    assert (found["clashes"], found["outside"]) == ([], [])
