"""The plan that users hold: its ways out and back in, the sizes of other ranks, and that it cannot be changed."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoaccum
from autoaccum import InvalidRequestError, Plan, meeting, ranks
from autoaccum.records import Fit, OutOfMemory, PlanRecord
from autoaccum.report.pages import plan_fragment, plan_html
from autoaccum.report.text import plan_markdown, plan_text
from autoaccum.request import Request
from autoaccum.tune import tune_workload
from autoaccum.workload import Workload


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A real plan, limited by memory, with failed trials in it, as a search without a prediction leaves them."""
    workload = Workload(nn.Linear(256, 256), torch.randn(4, 256))
    return tune_workload(workload, Request(target_batch=500, predict=False), device="virtual:2MiB")


def some_plan(**values: Any) -> Plan:
    """A plan of seven rows in two micro-batches."""
    return Plan(
        **{
            "target_batch": 7,
            "world_size": 1,
            "effective_batch": 7,
            "micro_batch": 4,
            "accumulation_steps": 2,
            "micro_batch_sizes": (4, 3),
            "max_micro_batch": 5,
            "limited_by": "memory",
            "evidence": "exact",
            "budget_bytes": 100,
        }
        | values
    )


# -- ways out


def test_the_plan_is_a_real_one(plan: Plan) -> None:
    """The plan that these tests look at accumulates several micro-batches and has fits and failures in its log."""
    assert plan.accumulation_steps > 1 and plan.limited_by == "memory"
    assert {type(trial.outcome) for trial in plan.trials} == {Fit, OutOfMemory}


def test_str_is_a_short_summary(plan: Plan) -> None:
    """`str(plan)` is a few lines that begin with the sizes of one optimizer step."""
    lines = str(plan).splitlines()
    assert lines[0].startswith("Plan ") and "one optimizer step of 500 samples" in lines[0]
    assert str(plan) == plan_text(plan) and len(lines) < 15


def test_frame_has_every_trial(plan: Plan) -> None:
    """The data frame has one row for each trial, in the order run, with numbers as numbers."""
    frame = plan.to_frame()
    assert list(frame["micro_batch"]) == [trial.candidate.micro_batch for trial in plan.trials]
    assert list(frame["fits"]) == [isinstance(trial.outcome, Fit) for trial in plan.trials]
    assert frame["peak_bytes"].max() <= plan.budget_bytes
    assert frame["samples_per_s"].notna().sum() == frame["fits"].sum()


def test_frame_of_a_plan_without_trials() -> None:
    """A plan without trials gives an empty frame."""
    assert len(some_plan().to_frame()) == 0


def test_markdown_and_html_are_the_reports(plan: Plan) -> None:
    """`to_markdown` and `to_html` give the report of the plan, and notebooks show it as a part of their page."""
    assert plan.to_markdown() == plan_markdown(plan)
    assert plan.to_html() == plan_html(plan)
    assert plan._repr_html_() == plan_fragment(plan)
    assert str(plan.max_micro_batch) in plan.to_markdown() and str(plan.max_micro_batch) in plan.to_html()


def test_headroom_is_what_the_peak_leaves(plan: Plan) -> None:
    """The headroom and the measured peak add up to the budget, and nothing measured is no headroom."""
    assert plan.measured_peak_bytes is not None and plan.headroom_bytes is not None
    assert plan.headroom_bytes >= 0 and plan.headroom_bytes + plan.measured_peak_bytes == plan.budget_bytes
    assert some_plan().headroom_bytes is None


# -- JSON and files


def test_json_comes_back_equal(plan: Plan) -> None:
    """A plan is equal to itself after JSON, and is a Plan again, with all its ways out."""
    back = Plan.from_json(plan.to_json())
    assert back == plan and type(back) is Plan
    assert Plan.from_json(plan.to_json().encode()) == plan
    assert back.to_html() == plan.to_html()


def test_json_names_its_kind_and_schema(plan: Plan) -> None:
    """The JSON is an object that says what it is and in which schema."""
    written = json.loads(plan.to_json())
    assert (written["record"], written["schema_version"]) == ("autoaccum.Plan", 2)


def test_json_of_the_record_is_a_plan(plan: Plan) -> None:
    """What the command line writes, a plain record, reads as a Plan."""
    record = PlanRecord(**{name: getattr(plan, name) for name in PlanRecord.__struct_fields__})
    assert Plan.from_json(msgspec.json.encode(record)) == plan
    assert Plan.of(record) == plan


