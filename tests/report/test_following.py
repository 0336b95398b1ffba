"""Whether a search is shown, and that both who may follow one are told the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from autoaccum.report.following import Nobody, following
from autoaccum.report.progress import ProgressBar


@pytest.mark.parametrize(
    ("progress", "is_terminal", "kind"),
    [
        (True, False, ProgressBar),
        (False, True, Nobody),
        (None, True, ProgressBar),
        (None, False, Nobody),
    ],
)
def test_bar_where_it_is_wanted(
    progress: bool | None, is_terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar is shown when it is asked for, and where nothing is said when stderr is a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with following(progress) as follower:
        assert type(follower) is kind


def test_bar_ends_with_an_error() -> None:
    """The bar is gone when the search raises, and the error comes out."""
    with pytest.raises(KeyError), following(True) as follower:
        raise KeyError
    assert isinstance(follower, ProgressBar) and not follower._progress.live.is_started


def test_bar_draws_no_random_number(run_child: Callable[..., Any]) -> None:
    """Importing what draws the bar leaves Python's generator as it was."""
    assert run_child(
        """
        import random
        from autoaccum.report.following import following
        before = random.getstate()
        with following(True):
            pass
        answer(random.getstate() == before)
        """
    )
