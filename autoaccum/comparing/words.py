"""Texts of files where they cannot do harm: one short line, and in Markdown a code span, where nothing is markup."""

from __future__ import annotations

import re

from autoaccum.records import Candidate, Levers
from autoaccum.units import one_line

_BREAKING = re.compile(r"[`|\\]")  # what could end a code span, or the table cell around it


def in_words(candidate: Candidate) -> str:
    """A candidate in Markdown."""
    default = Levers()
    turned = []
    for name in Levers.__struct_fields__:
        value = getattr(candidate.levers, name)
        if value != getattr(default, name):
            turned.append(f"{name} {code_span(', '.join(value)) if isinstance(value, tuple) else value}")
    return f"micro-batch {candidate.micro_batch}, {', '.join(turned) or 'no levers'}"


def code_span(value: object) -> str:
    """Anything as a code span, in which nothing is markup."""
    text = _BREAKING.sub("?", one_line(str(value)))
    return f"`{text or '-'}`"