def test_file_comes_back_equal(plan: Plan, tmp_path: Path) -> None:
    """A saved plan loads again, from a path or from text, and replaces the file that was there."""
    path = tmp_path / "plan.json"
    path.write_text("something longer " * 1000)
    plan.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_save_into_a_missing_folder(plan: Plan, tmp_path: Path) -> None:
    """Saving into a folder that does not exist is an OSError."""
    with pytest.raises(FileNotFoundError):
        plan.save(tmp_path / "nowhere" / "plan.json")


def test_load_what_is_not_there(tmp_path: Path) -> None:
    """Loading a file that does not exist is an OSError."""
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "plan.json")


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    """The JSON of a plan after a change."""
    written = json.loads(some_plan().to_json())
    change(written)
    return json.dumps(written)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Is the file complete?"),
        ("null", "Was the file edited?"),
        ("[]", "Was the file edited?"),
        ("plan: 7\n", "Is the file complete?"),
        ("\x80\x04\x95pickled", "Is the file complete?"),
        ("{}", "not an autoaccum.Plan"),
        ('{"micro_batch": 4}', "not an autoaccum.Plan"),
        (damaged(lambda d: d.update(record="autoaccum.ProbeResult")), "its record is 'autoaccum.ProbeResult'"),
        (damaged(lambda d: d.update(schema_version=3)), "schema_version=3 is newer than this autoaccum reads (2)"),
        (damaged(lambda d: d.pop("target_batch")), "target_batch"),
        (damaged(lambda d: d.update(colour="red")), "colour"),
        (damaged(lambda d: d.update(budget_bytes="100")), "budget_bytes"),
        (damaged(lambda d: d.update(limited_by="mood")), "mood"),
        (damaged(lambda d: d.update(micro_batch_sizes=[4, 4])), "do not make up target_batch=7"),
        (damaged(lambda d: d.update(effective_batch=8)), "do not make up"),
        (damaged(lambda d: d.update(micro_batch_sizes=[7, 0])), "do not make up"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    """A damaged, newer or foreign file, or one whose sizes do not add up, is refused with the file's name."""
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(plan: Plan, share: float) -> None:
    """A file that was cut off anywhere is refused."""
    text = plan.to_json()
    with pytest.raises(InvalidRequestError, match=r"Is the file complete\?"):
        Plan.from_json(text[: int(len(text) * share)])


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    """A pickle is refused without being opened as one."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "sprung").touch, ())

    path = tmp_path / "plan.pkl"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InvalidRequestError):
        Plan.load(path)
    assert not (tmp_path / "sprung").exists()


# -- other ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "world_size", "options"),
    [
        (10, 3, {}),
        (11, 3, {"max_micro_batch": 2}),
        (31, 4, {"max_micro_batch": 3}),
        (50, 3, {"max_micro_batch": 8, "multiple_of": 4}),
        (24, 3, {"max_micro_batch": 3, "equal_micro_batches": True}),
        (3, 3, {}),
    ],
)
@pytest.mark.usefixtures("one_trace")
def test_schedule_is_what_the_ranks_run(
    target: int, world_size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any rank's plan knows the sizes that every other rank finds for itself, and together they are the target."""
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda group: world_size)
    monkeypatch.setattr(meeting.Meeting, "_joined", lambda self, group: torch.distributed.HashStore())
    monkeypatch.setattr(meeting.Meeting, "gather", lambda self, value: [value] * world_size)
    monkeypatch.setattr(meeting.Meeting, "leave", lambda self, error=None: self._over.set())
    plans = []
    for rank in range(world_size):
        monkeypatch.setattr(ranks.dist, "get_rank", lambda group, rank=rank: rank)
        request = Request(target_batch=target, predict=False, **options)
        plans.append(tune_workload(Workload(nn.Linear(4, 2), torch.randn(2, 4)), request, device="virtual:1MiB"))
    own = [plan.micro_batch_sizes for plan in plans]
    assert [plan.rank for plan in plans] == list(range(world_size))
    assert all([plan.schedule(rank) for rank in range(world_size)] == own for plan in plans)
    assert sum(map(sum, own)) == target


@given(st.integers(1, 2000), st.integers(1, 16), st.integers(1, 64), st.integers(1, 8))
@settings(max_examples=50)
def test_schedules_add_up(target: int, world_size: int, limit: int, multiple_of: int) -> None:
    """Over all ranks the schedules sum to the target, with no micro-batch above the limit and equally many on each rank."""
    target, limit = max(target, world_size), max(limit, multiple_of)
    first = autoaccum.choose.schedule_for(target, world_size, limit, multiple_of=multiple_of).sizes[0]
    plan = some_plan(
        target_batch=target,
        effective_batch=target,
        world_size=world_size,
        micro_batch=max(first),
        micro_batch_sizes=first,
        accumulation_steps=len(first),
        max_micro_batch=max(limit, max(first)),
        multiple_of=multiple_of,
    )
    schedules = [plan.schedule(rank) for rank in range(world_size)]
    assert sum(map(sum, schedules)) == target
    assert max(map(max, schedules)) <= plan.max_micro_batch
    assert schedules[0] == first


