"""predict and its command: a plan for GPUs that are not here, and what it says when there is none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.flop_counter import FlopCounterMode

import autoaccum
from autoaccum import InvalidRequestError, NothingFitsError, Plan, cli, predicting
from autoaccum.errors import AutoaccumError
from autoaccum.predicting import GpuTraces, interval_frac
from autoaccum.prediction.allocator import replay
from autoaccum.prediction.gpus import GPUS, Gpu, gpu_for
from autoaccum.prediction.growth import NotAffineError
from autoaccum.prediction.trace import KINDS
from autoaccum.records import Levers, PlanRecord, Prediction
from autoaccum.tune import gpus_for
from autoaccum.workload import Workload

MIB, GIB = 2**20, 2**30
SMALL, MIDDLE, LARGE = "RTX 3060 12GB", "RTX 4090 24GB", "A100 80GB"


def heavy(width: int = 4096, depth: int = 3, hidden: int = 8) -> nn.Module:
    """A model without values; each row keeps `depth` wide activations."""
    layers: list[nn.Module] = [nn.Linear(hidden, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    with torch.device("meta"):
        return nn.Sequential(*layers, nn.Linear(width, hidden)).to("meta")


def predict(
    target: int = 10_000_000, gpu: Any = SMALL, model: nn.Module | None = None, sample: Any = None, **more: Any
) -> Plan:
    """A plan for a model of 34 million parameters, of which 12 GiB hold some hundred thousand rows."""
    with traced_once() if model is sample is None and not more.keys() & STEP else nullcontext():
        given = meta_model() if model is None else model
        return autoaccum.predict(given, torch.randn(4, 8) if sample is None else sample, target, gpu=gpu, **more)


STEP = {"loss_fn", "training_step", "optimizer", "weight", "batch_dim", "split"}

_TRACED: dict[object, Any] = {}


@contextmanager
def traced_once(target: str = "") -> Iterator[None]:
    """The training step of this target is traced for each GPU once, for all tests."""
    true = predicting._isolated

    def isolated(attempt: Any) -> Any:
        traces, (gpu,) = attempt.func.__self__, attempt.args
        key = (target, repr(gpu), traces._multiple_of, traces._levers)
        if key not in _TRACED:
            _TRACED[key] = true(attempt)
        return _TRACED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "_isolated", isolated)
        yield


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 8))


def foreseen(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


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


# -- bounds


def test_multiple_of_holds() -> None:
    """Every micro-batch but the last is a multiple, and so is the limit."""
    found = predict(multiple_of=64)
    assert all(size % 64 == 0 for size in found.micro_batch_sizes[:-1]) and found.max_micro_batch % 64 == 0
    assert sum(found.micro_batch_sizes) == 10_000_000


def test_equal_micro_batches_are_equal() -> None:
    """One size for all micro-batches divides the target, and fits."""
    found = predict(100_000, equal_micro_batches=True, budget="1GiB")
    assert len(set(found.micro_batch_sizes)) == 1 and found.accumulation_steps > 1
    assert found.predicted_peak_bytes is not None and found.predicted_peak_bytes <= found.budget_bytes


def test_equal_micro_batches_take_few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size for all is found without replaying every size below the limit."""
    sizes: list[int] = []
    true = predicting.replay
    monkeypatch.setattr(predicting, "replay", lambda *args, **more: (sizes.append(1), true(*args, **more))[1])
    predict(100_000, equal_micro_batches=True, budget="1GiB")
    assert len(sizes) <= 40


def test_callers_bound_holds() -> None:
    """No micro-batch is above the caller's bound, which the plan names as the limit."""
    found = predict(max_micro_batch=1000)
    assert (found.micro_batch, found.max_micro_batch, found.limited_by) == (1000, 1000, "caller")


def test_world_size_divides_the_target() -> None:
    """Over eight ranks each takes its share, and the plan's schedules sum to the target."""
    found = predict(10_000_001, world_size=8)
    assert (found.world_size, found.rank, sum(found.micro_batch_sizes)) == (8, 0, 1_250_001)
    assert sum(sum(found.schedule(rank)) for rank in range(8)) == 10_000_001


def test_budget_is_held() -> None:
    """With a budget the peak, context included, stays inside it."""
    half, whole = predict(budget="50%"), predict()
    assert half.budget_bytes == gpu_for(SMALL).total_bytes // 2
    assert half.predicted_peak_bytes is not None and half.predicted_peak_bytes <= half.budget_bytes
    assert half.max_micro_batch < whole.max_micro_batch


