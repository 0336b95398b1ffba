"""Remembered plans: the same call costs one trial, and whatever lies in the folder, the plan is a sound one."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor, nn

import autoaccum
from autoaccum import Plan
from autoaccum.records import Fit, OutOfMemory, Trial

TARGET = 2  # so few sizes are tried without a prediction


class Block(nn.Module):
    """Holds eight times what it hands on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.activation = nn.Parameter(torch.ones(8)), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(x[:, :, None] * self.wide).mean(2)
        return out


class Net(nn.Module):
    """Repeated blocks."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Fuse(nn.Module):
    """Runs out of memory above a number of rows, which is no part of what it is."""

    limit: ClassVar[list[int]] = [10**9]

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        out: Tensor = self.layer(x)
        return out


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(autouse=True)
def sound_fuse() -> None:
    """A fuse that lets everything through."""
    Fuse.limit[0] = 10**9


def tune(cache: Path | str | None, model: nn.Module | None = None, sample: Any = None, **changes: Any) -> Plan:
    """A small call, with these changes."""
    arguments: dict[str, Any] = {
        "target_batch": TARGET,
        "training_step": mean_of,
        "optimizer": sgd,
        "device": "virtual:1MiB",
        "levers": "none",
        **changes,
    }
    model = Fuse() if model is None else model
    return autoaccum.autotune(model, torch.ones(2, 4) if sample is None else sample, cache=cache, **arguments)


def tune_tightly(cache: Path) -> Plan:
    """A call whose plan turns levers."""
    levers = {"checkpointing": ["full"]}
    return tune(cache, Net(), torch.ones(2, 64), device="virtual:16KiB", target_batch=3, levers=levers)


def only_file(folder: Path) -> Path:
    """The one file there is; nothing temporary lies beside it."""
    (path,) = folder.iterdir()
    return path


def sizes_of(plan: Plan) -> tuple[Any, ...]:
    """What a training loop takes from a plan."""
    return plan.micro_batch_sizes, plan.levers, plan.max_micro_batch, plan.limited_by


# -- remembering


@pytest.mark.slow
def test_second_call_costs_one_trial(tmp_path: Path) -> None:
    """The same call again runs a single probe of the plan's micro-batch, under its levers, and gives the same plan."""
    first, second = tune_tightly(tmp_path), tune_tightly(tmp_path)
    (trial,) = second.trials
    assert len(first.trials) > 1 and first.levers.checkpointing == "full"
    assert (trial.purpose, trial.candidate.micro_batch, trial.candidate.levers) == ("probe", first.micro_batch, first.levers)
    assert sizes_of(second) == sizes_of(first)


def test_remembered_plan_says_so(tmp_path: Path) -> None:
    """It says that it was remembered, claims no more than it ran, and its peak is what was measured now."""
    first, second = tune(tmp_path), tune(tmp_path)
    assert not any("remembered" in warning for warning in first.warnings)
    assert any("remembered plan" in warning for warning in second.warnings)
    (trial,) = second.trials
    assert isinstance(trial.outcome, Fit)
    assert (second.evidence, second.measured_peak_bytes) == ("measured", trial.outcome.peak_bytes)
    assert second.measured_peak_bytes is not None and second.measured_peak_bytes <= second.budget_bytes


@pytest.mark.slow
def test_remembered_plan_keeps_its_trade_offs(tmp_path: Path) -> None:
    """Step time, settings and advice are those of the search that found it."""
    first, second = tune_tightly(tmp_path), tune_tightly(tmp_path)
    assert second.settings == first.settings and second.advice == first.advice
    assert (second.step_time_s, second.samples_per_s) == (first.step_time_s, first.samples_per_s)


def test_being_remembered_often_changes_nothing(tmp_path: Path) -> None:
    """The tenth call is as the second one: nothing piles up in the plan or in its file."""
    tune(tmp_path)
    text, plans = only_file(tmp_path).read_bytes(), [tune(tmp_path) for _ in range(3)]
    assert len({(sizes_of(plan), plan.warnings) for plan in plans}) == 1
    assert only_file(tmp_path).read_bytes() == text


