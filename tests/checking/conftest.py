"""Running out of memory ends in a full collection of garbage; what was there before the tests need not be looked at."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def older_objects_set_aside() -> Iterator[None]:
    """Modules and test objects are left out of collections, which are fast then."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
