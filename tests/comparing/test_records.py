"""A comparison's JSON."""

from __future__ import annotations

import json

from autoaccum.comparing.compare import compare
from autoaccum.comparing.records import Comparison
from autoaccum.records import (
    from_json,
    to_json,
)

from .runs import plan


def test_comparison_is_read_from_its_json() -> None:
    """The JSON of a comparison says whether it passed, and can be read again."""
    found = compare(plan(), plan(peak=1500, step_s=None), 0.05)
    written = json.loads(to_json(found))
    assert (written["record"], written["passed"]) == ("autoaccum.Comparison", False)
    assert from_json(to_json(found), Comparison) == found
