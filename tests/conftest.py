"""One hypothesis profile for all tests: the same examples in every run, and no deadline, because CI machines stall."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("autoaccum", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("autoaccum")
