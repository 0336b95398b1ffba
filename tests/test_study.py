"""Trials in a study: taken over once, never run twice at a time, and nothing that somebody else wrote is trusted."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import Tensor, nn

import autoaccum
from autoaccum import Plan
from autoaccum.errors import AutoaccumError, InvalidRequestError
from autoaccum.fingerprint import fingerprint_of
from autoaccum.records import Candidate, Fit, Levers, Outcome, OutOfMemory, Refused, Trial, to_json
from autoaccum.request import Request
from autoaccum.session import Search as SearchHere
from autoaccum.study import Study
from autoaccum.tradeoffs.points import Point, point_of
from autoaccum.tune import tune_workload
from autoaccum.workload import Workload

PLAIN = Levers()
FULL = Levers(checkpointing="full", checkpointed_blocks=2)
NAMED = Levers(checkpointing="full", checkpointed_blocks=2, block_names=("h.0", "h.1"))
FITS = Fit(peak_bytes=600, step_times_s=(1.0, 1.25, 1.5))


@pytest.fixture(params=["journal", "sqlite", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Every kind of storage."""
    named = {"journal": str(tmp_path / "runs.log"), "sqlite": f"sqlite:///{tmp_path / 'runs.db'}"}
    return named.get(request.param) or optuna.storages.InMemoryStorage()


@pytest.fixture
def in_memory() -> optuna.storages.InMemoryStorage:
    """The storage that costs nothing."""
    return optuna.storages.InMemoryStorage()


def study(storage: Any, *, name: str = "one", objective: str = "throughput", seed: int = 0) -> Study:
    return Study(storage, {"model": name}, budget_bytes=1000, objective=objective, seed=seed)


def trial(size: int, outcome: Outcome = FITS, levers: Levers = PLAIN, purpose: Any = "confirm") -> Trial:
    return Trial(
        candidate=Candidate(micro_batch=size, levers=levers), outcome=outcome, wall_s=0.5, rows_per_step=48, purpose=purpose
    )


def run(into: Study, *trials: Trial) -> None:
    """As a search does."""
    for one in trials:
        into.begin(one.candidate)
        into.end(one)


def kept(storage: Any) -> list[optuna.trial.FrozenTrial]:
    """What anybody who opens the storage with Optuna sees, of all studies in it."""
    opened = _opened(storage)
    names = optuna.get_all_study_names(opened)
    return [found for name in names for found in optuna.load_study(study_name=name, storage=opened).get_trials()]


def raw(storage: Any) -> optuna.Study:
    """The study itself, to do to it what others may do."""
    opened = _opened(storage)
    (name,) = optuna.get_all_study_names(opened)
    return optuna.load_study(study_name=name, storage=opened)


def _opened(storage: Any) -> Any:
    if isinstance(storage, str) and storage.endswith(".log"):
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage))
    return storage


# -- a storage that fails


