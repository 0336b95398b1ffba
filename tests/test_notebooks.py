"""The notebooks run from top to bottom as they stand, and are stored with what they showed."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MACHINE = ("/home/", "/root/", "/tmp/", "/work/", "/usr/", "C:\\\\")
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def texts(output: dict[str, Any]) -> str:
    """All that an output shows, in whatever format."""
    return json.dumps([output.get("text"), output.get("data")])


@pytest.fixture
def settings_kept() -> Iterator[None]:
    """A notebook has a process of its own elsewhere: what it sets for all of torch ends with it here."""
    dtype, generator = torch.get_default_dtype(), torch.get_rng_state()
    others = random.getstate(), np.random.get_state()
    yield
    torch.set_default_dtype(dtype)
    torch.set_rng_state(generator)
    random.setstate(others[0])
    np.random.set_state(others[1])


LONG = (pytest.mark.slow, pytest.mark.timeout(1800))  # several searches, each with its traces


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=LONG if path.stem == "02_tradeoffs" else ()) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
@pytest.mark.usefixtures("settings_kept")
def test_notebook_runs(path: Path) -> None:
    """Every code cell runs, one after the other, without a warning, and comes to what its text says."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), f"{path.name}, cell {cell['id']}", "exec"), names)
    if path.stem in CLAIMS:
        CLAIMS[path.stem](names)


def quickstart(names: dict[str, Any]) -> None:
    assert isinstance(names["error"], float)
    assert names["error"] < 1e-5


def exactness(names: dict[str, Any]) -> None:
    exact = {"cross-entropy", "with dropout", "tagger, weight=tokens", "GroupNorm"}
    assert {name for name, result in names["results"].items() if result.exact} == exact
    assert all(bool(result.reasons) is not result.exact for result in names["results"].values())
    assert names["done"].returncode == 0, names["done"].stderr
    assert torch.equal(names["replayed"], names["straight"])


def tradeoffs(names: dict[str, Any]) -> None:
    plain, plan, lean = names["plain"], names["plan"], names["lean"]
    assert plan.timing is not None and plan.measured_peak_bytes <= 12 * 2**20
    assert plan.timing.median_s <= min(row.timing.median_s for row in plan.settings if row.timing) * 1.5
    assert lean.measured_peak_bytes < plain.measured_peak_bytes
    assert names["result"].levers.checkpointing == "full"
    assert torch.equal(names["other"], names["whole"])


CLAIMS = {"01_quickstart": quickstart, "02_tradeoffs": tradeoffs, "03_exactness": exactness}


@EACH
def test_notebook_was_run_from_top_to_bottom(path: Path) -> None:
    """Cells are numbered in order, and each that ends with a value or prints one shows it."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        body = ast.parse("".join(cell["source"])).body
        calls = (node.func for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Call))
        prints = any(isinstance(function, ast.Name) and function.id == "print" for function in calls)
        if prints or isinstance(body[-1], ast.Expr):
            assert cell["outputs"], f"cell {cell['id']} shows nothing"


@EACH
def test_stored_outputs_show_no_trouble_and_no_machine(path: Path) -> None:
    """No error, nothing on stderr, and no path of the machine on which the notebook was run."""
    for cell in code_cells(path):
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr", cell["id"]
            assert "Warning" not in texts(output), cell["id"]
            assert not [root for root in MACHINE if root in texts(output)], cell["id"]


def test_there_is_a_notebook() -> None:
    """The folder is not empty."""
    assert NOTEBOOKS
