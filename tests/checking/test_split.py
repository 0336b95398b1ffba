"""The check as a whole: on how much of the batch, in which precision, and without a trace."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

from autoaccum import Accumulator
from autoaccum.batches.slicing import Slicer
from autoaccum.batches.weights import Weigher
from autoaccum.checking.split import check_split, check_workload
from autoaccum.devices import device_for
from autoaccum.errors import InvalidRequestError
from autoaccum.losses import MicroBatchLoss
from autoaccum.workload import Workload


class Net(nn.Module):
    """Dropout, BatchNorm and noise of all generators; may refuse a precision, a number of rows, or everything."""

    def __init__(self, *, room: float = float("inf"), refuses: torch.dtype | None = None, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.dropout, self.second = nn.Linear(4, 6), nn.Dropout(0.25), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if noisy else nn.Identity()
        self.room, self.refuses, self.noisy = room, refuses, noisy
        self.seen: list[tuple[int, torch.dtype]] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.append((len(rows), rows.dtype))
        if rows.dtype == self.refuses:
            raise TypeError(f"no {rows.dtype} here")
        if len(rows) > self.room:
            raise torch.OutOfMemoryError("full")
        hidden = self.dropout(self.norm(self.first(rows)))
        if self.noisy:
            hidden = hidden * (1 + random.random()) + float(np.random.rand()) + torch.rand(())
        return self.second(hidden)  # type: ignore[no-any-return]


def batch(rows: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)


def accumulator(model: nn.Module, **options: Any) -> Accumulator:
    options.setdefault("loss_fn", nn.CrossEntropyLoss())
    return Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=4, **options)


# -- how much of the batch


def test_single_row_is_refused() -> None:
    """One row cannot be split."""
    with pytest.raises(InvalidRequestError, match="at least 2 rows, to be split; this one has 1"):
        accumulator(Net()).check(batch(1))


def test_two_rows_are_enough() -> None:
    """Two rows are one and one."""
    assert accumulator(Net()).check(batch(2)).micro_batch_sizes == (1, 1)


@pytest.mark.parametrize(("rows", "sizes"), [(4, (2, 2)), (5, (3, 2)), (16, (11, 5))])
def test_parts_have_as_many_rows_as_the_model_needs(rows: int, sizes: tuple[int, int]) -> None:
    """Where the model refuses a single row, no part has one, and BatchNorm is named as with a large batch."""
    model = Net()
    model.norm = nn.BatchNorm1d(6)
    result = accumulator(model).check(batch(rows))
    assert result.micro_batch_sizes == sizes
    assert [reason.split(":")[0] for reason in result.reasons] == ["Layer norm"]


@pytest.mark.parametrize("refuses", [None, torch.float64])
@pytest.mark.parametrize("rows", [2, 3])
def test_too_few_rows_for_the_model_are_refused(rows: int, refuses: torch.dtype | None) -> None:
    """Where no split of the batch runs, the error says that the parts are too small, and asks for more rows."""
    model = Net(refuses=refuses)
    model.norm = nn.BatchNorm1d(6)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        InvalidRequestError, match=rf"no split of {rows} rows.*Expected more than 1 value.*; check more rows"
    ):
        accumulator(model).check(batch(rows))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_more_rows_than_asked_for() -> None:
    """`max_rows` bounds what is run, and a bound above the batch changes nothing."""
    model = Net()
    assert sum(accumulator(model).check(batch(), max_rows=6).micro_batch_sizes) == 6
    assert max(count for count, _ in model.seen) == 6
    assert sum(accumulator(Net()).check(batch(), max_rows=500).micro_batch_sizes) == 20


@pytest.mark.parametrize("room", [2, 3, 7, 10, 19])
def test_largest_part_that_fits(room: int) -> None:
    """Where the whole batch does not fit the largest part that does is compared, to an eighth of what fails, and said."""
    result = accumulator(Net(room=room)).check(batch())
    compared = sum(result.micro_batch_sizes)
    assert room - max(1, 20 // 8) < compared <= room
    assert result.exact
    assert result.notes == (f"20 rows did not fit into memory at once: {compared} were compared.",)


@pytest.mark.parametrize("room", [4, 5, 6, 7, 10])
@pytest.mark.parametrize("cause", ["batch norm", "hook on a gradient", "optimizer in backward"])
def test_part_is_examined_like_the_whole(cause: str, room: int) -> None:
    """A batch that does not fit whole is told of the same layers and parameters as one that does."""

    def found(room: float) -> list[str]:
        model = Net(room=room)
        if cause == "batch norm":
            model.norm = nn.BatchNorm1d(6)
        elif cause == "hook on a gradient":
            model.second.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        else:
            model.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        return [reason.split(":")[0] for reason in accumulator(model).check(batch()).reasons]

    assert found(float("inf"))
    assert found(room) == found(float("inf"))


def test_nothing_fits() -> None:
    """Where not even two rows fit, the error comes out as it is."""
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        accumulator(Net(room=1)).check(batch())


@pytest.mark.parametrize("room", [1, 2, 3])
def test_fewest_rows_that_can_be_split_do_not_fit(room: int) -> None:
    """Where what fits is too few to be split, memory is what is missing, not rows."""
    model = Net(room=room)
    model.norm = nn.BatchNorm1d(6)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        accumulator(model).check(batch())


def test_whole_batch_is_not_spoken_of() -> None:
    """Where everything was compared there is nothing to note."""
    assert accumulator(Net()).check(batch()).notes == ()


def test_batch_without_any_weight_is_refused() -> None:
    """Where no label counts nothing can be compared."""
    rows, targets = batch()
    with pytest.raises(InvalidRequestError, match="nothing in the batch has a weight"):
        accumulator(Net()).check((rows, torch.full_like(targets, -100)))


# -- in which precision


def test_double_precision_where_the_model_allows() -> None:
    """A float32 model is compared in float64, its batch with it."""
    model = Net()
    result = accumulator(model).check(batch())
    assert result.dtype == "float64"
    assert {dtype for _, dtype in model.seen} == {torch.float64}


def test_own_precision_where_double_is_refused() -> None:
    """A model that refuses float64 is compared in its own precision, with a note that says whose refusal it was."""
    model = Net(refuses=torch.float64)
    result = accumulator(model).check(batch())
    assert result.exact
    assert result.dtype == "float32"
    assert 0 < result.relative_error < 1e-5
    assert result.notes == ("compared in float32, because float64 was refused (TypeError: no torch.float64 here).",)
    assert model.first.weight.dtype == torch.float32


def test_wrong_weight_is_found_in_half_precision() -> None:
    """A bfloat16 model that refuses float64 is compared in bfloat16, which is enough to find a wrong weight."""
    model = Net(refuses=torch.float64).bfloat16()
    rows, targets = batch()

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, reduction="sum")

    result = accumulator(model, loss_fn=summed).check((rows.bfloat16(), targets))
    assert (result.exact, result.dtype) == (False, "bfloat16")
    assert accumulator(model).check((rows.bfloat16(), targets)).exact


# -- without a trace


def trace(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that must be as before, in a form that can be compared."""
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [
        [(tensor.dtype, tensor.tolist()) for tensor in (*tensors, *state)],
        [tensor.data_ptr() for tensor in model.parameters()],
        [(p.requires_grad, p.grad is None, len(p._backward_hooks or ())) for p in model.parameters()],
        [len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in model.parameters()],
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        model.dropout.p,
        [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups],
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    ]


