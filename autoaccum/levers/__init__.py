"""The levers: how memory is traded for time. Each is turned inside a context and turned back on the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.levers.precision import autocast_for, under_autocast
from autoaccum.levers.space import LEVERS, Space, check_asked, common, space_for
from autoaccum.records import Levers

__all__ = [
    "LEVERS",
    "AbstractLever",
    "Space",
    "Subject",
    "applied",
    "autocast_for",
    "check_asked",
    "common",
    "space_for",
    "under_autocast",
]


@contextmanager
def applied(levers: Levers, subject: Subject) -> Iterator[None]:
    """Turn every lever while inside.

    Raises:
        InvalidRequestError: When the model is not one that these levers fit.
    """
    if levers == Levers():
        yield
        return
    with ExitStack() as stack:
        for lever in LEVERS:
            stack.enter_context(lever.applied(levers, subject))
        yield
