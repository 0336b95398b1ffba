"""What autotune answers when levers may be turned: the fastest setting, found by few trials, and everything put back."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from functools import cache, partial
from math import ceil
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum import NothingFitsError, Plan
from autoaccum.exploring import Exploration
from autoaccum.records import AS_IT_IS, Candidate, Fit, Levers, OutOfMemory, Trial
from autoaccum.request import Request
from autoaccum.schedule import ladder, split_rows, steps_for
from autoaccum.session import Search
from autoaccum.tradeoffs.points import Point, point_of, with_blocks
from autoaccum.tune import tune_workload
from autoaccum.workload import Workload

from .searches import TICK_S, Clock, mean_of, sgd, traced_once

FULL = Levers(checkpointing="full")
CHECKPOINTING = {"checkpointing": ["full"]}
FOREACH = {"optimizer_impl": ["foreach"]}  # a lever that is nearly always there, for models without blocks


clock = Clock()


class Ticking(torch.autograd.Function):
    """Takes its time: once in the forward pass, twice in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        clock.now += seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        clock.now += 2 * ctx.seconds
        return gradient, None


class Block(nn.Module):
    """Holds so many times what it hands on, and takes a tick for each row."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.wide, self.activation = nn.Parameter(torch.linspace(0.5, 1.5, times)), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = Ticking.apply(x, len(x) * TICK_S)
        out: Tensor = self.activation(x[:, :, None] * self.wide).mean(2)
        return out


class Net(nn.Module):
    """Blocks one after the other, with an overhead for each micro-batch."""

    def __init__(self, blocks: int = 3, times: int = 8, overhead_s: float = 16 * TICK_S) -> None:
        super().__init__()
        self.blocks, self.overhead_s = nn.ModuleList(Block(times) for _ in range(blocks)), overhead_s

    def forward(self, x: Tensor) -> Tensor:
        clock.now += self.overhead_s
        for block in self.blocks:
            x = block(x)
        return x


class Formula(nn.Module):
    """Takes a time by the number of rows, and has room for a number of them."""

    def __init__(self, seconds: Callable[[int], float], room: int = 10**9) -> None:
        super().__init__()
        self.layer, self.seconds, self.room = nn.Linear(4, 1), seconds, room
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        clock.now += self.seconds(len(x))
        out: Tensor = self.layer(x)
        return out


def tiles(rows: int, *, tile: int = 8, each: float = 4 * TICK_S, overhead: float = 2 * TICK_S) -> float:
    """The time of a kernel that works on tiles of rows: case A24, with ticks for milliseconds."""
    return each * ceil(rows / tile) + overhead


@pytest.fixture(autouse=True)
def by_formula(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are what the models say, and each is traced once."""
    if "real_time" not in request.keywords and "real_clock" not in request.fixturenames:
        monkeypatch.setattr("autoaccum.probing.time", clock)
    monkeypatch.setattr("autoaccum.session.forecasts.traced", traced_once)


@pytest.fixture
def real_clock() -> None:
    """Step times are measured."""


def tune(model: nn.Module, target: int, device: str = "virtual:64MiB", **changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "training_step": mean_of,
        "optimizer": sgd,
        "levers": FOREACH if isinstance(model, Formula) else CHECKPOINTING,
        **changes,
    }
    sample = arguments.pop("sample", torch.linspace(-1, 1, 2 * _width(model)).reshape(2, -1))
    return autoaccum.autotune(model, sample, target, device=device, **arguments)


def search_of(model: nn.Module, target: int, device: str = "virtual:64MiB", **numbers: Any) -> Search:
    workload = Workload(model, torch.ones(2, _width(model)), training_step=mean_of, optimizer=sgd)
    request = Request(**{"target_batch": target, "levers": CHECKPOINTING, **numbers})
    return Search(workload, request, device, None, None, ())


def _width(model: nn.Module) -> int:
    return 4 if isinstance(model, Formula) else 64


@cache
def tight() -> Plan:
    """A plan for which blocks are computed again: 6 rows fit as they are, and 12 at once are faster."""
    return tune(Net(overhead_s=512 * TICK_S), 12, "virtual:100KiB")


def points_of(plan: Plan) -> list[tuple[str, Point]]:
    return [(trial.purpose, point_of(trial)) for trial in plan.trials]


def turned(plan: Plan) -> list[Trial]:
    """The trials with a lever turned."""
    return [trial for trial in plan.trials if trial.candidate.levers != AS_IT_IS]


# -- the largest is not the fastest