class Full(optuna.storages.InMemoryStorage):
    """Has no room left once `is_full` is set."""

    is_full = False

    def _refuse(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def create_new_trial(self, *args: Any, **more: Any) -> int:
        self._refuse()
        return super().create_new_trial(*args, **more)

    def set_trial_user_attr(self, *args: Any, **more: Any) -> None:
        self._refuse()
        super().set_trial_user_attr(*args, **more)

    def set_trial_state_values(self, *args: Any, **more: Any) -> bool:
        self._refuse()
        return super().set_trial_state_values(*args, **more)


@pytest.mark.parametrize("at", ["begin", "end"])
def test_storage_that_fails_is_named(at: str) -> None:
    """A disk that is full when a trial begins or ends is an error of ours, which names the storage and its cause."""
    full = Full()
    found = study(full)
    if at == "end":
        found.begin(trial(8).candidate)
    full.is_full = True
    with pytest.raises(AutoaccumError, match=r"storage=.* failed: OSError: .*No space left.* disk full") as caught:
        run(found, trial(8)) if at == "begin" else found.end(trial(8))
    assert isinstance(caught.value.__cause__, OSError)


def test_storage_that_fails_leaves_the_users_error_alone() -> None:
    """What ended a trial comes out, even where the storage cannot take that down."""
    full = Full()
    found = study(full)
    found.begin(trial(8).candidate)
    full.is_full = True
    found.abandon()


# -- what is stored


def test_trials_come_back_as_they_were(storage: Any) -> None:
    """Every trial is kept whole: another run of the same search has them all, in the order run."""
    trials = [
        trial(8, purpose="probe"),
        trial(48, OutOfMemory(cause="allocator", phase="forward", message="too large")),
        trial(1, Refused(bound="floor")),
        trial(16, levers=NAMED),
    ]
    run(study(storage), *trials)
    assert study(storage).news() == trials


def test_news_are_told_once(in_memory: Any) -> None:
    """What was heard already, and what one has run oneself, is no news."""
    one, other = study(in_memory), study(in_memory)
    run(one, trial(8))
    assert (one.news(), other.news(), other.news()) == ([], [trial(8)], [])
    run(other, trial(16))
    assert (one.news(), one.news()) == ([trial(16)], [])


def test_measured_setting_has_its_step_time_as_value(storage: Any) -> None:
    """Whole optimizer steps are complete, and their value is the median of their seconds."""
    run(study(storage), trial(16))
    (found,) = kept(storage)
    assert (found.state, found.values) == (TrialState.COMPLETE, [1.25])


def test_memory_objective_has_step_time_and_peak(in_memory: Any) -> None:
    """Where the peak is what counts, a trial has two values."""
    run(study(in_memory, objective="memory"), trial(16))
    assert kept(in_memory)[0].values == [1.25, 600.0]


@pytest.mark.parametrize(
    "unfinished",
    [
        trial(16, purpose="probe"),
        trial(16, OutOfMemory(cause="budget", peak_bytes=1500)),
        trial(16, Refused(bound="ceiling")),
        trial(16, Fit(peak_bytes=600)),
    ],
    ids=["probe", "memory", "refused", "not timed"],
)
def test_what_is_no_measurement_is_pruned(unfinished: Trial, in_memory: Any) -> None:
    """Probes, failures and steps that were not timed have no value."""
    run(study(in_memory), unfinished)
    (found,) = kept(in_memory)
    assert (found.state, found.values) == (TrialState.PRUNED, None)


@pytest.mark.parametrize(
    ("outcome", "excess"),
    [
        (FITS, -0.4),
        (OutOfMemory(cause="budget", peak_bytes=1500), 0.5),
        (OutOfMemory(cause="allocator"), 1.0),
        (Refused(bound="ceiling"), 1.0),
    ],
    ids=["fits", "above the budget", "no peak", "refused"],
)
def test_memory_is_a_constraint(outcome: Outcome, excess: float, in_memory: Any) -> None:
    """By how much of the budget a peak is above it is a constraint, which only what fits satisfies."""
    run(study(in_memory), trial(16, outcome))
    (found,) = kept(in_memory)
    (value,) = [value for name, value in found.system_attrs.items() if "constraint" in name and "memory" in name]
    assert value == pytest.approx(excess)


def test_parameters_are_the_levers_and_the_micro_batch(storage: Any) -> None:
    """Whoever opens the study sees what was run under the levers' own names."""
    run(study(storage), trial(16, levers=FULL))
    assert kept(storage)[0].params == {
        "checkpointing": "full",
        "checkpointed_blocks": 2,
        "precision": "fp32",
        "optimizer_impl": "default",
        "offload": "off",
        "micro_batch": 16,
    }


def test_study_says_what_it_is_of(in_memory: Any) -> None:
    """The fingerprint stands in the study, in words."""
    study(in_memory)
    assert raw(in_memory).user_attrs == {"model": "one"}
    assert raw(in_memory).study_name.startswith("autoaccum-")


def test_another_search_in_the_same_storage_is_another_study(storage: Any) -> None:
    """Trials of another model are never taken over, though they lie side by side."""
    run(study(storage, name="one"), trial(8))
    other = study(storage, name="other")
    assert other.news() == []
    run(other, trial(16))
    assert len(kept(storage)) == 2 and study(storage, name="one").news() == [trial(8)]


def test_trial_that_was_never_begun_can_be_ended(in_memory: Any) -> None:
    """A worker that died left a trial that somebody else writes down."""
    study(in_memory).end(trial(8, OutOfMemory(cause="process")))
    assert study(in_memory).news() == [trial(8, OutOfMemory(cause="process"))]


# -- who runs what


def test_what_another_machine_runs_is_busy(storage: Any) -> None:
    """A setting is busy for others from its beginning to its end, and never for the one that runs it."""
    one, other = study(storage), study(storage)
    one.begin(trial(16, levers=FULL).candidate)
    assert (one.busy(), other.busy()) == (set(), {Point(FULL, 16)})
    one.end(trial(16, levers=FULL))
    assert other.busy() == set()


def test_callers_own_blocks_are_busy_too(in_memory: Any) -> None:
    """A setting with blocks by name is known again by them."""
    one, other = study(in_memory), study(in_memory)
    one.begin(trial(16, levers=NAMED).candidate)
    assert other.busy() == {Point(NAMED, 16)}


def test_two_that_take_turns_do_not_mix_up_their_trials(in_memory: Any) -> None:
    """Whatever the order in which two processes begin and end, each trial is written where it belongs."""
    one, other = study(in_memory), study(in_memory)
    for size in range(1, 9):
        one.begin(Candidate(micro_batch=size))
        other.begin(Candidate(micro_batch=size + 100))
        other.end(trial(size + 100))
        one.end(trial(size))
    found = study(in_memory).news()
    assert {point_of(one).micro_batch for one in found} == {*range(1, 9), *range(101, 109)}
    assert all(
        json.loads(one.user_attrs["trial"])["candidate"]["micro_batch"] == one.params["micro_batch"]
        for one in kept(in_memory)
    )


def test_what_others_queue_does_not_stop_a_search(in_memory: Any) -> None:
    """A suggestion that was queued from a dashboard, or by a process that died, neither is run nor piles up."""
    mine = study(in_memory)
    raw(in_memory).enqueue_trial({"micro_batch": 777, "checkpointing": "off"})
    for size in range(1, 13):
        run(mine, trial(size))
    assert [point_of(one).micro_batch for one in study(in_memory).news()] == list(range(1, 13))
    assert len(kept(in_memory)) <= 12 + 2


def test_trial_of_a_process_that_is_gone_has_failed(storage: Any) -> None:
    """A trial that was running when its process was killed is ended, and its setting is free again."""
    study(storage).begin(trial(16).candidate)
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    _own(storage, f"{socket.gethostname()}:{gone.stdout.strip()}")
    again = study(storage)
    assert ([found.state for found in kept(storage)], again.busy(), again.news()) == ([TrialState.FAIL], set(), [])


@pytest.mark.parametrize("owner", [f"{socket.gethostname()}:{os.getppid()}", "elsewhere:1"], ids=["process", "machine"])
def test_trial_of_somebody_who_may_be_there_is_left_alone(owner: str, in_memory: Any) -> None:
    """What another process or machine is running goes on."""
    study(in_memory).begin(trial(16).candidate)
    _own(in_memory, owner)
    assert study(in_memory).busy() == {Point(PLAIN, 16)}
    assert kept(in_memory)[0].state == TrialState.RUNNING


def test_trial_that_somebody_else_has_ended_can_be_ended(in_memory: Any) -> None:
    """Two machines that find the same abandoned trial at the same time do not fail at it."""
    one = study(in_memory)
    one.begin(trial(16).candidate)
    _own(in_memory, f"{socket.gethostname()}:999999999")
    listed = raw(in_memory).get_trials()
    raw(in_memory).tell(0, state=TrialState.FAIL)
    study_of = type(raw(in_memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_of, "get_trials", lambda self, **more: listed)  # as it looked a moment ago
        study(in_memory)
    assert kept(in_memory)[0].state == TrialState.FAIL


def _own(storage: Any, owner: Any) -> None:
    """Say that the only trial is somebody else's."""
    opened = raw(storage)
    (found,) = opened.get_trials()
    optuna.Trial(opened, found._trial_id).set_user_attr("owner", owner)


# -- what others may have written

SOUND = to_json(trial(4, Fit(peak_bytes=1, step_times_s=(1.5,))))
HOSTILE: dict[str, Any] = {
    "nothing": None,
    "number": 5,
    "list": [1],
    "object": {"candidate": 1},
    "empty": "",
    "null": "null",
    "half": SOUND[:40],
    "deep": "[" * 100_000,
    "surrogate": "\ud800",
    "code": "__import__('os').system('true')",
    "unknown field": SOUND.replace('"wall_s"', '"surprise": 1, "wall_s"'),
    "no rows": SOUND.replace('"micro_batch": 4', '"micro_batch": 0'),
    "rows below zero": SOUND.replace('"micro_batch": 4', '"micro_batch": -3'),
    "rows beyond all": SOUND.replace('"micro_batch": 4', '"micro_batch": ' + "9" * 300),
    "time of zero": SOUND.replace("1.5", "0.0"),
    "time below zero": SOUND.replace("1.5", "-1.0"),
    "time without end": SOUND.replace("1.5", "1e999"),
    "peak below zero": SOUND.replace('"peak_bytes": 1', '"peak_bytes": -5'),
    "step of nothing": SOUND.replace('"rows_per_step": 48', '"rows_per_step": 0'),
    "blocks below zero": SOUND.replace('"checkpointed_blocks": 0', '"checkpointed_blocks": -1'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_trial_is_ignored(name: str, in_memory: Any) -> None:
    """What is no trial, or none that can have run, is left out, and the sound ones beside it are taken."""
    run(study(in_memory), trial(8))
    assert HOSTILE[name] != SOUND
    raw(in_memory).add_trial(optuna.create_trial(state=TrialState.PRUNED, user_attrs={"trial": HOSTILE[name]}))
    assert study(in_memory).news() == [trial(8)]


@pytest.mark.parametrize(
    "owner", [None, 5, "", "x", ":", "vm:abc", f"{socket.gethostname()}:abc", f"{socket.gethostname()}:-1"]
)
def test_owner_of_any_shape_is_no_error(owner: Any, in_memory: Any) -> None:
    """A running trial whose owner nobody understands does not keep a search from starting."""
    study(in_memory)
    raw(in_memory).ask().set_user_attr("owner", owner)
    study(in_memory).busy()


def test_foreign_trials_in_the_study_are_no_settings(in_memory: Any) -> None:
    """Trials with other parameters, finished or running, are nobody's settings."""
    study(in_memory)
    space = {f"x{index}": optuna.distributions.FloatDistribution(0, 1) for index in range(8)}
    raw(in_memory).ask(space)
    raw(in_memory).tell(raw(in_memory).ask(space), 1.0)
    mine = study(in_memory)
    assert (mine.news(), mine.busy()) == ([], set())


def test_fits_above_the_budget_of_now_are_none(tmp_path: Path) -> None:
    """Where the device has less free memory than when the trials ran, what was above it then does not fit now."""
    storage, model, sample = str(tmp_path / "runs.log"), nn.Linear(256, 1), torch.ones(2, 256)
    with pytest.MonkeyPatch.context() as patch:
        first = tune(storage, model, sample=sample, levers="none")
        room = (first.measured_peak_bytes or 0) - 512
        patch.setattr("autoaccum.devices.virtual.VirtualDevice.free_bytes", lambda self: 0)
        patch.setattr("autoaccum.devices.virtual.VirtualDevice.held_bytes", lambda self, resident: room)
        second = tune(storage, model, sample=sample, levers="none")
    assert second.budget_bytes == room
    assert second.measured_peak_bytes is not None and second.measured_peak_bytes <= room


# -- storages


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        pytest.param(object(), id="object"),
        "",
        "runs.txt",
        "nosuch://host/runs",
        "/nonexistent/runs.log",
        "sqlite:////nonexistent/runs.db",
        "redis://localhost",
    ],
    ids=repr,
)
def test_wrong_storage_is_refused_in_words(wrong: Any) -> None:
    """What cannot be opened is named, with what is wrong and what was expected."""
    with pytest.raises(InvalidRequestError, match=r"(?s)cannot be opened: .*Expected a URL"):
        study(wrong)


@pytest.mark.parametrize("text", ["garbage\n{}\n", "\x00\x01\n\n", '{"op_code": 77}\n{}\n'])
def test_file_that_is_no_journal_is_refused(text: str, tmp_path: Path) -> None:
    """A file of something else is not taken for a study, and stays as it is."""
    (tmp_path / "notes.log").write_text(text)
    with pytest.raises(InvalidRequestError, match="cannot be opened"):
        study(str(tmp_path / "notes.log"))
    assert (tmp_path / "notes.log").read_text() == text


def test_database_that_another_process_is_making_is_opened(in_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two processes make the tables of a database at the same moment, the one that comes second tries again."""
    from sqlalchemy.exc import OperationalError

    create, failures = optuna.create_study, [OperationalError("CREATE TABLE studies", None, Exception("already exists"))]

    def creating(**arguments: Any) -> optuna.Study:
        if failures:
            raise failures.pop()
        return create(**arguments)

    monkeypatch.setattr(optuna, "create_study", creating)
    run(study(in_memory), trial(8))
    assert len(kept(in_memory)) == 1


def test_wrong_storage_is_refused_before_anything_runs() -> None:
    """The model is not touched for a storage that cannot be opened."""
    seen: list[int] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return model(batch).mean()

    with pytest.raises(InvalidRequestError, match="cannot be opened"):
        autoaccum.autotune(
            nn.Linear(4, 2), torch.ones(2, 4), 2, training_step=step, device="virtual:1MiB", storage="nosuch://host"
        )
    assert seen == []


@pytest.mark.parametrize("level", [optuna.logging.DEBUG, optuna.logging.INFO, optuna.logging.ERROR])
def test_optunas_own_logging_is_left_as_it_is(level: int, in_memory: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The level that the user has set stays, and no trial of ours is announced at any level."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(level)
    try:
        mine = study(in_memory)
        run(mine, trial(8), trial(16, OutOfMemory(cause="allocator")))
        chosen = mine.sampled([Point(PLAIN, size) for size in (2, 4, 8)])
        assert chosen is not None
        run(mine, trial(chosen.micro_batch))
        assert optuna.logging.get_verbosity() == level
    finally:
        optuna.logging.set_verbosity(before)
    assert "Trial" not in capfd.readouterr().err


# -- large spaces


def points() -> list[Point]:
    """More than are worth enumerating."""
    families = [
        Levers(checkpointing=kind, checkpointed_blocks=blocks, optimizer_impl=impl)  # type: ignore[arg-type]
        for kind, blocks in (("off", 0), ("selective", 3), ("full", 2))
        for impl in ("default", "foreach", "fused")
    ]
    return [Point(levers, size) for levers in families for size in (1, 2, 4, 8, 16, 32, 64, 128)]


def sampled(storage: Any, count: int, *, objective: str = "throughput", seed: int = 0) -> list[Point]:
    """So many suggestions, each run before the next."""
    mine, left, found = study(storage, objective=objective, seed=seed), points(), []
    for _ in range(count):
        point = mine.sampled(left)
        assert point is not None
        found.append(point)
        left.remove(point)
        seconds = (1 + (point.levers.checkpointing == "full")) * (2 + abs(point.micro_batch - 32) / 32)
        run(mine, trial(point.micro_batch, Fit(peak_bytes=600, step_times_s=(seconds,)), point.levers))
    return found


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_suggestions_are_points_that_were_given(objective: str, in_memory: Any) -> None:
    """Whatever the sampler would like, what it gets is one of the points that are left."""
    found = sampled(in_memory, 12, objective=objective)
    assert len(set(found)) == 12 and set(found) <= set(points())


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_same_seed_gives_the_same_suggestions(objective: str) -> None:
    """After the same trials the same points are suggested, in a study that goes on as in one that did not stop."""
    one, other = (sampled(optuna.storages.InMemoryStorage(), 10, objective=objective, seed=3) for _ in range(2))
    assert one == other


def test_another_seed_gives_other_suggestions() -> None:
    """The seed is what the suggestions depend on."""
    one, other = (sampled(optuna.storages.InMemoryStorage(), 8, seed=seed) for seed in (0, 1))
    assert one != other


def test_study_that_goes_on_suggests_as_if_it_had_not_stopped(in_memory: Any) -> None:
    """A search that was interrupted after five suggestions makes the sixth as it would have."""
    whole, begun = sampled(optuna.storages.InMemoryStorage(), 6), sampled(in_memory, 5)
    again = study(in_memory)
    again.news()
    assert begun == whole[:5]
    assert again.sampled([point for point in points() if point not in begun]) == whole[5]


def test_nothing_left_is_no_suggestion(in_memory: Any) -> None:
    """Of no points none is suggested, and nothing is written down for it."""
    assert study(in_memory).sampled([]) is None
    assert kept(in_memory) == []


def test_single_point_is_suggested_at_last(in_memory: Any) -> None:
    """However far it is from what the sampler would like."""
    only = Point(Levers(checkpointing="selective", checkpointed_blocks=1, offload="cpu", precision="fp16"), 7)
    assert study(in_memory).sampled([only]) == only


def test_suggested_setting_is_written_down_as_it_runs(in_memory: Any) -> None:
    """While it runs it is busy for others, and its parameters say how many blocks are checkpointed."""
    one, other = study(in_memory), study(in_memory)
    wanted = [point for point in points() if point.levers.checkpointing == "full"]
    point = one.sampled(wanted)
    assert point is not None
    one.begin(Candidate(micro_batch=point.micro_batch, levers=point.levers))
    assert other.busy() == {point}
    (running,) = [found for found in kept(in_memory) if found.state == TrialState.RUNNING]
    assert running.params["checkpointed_blocks"] == 2


def test_suggestions_that_were_not_run_are_no_trials(in_memory: Any) -> None:
    """What the sampler suggested and nobody ran is pruned, and no news for anybody."""
    sampled(in_memory, 6)
    assert len(study(in_memory).news()) == 6
    assert {found.state for found in kept(in_memory)} <= {TrialState.COMPLETE, TrialState.PRUNED}


def test_suggestions_find_what_is_fast(in_memory: Any) -> None:
    """After twenty of seventy-two points, one within a tenth of the fastest has been run."""
    found = sampled(in_memory, 20)
    assert any(point.levers.checkpointing != "full" and point.micro_batch == 32 for point in found)


# -- whole searches


class Clock:
    """Stands still but where a model says how long it takes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


clock = Clock()


class Tiled(nn.Module):
    """Takes 1/256 s for each tile of eight rows and 1/512 s besides, and has room for a number of rows."""

    def __init__(self, room: int = 17) -> None:
        super().__init__()
        self.layer, self.room, self.stop_at, self.calls = nn.Linear(4, 1), room, 10**9, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] == self.stop_at:
            raise KeyboardInterrupt
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        clock.now += ceil(len(x) / 8) / 256 + 1 / 512
        out: Tensor = self.layer(x)
        return out


class Stop:
    """Interrupts a search after a number of trials, and writes down what was run."""

    def __init__(self, after: int = 10**9) -> None:
        self.after, self.ran = after, list[Trial]()

    def bounded(self, top: int) -> None: ...

    def started(self, candidate: Candidate, purpose: str) -> None: ...

    def finished(self, trial: Trial) -> None:
        self.ran.append(trial)
        if len(self.ran) == self.after:
            raise KeyboardInterrupt


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are what the model says."""
    monkeypatch.setattr("autoaccum.probing.time", clock)


def tune(storage: Any, model: nn.Module | None = None, listener: Any = None, levers: Any = None, **changes: Any) -> Plan:
    sample = changes.pop("sample", torch.ones(2, 4))
    workload = Workload(Tiled() if model is None else model, sample, training_step=mean_of, optimizer=sgd)
    levers = {"optimizer_impl": ["foreach"]} if levers is None else levers
    request = Request(target_batch=48, levers=levers, predict=False, **changes)  # it would take longer than the rest
    return tune_workload(workload, request, device="virtual:1MiB", listener=listener, storage=storage)


def points_of(trials: Sequence[Trial]) -> list[tuple[str, Point]]:
    return [(one.purpose, point_of(one)) for one in trials]


def outcome_of(plan: Plan) -> tuple[Any, ...]:
    """What a training loop takes from a plan, and how fast it is."""
    return plan.micro_batch_sizes, plan.levers, plan.max_micro_batch, plan.limited_by, plan.evidence, plan.step_time_s


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("after", [1, 3, 4, 5, 7])
def test_interrupted_search_goes_on_from_its_trials(after: int, in_memory: Any) -> None:
    """After Ctrl-C at any trial, the next call runs none of the stored trials again and ends with the same plan."""
    whole, first, second = Stop(), Stop(after), Stop()
    wanted = tune(optuna.storages.InMemoryStorage(), listener=whole)
    with pytest.raises(KeyboardInterrupt):
        tune(in_memory, listener=first)
    found = tune(in_memory, listener=second)
    assert points_of(first.ran + second.ran) == points_of(whole.ran)
    assert outcome_of(found) == outcome_of(wanted)
    assert points_of(found.trials) == points_of(wanted.trials)


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_search_goes_on_from_a_file(kind: str, tmp_path: Path) -> None:
    """A journal and a database keep the trials of an interrupted search."""
    named = str(tmp_path / "runs.log") if kind == "journal" else f"sqlite:///{tmp_path / 'runs.db'}"
    first, second = Stop(4), Stop()
    with pytest.raises(KeyboardInterrupt):
        tune(named, listener=first)
    found = tune(named, listener=second)
    assert list(found.trials[:4]) == first.ran
    assert not set(points_of(first.ran)) & set(points_of(second.ran))


@pytest.mark.usefixtures("by_formula")
def test_finished_search_is_not_run_again(in_memory: Any) -> None:
    """A second call with the same storage runs nothing and has the same plan."""
    first, second = Stop(), Stop()
    one, other = tune(in_memory, listener=first), tune(in_memory, listener=second)
    assert first.ran and not second.ran
    assert outcome_of(one) == outcome_of(other)


@pytest.mark.usefixtures("by_formula")
def test_search_interrupted_within_a_trial_leaves_nothing_running(in_memory: Any) -> None:
    """After Ctrl-C in the middle of a trial, also in a process that lives on, the next call runs that trial again."""
    model = Tiled()
    wanted = tune(None, model)
    model.stop_at = model.calls[0] + model.calls[0] // 2
    with pytest.raises(KeyboardInterrupt):
        tune(in_memory, model)
    assert TrialState.RUNNING not in {found.state for found in kept(in_memory)}
    model.stop_at = 10**9
    found = tune(in_memory, model)
    assert outcome_of(found) == outcome_of(wanted)
    assert points_of(found.trials) == points_of(wanted.trials)


def test_users_error_leaves_nothing_running(in_memory: Any) -> None:
    """An error of the user's own ends the trial that it came from, and comes again at the next call."""

    class Broken(Tiled):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("mine")

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            tune(in_memory, Broken())
    assert {found.state for found in kept(in_memory)} == {TrialState.FAIL}


@pytest.mark.parametrize(
    "message", ["CUDA error: invalid configuration argument", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"]
)
def test_error_at_every_size_comes_out_in_the_second_call_too(message: str, in_memory: Any) -> None:
    """Where no size ran for another reason than memory, the stored trials do not hide the user's error."""

    class Refusing(Tiled):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(message)

    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            tune(in_memory, Refusing())


def test_size_that_was_too_small_is_remembered_as_it_was(in_memory: Any) -> None:
    """A plan whose last micro-batch of one row was refused leaves a floor of one row, not of the size before it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            out: Tensor = self.norm(x)
            return out

    def call() -> None:
        workload = Workload(Normed(), torch.randn(3, 4), training_step=mean_of, optimizer=sgd)
        request = Request(target_batch=9, levers="none")
        tune_workload(workload, request, device="virtual:1MiB", storage=in_memory)

    said = []
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        said.append(str(caught.value))
    assert said[0] == said[1] and "needs at least 2" in said[0]


def fingerprinted(storage: Any) -> Study:
    """The study of the search that `tune` makes, as another machine of the same kind opens it."""
    workload = Workload(Tiled(), torch.ones(2, 4), training_step=mean_of, optimizer=sgd)
    request = Request(target_batch=48, levers={"optimizer_impl": ["foreach"]}, predict=False)
    with SearchHere(workload, request, "virtual:1MiB", None, None, ()) as search:
        fingerprint = fingerprint_of(workload, search.device, search.request, 1)
        return Study(storage, fingerprint, budget_bytes=search.guide_bytes, objective="throughput", seed=0)


class Meanwhile(Stop):
    """Does something when the search has run so many trials."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.at, self.act = at, act

    def finished(self, trial: Trial) -> None:
        super().finished(trial)
        if len(self.ran) == self.at:
            self.act()


FOREACH = Levers(optimizer_impl="foreach")


@pytest.mark.usefixtures("by_formula")
def test_setting_that_another_machine_runs_is_left_to_it(in_memory: Any) -> None:
    """While another machine runs a setting it is not run here, and the search ends without it."""
    fingerprinted(in_memory).begin(Candidate(micro_batch=16, levers=FOREACH))
    here = Stop()
    plan = tune(in_memory, listener=here)
    assert Point(FOREACH, 16) not in [point for _, point in points_of(here.ran)]
    assert plan.micro_batch == 16 and kept(in_memory)[0].state == TrialState.RUNNING


@pytest.mark.usefixtures("by_formula")
def test_what_another_machine_has_found_is_taken_over(in_memory: Any) -> None:
    """A setting that another machine finishes during the search is not run here, and chosen if it is the best."""
    other = fingerprinted(in_memory)
    candidate = Candidate(micro_batch=16, levers=FOREACH)
    other.begin(candidate)
    fast = Trial(
        candidate=candidate,
        outcome=Fit(peak_bytes=1000, step_times_s=(1 / 512,) * 20),
        wall_s=1.0,
        rows_per_step=48,
        purpose="confirm",
    )
    here = Meanwhile(5, lambda: other.end(fast))
    plan = tune(in_memory, listener=here)
    assert (plan.levers, plan.micro_batch, plan.step_time_s) == (FOREACH, 16, 1 / 512)
    assert Point(FOREACH, 16) not in [point for _, point in points_of(here.ran)]


@pytest.mark.usefixtures("by_formula")
def test_another_model_in_the_same_storage_starts_afresh(in_memory: Any) -> None:
    """A model that has room for other sizes runs its own trials."""
    first, second = tune(in_memory, Tiled(17)), tune(in_memory, Tiled(9))
    assert (first.micro_batch, second.micro_batch) == (16, 8)
    assert {one.candidate.micro_batch for one in second.trials if isinstance(one.outcome, Fit)} <= set(range(1, 10))


def test_model_and_generators_are_left_as_they_were(in_memory: Any) -> None:
    """A study, whose sampler draws numbers, takes none of the user's."""
    model = Tiled()
    weight, generator = model.layer.weight.clone(), torch.get_rng_state()
    tune(in_memory, model)
    assert torch.equal(model.layer.weight, weight) and torch.equal(torch.get_rng_state(), generator)


# -- processes that die, and processes that share

SOURCE = """
import json, math, os, sys, time
import torch
from torch import nn
from autoaccum.records import Fit
from autoaccum.request import Request
from autoaccum.tune import tune_workload
from autoaccum.workload import Workload
import autoaccum.probing

torch.set_num_threads(1)

class Clock:
    now = 0.0
    def perf_counter(self):
        return self.now

clock = autoaccum.probing.time = Clock()

class Tiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x):
        if len(x) > 17:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        clock.now += math.ceil(len(x) / 8) / 256 + 1 / 512
        return self.layer(x)

class Told:
    def bounded(self, top):
        pass
    def started(self, candidate, purpose):
        self.say("started", purpose, candidate)
    def finished(self, trial):
        self.say("finished", trial.purpose, trial.candidate)
    def say(self, what, purpose, candidate):
        print(json.dumps([what, time.time(), purpose, candidate.micro_batch, candidate.levers.optimizer_impl]), flush=True)

def step(model, batch):
    return model(batch).mean()

def sgd(parameters):  # made anew in each trial, which therefore takes so long
    time.sleep(float(os.environ["NAP_S"]))
    return torch.optim.SGD(parameters, lr=0.1)

workload = Workload(Tiled(), torch.ones(2, 4), training_step=step, optimizer=sgd)
request = Request(target_batch=48, levers={"optimizer_impl": ["foreach"]}, predict=False)
plan = tune_workload(workload, request, device="virtual:1MiB", listener=Told(), storage=sys.argv[1])
print(json.dumps(["plan", plan.micro_batch_sizes, plan.levers.optimizer_impl, plan.step_time_s, len(plan.trials)]))
"""


class Search:
    """A search in a process of its own, line by line."""

    def __init__(self, storage: str, nap_s: float = 0.0) -> None:
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SOURCE), storage],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "NAP_S": str(nap_s),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(autoaccum.__file__).parents[1]),
            },
        )

    def until_started(self, number: int) -> None:
        """Read on until so many trials have begun."""
        assert self.process.stdout is not None
        while number:
            line = self.process.stdout.readline()
            assert line, "it ended before"
            self.said.append(line)
            number -= line.startswith('["started"')

    def rest(self) -> list[list[Any]]:
        """Everything that it says up to its end, and has said before."""
        said, errors = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, errors[-3000:]
        return [json.loads(line) for line in (*self.said, *said.splitlines())]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def searches() -> Iterator[Callable[..., Search]]:
    """Start searches; what still runs after the test is killed."""
    begun: list[Search] = []

    def start(storage: str, nap_s: float = 0.0) -> Search:
        begun.append(Search(storage, nap_s))
        return begun[-1]

    yield start
    for one in begun:
        if one.process.poll() is None:
            one.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_killed_search_goes_on_from_its_trials(kind: str, tmp_path: Path, searches: Callable[..., Search]) -> None:
    """After kill -9 the running trial has failed, all others are taken over, and the plan is that of a search left alone."""
    storage = str(tmp_path / "runs.log") if kind == "journal" else f"sqlite:///{tmp_path / 'runs.db'}"
    killed = searches(storage, 1.0)
    killed.until_started(5)
    while [found.state for found in kept(storage)][-1] != TrialState.RUNNING:
        time.sleep(0.02)
    killed.kill()
    states = [found.state for found in kept(storage)]
    stored, running = (len([state for state in states if state.is_finished() == ended]) for ended in (True, False))
    assert stored >= 4 and running <= 1
    whole, lines = Stop(), searches(storage).rest()
    wanted = tune(None, listener=whole)
    assert lines[-1] == [
        "plan",
        list(wanted.micro_batch_sizes),
        wanted.levers.optimizer_impl,
        wanted.step_time_s,
        len(whole.ran),
    ]
    begun = [[one.purpose, one.candidate.micro_batch, one.candidate.levers.optimizer_impl] for one in whole.ran]
    assert [line[2:] for line in lines if line[0] == "started"] == begun[stored:]
    states = [found.state for found in kept(storage)]
    assert TrialState.RUNNING not in states and states.count(TrialState.FAIL) == running


