"""What happens once per window, after its gradient is complete: unscale, check, clip, step, update, schedule."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from autoaccum import Accumulator, Window
from autoaccum.errors import InvalidRequestError


def build_network() -> nn.Sequential:
    """The same small network each time, in float32."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def times_factor(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean whose rows carry a factor each, which may be infinite."""
    return (model(batch[0]).pow(2).mean(1) * batch[1]).mean()


def factors(bad_row: int | None = None, bad: float = math.inf) -> Tensor:
    """A factor of 1 for each of eight rows, but for one of them."""
    found = torch.ones(8)
    if bad_row is not None:
        found[bad_row] = bad
    return found


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


# -- a gradient scaler


def test_infinity_in_one_micro_batch_skips_the_window() -> None:
    """An infinity in the third of four micro-batches: no parameter moves, the scale is halved once, nothing is scheduled."""
    model = build_network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    acc = Accumulator(
        model, optimizer, micro_batch=2, training_step=times_factor, scaler=scaler, scheduler=scheduler, max_grad_norm=1.0
    )
    before = values_of(model)
    step = acc.step((rows(), factors(bad_row=5)))
    assert step.skipped
    assert step.micro_batch_sizes == (2, 2, 2, 2)
    assert torch.equal(values_of(model), before)
    assert scaler.get_scale() == 512.0
    assert scheduler.last_epoch == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_window_after_a_skipped_one() -> None:
    """After a skipped window the next one steps, at the lower scale and as if nothing had been."""
    model, plain = build_network(), build_network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=times_factor, scaler=scaler)
    acc.step((rows(), factors(bad_row=0)))
    assert not acc.step((rows(), factors())).skipped
    Accumulator(plain, SGD(plain.parameters(), lr=0.1), micro_batch=2, training_step=times_factor).step((rows(), factors()))
    assert scaler.get_scale() == 512.0
    assert torch.equal(values_of(model), values_of(plain))


def test_scale_and_unscale_cancel() -> None:
    """Without an overflow the parameters are bit for bit those without a scaler, whose scale is a power of two."""
    scaled, plain = build_network(), build_network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for model, options in ((scaled, {"scaler": scaler}), (plain, {})):
        acc = Accumulator(
            model, SGD(model.parameters(), lr=0.1), micro_batch=3, training_step=times_factor, max_grad_norm=0.1, **options
        )
        acc.step((rows(), factors()))
    assert torch.equal(values_of(scaled), values_of(plain))
    assert not torch.equal(values_of(plain), values_of(build_network()))


def test_scaler_is_updated_once_per_window() -> None:
    """A scaler that doubles after two good steps does so after two windows of four micro-batches, not within one."""
    model = build_network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=times_factor, scaler=scaler)
    scales = []
    for _ in range(4):
        acc.step((rows(), factors()))
        scales.append(scaler.get_scale())
    assert scales == [2.0, 4.0, 4.0, 8.0]


def test_disabled_scaler_is_none() -> None:
    """A scaler that is switched off changes nothing."""
    model, plain = build_network(), build_network()
    off = torch.amp.GradScaler("cpu", enabled=False)
    Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=times_factor, scaler=off).step(
        (rows(), factors())
    )
    Accumulator(plain, SGD(plain.parameters(), lr=0.1), micro_batch=2, training_step=times_factor).step((rows(), factors()))
    assert torch.equal(values_of(model), values_of(plain))


def test_half_precision_autocast_with_a_scaler() -> None:
    """float16 under autocast with scaler, clipping and accumulation ends where float32 does, but for its rounding."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return times_factor(model, batch)

    half, full = build_network(), build_network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    first = Accumulator(
        half, SGD(half.parameters(), lr=0.1), micro_batch=2, training_step=step, scaler=scaler, max_grad_norm=0.5
    )
    second = Accumulator(full, SGD(full.parameters(), lr=0.1), micro_batch=2, training_step=times_factor, max_grad_norm=0.5)
    norms = [acc.step((rows(), factors())).grad_norm for acc in (first, second)]
    assert norms[0] == pytest.approx(norms[1], rel=5e-3)
    assert torch.allclose(values_of(half), values_of(full), atol=1e-3)
    assert not torch.equal(values_of(half), values_of(full))


# -- gradients that are not finite, without a scaler


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradient_that_is_not_finite_takes_no_step(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """Without a scaler as well an infinity or NaN skips the window, says so, and leaves parameters and schedule alone."""
    model = build_network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=times_factor, scheduler=scheduler)
    before = values_of(model)
    with caplog.at_level(logging.WARNING, logger="autoaccum"):
        step = acc.step((rows(), factors(bad_row=3, bad=bad)))
    assert step.skipped
    assert torch.equal(values_of(model), before)
    assert not optimizer.state
    assert scheduler.last_epoch == 0
    assert caplog.messages == ["a gradient was not finite: the window took no step"]
    assert not acc.step((rows(), factors())).skipped


def test_large_gradient_is_finite() -> None:
    """A gradient whose square overflows is finite all the same, and is stepped with."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    acc = Accumulator(
        model, SGD(model.parameters(), lr=1e-30), micro_batch=1, training_step=lambda model, batch: model(batch).mean()
    )
    assert not acc.step(torch.full((2, 1), 1e30)).skipped
    assert model.weight.item() == pytest.approx(-1.0)