def test_fastest_size_is_taken_not_the_largest_that_fits() -> None:
    """Steps of 4 ms for each 8 rows and 2 ms besides, room for 17, target 51: 17 fits, 13 + 13 + 13 + 12 is faster."""
    plan = tune(Formula(tiles, room=17), 51)
    assert (plan.max_micro_batch, plan.limited_by, plan.evidence) == (17, "memory", "exact")
    assert plan.micro_batch_sizes == (13, 13, 13, 12)


def test_case_a24_is_three_times_sixteen() -> None:
    """Steps of 4 ms for each 8 rows and 2 ms besides, room for 17, target 48: the plan is 16 + 16 + 16, 1,600 per second."""
    model = Formula(tiles, room=17)
    plan = tune(model, 48)
    assert plan.micro_batch_sizes == (16, 16, 16)
    assert (plan.max_micro_batch, plan.limited_by, plan.evidence) == (
        16,
        "memory",
        "exact",
    )  # 24, the next size, ran and failed
    assert plan.step_time_s == pytest.approx(3 * 10 * TICK_S)
    assert plan.samples_per_s == pytest.approx(48 / (3 * 10 * TICK_S))


@pytest.mark.parametrize("rows", [8, 16, 24, 48])
def test_samples_per_second_are_those_of_whole_steps(rows: int) -> None:
    """Whatever is chosen, the rate is the target's samples over the seconds of one whole optimizer step."""
    plan = tune(Formula(tiles, room=rows), 48)
    assert plan.step_time_s == pytest.approx(sum(tiles(size) for size in plan.micro_batch_sizes))
    assert plan.samples_per_s == pytest.approx(48 / (plan.step_time_s or 0))
    assert plan.timing is not None and plan.timing.median_s == plan.step_time_s


def best_by_formula(seconds: Callable[[int], float], room: int, target: int) -> float:
    """The shortest optimizer step of all divisions of the target that have room."""
    divisions = [split_rows(target, steps_for(target, size)) for size in ladder(target, min(target, room))]
    return min(sum(map(seconds, sizes)) for sizes in divisions)


QUICK = [(17, 8, 48, 2.0), (40, 16, 96, 1.0), (100, 32, 256, 8.0)]
SLOW = [
    *((17, 8, target, 2.0) for target in (64, 96, 100, 250)),
    *((room, 8, 64, 1.0) for room in (7, 9, 15, 31, 33, 64)),
    *((70, tile, 192, 2.0) for tile in (4, 8, 16, 32, 64)),
    *((33, 16, 128, overhead) for overhead in (0.25, 4.0, 64.0)),
    (64, 64, 60, 2.0),
    (1, 8, 24, 2.0),
    (10**9, 64, 250, 1.0),
]


