"""One accumulation window: its gradient is the big batch's, and it takes exactly one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from autoaccum.errors import InvalidRequestError
from autoaccum.window import Progress, run_window


class Recording(SGD):
    """An optimizer that keeps the gradients of every step, and steps as told."""

    def __init__(self, parameters: Any, lr: float = 0.0) -> None:
        super().__init__(parameters, lr=lr)
        self.steps: list[list[Tensor | None]] = []

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.steps.append([None if parameter.grad is None else parameter.grad.clone() for parameter in parameters])
        super().step(closure)

    @property
    def gradient(self) -> Tensor:
        """All gradients of the only step as one vector."""
        (only,) = self.steps
        return torch.cat([gradient.flatten() for gradient in only if gradient is not None])


def run(
    micro_batches: Any,
    weights: list[float],
    loss: Callable[[Any], Tensor],
    optimizer: Optimizer,
    progress: Progress | None = None,
    place: Callable[[Any], Any] = lambda batch: batch,
) -> Tensor:
    """A window without a device."""
    return run_window(micro_batches, weights, loss=loss, optimizer=optimizer, place=place, progress=progress or Progress())


def relative(difference: Tensor, reference: Tensor) -> float:
    """The size of a difference against what it is a difference from."""
    return float(difference.norm() / reference.norm())


@pytest.fixture
def double() -> Iterator[None]:
    """Everything in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build_network() -> nn.Sequential:
    """A small network in float64, the same each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


sizes_of_windows = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@given(sizes=sizes_of_windows)
@settings(max_examples=25)
def test_uneven_rows_have_the_big_batchs_gradient(sizes: list[int]) -> None:
    """However a batch is cut, the gradient of the window is that of the whole batch's mean to 1e-12 in float64."""
    generator = torch.Generator().manual_seed(sum(sizes))
    inputs = torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (sum(sizes),), generator=generator)
    model = build_network()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    whole, parts = Recording(model.parameters()), Recording(model.parameters())
    whole_loss = run([(inputs, targets)], [1.0], loss, whole)
    parts_loss = run(list(zip(inputs.split(sizes), targets.split(sizes), strict=True)), list(sizes), loss, parts)
    assert relative(parts.gradient - whole.gradient, whole.gradient) <= 1e-12
    assert float(parts_loss) == pytest.approx(float(whole_loss), rel=1e-12)


@given(lengths=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any))
@settings(max_examples=25)
def test_token_means_have_the_big_batchs_gradient(lengths: list[int]) -> None:
    """With token means weighted by their valid tokens, the gradient is that of the mean over all valid tokens."""
    generator = torch.Generator().manual_seed(sum(lengths))
    inputs = torch.randn(len(lengths), 9, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (len(lengths), 9), generator=generator)
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    model = build_network()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    whole, parts = Recording(model.parameters()), Recording(model.parameters())
    run([(inputs, targets)], [1.0], loss, whole)
    # A sequence without a valid token has a loss of 0 / 0 and a weight of 0: it must not turn the gradient to NaN.
    run(list(zip(inputs.split(1), targets.split(1), strict=True)), [float(length) for length in lengths], loss, parts)
    assert relative(parts.gradient - whole.gradient, whole.gradient) <= 1e-12


def test_class_weights_have_the_big_batchs_gradient(double: None) -> None:
    """With class weights, weighted by the sum of the rows' class weights, the gradient is the whole batch's."""
    torch.manual_seed(0)
    inputs, targets, weight = torch.randn(12, 5), torch.randint(0, 3, (12,)), torch.tensor([0.1, 1.0, 7.0])
    model = build_network()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], weight=weight)

    whole, parts = Recording(model.parameters()), Recording(model.parameters())
    run([(inputs, targets)], [1.0], loss, whole)
    cut = list(zip(inputs.split([5, 4, 3]), targets.split([5, 4, 3]), strict=True))
    run(cut, [float(weight[rows].sum()) for _, rows in cut], loss, parts)
    assert relative(parts.gradient - whole.gradient, whole.gradient) <= 1e-12


