"""predict: a plan for GPUs that are not here, and what it says when there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.flop_counter import FlopCounterMode

import autoaccum
from autoaccum import InvalidRequestError, NothingFitsError, Plan, predicting
from autoaccum.predicting import interval_frac
from autoaccum.prediction import gpu_traces
from autoaccum.prediction.allocator import replay
from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.gpu_traces import GpuTraces
from autoaccum.prediction.gpus import GPUS
from autoaccum.prediction.trace import KINDS
from autoaccum.records import Levers
from autoaccum.workload import Workload

from .predictions import GIB, LARGE, MIDDLE, SMALL, TURING, foreseen, meta_model, predict


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan that memory limits."""
    return predict()


# -- the plan


def test_plan_is_predicted(plan: Plan) -> None:
    """Nothing was run: the evidence is "predicted", there are no trials, and nothing is said to be measured."""
    assert (plan.evidence, plan.trials, plan.measured_peak_bytes, plan.step_time_s) == ("predicted", (), None, None)


def test_plan_makes_up_the_target(plan: Plan) -> None:
    """Micro-batches sum to the target and none is larger than what fits."""
    assert sum(plan.micro_batch_sizes) == plan.effective_batch == 10_000_000
    assert plan.micro_batch <= plan.max_micro_batch and plan.limited_by == "memory"


def test_peak_is_inside_the_gpu_and_the_next_size_is_not(plan: Plan) -> None:
    """The plan's peak is within the GPU's total, and with one micro-batch less per step it would not be."""
    assert plan.predicted_peak_bytes is not None
    assert plan.predicted_peak_bytes <= plan.budget_bytes == gpu_for(SMALL).total_bytes
    rows = -(-plan.target_batch // (plan.accumulation_steps - 1))
    growth = GpuTraces(Workload(meta_model(), torch.randn(4, 8))).on(gpu_for(SMALL)).growth
    assert replay(growth.events, growth.sizes(rows).tolist()).peak_reserved_bytes + gpu_for(SMALL).context_bytes > (
        plan.budget_bytes
    )


def test_kinds_sum_to_the_peak(plan: Plan) -> None:
    """What holds the peak sums to it, and every part is a known kind, the cache or the context."""
    found = foreseen(plan)
    assert sum(found.by_kind.values()) == found.peak_bytes == plan.predicted_peak_bytes
    assert set(found.by_kind) <= {*KINDS, "cached", "context"} and min(found.by_kind.values()) >= 0
    assert found.by_kind["context"] == gpu_for(SMALL).context_bytes


def test_kinds_are_of_the_model(plan: Plan) -> None:
    """Weights, gradients and AdamW's state are those of the parameters, within the rounding of a few tensors."""
    parameters = sum(parameter.numel() * 4 for parameter in meta_model().parameters())
    held = foreseen(plan).by_kind
    assert held["weights"] == pytest.approx(parameters, abs=4096)
    assert held["optimizer state"] == pytest.approx(2 * parameters, abs=16_384)
    assert held["workspaces"] == 2 * gpu_for(SMALL).workspace_bytes
    assert held["activations"] > 2 * 4096 * 4 * plan.micro_batch * 0.9


def test_interval_holds_the_peak(plan: Plan) -> None:
    """The peak lies inside its interval, which is as wide as the predictor is known to err."""
    found, error = foreseen(plan), interval_frac(meta_model())
    assert found.low_bytes < found.peak_bytes < found.high_bytes
    assert (found.high_bytes - found.low_bytes) / found.peak_bytes == pytest.approx(2 * error, rel=0.01)


def test_peak_near_the_limit_is_doubted(plan: Plan) -> None:
    """A plan whose interval reaches past the GPU says so, and what to do."""
    assert foreseen(plan).high_bytes > plan.budget_bytes
    assert any("prove it" in warning and "autotune" in warning for warning in plan.warnings)
    assert not any("prove it" in warning for warning in predict(16).warnings)


def test_convolutions_widen_the_interval() -> None:
    """A model with convolutions has a wider interval and says that cuDNN's workspaces are not known."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    assert interval_frac(model) > interval_frac(meta_model())
    found = foreseen(predict(64, model=model, sample=torch.randn(4, 3, 8, 8)))
    assert any("cuDNN" in text for text in found.not_modelled)
    assert not any("cuDNN" in text for text in foreseen(predict(64)).not_modelled)


@pytest.mark.slow
def test_recurrent_layers_are_said_not_to_be_modelled() -> None:
    """A model with recurrent layers says that cuDNN's reserve for them is not known."""

    class Recurrent(nn.GRU):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0].mean()

    found = foreseen(predict(64, model=Recurrent(8, 8, batch_first=True), sample=torch.randn(4, 3, 8), batch_dim=0))
    assert any("recurrent" in text for text in found.not_modelled)


