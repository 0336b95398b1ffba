"""Plans as HTML: well formed, complete, and with every text from outside escaped."""

from __future__ import annotations

from html.parser import HTMLParser

import msgspec

from autoaccum.records import PlanRecord
from autoaccum.report.pages import plan_html
from autoaccum.report.tables import TABLE_HEADER, table_rows
from autoaccum.report.text import plan_lines


class Reader(HTMLParser):
    """The tags of a page, the text of each cell and item, and whether all tags are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[self.open[-1]][-1] += data


def test_every_tag_is_closed(plan: PlanRecord) -> None:
    """The fragment is well formed: every tag is closed in the right order."""
    assert Reader(plan_html(plan)).open == []


def test_no_text_becomes_markup(plan: PlanRecord) -> None:
    """A model called `<script>` and a warning with tags are shown as they are, and add no tag to the page."""
    page = Reader(plan_html(plan))
    assert set(page.tags) == {"h3", "table", "tr", "th", "td", "thead", "tbody", "ul", "li"}
    assert any("<script>alert(1)</script>" in cell for cell in page.texts["td"])
    assert page.texts["li"] == ["a | b\nc <i>d</i> [red]e[/red]"]


def test_facts_and_trials_are_complete(plan: PlanRecord) -> None:
    """The page has every fact of the plan and every cell of its table of trials, in order."""
    page = Reader(plan_html(plan))
    facts = plan_lines(plan)
    assert page.texts["th"] == [what for what, _ in facts] + list(TABLE_HEADER)
    assert page.texts["td"] == [value for _, value in facts] + [cell for row in table_rows(plan.trials) for cell in row]


def test_quotes_are_escaped(bare_plan: PlanRecord) -> None:
    """Quotes and ampersands of a text are escaped, so that the fragment can be put anywhere."""
    plan = msgspec.structs.replace(bare_plan, warnings=("\"a\" & 'b'",))
    assert "&quot;a&quot; &amp; &#x27;b&#x27;" in plan_html(plan)


def test_no_list_without_warnings(bare_plan: PlanRecord) -> None:
    """A plan without warnings has no empty list."""
    assert "ul" not in Reader(plan_html(bare_plan)).tags