@pytest.mark.parametrize("rank", [-1, 1, 7])
def test_no_such_rank(rank: int) -> None:
    """A rank outside the world is refused with the ranks that there are."""
    with pytest.raises(InvalidRequestError, match=f"rank={rank} does not exist; expected 0 to 0"):
        some_plan().schedule(rank)


# -- in a training loop


def test_applied_changes_nothing(plan: Plan) -> None:
    """With every lever off, training under `applied` gives bit-identical weights, and leaves no hook or mode behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 1))
    twin, batch = copy.deepcopy(model), torch.randn(6, 4)
    for trained, under in ((model, True), (twin, False)):
        optimizer = torch.optim.AdamW(trained.parameters())
        if under:
            with plan.applied(trained, optimizer):
                trained(batch).mean().backward()
                optimizer.step()
        else:
            trained(batch).mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_applied_refuses_an_optimizer_of_another_model(plan: Plan) -> None:
    """An optimizer that trains nothing of the model is refused with every lever off as well; one that trains more is not."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with (
        pytest.raises(InvalidRequestError, match="no parameter of this Linear"),
        plan.applied(model, torch.optim.SGD(other.parameters(), lr=0.1)),
    ):
        pass
    with plan.applied(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)):
        pass


def test_applied_lets_errors_through(plan: Plan) -> None:
    """An error inside `applied` comes out as it is."""
    with pytest.raises(KeyError), plan.applied(nn.Linear(1, 1)):
        raise KeyError("own")


@pytest.mark.parametrize("device", ["cpu", "virtual:2.00 MiB", "cuda:1", "xpu:0", "mps"])
def test_autocast_of_any_device_changes_no_dtype(plan: Plan, device: str) -> None:
    """The autocast of a plan made on any device can be entered on this one, without a warning, and is off."""
    assert plan.environment is not None
    elsewhere = msgspec.structs.replace(plan, environment=msgspec.structs.replace(plan.environment, device=device))
    with elsewhere.autocast():
        assert nn.Linear(2, 2)(torch.randn(1, 2)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_without_an_environment() -> None:
    """A plan that does not know where it was made has an autocast as well."""
    with some_plan().autocast():
        assert not torch.is_autocast_enabled("cpu")


# -- a value


@pytest.mark.parametrize("name", ["micro_batch", "micro_batch_sizes", "trials", "something_new"])
def test_frozen(plan: Plan, name: str) -> None:
    """No field of a plan can be set, and none can be added."""
    with pytest.raises(AttributeError):
        setattr(plan, name, 1)


def test_equal_by_value(plan: Plan) -> None:
    """Two plans with the same values are equal, and can be members of one set."""
    other = Plan.from_json(plan.to_json())
    assert other is not plan and len({plan, other}) == 1
    assert some_plan() != some_plan(budget_bytes=101)


def test_copies_and_pickles(plan: Plan) -> None:
    """A plan survives copying, and pickling on the way to another process."""
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan and type(pickle.loads(pickle.dumps(plan))) is Plan


@pytest.mark.parametrize(
    "values",
    [
        {"effective_batch": 8},
        {"micro_batch_sizes": (4, 2)},
        {"micro_batch_sizes": (7, 0), "micro_batch": 7, "max_micro_batch": 7},
        {"micro_batch_sizes": ()},
        {"accumulation_steps": 3},
        {"micro_batch": 3},
        {"max_micro_batch": 3},
        {"rank": 1},
        {"world_size": 2},
    ],
)
def test_an_unsound_plan_cannot_be_made(values: dict[str, Any]) -> None:
    """A plan whose sizes do not make up its target, or are above what fits, cannot exist."""
    with pytest.raises(ValueError, match="do not make up target_batch=7"):
        some_plan(**values)


def test_endless_file_is_no_plan() -> None:
    """A file that is larger than any plan is not taken into memory."""
    with pytest.raises(InvalidRequestError, match="which no run is"):
        Plan.load("/dev/zero")


def test_name_of_a_damaged_file_is_only_shown(tmp_path: Path) -> None:
    """A control character in a file's name reaches no terminal by way of the error."""
    path = tmp_path / "\x1b[31m\nplan.json"
    path.write_text("{}")
    with pytest.raises(InvalidRequestError) as caught:
        Plan.load(path)
    assert str(caught.value).isprintable()
