"""Forward passes under autocast: what runs in which type, what stays float32, and a scaler where float16 needs one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from autoaccum import Accumulator
from autoaccum.devices import VirtualDevice
from autoaccum.levers import Subject, applied, autocast_for, under_autocast
from autoaccum.levers.precision import Precision
from autoaccum.preserve import preserved
from autoaccum.probing import run_trial
from autoaccum.records import Candidate, Fit, Levers
from autoaccum.workload import Workload

from .models import CASE_NAMED, HOST, Mlp, Stack, plan_of, seed

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
low = pytest.mark.parametrize("level", list(TYPES))


class Recording(nn.Module):
    """Notes in which types its layers ran."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        out: Tensor = self.head(hidden)
        self.seen += [hidden.dtype, out.dtype]
        return out


def subject(module: nn.Module) -> Subject:
    return Subject(module, HOST)


# The model's own forward pass.


@low
def test_layers_run_in_low_precision(level: str) -> None:
    """While inside, matrix products of the model's forward pass are computed in the level's type, and not afterwards."""
    model = Recording()
    with applied(Levers(precision=level), subject(model)):
        model(torch.randn(2, 8))
    model(torch.randn(2, 8))
    assert model.seen == [TYPES[level]] * 2 + [torch.float32] * 2


@low
def test_results_are_float32(level: str) -> None:
    """Outside of a region of the caller's the model returns float32, with its graph."""
    model = Recording()
    with applied(Levers(precision=level), subject(model)):
        out = model(torch.randn(2, 8))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@low
def test_results_in_structures_are_float32(level: str) -> None:
    """Tensors in tuples, dictionaries and named tuples are float32 as well; what is no low precision stays as it is."""

    class Out(NamedTuple):
        logits: Tensor
        more: dict[str, Any]

    class Structured(Recording):
        def forward(self, x: Tensor) -> Out:  # type: ignore[override]
            return Out(self.head(x), {"wide": self.body(x).double(), "count": x.argmax(1), "none": None, "name": "text"})

    model = Structured()
    with applied(Levers(precision=level), subject(model)):
        out = model(torch.randn(2, 8))
    assert isinstance(out, Out)
    assert (out.logits.dtype, out.more["wide"].dtype, out.more["count"].dtype) == (torch.float32, torch.float64, torch.int64)
    assert (out.more["none"], out.more["name"]) == (None, "text")


@low
def test_results_of_transformers_are_float32(level: str) -> None:
    """An output of transformers stays one, with float32 in it."""
    made = CASE_NAMED["bert"].make(torch.float32)
    with applied(Levers(precision=level), subject(made.module)):
        out = made.module(**made.batches[0])
    assert type(out).__name__ == "MaskedLMOutput"
    assert (out.loss.dtype, out.logits.dtype) == (torch.float32, torch.float32)


@low
def test_regions_of_the_callers_decide(level: str) -> None:
    """Inside of a region of the caller's the model returns what it returns there, so that the loss decides for itself."""
    model = Recording()
    with applied(Levers(precision=level), subject(model)), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 8)).dtype == torch.bfloat16


@low
def test_regions_inside_of_the_model_decide(level: str) -> None:
    """A part of the model that switches autocast off for itself runs in float32."""

    class Careful(Recording):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    model = Careful()
    with applied(Levers(precision=level), subject(model)):
        model(torch.randn(2, 8))
    assert model.seen == [torch.float32] * 2


@low
def test_nothing_of_the_model_is_cast(level: str) -> None:
    """Weights, buffers and integers keep their types and bytes."""
    made = CASE_NAMED["adapters on integers"].make(torch.float32)
    before = {name: tensor.clone() for name, tensor in made.module.state_dict().items()}
    with applied(Levers(precision=level), subject(made.module)):
        made.loss(made.module, made.batches[0]).backward()
        during = {name: tensor.dtype for name, tensor in made.module.state_dict().items()}
    assert during == {name: tensor.dtype for name, tensor in before.items()}
    assert all(torch.equal(before[name], tensor) for name, tensor in made.module.state_dict().items())
    assert torch.uint8 in during.values()