def test_folder_is_made(tmp_path: Path) -> None:
    """The folder need not be there yet, and may be given as text."""
    tune(str(tmp_path / "one" / "two"))
    assert only_file(tmp_path / "one" / "two").suffix == ".json"


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembering is off unless it is asked for."""
    monkeypatch.chdir(tmp_path)
    tune(None)
    assert list(tmp_path.iterdir()) == []


def test_file_holds_the_plan_and_what_it_is_of(tmp_path: Path) -> None:
    """It is JSON that a person can read: the fingerprint in words, and the plan as `Plan.load` takes it."""
    plan = tune(tmp_path)
    held = json.loads(only_file(tmp_path).read_text(encoding="utf-8"))
    assert held["fingerprint"]["model_name"] == "Fuse"
    assert Plan.from_json(held["plan"]) == plan


def test_model_is_left_as_it_was(tmp_path: Path) -> None:
    """A remembered plan changes neither weights nor generators either."""
    tune(tmp_path)
    model, generator = Fuse(), torch.get_rng_state()
    weight = model.layer.weight.clone()
    tune(tmp_path, model)
    assert torch.equal(model.layer.weight, weight) and torch.equal(torch.get_rng_state(), generator)


# -- what is another call


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"target_batch": 3},
        {"device": "virtual:2MiB"},
        {"budget": "512KiB"},
        {"levers": {"optimizer_impl": ["foreach"]}},
        {"objective": "memory"},
        {"max_micro_batch": 1},
        {"multiple_of": 2},
        {"equal_micro_batches": True},
        {"optimizer": torch.optim.AdamW},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2)},
        {"model": Fuse(8), "sample": torch.ones(2, 8)},
        {"model": nn.Linear(4, 4)},
        {"sample": torch.ones(2, 3, 4)},
        {"model": Fuse().double(), "sample": torch.ones(2, 4).double()},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_any_change_is_another_call(changes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever decides the outcome has a plan of its own beside the first one."""
    first = tune(tmp_path)
    other = tune(tmp_path, **changes)
    assert not any("remembered" in warning for warning in other.warnings)
    assert len(list(tmp_path.iterdir())) == 2
    assert sizes_of(tune(tmp_path)) == sizes_of(first)


@pytest.mark.slow
def test_plan_that_the_clock_cut_short_is_not_remembered(tmp_path: Path) -> None:
    """What was found in a second is no answer for a call that leaves more time."""
    target, device = 64, "virtual:1MiB"
    Fuse.limit[0] = 32
    hasty = tune(tmp_path, target_batch=target, device=device, time_budget_s=1e-6)
    patient, whole = (tune(cache, target_batch=target, device=device) for cache in (tmp_path, None))
    assert any("time_budget_s" in warning for warning in hasty.warnings)
    assert patient.micro_batch == whole.micro_batch > hasty.micro_batch
    assert not any("time_budget_s" in warning for warning in patient.warnings)


# -- what does not fit any more


def test_plan_that_no_longer_fits_is_searched_again(tmp_path: Path) -> None:
    """Where the remembered micro-batch runs out of memory now, a search follows, and its plan is the one remembered."""
    tune(tmp_path)
    Fuse.limit[0] = 1
    second, third = tune(tmp_path), tune(tmp_path)
    assert second.micro_batch == 1 and isinstance(second.trials[0].outcome, OutOfMemory)
    assert any("does not fit any more" in warning for warning in second.warnings)
    assert third.micro_batch == 1 and len(third.trials) == 1


def test_error_of_the_users_own_passes_through(tmp_path: Path) -> None:
    """A bug that came into the model meanwhile is raised as it is, and the remembered plan stays."""
    tune(tmp_path)
    text = only_file(tmp_path).read_bytes()

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        raise KeyError("missing")

    broken.__qualname__, broken.__code__ = mean_of.__qualname__, broken.__code__
    with pytest.raises(KeyError):
        tune(tmp_path, training_step=broken)
    assert text in [path.read_bytes() for path in tmp_path.iterdir()]


# -- whatever lies there


def changed(text: str, **changes: Any) -> str:
    """The file with other values in its plan."""
    held = json.loads(text)
    held["plan"] = json.dumps(json.loads(held["plan"]) | changes)
    return json.dumps(held)


def without_fingerprint(text: str) -> str:
    return json.dumps(json.loads(text)["plan"])


def of_another_setup(text: str) -> str:
    held = json.loads(text)
    held["fingerprint"]["torch"] = "1.0"
    return json.dumps(held)


