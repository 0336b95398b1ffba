"""Peaks that are predicted for a setting of the levers, on fake tensors, are the peaks that are measured.

Equal to the byte on a virtual device, for every lever. Offload alone differs: a trace moves tensors of any size, a probe
only those that are worth it, so that the prediction is lower by at most the small ones that are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum import probing
from autoaccum.devices import VirtualDevice
from autoaccum.levers import Subject
from autoaccum.levers.blocks import find_blocks
from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.forecast import Forecast
from autoaccum.prediction.growth import growth_of
from autoaccum.preserve import preserved
from autoaccum.probing import run_trial
from autoaccum.records import Candidate, Fit, Levers
from autoaccum.targets.demos import gpt, resnet
from autoaccum.workload import Workload

from .models import full, selective

pytestmark = pytest.mark.slow

ALL = 99  # stands for as many blocks as there are


def small_gpt() -> Workload:
    return gpt(vocabulary=64, seq_len=16, layers=2, width=32, heads=2)


def small_resnet() -> Workload:
    return resnet(image=8, width=8, blocks=1)


def predicted_bytes(workload: Workload, rows: int, levers: Levers) -> int:
    """What is expected of this size, from traces of other sizes."""
    growth = growth_of(lambda rows: fake_trace(workload, rows, host_batch=False, levers=levers))
    held = VirtualDevice("1GiB").held_bytes(workload.resident())
    return Forecast(growth, unit="storages", held_bytes=held).peak_bytes(rows)


def measured_bytes(workload: Workload, rows: int, levers: Levers) -> int:
    """What a probe of this size takes."""
    with preserved(workload.module, workload.own_optimizer, device=workload.device) as snapshot:
        outcome = run_trial(
            workload,
            VirtualDevice("1GiB"),
            Candidate(micro_batch=rows, levers=levers),
            budget_bytes=2**30,
            snapshot=snapshot,
            windows=[[rows, rows]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        ).trial.outcome
    assert isinstance(outcome, Fit)
    return outcome.peak_bytes


def with_blocks(workload: Workload, levers: Levers) -> Levers:
    """All blocks, where all were meant."""
    if levers.checkpointed_blocks != ALL:
        return levers
    found = len(find_blocks(workload.module))
    return Levers(
        **{name: getattr(levers, name) for name in Levers.__struct_fields__ if name != "checkpointed_blocks"},
        checkpointed_blocks=found,
    )


BOTH, RESNET = ("gpt", "resnet"), ("resnet",)
SETTINGS: list[tuple[Levers, tuple[str, ...]]] = [  # and for which model it is slow to look at as well
    (Levers(), BOTH),
    (full(1), BOTH),
    (full(ALL), ()),
    (selective(1), BOTH),
    (selective(ALL), ()),
    (Levers(precision="bf16"), RESNET),
    (Levers(precision="fp16"), BOTH),
    (Levers(optimizer_impl="for-loop"), BOTH),
    (Levers(optimizer_impl="foreach"), RESNET),
    (Levers(optimizer_impl="fused"), BOTH),
    (Levers(offload="cpu"), RESNET),
    (full(ALL, precision="bf16", optimizer_impl="foreach", offload="cpu"), BOTH),
    (selective(ALL, precision="fp16", optimizer_impl="fused"), BOTH),
]


def named(levers: Levers) -> str:
    default = Levers()
    changed = [
        str(getattr(levers, name)) for name in Levers.__struct_fields__ if getattr(levers, name) != getattr(default, name)
    ]
    return " ".join(changed).replace(str(ALL), "all") or "as it is"


@pytest.mark.parametrize(
    ("make", "levers"),
    [
        pytest.param(make, levers, id=f"{name}-{named(levers)}", marks=pytest.mark.slow if is_slow else ())
        for name, make in (("gpt", small_gpt), ("resnet", small_resnet))
        for levers, slow_for in SETTINGS
        for is_slow in [name in slow_for]
    ],
)
def test_predicted_is_measured(make: Callable[[], Workload], levers: Levers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predicted peak is the measured one to the byte, where both move tensors of any size."""
    monkeypatch.setattr(probing, "subject_on", moving_everything(probing.subject_on))
    workload = make()
    chosen = with_blocks(workload, levers)
    assert predicted_bytes(workload, 5, chosen) == measured_bytes(workload, 5, chosen)


def moving_everything(subject_on: Callable[..., Subject]) -> Callable[..., Subject]:
    """As a trace does, which does not know how large the tensors of other sizes will be."""
    return lambda *args: subject_on(*args)._replace(worth_moving_bytes=0)


@pytest.mark.slow
def test_predicted_where_small_tensors_stay() -> None:
    """As a probe really is, what is predicted for offloading is lower by less than what it keeps of small tensors."""
    workload = gpt(vocabulary=64, seq_len=64, layers=2, width=64, heads=2)
    predicted, measured = (peak(workload, 16, Levers(offload="cpu")) for peak in (predicted_bytes, measured_bytes))
    saved = 25 * 2 + 5  # tensors in the graph of two blocks and a head
    assert predicted <= measured <= predicted + saved * 64 * 2**10
    assert measured - predicted < 0.05 * measured


def test_levers_are_turned_back_after_a_trace() -> None:
    """Tracing under levers leaves the workload's model and optimizer as they were."""
    workload = small_gpt()
    levers = full(2, precision="bf16", optimizer_impl="foreach", offload="cpu")
    before = [(name, list(vars(part))) for name, part in workload.module.named_modules()]
    fake_trace(workload, 2, host_batch=False, levers=levers)
    assert [(name, list(vars(part))) for name, part in workload.module.named_modules()] == before
    assert not torch.is_autocast_enabled("cpu")


def test_floating_point_operations() -> None:
    """A trace counts what is computed again: no more than the forward pass with "full", nothing with "selective"."""
    workload = small_gpt()
    plain, all_again, some_again = (
        fake_trace(workload, 2, host_batch=False, levers=levers).flops for levers in (Levers(), full(2), selective(2))
    )
    assert plain["forward"] == all_again["forward"] == some_again["forward"]
    assert some_again["backward"] == plain["backward"] < all_again["backward"] <= plain["backward"] + plain["forward"]


def test_statistics_of_the_model_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of a model's BatchNorm layers are those from before a trace under checkpointing."""
    workload = small_resnet()
    before: dict[str, Any] = {name: buffer.clone() for name, buffer in workload.module.named_buffers()}
    fake_trace(workload, 2, host_batch=False, levers=full(3))
    assert all(torch.equal(before[name], buffer) for name, buffer in workload.module.named_buffers())
    assert any(isinstance(part, nn.BatchNorm2d) for part in workload.module.modules())