@low
def test_autocast_is_off_outside_of_the_model(level: str) -> None:
    """Around the model's calls no region is open."""
    model = Recording()
    with applied(Levers(precision=level), subject(model)):
        model(torch.randn(2, 8))
        assert not torch.is_autocast_enabled("cpu")


@low
def test_signature_is_the_models(level: str) -> None:
    """What looks at the parameters of `forward`, as libraries do to choose a batch's entries, sees the model's own."""
    model = Recording()
    with applied(Levers(precision=level), subject(model)):
        assert list(inspect.signature(model.forward).parameters) == ["x"]


@low
def test_blocks_that_are_computed_again_are_in_the_same_type(level: str) -> None:
    """With checkpointing as well, gradients are those of low precision alone."""
    gradients = []
    for more in (
        {},
        {"checkpointing": "full", "checkpointed_blocks": 2},
        {"checkpointing": "selective", "checkpointed_blocks": 2},
    ):
        seed()
        model = Stack(Mlp(), Mlp())
        with applied(Levers(precision=level, **more), subject(model)):
            model(torch.randn(4, 8)).sin().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, gradients[0], gradients[1]))  # type: ignore[arg-type]
    assert all(map(torch.equal, gradients[0], gradients[2]))  # type: ignore[arg-type]


# A region for forward pass and loss.


@low
def test_region_of_a_level(level: str) -> None:
    """The region for a forward pass and its loss has the level's type."""
    with autocast_for(Levers(precision=level), HOST):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == TYPES[level]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("level", ["fp32", "tf32"])
def test_region_of_no_level_changes_nothing(level: str, is_on: bool) -> None:
    """Without autocast to ask for the region leaves the caller's as it is, on or off."""
    levers = Levers(precision=level)
    with torch.autocast("cpu", dtype=torch.float16, enabled=is_on), autocast_for(levers, HOST):
        assert torch.is_autocast_enabled("cpu") is is_on
        assert not is_on or torch.get_autocast_dtype("cpu") == torch.float16


@low
def test_loss_is_float32_and_computed_in_the_region(level: str) -> None:
    """The loss of a micro-batch is computed with autocast on, and is float32 itself."""
    seen = []

    def loss(batch: Tensor) -> Tensor:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return (batch @ batch).mean()

    assert under_autocast(loss, Levers(precision=level), HOST)(torch.randn(4, 4)).dtype == torch.float32
    assert seen == [TYPES[level]]


def test_without_a_level_the_loss_is_the_same_function() -> None:
    """Where precision is off, nothing is put around the loss."""
    assert under_autocast(torch.mean, Levers(), HOST) is torch.mean


# Training.


def accumulated(model: nn.Module, levers: Levers, **options: Any) -> tuple[Accumulator, list[Tensor]]:
    """One window of six rows without a step of any size; gives the gradients that the optimizer saw."""
    optimizer, seen = SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    accumulator = Accumulator(model, optimizer, plan=plan_of(levers), **options)
    seed()
    accumulator.step((torch.randn(6, 8), torch.randint(3, (6,))))
    return accumulator, seen


def by_parts(model: nn.Module, batch: Any) -> Tensor:
    """A training step that calls the model's parts, never the model."""
    hidden = model.body(batch[0])
    out = model.head(hidden)
    model.seen += [hidden.dtype, out.dtype]  # type: ignore[operator]
    return F.cross_entropy(out, batch[1])


@low
def test_training_step_that_calls_parts(level: str) -> None:
    """In the Accumulator a training step that never calls the model itself runs under autocast as well."""
    model = Recording()
    accumulated(model, Levers(precision=level), training_step=by_parts)
    assert set(model.seen) == {TYPES[level]}


@low
@pytest.mark.parametrize("options", [{"loss_fn": nn.CrossEntropyLoss()}, {"training_step": by_parts}], ids=["loss", "step"])
def test_gradients_are_near_those_of_float32(level: str, options: dict[str, Any]) -> None:
    """What the optimizer sees is float32, unscaled, and near the gradient of float32."""
    found = []
    for precision in ("fp32", level):
        seed()
        found.append(accumulated(Recording(), Levers(precision=precision), **options)[1])
    for exact, rounded in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        assert torch.allclose(exact, rounded, rtol=0.05, atol=0.02 * float(exact.abs().max()))