def test_sum_beyond_the_parameters_precision_takes_no_step() -> None:
    """Where the sum of finite float16 gradients is too large for float16, the window is skipped, not stepped with."""
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.ones_(model.weight)
    acc = Accumulator(model, SGD(model.parameters(), lr=1e-6), micro_batch=1, loss_fn=nn.MSELoss(reduction="sum"))
    step = acc.step((torch.full((2, 1), 150.0).half(), torch.zeros(2, 1).half()))  # two gradients of 45,000
    assert step.skipped
    assert model.weight.item() == 1.0


# -- clipping


def test_gradient_is_clipped_once() -> None:
    """The whole window's gradient is clipped, as clip_grad_norm_ does it; micro-batch by micro-batch it is another one."""
    model, reference, naive = build_network().double(), build_network().double(), build_network().double()
    batch, limit = rows().double(), 0.01
    targets = torch.randn(8, 2, generator=torch.Generator().manual_seed(1)).double() * torch.logspace(-2, 1, 8)[:, None]
    functional.mse_loss(reference(batch), targets).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), limit)
    SGD(reference.parameters(), lr=1.0).step()
    acc = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch=2, loss_fn=nn.MSELoss(), max_grad_norm=limit)
    step = acc.step((batch, targets))
    start = values_of(build_network().double())
    moved, expected = values_of(model) - start, values_of(reference) - start
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    assert float(norm) > limit
    assert (moved - expected).norm() <= 1e-12 * expected.norm()
    assert moved.norm().item() == pytest.approx(limit, rel=1e-3)
    for x, y in zip(batch.split(2), targets.split(2), strict=True):
        part = copy.deepcopy(naive)
        functional.mse_loss(part(x), y).backward()
        nn.utils.clip_grad_norm_(part.parameters(), limit)
        for kept, of_part in zip(naive.parameters(), part.parameters(), strict=True):
            assert of_part.grad is not None
            kept.grad = of_part.grad / 4 if kept.grad is None else kept.grad + of_part.grad / 4
    SGD(naive.parameters(), lr=1.0).step()
    assert ((values_of(naive) - start) - expected).norm() > 0.1 * expected.norm()


def test_small_gradient_is_not_clipped() -> None:
    """A gradient below the limit is stepped with as it is, and its norm is told."""
    model, plain = build_network(), build_network()
    clipping = Accumulator(
        model, SGD(model.parameters(), lr=0.1), micro_batch=3, training_step=times_factor, max_grad_norm=1e6
    )
    without = Accumulator(plain, SGD(plain.parameters(), lr=0.1), micro_batch=3, training_step=times_factor)
    step = clipping.step((rows(), factors()))
    assert step.grad_norm is not None and 0 < step.grad_norm < 1e6
    assert without.step((rows(), factors())).grad_norm is None
    assert torch.equal(values_of(model), values_of(plain))


# -- schedules


def test_schedule_follows_steps_not_micro_batches() -> None:
    """Three windows of four micro-batches are three steps of the schedule; sized in micro-batches it would be twelve."""
    model = build_network()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 3)
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=times_factor, scheduler=scheduler)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        acc.step((rows(), factors()))
    assert rates == [pytest.approx(1.0), pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


def test_schedule_waits_for_a_step() -> None:
    """A window that takes no step, for want of weight or of finite gradients, does not move the schedule."""
    model = build_network()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=times_factor, scheduler=scheduler)
    seen = []
    for batch in ((rows(), factors()), Window([]), (rows(), factors(bad_row=1)), (rows(), factors())):
        acc.step(batch)
        seen.append(scheduler.last_epoch)
    assert seen == [1, 1, 1, 2]


