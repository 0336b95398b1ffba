"""Texts of files where they cannot do harm."""

from __future__ import annotations

import msgspec

from autoaccum.comparing.compare import compare
from autoaccum.comparing.markdown import comparison_markdown
from autoaccum.records import (
    Levers,
)

from .runs import HOST, WHOLE, plan, setting

HOSTILE = "`|\n\r\u2028 <script>alert(1)</script> ![x](http://a.b) \\| @all \x1b[2J\u202e ```"


def test_text_of_files_cannot_become_markup() -> None:
    """Whatever texts the files hold, the table keeps its shape and the texts stand in code spans."""
    levers = Levers(checkpointing="selective", checkpointed_blocks=1, block_names=(HOSTILE, "h.1"))
    named = dict.fromkeys(("model", "optimizer", "batch", "driver", "platform"), HOSTILE)
    ruled_out = setting(WHOLE, None, None, standing="does not fit", note=HOSTILE)
    base = plan(environment=msgspec.structs.replace(HOST, **named), settings=(setting(levers), setting(WHOLE)))
    new = plan(levers=levers, settings=(ruled_out,))
    found = compare(base, new, 0.05, base_name=HOSTILE, new_name="<b>", allow_different_environments=True)
    shown = comparison_markdown(found)
    assert shown.replace("\n", "").isprintable() and "\\" not in shown
    for line in shown.splitlines():
        outside = "".join(line.split("`")[::2]).replace(" -> ", "")
        assert line.count("`") % 2 == 0 and not set(outside) & set("<>[]@!")
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(found.rows) and {line.count("|") for line in table} == {7}