DAMAGE: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "half of it": lambda text: text[: len(text) // 2],
    "garbage": lambda text: b"\x00\xff\xfe garbage",
    "another encoding": lambda text: text.encode("utf-16"),
    "null": lambda text: "null",
    "a list": lambda text: "[1, 2]",
    "the plan alone": without_fingerprint,
    "pickle": lambda text: pickle.dumps({"plan": text}),
    "deep JSON": lambda text: "[" * 200_000,
    "deep plan": lambda text: json.dumps({**json.loads(text), "plan": '{"trials":' * 100_000}),
    "another setup": of_another_setup,
    "a newer schema": lambda text: changed(text, schema_version=10**6),
    "an unknown field": lambda text: changed(text, surprise=1),
    "no target": lambda text: changed(text, target_batch=None),
    "sizes that do not sum up": lambda text: changed(text, micro_batch_sizes=[1, 2]),
    "a plan for another target": lambda text: changed(
        text, target_batch=1, effective_batch=1, micro_batch_sizes=[1], micro_batch=1
    ),
    "a plan for more ranks": lambda text: changed(text, world_size=2, micro_batch_sizes=[1], micro_batch=1),
    "a peak below zero": lambda text: changed(text, measured_peak_bytes=-1),
    "levers that are none": lambda text: changed(text, levers={"checkpointing": "often"}),
    "more blocks than there are": lambda text: changed(text, levers={"checkpointing": "full", "checkpointed_blocks": 10**6}),
    "a size beyond the memory": lambda text: changed(
        text,
        target_batch=10**5,
        effective_batch=10**5,
        micro_batch_sizes=[10**5],
        micro_batch=10**5,
        max_micro_batch=10**5,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_ignored_and_replaced(name: str, tmp_path: Path) -> None:
    """Whatever has become of the file, the plan is that of a search, says so, and is there again at the next call."""
    first = tune(tmp_path)
    path = only_file(tmp_path)
    text = path.read_text(encoding="utf-8")
    damaged = DAMAGE[name](text)
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    second = tune(tmp_path)
    assert sizes_of(second) == sizes_of(first)
    assert any("remembered plan" in w and ("ignored" in w or "does not fit" in w) for w in second.warnings)
    assert only_file(tmp_path) == path
    third = tune(tmp_path)
    assert sizes_of(third) == sizes_of(first) and len(third.trials) == 1


def test_file_beyond_all_measure_is_not_read(tmp_path: Path) -> None:
    """A file of gigabytes, sparse or not, is not taken into memory."""
    first = tune(tmp_path)
    with only_file(tmp_path).open("r+b") as file:
        file.truncate(2**40)
    second = tune(tmp_path)
    assert sizes_of(second) == sizes_of(first)
    assert only_file(tmp_path).stat().st_size < 2**20


def test_folder_in_place_of_the_file_is_no_plan(tmp_path: Path) -> None:
    """It is ignored and stays, and the plan says that it could not be remembered."""
    first = tune(tmp_path)
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    second = tune(tmp_path)
    assert sizes_of(second) == sizes_of(first)
    assert any("could not be remembered" in warning for warning in second.warnings)
    assert only_file(tmp_path).is_dir()


@pytest.mark.parametrize("place", ["/proc/autoaccum", "file/below"])
def test_folder_that_cannot_be_written_is_said(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file can be written the plan comes all the same, with the reason."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    plan = tune(place)
    assert plan.micro_batch_sizes == (TARGET,)
    assert any("could not be remembered" in warning for warning in plan.warnings)


def test_full_disk_leaves_the_plan_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves neither half a plan nor a temporary file."""
    tune(tmp_path)
    text = only_file(tmp_path).read_bytes()
    Fuse.limit[0] = 1

    def full(self: Path, target: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    plan = tune(tmp_path)
    assert plan.micro_batch == 1
    assert any("No space left on device" in warning for warning in plan.warnings)
    assert only_file(tmp_path).read_bytes() == text


def test_remembered_plans_hold_no_more_than_a_plan(tmp_path: Path) -> None:
    """A remembered plan is as frozen and as complete as one that was searched: it goes through JSON unchanged."""
    tune(tmp_path)
    plan = tune(tmp_path)
    assert Plan.from_json(plan.to_json()) == plan
    assert all(isinstance(trial, Trial) for trial in plan.trials)
    assert msgspec.json.decode(plan.to_json())["record"] == "autoaccum.Plan"