def test_more_memory_is_never_less_rows() -> None:
    """A larger budget does not lower the micro-batch."""
    found = [predict(budget=f"{gib}GiB").max_micro_batch for gib in (2, 5, 11)]
    assert found == sorted(found) and found[0] < found[-1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"budget": "13GiB"}, r"larger than the RTX 3060 12GB, which has 11\.76 GiB"),
        ({"budget": "much"}, "budget="),
        ({"gpu": "RTX 9999"}, "nearest are"),
        ({"gpu": "RTX 3080"}, "several memory sizes"),
        ({"gpu": "50%"}, "a share of nothing"),
        ({"gpu": []}, "no GPU was named"),
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

    monkeypatch.setattr(predicting, "fake_trace", trap)
    with pytest.raises(InvalidRequestError, match=said):
        predict(**more)


# -- when nothing fits


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


def test_outlooks_are_what_each_gpu_alone_is_told() -> None:
    """A row is what a prediction for that GPU alone says, though GPUs share traces."""
    names = [TURING, SMALL, MIDDLE, "H100 80GB"]
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh())
    together = foreseen(predict(10**9, gpu=names, model=model)).outlooks
    for row in together:
        alone = predict(10**9, gpu=row.gpu, model=model)
        assert (row.micro_batch, row.peak_bytes) == (alone.micro_batch, alone.predicted_peak_bytes)


TURING = "T4 16GB"


def test_gpus_share_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all GPUs together a model is traced a few times, not once for each."""
    count = []
    true = predicting.fake_trace
    monkeypatch.setattr(predicting, "can_run_apart", lambda: False)  # to see the calls
    monkeypatch.setattr(predicting, "fake_trace", lambda *args, **more: (count.append(1), true(*args, **more))[1])
    predict(64, gpu="all", model=nn.Linear(8, 8))
    assert 2 <= len(count) <= 10


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


def test_all_is_every_listed_gpu() -> None:
    """The word "all", however written, is the table."""
    assert gpus_for("all") == gpus_for(" ALL ") == GPUS
    assert [gpu.name for gpu in gpus_for([LARGE, SMALL])] == [SMALL, LARGE]
    assert isinstance(gpus_for("24GiB")[0], Gpu)


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


# -- nothing is left behind, and what cannot be traced


@pytest.mark.parametrize("reads", [False, True], ids=["fake", "real"])
def test_predicting_leaves_nothing(reads: bool) -> None:
    """Parameters, buffers, gradients, optimizer state and generators are as they were, on fake tensors and on real ones."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        random.random(), np.random.rand()
        loss = model(batch).square().mean()
        return loss * float(loss.detach() > -1) if reads else loss

    def state() -> list[Tensor]:
        kept = [value for entry in optimizer.state.values() for value in entry.values()]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [tensor.clone() for tensor in (*model.state_dict().values(), *kept, *gradients, torch.get_rng_state())]

    def others() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), [module.training for module in model.modules()]

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = AdamW(model.parameters())
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    sample = torch.randn(4, 8)
    tensors, rest = state(), others()
    found = foreseen(predict(64, model=model, sample=sample, training_step=step, optimizer=optimizer))
    assert any("real tensors" in text for text in found.not_modelled) is reads
    assert [index for index, pair in enumerate(zip(tensors, state(), strict=True)) if not torch.equal(*pair)] == []
    assert others() == rest


def test_step_that_reaches_for_the_model_leaves_nothing() -> None:
    """A training step that runs the real model by its name changes no batch statistics of it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    predict(64, model=model, training_step=lambda _, batch: model(batch).mean())
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])] == []


class Reading(nn.Module):
    """Reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * x.detach().abs().max().item()


def test_model_that_fake_tensors_refuse_is_traced_on_real_ones() -> None:
    """A model that reads a value is predicted from real passes at small sizes, which the plan says with the operation."""
    plan = predict(64, model=Reading())
    assert any("aten._local_scalar_dense" in text for text in plan.warnings)
    assert any("real tensors" in text for text in foreseen(plan).not_modelled)


def test_meta_model_that_fake_tensors_refuse() -> None:
    """Without values it cannot be traced at all: the operation and the remedy are named."""
    with torch.device("meta"):
        model = Reading()
    with pytest.raises(InvalidRequestError, match=r"aten\._local_scalar_dense.+on the cpu and hold values"):
        predict(64, model=model)


