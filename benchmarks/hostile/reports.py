"""Reports of runs whose every text is hostile, read back by parsers of HTML and of Markdown: what was text stays text."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import msgspec
from hostile.judging import Broken
from hostile.runs import PLAN, RESULT
from hostile.texts import storable
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from autoaccum.records import Fit, PlanRecord, ProbeResult, Skipped, Timeline
from autoaccum.report.pages import plan_fragment, plan_html, probe_html
from autoaccum.report.text import plan_markdown, plan_text, probe_markdown

GITHUB = MarkdownIt("gfm-like", {"linkify": False, "html": True})
TAME = "x"


@st.composite
def hostile_runs(draw: st.DrawFn) -> tuple[PlanRecord | ProbeResult, PlanRecord | ProbeResult]:
    """A run with hostile texts, and the same run with tame ones in their place."""
    make = draw(st.sampled_from((plan_with, plan_with, result_with)))
    shown = storable.map(lambda text: text[:2000] if text.strip() else TAME)  # nothing at all has no place in a report
    texts = draw(st.lists(shown, min_size=4, max_size=4))
    turn = draw(st.integers(0, 3))
    return make(lambda place: texts[(place + turn) % 4]), make(lambda place: TAME)


def plan_with(text: Callable[[int], str]) -> PlanRecord:
    """The plan with these texts, by number of their place."""
    assert PLAN.environment is not None and PLAN.prediction is not None
    outlook = msgspec.structs.replace(PLAN.prediction.outlooks[0], gpu=text(5))
    return msgspec.structs.replace(
        PLAN,
        levers=msgspec.structs.replace(PLAN.levers, block_names=(text(0),)),
        settings=tuple(msgspec.structs.replace(setting, note=text(place)) for place, setting in enumerate(PLAN.settings)),
        trials=tuple(_with_message(trial, text(1)) for trial in PLAN.trials),
        advice=(text(2), text(3)),
        warnings=(text(3), text(0)),
        skipped=(Skipped(lever=text(0), level=text(1), reason=text(2)),),
        prediction=msgspec.structs.replace(
            PLAN.prediction,
            gpu=text(1),
            parts=((text(2), 5), ("cached", 6)),
            not_modelled=(text(3), text(1)),
            outlooks=(outlook,),
        ),
        timeline=Timeline(
            title=text(0),
            held_bytes={f"a{text(1)}": (1, 2, 3), f"b{text(2)}": (0, 3, 1)},
            phases=((0, "data"),),
            limit_bytes=4,
        ),
        environment=_environment(text),
    )


def result_with(text: Callable[[int], str]) -> ProbeResult:
    """The probe's result with these texts."""
    return msgspec.structs.replace(
        RESULT,
        trials=tuple(_with_message(trial, text(1)) for trial in RESULT.trials),
        warnings=(text(2), text(3)),
        environment=_environment(text),
    )


def _with_message(trial: Any, text: str) -> Any:
    if isinstance(trial.outcome, Fit):
        return trial
    return msgspec.structs.replace(trial, outcome=msgspec.structs.replace(trial.outcome, message=text))


def _environment(text: Callable[[int], str]) -> Any:
    names = [name for name in RESULT.environment.__struct_fields__ if name != "world_size"]
    return msgspec.structs.replace(RESULT.environment, **{name: text(place) for place, name in enumerate(names)})


class Skeleton(HTMLParser):
    """The tags and attributes of a page, without what only texts decide: their number of lines and their places."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.seen: set[tuple[str, ...]] = set()
        self.others: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.seen.add((tag, *sorted(name for name, _ in attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """The innermost element ends."""
        if not self.open or self.open.pop() != tag:
            self.others.append(f"</{tag}>")

    def handle_comment(self, data: str) -> None:
        """No page has one."""
        self.others.append("comment")

    def handle_pi(self, data: str) -> None:
        """No page has one."""
        self.others.append("processing instruction")

    def unknown_decl(self, data: str) -> None:
        """No page has one."""
        self.others.append("declaration")


def check_html(case: tuple[PlanRecord | ProbeResult, PlanRecord | ProbeResult]) -> None:
    """The page has the elements and attributes of a tame one, and no control characters."""
    hostile, tame = case
    shows = (plan_html, plan_fragment) if isinstance(hostile, PlanRecord) else (probe_html,)
    for show in shows:
        text = show(hostile)  # type: ignore[arg-type]
        page, expected = Skeleton(text), Skeleton(show(tame))  # type: ignore[arg-type]
        if page.seen - expected.seen or page.others or page.open:
            raise Broken(f"a text became markup: {sorted(page.seen - expected.seen)[:2]} {page.others[:2]}")
        if any((ord(char) < 32 and char not in "\t\n\r") or 127 <= ord(char) < 160 for char in text):
            raise Broken("a control character in the page")


def check_markdown(case: tuple[PlanRecord | ProbeResult, PlanRecord | ProbeResult]) -> None:
    """The blocks of the report are those of a tame one, line by line, and no text is markup or code."""
    hostile, tame = case
    show = plan_markdown if isinstance(hostile, PlanRecord) else probe_markdown
    text, expected = show(hostile), show(tame)  # type: ignore[arg-type]
    if blocks_of(text) != blocks_of(expected):
        raise Broken("a text became markup in the Markdown")
    if any((ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160 for char in text):
        raise Broken("a control character in the Markdown")
    words = plan_text(hostile) if isinstance(hostile, PlanRecord) else ""
    if any((ord(char) < 32 and char not in "\t\n") or 127 <= ord(char) < 160 for char in words):
        raise Broken("a control character in the text for terminals")


def blocks_of(markdown: str) -> list[str]:
    """The kinds of everything in it but plain text."""
    found = []
    for token in GITHUB.parse(markdown):
        found.append(token.type)
        found += [inner.type for inner in token.children or () if inner.type not in ("text", "text_special")]
    return found


CASES = hostile_runs()
