"""The same generators for every test; a test that asks for a `case` runs on every model."""

from __future__ import annotations

import pytest

from .models import CASES, seed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a `case` on every model."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same generators."""
    seed()
