"""The benchmark beside other finders: its own parts, and a small run of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import autoaccum

ROOT = Path(autoaccum.__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed with the package")


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's modules can be imported, as when its script runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("guess", [1, 7, 100, 3000])
@pytest.mark.parametrize("limit", [0, 1, 2, 99, 2000])
def test_true_limit_is_found_from_any_guess(limit: int, guess: int) -> None:
    """Wherever the search begins, it ends at the limit, having run it and the next size."""
    from side_by_side.measuring import true_limit

    tried: list[int] = []

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= limit

    assert true_limit(guess, fits) == limit
    assert {limit, limit + 1} - {0} <= set(tried)


@pytest.mark.usefixtures("side_by_side")
def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    """A tool that takes its process down gets a line that says by which signal."""
    from side_by_side.forks import in_fork

    said = in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), 20.0, tmp_path / "log.txt")
    assert said == {"error": "ended by SIGKILL"}


@pytest.mark.usefixtures("side_by_side")
def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """A search without an end costs its time limit."""
    from side_by_side.forks import in_fork

    def endless() -> dict[str, Any]:
        time.sleep(100)
        return {}

    began = time.monotonic()
    assert in_fork(endless, 0.3, tmp_path / "log.txt")["timed_out"]
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("side_by_side")
def test_readme_shows_the_figures() -> None:
    """The table in the README is what the recorded figures make."""
    from side_by_side.report import in_readme

    readme, report = (ROOT / "README.md").read_text(), json.loads((BENCHMARKS / "results" / "peers.json").read_text())
    assert in_readme(readme, report) == readme


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two pairs of model and cap, three tools, under a real cap."""
    if sys.platform != "linux":
        pytest.skip("RLIMIT_DATA caps allocations on Linux only")
    if find_spec("transformers") is None:
        pytest.skip("needs transformers, whose models it trains")
    path = tmp_path_factory.mktemp("peers") / "peers.json"
    asked = [sys.executable, str(BENCHMARKS / "peers.py"), "run", "--small", "--results", str(path)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert path.exists(), done.stderr[-4000:]
    return {**json.loads(path.read_text()), "table": path.with_suffix(".md").read_text()}


def answers(run: dict[str, Any], tool: str) -> list[dict[str, Any]]:
    return [pair["tools"][tool] for pair in run["pairs"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_answers_are_the_limit_by_brute_force(small_run: dict[str, Any]) -> None:
    """The limit found under a real cap is the one found by training at sizes around it, to a tenth or a row.

    Not to the row: the process that searched holds some more than the new ones, in the holes of the C library's heap.
    """
    for pair in small_run["pairs"]:
        limit = pair["limits"]["accumulating"]
        assert abs(pair["tools"]["autoaccum"]["answer"] - limit) <= max(1, limit // 10), pair


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_answers_train_under_the_same_cap(small_run: dict[str, Any]) -> None:
    """Twenty optimizer steps of two micro-batches of the answer run in a new process; one may be replayed."""
    trained = [one["training"] for one in answers(small_run, "autoaccum")]
    assert all(one["fits"] and one["replays"] <= 1 for one in trained), trained


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_searches_leave_nothing_changed(small_run: dict[str, Any]) -> None:
    """Weights, gradients, optimizer and random numbers are as before, to the bit."""
    assert [one["changed"] for one in answers(small_run, "autoaccum")] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_effective_batch_is_the_one_wanted(small_run: dict[str, Any]) -> None:
    """A training step takes as many samples as were asked for."""
    wanted = [pair["target_batch"] for pair in small_run["pairs"]]
    assert [one["training"]["effective_batch"] for one in answers(small_run, "autoaccum")] == wanted


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fewer_allocations_are_refused_than_with_accelerate(small_run: dict[str, Any]) -> None:
    """Memory runs out at most a tenth as often as when sizes are tried from the batch that is wanted downwards."""
    ours, theirs = (sum(one["ooms"] for one in answers(small_run, tool)) for tool in ("autoaccum", "accelerate"))
    assert 10 * ours <= theirs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_table_has_a_line_for_every_tool(small_run: dict[str, Any]) -> None:
    """Every tool that was run is in the summary, with how many of its answers were exact."""
    for tool in small_run["pairs"][0]["tools"]:
        assert f"| {tool} | " in small_run["table"]