def test_parts_are_run_in_a_probe_as_in_training() -> None:
    """A probe runs a training step that calls parts under autocast as well, and its peak is lower for it."""
    model, peaks = Recording(), []
    workload = Workload(
        model, (torch.randn(4, 64, 8),), training_step=lambda model, batch: model.head(model.body(batch[0])).mean()
    )
    for precision in ("fp32", "bf16"):
        with preserved(model, None, device=HOST) as snapshot:
            trial = run_trial(
                workload,
                VirtualDevice("1GiB"),
                Candidate(micro_batch=512, levers=Levers(precision=precision)),
                budget_bytes=2**30,
                snapshot=snapshot,
                windows=[[512, 512]] * 2,
                feed=lambda sizes: [workload.source.take(size) for size in sizes],
            ).trial
        assert isinstance(trial.outcome, Fit)
        peaks.append(trial.outcome.peak_bytes)
    assert peaks[1] < peaks[0]


def test_fp16_brings_a_scaler() -> None:
    """With fp16 the Accumulator has a scaler whose state is saved and loaded; with the other levels it has none."""
    accumulator, _ = accumulated(Recording(), Levers(precision="fp16"), loss_fn=nn.CrossEntropyLoss())
    state = accumulator.state_dict()
    assert state["scaler"]["scale"] > 1
    state["scaler"]["scale"] = 512.0
    fresh = Accumulator(
        model := Recording(), SGD(model.parameters()), plan=plan_of(Levers(precision="fp16")), loss_fn=nn.CrossEntropyLoss()
    )
    fresh.load_state_dict(state)
    assert fresh.state_dict()["scaler"]["scale"] == 512.0
    assert "scaler" not in accumulated(Recording(), Levers(precision="bf16"), loss_fn=nn.CrossEntropyLoss())[0].state_dict()


def test_callers_scaler_is_the_callers() -> None:
    """A scaler that the caller passes is used instead, and its state is left to the caller."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    accumulator, seen = accumulated(Recording(), Levers(precision="fp16"), loss_fn=nn.CrossEntropyLoss(), scaler=scaler)
    assert "scaler" not in accumulator.state_dict()
    assert scaler.get_scale() == 256.0
    assert seen


def test_scaling_clipping_and_accumulation_together() -> None:
    """A window in fp16 is clipped by the norm of its whole unscaled gradient, and its step is that of float32."""
    norms, weights = [], []
    for precision in ("fp32", "fp16"):
        seed()
        model = Recording()
        accumulator = Accumulator(
            model,
            SGD(model.parameters(), lr=1.0),
            plan=plan_of(Levers(precision=precision)),
            loss_fn=nn.CrossEntropyLoss(),
            max_grad_norm=0.1,
        )
        seed()
        step = accumulator.step((torch.randn(6, 8), torch.randint(3, (6,))))
        norms.append(step.grad_norm)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert len(step.micro_batch_sizes) == 3
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert norms[0] > 0.1
    assert float((weights[0] - weights[1]).norm()) < 0.05 * 0.1


def test_infinite_gradient_in_fp16() -> None:
    """A gradient beyond float16 skips the whole window, lowers the scale once, and leaves the weights."""
    model = Recording()
    optimizer = SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(
        model, optimizer, plan=plan_of(Levers(precision="fp16")), loss_fn=lambda out, target: out.float().pow(2).mean() * 1e6
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scale = 2.0**16
    step = accumulator.step((torch.randn(6, 8), torch.randint(3, (6,))))
    assert step.skipped
    assert all(map(torch.equal, before, model.parameters()))
    assert accumulator.state_dict()["scaler"]["scale"] == scale / 2
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("implementation", ["default", "for-loop", "foreach", "fused"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_fp16_with_every_implementation_of_the_step(implementation: Any, is_fused: bool) -> None:
    """Scaled losses go with every implementation of the step, also where the caller's optimizer is a fused one."""
    model = Recording()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=is_fused or None)
    levers = Levers(precision="fp16", optimizer_impl=implementation)
    accumulator = Accumulator(model, optimizer, plan=plan_of(levers), loss_fn=nn.CrossEntropyLoss())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = accumulator.step((torch.randn(6, 8), torch.randint(3, (6,))))
    assert not step.skipped
    moved = [float((one - other).detach().abs().max()) for one, other in zip(before, model.parameters(), strict=True)]
    assert all(0 < change <= 0.011 for change in moved)  # Adam's first step is as long as its learning rate


