"""What cannot take a training step is refused at the door, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.admitting import (
    check_sample_device,
    check_step,
    checked_optimizer,
    refuse_time_as_rows,
    single_device,
    unwrapped,
)
from autoaccum.errors import InvalidRequestError


@pytest.mark.parametrize("model", [None, nn.Linear, lambda x: x])
def test_what_is_not_a_module_is_refused(model: Any) -> None:
    """A function, a class or nothing is no model."""
    with pytest.raises(InvalidRequestError, match=r"expected a torch\.nn\.Module"):
        unwrapped(model)


def test_lazy_model_is_refused() -> None:
    """Parameters without a shape must be made by a forward pass first."""
    with pytest.raises(InvalidRequestError, match="lazy parameters"):
        unwrapped(nn.LazyLinear(3))


def test_frozen_model_is_refused() -> None:
    """Without a trainable parameter there is nothing to step."""
    with pytest.raises(InvalidRequestError, match=r"Linear has no trainable parameter \(2 frozen ones\)"):
        unwrapped(nn.Linear(3, 2).requires_grad_(False))


def test_model_over_two_devices_is_refused() -> None:
    """Parameters on several devices are named."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(InvalidRequestError, match="cpu, meta"):
        single_device(model)


def test_meta_device_is_refused_unless_allowed() -> None:
    """A model without values has a device only for those who run nothing."""
    model = nn.Linear(3, 3, device="meta")
    with pytest.raises(InvalidRequestError, match="meta device"):
        single_device(model)
    assert single_device(model, meta_allowed=True).type == "meta"


def test_sample_on_a_third_device_is_refused() -> None:
    """A sample is in host memory or where the model is."""
    check_sample_device(torch.zeros(2), torch.device("cuda"))
    with pytest.raises(InvalidRequestError, match="the model is on cpu and the sample on meta"):
        check_sample_device({"x": torch.zeros(2, device="meta")}, torch.device("cpu"))


@pytest.mark.parametrize("batch_first", [True, False])
def test_time_may_be_taken_for_rows(batch_first: bool) -> None:
    """A sample with two shared dimensions is ambiguous where a layer takes time first."""
    model = nn.Sequential(nn.LSTM(4, 4, batch_first=batch_first))
    if batch_first:
        refuse_time_as_rows(torch.zeros(7, 3, 4), model)
        return
    with pytest.raises(
        InvalidRequestError, match="layer '0' has batch_first=False, and every tensor has a second dimension of 3"
    ):
        refuse_time_as_rows(torch.zeros(7, 3, 4), model)


def test_optimizer_over_other_parameters_is_refused() -> None:
    """Every parameter of the optimizer is the model's."""
    model = nn.Linear(3, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    assert checked_optimizer(own, model) is own
    with pytest.raises(InvalidRequestError, match="2 parameters that are not the model's"):
        checked_optimizer(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), model)


@pytest.mark.parametrize("optimizer", [3, "AdamW"])
def test_what_makes_no_optimizer_is_refused(optimizer: Any) -> None:
    """An optimizer is one, or a function that makes one."""
    with pytest.raises(InvalidRequestError, match="or a factory"):
        checked_optimizer(optimizer, nn.Linear(3, 2))


class NeedsClosure(torch.optim.SGD):
    """Calls the model by itself."""

    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsClosure])
def test_step_that_needs_a_closure_is_refused(kind: Any) -> None:
    """A step that runs the model itself cannot be accumulated for; one that may take a closure can."""
    check_step(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))
    with pytest.raises(InvalidRequestError, match=f"{kind.__name__} evaluates a closure"):
        check_step(kind(nn.Linear(3, 2).parameters(), lr=0.1))