@pytest.mark.slow
def test_two_processes_share_one_study(tmp_path: Path, searches: Callable[..., Search]) -> None:
    """Two searches side by side never explore the same setting at the same time, and both end with the same plan."""
    storage = str(tmp_path / "runs.log")
    one = searches(storage, 1.0)
    one.until_started(6)  # it is done with the sizes that fit as they are, and explores
    other = searches(storage, 0.1)
    said = one.rest(), other.rest()
    plans = [lines[-1] for lines in said]
    assert plans[0][:4] == plans[1][:4] and plans[0][1] == [16, 16, 16]
    spans = [_spans(lines) for lines in said]
    overlaps = [a[0] for a in spans[0] for b in spans[1] if a[0] == b[0] and a[1] < b[2] and b[1] < a[2]]
    assert overlaps == []


@pytest.mark.slow
def test_two_processes_that_start_together_both_end_with_a_plan(tmp_path: Path, searches: Callable[..., Search]) -> None:
    """Two searches that begin at the same moment, on a database that is not there yet, get in nobody's way."""
    storage = f"sqlite:///{tmp_path / 'runs.db'}"
    pair = [searches(storage), searches(storage)]
    plans = [one.rest()[-1] for one in pair]
    assert [plan[1] for plan in plans] == [[16, 16, 16]] * 2
    assert all(found.state != TrialState.RUNNING for found in kept(storage))


def _spans(lines: Sequence[list[Any]]) -> list[tuple[Any, float, float]]:
    """What was explored, from when to when; what is measured once more at the end may be measured by both."""
    found: dict[Any, tuple[Any, float, float]] = {}
    begun = 0.0
    for line in lines:
        if line[0] == "started":
            begun = line[1]
        elif line[0] == "finished":
            found.setdefault(tuple(line[2:]), (tuple(line[2:]), begun, line[1]))
    return list(found.values())
