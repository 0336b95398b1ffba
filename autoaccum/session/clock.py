"""How long a search has taken, the same on every rank: all decide alike whether their time is up."""

from __future__ import annotations

import time
from typing import final


@final
class Clock:
    """Runs from when it was made.

    Args:
        is_shared: Whether other ranks go by it as well. It then stands still until they have met.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._agreed_s = 0.0
        self.is_shared = False

    def own_s(self) -> float:
        """Seconds by this rank's own clock."""
        return time.monotonic() - self._begun

    def elapsed_s(self) -> float:
        """Seconds that count: with several ranks, what the slowest one had when they met last."""
        return self._agreed_s if self.is_shared else self.own_s()

    def agree(self, of_ranks: list[float]) -> None:
        """Ranks have met, and this is what each had."""
        self._agreed_s = max(of_ranks)
