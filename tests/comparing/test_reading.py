"""What a comparison is given: shares that can be read, and files that may hold anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoaccum.comparing.reading import parse_max_regression, read_run
from autoaccum.comparing.records import Run
from autoaccum.errors import InvalidRequestError
from autoaccum.records import (
    SCHEMA_VERSION,
    CheckResult,
    to_json,
)

from .runs import WHOLE, plan, result, setting, timing


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5%", 0.05), ("0.05", 0.05), ("5 %", 0.05), (" 2.5% ", 0.025), (".1", 0.1), ("0", 0.0), ("0%", 0.0), ("99.9%", 0.999)],
)
def test_share_is_read(text: str, expected: float) -> None:
    """A percentage and a fraction both say how much worse is allowed."""
    assert parse_max_regression(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "-5%", "-0.05", "nan", "inf", "five", "5%%", "%", "1e-2", "5 percent", "5%" * 99, "\u0665%"]
)
def test_nonsense_is_no_share(text: str) -> None:
    """What is no share is refused, with what one looks like."""
    with pytest.raises(InvalidRequestError, match=r'cannot be read; expected .*"5%" or "0.05"'):
        parse_max_regression(text)


@pytest.mark.parametrize("text", ["5", "1", "1.5", "100"])
def test_bare_number_from_one_on_is_ambiguous(text: str) -> None:
    """A number without a percent sign that is no fraction is refused, with both of its meanings."""
    with pytest.raises(InvalidRequestError, match=f"could mean {text} % or {text} times as much; write a % sign"):
        parse_max_regression(text)


@pytest.mark.parametrize("text", ["100%", "250 %"])
def test_share_that_allows_everything_is_refused(text: str) -> None:
    """A gate that nothing can fail is refused."""
    with pytest.raises(InvalidRequestError, match="would allow everything"):
        parse_max_regression(text)


@pytest.mark.parametrize("run", [plan(), result()], ids=["plan", "result"])
def test_run_is_read_from_its_json(run: Run) -> None:
    """A plan and a probe's result are told apart by the file itself."""
    assert read_run(to_json(run).encode(), "run.json") == run


def changed_text(run: Run, **changes: Any) -> str:
    return json.dumps({**json.loads(to_json(run)), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        "\xff\xfe",
        '{"record": "autoaccum.Plan"}',
        '{"record": 7}',
        to_json(plan())[:-40],
        to_json(CheckResult(exact=True, relative_error=0.0, norm_ratio=1.0)),
        changed_text(plan(), schema_version=SCHEMA_VERSION + 1),
        changed_text(plan(), target_batch=65),
        changed_text(plan(), extra=1),
        changed_text(plan(), measured_peak_bytes="__import__('os').abort()"),
        changed_text(plan(), step_time_s=-1.0),
        changed_text(plan(), max_micro_batch=10**400),
        changed_text(result(), budget_bytes=-5),
        changed_text(result(), levers={"checkpointed_blocks": 10**400}),
        changed_text(result(), levers=3),
        changed_text(plan(), timing=json.loads(to_json(timing(-1.0)))),
        changed_text(plan(), settings=[json.loads(to_json(setting(WHOLE, -7)))]),
    ],
)
def test_damaged_file_is_named(text: str) -> None:
    """Whatever is wrong with a file, the error is one line that begins with its name."""
    with pytest.raises(InvalidRequestError, match=r"^run\.json: ") as refused:
        read_run(text.encode("latin-1"), "run.json")
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


def test_error_about_a_file_cannot_write_to_a_terminal() -> None:
    """Control characters of a file or its name do not reach the error."""
    text = changed_text(plan(), **{"\x1b[2J\n::stop-commands::": 1})
    with pytest.raises(InvalidRequestError) as refused:
        read_run(text, "run\n\x1b[1m.json")
    assert str(refused.value).isprintable()
