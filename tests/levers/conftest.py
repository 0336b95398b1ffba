"""One thread and the same generators for every test; a test that asks for a `case` runs on every model."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from .models import CASES, seed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a `case` on every model."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Tiny models are slower on several threads; what was there before is left out of collections of garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same generators."""
    seed()
