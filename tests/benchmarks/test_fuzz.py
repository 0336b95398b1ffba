"""Hostile input, a few cases of every kind: a result that keeps its promise, or an own error that reads well."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import autoaccum
from autoaccum.errors import InvalidRequestError

pytestmark = pytest.mark.slow

PATH = Path(autoaccum.__file__).parents[1] / "benchmarks" / "fuzz.py"
SPEC = importlib.util.spec_from_file_location("fuzz", PATH)
assert SPEC is not None and SPEC.loader is not None
fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)

SLOW = {"transformers targets": 3, "remembered plans": 5, "class names": 5, "pages": 20, "Markdown": 20, "samples": 60}


@pytest.mark.filterwarnings("ignore")  # of torch, about types that are odd on purpose
@pytest.mark.parametrize("name", fuzz.INPUTS)
def test_hostile_input_is_handled(name: str) -> None:
    """No case ends in an exception that is not autoaccum's own, without end, or with an error that nobody can read."""
    with fuzz.memory_limited():
        tally = fuzz.tried(name, SLOW.get(name, 100))
    assert tally.cases == SLOW.get(name, 100) and tally.faults == {}


def loop(case: Any) -> None:
    while True:
        pass


def fail(case: Any) -> None:
    raise KeyError("other")


def refuse(text: str) -> Any:
    def check(case: Any) -> None:
        raise InvalidRequestError(text)

    return check


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (loop, "no end within"),
        (fail, "KeyError"),
        (refuse(" "), "no text"),
        (refuse("a" * 1001), "more than 1000 letters"),
        (refuse("a\x1b"), "control characters"),
        (refuse("a\nb"), "control characters"),
        (lambda case: bytearray(10 * 2**30), "MemoryError"),
    ],
)
def test_faults_are_seen(check: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another exception, an endless loop, too much memory and an error without a readable text are faults."""
    monkeypatch.setattr("hostile.judging.LIMIT_S", 0.1 if check is loop else 10.0)
    with fuzz.memory_limited():
        assert fault in fuzz.verdict_on(check, None).fault


def test_what_is_refused_in_words_is_no_fault() -> None:
    """An own error with a readable text is what is wanted."""
    assert fuzz.verdict_on(refuse("expected a size"), None) == (True, "")
