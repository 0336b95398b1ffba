"""Predicted peaks of the device that is searched, and the search that starts from them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import autoaccum
from autoaccum.devices.virtual import VirtualDevice
from autoaccum.plan import Plan
from autoaccum.prediction import forecast as forecast_module
from autoaccum.prediction.allocator import replay
from autoaccum.prediction.allocator_settings import AllocatorSettings
from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.forecast import Forecast, Traced, in_blocks, in_pages, reason_of, traced
from autoaccum.prediction.growth import Growth, growth_of
from autoaccum.prediction.trace import Trace
from autoaccum.records import Fit, OutOfMemory
from autoaccum.request import Request
from autoaccum.tune import tune_workload
from autoaccum.workload import Workload

pytestmark = pytest.mark.slow

MIB = 2**20
Build = Callable[[], Workload]


class Reading(nn.Module):
    """Reads a value, which fake tensors refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x / max(1.0, x.detach().abs().max().item())


class Contrastive(nn.Module):
    """A matrix of rows times rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.left(x) @ self.right(x).t(), torch.arange(len(x)))


def mlp() -> Workload:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return Workload(model, torch.randn(4, 12, 16))


def long_mlp() -> Workload:
    """Rows of a hundred positions, beside which the rounding of blocks is nothing."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return Workload(model, torch.randn(4, 100, 16))


def convolutional() -> Workload:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 4))
    return Workload(model, torch.randn(4, 3, 16, 16), optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9))