def test_too_large_a_model_is_not_traced_on_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where host memory cannot hold a real step, the model is refused with what it would take."""

    class Free:
        available = 1000

    monkeypatch.setattr(predicting.psutil, "virtual_memory", Free)
    with pytest.raises(InvalidRequestError, match=r"of host memory, of which 1000 B|of host memory, of which .+ are free"):
        predict(64, model=Reading())


def test_loop_over_rows_is_refused() -> None:
    """A model whose allocations a few traces do not tell is refused, as an error of autoaccum's own."""

    class Rowwise(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([super(Rowwise, self).forward(row).square().mean() for row in x]).mean()

    with pytest.raises((NotAffineError, InvalidRequestError), match="rows"):
        predict(64, model=Rowwise(8, 8))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_users_error_comes_out(device: str) -> None:
    """What the user's code raises comes out unchanged."""
    error = LookupError("no such column")

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        raise error

    with pytest.raises(LookupError) as caught:
        predict(64, model=nn.Linear(8, 8, device=device), training_step=step)
    assert caught.value is error


def test_meta_model_is_refused_where_it_would_run() -> None:
    """Autotune and probe refuse a model without values, and say what takes it."""
    for call in (
        lambda: autoaccum.autotune(meta_model(), torch.randn(4, 8), 64, levers="none"),
        lambda: autoaccum.probe(meta_model(), torch.randn(4, 8)),
    ):
        with pytest.raises(InvalidRequestError, match=r"meta device and holds no values.+only predict"):
            call()


@pytest.mark.slow
def test_seven_billion_parameters_fit_a_laptop(run_child: Any) -> None:
    """A language model of seven billion parameters is predicted in under a minute and 2 GiB of resident memory."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    seconds, resident, parameters, peak_bytes = run_child(
        """
        import resource, time
        from autoaccum.prediction.gpus import gpu_for
        from autoaccum.predicting import predict_workload
        from autoaccum.request import Request
        from autoaccum.targets import load_target
        begun = time.monotonic()
        options = "hidden_size=4096&num_hidden_layers=32&num_attention_heads=32&intermediate_size=11008&vocab_size=32000"
        workload = load_target(f"hf:llama?{options}&seq_len=512", without_values=True)
        plan = predict_workload(workload, Request(target_batch=8), [gpu_for("H200")])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer([time.monotonic() - begun, peak, plan.memory.trainable_parameters, plan.predicted_peak_bytes])
        """
    )
    assert parameters > 6.5e9 and seconds < 60 and resident < 2 * GIB
    assert 16 * parameters < peak_bytes <= gpu_for("H200").total_bytes


# -- the command


def run(*arguments: str) -> int:
    """Run the command line in this process, to its exit code."""
    with traced_once(GPT) if arguments[0] == GPT else nullcontext(), pytest.raises(SystemExit) as ended:
        cli.main(["predict", *arguments])
    return int(ended.value.code or 0)


GPT = "demo:gpt?layers=1&width=64&vocabulary=128&seq_len=16"


def test_command_shows_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 0 and shows the plan and its prediction."""
    assert run(GPT, "--target-batch", "64", "--gpu", SMALL) == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown and SMALL in shown and "64 samples" in shown


def test_command_writes_json_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json - standard output is the plan, and nothing else."""
    assert run(GPT, "--target-batch", "64", "--gpu", SMALL, "--json", "-") == 0
    found = Plan.from_json(capsys.readouterr().out)
    assert (found.evidence, found.target_batch, foreseen(found).gpu) == ("predicted", 64, SMALL)


def test_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan, report and picture go to the files that are named."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = [tmp_path / name for name in ("plan.json", "plan.md", "step.svg")]
    options = [part for pair in zip(("--json", "--markdown", "--picture"), map(str, files), strict=True) for part in pair]
    assert run(GPT, "--target-batch", "64", "--gpu", SMALL, *options) == 0
    assert files[1].read_text() == Plan.load(files[0]).to_markdown()
    assert files[2].read_bytes().startswith(b"<?xml")


def test_command_takes_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """--gpu may be given several times: the table has a row for each."""
    assert run(GPT, "--target-batch", "64", "--gpu", LARGE, "--gpu", SMALL, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["prediction"]["outlooks"]
    assert [row["gpu"] for row in rows] == [SMALL, LARGE]


@pytest.mark.slow
def test_command_takes_all_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """--gpu all shows every listed GPU."""
    assert run(GPT, "--target-batch", "64", "--gpu", "all") == 0
    shown = capsys.readouterr().out
    assert [gpu.name for gpu in GPUS if gpu.name not in shown] == []


def test_command_passes_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option arrives under the name of its keyword."""
    seen: list[Any] = []

    def answer(*given: Any) -> str:
        seen.extend(given)
        return "stopped"

    monkeypatch.setattr("autoaccum.worker.child.predicted_target", answer)
    options = "--target-batch 9 --budget 80% --max-micro-batch 4 --multiple-of 2 --world-size 2 --levers none"
    run("demo:gpt", "--gpu", "24GiB", *options.split(), "--equal-micro-batches", "--picture", "p.svg")
    numbers = {
        "target_batch": 9,
        "budget": "80%",
        "levers": "none",
        "max_micro_batch": 4,
        "multiple_of": 2,
        "equal_micro_batches": True,
    }
    assert seen == ["demo:gpt", ("24GiB",), numbers, 2, "p.svg"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([GPT, "--target-batch", "64", "--gpu", "1GiB", "--budget", "300MiB"], 1, "is predicted to need"),
        ([GPT, "--target-batch", "64", "--gpu", "RTX 3600"], 2, "nearest are"),
        ([GPT, "--target-batch", "64", "--gpu", "RTX 3080"], 2, "several memory sizes"),
        ([GPT, "--target-batch", "64", "--gpu", SMALL, "--budget", "20GiB"], 2, "larger than the"),
        ([GPT, "--target-batch", "64", "--gpu", SMALL, "--picture", "step.gif"], 2, ".svg or .png"),
        ([GPT, "--target-batch", "64", "--gpu", SMALL, "--json", "nowhere/plan.json"], 2, "does not exist"),
        ([GPT, "--target-batch", "1", "--gpu", SMALL, "--world-size", "2"], 2, "world_size=2"),
        (["demo:gtp", "--target-batch", "64", "--gpu", SMALL], 2, "gtp"),
        ([GPT, "--gpu", SMALL], 2, "--target-batch"),
        ([GPT, "--target-batch", "64"], 2, "--gpu"),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_command_that_cannot_answer(arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit ends with 1, what is wrong with 2; the reason is on stderr alone."""
    assert run(*arguments) == code
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


TARGETS = """
import torch
from torch import nn


def failing():
    return Failing(), torch.randn(4, 8)


class Failing(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        print("printed by forward")
        raise LookupError("the table is damaged")


def meta():
    with torch.device("meta"):
        return nn.Linear(8, 8), torch.randn(4, 8, device="cpu")
"""


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file with targets."""
    path = tmp_path / "targets.py"
    path.write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    return path


def test_command_shows_the_users_error(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error in the user's code ends with 2, shown as the user's traceback; what the code prints is not the answer."""
    assert run(f"{targets}:failing", "--target-batch", "64", "--gpu", SMALL, "--json", "-") == 2
    shown = capsys.readouterr()
    assert "the table is damaged" in shown.err and "printed by forward" in shown.err and shown.out == ""


def test_command_takes_a_meta_model_and_check_does_not(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target on the meta device can be predicted; to check it, it needs values, which is said."""
    assert run(f"{targets}:meta", "--target-batch", "64", "--gpu", SMALL) == 0
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", f"{targets}:meta"])
    assert ended.value.code == 2
    assert "meta device and holds no values" in capsys.readouterr().err


def test_target_is_built_without_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A built-in target takes no memory for its weights: it is on the meta device when it is predicted."""
    seen: list[Workload] = []

    def look(workload: Workload, *args: Any, **more: Any) -> PlanRecord:
        seen.append(workload)
        raise AutoaccumError("seen")

    monkeypatch.setattr("autoaccum.worker.child.predict_workload", look)
    assert run("demo:gpt", "--target-batch", "64", "--gpu", SMALL) == 2
    assert {parameter.device.type for parameter in seen[0].module.parameters()} == {"meta"}


def test_autocast_in_a_step_is_predicted() -> None:
    """The copies of weights that autocast keeps die in an order that varies, which is no reason to refuse."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).square().mean()

    assert autoaccum.predict(model, torch.randn(8, 64), 64, gpu="T4", training_step=step).micro_batch == 64


def test_no_gpu_at_all_is_refused() -> None:
    """An empty list names no GPU to predict for."""
    with pytest.raises(InvalidRequestError, match=r"gpu=\[\] is no GPU"):
        gpus_for([])
