"""What ranks were called with: what has to be the same, what may differ, and how a difference is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.agreeing import call_of, refuse_differing
from autoaccum.errors import RankMismatchError
from autoaccum.request import Request
from autoaccum.workload import Workload


def call(model: nn.Module | None = None, **numbers: Any) -> dict[str, str]:
    """What a rank that was called so says."""
    return call_of(Workload(model or nn.Linear(4, 2), torch.ones(2, 4)), Request(**numbers), "autotune")


def told(calls: list[dict[str, str]]) -> str:
    """What ranks with these calls are told; nothing where they agree."""
    ranks: Any = SimpleNamespace(world_size=len(calls), gather=lambda value: calls)
    try:
        refuse_differing(ranks, calls[0], Workload(nn.Linear(4, 2), torch.ones(2, 4)))
    except RankMismatchError as error:
        return str(error)
    return ""


def test_equal_calls_pass() -> None:
    """With other weights in the model, and on any number of ranks."""
    assert told([call(target_batch=8) for _ in range(5)]) == ""


@pytest.mark.parametrize("name", ["budget", "storage", "cache"])
def test_what_may_differ_is_not_compared(name: str) -> None:
    """Cards differ, and only the first rank touches what is kept."""
    assert call(**{name: "80%"}) == call()


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, "x") for name in Request.__struct_fields__ if name not in ("budget", "storage", "cache")],
)
def test_every_other_number_is_compared(name: str, value: str) -> None:
    """Whatever else a request holds is named with both values."""
    assert f"{name}: {getattr(Request(), name)} on rank 0, x on rank 1" in told([call(), call(**{name: value})])


def test_many_ranks_are_counted() -> None:
    """One of a hundred is told apart from the others without listing them."""
    text = told([call(target_batch=64 if rank else 32) for rank in range(100)])
    assert "target_batch: 32 on rank 0, 64 on 99 ranks (1 and others)" in text


def test_weights_with_other_settings_differ() -> None:
    """Two ways to count tokens are not the same, two equal ones are."""

    def weighed(shift: bool) -> dict[str, str]:
        weight = autoaccum.tokens("labels", shift=shift)
        return call_of(Workload(nn.Linear(4, 2), torch.ones(2, 4), weight=weight), Request(), "autotune")

    assert weighed(True) == weighed(True) != weighed(False)


def test_parameters_in_another_order_differ() -> None:
    """Gradients are reduced in order of the parameters."""
    one, other = nn.Sequential(), nn.Sequential()
    for name in ("a", "b"):
        one.add_module(name, nn.Linear(2, 2))
    for name in ("b", "a"):
        other.add_module(name, nn.Linear(2, 2))
    assert call(one)["parameters"] != call(other)["parameters"]