def prepared(model: Net) -> torch.optim.Optimizer:
    """A model in the middle of its training: optimizer state, hooks, a frozen parameter, mixed modes."""
    optimizer = Adam(model.parameters(), lr=0.01)
    functional.cross_entropy(model.second(torch.randn(5, 6)), torch.randint(3, (5,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.first.bias.requires_grad_(False)
    model.second.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    model.first.register_forward_hook(lambda module, given, output: None)
    model.dropout.eval()
    return optimizer


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("refuses", [None, torch.float64])
@pytest.mark.parametrize("room", [float("inf"), 7])
def test_check_leaves_no_trace(noisy: bool, refuses: torch.dtype | None, room: float) -> None:
    """Values, their places, optimizer, hooks, modes, generators and batch are bit for bit as before."""
    model = Net(noisy=noisy, refuses=refuses, room=room)
    optimizer = prepared(model)
    data = batch()
    before, copied = trace(model, optimizer), copy.deepcopy(data)
    acc = Accumulator(model, optimizer, micro_batch=4, loss_fn=nn.CrossEntropyLoss())
    acc.check(data)
    assert trace(model, optimizer) == before
    assert all(torch.equal(now, then) for now, then in zip(data, copied, strict=True))
    assert acc.state_dict()["windows"] == 0


def test_check_keeps_gradients() -> None:
    """Gradients that are there are as before after the check, as the same tensors."""
    model = Net()
    functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
    held = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in held if gradient is not None]
    assert accumulator(model).check(batch()).exact
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), held, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(held, values, strict=True) if now is not None)


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt("mine")])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_check_that_fails_leaves_no_trace(error: BaseException, number: int) -> None:
    """An error of the user's own, or Ctrl-C, comes out as it is, wherever it is raised, and nothing is left behind."""
    model, calls = Net(noisy=True), []
    optimizer = prepared(model)

    def step(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) > number:
            raise error
        return functional.cross_entropy(model(data[0]), data[1])

    before = trace(model, optimizer)
    acc = Accumulator(model, optimizer, micro_batch=4, training_step=step)
    with pytest.raises(type(error)) as raised:
        acc.check(batch())
    assert raised.value is error
    assert trace(model, optimizer) == before


