"""Markup that is escaped by construction: a text becomes markup only through `tag`, which escapes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

# what neither HTML nor XML can hold: control characters, halves of surrogate pairs and the two that are no characters
_NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already and is put in as it is."""

    __slots__ = ()


def without_controls(text: str) -> str:
    """The text with a replacement sign for every character that a page cannot hold and a terminal would obey."""
    return _NOT_SHOWN.sub("\ufffd", text)


def escaped(text: str) -> Markup:
    """The text as markup that shows it, in an element or in quotes; markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(escape(without_controls(text)))


def joined(parts: Iterable[str]) -> Markup:
    """Texts and markup after one another."""
    return Markup("".join(map(escaped, parts)))


def tag(name: str, *children: str, **attributes: str | float) -> Markup:
    """An element: children that are no markup are escaped; of an attribute's name, `_` reads `-` and a last one is dropped.

    Example:
        >>> tag("td", "a < b", class_="note")
        '<td class="note">a &lt; b</td>'
    """
    shown = "".join(f' {_attribute(key)}="{escaped(_value(value))}"' for key, value in attributes.items())
    return Markup(f"<{name}{shown}>{joined(children)}</{name}>")


def _attribute(key: str) -> str:
    return key.removesuffix("_").replace("_", "-")


def _value(value: str | float) -> str:
    """Numbers to a tenth: what a pixel can show."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
