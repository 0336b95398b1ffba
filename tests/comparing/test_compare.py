"""A comparison has something to compare, and comes to an end whatever the files hold."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.comparing.compare import compare
from autoaccum.comparing.markdown import comparison_markdown
from autoaccum.comparing.reading import read_run
from autoaccum.comparing.records import Comparison
from autoaccum.errors import InvalidRequestError
from autoaccum.records import (
    from_json,
    to_json,
)

from .runs import FULL, WHOLE, plan, timing, trial


def test_what_has_nothing_in_common_is_refused() -> None:
    """Where no measurement can be judged there is no verdict, and a gate must not pass."""
    base, new = plan(levers=WHOLE, step_s=None), plan(step_s=None)
    with pytest.raises(InvalidRequestError, match="no measurement in common"):
        compare(base, new, 0.05)


NUMBERS = st.one_of(st.none(), st.integers(0, 2**53))


@given(peak=NUMBERS, budget=st.integers(0, 2**53), median=st.floats(0, 1e18), off=st.floats(0, 1e18), num=st.integers(0, 9))
def test_any_numbers_of_a_file_give_a_verdict(peak: int | None, budget: int, median: float, off: float, num: int) -> None:
    """Zeros and huge numbers end in a verdict or in a refusal, and the report can be written and read again."""
    strange = plan(peak=peak, step_s=timing(median, off if num % 2 else None, num), budget_bytes=budget)
    strange = msgspec.structs.replace(strange, trials=(trial(32, peak or 0, "confirm"), trial(64, FULL)))
    for base, new in ((plan(), read_run(to_json(strange), "x")), (strange, plan()), (strange, strange)):
        found = compare(base, new, 0.05)
        assert comparison_markdown(found).endswith(".\n")
        assert from_json(to_json(found), Comparison) == found