def test_equal_weights_for_uneven_sizes_are_wrong(double: None) -> None:
    """Uneven micro-batches without their weights have another gradient, so the weights are what makes it exact."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 5)
    model = build_network()
    whole, parts = Recording(model.parameters()), Recording(model.parameters())
    run([inputs], [1.0], lambda batch: model(batch).pow(2).mean(), whole)
    run(inputs.split([7, 1]), [1.0, 1.0], lambda batch: model(batch).pow(2).mean(), parts)
    assert relative(parts.gradient - whole.gradient, whole.gradient) > 1e-3


def test_scale_of_weights_does_not_matter(double: None) -> None:
    """Weights count relative to each other only."""
    inputs = torch.arange(20.0).reshape(4, 5)
    model = build_network()
    first, second = Recording(model.parameters()), Recording(model.parameters())
    run(inputs.split([3, 1]), [3.0, 1.0], lambda batch: model(batch).pow(2).mean(), first)
    run(inputs.split([3, 1]), [3000.0, 1000.0], lambda batch: model(batch).pow(2).mean(), second)
    assert relative(first.gradient - second.gradient, first.gradient) <= 1e-12


def test_step_is_the_big_batchs_step(double: None) -> None:
    """After a window of uneven parts the parameters are those after a step on the whole batch."""
    torch.manual_seed(0)
    inputs = torch.randn(9, 5)
    whole, parts = build_network(), build_network()
    run([inputs], [1.0], lambda batch: whole(batch).pow(2).mean(), SGD(whole.parameters(), lr=0.1))
    run(inputs.split([4, 3, 2]), [4, 3, 2], lambda batch: parts(batch).pow(2).mean(), SGD(parts.parameters(), lr=0.1))
    for expected, got, start in zip(whole.parameters(), parts.parameters(), build_network().parameters(), strict=True):
        assert torch.allclose(expected, got, rtol=1e-12, atol=1e-15)
        assert not torch.equal(expected, start)


def test_loss_is_the_weighted_mean() -> None:
    """The value that comes back is the weighted mean of the losses, detached."""
    layer = nn.Linear(1, 1)
    values = iter([1.0, 4.0])
    loss = run([0, 0], [3.0, 1.0], lambda batch: layer(torch.ones(1, 1)).sum() * 0 + next(values), SGD(layer.parameters()))
    assert float(loss) == pytest.approx((3 * 1 + 1 * 4) / 4)
    assert not loss.requires_grad
    assert loss.shape == ()


def test_weight_of_zero_is_not_run() -> None:
    """A micro-batch of weight 0 is neither placed nor run."""
    layer = nn.Linear(2, 1)
    placed: list[str] = []

    def place(name: str) -> Tensor:
        placed.append(name)
        return torch.ones(1, 2)

    run(["first", "empty", "last"], [1, 0, 2], lambda batch: layer(batch).mean(), SGD(layer.parameters()), place=place)
    assert placed == ["first", "last"]


def test_weights_that_are_all_zero() -> None:
    """A window in which nothing has a weight takes no step and says so."""
    layer = nn.Linear(2, 1)
    optimizer = Recording(layer.parameters())
    with pytest.raises(InvalidRequestError, match="gradient"):
        run([torch.ones(1, 2)], [0.0], lambda batch: layer(batch).mean(), optimizer)
    assert optimizer.steps == []


def test_one_step_for_a_window() -> None:
    """The optimizer steps once, after the last micro-batch."""
    layer = nn.Linear(2, 1)
    optimizer = Recording(layer.parameters())
    seen: list[int] = []

    def loss(batch: Tensor) -> Tensor:
        seen.append(len(optimizer.steps))
        return layer(batch).mean()

    run([torch.ones(1, 2)] * 4, [1, 1, 1, 1], loss, optimizer)
    assert seen == [0, 0, 0, 0]
    assert len(optimizer.steps) == 1


def test_gradients_are_none_afterwards() -> None:
    """After the step no parameter holds a gradient."""
    layer = nn.Linear(2, 1)
    run([torch.ones(1, 2)] * 2, [1, 1], lambda batch: layer(batch).mean(), AdamW(layer.parameters()))
    assert [parameter.grad for parameter in layer.parameters()] == [None, None]


def test_parameters_in_a_generator_are_taken_one_at_a_time() -> None:
    """Micro-batches are drawn when their turn comes, so that a loader need not hold the window."""
    layer = nn.Linear(2, 1)
    events: list[str] = []

    def micro_batches() -> Iterator[Tensor]:
        for index in range(2):
            events.append(f"drawn {index}")
            yield torch.ones(1, 2)

    def loss(batch: Tensor) -> Tensor:
        events.append("run")
        return layer(batch).mean()

    run(micro_batches(), [1, 1], loss, SGD(layer.parameters()))
    assert events == ["drawn 0", "run", "drawn 1", "run"]


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_weights_as_micro_batches(count: int) -> None:
    """A window with more or fewer weights than micro-batches is an error and takes no step."""
    layer = nn.Linear(2, 1)
    optimizer = Recording(layer.parameters())
    with pytest.raises(ValueError, match="zip"):
        run([torch.ones(1, 2)] * 2, [1.0] * count, lambda batch: layer(batch).mean(), optimizer)
    assert optimizer.steps == []


def test_step_without_any_gradient() -> None:
    """A loss that leads to none of the optimizer's parameters is refused, and no step is taken."""
    trained, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = Recording(trained.parameters())
    with pytest.raises(InvalidRequestError, match="no parameter of the optimizer received a gradient"):
        run([torch.ones(1, 2)], [1], lambda batch: other(batch).mean(), optimizer)
    assert optimizer.steps == []