# -- options that do not fit


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give either plan= or micro_batch="),
        ({"micro_batch": 2, "plan": 1}, "give either plan= or micro_batch="),
        ({"micro_batch": 0}, "micro_batch=0 is not possible"),
        ({"micro_batch": 2.5}, "micro_batch=2.5 is not possible"),
        ({"micro_batch": True}, "micro_batch=True is not possible"),
        ({"plan": 5}, "plan is a int; expected a Plan"),
        ({"micro_batch": 2, "scaler": 3}, "scaler is a int; expected a torch.amp.GradScaler"),
        ({"micro_batch": 2, "max_grad_norm": 0}, "max_grad_norm=0 is not possible"),
        ({"micro_batch": 2, "max_grad_norm": -1.0}, "max_grad_norm=-1.0 is not possible"),
        ({"micro_batch": 2, "max_grad_norm": math.inf}, "max_grad_norm=inf is not possible"),
        ({"micro_batch": 2, "max_grad_norm": math.nan}, "max_grad_norm=nan is not possible"),
        ({"micro_batch": 2, "max_grad_norm": True}, "max_grad_norm=True is not possible"),
        ({"micro_batch": 2, "max_grad_norm": "1"}, "max_grad_norm='1' is not possible"),
        ({"micro_batch": 2, "scheduler": 3}, "scheduler is a int without step"),
        ({"micro_batch": 2, "on_oom": "skip"}, "on_oom='skip' is unknown"),
        ({"micro_batch": 2, "split": 3}, "split=3 cannot be called"),
        ({"micro_batch": 2, "loss_fn": 3}, "loss_fn=3 cannot be called"),
        ({"micro_batch": 2, "training_step": 3}, "training_step=3 cannot be called"),
        ({"micro_batch": 2, "weight": "rows"}, "weight='rows' is unknown"),
        ({"micro_batch": 2, "weight": 3}, "weight=3 is unknown"),
        ({"cost": len}, "cost= and max_cost= go together"),
        ({"max_cost": 3}, "cost= and max_cost= go together"),
        ({"cost": len, "max_cost": 3, "split": len}, "cost= and max_cost= go together"),
        ({"cost": len, "max_cost": 0}, "max_cost=0; expected a function and a number above 0"),
        ({"cost": len, "max_cost": math.inf}, "max_cost=inf; expected a function and a number above 0"),
        ({"cost": 3, "max_cost": 3}, "cost=3, max_cost=3; expected a function"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    """Each impossible argument is refused at once, with its name and value."""
    model = build_network()
    with pytest.raises(InvalidRequestError) as refused:
        Accumulator(model, SGD(model.parameters(), lr=0.1), **options)
    assert said in str(refused.value)


def test_schedule_by_a_metric_is_refused() -> None:
    """A schedule that steps by a metric cannot be stepped here, and the message says who has to."""
    model = build_network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(InvalidRequestError, match="needs a metric for its step"):
        Accumulator(model, optimizer, micro_batch=2, scheduler=scheduler)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS evaluates a closure"),
        (lambda model: SGD(nn.Linear(2, 2).parameters(), lr=0.1), "2 parameters that are not the model's"),
        (lambda model: lambda parameters: SGD(parameters, lr=0.1), "optimizer is a function; expected a torch.optim"),
        (lambda model: None, "optimizer is a NoneType; expected a torch.optim"),
    ],
    ids=["closure", "other-parameters", "factory", "none"],
)
def test_optimizers_that_cannot_be_used(make: Any, said: str) -> None:
    """An optimizer that needs a closure, is over other parameters, or is none yet, is refused with the reason."""
    model = build_network()
    with pytest.raises(InvalidRequestError, match=said):
        Accumulator(model, make(model), micro_batch=2)


def test_gradients_that_are_present_are_refused() -> None:
    """Gradients from before the window are refused with the remedy, kept as they are, and after the remedy it runs."""
    model = build_network()
    optimizer = SGD(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=times_factor)
    model(rows(1))[:, 0].sum().backward()
    held = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(InvalidRequestError, match=r"4 of the optimizer's 4 parameters .* call optimizer.zero_grad\(\)"):
        acc.step((rows(), factors()))
    assert all(parameter.grad is before for parameter, before in zip(model.parameters(), held, strict=True))
    optimizer.zero_grad()
    assert not acc.step((rows(), factors())).skipped


def test_loss_that_nobody_gave_is_refused() -> None:
    """A model that returns no loss is not trained on the mean of its outputs."""
    model = build_network()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2)
    with pytest.raises(InvalidRequestError, match="no loss was given and the model returns none"):
        acc.step(rows())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(batch).mean().item(), "returned float as the loss"),
        (lambda model, batch: model(batch), "not a scalar"),
        (lambda model, batch: model(batch).mean().detach(), "does not require grad"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, said: str) -> None:
    """A number, many numbers, and a loss without a graph are each refused in their own words, and nothing is left behind."""
    model = build_network()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=loss)
    with pytest.raises(InvalidRequestError, match=said):
        acc.step(rows())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caller_without_gradients(mode: Any) -> None:
    """Called where gradients are off, a window trains as it does elsewhere, also with clipping and a scaler."""
    model, plain = build_network(), build_network()
    for trained, context in ((model, mode), (plain, torch.enable_grad)):
        acc = Accumulator(
            trained,
            AdamW(trained.parameters(), lr=0.1),
            micro_batch=3,
            training_step=times_factor,
            max_grad_norm=0.1,
            scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        )
        batch = (rows(), factors())
        with context():
            acc.step(batch)
        acc.step(batch)
    assert torch.equal(values_of(model), values_of(plain))
