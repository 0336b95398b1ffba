"""The time that all ranks go by."""

from __future__ import annotations

import time

from autoaccum.session.clock import Clock


def test_alone_time_runs() -> None:
    """With one rank its own time counts."""
    clock = Clock()
    time.sleep(0.01)
    assert 0.01 <= clock.elapsed_s() <= clock.own_s()


def test_with_others_the_slowest_counts() -> None:
    """With several ranks time stands still until they meet, and is then the slowest one's."""
    clock = Clock()
    clock.is_shared = True
    time.sleep(0.01)
    assert clock.elapsed_s() == 0
    clock.agree([1.0, 3.0, 2.0])
    assert clock.elapsed_s() == 3.0
