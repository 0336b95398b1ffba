"""An accumulator under a plan, and what it carries from one run to the next."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import autoaccum
from autoaccum import Accumulator, Plan
from autoaccum.errors import InvalidRequestError


class Wide(nn.Module):
    """Needs much memory for every row; may be told to have room for few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4096), nn.Linear(4096, 1)
        self.room = 10_000

    def forward(self, batch: Tensor) -> Tensor:
        if len(batch) > self.room:
            raise torch.OutOfMemoryError("full")
        return self.second(self.first(batch).relu()).pow(2).mean()  # type: ignore[no-any-return]


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Twenty rows in three micro-batches, found on a virtual device."""
    model = Wide()
    return autoaccum.autotune(
        model,
        rows(2),
        20,
        optimizer=SGD(model.parameters(), lr=0.1),
        device="virtual:700KiB",
        progress=False,
        levers="none",
    )


def accumulator(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(model, SGD(model.parameters(), lr=0.1), **options)


def test_sizes_are_the_plans(plan: Plan) -> None:
    """A window of just the plan's rows is cut as the plan says."""
    assert plan.accumulation_steps > 1
    step = accumulator(Wide(), plan=plan).step(rows(20))
    assert step.micro_batch_sizes == plan.micro_batch_sizes
    assert step.replays == 0


@pytest.mark.parametrize("count", [1, 7, 19, 45])
def test_other_windows_are_cut_within_the_plans_micro_batch(plan: Plan, count: int) -> None:
    """A window of another number of rows has near even sizes, none above the plan's micro-batch."""
    sizes = accumulator(Wide(), plan=plan).step(rows(count)).micro_batch_sizes
    assert sum(size or 0 for size in sizes) == count
    assert max(size or 0 for size in sizes) <= plan.micro_batch
    assert max(size or 0 for size in sizes) - min(size or 0 for size in sizes) <= 1


def test_plan_from_a_file(plan: Plan, tmp_path: Path) -> None:
    """A plan that was saved and loaded cuts as the one that was found."""
    plan.save(tmp_path / "plan.json")
    for loaded in (Plan.load(tmp_path / "plan.json"), Plan.from_json(plan.to_json())):
        assert accumulator(Wide(), plan=loaded).step(rows(20)).micro_batch_sizes == plan.micro_batch_sizes


def test_windows_take_the_plans_number_of_micro_batches(plan: Plan) -> None:
    """Without `steps` the plan says how many micro-batches make a window."""
    windows = list(accumulator(Wide(), plan=plan).windows(rows(2 * plan.accumulation_steps + 1).split(1)))
    assert [len(window) for window in windows] == [plan.accumulation_steps, plan.accumulation_steps, 1]


def test_plan_that_does_not_hold(plan: Plan) -> None:
    """Where memory is scarcer than it was for the plan, the window is replayed below the plan's size."""
    model = Wide()
    model.room = plan.micro_batch - 1
    acc = accumulator(model, plan=plan)
    first, second = acc.step(rows(20)), acc.step(rows(20))
    assert (first.replays, second.replays) == (1, 0)
    assert max(size or 0 for size in first.micro_batch_sizes) <= model.room


def test_plan_for_other_ranks(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    """A plan that was made for several ranks is used for its micro-batch only, which is said."""
    values = json.loads(plan.to_json())
    half = plan.target_batch // 2
    values.update(world_size=2, micro_batch_sizes=[half], micro_batch=half, accumulation_steps=1, max_micro_batch=half)
    other = Plan.from_json(json.dumps(values))
    acc = accumulator(Wide(), plan=other)
    assert "the plan is for 2 ranks and there are 1" in caplog.text
    assert acc.step(rows(3)).micro_batch_sizes == (3,)


# -- state


def test_state_goes_through_json_and_a_checkpoint(tmp_path: Path) -> None:
    """The state is made of plain values, which JSON and torch's safe loading both take."""
    model = Wide()
    model.room = 3
    acc = accumulator(model, micro_batch=8)
    acc.step(rows(8))
    state = acc.state_dict()
    torch.save(state, tmp_path / "state.pt")
    for loaded in (json.loads(json.dumps(state)), torch.load(tmp_path / "state.pt", weights_only=True)):
        after = accumulator(model, micro_batch=8)
        after.load_state_dict(loaded)
        assert after.state_dict() == state


def test_limits_are_carried_over_to_another_micro_batch() -> None:
    """After loading, what ran out of memory before is not tried again, whatever micro-batch is asked for now."""
    model = Wide()
    model.room = 3
    acc = accumulator(model, micro_batch=8)
    assert acc.step(rows(8)).replays == 2
    for micro_batch in (2, 8, 100):
        after = accumulator(model, micro_batch=micro_batch)
        after.load_state_dict(acc.state_dict())
        step = after.step(rows(8))
        assert step.replays == 0
        assert step.micro_batch_sizes == (2, 2, 2, 2)


def test_counts_go_on() -> None:
    """Windows, skipped ones and replays are counted, and go on after loading."""
    model = Wide()
    acc = accumulator(model, micro_batch=2)
    acc.step(rows(3))
    acc.step(None)
    state = acc.state_dict()
    assert (state["windows"], state["skipped"], state["replays"]) == (2, 1, 0)
    after = accumulator(model, micro_batch=4)
    after.load_state_dict(state)
    after.step(rows(3))
    assert after.state_dict()["windows"] == 3


def test_resumed_training_is_the_same() -> None:
    """Two windows with a reload in between end where two without one do: nothing is carried over besides the limits."""
    through, resumed = Wide(), Wide()
    acc = accumulator(through, micro_batch=3)
    acc.step(rows(7))
    acc.step(rows(8))
    first = accumulator(resumed, micro_batch=3)
    first.step(rows(7))
    second = accumulator(resumed, micro_batch=3)
    second.load_state_dict(first.state_dict())
    second.step(rows(8))
    assert torch.equal(through.first.weight, resumed.first.weight)


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        3,
        {"version": 2},
        {"version": 1},
        {"version": 1, "windows": 1, "skipped": 0, "replays": 0, "caps": [{"limit": 4}]},
        {"version": 1, "windows": 1, "skipped": 0, "replays": 0, "caps": [{"shape": [], "limit": 4}]},
        {"version": 1, "windows": "many", "skipped": 0, "replays": 0, "caps": []},
    ],
)
def test_state_that_is_none_is_refused(state: Any) -> None:
    """Something else than a state is refused, and what was learned stays."""
    model = Wide()
    model.room = 3
    acc = accumulator(model, micro_batch=8)
    acc.step(rows(8))
    before = acc.state_dict()
    with pytest.raises(InvalidRequestError, match="state"):
        acc.load_state_dict(state)
    assert acc.state_dict() == before


def test_accumulator_can_be_pickled_and_copied() -> None:
    """Before its first window it goes through pickle and deepcopy with its model, as other training objects do."""
    model = nn.Linear(3, 2)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, loss_fn=nn.CrossEntropyLoss())
    for other in (pickle.loads(pickle.dumps(acc)), copy.deepcopy(acc)):
        assert other.step((torch.randn(5, 3), torch.randint(2, (5,)))).micro_batch_sizes == (2, 2, 1)