def test_flops_are_those_of_torchs_counter() -> None:
    """The operations of one optimizer step are those that FlopCounterMode counts for its micro-batches."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    found = foreseen(predict(24, model=model, sample=torch.randn(4, 16), max_micro_batch=8))
    with FlopCounterMode(display=False) as counter:
        for _ in range(3):
            model(torch.randn(8, 16)).mean().backward()
    assert found.flops_per_step == counter.get_total_flops()


def test_phase_is_where_the_peak_is() -> None:
    """The peak of a single row is at the optimizer's step, that of many rows in the forward or backward pass."""
    assert foreseen(predict(1)).phase == "optimizer"
    assert foreseen(predict()).phase in ("forward", "backward")


def test_memory_account_is_in_the_plan(plan: Plan) -> None:
    """The account of parameters is the model's."""
    assert plan.memory is not None
    assert plan.memory.trainable_parameters == sum(parameter.numel() for parameter in meta_model().parameters())


def test_environment_says_that_nothing_is_here(plan: Plan) -> None:
    """The environment names the GPU and says that nothing was run on it."""
    assert plan.environment is not None
    assert plan.environment.device == SMALL and "nothing was run" in plan.environment.device_name


def test_target_that_fits_is_one_micro_batch() -> None:
    """A target that fits is run in one piece, limited by the target."""
    found = predict(16)
    assert (found.micro_batch_sizes, found.limited_by, found.max_micro_batch) == ((16,), "target", 16)


def test_default_optimizer_is_named_as_assumed(plan: Plan) -> None:
    """Without an optimizer AdamW is assumed, which the plan says."""
    assert plan.environment is not None and "AdamW (assumed)" in plan.environment.optimizer


def test_optimizer_decides() -> None:
    """Plain SGD has no state, and leaves room for more rows than AdamW."""
    with_sgd = predict(budget="1GiB", optimizer=lambda parameters: SGD(parameters, lr=0.1))
    assert "optimizer state" not in foreseen(with_sgd).by_kind
    assert with_sgd.max_micro_batch > predict(budget="1GiB").max_micro_batch


@pytest.mark.slow
def test_prediction_is_the_same_with_values() -> None:
    """A model with values, and one on the meta device, are predicted alike."""
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 8))
    real = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 8))
    assert foreseen(predict(10**9, model=meta)) == foreseen(predict(10**9, model=real))


