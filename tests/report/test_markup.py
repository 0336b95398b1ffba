"""Markup: every text is escaped, and only markup is not."""

from __future__ import annotations

import xml.etree.ElementTree

import pytest

from autoaccum.report.markup import Markup, escaped, joined, tag

HOSTILE = "<script>alert(1)</script> \"><img src=x onerror='a()'> & | \n\t %s {x} ]]> -->"


def test_children_are_escaped() -> None:
    """A text inside an element is read back as it was, and adds no element."""
    element = xml.etree.ElementTree.fromstring(tag("p", HOSTILE))
    assert element.text == HOSTILE and len(element) == 0


def test_attributes_are_escaped() -> None:
    """A text in an attribute cannot leave its quotes."""
    element = xml.etree.ElementTree.fromstring(tag("p", title=HOSTILE))
    assert set(element.attrib) == {"title"} and element.attrib["title"].split() == HOSTILE.split()


def test_markup_is_put_in_as_it_is() -> None:
    """What `tag` made is not escaped again."""
    assert tag("tr", tag("td", "a & b")) == "<tr><td>a &amp; b</td></tr>"


def test_texts_among_markup_are_escaped() -> None:
    """Joining markup and texts escapes the texts only."""
    assert joined((Markup("<br>"), "<br>")) == "<br>&lt;br&gt;"


def test_names_of_attributes() -> None:
    """A name that Python keeps for itself ends in an underscore, and others stand for hyphens."""
    assert tag("g", class_="a", aria_hidden="true") == '<g class="a" aria-hidden="true"></g>'


@pytest.mark.parametrize(
    ("value", "shown"), [(1, "1"), (1.0, "1"), (2.26, "2.3"), (-0.5, "-0.5"), (10, "10"), (100.04, "100")]
)
def test_numbers_are_short(value: float, shown: str) -> None:
    """A number has at most one digit after its point."""
    assert tag("g", x=value) == f'<g x="{shown}"></g>'


@pytest.mark.parametrize("text", ["\x00", "\x1b[31m", "\ud800", "\ufffe", "\x0b\x7f\x85"])
def test_what_cannot_be_shown_is_replaced(text: str) -> None:
    """Characters that no page can hold are replaced, so that it stays well formed and can be written as UTF-8."""
    shown = escaped(f"a{text}b")
    assert "\ufffd" in shown and xml.etree.ElementTree.fromstring(f"<p>{shown}</p>").text == shown
    assert shown.encode("utf-8")