def test_step_with_some_gradients() -> None:
    """A parameter that the loss does not lead to stays without a gradient, and the others are trained."""
    trained, unused = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = Recording([*trained.parameters(), *unused.parameters()])
    run([torch.ones(1, 2)], [1], lambda batch: trained(batch).mean(), optimizer)
    assert [gradient is None for gradient in optimizer.steps[0]] == [False, False, True, True]


# -- where an error came from


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise KeyError("backward")


class FailingStep(SGD):
    def step(self, closure: Any = None) -> None:
        raise KeyError("optimizer")


def fail(phase: str) -> Any:
    """Raise an error that names where it came from."""
    raise KeyError(phase)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("at", [0, 1], ids=["first-micro-batch", "second-micro-batch"])
def test_phase_of_an_error(phase: str, at: int) -> None:
    """Where an error comes from is what the progress says, in every micro-batch, and the error is the user's own."""
    layer, progress = nn.Linear(2, 1), Progress()
    seen: list[Tensor] = []

    def place(batch: Tensor) -> Tensor:
        return fail("data") if phase == "data" and len(seen) == at else batch  # type: ignore[no-any-return]

    def loss(batch: Tensor) -> Tensor:
        seen.append(batch)
        if len(seen) <= at or phase == "optimizer":
            return layer(batch).mean()
        return FailingBackward.apply(layer(batch)).mean() if phase == "backward" else fail("forward")  # type: ignore[no-any-return, no-untyped-call]

    optimizer = FailingStep(layer.parameters(), lr=0.1)
    with pytest.raises(KeyError, match=phase):
        run([torch.ones(1, 2)] * 2, [1, 1], loss, optimizer, progress, place)
    assert progress.phase == phase


def test_phase_before_anything() -> None:
    """Before a window has begun its progress says data, which is where an error of the loader belongs."""
    assert Progress().phase == "data"


def test_phase_of_drawing_the_second_micro_batch() -> None:
    """An error of the loader after the first micro-batch has run is one of the data, not of the backward pass before it."""
    layer, progress = nn.Linear(2, 1), Progress()

    def micro_batches() -> Iterator[Tensor]:
        yield torch.ones(1, 2)
        fail("data")

    with pytest.raises(KeyError):
        run(micro_batches(), [1, 1], lambda batch: layer(batch).mean(), SGD(layer.parameters()), progress)
    assert progress.phase == "data"


# -- what the caller's modes have to do with it


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caller_without_gradients(mode: Callable[[], Any]) -> None:
    """Called where gradients are off, a window trains, and the optimizer state it makes can be trained on outside."""
    layer, batch = nn.Linear(2, 1), torch.ones(3, 2)
    optimizer = AdamW(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    with mode():
        run([batch, batch], [3, 3], lambda placed: layer(placed).mean(), optimizer)
        assert not torch.is_grad_enabled()
    assert not torch.equal(before, layer.weight)
    middle = layer.weight.detach().clone()
    run([batch, batch], [3, 3], lambda placed: layer(placed).mean(), optimizer)
    assert not torch.equal(middle, layer.weight)


def test_reads_no_value() -> None:
    """The window runs on fake tensors, which have no values that could be read."""
    with FakeTensorMode():
        layer = nn.Linear(2, 1)
        optimizer = SGD(layer.parameters(), lr=0.1, momentum=0.9)
        batch = torch.ones(3, 2)
        loss = run([batch, batch], [3, 1], lambda placed: layer(placed).mean(), optimizer)
        assert loss.shape == ()
        assert optimizer.state[layer.weight]["momentum_buffer"].shape == (1, 2)
        with pytest.raises(DataDependentOutputException):
            float(loss)  # so this test would have seen it


def test_optimizer_of_frozen_parameters_only() -> None:
    """An optimizer without anything to train is refused as one that no gradient reaches."""
    frozen, trained = nn.Linear(2, 2), nn.Linear(2, 1)
    frozen.requires_grad_(False)
    with pytest.raises(InvalidRequestError, match="no parameter of the optimizer received a gradient"):
        run([torch.ones(1, 2)], [1], lambda batch: trained(frozen(batch)).mean(), SGD(frozen.parameters()))
