"""Training steps that tests of traces run through, and a model that has been trained."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from autoaccum.workload import Workload

from .cases import CASES, LESS_COMMON, Case
from .trained import Everything, Trained


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in LESS_COMMON else ()) for name in CASES],
    ids=[name.replace(" ", "-") for name in CASES],
)
def case(request: pytest.FixtureRequest) -> Case:
    """Every case, freshly built."""
    torch.manual_seed(0)
    return CASES[request.param]()


FEW = ("attention with dropout", "checkpointed selectively", "adamw foreach")
FEW_MORE = ("batch norm", "own momentum with state")


@pytest.fixture(
    params=[*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in FEW_MORE)],
    ids=[name.replace(" ", "-") for name in (*FEW, *FEW_MORE)],
)
def few(request: pytest.FixtureRequest) -> Case:
    """A few of them."""
    torch.manual_seed(0)
    return CASES[request.param]()


@pytest.fixture
def trained() -> Trained:
    torch.manual_seed(0)
    model = Everything()
    optimizer = AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(4, 16)
    model(batch).sum().backward()
    optimizer.step()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    model.layers[0].register_forward_hook(lambda *_: None)
    return Trained(model, optimizer, Workload(model, batch, optimizer=optimizer), seen)
