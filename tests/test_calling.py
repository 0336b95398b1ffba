"""How a model is called with a batch, and what of its output is the loss."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.calling import call, checked_loss, inputs_and_target, own_loss
from autoaccum.errors import InvalidRequestError


class Records(nn.Module):
    """Returns the arguments it was called with."""

    def forward(self, first: Any, second: Any = None) -> tuple[Any, Any]:
        return first, second


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        ({"first": 1, "second": 2}, (1, 2)),
        ({"other": 1}, ({"other": 1}, None)),
        ((1, 2), (1, 2)),
        ([1, 2], (1, 2)),
        ((1, 2, 3), ((1, 2, 3), None)),
        ([{"a": 1}, {"a": 2}], ([{"a": 1}, {"a": 2}], None)),
        (5, (5, None)),
    ],
)
def test_batch_is_spread_where_the_model_takes_it_so(batch: Any, seen: Any) -> None:
    """A mapping goes in by keyword and a tuple by position where that binds; anything else as one argument."""
    assert call(Records(), batch) == seen


class Pairs(nn.Module):
    """Needs two arguments."""

    def forward(self, first: Any, second: Any, *, third: Any = None) -> tuple[Any, Any]:
        return first, second


class Whole(nn.Module):
    """Takes a whole batch."""

    def forward(self, batch: Any, extra: Any = None) -> Any:
        return batch


@pytest.mark.parametrize(
    ("batch", "unknown"),
    [
        ({"first": 1, "second": 2, "id": 3}, "'id'"),
        ({"first": 1, "second": 2, "third": 3, "id": 4, 5: 6}, "'id', 5"),
        ({"self": 0, "module": 0, "first": 1, "second": 2}, "'self', 'module'"),
    ],
)
def test_keys_that_the_model_does_not_take_are_named(batch: Any, unknown: str) -> None:
    """A mapping with all that forward needs and more is refused with the keys that are too many, and a remedy."""
    with pytest.raises(InvalidRequestError, match=rf"Pairs\.forward does not take: {unknown}; .*training_step="):
        call(Pairs(), batch)


def test_mapping_that_lacks_an_argument_gets_the_models_own_error() -> None:
    """Where something is missing, it is the model that says so, whatever is too many."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'second'"):
        call(Pairs(), {"first": 1, "id": 3})


@pytest.mark.parametrize("batch", [{"x": 1, "y": 2}, {"batch": 1, "y": 2}, {"extra": 1, "y": 2}, {}])
def test_model_of_one_argument_gets_the_whole_mapping(batch: Any) -> None:
    """A model that can be called with the mapping alone is, though it may have keys named like arguments."""
    assert call(Whole(), batch) == batch


def test_named_tuple_goes_in_as_one_argument() -> None:
    """A named tuple has attributes that the model may use, so it is not spread."""
    pair = namedtuple("pair", "x y")(1, 2)
    assert call(Records(), pair) == (pair, None)


def test_last_part_of_a_sample_is_the_target() -> None:
    """(input, target) gives the input itself, (a, b, target) the tuple of what comes before."""
    assert inputs_and_target((1, 2)) == (1, 2)
    assert inputs_and_target([1, 2, 3]) == ((1, 2), 3)


@pytest.mark.parametrize("batch", [{"x": 1}, torch.ones(3), (1,), "ab"])
def test_sample_without_a_target_is_refused_for_a_loss_function(batch: Any) -> None:
    """A loss function needs a pair; the error names training_step as the remedy."""
    with pytest.raises(InvalidRequestError, match="training_step"):
        inputs_and_target(batch)


LOSS, VECTOR = torch.tensor(2.0), torch.ones(3)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (LOSS, 2.0),
        (SimpleNamespace(loss=LOSS, logits=VECTOR), 2.0),
        ({"loss": LOSS, "logits": VECTOR}, 2.0),
        ({"loss_box": LOSS, "loss_class": LOSS}, 4.0),
        ((LOSS, VECTOR), 2.0),
        (VECTOR, None),
        ({"logits": VECTOR}, None),
        ({"loss_box": LOSS, "boxes": VECTOR}, None),
        (SimpleNamespace(loss=None), None),
        ((VECTOR, LOSS), None),
        ([], None),
        ({}, None),
    ],
)
def test_own_loss_of_a_model_is_found(output: Any, expected: float | None) -> None:
    """`.loss`, ["loss"], a scalar, a dict of scalars summed, a leading scalar of a tuple; else there is none."""
    found = own_loss(output)
    assert (None if found is None else float(found)) == expected


def test_loss_of_one_element_becomes_a_scalar() -> None:
    """A loss of shape (1,) is taken, as a scalar."""
    assert checked_loss(torch.ones(1, requires_grad=True) * 2, "the model").shape == ()


def test_gradient_flows_through_a_dict_of_losses() -> None:
    """The sum of a dict of losses reaches every part."""
    parts = {name: torch.ones((), requires_grad=True) for name in ("a", "b")}
    total = own_loss({name: part * 3 for name, part in parts.items()})
    assert isinstance(total, Tensor)
    total.backward()
    assert [part.grad for part in parts.values()] == [torch.tensor(3.0)] * 2


def trained(value: float) -> Tensor:
    """A scalar with a gradient."""
    return torch.tensor(1.0, requires_grad=True) * value


@pytest.mark.parametrize(
    "name", ["total_loss", "loss_total", "total", "total_losses", "overall_loss", "sum_loss", "Total_Loss"]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_total_beside_its_parts_is_refused(name: str, is_first: bool) -> None:
    """A dict that holds a total beside its parts is not summed: the error names the total and what to return instead."""
    output = {"a": trained(1), "b": trained(2)}
    output = {name: trained(3), **output} if is_first else {**output, name: trained(3)}
    with pytest.raises(InvalidRequestError, match=rf"'{name}' beside 'a'.*{{\"loss\": ...}}.*training_step="):
        own_loss(output)


def test_detached_total_beside_parts_is_refused() -> None:
    """A detached total says that the parts may be weighted, so their plain sum is not taken for it."""
    with pytest.raises(InvalidRequestError, match="'total' beside 'a'"):
        own_loss({"a": trained(1), "total": trained(3).detach()})


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"loss_a": trained(2), "accuracy": torch.tensor(0.5)}, 2.0),
        ({"loss_a": trained(2), "loss_b": trained(3), "rows": torch.tensor(8)}, 5.0),
        ({"total_loss": trained(3), "a": torch.tensor(1.0), "b": torch.tensor(2.0)}, 3.0),
        ({"total_loss": trained(3)}, 3.0),
        ({"total_loss": trained(3), "loss": trained(4)}, 4.0),
        ({0: trained(2), 1: trained(3)}, 5.0),
        ({"a": torch.tensor(2.0), "accuracy": torch.tensor(0.5)}, 2.5),
    ],
    ids=["log", "count", "total-and-log", "total-alone", "loss", "numbers", "no-gradient"],
)
def test_only_parts_with_a_gradient_are_summed(output: dict[Any, Tensor], expected: float) -> None:
    """What a dict of losses holds for a log is left out; where nothing has a gradient, everything counts."""
    found = own_loss(output)
    assert isinstance(found, Tensor)
    assert float(found.detach()) == expected