def with_state() -> Workload:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = AdamW(model.parameters())
    model(torch.randn(2, 16)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Workload(model, torch.randn(4, 20, 16), optimizer=optimizer)


BUILDS: dict[str, Build] = {
    "mlp": mlp,
    "convolutional": convolutional,
    "with state": with_state,
    "contrastive": lambda: Workload(Contrastive(), torch.randn(4, 16)),
    "reading": lambda: Workload(Reading(), torch.randn(4, 20, 16)),
    "flat": lambda: Workload(nn.Linear(256, 256), torch.randn(4, 256)),
}


def forecast_of(workload: Workload, **more: Any) -> Forecast:
    device = VirtualDevice("1TiB")
    growth = growth_of(lambda rows: fake_trace(workload, rows, host_batch=False))
    return Forecast(growth, unit="storages", held_bytes=device.held_bytes(workload.resident()), **more)


def growth_by(
    *sizes_of_blocks: Callable[[int], int], kinds: tuple[Any, ...], events: tuple[int, ...] | None = None
) -> Growth:
    """A growth of which all sizes are known."""
    blocks = range(len(sizes_of_blocks))
    known = events or (*blocks, *(~block for block in reversed(blocks)))

    def trace_at(rows: int) -> Trace:
        return Trace(rows=rows, events=known, sizes=tuple(size(rows) for size in sizes_of_blocks), kinds=kinds)

    return growth_of(trace_at)


def measured(workload: Workload, rows: int) -> int:
    """The peak of a real probe of this size."""
    request = Request(target_batch=rows, predict=False)
    plan = tune_workload(workload, request, device=VirtualDevice("1TiB"))
    peaks = [
        trial.outcome.peak_bytes for trial in plan.trials if trial.purpose == "probe" and isinstance(trial.outcome, Fit)
    ]
    return peaks[-1]


# -- rounding


@pytest.mark.parametrize(
    ("asked", "held"),
    [(0, 0), (1, 1), (65_535, 65_535), (65_536, 69_632), (65_536 - 80, 65_456), (2**20, 2**20 + 4096), (2**20 - 80, 2**20)],
)
def test_large_host_allocations_are_whole_pages(asked: int, held: int) -> None:
    """From 64 KiB on an allocation takes whole pages, header and alignment included; below, what it asks for."""
    assert in_pages(np.array([asked])).tolist() == [held]


def test_blocks_are_multiples_of_512() -> None:
    """A storage takes whole blocks of 512 bytes, an empty one none."""
    assert in_blocks(np.array([0, 1, 512, 513, 2**40 + 1])).tolist() == [0, 512, 512, 1024, 2**40 + 512]


# -- peaks


@pytest.mark.parametrize("name", [name for name in BUILDS if name != "reading"])
def test_storages_are_exact(name: str) -> None:
    """On a virtual device the forecast of a size is the peak that a real probe measures, to the byte."""
    workload = BUILDS[name]()
    forecast = forecast_of(workload)
    assert [forecast.peak_bytes(rows) for rows in (1, 5, 64)] == [measured(workload, rows) for rows in (1, 5, 64)]


def test_held_bytes_are_added() -> None:
    """What the device held before counts in full, and the model's weights in it are not counted twice."""
    growth = growth_by(lambda n: 5120, lambda n: 1024 * n, kinds=("weights", "activations"), events=(0, 1, ~1))
    forecast = Forecast(growth, unit="storages", held_bytes=100_000)
    assert forecast.peak_bytes(10) == 100_000 + 10 * 1024


def test_state_that_is_there_is_not_counted_twice() -> None:
    """Optimizer state from earlier steps is part of what is held."""
    kinds = ("weights", "optimizer state", "activations")
    growth = growth_by(lambda n: 5120, lambda n: 10_240, lambda n: 1024 * n, kinds=kinds, events=(0, 1, 2, ~2))
    start = growth.start_event
    assert start == 0  # without marks
    growth.start_event = 1
    assert Forecast(growth, unit="storages", held_bytes=15_360).peak_bytes(10) == 15_360 + 10 * 1024


def test_whole_batch_on_the_host_is_counted() -> None:
    """Where a micro-batch is cut from a batch in the same memory, the rest of that batch counts as well."""
    workload = mlp()
    growth = growth_of(lambda rows: fake_trace(workload, rows, host_batch=True))
    part, whole = (Forecast(growth, unit="pages", held_bytes=0, whole_batch=size) for size in (None, 10_000))
    rest = in_pages(np.array([10_000 * 768])) - in_pages(np.array([2000 * 768]))
    assert whole.peak_bytes(2000) - part.peak_bytes(2000) == rest
    assert whole.peak_bytes(20_000) == part.peak_bytes(20_000)


def test_pages_are_more_than_what_was_asked_for() -> None:
    """The forecast in pages is that in bytes plus less than a page and a header for each storage."""
    growth = growth_by(lambda n: 70_000, lambda n: 100_000 * n, kinds=("activations",) * 2)
    assert Forecast(growth, unit="pages", held_bytes=0).peak_bytes(7) == 73_728 + 700_416


def test_segments_are_what_the_allocator_reserves() -> None:
    """The forecast in segments is what the replay of the allocator reserves, above what is held beside the weights."""
    workload = mlp()
    growth = growth_of(lambda rows: fake_trace(workload, rows, host_batch=False))
    start = growth.split(64, growth.start_event, in_blocks)
    forecast = Forecast(growth, unit="segments", held_bytes=300 * MIB)
    reserved = replay(growth.events, growth.sizes(64).tolist()).peak_reserved_bytes
    assert forecast.peak_bytes(64) == 300 * MIB - start["weights"] - start["optimizer state"] + reserved


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_follow_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's settings in the environment decide what is reserved."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, "expandable_segments:True")
    growth = growth_by(lambda n: 25 * MIB * n, kinds=("activations",))
    settings = AllocatorSettings(expandable_segments=True)
    expected = replay(growth.events, growth.sizes(1).tolist(), settings=settings).peak_reserved_bytes
    assert Forecast(growth, unit="segments", held_bytes=0).peak_bytes(1) == expected == 40 * MIB


def test_segments_are_never_below_what_is_held() -> None:
    """A device that holds more than everything replayed is still predicted to hold that."""
    growth = growth_by(lambda n: 600 * MIB, lambda n: n, kinds=("weights", "activations"), events=(0, 1, ~1))
    assert Forecast(growth, unit="segments", held_bytes=500 * MIB).peak_bytes(1) >= 500 * MIB


def test_error_grows_with_the_coarseness_of_the_unit() -> None:
    """The known error is the smallest for storages and the largest for segments, and below a tenth."""
    growth = growth_by(lambda n: n, kinds=("activations",))
    errors = [Forecast(growth, unit=unit, held_bytes=0).error_frac for unit in ("storages", "pages", "segments")]
    assert errors == sorted(set(errors)) and errors[0] > 0 and errors[-1] < 0.1


def test_peaks_ascend() -> None:
    """More rows never need less, counted in storages."""
    forecast = forecast_of(mlp())
    peaks = [forecast.peak_bytes(rows) for rows in range(1, 200)]
    assert peaks == sorted(peaks)


# -- tracing for a search


def test_trace_without_trouble_has_no_note() -> None:
    """A workload that fake tensors take is traced without a word."""
    found = traced(mlp(), VirtualDevice("1GiB"))
    assert found.growth is not None and found.note is None


def test_reason_is_one_short_line() -> None:
    """An error of many lines is told by its class and its first line, cut at a length."""
    assert reason_of(ValueError("\n\n  first line \nsecond")) == "ValueError: first line"
    assert len(reason_of(ValueError("x" * 10_000))) < 320
    assert reason_of(ValueError()) == "ValueError: "


def test_real_traces_run_under_the_budget() -> None:
    """Traces on real tensors run under the budget, and a model too large for it is searched without a prediction."""
    plan = autoaccum.autotune(
        Reading(), torch.randn(4, 16), 64, device="virtual:1GiB", budget="44KiB", progress=False, levers="none"
    )
    assert plan.max_micro_batch >= 1


# -- the search that starts from it

TARGET = 120


def plan_of(build: Build, budget: int, predict: bool, target: int = TARGET, **more: Any) -> Plan:
    torch.manual_seed(0)
    request = Request(target_batch=target, budget=budget, predict=predict, **more)
    return tune_workload(build(), request, device=VirtualDevice("1TiB"))


def answer(plan: Plan) -> tuple[Any, ...]:
    return plan.micro_batch_sizes, plan.max_micro_batch, plan.limited_by


def probes(plan: Plan) -> int:
    return sum(trial.purpose == "probe" for trial in plan.trials)


def failures(plan: Plan) -> int:
    return sum(isinstance(trial.outcome, OutOfMemory) for trial in plan.trials)


@pytest.fixture(scope="module")
def peaks() -> dict[str, list[int]]:
    """The true peak of every size of each workload, from index 1 on."""
    found = {}
    with torch.random.fork_rng(devices=[]):
        for name, build in BUILDS.items():
            workload = build()
            growth = traced_growth(workload)
            found[name] = [0, *(int(growth.live(rows, in_blocks).max()) for rows in range(1, TARGET + 1))]
    return found


def traced_growth(workload: Workload) -> Growth:
    """Of a workload that may only run on real tensors."""
    with autoaccum.preserve.preserved(workload.module, workload.own_optimizer, device=torch.device("cpu")) as snapshot:
        growth = traced(workload, VirtualDevice("1TiB"), snapshot=snapshot).growth
    assert growth is not None
    return growth


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        *((name, 33) for name in BUILDS),
        *(("contrastive", 12), ("mlp", 117)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mlp", 12), ("contrastive", 117))),
    ],
)
def test_plan_is_that_of_a_search_without_prediction(name: str, fits: int, peaks: dict[str, list[int]]) -> None:
    """For the budget of a size's peak, the plan is the one found without a prediction, in at most 4 probes and 1 failure."""
    budget = peaks[name][fits]
    found, plain = (plan_of(BUILDS[name], budget, predict) for predict in (True, False))
    assert answer(found) == answer(plain)
    assert probes(found) <= 4 and failures(found) <= 1
    assert found.measured_peak_bytes is not None and found.measured_peak_bytes <= budget


