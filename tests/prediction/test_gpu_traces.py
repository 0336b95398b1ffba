"""Traces for GPUs that are not here: shared, on real tensors where fake ones refuse, and nothing is left."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import autoaccum
from autoaccum import InvalidRequestError
from autoaccum.prediction import gpu_traces
from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.growth import NotAffineError

from ..predictions import GIB, foreseen, meta_model, predict


def test_gpus_share_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all GPUs together a model is traced a few times, not once for each."""
    count = []
    true = gpu_traces.fake_trace
    monkeypatch.setattr(gpu_traces, "can_run_apart", lambda: False)  # to see the calls
    monkeypatch.setattr(gpu_traces, "fake_trace", lambda *args, **more: (count.append(1), true(*args, **more))[1])
    predict(64, gpu="all", model=nn.Linear(8, 8))
    assert 2 <= len(count) <= 10


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
        available, total = 1000, 2**40

    monkeypatch.setattr(gpu_traces.psutil, "virtual_memory", Free)
    with pytest.raises(InvalidRequestError, match=r"of host memory, of which 1000 B|of host memory, of which .+ are free"):
        predict(64, model=Reading())


@pytest.mark.slow
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
    """A language model of seven billion parameters is predicted in two minutes of the processor and 2 GiB of memory."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    seconds, resident, parameters, peak_bytes = run_child(
        """
        import resource, os
        from autoaccum.prediction.gpu_names import gpu_for
        from autoaccum.predicting import predict_workload
        from autoaccum.request import Request
        from autoaccum.targets import load_target
        options = "hidden_size=4096&num_hidden_layers=32&num_attention_heads=32&intermediate_size=11008&vocab_size=32000"
        workload = load_target(f"hf:llama?{options}&seq_len=512", without_values=True)
        plan = predict_workload(workload, Request(target_batch=8), [gpu_for("H200")])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = sum(os.times()[:4])  # of this process and those it has started; what else the machine does is no matter
        answer([used, peak, plan.memory.trainable_parameters, plan.predicted_peak_bytes])
        """
    )
    assert parameters > 6.5e9 and seconds < 120 and resident < 2 * GIB
    assert 16 * parameters < peak_bytes <= gpu_for("H200").total_bytes