def test_sample_may_be_a_data_set() -> None:
    """A data set bounds the micro-batch by its length."""
    data = torch.utils.data.TensorDataset(torch.randn(50, 8))
    found = predict(200, model=nn.Linear(8, 8), sample=data, training_step=lambda model, batch: model(batch[0]).mean())
    assert (max(found.micro_batch_sizes), found.limited_by, sum(found.micro_batch_sizes)) == (50, "data", 200)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"budget": "13GiB"}, r"larger than the RTX 3060 12GB, which has 11\.76 GiB"),
        ({"budget": "much"}, "budget="),
        ({"gpu": "RTX 9999"}, "nearest are"),
        ({"gpu": "RTX 3080"}, "several memory sizes"),
        ({"gpu": "50%"}, "a share of nothing"),
        ({"gpu": []}, "is no GPU; expected a name"),
        ({"gpu": [SMALL, "toaster"]}, "toaster"),
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 1.5}, "world_size=1.5"),
        ({"target": 4, "world_size": 8}, "world_size=8"),
        ({"target": 0}, "target_batch=0"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"max_micro_batch": 0}, "max_micro_batch=0"),
        ({"levers": "every"}, "levers='every'"),
        ({"picture": "step.pdf"}, r"\.svg or \.png"),
        ({"picture": "nowhere/step.svg"}, "nowhere"),
    ],
    ids=str,
)
def test_bad_calls_are_refused_before_anything_is_traced(
    more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that cannot be satisfied is refused with what is wrong, before the model is traced."""

    def trap(*args: object, **kwargs: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(gpu_traces, "fake_trace", trap)
    with pytest.raises(InvalidRequestError, match=said):
        predict(**more)


# -- when nothing fits


@pytest.mark.slow
def test_nothing_fits_names_the_gpu_that_would_do() -> None:
    """A model too large for the GPU is refused with what it needs, what weights take, and the smallest GPU that has it."""
    with torch.device("meta"):
        model = nn.Linear(32_768, 32_768)  # 4 GiB of weights, 16 with gradients and state
    with pytest.raises(NothingFitsError) as caught:
        predict(64, model=model, sample=torch.randn(2, 32_768))
    text = str(caught.value)
    assert "micro_batch=1 is predicted to need" in text and "on a RTX 3060 12GB" in text and "11.76 GiB" in text
    assert "Weights and buffers alone take 4.00 GiB, gradients 4.00 GiB" in text
    named = next(gpu for gpu in reversed(GPUS) if f"that much memory is the {gpu.name}." in text)
    assert predict(64, model=model, sample=torch.randn(2, 32_768), gpu=named).micro_batch >= 1
    smaller = GPUS[GPUS.index(named) - 1]
    with pytest.raises(NothingFitsError):
        predict(64, model=model, sample=torch.randn(2, 32_768), gpu=smaller)


@pytest.mark.slow
def test_nothing_listed_is_large_enough() -> None:
    """A model that no listed GPU holds is told the largest one, and what else could be done."""
    with torch.device("meta"):
        model = nn.Linear(200_000, 200_000)
    with pytest.raises(NothingFitsError, match=r"No listed GPU has that much \(the largest, .+, has .+\): shard"):
        predict(64, model=model, sample=torch.randn(2, 200_000), gpu="all")


def test_budget_below_the_weights() -> None:
    """A budget below the weights is refused with the weights' size."""
    with pytest.raises(NothingFitsError, match=r"may hold 200 MiB\. Weights and buffers alone take 64\.\d+ MiB"):
        predict(budget="200MiB")


def test_budget_below_the_context() -> None:
    """A budget of less than a context cannot hold anything."""
    with pytest.raises(NothingFitsError, match=r"may hold 1(\.00)? MiB"):
        predict(budget="1MiB")


# -- several GPUs


@pytest.fixture(scope="module")
def everywhere() -> Plan:
    """A model that needs some 17 GiB, on every listed GPU."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32_768, 32_768), nn.Tanh())
    return autoaccum.predict(model, torch.randn(2, 32_768), 64, gpu="all")


@pytest.mark.slow
def test_all_gpus_have_an_outlook(everywhere: Plan) -> None:
    """There is a row for every listed GPU, the smallest first."""
    rows = foreseen(everywhere).outlooks
    assert [row.gpu for row in rows] == [gpu.name for gpu in GPUS]
    assert [row.total_bytes for row in rows] == sorted(row.total_bytes for row in rows)


def test_plan_is_for_the_smallest_that_fits(everywhere: Plan) -> None:
    """The plan's GPU is the first row that fits, and rows before it do not."""
    rows = foreseen(everywhere).outlooks
    first = next(row for row in rows if row.fits)
    assert foreseen(everywhere).gpu == first.gpu
    assert (first.micro_batch, first.accumulation_steps) == (everywhere.micro_batch, everywhere.accumulation_steps)
    assert first.peak_bytes == everywhere.predicted_peak_bytes


def test_outlooks_are_sound(everywhere: Plan) -> None:
    """A row that fits has sizes and a peak inside its GPU; one that does not has none, and a peak above it."""
    for row in foreseen(everywhere).outlooks:
        assert row.fits == (row.peak_bytes <= row.total_bytes) == (row.micro_batch is not None)
        assert (row.micro_batch is None) == (row.accumulation_steps is None)


@pytest.mark.slow
def test_outlooks_are_what_each_gpu_alone_is_told() -> None:
    """A row is what a prediction for that GPU alone says, though GPUs share traces."""
    names = [TURING, SMALL, MIDDLE, "H100 80GB"]
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh())
    together = foreseen(predict(10**9, gpu=names, model=model)).outlooks
    for row in together:
        alone = predict(10**9, gpu=row.gpu, model=model)
        assert (row.micro_batch, row.peak_bytes) == (alone.micro_batch, alone.predicted_peak_bytes)