@pytest.mark.slow
def test_many_budgets_take_few_probes() -> None:
    """Over many budgets the median is at most 2 probes without a failure, and every answer is the largest that fits."""
    numbers = random.Random(0)
    growth = traced_growth(long_mlp())
    peaks = [0, *(int(growth.live(rows, in_blocks).max()) for rows in range(1, TARGET + 1))]
    budgets = [numbers.randint(peaks[8], peaks[-1]) for _ in range(8)]
    plans = [plan_of(long_mlp, budget, True) for budget in budgets]
    for budget, plan in zip(budgets, plans, strict=True):
        assert plan.max_micro_batch == max(size for size in ladder(plan) if peaks[size] <= budget)
    assert np.median([probes(plan) for plan in plans]) <= 2
    assert np.median([failures(plan) for plan in plans]) == 0


def ladder(plan: Plan) -> list[int]:
    """Sizes of use: the target divided by a number of micro-batches, rounded up."""
    return sorted({-(-plan.target_batch // steps) for steps in range(1, plan.target_batch + 1)})


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"multiple_of": 4}, {"equal_micro_batches": True}, {"max_micro_batch": 27}], ids=str)
def test_plan_under_conditions_is_that_without_prediction(more: dict[str, Any], peaks: dict[str, list[int]]) -> None:
    """Whatever else is asked for, a prediction does not change the plan."""
    budget = peaks["mlp"][32]
    found, plain = (plan_of(mlp, budget, predict, **more) for predict in (True, False))
    assert answer(found) == answer(plain)


