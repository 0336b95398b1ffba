"""A window whose loop is the user's own: the same step as `Accumulator.step`, or a refusal, never half of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import autoaccum
from autoaccum import Accumulator, Window
from autoaccum.errors import InvalidRequestError


class Net(nn.Module):
    """Two layers with dropout and BatchNorm between them; more rows than there is room for do not fit."""

    def __init__(self, room: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.room = room

    def forward(self, batch: Tensor) -> Tensor:
        if len(batch) > self.room:
            raise torch.OutOfMemoryError("full")
        return self.second(functional.dropout(self.norm(self.first(batch)), 0.5))  # type: ignore[no-any-return]


def mean_step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]


def accumulator(model: nn.Module, micro_batch: int = 3, **options: Any) -> Accumulator:
    return Accumulator(model, SGD(model.parameters(), lr=0.5), micro_batch=micro_batch, **options)


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten().clone().float() for value in model.state_dict().values()])


def by_hand(acc: Accumulator, model: nn.Module, batch: Any) -> autoaccum.StepResult:
    """The loop as a user writes it."""
    with acc.window(batch) as window:
        for micro_batch in window:
            window.backward(mean_step(model, micro_batch))
    return window.result


def test_loop_takes_the_step_of_step() -> None:
    """Parameters, buffers and result after the loop are bit for bit those of `Accumulator.step`."""
    looped, stepped = Net(), Net()
    results = []
    for model, run in ((looped, by_hand), (stepped, lambda acc, model, batch: acc.step(batch))):
        torch.manual_seed(5)
        optimizer = SGD(model.parameters(), lr=0.5)
        acc = Accumulator(
            model,
            optimizer,
            micro_batch=3,
            training_step=mean_step,
            max_grad_norm=0.1,
            scheduler=LambdaLR(optimizer, lambda step: 0.5**step),
            scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        )
        results.append([run(acc, model, rows(count)) for count in (8, 6)])
        assert optimizer.param_groups[0]["lr"] == 0.125
    assert results[0] == results[1]
    assert torch.equal(values_of(looped), values_of(stepped))


def test_loss_is_weighted_in_the_loop() -> None:
    """Means over tokens are handed over undivided, and weighted by what `weight=` counts."""
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    reference.load_state_dict(model.state_dict())
    inputs = torch.randn(3, 4, 3).double()
    labels = torch.tensor([[0, 1, -100, -100], [-100] * 4, [0, 0, 1, 1]])

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    loss(reference, {"x": inputs, "labels": labels}).backward()
    SGD(reference.parameters(), lr=0.5).step()
    acc = accumulator(model, micro_batch=1, weight=autoaccum.tokens("labels"))
    seen = 0
    with acc.window({"x": inputs, "labels": labels}) as window:
        for micro_batch in window:
            seen += 1
            window.backward(loss(model, micro_batch))
    assert torch.allclose(model.weight, reference.weight, rtol=1e-12, atol=1e-14)
    assert seen == 2  # the row without labels is not handed out
    assert window.result.weight == 6


def test_ready_micro_batches_in_the_loop() -> None:
    """A Window of ready micro-batches is handed out as it is."""
    model = Net()
    seen = []
    acc = accumulator(model)
    with acc.window(Window(list(rows().split([5, 3])))) as window:
        for micro_batch in window:
            seen.append(len(micro_batch))
            window.backward(mean_step(model, micro_batch))
    assert seen == [5, 3]
    assert window.result.micro_batch_sizes == (5, 3)


@pytest.mark.parametrize("batch", [None, Window([]), torch.empty(0, 4)])
def test_nothing_in_the_loop(batch: Any) -> None:
    """A window without anything hands nothing out and takes no step."""
    assert by_hand(accumulator(Net()), Net(), batch).skipped


def assert_undone(model: nn.Module, before: Tensor, generator: Tensor) -> None:
    """Gradients None, parameters, buffers and the generator as before."""
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(values_of(model), before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_leaving_the_loop_early_is_refused() -> None:
    """A break before the last micro-batch would step with a part of the batch: refused, and undone."""
    model = Net()
    acc, before, generator = accumulator(model), values_of(model), torch.get_rng_state()
    with pytest.raises(InvalidRequestError, match="ended before its last micro-batch"):  # noqa: SIM117
        with acc.window(rows()) as window:
            for micro_batch in window:
                window.backward(mean_step(model, micro_batch))
                break
    assert_undone(model, before, generator)


def test_loop_that_never_began_is_refused() -> None:
    """A block without a loop takes no step."""
    model = Net()
    acc, before, generator = accumulator(model), values_of(model), torch.get_rng_state()
    with pytest.raises(InvalidRequestError, match="ended before its last micro-batch"), acc.window(rows()):
        pass
    assert_undone(model, before, generator)


@pytest.mark.parametrize("without", [0, 1, 2])
def test_missing_backward_is_refused(without: int) -> None:
    """A micro-batch without its backward, the last one included, is named and the window undone."""
    model = Net()
    acc, before, generator = accumulator(model), values_of(model), torch.get_rng_state()
    with pytest.raises(InvalidRequestError, match=f"micro-batch {without} had no window.backward"):  # noqa: SIM117
        with acc.window(rows()) as window:
            for index, micro_batch in enumerate(window):
                if index != without:
                    window.backward(mean_step(model, micro_batch))
    assert_undone(model, before, generator)


def test_second_backward_is_refused() -> None:
    """A micro-batch with two losses would count twice: add them up first."""
    model = Net()
    acc, before, generator = accumulator(model), values_of(model), torch.get_rng_state()
    with pytest.raises(InvalidRequestError, match="called once for each micro-batch"):  # noqa: SIM117
        with acc.window(rows()) as window:
            for micro_batch in window:
                window.backward(mean_step(model, micro_batch))
                window.backward(mean_step(model, micro_batch))
    assert_undone(model, before, generator)


def test_backward_outside_of_the_loop_is_refused() -> None:
    """Before the first micro-batch and after the last one there is nothing that a loss could belong to."""
    model = Net()
    acc = accumulator(model)
    with pytest.raises(InvalidRequestError, match="inside the loop"), acc.window(rows()) as window:
        window.backward(mean_step(model, rows()))
    with pytest.raises(InvalidRequestError, match="inside the loop"):  # noqa: SIM117
        with acc.window(rows()) as window:
            for micro_batch in window:
                window.backward(mean_step(model, micro_batch))
            window.backward(mean_step(model, rows()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_loop_over_a_window_twice_is_no_step() -> None:
    """A second loop over the same window is an error and not a second helping of gradients."""
    model = Net()
    acc, before = accumulator(model), values_of(model)
    with pytest.raises((InvalidRequestError, ValueError)):  # noqa: SIM117
        with acc.window(rows()) as window:
            for _ in range(2):
                for micro_batch in window:
                    window.backward(mean_step(model, micro_batch))
    assert torch.equal(values_of(model), before)


def test_loss_that_is_no_scalar_is_refused() -> None:
    """What is handed over must be a scalar with a graph."""
    model = Net()
    acc = accumulator(model)
    with pytest.raises(InvalidRequestError, match="not a scalar"):  # noqa: SIM117
        with acc.window(rows()) as window:
            for micro_batch in window:
                window.backward(model(micro_batch))


def test_result_before_the_end_is_refused() -> None:
    """Inside the block there is no result yet, and after an error there is none."""
    model = Net()
    window = accumulator(model).window(rows())
    with pytest.raises(InvalidRequestError, match="no result before its block has ended"), window:
        window.result  # noqa: B018
    with pytest.raises(InvalidRequestError, match="no result before its block has ended"):
        window.result  # noqa: B018


def test_users_error_in_the_loop() -> None:
    """An error in the body comes out unchanged, without a note, with the window undone; so does Ctrl-C."""
    model = Net()
    for error in (ZeroDivisionError("mine"), KeyboardInterrupt("mine")):
        acc, before, generator = accumulator(model), values_of(model), torch.get_rng_state()
        with pytest.raises(type(error)) as raised:  # noqa: SIM117
            with acc.window(rows()) as window:
                for index, micro_batch in enumerate(window):
                    window.backward(mean_step(model, micro_batch))
                    if index == 1:
                        raise error
        assert raised.value is error
        assert not hasattr(raised.value, "__notes__")
        assert_undone(model, before, generator)


def test_running_out_of_memory_in_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """The error comes out with a note that says how to go on, the window is undone, and the same block then runs smaller."""
    model, reference = Net(room=4), Net()
    torch.manual_seed(5)
    acc, before, generator = accumulator(model, micro_batch=8), values_of(model), torch.get_rng_state()
    with caplog.at_level(logging.WARNING, logger="autoaccum"), pytest.raises(torch.OutOfMemoryError) as raised:
        by_hand(acc, model, rows())
    assert "run the block again, and it will use micro-batches of at most 4" in raised.value.__notes__[0]
    assert_undone(model, before, generator)
    assert by_hand(acc, model, rows()).micro_batch_sizes == (4, 4)
    torch.manual_seed(5)
    by_hand(accumulator(reference, micro_batch=4), reference, rows())
    assert torch.equal(values_of(model), values_of(reference))


def test_gradients_that_are_present_are_refused_at_the_block() -> None:
    """Gradients from elsewhere are refused on entering, not after the work is done."""
    model = Net()
    mean_step(model, rows()).backward()
    entered = []
    with pytest.raises(InvalidRequestError, match="already hold gradients"), accumulator(model).window(rows()):
        entered.append(1)
    assert entered == []


def test_one_window_within_another_is_refused() -> None:
    """A window inside another one's block over the same parameters would mix their gradients."""
    model = Net()
    acc, before = accumulator(model), values_of(model)
    with pytest.raises(InvalidRequestError, match="already hold gradients"):  # noqa: SIM117
        with acc.window(rows()) as outer:
            for micro_batch in outer:
                outer.backward(mean_step(model, micro_batch))
            by_hand(acc, model, rows())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(values_of(model)[:-1], before[:-1])  # the last is BatchNorm's count, asserted elsewhere


def test_loop_where_gradients_are_off() -> None:
    """Under no_grad the model's forward has no graph, which is said."""
    model = Net()
    with torch.no_grad(), pytest.raises(InvalidRequestError, match="does not require grad"):
        by_hand(accumulator(model), model, rows())


def test_body_that_turns_gradients_on_itself() -> None:
    """A body that computes its loss with gradients on trains, whatever mode is around the window."""
    model = Net()
    with torch.no_grad(), accumulator(model).window(rows()) as window:
        for micro_batch in window:
            with torch.enable_grad():
                loss = mean_step(model, micro_batch)
            window.backward(loss)
    assert not window.result.skipped
