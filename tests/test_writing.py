"""What a plan says of the search that it came from: trade-offs, advice, peaks, and nothing that was not seen."""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoaccum
from autoaccum import Plan
from autoaccum.foreseeing import AS_IT_IS
from autoaccum.records import Fit, Levers, Setting

from .searches import TICK_S, Clock, mean_of, sgd, traced_once

clock = Clock()


class Block(nn.Module):
    """Holds eight times what it hands on, and takes a tick for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.activation = nn.Parameter(torch.linspace(0.5, 1.5, 8)), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        clock.now += len(x) * TICK_S
        out: Tensor = self.activation(x[:, :, None] * self.wide).mean(2)
        return out


class Net(nn.Module):
    """Blocks one after the other, with an overhead for each micro-batch."""

    def __init__(self, ticks: float = 512.0) -> None:
        super().__init__()
        self.blocks, self.ticks = nn.ModuleList(Block() for _ in range(3)), ticks

    def forward(self, x: Tensor) -> Tensor:
        clock.now += self.ticks * TICK_S
        for block in self.blocks:
            x = block(x)
        return x


class Tiled(nn.Module):
    """Takes 4 ticks for each tile of eight rows and 2 besides, wandering by a fraction, and has room for 17 rows."""

    def __init__(self, wandering: float = 0.0) -> None:
        super().__init__()
        self.layer, self.wandering, self.calls = nn.Linear(64, 1), wandering, [0]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 17:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        self.calls[0] += 1
        ticks = 4 * ceil(len(x) / 8) + 2
        clock.now += ticks * TICK_S * (1 + self.wandering * (self.calls[0] * 7 % 11) / 11)
        out: Tensor = self.layer(x)
        return out


@pytest.fixture(autouse=True)
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are what the models say, and each is traced once."""
    monkeypatch.setattr("autoaccum.probing.time", clock)
    monkeypatch.setattr("autoaccum.session.forecasts.traced", traced_once)


def tune(model: nn.Module, target: int, device: str = "virtual:64MiB", **changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "training_step": mean_of,
        "optimizer": sgd,
        "levers": {"checkpointing": ["full"]} if isinstance(model, Net) else {"optimizer_impl": ["foreach"]},
        **changes,
    }
    sample = arguments.pop("sample", torch.linspace(-1, 1, 128).reshape(2, 64))
    return autoaccum.autotune(model, sample, target, device=device, **arguments)


@cache
def turned() -> Plan:
    """Of 12 rows 6 fit as they are, and all at once with two blocks computed again, which is faster."""
    return tune(Net(), 12, "virtual:100KiB")


@cache
def tiled() -> Plan:
    """Of 48 rows 16 fit, and the optimizer's implementation makes no difference."""
    return tune(Tiled(), 48)


def rows(plan: Plan, standing: str) -> list[Setting]:
    return [row for row in plan.settings if row.standing == standing]


# -- the trade-offs


@pytest.mark.slow
@pytest.mark.parametrize("plan", [turned, tiled])
def test_one_setting_is_the_chosen_one(plan: Any) -> None:
    """Exactly one row is chosen, and it is the plan's own: levers, sizes, peak and times."""
    (chosen,) = rows(plan(), "chosen")
    assert (chosen.levers, chosen.micro_batch, chosen.accumulation_steps) == (
        plan().levers,
        plan().micro_batch,
        plan().accumulation_steps,
    )
    assert (chosen.timing, chosen.peak_bytes) == (plan().timing, plan().measured_peak_bytes)


@pytest.mark.parametrize("plan", [turned, tiled])
def test_every_setting_is_listed_once(plan: Any) -> None:
    """No position of the levers at a size has two rows."""
    listed = [(row.levers, row.micro_batch) for row in plan().settings]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("plan", [turned, tiled])
def test_measured_settings_have_what_was_measured(plan: Any) -> None:
    """Every setting whose whole steps ran has its peak and its times, and no other row has any."""
    ran = {
        (trial.candidate.levers, trial.candidate.micro_batch)
        for trial in plan().trials
        if trial.purpose == "confirm" and isinstance(trial.outcome, Fit)
    }
    measured = {(row.levers, row.micro_batch) for row in plan().settings if row.timing is not None}
    assert measured == ran
    assert all((row.peak_bytes is None) == (row.timing is None) for row in plan().settings)


@pytest.mark.parametrize("plan", [turned, tiled])
def test_steps_of_a_setting_make_up_the_target(plan: Any) -> None:
    """A row's micro-batch and steps are those of a division of the target."""
    assert all(row.accumulation_steps == ceil(plan().target_batch / row.micro_batch) for row in plan().settings)