def test_check_takes_no_step() -> None:
    """Neither optimizer nor schedule nor scaler is moved."""
    model = Net()
    steps: list[int] = []

    class Counting(SGD):
        def step(self, closure: Any = None) -> None:
            steps.append(1)

    optimizer = Counting(model.parameters(), lr=0.1)
    scheduler, scaler = LambdaLR(optimizer, lambda step: 0.5**step), torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = Accumulator(
        model,
        optimizer,
        micro_batch=4,
        loss_fn=nn.CrossEntropyLoss(),
        scheduler=scheduler,
        scaler=scaler,
        max_grad_norm=1e-6,
    )
    before = (len(steps), scheduler.last_epoch)
    assert acc.check(batch()).exact
    assert (len(steps), scheduler.last_epoch, scaler.get_scale()) == (*before, 8.0)


def test_training_after_a_check_is_the_same() -> None:
    """Windows with a check in between end bit for bit where they end without one."""
    checked, plain = Net(noisy=True), Net(noisy=True)
    for model in (checked, plain):
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(5)
        acc = accumulator(model)
        acc.step(batch(8))
        if model is checked:
            acc.check(batch())
        acc.step(batch(12))
    assert all(torch.equal(a, b) for a, b in zip(checked.state_dict().values(), plain.state_dict().values(), strict=True))


def test_check_where_gradients_are_off() -> None:
    """A check is possible where the caller has gradients off, and leaves them off."""
    with torch.no_grad():
        assert accumulator(Net()).check(batch()).exact
        assert not torch.is_grad_enabled()


# -- below the accumulator


def test_check_of_a_split() -> None:
    """The comparison needs a model, a loss, weights and a slicer, and no accumulator."""
    model = Net()
    result = check_split(
        model,
        batch(9),
        MicroBatchLoss(model, nn.CrossEntropyLoss(), None),
        Weigher("samples", nn.CrossEntropyLoss()),
        Slicer(100),
        optimizer=SGD(model.parameters(), lr=0.1),
        device=device_for(None, torch.device("cpu")),
    )
    assert (result.exact, result.micro_batch_sizes) == (True, (6, 3))


@pytest.mark.parametrize(("rows", "compared"), [(2, 2), (8, 8), (30, 30)])
def test_check_of_a_workload(rows: int, compared: int) -> None:
    """A workload is compared on as many rows of its own sample as are asked for."""
    workload = Workload(Net().eval(), batch(5), loss_fn=nn.CrossEntropyLoss())
    result = check_workload(workload, rows)
    assert result.exact
    assert sum(result.micro_batch_sizes) == compared


def test_check_of_a_workload_in_eval_mode() -> None:
    """A model that was handed over in eval mode is run in train mode but for its BatchNorm, which is noted."""
    modes = set()

    def step(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        modes.add((model.training, model.norm.training))  # type: ignore[union-attr]
        return model(data[0]).pow(2).mean()  # type: ignore[no-any-return]

    model = Net()
    model.norm = nn.BatchNorm1d(6)
    result = check_workload(Workload(model.eval(), batch(8), training_step=step), 8)
    assert modes == {(True, False)}
    assert result.exact
    assert any("The model is in eval mode" in note for note in result.notes)


def test_check_of_a_workload_on_a_data_set() -> None:
    """No more rows are compared than the data has."""
    rows, targets = batch(6)
    workload = Workload(Net(), torch.utils.data.TensorDataset(rows, targets), loss_fn=nn.CrossEntropyLoss())
    assert sum(check_workload(workload, 50).micro_batch_sizes) == 6


@pytest.mark.parametrize("rows", [0, 1, -1, 2.5])
def test_too_few_rows_of_a_workload(rows: Any) -> None:
    """Less than two rows, or no whole number, is refused."""
    workload = Workload(Net(), batch(6), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(InvalidRequestError, match="rows"):
        check_workload(workload, rows)


def test_loss_that_nobody_gave_to_a_workload_is_refused() -> None:
    """The mean of the outputs, which may stand in for a loss in a probe, is nothing to call exact."""
    with pytest.raises(InvalidRequestError, match="no loss was given"):
        check_workload(Workload(Net(), torch.randn(6, 4)), 6)


def test_single_row_is_not_copied() -> None:
    """Copies of one row hide every difference: a sample of one row is refused."""
    with pytest.raises(InvalidRequestError, match="copies of it would hide every difference"):
        check_workload(Workload(Net(), (torch.randn(1, 4), torch.randn(1, 3)), loss_fn=functional.mse_loss), 16)


def test_rows_come_from_all_over_a_data_set() -> None:
    """A sorted data set is compared at rows of both of its classes, so that weights of classes show."""
    inputs, targets = torch.randn(50, 4), torch.tensor([0] * 40 + [1] * 10)
    weight = torch.tensor([0.1, 5.0, 1.0], dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, weight=weight)

    data = torch.utils.data.TensorDataset(inputs, targets)
    assert not check_workload(Workload(Net(), data, loss_fn=loss), 10).exact


def test_labels_that_are_all_the_same_are_noted() -> None:
    """A batch of one class cannot show that classes weigh differently, and the result says so."""
    result = check_workload(
        Workload(Net(), (torch.randn(6, 4), torch.ones(6, dtype=torch.long)), loss_fn=functional.cross_entropy), 6
    )
    assert result.exact
    assert any("all values of 1 are the same" in note for note in result.notes)
