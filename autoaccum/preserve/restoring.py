"""What putting something back has in common: a function without arguments, run with its siblings and not interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

Restore = Callable[[], None]


def run_all(restores: Iterable[Restore], failures: list[RuntimeError]) -> None:
    """What can be put back is, even where a lost device refuses its part."""
    for put_back in restores:
        try:
            put_back()
        except RuntimeError as failure:
            failures.append(failure)


def refill(registry: MutableMapping[Any, Any], before: dict[Any, Any]) -> None:
    """Restore a registry in place, keeping its identity and order."""
    if differs(registry, before):
        registry.clear()
        registry.update(before)


def differs(registry: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Whether other objects are in a registry than before, or in another order."""
    return list(registry) != list(before) or any(registry[key] is not value for key, value in before.items())


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C while inside; it is raised on the way out."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # Python delivers signals to the main thread only, and cannot put back a handler that it did not set
        return
    pending: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)