def test_what_ran_out_of_memory_is_said() -> None:
    """A setting with a lever turned that did not fit has a row that says so."""
    failed = {(row.levers.optimizer_impl, row.micro_batch) for row in rows(tiled(), "does not fit")}
    assert failed == {
        (trial.candidate.levers.optimizer_impl, trial.candidate.micro_batch)
        for trial in tiled().trials
        if trial.candidate.levers != AS_IT_IS and not isinstance(trial.outcome, Fit)
    }
    assert failed


def test_what_was_not_run_has_a_reason() -> None:
    """A setting that was left out says why, and what its step was expected to take: longer than the chosen one."""
    left = rows(turned(), "not run")
    assert left and all(row.note == "It is not expected to be faster than what was measured." for row in left)
    assert all(
        row.predicted_step_s is not None and row.predicted_step_s > 0.98 * (turned().step_time_s or 0) for row in left
    )
    assert all(row.peak_bytes is None for row in left)


def test_what_the_clock_left_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time was up, that is the reason."""
    for module in ("clock", "forecasts", "pace"):
        monkeypatch.setattr(f"autoaccum.session.{module}.time", clock)
    plan = tune(Net(), 12, "virtual:100KiB", time_budget_s=10 * 512 * TICK_S)
    assert {row.note for row in rows(plan, "not run")} <= {"The time was up."}
    assert any("time_budget_s" in warning for warning in plan.warnings)


def test_what_memory_leaves_out_says_so() -> None:
    """Where the lowest peak is wanted, what was left out was not expected to need less."""
    plan = tune(Net(), 12, objective="memory")
    left = rows(plan, "not run")
    assert left and {row.note for row in left} == {"It is not expected to need less than what was measured."}


@pytest.mark.slow
def test_levers_that_change_the_numerics_are_mentioned() -> None:
    """With the exact levers, mixed precision has rows of its own that say what would be possible, and how to allow it."""
    plan = tune(Tiled(), 48, levers="exact")
    barred = rows(plan, "not allowed")
    assert {row.levers.precision for row in barred} <= {"bf16", "fp16"} and barred
    assert all('levers="all"' in row.note and row.timing is None for row in barred)
    assert {trial.candidate.levers.precision for trial in plan.trials} == {"fp32"}


def test_a_lean_plan_is_limited_by_what_fits_with_its_levers() -> None:
    """A small micro-batch that was chosen for its peak is not said to be all that fits, where the target itself does."""
    plan = tune(Net(), 12, "virtual:100MiB", objective="memory")
    assert plan.micro_batch < 12
    assert (plan.max_micro_batch, plan.limited_by, plan.evidence) == (12, "target", "predicted")
    assert "(predicted: it was not run with these levers)" in str(plan)
    assert all((trial.candidate.levers, trial.candidate.micro_batch) != (plan.levers, 12) for trial in plan.trials)


def test_plan_without_levers_has_one_setting() -> None:
    """With nothing to choose between there is the plan's own row, and nothing that was left out."""
    plan = tune(Net(), 12, "virtual:100KiB", levers="none")
    assert [row.standing for row in plan.settings] == ["chosen"]
    assert (plan.settings[0].levers, plan.settings[0].micro_batch) == (AS_IT_IS, plan.micro_batch)


# -- peaks and limits


def test_peaks_are_never_mixed() -> None:
    """What was measured is the chosen steps' own peak, and what was predicted stands beside it."""
    plan = turned()
    peaks = [
        trial.outcome.peak_bytes
        for trial in plan.trials
        if trial.purpose == "confirm"
        and isinstance(trial.outcome, Fit)
        and (trial.candidate.levers, trial.candidate.micro_batch) == (plan.levers, plan.micro_batch)
    ]
    assert plan.measured_peak_bytes == max(peaks) and plan.predicted_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.budget_bytes


def test_without_a_prediction_none_is_given() -> None:
    """A model that is searched without one has no predicted peak, picture or advice."""
    plan = tune(Tiled(), 2, levers="none")  # so few sizes are tried without one
    assert (plan.predicted_peak_bytes, plan.timeline, plan.advice) == (None, None, ())
    assert all(row.predicted_peak_bytes is None for row in plan.settings)


def test_limit_is_that_of_the_chosen_levers() -> None:
    """The largest size known to fit is one that ran under the plan's levers; the target where that is all of it."""
    plan = turned()
    assert (plan.max_micro_batch, plan.limited_by) == (12, "target")
    fitted = [
        t.candidate.micro_batch for t in plan.trials if t.candidate.levers == plan.levers and isinstance(t.outcome, Fit)
    ]
    assert plan.max_micro_batch == max(fitted)