def test_plan_says_what_was_predicted(peaks: dict[str, list[int]]) -> None:
    """The predicted peak of the plan's own size stands beside the measured one, and is the same on a virtual device."""
    plan = plan_of(mlp, peaks["mlp"][32], True)
    probed = [t.outcome.peak_bytes for t in plan.trials if isinstance(t.outcome, Fit) and t.purpose == "probe"]
    assert plan.predicted_peak_bytes == peaks["mlp"][plan.micro_batch]
    assert plan.predicted_peak_bytes in probed


def test_search_without_prediction_predicts_nothing() -> None:
    """With predict=False nothing is traced and the plan has no predicted peak."""
    assert plan_of(mlp, 2**30, False).predicted_peak_bytes is None


@pytest.mark.parametrize("factor", [0.0, 0.33, pytest.param(3.0, marks=pytest.mark.slow), 1e9])
def test_wrong_forecast_changes_no_answer(
    factor: float, peaks: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forecast three times too high or low, or useless, costs at most 4 probes and never the answer."""
    budget = peaks["mlp"][42]
    plain = plan_of(mlp, budget, False)
    true = Forecast._live_peak
    monkeypatch.setattr(Forecast, "_live_peak", lambda self, rows: int(factor * true(self, rows)))
    found = plan_of(mlp, budget, True)
    assert answer(found) == answer(plain)
    assert probes(found) <= probes(plain) + 4


def test_error_while_tracing_does_not_stop_the_search(peaks: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """When tracing breaks in a way nobody foresaw, the plan is found without it, and the reason is said."""

    def broken(*args: object, **more: object) -> Traced:
        raise SystemError("a changed torch")

    budget = peaks["mlp"][42]
    plain = plan_of(mlp, budget, False)
    monkeypatch.setattr(forecast_module, "fake_trace", broken)
    found = plan_of(mlp, budget, True)
    assert answer(found) == answer(plain)
    assert any("No prediction" in warning and "a changed torch" in warning for warning in found.warnings)


def test_model_that_is_refused_says_so_once(peaks: dict[str, list[int]]) -> None:
    """A plan for a model that fake tensors refuse names the operation in one warning."""
    plan = plan_of(BUILDS["reading"], peaks["reading"][22], True)
    (note,) = [warning for warning in plan.warnings if "fake tensors" in warning]
    assert "aten._local_scalar_dense" in note and plan.predicted_peak_bytes == peaks["reading"][plan.micro_batch]


def test_few_sizes_are_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are two sizes to try, nothing is traced."""

    def trap(*args: object, **more: object) -> Traced:
        raise AssertionError("traced")

    monkeypatch.setattr("autoaccum.session.forecasts.traced", trap)
    assert plan_of(mlp, 2**30, True, target=2).micro_batch_sizes == (2,)
    with pytest.raises(AssertionError, match="traced"):
        plan_of(mlp, 2**30, True, target=3)


@pytest.mark.parametrize("exact", [True, False])
def test_probe_starts_from_the_forecast(exact: bool, peaks: dict[str, list[int]]) -> None:
    """A probe finds the same limit as trying every size would, in at most 5 probes and 2 failures."""
    workload = mlp()
    result = autoaccum.probe(
        workload.model, workload.source.take(4), device="virtual:1TiB", exact=exact,
        budget=peaks["mlp"][72], max_micro_batch=TARGET, progress=False,
    )  # fmt: skip
    limit = max(size for size in range(1, TARGET) if peaks["mlp"][size] <= peaks["mlp"][72])
    assert (limit if exact else 0.95 * limit) <= result.max_micro_batch <= limit
    assert len(result.trials) <= 5
    assert sum(isinstance(trial.outcome, OutOfMemory) for trial in result.trials) <= 2