def test_own_loop_under_a_plan() -> None:
    """In a loop of one's own the model runs under the plan's autocast, and `autocast()` is the region for the loss."""
    model, plan = Recording(), plan_of(Levers(precision="bf16"))
    with plan.applied(model):
        out = model(torch.randn(2, 8))
        with plan.autocast():
            assert (out @ out.t()).dtype == torch.bfloat16
    assert model.seen == [torch.bfloat16] * 2


# TF32.


@contextmanager
def tf32(model: nn.Module) -> Iterator[None]:
    with applied(Levers(precision="tf32"), subject(model)):
        yield


def settings() -> list[Any]:
    """How matrix products are to be computed, by the old name and, since torch 2.9, by the new ones."""
    try:
        found = [torch.get_float32_matmul_precision()]
    except RuntimeError:
        found = ["cannot be told"]
    if hasattr(torch.backends, "fp32_precision"):
        places = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv)
        found += [place.fp32_precision for place in places]
    return found


def test_tf32_is_allowed_while_inside() -> None:
    """While inside, matrix products may be computed in TF32, and afterwards everything is set as it was."""
    before = settings()
    with tf32(Recording()):
        assert torch.get_float32_matmul_precision() == "high"
    assert settings() == before


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has no such names yet")
def test_tf32_where_the_caller_uses_the_new_names() -> None:
    """Where the caller has chosen by torch's new names, which forbid the old one, the lever works and puts them back."""
    place = torch.backends.cuda.matmul
    original = place.fp32_precision
    try:
        place.fp32_precision = "tf32"
        before = settings()
        with tf32(Recording()):
            assert place.fp32_precision == "tf32"
        assert settings() == before
    finally:
        place.fp32_precision = original


def test_model_itself_is_left_alone_by_tf32() -> None:
    """TF32 puts nothing around the model."""
    model = Recording()
    with tf32(model):
        assert "forward" not in vars(model)
        assert model(torch.randn(2, 8)).dtype == torch.float32


# What is said against it.


@pytest.mark.parametrize(
    ("make", "level", "words"),
    [
        (lambda: Recording().bfloat16(), "bf16", "the weights are torch.bfloat16, which is what the caller uses already"),
        (lambda: Recording().half(), "bf16", "the weights are torch.float16, which is what the caller uses already"),
        (lambda: Recording().double(), "fp16", "the weights are torch.float64, which is what the caller uses already"),
        (Recording, "tf32", "TF32 is a mode of NVIDIA GPUs"),
    ],
)
def test_reasons(make: Callable[[], nn.Module], level: str, words: str) -> None:
    """Models in another type, and levels that the device does not have, are told so."""
    assert Precision().reason_against(level, subject(make())) == words


@low
def test_reason_under_autocast(level: str) -> None:
    """Inside of a region of the caller's there is nothing left to turn."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reason = Precision().reason_against(level, subject(Recording()))
    assert reason == "autocast is on around the call, which is what the caller uses already"


@low
def test_no_reason_with_a_few_weights_in_low_precision(level: str) -> None:
    """A model that is float32 but for a part can still be run under autocast."""
    model = Recording()
    model.body.bfloat16()
    assert Precision().reason_against(level, subject(model)) is None


def test_reason_without_real_weights() -> None:
    """A model of complex numbers alone is told a whole sentence."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    reason = Precision().reason_against("bf16", subject(model))
    assert reason is not None
    assert " ," not in reason


def test_reason_for_a_device_that_autocast_does_not_know() -> None:
    """On a device without autocast the reason names it."""
    assert "meta" in (Precision().reason_against("bf16", Subject(Recording(), torch.device("meta"))) or "")