def test_limit_as_it_is_is_exact_where_the_next_size_failed() -> None:
    """A plan that turns nothing says of its limit what a search without levers says."""
    plan = tiled()
    assert (plan.levers, plan.max_micro_batch, plan.limited_by, plan.evidence) == (AS_IT_IS, 16, "memory", "exact")


def test_smallest_size_that_runs_is_known() -> None:
    """Where a single row was refused during the search, the plan says that two are needed."""

    class Normed(Tiled):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: Tensor) -> Tensor:
            clock.now += len(x) ** 2 * TICK_S  # the smaller the faster
            return super().forward(self.norm(x))

    plan = tune(Normed(), 8, sample=torch.randn(4, 64))
    assert any(trial.candidate.micro_batch == 1 for trial in plan.trials)
    assert plan.min_micro_batch == 2 and min(plan.micro_batch_sizes) == 2


# -- advice and remarks


def test_advice_says_what_checkpointing_is_for() -> None:
    """A plan that computes blocks again says how much more memory would make that needless."""
    assert any("more would make checkpointing needless at micro-batch 12" in said for said in turned().advice)


def test_advice_says_what_the_next_size_takes() -> None:
    """A plan at its limit says how much more the next larger micro-batch takes."""
    plan = tune(Net(), 12, "virtual:100KiB", levers="none")
    assert any("more would allow a micro-batch of 12 with the same levers" in said for said in plan.advice)


def test_lowest_peak_needs_no_advice() -> None:
    """Where the lowest peak is wanted, nobody asks what more memory would bring."""
    assert tune(Net(), 12, objective="memory").advice == ()


def test_noisy_times_are_said_to_be_so() -> None:
    """Where steps wander, the plan says how closely their time is known; where they do not, it does not."""
    noisy = tune(Tiled(wandering=0.5), 48)
    assert noisy.timing is not None
    assert any("is known to within" in warning for warning in noisy.warnings) == ((noisy.timing.interval_frac or 1) > 0.02)
    assert not any("is known to within" in warning for warning in tiled().warnings)


def test_batch_statistics_are_said_to_be_inexact() -> None:
    """Accumulating with BatchNorm in train mode is said not to be exactly the large batch, with the layer's name."""
    model = nn.Sequential(Tiled(), nn.BatchNorm1d(1))
    plan = tune(model, 48, sample=torch.randn(4, 64))
    assert plan.accumulation_steps > 1
    assert any("BatchNorm" in warning and " 1" in warning for warning in plan.warnings)


def test_nothing_is_said_twice() -> None:
    """Warnings, advice and skipped levels are each said once."""
    for plan in (turned(), tiled()):
        for said in (plan.warnings, plan.advice, plan.skipped):
            assert len(said) == len(set(said))


def test_skipped_levels_have_reasons() -> None:
    """What cannot be used on this model or device is listed with a sentence."""
    plan = tune(Tiled(), 2, levers="all")
    assert {("checkpointing", "full"), ("precision", "tf32")} <= {(one.lever, one.level) for one in plan.skipped}
    assert all(one.reason and not one.reason.endswith(".") for one in plan.skipped)


# -- the picture


def test_picture_is_of_the_chosen_setting() -> None:
    """The timeline is of the plan's micro-batch and levers: its peak is the predicted one, its limit the budget."""
    plan = turned()
    assert plan.timeline is not None and "micro-batch 12" in plan.timeline.title and "predicted" in plan.timeline.title
    highest = max(sum(at_once) for at_once in zip(*plan.timeline.held_bytes.values(), strict=True))
    assert highest == plan.predicted_peak_bytes
    assert plan.timeline.limit_bytes == plan.budget_bytes


# -- the record


@pytest.mark.parametrize("plan", [turned, tiled])
def test_plan_goes_through_json_with_all_of_it(plan: Any) -> None:
    """Settings, advice, timeline and trials are the same afterwards."""
    assert Plan.from_json(plan().to_json()) == plan()


def test_plan_says_what_it_was_made_with() -> None:
    """Levers, objective, target and where it ran are in the plan."""
    plan = turned()
    assert (plan.objective, plan.target_batch, plan.levers) == (
        "throughput",
        12,
        Levers(checkpointing="full", checkpointed_blocks=2),
    )
    assert plan.environment is not None and plan.environment.model == "Net" and "virtual" in plan.environment.device
    assert plan.memory is not None and plan.memory.trainable_parameters == 24