def test_one_gpu_has_no_table(plan: Plan) -> None:
    """For one GPU there are no outlooks."""
    assert foreseen(plan).outlooks == ()


def test_order_of_gpus_does_not_matter() -> None:
    """GPUs are looked at from the smallest, in whatever order they are named."""
    found = [predict(64, gpu=gpus) for gpus in ([LARGE, SMALL], [SMALL, LARGE])]
    assert found[0] == found[1] and foreseen(found[0]).gpu == SMALL


@pytest.mark.parametrize(
    "asked",
    [
        "24GiB",
        *(pytest.param(row, marks=pytest.mark.slow) for row in (24 * GIB, gpu_for(MIDDLE))),
        "nvidia geforce rtx 4090",
    ],
    ids=str,
)
def test_gpu_may_be_a_name_a_size_or_a_row(asked: Any) -> None:
    """A GPU is named, given by its bytes, or a row of the table."""
    found = predict(64, gpu=asked)
    assert 23 * GIB < foreseen(found).total_bytes <= 24 * GIB


# -- written down


def test_plan_survives_json(everywhere: Plan, tmp_path: Path) -> None:
    """A predicted plan comes back from JSON and from a file as it was."""
    assert Plan.from_json(everywhere.to_json()) == everywhere
    everywhere.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == everywhere


@pytest.mark.parametrize("written", [str, Plan.to_markdown, Plan.to_html], ids=["text", "markdown", "html"])
def test_reports_hold_the_prediction(written: Callable[[Plan], str], everywhere: Plan) -> None:
    """Text, Markdown and HTML say that it is predicted, what holds the peak, what is not modelled, and how GPUs compare."""
    text = written(everywhere)
    for part in (
        "predicted",
        "optimizer state",
        "context",
        "Not modelled",
        "TFLOP",
        "does not fit",
        foreseen(everywhere).gpu,
    ):
        assert part in text
    assert "measured peak" not in text


def test_report_of_one_gpu_has_the_interval(plan: Plan) -> None:
    """The summary shows the peak, the interval around it and the phase in which it is."""
    found = foreseen(plan)
    assert f"in the {found.phase} phase" in str(plan) and "between" in str(plan) and SMALL in str(plan)


def test_frame_of_trials_is_empty(plan: Plan) -> None:
    """Without trials the data frame has no rows."""
    assert len(plan.to_frame()) == 0


# -- pictures


@pytest.mark.parametrize(
    ("name", "begins"), [pytest.param("step.svg", b"<?xml", marks=pytest.mark.slow), ("step.png", b"\x89PNG")]
)
def test_picture_is_written(name: str, begins: bytes, tmp_path: Path) -> None:
    """A picture of the step is written beside the plan, in the format that its name asks for."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    predict(64, picture=tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_timeline_peaks_where_the_plan_does(plan: Plan) -> None:
    """The picture's peak is the plan's allocated peak, and its phases cover the last step."""
    request = autoaccum.request.Request(target_batch=plan.target_batch)
    predictor = predicting.Predictor(Workload(meta_model(), torch.randn(4, 8)), request, 1)
    drawn = predictor.memory_over_time(gpu_for(SMALL), plan.micro_batch, Levers())
    total = np.sum(list(drawn.held_bytes.values()), axis=0)
    assert total.max() == foreseen(plan).allocated_bytes
    assert drawn.limit_bytes == gpu_for(SMALL).usable_bytes
    assert [phase for _, phase in drawn.phases if phase != "data"] == ["forward", "backward"] * 2 + ["optimizer"]
    assert drawn.phases[0][0] == 0 and drawn.phases[-1][0] < len(total)


def test_nothing_is_drawn_when_nothing_fits(tmp_path: Path) -> None:
    """Without a plan there is no picture."""
    with pytest.raises(NothingFitsError):
        predict(budget="200MiB", picture=tmp_path / "step.svg")
    assert list(tmp_path.iterdir()) == []


def test_autocast_in_a_step_is_predicted() -> None:
    """The copies of weights that autocast keeps die in an order that varies, which is no reason to refuse."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).square().mean()

    assert autoaccum.predict(model, torch.randn(8, 64), 64, gpu="T4", training_step=step).micro_batch == 64
