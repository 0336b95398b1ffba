"""The comparison of ways to train: their gradients, their turns, and what is made of their times."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import training
import training_report
import ways

MIB = 2**20


@pytest.fixture(autouse=True)
def forgetting() -> Iterator[None]:
    """What Accelerate keeps for the whole process is forgotten afterwards."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# -- gradients


@pytest.mark.parametrize("name", ["gpt", "bert"])
@pytest.mark.parametrize("count", [4, 5], ids=["full", "short"])
def test_accumulator_has_the_gradient_of_the_batch(name: str, count: int) -> None:
    """The Accumulator's gradient is the one of all rows in one, with a short last micro-batch as well."""
    assert ways.gradient_error(name, "plan, exact levers", 2, count) < 1e-5


@pytest.mark.parametrize("way", ["loop by hand", "Accelerate"])
def test_short_micro_batch_counts_too_much_elsewhere(way: str) -> None:
    """Ways that divide by the number of micro-batches are right for whole ones, and wrong when the last one is short."""
    errors = [ways.gradient_error("bert", way, 2, count) for count in (4, 5)]
    assert errors[0] < 1e-5 and errors[1] > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_every_way_tells_of_each_optimizer_step() -> None:
    """Every way calls its turn once before the first optimizer step and once after each, and ends when told."""
    case = ways.CASES["bert"]._replace(target_batch=4)
    for way, train in ways.WAYS.items():
        answers = iter([True, True, False])
        calls: list[Any] = []

        def turn(step: Any = None, calls: list[Any] = calls, answers: Any = answers) -> bool:
            calls.append(step)
            return bool(next(answers))

        train(case, 2, case.rows(8), turn)
        assert len(calls) == 3, way


# -- turns


class Stub:
    """Trains nothing: says its number, and dies after so many steps."""

    def __init__(self, log: list[int], number: int, steps: int = 100) -> None:
        self.log, self.number, self.left = log, number, steps

    def step(self) -> float:
        if not self.left:
            raise training.DiedError
        self.left -= 1
        self.log.append(self.number)
        return float(self.number)


def test_order_turns_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other round goes backwards, and the warm-up is not counted."""
    monkeypatch.setattr(training, "WARM_UP_ROUNDS", 1)
    log: list[int] = []
    times = training.in_turns([Stub(log, 1), Stub(log, 2), Stub(log, 3)], 2)  # type: ignore[list-item]
    assert log == [1, 2, 3, 3, 2, 1, 1, 2, 3]
    assert times == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_death_is_no_measurement() -> None:
    """Where one of them dies nothing of the turns counts."""
    log: list[int] = []
    assert training.in_turns([Stub(log, 1), Stub(log, 2, steps=3)], 5) is None  # type: ignore[list-item]


@pytest.mark.parametrize(("limit", "rows"), [(100, 64), (63, 32), (1, 1)])
def test_halving(limit: int, rows: int) -> None:
    """The first half of a half that trains is taken."""
    start: Callable[[int], Any] = lambda size: "trainer" if size <= limit else None  # noqa: E731
    assert training.halved(start, 64) == ("trainer", rows)


def test_halving_where_nothing_trains() -> None:
    """Where not even one row trains there is nothing to compare."""
    with pytest.raises(RuntimeError, match="not even one row"):
        training.halved(lambda size: None, 64)


@pytest.mark.slow
def test_process_that_trains_and_one_that_cannot() -> None:
    """A process takes steps in its turns; one that has no memory for them is no trainer, and leaves no process."""
    assert training.started("bert", "loop by hand", 16, 64 * MIB) is None
    trainer = training.started("bert", "loop by hand", 16, 2**40)
    assert trainer is not None
    try:
        assert trainer.step() > 0
    finally:
        trainer.end()
    assert not trainer._process.is_alive()


# -- the report


def test_ratio_with_its_interval() -> None:
    """The ratio is that of the medians, inside an interval that is a point where nothing varies."""
    assert training_report.ratio_of([2.0] * 5, [1.0] * 5) == (2.0, 2.0, 2.0)
    ratio, low, high = training_report.ratio_of([2.0, 2.2, 1.8, 2.1, 9.0], [1.0, 1.1, 0.9, 1.0, 1.0])
    assert ratio == 2.1 and low < ratio < high


@pytest.mark.parametrize(
    ("tuning_s", "step_s", "today_s", "steps"),
    [(10, 1.0, 1.5, 20), (10.1, 1.0, 1.5, 21), (10, 1.5, 1.5, None), (-3, 1, 2, 0)],
)
def test_paid_back(tuning_s: float, step_s: float, today_s: float, steps: int | None) -> None:
    """A search is paid back by whole steps, never by steps that are not faster, and at once when it took less time."""
    assert training_report.paid_back(tuning_s, step_s, today_s) == steps


def report() -> dict[str, Any]:
    """Results of two ways, the plan half as fast again."""
    way = {"gradient_error": {"full": 1e-7, "short": 2e-7}, "tuning_s": 20.0, "replays": 0}
    plan = {"way": training_report.BASE, "levers": "none", "micro_batch_sizes": [13, 12], "step_times_s": [1.0] * 4} | way
    by_hand = {"way": training_report.BY_HAND, "micro_batch_sizes": [8] * 4, "step_times_s": [1.5] * 4, "died": 1} | way
    by_hand["tuning_s"] = 5.0
    case = {"model": "gpt", "target_batch": 25, "cap_bytes": 300 * MIB, "ways": [plan, by_hand]}
    return {"environment": {"torch": "2.13.0"}, "models": [case]}


def test_table_of_ways() -> None:
    """The table has each way's micro-batches, its step over the plan's, its errors and when a search is paid back."""
    text = training_report.in_words(report())
    plan, by_hand = (line for line in text.splitlines() if line.startswith(("| plan", "| loop")))
    assert "2 of at most 13" in plan and "1.0e-07 / 2.0e-07" in plan and plan.endswith("| 20.0 s | 30 steps |")
    assert "4 of at most 8, 1 deaths" in by_hand and "1.500 (1.500 to 1.500)" in by_hand


@pytest.mark.parametrize(("load", "is_said"), [(0.4, False), (8.1, True)])
def test_busy_machine_is_said_to_be_one(load: float, is_said: bool) -> None:
    """Times that were taken beside other work are said to be."""
    found = report()
    found["environment"]["load_average"] = load
    assert ("these times say little" in training_report.in_words(found)) == is_said


def test_render(tmp_path: Path) -> None:
    """The tables are made again from the JSON alone."""
    path = tmp_path / "training.json"
    path.write_text(json.dumps(report()))
    training.main(["render", "--results", str(path)])
    assert path.with_suffix(".md").read_text() == training_report.in_words(report())
