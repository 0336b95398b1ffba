"""The notebooks run from top to bottom as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    """Every code cell runs, one after the other, and no output is stored in the file."""
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    if path.stem == "quickstart":
        assert isinstance(names["error"], float)
        assert names["error"] < 1e-5


def test_there_is_a_notebook() -> None:
    """The folder is not empty."""
    assert NOTEBOOKS
