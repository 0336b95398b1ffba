"""One hostile case: tried under limits of time and memory, and judged. Allowed is a result, or an error that reads well."""

from __future__ import annotations

import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import autoaccum
from autoaccum.errors import AutoaccumError

LIMIT_S = 10.0  # of one case, also on a machine that does other things as well
LIMIT_BYTES = 3 * 2**30  # of this process; it holds half a gigabyte before the first case
MOST_LETTERS = 1000  # of an error's text
_PACKAGE = Path(autoaccum.__file__).parent


class Late(BaseException):
    """The time of a case is up; nothing that catches `Exception` keeps it."""


class Broken(AssertionError):
    """A result or an error is not what was promised."""


class Verdict(NamedTuple):
    """What came of a case. `fault`: what is wrong, in words that are the same for all cases of a kind; "" for nothing."""

    was_refused: bool
    fault: str = ""


def verdict_on(check: Callable[[Any], object], case: Any) -> Verdict:
    """Try one case."""
    try:
        with _time_limited():
            check(case)
    except AutoaccumError as error:
        return Verdict(True, _unreadable(error))
    except Late:
        return Verdict(False, f"no end within {LIMIT_S:g} s")
    except Exception as error:  # noqa: BLE001 - whatever else comes out is what is looked for
        return Verdict(False, f"{type(error).__name__} in {_place_of(error)}: {' '.join(str(error)[:100].split())}")
    return Verdict(False)


def _unreadable(error: AutoaccumError) -> str:
    text = str(error)
    wrong = {
        "no text": not text.strip(),
        f"more than {MOST_LETTERS} letters": len(text) > MOST_LETTERS,
        "control characters": not text.isprintable(),
    }
    said = ", ".join(what for what, holds in wrong.items() if holds)
    return said and f"{type(error).__name__} in {_place_of(error)}: {said}"


def _place_of(error: BaseException) -> str:
    """The innermost function of the package that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)] or frames[-1:]
    return f"{Path(own[-1].filename).name}:{own[-1].name}"


@contextmanager
def _time_limited() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    others = signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 1.0)  # again: a callback may swallow one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


@contextmanager
def memory_limited() -> Iterator[None]:
    """Data of this process stays below the limit: what would need more is a `MemoryError`, or torch's own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
