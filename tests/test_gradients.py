"""The gradients of one window: their precision, their norm, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm

from autoaccum import gradients
from autoaccum.backward import Backward
from autoaccum.errors import InvalidRequestError
from autoaccum.gradients import (
    Accumulation,
    all_finite,
    clip,
    parameters_of,
    refuse_none,
    refuse_present,
    total_norm,
)

LOW = [torch.bfloat16, torch.float16]
WITH_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")


@pytest.fixture(params=[pytest.param(True, id="grad_dtype"), pytest.param(False, id="apart")])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Low precision adds up in the parameter's own gradient, and apart from it, as before torch 2.9."""
    if request.param and not WITH_GRAD_DTYPE:
        pytest.skip("this torch has no Tensor.grad_dtype")
    monkeypatch.setattr(gradients, "_HAS_GRAD_DTYPE", request.param)
    yield


def accumulated(parameters: Sequence[Tensor], losses: Sequence[Tensor], *, wide: bool = True) -> Accumulation:
    """A window of these losses."""
    accumulation = Accumulation(parameters, Backward(), wide=wide)
    for loss in losses:
        accumulation.add(loss)
    return accumulation


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter with these values."""
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def grad_dtypes(parameters: Sequence[Tensor]) -> list[Any]:
    """In which precision gradients may be put there, where that can be seen."""
    return [getattr(each, "grad_dtype", each.dtype) for each in parameters]


# -- whose gradients


def test_parameters_of_an_optimizer() -> None:
    """The parameters of all groups, in order, each once, and only the trainable ones."""
    first, frozen, last = parameter(1), parameter(2).requires_grad_(False), parameter(3)
    optimizer = torch.optim.SGD([{"params": [first, frozen]}, {"params": [last]}], lr=0.1)
    optimizer.param_groups[1]["params"].append(first)
    assert [id(found) for found in parameters_of(optimizer)] == [id(first), id(last)]


# -- precision


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("_both_ways")
def test_gradients_come_in_the_parameters_precision(dtype: torch.dtype) -> None:
    """After narrowing, every parameter has its gradient in its own precision, and may get one of that precision only."""
    weight = parameter(1, 2, dtype=dtype)
    accumulation = accumulated([weight], [(weight * factor).sum() for factor in (1, 2, 4)])
    accumulation.narrow()
    assert weight.grad is not None and weight.grad.dtype == dtype
    assert weight.grad.tolist() == [7, 7]
    assert grad_dtypes([weight]) == [dtype]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.usefixtures("_both_ways")
def test_low_precision_adds_up_in_float32(dtype: torch.dtype) -> None:
    """Small contributions are not lost beside a large one, which in low precision they would be."""
    weight = parameter(0, dtype=dtype)
    small = 0.0004  # below half of the last place of 1 in either precision
    accumulation = accumulated([weight], [(weight * factor).sum() for factor in (1, *[small] * 256)])
    (found,) = accumulation.gradients()
    assert found is not None and found.dtype == torch.float32
    assert float(found) == pytest.approx(1 + 256 * float(torch.tensor(small, dtype=dtype)), rel=1e-4)
    native = torch.ones((), dtype=dtype)
    for _ in range(256):
        native += small
    assert float(native) == 1  # so this test would have seen it


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_single_micro_batch_needs_no_width(dtype: torch.dtype) -> None:
    """Without `wide`, gradients stay in the parameter's precision and take no more memory."""
    weight = parameter(1, dtype=dtype)
    accumulation = accumulated([weight], [weight.sum()], wide=False)
    assert [found.dtype for found in accumulation.gradients() if found is not None] == [dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_full_precision_adds_up_as_it_is(dtype: torch.dtype) -> None:
    """Gradients of float32 and float64 parameters are the parameters' own, not copies."""
    weight = parameter(1, dtype=dtype)
    accumulation = accumulated([weight], [weight.sum()])
    assert accumulation.gradients()[0] is weight.grad


def flat(parameters: Sequence[Tensor]) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([each.grad.flatten().double() for each in parameters if each.grad is not None])


@pytest.mark.usefixtures("_both_ways")
def test_error_does_not_grow_with_the_number_of_micro_batches() -> None:
    """In bfloat16 the relative error of 256 micro-batches is at most 1.2 times that of one; without width it is not."""
    torch.manual_seed(0)
    widths = ((16, 32), (32, 32), (32, 32), (32, 10))
    model = nn.Sequential(*(layer for width in widths for layer in (nn.Linear(*width), nn.Tanh()))).bfloat16()
    inputs, targets = torch.randn(256, 16).bfloat16(), torch.randint(10, (256,))
    exact = copy.deepcopy(model).double()
    functional.cross_entropy(exact(inputs.double()), targets).backward()
    whole = flat(list(exact.parameters()))

    def error(steps: int, *, wide: bool = True) -> float:
        parts = zip(inputs.chunk(steps), targets.chunk(steps), strict=True)
        losses = [functional.cross_entropy(model(x).float(), y) / steps for x, y in parts]
        accumulation = accumulated(list(model.parameters()), losses, wide=wide and steps > 1)
        accumulation.narrow()
        found = flat(accumulation.parameters)
        accumulation.discard()
        return float((found - whole).norm() / whole.norm())

    one = error(1)
    assert 1e-3 < one < 0.01
    assert max(error(16), error(256)) <= 1.2 * one
    assert error(256, wide=False) > 2 * one


@pytest.mark.usefixtures("_both_ways")
def test_mixed_precisions_side_by_side() -> None:
    """Parameters of several precisions add up each in its way, in their order."""
    low, full, unused = parameter(1, dtype=torch.bfloat16), parameter(1), parameter(1, dtype=torch.float16)
    accumulation = accumulated([low, full, unused], [low.sum().float() + full.sum()] * 1)
    assert [None if found is None else found.dtype for found in accumulation.gradients()] == [
        torch.float32,
        torch.float32,
        None,
    ]
    accumulation.narrow()
    assert [None if each.grad is None else each.grad.dtype for each in (low, full, unused)] == [
        torch.bfloat16,
        torch.float32,
        None,
    ]


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
@pytest.mark.usefixtures("_both_ways")
def test_discard_leaves_nothing(dtype: torch.dtype) -> None:
    """Discarding lets go of all gradients, and the parameters are as they were before the window."""
    weight = parameter(1, dtype=dtype)
    before = grad_dtypes([weight])
    accumulation = accumulated([weight], [weight.sum(), weight.sum()])
    accumulation.discard()
    assert weight.grad is None and grad_dtypes([weight]) == before
    assert accumulation.gradients() == [None]


@pytest.mark.usefixtures("_both_ways")
def test_discard_after_narrowing() -> None:
    """After narrowing, as the step has been taken, discarding removes the gradients as well."""
    weight = parameter(1, dtype=torch.bfloat16)
    accumulation = accumulated([weight], [weight.sum()])
    accumulation.narrow()
    accumulation.discard()
    assert weight.grad is None and grad_dtypes([weight]) == [torch.bfloat16]


@pytest.mark.skipif(not WITH_GRAD_DTYPE, reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("end", ["narrow", "discard"])
def test_grad_dtype_of_the_users_own_comes_back(end: str) -> None:
    """A parameter that takes gradients of any precision does so again after the window."""
    weight = parameter(1, dtype=torch.bfloat16)
    weight.grad_dtype = None
    accumulation = accumulated([weight], [weight.sum()])
    getattr(accumulation, end)()
    assert weight.grad_dtype is None


@pytest.mark.usefixtures("_both_ways")
def test_set_and_fill() -> None:
    """A gradient from elsewhere takes the place of a parameter's own, and a missing one is filled with float32 zeros."""
    low, full = parameter(1, 2, dtype=torch.bfloat16), parameter(1, 2)
    accumulation = accumulated([low, full], [])
    for index in (0, 1):
        accumulation.fill(index)
    assert [(found.dtype, found.tolist()) for found in accumulation.gradients() if found is not None] == [
        (torch.float32, [0, 0])
    ] * 2
    for index in (0, 1):
        accumulation.set(index, torch.tensor([3.0, 4.0]))
    accumulation.narrow()
    assert [(each.grad.dtype, each.grad.tolist()) for each in (low, full) if each.grad is not None] == [
        (torch.bfloat16, [3, 4]),
        (torch.float32, [3, 4]),
    ]


@pytest.mark.parametrize(("has", "narrowed"), [(True, False), (False, True)])
def test_narrow_where_apart(has: bool, narrowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a gradient scaler, gradients are put into the parameters where they are kept apart, and left wide elsewhere."""
    if has and not WITH_GRAD_DTYPE:
        pytest.skip("this torch has no Tensor.grad_dtype")
    monkeypatch.setattr(gradients, "_HAS_GRAD_DTYPE", has)
    weight = parameter(1, dtype=torch.bfloat16)
    accumulation = accumulated([weight], [weight.sum()])
    accumulation.narrow_where_apart()
    assert weight.grad is not None and weight.grad.dtype == (torch.bfloat16 if narrowed else torch.float32)
    accumulation.discard()


# -- sparse gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_both_ways")
def test_sparse_gradients_are_coalesced(dtype: torch.dtype) -> None:
    """The entries of a sparse gradient do not grow with every micro-batch, and their sum is right."""
    table = nn.Embedding(5, 3, sparse=True).to(dtype)
    rows = [torch.tensor([1, 2, 1]), torch.tensor([2, 2, 4]), torch.tensor([1])]
    accumulation = accumulated([table.weight], [table(chosen).float().sum() for chosen in rows])
    (found,) = accumulation.gradients()
    assert found is not None and found.is_sparse and found.is_coalesced()
    assert found._nnz() == 3
    accumulation.narrow()
    assert table.weight.grad is not None and table.weight.grad.dtype == dtype
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 3, 3, 0, 1]


# -- norm and clipping

few_numbers = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=4), min_size=1, max_size=4)


def with_gradients(values: Sequence[Sequence[float]]) -> list[nn.Parameter]:
    """Parameters with these gradients."""
    made = [nn.Parameter(torch.zeros(len(part))) for part in values]
    for each, part in zip(made, values, strict=True):
        each.grad = torch.tensor(part)
    return made


def grads(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients."""
    return [each.grad for each in parameters if each.grad is not None]


@given(values=few_numbers, max_norm=st.floats(0.01, 1000))
@settings(max_examples=50)
def test_clipping_is_torchs(values: list[list[float]], max_norm: float) -> None:
    """Norm and clipped gradients are, bit for bit, those of `torch.nn.utils.clip_grad_norm_`."""
    ours, theirs = with_gradients(values), with_gradients(values)
    norm = total_norm(grads(ours))
    assert torch.equal(norm, clip_grad_norm_(theirs, max_norm))
    clip(grads(ours), norm, max_norm)
    assert all(torch.equal(one, other) for one, other in zip(grads(ours), grads(theirs), strict=True))


def test_clipping_leaves_a_small_gradient_alone() -> None:
    """A gradient whose norm is below the limit is not scaled up."""
    held = torch.tensor([3.0, 4.0])
    clip([held], total_norm([held]), 10.0)
    assert held.tolist() == [3, 4]


def test_norm_of_nothing_is_zero() -> None:
    """Without gradients the norm is 0."""
    assert float(total_norm([])) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_both_ways")
def test_sparse_gradients_are_measured_and_clipped(dtype: torch.dtype) -> None:
    """Sparse gradients beside dense ones have the norm of what they add up to, and are clipped with them."""
    table, head = nn.Embedding(5, 3, sparse=True).to(dtype), nn.Linear(3, 1)
    rows = [torch.tensor([1, 2, 1]), torch.tensor([2, 2, 4])]
    parameters = [table.weight, *head.parameters()]
    accumulation = accumulated(parameters, [head(table(chosen).float()).sum() for chosen in rows])
    found = [each for each in accumulation.gradients() if each is not None]
    dense = [each.to_dense().clone() for each in found]
    norm = total_norm(found)
    assert float(norm) == pytest.approx(float(get_total_norm(dense)), rel=1e-6)
    clip(found, norm, 0.5)
    assert float(get_total_norm([each.to_dense() for each in found])) == pytest.approx(0.5, rel=1e-4)
    accumulation.discard()


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([[1.0, 2.0], [3.0]], True),
        ([[1e30, 1e30], [3.0]], True),
        ([[3.0], [float("inf")]], False),
        ([[float("nan")], [3.0]], False),
        ([[1e30], [float("-inf")]], False),
    ],
    ids=["small", "the norm overflows", "inf", "nan", "overflow and inf"],
)
def test_all_finite(values: list[list[float]], finite: bool) -> None:
    """Gradients are finite when each of their numbers is, also where the square of one overflows."""
    held = [torch.tensor(part) for part in values]
    norm = total_norm(held)
    assert bool(norm.isinf()) == (max(abs(number) for part in values for number in part) > 1e20)
    assert all_finite(held, norm) == finite


def test_sparse_gradients_can_be_infinite() -> None:
    """An infinity in a sparse gradient is seen."""
    held = torch.tensor([0.0, 1.0, 0.0, float("inf")]).to_sparse()
    assert not all_finite([held], total_norm([held]))
    assert all_finite([held * 0.0], torch.tensor(float("inf"))) is False  # 0 * inf is NaN


# -- what is refused


@pytest.mark.parametrize(("held", "text"), [(1, "1 of the optimizer's 3 parameters"), (3, "3 of the optimizer's 3")])
def test_present_gradients_are_refused(held: int, text: str) -> None:
    """Gradients that are there already are refused, counted, with the remedy."""
    parameters = [parameter(1) for _ in range(3)]
    for each in parameters[:held]:
        each.grad = torch.zeros(1)
    with pytest.raises(InvalidRequestError, match=rf"{text}.* optimizer\.zero_grad\(\)"):
        refuse_present(parameters)


def test_absent_gradients_are_accepted() -> None:
    """Parameters without gradients may begin a window."""
    refuse_present([parameter(1)])


@pytest.mark.usefixtures("_both_ways")
def test_no_gradient_at_all_is_refused() -> None:
    """When nothing led to the parameters, the error asks whether the loss depends on the model."""
    with pytest.raises(InvalidRequestError, match=r"received a gradient: .* Does the loss depend on the model"):
        refuse_none(accumulated([parameter(1), parameter(1, dtype=torch.bfloat16)], []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_both_ways")
def test_one_gradient_is_enough(dtype: torch.dtype) -> None:
    """A window in which one parameter has a gradient is accepted, wherever that gradient is kept."""
    weight = parameter(1, dtype=dtype)
    accumulation = accumulated([parameter(1), weight], [weight.sum()])
    refuse_none(accumulation)
    accumulation.discard()


def stepping_in_backward(weight: nn.Parameter) -> Callable[[Tensor], None]:
    """An optimizer in the backward pass: it steps with a gradient as soon as it is there, and frees it."""

    def hook(held: Tensor) -> None:
        held.grad = None

    weight.register_post_accumulate_grad_hook(hook)
    return hook


def test_optimizer_in_the_backward_pass_is_named() -> None:
    """When hooks took the gradients away, the error says that an optimizer in the backward pass cannot be accumulated."""
    weight = parameter(1)
    stepping_in_backward(weight)
    with pytest.raises(InvalidRequestError, match="optimizer in the backward pass steps for every micro-batch"):
        refuse_none(accumulated([weight], [weight.sum()]))