@pytest.mark.parametrize(
    ("room", "tile", "target", "ticks"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_chosen_division_is_within_three_percent_of_the_best(room: int, tile: int, target: int, ticks: float) -> None:
    """For other tiles, limits, targets and overheads, no division of the target would be faster by more than 3 %."""
    seconds = partial(tiles, tile=tile, overhead=ticks * TICK_S)
    plan = tune(Formula(seconds, room), target)
    assert plan.step_time_s == pytest.approx(sum(map(seconds, plan.micro_batch_sizes)))
    assert plan.step_time_s <= 1.03 * best_by_formula(seconds, room, target)


@pytest.mark.slow
@pytest.mark.usefixtures("real_clock")
def test_fastest_size_is_found_by_a_real_clock() -> None:
    """Where 17 rows really take four times as long as 16, sizes up to 16 are used, though 17 fit."""

    def sleeping(rows: int) -> float:
        time.sleep(0.2 if rows > 16 else 0.05)
        return 0.0

    plan = tune(Formula(sleeping, room=17), 34)
    assert plan.max_micro_batch == 17
    assert plan.micro_batch_sizes == (12, 11, 11)
    assert plan.samples_per_s is not None and 34 / 0.6 < plan.samples_per_s <= 34 / 0.15


# -- levers that make room


@pytest.mark.slow
def test_checkpointing_makes_room_for_three_times_as_many_rows() -> None:
    """Where each micro-batch has a high overhead, blocks are computed again for fewer and larger ones."""
    model = Net(blocks=6, overhead_s=4096 * TICK_S)
    plain, plan = (tune(model, 12, "virtual:102KiB", levers=levers) for levers in ("none", CHECKPOINTING))
    assert plan.levers.checkpointing == "full" and plain.levers == AS_IT_IS
    assert plan.micro_batch >= 3 * plain.micro_batch
    assert plan.step_time_s is not None and plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.budget_bytes == 102 * 2**10


@pytest.mark.slow
def test_exact_levers_make_room_for_three_times_as_many_rows() -> None:
    """So they are with every lever that keeps the numerics, and few of the trials run out of memory."""
    model = Net(blocks=6, overhead_s=4096 * TICK_S)
    plain, plan = (tune(model, 12, "virtual:102KiB", levers=levers) for levers in ("none", "exact"))
    assert plan.micro_batch >= 3 * plain.micro_batch and plan.levers.precision == "fp32"
    assert sum(isinstance(trial.outcome, Fit) for trial in plan.trials) >= 0.7 * len(plan.trials)


@pytest.mark.slow
def test_recomputation_that_costs_more_than_it_brings_is_not_chosen() -> None:
    """Without an overhead, larger micro-batches bring nothing, and no block is computed again for them."""
    plan = tune(Net(overhead_s=0.0), 6, "virtual:50KiB")
    assert plan.levers == AS_IT_IS


@pytest.mark.slow
def test_what_fits_only_with_levers_is_a_plan_with_levers() -> None:
    """Where not even one row fits as it is, blocks are computed again, and the plan says what was tried before."""
    plan = tune(Net(), 6, "virtual:15KiB")
    assert plan.levers.checkpointing == "full" and plan.levers.checkpointed_blocks >= 1
    assert plan.effective_batch == sum(plan.micro_batch_sizes) == 6
    assert isinstance(plan.trials[0].outcome, OutOfMemory) and plan.trials[0].candidate == Candidate(micro_batch=1)
    assert plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= 15 * 2**10


def test_nothing_fits_at_all_is_an_error_with_the_trials() -> None:
    """Where no lever makes room for a single row, the error says what was tried and how much is missing."""
    with pytest.raises(NothingFitsError, match=r"micro_batch=1 does not fit into 8\.00 KiB") as caught:
        tune(Net(), 6, "virtual:8KiB")
    assert caught.value.trials and all(isinstance(trial.outcome, OutOfMemory) for trial in caught.value.trials)


def test_every_plan_was_run_as_it_is() -> None:
    """The chosen levers and sizes are those of a trial of whole steps that fitted."""
    plan = tight()
    chosen = Point(plan.levers, plan.micro_batch)
    runs = [trial for trial in plan.trials if trial.purpose == "confirm" and point_of(trial) == chosen]
    assert runs and all(isinstance(trial.outcome, Fit) and trial.rows_per_step == 12 for trial in runs)


def exhaustive(model: nn.Module, target: int) -> dict[Point, tuple[float, int]]:
    """Step time and predicted peak of every division with every number of blocks, all of them run without a limit."""
    found = {}
    with search_of(model, target) as search:
        exploration = Exploration(search)
        for size in exploration.divisions:
            for blocks in range(exploration.space.num_blocks + 1):
                levers = with_blocks(FULL, blocks) if blocks else AS_IT_IS
                trial = search.confirm(levers, exploration.schedule(size))
                assert trial is not None and isinstance(trial.outcome, Fit) and trial.outcome.median_step_s is not None
                peak = exploration.foresight.raw_peak(levers, size)
                assert peak is not None
                found[Point(levers, size)] = trial.outcome.median_step_s, peak
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overhead", "blocks", "target"),
    [(64, 2, 6), *(pytest.param(ticks, 3, 12, marks=pytest.mark.slow) for ticks in (4, 64, 1024))],
)
def test_chosen_setting_is_within_three_percent_of_the_best(overhead: int, blocks: int, target: int) -> None:
    """At budgets from the smallest possible to ample, no size with any number of blocks is faster by more than 3 %."""
    model = Net(blocks, overhead_s=overhead * TICK_S)
    table = exhaustive(model, target)
    peaks = sorted({peak for _, peak in table.values()})
    with search_of(model, target) as search:
        for budget in (*peaks[::4], peaks[-1]):
            search.log.trials, search.guide_bytes = [], budget  # predictions stay
            search.budget = msgspec.structs.replace(search.budget, budget_bytes=budget)
            explored = Exploration(search).run()
            (chosen,) = [one.timing.median_s for one in explored.measured if one.point == explored.chosen]
            assert chosen <= 1.03 * min(seconds for seconds, peak in table.values() if peak <= budget), budget


def test_chosen_number_of_blocks_is_the_smallest() -> None:
    """No block more than it takes is computed again: with one fewer the size does not fit."""
    plan = tight()
    assert plan.levers.checkpointed_blocks > 0
    with search_of(Net(), 12, "virtual:100KiB", predict=False) as search:
        exploration = Exploration(search)
        schedule = exploration.schedule(plan.micro_batch)
        fits = [search.confirm(with_blocks(FULL, k) if k else AS_IT_IS, schedule) is not None for k in range(4)]
    assert fits.index(True) == plan.levers.checkpointed_blocks


# -- gradients


def test_gradients_under_the_plan_are_those_without() -> None:
    """A plan with blocks computed again changes no gradient by a bit, dropout and all."""

    class Dropping(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.3)

    model = Net()
    model.blocks = nn.ModuleList(Dropping(8) for _ in range(3))
    plan = tight()
    assert plan.levers.checkpointed_blocks > 0
    batch, gradients = torch.randn(8, 64), []
    for context in (plan.applied(model), None):
        torch.manual_seed(3)
        model.zero_grad()
        if context is None:
            mean_of(model, batch).backward()
        else:
            with context:
                mean_of(model, batch).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# -- few trials


def test_target_that_fits_as_it_is_turns_no_memory_lever() -> None:
    """Where everything fits, no block is computed again and nothing is moved to the host, not even to try."""
    plan = tune(Net(), 12, levers={"checkpointing": ["selective", "full"], "offload": ["cpu"]})
    assert plan.micro_batch_sizes == (12,) and turned(plan) == []
    assert all(setting.standing != "not run" or setting.levers == AS_IT_IS for setting in plan.settings)


def test_blocks_are_not_computed_again_where_a_lever_fewer_does() -> None:
    """At sizes that fit as they are, checkpointed settings are not run."""
    plan = tight()
    largest = max(
        t.candidate.micro_batch for t in plan.trials if t.candidate.levers == AS_IT_IS and isinstance(t.outcome, Fit)
    )
    assert turned(plan) and all(trial.candidate.micro_batch > largest for trial in turned(plan))


def test_solved_number_of_blocks_runs_at_the_first_try() -> None:
    """Where predictions hold, no setting with a lever turned runs out of memory."""
    plan = tight()
    assert turned(plan) and all(isinstance(trial.outcome, Fit) for trial in turned(plan))


@pytest.mark.slow
def test_memory_that_no_trace_shows_costs_at_most_two_trials() -> None:
    """Where real steps hold more than traced ones, what was measured as it is corrects the number of blocks."""

    class Hiding(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.zeros(4096) if type(x) is Tensor else x  # fake tensors are of a type of their own
            return super().forward(x) + hidden.reshape(-1)[:1] * 0

    plan = tune(Hiding(overhead_s=512 * TICK_S), 12, "virtual:118KiB")
    assert plan.levers.checkpointing == "full"
    assert sum(not isinstance(trial.outcome, Fit) for trial in turned(plan)) <= 2


def test_model_that_cannot_be_predicted_does_not_run_out_of_memory_block_by_block() -> None:
    """Without predictions a size is tried with all blocks computed again, once."""
    with search_of(Net(blocks=12), 6, "virtual:20KiB", predict=False) as search:
        with pytest.raises(NothingFitsError):
            Exploration(search).run()
        assert len(search.log.trials) <= 2 + len(Exploration(search).divisions)


@pytest.mark.parametrize(("edge", "sizes"), [(24, (24, 24)), (12, (12,) * 4)])
def test_cliff_below_the_fastest_is_found(edge: int, sizes: tuple[int, ...]) -> None:
    """Where micro-batches up to some size are far faster, as those that fit into a cache, half of the fastest shows it."""
    seconds = lambda rows: (64 if rows <= edge else 512) * TICK_S  # noqa: E731
    assert tune(Formula(seconds, room=24), 48).micro_batch_sizes == sizes


def test_half_of_the_fastest_is_run_once() -> None:
    """Where it is no faster, nothing below it is run."""
    plan = tune(Formula(lambda rows: (64 + rows) * TICK_S, room=64), 64)
    assert {trial.candidate.micro_batch for trial in plan.trials if trial.purpose == "confirm"} == {64, 32}


def test_close_settings_are_measured_once_more() -> None:
    """Settings within a few percent of each other get a second trial in turn, others do not."""
    plan = tune(Formula(lambda rows: rows * TICK_S + 2**-14, room=16), 32)
    again = [point for _, point in points_of(plan) if [p for _, p in points_of(plan)].count(point) > 1]
    confirmed = [point for purpose, point in points_of(plan) if purpose == "confirm"]
    assert any(confirmed.count(point) == 2 for point in again)
    lonely = tune(Formula(lambda rows: (1 + (rows != 8)) * TICK_S, room=8), 16, levers={"optimizer_impl": ["default"]})
    assert [purpose for purpose, _ in points_of(lonely)].count("confirm") == 1


# -- the lowest peak


def measured_peaks(model: nn.Module, target: int) -> dict[Point, int]:
    """The peak of every division with every number of blocks, really run."""
    found = {}
    with search_of(model, target, predict=False) as search:
        exploration = Exploration(search)
        for size in exploration.divisions:
            for blocks in range(exploration.space.num_blocks + 1):
                levers = with_blocks(FULL, blocks) if blocks else AS_IT_IS
                trial = search.confirm(levers, exploration.schedule(size))
                assert trial is not None and isinstance(trial.outcome, Fit)
                found[Point(levers, size)] = trial.outcome.peak_bytes
    return found


@pytest.mark.slow
def test_memory_objective_takes_the_lowest_peak() -> None:
    """Of all sizes with any number of blocks, none holds less than the chosen one."""
    model = Net(blocks=2)
    plan = tune(model, 12, objective="memory")
    assert plan.objective == "memory" and plan.measured_peak_bytes == min(measured_peaks(model, 12).values())


@pytest.mark.slow
def test_memory_objective_takes_few_trials() -> None:
    """The leanest setting is foreseen: with every exact lever allowed, few settings are run."""
    plan = tune(Net(blocks=2), 12, objective="memory", levers="exact")
    assert len(plan.trials) <= 10


class Fat(nn.Module):
    """Its optimizer's state is more than what its rows hold, and every micro-batch takes a tick."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        clock.now += TICK_S
        out: Tensor = self.layer(x)
        return out


@pytest.mark.slow
def test_memory_objective_takes_the_fastest_of_equal_peaks() -> None:
    """Where the optimizer's step holds the most, rows are free, and one row at a time would only be slow."""
    plan = tune(Fat(), 256, objective="memory", optimizer=torch.optim.AdamW, levers=FOREACH)
    with search_of(Fat(), 256, levers=FOREACH) as search:
        search.workload._optimizer = torch.optim.AdamW
        exploration = Exploration(search)
        schedules = [exploration.schedule(size) for size in (1, plan.micro_batch)]
        outcomes = [
            trial.outcome for trial in (search.confirm(plan.levers, each) for each in schedules) if trial is not None
        ]
    one, chosen = (outcome for outcome in outcomes if isinstance(outcome, Fit))
    assert one.peak_bytes == chosen.peak_bytes and 1 < plan.micro_batch < 256


def test_memory_objective_needs_no_lever() -> None:
    """Where nothing can be turned, the leanest micro-batch is still not the largest."""
    plan = tune(Fat(), 256, objective="memory", levers="checkpointing")
    assert plan.levers == AS_IT_IS and plan.micro_batch < 256


# -- what the caller asks of the sizes


def test_equal_micro_batches_are_equal_under_levers_too() -> None:
    """Where one number must serve, every setting that is run divides the target without a rest."""
    plan = tune(Net(overhead_s=512 * TICK_S), 14, "virtual:80KiB", equal_micro_batches=True)
    assert len(set(plan.micro_batch_sizes)) == 1 and sum(plan.micro_batch_sizes) == 14
    assert all(14 % trial.candidate.micro_batch == 0 for trial in plan.trials if trial.purpose == "confirm")


@pytest.mark.slow
def test_levers_may_make_an_equal_division_possible() -> None:
    """Where what fits as it is divides the target in no way, levers that make room for all of it are turned."""
    equal: dict[str, Any] = {"equal_micro_batches": True, "multiple_of": 4}
    with pytest.raises(autoaccum.InvalidRequestError, match="no equal division"):
        tune(Net(), 14, "virtual:120KiB", levers="none", **equal)
    plan = tune(Net(), 14, "virtual:120KiB", **equal)
    assert plan.micro_batch_sizes == (14,) and plan.levers.checkpointing == "full"


@pytest.mark.slow
def test_multiples_hold_under_levers_too() -> None:
    """Every micro-batch of every whole step but the last is a multiple of what was asked for."""
    plan = tune(Net(overhead_s=512 * TICK_S), 14, "virtual:80KiB", multiple_of=4)
    assert all(size % 4 == 0 for size in plan.micro_batch_sizes[:-1]) and sum(plan.micro_batch_sizes) == 14
    assert all(trial.candidate.micro_batch % 4 == 0 or trial.candidate.micro_batch == 14 for trial in plan.trials)


def test_nothing_above_the_callers_bound_is_run() -> None:
    """With any lever, no trial is larger than the caller allows."""
    plan = tune(Net(overhead_s=512 * TICK_S), 12, "virtual:50KiB", max_micro_batch=6)
    assert max(trial.candidate.micro_batch for trial in plan.trials) == 6 and turned(plan)


@pytest.mark.slow
def test_data_set_bounds_the_micro_batch_under_levers_too() -> None:
    """With ten samples no micro-batch is above ten, and the plan says that a step sees samples twice."""
    data = TensorDataset(torch.randn(10, 64))

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()

    plan = tune(Net(overhead_s=512 * TICK_S), 20, "virtual:80KiB", sample=data, training_step=step)
    assert max(trial.candidate.micro_batch for trial in plan.trials) == 10 and turned(plan)
    assert sum(plan.micro_batch_sizes) == 20 and any("more than once" in warning for warning in plan.warnings)


@pytest.mark.parametrize("target", [9, 17])
@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_division_that_leaves_a_row_too_few_is_passed_over(target: int, objective: str) -> None:
    """A model that refuses single rows is divided so that none is left, though smaller micro-batches would be faster."""

    class Normed(Formula):
        def __init__(self) -> None:
            super().__init__(lambda rows: rows * rows * TICK_S)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    plan = tune(Normed(), target, objective=objective, sample=torch.randn(4, 4))
    assert min(plan.micro_batch_sizes) >= 2 and sum(plan.micro_batch_sizes) == target
    if objective == "throughput":
        assert plan.micro_batch_sizes == tuple(split_rows(target, ceil(target / 3)))
        assert plan.min_micro_batch == 2


@pytest.mark.slow
def test_too_small_rest_as_it_is_leaves_room_for_levers() -> None:
    """Where the only sizes that fit as they are leave a single row, a larger size with levers is the plan."""

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(blocks=4)
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    plan = tune(Normed(), 3, "virtual:40KiB", sample=torch.randn(4, 64))
    assert plan.micro_batch_sizes == (3,) and plan.levers.checkpointing == "full"


# -- when the time is up


def test_time_budget_ends_the_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the seconds that were given no further setting is run, and the plan is the best one until then."""
    for module in ("clock", "forecasts", "pace"):
        monkeypatch.setattr(f"autoaccum.session.{module}.time", clock)
    whole = tight()
    hasty = tune(Net(overhead_s=512 * TICK_S), 12, "virtual:100KiB", time_budget_s=10 * 512 * TICK_S)
    assert 1 < len(hasty.trials) < len(whole.trials) and turned(hasty) == []
    assert hasty.effective_batch == sum(hasty.micro_batch_sizes) == 12
    assert any("time_budget_s" in warning for warning in hasty.warnings)


@pytest.mark.parametrize("limit_s", [1e-9, 0.2, 1.0])
def test_any_time_budget_gives_a_plan_that_was_run(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time there is, the plan's sizes fit, and nothing is said of speed that was not measured."""
    for module in ("clock", "forecasts", "pace"):
        monkeypatch.setattr(f"autoaccum.session.{module}.time", clock)
    plan = tune(Net(overhead_s=64 * TICK_S), 12, "virtual:64KiB", time_budget_s=limit_s)
    fits = {trial.candidate.micro_batch for trial in plan.trials if isinstance(trial.outcome, Fit)}
    assert plan.micro_batch <= max(fits)
    assert (plan.step_time_s is None) == (plan.timing is None) == (plan.samples_per_s is None)


# -- which levers


@pytest.mark.parametrize(
    ("levers", "allowed"),
    [
        ("none", {("off", "default", "off")}),
        ("checkpointing", {(kind, "default", "off") for kind in ("off", "selective", "full")}),
        (["optimizer_impl"], {("off", impl, "off") for impl in ("default", "for-loop", "foreach", "fused")}),
        ({"checkpointing": "full"}, {(kind, "default", "off") for kind in ("off", "full")}),
        (
            {"offload": ["cpu"], "optimizer_impl": ["fused"]},
            {("off", i, o) for i in ("default", "fused") for o in ("off", "cpu")},
        ),
        ({"checkpointing": ["off"]}, {("off", "default", "off")}),
    ],
)
def test_only_the_levers_that_were_named_are_turned(levers: Any, allowed: set[tuple[str, str, str]]) -> None:
    """No trial turns a lever, or takes a level, that was not asked for."""
    plan = tune(Net(blocks=2, overhead_s=512 * TICK_S), 6, "virtual:50KiB", levers=levers)
    found = [trial.candidate.levers for trial in plan.trials]
    tried = {(one.checkpointing, one.optimizer_impl, one.offload) for one in found}
    assert tried <= allowed and ("off", "default", "off") in tried
    assert {one.precision for one in found} == {"fp32"}


@pytest.mark.slow
def test_callers_own_blocks_are_the_ones_computed_again() -> None:
    """Blocks by name: those, in that order, and no other, are checkpointed, and the plan carries their names."""
    model = Net(overhead_s=2048 * TICK_S)
    names = ["blocks.1", "blocks.0"]
    plan = tune(model, 12, "virtual:115KiB", levers={"checkpointing": ["full"], "blocks": names})
    assert plan.levers.block_names == tuple(names) and 1 <= plan.levers.checkpointed_blocks <= 2
    counts = {name: 0 for name, _ in model.blocks.named_children()}

    def count(name: str, module: nn.Module, args: Any) -> None:
        counts[name] += 1

    for name, block in model.blocks.named_children():
        block.activation.register_forward_pre_hook(partial(count, name))
    with plan.applied(model):
        mean_of(model, torch.ones(2, 64)).backward()
    again = {name.removeprefix("blocks.") for name in names[: plan.levers.checkpointed_blocks]}
    assert counts == {name: 1 + (name in again) for name in counts}


def test_unknown_block_is_refused_before_anything_runs() -> None:
    """A name that the model does not have is named, and no trial is run."""
    model = Formula(tiles)
    with pytest.raises(autoaccum.InvalidRequestError, match=r"no block 'blocks.9'"):
        tune(model, 12, levers={"checkpointing": ["full"], "blocks": ["blocks.9"]})
    assert model.sizes == []


def test_levels_that_cannot_be_used_are_said() -> None:
    """A model without repeated blocks is searched all the same, and the plan says why nothing was checkpointed."""
    plan = tune(Formula(tiles), 12, levers="exact")
    assert {("checkpointing", "full"), ("checkpointing", "selective")} <= {(s.lever, s.level) for s in plan.skipped}
    assert all("no repeated blocks" in s.reason for s in plan.skipped if s.lever == "checkpointing")


# -- everything is put back


class Configured(Net):
    """Everything that a search might forget to put back."""

    def __init__(self) -> None:
        super().__init__(overhead_s=512 * TICK_S)

        class Config:
            use_cache = True

        self.config = Config()
        self.config.use_cache = True  # type: ignore[misc]
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("count", torch.zeros(()))
        self.blocks[0].wide.grad = torch.ones(8)
        self.blocks[1].wide.requires_grad_(False)
        self.blocks[2].register_forward_hook(lambda module, args, out: None)
        self.blocks[2].eval()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        noise = random.random() + np.random.rand() + torch.rand(())
        return super().forward(self.norm(x)) + noise


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything of a model, an optimizer and the generators that can be compared."""
    return copy.deepcopy(
        {
            "tensors": {name: value.tolist() for name, value in model.state_dict().items()},
            "gradients": {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()},
            "trained": {name: p.requires_grad for name, p in model.named_parameters()},
            "modes": {name: module.training for name, module in model.named_modules()},
            "own": {name: sorted(vars(module)) for name, module in model.named_modules()},
            "hooks": {name: len(module._forward_hooks) for name, module in model.named_modules()},
            "config": vars(model.config) if hasattr(model, "config") else None,
            "generators": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
            "modes of torch": (
                torch.is_grad_enabled(),
                torch.get_float32_matmul_precision(),
                torch.is_autocast_enabled("cpu"),
            ),
            "optimizer": None if optimizer is None else str(optimizer.state_dict()),
        }
    )


@pytest.mark.slow
def test_everything_is_as_it_was_after_a_search() -> None:
    """Weights, buffers, gradients, modes, hooks, configuration, forwards and generators are the same, bit for bit."""
    model, sample = Configured(), torch.randn(4, 64)
    before = state_of(model)
    plan = tune(model, 12, "virtual:110KiB", sample=sample)
    assert {"off", "full"} <= {trial.candidate.levers.checkpointing for trial in plan.trials}
    assert state_of(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 3))])
def test_everything_is_as_it_was_after_an_interruption(at: int) -> None:
    """Ctrl-C during any trial, with levers turned or not, leaves nothing behind."""

    class Stopped(Configured):
        stop_at, calls = 10**9, 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            if self.calls == self.stop_at:
                raise KeyboardInterrupt
            return super().forward(x)

    def run(model: nn.Module) -> Plan:
        return tune(model, 12, "virtual:110KiB", sample=sample)

    sample = torch.randn(4, 64)
    assert turned(run(Stopped()))
    model = Stopped()
    Stopped.stop_at, Stopped.calls = Stopped.calls * at // 6, 0
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert state_of(model) == before


def test_callers_own_optimizer_is_as_it_was() -> None:
    """State, flags and hyperparameters of an optimizer that was given are the same after its implementation was turned."""
    model = Net(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=None)
    mean_of(model, torch.ones(2, 64)).backward()
    optimizer.step()
    before = state_of(model, optimizer)
    plan = tune(model, 4, optimizer=optimizer, levers={"optimizer_impl": ["foreach", "fused", "for-loop"]})
    assert len({trial.candidate.levers.optimizer_impl for trial in plan.trials}) >= 2
    assert state_of(model, optimizer) == before


def test_optimizer_factory_is_asked_for_a_new_one_each_time() -> None:
    """A factory gives every trial an optimizer of its own, over the model's parameters."""
    made: list[list[nn.Parameter]] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        made.append(list(parameters))
        return torch.optim.SGD(made[-1], lr=0.1)

    model = Net(blocks=2)
    plan = tune(model, 4, optimizer=factory, levers=FOREACH)
    assert len(made) >= len(plan.trials)
    assert all({id(p) for p in some} == {id(p) for p in model.parameters()} for some in made)


def test_users_error_passes_through_unchanged() -> None:
    """An error that is not memory comes out at the first trial, whatever levers there are to try."""
    seen: list[int] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing") as caught:
        tune(Net(), 12, training_step=step)
    assert any("micro_batch" in note for note in caught.value.__notes__)


def test_limit_that_no_lever_lifts_comes_out_after_few_trials() -> None:
    """A launch limit at every size is raised as it is, and not tried with every number of blocks."""
    seen: list[int] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        raise RuntimeError("CUDA error: invalid configuration argument")

    with pytest.raises(RuntimeError, match="invalid configuration argument"):
        tune(Net(blocks=12), 12, training_step=step)
    assert len(seen) <= 20


# -- the same again


def test_same_call_runs_the_same_trials() -> None:
    """Where times are the same, so is every decision: the second log is the first one."""
    one, other = tight(), tune(Net(overhead_s=512 * TICK_S), 12, "virtual:100KiB")
    assert points_of(one) == points_of(other)
    assert [trial.outcome for trial in one.trials] == [trial.outcome for trial in other.trials]


def in_a_large_space(seed: int) -> Plan:
    """More settings than are enumerated: of nine families, and sizes up to 64 rows run."""
    model = Formula(tiles, room=64)
    workload = Workload(model, torch.ones(2, 4), training_step=mean_of, optimizer=sgd)
    levers = {"optimizer_impl": ["foreach", "fused"], "precision": ["bf16", "fp16"]}
    request = Request(target_batch=2048, levers=levers, seed=seed)
    return tune_workload(workload, request, device="virtual:64MiB")


@pytest.mark.slow
def test_large_space_is_sampled_alike_with_the_same_seed() -> None:
    """With the same seed the same settings are sampled, with another one others, and never more than forty."""
    one, same, other = (in_a_large_space(seed) for seed in (0, 0, 1))
    assert points_of(one) == points_of(same)
    assert points_of(one) != points_of(other)
    assert all(len(turned(plan)) <= 40 + 3 and plan.effective_batch == 2048 for plan in (one, other))


def test_comparing_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the caller sets no time, comparisons are cut when they have taken long, and the plan says so."""
    whole = tight()
    monkeypatch.setattr("autoaccum.exploring._COMPARING_S", -1.0)
    monkeypatch.setattr("autoaccum.exploring._COMPARED", 1)
    plan = tune(Net(overhead_s=512 * TICK_S), 12, "virtual:100KiB")
    assert any("not to the end" in warning for warning in plan.warnings) and len(plan.trials) < len(whole.trials)
    assert any(setting.note == "The time was up." for setting in plan.settings)
    patient = tune(Net(overhead_s=512 * TICK_S), 12, "virtual:100KiB", time_budget_s=1e6)
    assert not any("not to the end" in warning for warning in patient.warnings)
