"""Until the optimizer steps a window is a transaction: replayed after running out of memory, undone after anything else."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from autoaccum import Accumulator, Window
from autoaccum.errors import InvalidRequestError

EXACT = 1e-12


def full() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def unclear() -> Exception:
    return RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")


class RaisesInBackward(torch.autograd.Function):
    """Passes values on, and raises when the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


class Net(nn.Module):
    """Two layers with noise of all three generators between them, and a failure where a test wants one.

    Args:
        fails: `fails(number of the call, rows) -> exception or None`.
        phase: Where it is raised.
    """

    def __init__(
        self,
        fails: Callable[[int, int], BaseException | None] = lambda call, rows: None,
        *,
        phase: str = "forward",
        noisy: bool = False,
        normed: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6) if normed else nn.Identity()
        self.fails, self.phase, self.noisy, self.rows_seen = fails, phase, noisy, list[int]()

    def forward(self, batch: Tensor) -> Tensor:
        self.rows_seen.append(len(batch))
        error = self.fails(len(self.rows_seen) - 1, len(batch))
        hidden = self.norm(self.first(batch))
        if self.noisy:
            hidden = functional.dropout(hidden, 0.5) * (1 + random.random()) + float(np.random.rand())
        if error is not None and self.phase == "forward":
            raise error
        output = self.second(functional.dropout(hidden, 0.3) if self.noisy else hidden)
        return RaisesInBackward.apply(output, error) if error is not None else output  # type: ignore[no-any-return, no-untyped-call]


def above(limit: int) -> Callable[[int, int], BaseException | None]:
    """Out of memory with more rows than this."""
    return lambda call, rows: full() if rows > limit else None


def at_call(number: int, make: Callable[[], BaseException] = full) -> Callable[[int, int], BaseException | None]:
    """One failure, at this forward pass, counted from 0."""
    return lambda call, rows: make() if call == number else None


def always(error: BaseException) -> Callable[[int, int], BaseException | None]:
    return lambda call, rows: error


def accumulator(model: nn.Module, micro_batch: int = 2, lr: float = 0.5, **options: Any) -> Accumulator:
    return Accumulator(
        model,
        SGD(model.parameters(), lr=lr),
        micro_batch=micro_batch,
        training_step=lambda model, batch: model(batch).pow(2).mean(),
        **options,
    )


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def states() -> list[Any]:
    """Where the generators of python, numpy and torch are, in a form that can be compared."""
    numpy_state = np.random.get_state()
    return [random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()]  # type: ignore[index, union-attr]


def seed_all() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def after_plain_step(batch: Tensor) -> Tensor:
    """The parameters after one step on the whole batch, in float64."""
    model = Net().double()
    accumulator(model, micro_batch=len(batch)).step(batch)
    return values_of(model)


# -- the replay is exact


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("index", range(4))
def test_step_after_running_out_of_memory(phase: str, index: int) -> None:
    """Whichever micro-batch runs out of memory, and in which pass, the step is the whole batch's and one replay is told.

    To catch, cut and go on from there counts what the failed backward pass has left behind twice, or leaves it out.
    """
    batch = rows().double()
    model = Net(at_call(index), phase=phase).double()
    acc = accumulator(model)
    step = acc.step(batch)
    expected = after_plain_step(batch)
    assert (values_of(model) - expected).norm() <= EXACT * expected.norm()
    assert (step.replays, step.micro_batch_sizes, step.weight) == (1, (1,) * 8, 8.0)
    assert model.rows_seen == [2] * (index + 1) + [1] * 8
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_replays_until_it_fits() -> None:
    """From 16 rows to 2 it takes three replays, and the loss is the whole batch's."""
    batch = rows(16).double()
    model = Net(above(2)).double()
    step = accumulator(model, micro_batch=16).step(batch)
    expected = after_plain_step(batch)
    assert (step.replays, step.micro_batch_sizes) == (3, (2,) * 8)
    assert model.rows_seen == [16, 8, 4, *(2,) * 8]
    assert (values_of(model) - expected).norm() <= EXACT * expected.norm()
    assert step.loss == pytest.approx(Net().double()(batch).pow(2).mean().item(), rel=1e-12)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("index", range(3))
def test_replay_draws_the_same_numbers(phase: str, index: int) -> None:
    """With noise of all generators a replay is bit for bit the run that used the smaller size at once.

    Without putting the generators back the masks are others: half of the gradient's norm.
    """
    replayed, at_once = Net(at_call(index), phase=phase, noisy=True), Net(noisy=True)
    seed_all()
    first = accumulator(replayed, micro_batch=4).step(rows(12))
    after_replay = states()
    seed_all()
    second = accumulator(at_once, micro_batch=2).step(rows(12))
    assert first.replays == 1
    assert first.micro_batch_sizes == second.micro_batch_sizes == (2,) * 6
    assert torch.equal(values_of(replayed), values_of(at_once))
    assert states() == after_replay
    assert first.loss == second.loss


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_replay_moves_buffers_once(phase: str) -> None:
    """BatchNorm's averages after a replay are bit for bit those of the smaller size, with its number of batches."""
    replayed, at_once = Net(at_call(1), phase=phase, normed=True), Net(normed=True)
    for _ in range(2):
        accumulator(replayed, micro_batch=4).step(rows())
        accumulator(at_once, micro_batch=2 if not at_once.rows_seen else 4).step(rows())
    assert replayed.rows_seen == [4, 4, 2, 2, 2, 2, 4, 4]
    assert torch.equal(values_of(replayed), values_of(at_once))
    for (name, buffer), other in zip(replayed.named_buffers(), at_once.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert int(replayed.norm.num_batches_tracked) == 6


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_failed_attempt_lets_go_of_its_memory(in_a_cycle: bool) -> None:
    """When the replay begins nothing that the failed attempt made is alive any more, not even what refers to itself."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        alive.append(any(reference() is not None for reference in made))
        hidden = model(batch)
        made.append(weakref.ref(hidden))
        if in_a_cycle:
            cycle: list[Any] = [hidden]
            cycle.append(cycle)
        if len(batch) > 2:
            raise full()
        return hidden.pow(2).mean()

    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=4, training_step=step)
    assert acc.step(rows(4)).replays == 1
    assert alive[1] is False


def test_what_a_step_puts_into_its_micro_batch_does_not_stay() -> None:
    """A step that writes its activations into its micro-batch does not keep those of the whole window alive."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        alive.append(sum(reference() is not None for reference in made))
        batch["hidden"] = model(batch["inputs"])
        made.append(weakref.ref(batch["hidden"]))
        return batch["hidden"].pow(2).mean()

    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2, training_step=step)
    acc.step({"inputs": rows()})
    assert max(alive) <= 1


@pytest.mark.parametrize(
    ("count", "micro_batch", "sizes"), [(5, 2, (3, 2)), (9, 4, (3, 3, 3)), (3, 1, (3,)), (7, 1, (3, 2, 2))]
)
def test_layer_that_refuses_a_single_row(count: int, micro_batch: int, sizes: tuple[int, ...]) -> None:
    """BatchNorm refuses one row: the window is cut so that none is alone, a row above what was asked for if need be."""
    model = Net(normed=True)
    acc = accumulator(model, micro_batch=micro_batch)
    first, second = acc.step(rows(count)), acc.step(rows(count))
    assert first.micro_batch_sizes == second.micro_batch_sizes == sizes
    assert second.replays == 0


def test_single_row_that_is_refused() -> None:
    """A batch of one row cannot be cut otherwise, and BatchNorm's own error comes out."""
    model = Net(normed=True)
    acc = accumulator(model)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as raised:
        acc.step(rows(1))
    assert "did not replay the window" in raised.value.__notes__[0]
    assert acc.step(rows(4)).micro_batch_sizes == (2, 2)


def test_replay_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One warning says which size failed in which pass with which words, and what is tried now."""
    with caplog.at_level(logging.WARNING, logger="autoaccum"):
        accumulator(Net(above(4), phase="backward"), micro_batch=8).step(rows())
    (message,) = caplog.messages
    assert "the window is run again, in micro-batches of at most 4: OutOfMemoryError: CUDA out of memory" in message
    assert "(8 rows, backward pass)" in message
    assert {record.name for record in caplog.records} == {"autoaccum"}


def test_window_that_fits_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing happens nothing is logged."""
    with caplog.at_level(logging.DEBUG, logger="autoaccum"):
        accumulator(Net()).step(rows())
    assert caplog.messages == []


def test_other_words_for_running_out_of_memory() -> None:
    """The host's allocator, Python's own error, and an error of the user's raised from one are replayed as well."""

    def wrapped() -> Exception:
        error = ValueError("in my layer")
        error.__cause__ = full()
        return error

    makers = (MemoryError, lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), wrapped, unclear)
    for make in makers:
        assert accumulator(Net(at_call(1, make))).step(rows()).replays == 1


def test_ready_micro_batches_are_cut_in_a_replay() -> None:
    """Ready micro-batches that run out of memory are cut, each by itself, and the step stays the whole window's."""
    batch = rows(10).double()
    model = Net(above(2)).double()
    step = accumulator(model, micro_batch=4).step(Window(list(batch.split([5, 2, 3]))))
    expected = after_plain_step(batch)
    assert step.micro_batch_sizes == (2, 2, 1, 2, 2, 1)
    assert (values_of(model) - expected).norm() <= EXACT * expected.norm()


# -- when it is not replayed


def undone(acc: Accumulator, model: Net, batch: Any, kind: type[BaseException]) -> BaseException:
    """Let a window fail, and see that gradients, generators, buffers and parameters are as before."""
    seed_all()
    before, buffers, values = states(), [buffer.clone() for buffer in model.buffers()], values_of(model)
    with pytest.raises(kind) as raised:
        acc.step(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert states() == before
    assert all(torch.equal(buffer, kept) for buffer, kept in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(values_of(model), values)
    return raised.value


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit, InvalidRequestError])
def test_users_own_error_undoes_the_window(phase: str, kind: type[BaseException]) -> None:
    """Whatever else is raised comes out as the same object without a note, Ctrl-C as well, and the window never was."""
    error = kind("mine")
    model = Net(lambda call, rows: error if call == 2 else None, phase=phase, noisy=True, normed=True)
    raised = undone(accumulator(model), model, rows(), kind)
    assert raised is error
    assert not hasattr(raised, "__notes__")
    assert model.rows_seen == [2, 2, 2]


def test_window_after_an_error_is_the_same() -> None:
    """After an error of the user's the same batch can be stepped with, bit for bit as if it had gone through at once."""
    failing, smooth = Net(at_call(2, ZeroDivisionError), noisy=True), Net(noisy=True)
    acc = accumulator(failing)
    undone(acc, failing, rows(), ZeroDivisionError)
    acc.step(rows())
    seed_all()
    accumulator(smooth).step(rows())
    assert torch.equal(values_of(failing), values_of(smooth))


def test_replay_can_be_switched_off() -> None:
    """With on_oom="raise" the error comes out as it is, with a note, and the window is undone."""
    error = full()
    model = Net(always(error), noisy=True)
    raised = undone(accumulator(model, on_oom="raise"), model, rows(), torch.OutOfMemoryError)
    assert raised is error
    assert raised.__notes__ == ["autoaccum did not replay the window: on_oom='raise'."]
    assert model.rows_seen == [2]


def test_single_row_that_does_not_fit() -> None:
    """Out of memory with one row comes out as it is, after all larger sizes, with a note that says so."""
    error = full()
    model = Net(always(error), noisy=True)
    raised = undone(accumulator(model, micro_batch=4), model, rows(), torch.OutOfMemoryError)
    assert raised is error
    (note,) = raised.__notes__
    assert note.startswith("autoaccum did not replay the window: ")
    assert "with a single row" in note
    assert model.rows_seen == [4, 2, 1]


def test_unclear_error_that_stays_comes_out_unchanged() -> None:
    """An error that is only often one of memory, and stays with a single row, is the user's to read."""
    error = unclear()
    model = Net(always(error))
    raised = undone(accumulator(model, micro_batch=8), model, rows(), RuntimeError)
    assert raised is error
    assert model.rows_seen == [8, 4, 2, 1]


def test_training_step_that_writes_into_the_batch() -> None:
    """A step that has changed the batch cannot be run again, and the note says why."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        batch.mul_(0.5)
        if len(batch) > 2:
            raise full()
        return model(batch).pow(2).mean()

    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=4, training_step=step)
    raised = undone(acc, model, rows(), torch.OutOfMemoryError)
    assert "the training step has written into the batch; let it work on a copy" in raised.__notes__[0]


def test_training_step_that_writes_into_a_copy() -> None:
    """A step that changes a copy of its own is replayed."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        own = batch.clone().mul_(0.5)
        if len(batch) > 2:
            raise full()
        return model(own).pow(2).mean()

    model = Net()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=4, training_step=step)
    assert acc.step(rows()).replays == 1


def test_training_step_that_takes_from_a_dict() -> None:
    """A step that pops the labels out of its micro-batch finds them again in a replay, and the batch keeps them."""
    model = Net().double()

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        if len(labels) > 2:
            raise full()
        return functional.cross_entropy(model(batch["inputs"]), labels)

    batch = {"inputs": rows().double(), "labels": torch.arange(8) % 2}
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=4, training_step=step)
    assert acc.step(batch).replays == 1
    assert list(batch) == ["inputs", "labels"]


def test_training_step_that_takes_from_the_items_of_a_list() -> None:
    """A step that pops the boxes out of its images' targets finds them again in a replay, and the batch keeps them."""
    model = Net()

    def step(model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> Tensor:
        boxes = torch.stack([target.pop("boxes") for target in batch[1]])
        if len(boxes) > 2:
            raise full()
        return functional.mse_loss(model(torch.stack([image.mean((1, 2)) for image in batch[0]])), boxes)

    batch = ([torch.rand(4, 3 + index, 5) for index in range(6)], [{"boxes": torch.rand(2)} for _ in range(6)])
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=3, training_step=step)
    assert acc.step(batch).replays == 1
    assert all(list(target) == ["boxes"] for target in batch[1])


# -- the optimizer's step is never replayed


class FailingStep(SGD):
    """Moves its first parameter and then raises."""

    def __init__(self, parameters: Any, error: BaseException) -> None:
        super().__init__(parameters, lr=0.1)
        self.error, self.calls = error, 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls == 1:
            raise self.error
        super().step(closure)


def test_running_out_of_memory_in_the_optimizer() -> None:
    """An optimizer that runs out of memory is not run again: the error comes out with advice, and gradients are None."""
    error = full()
    model = Net()
    optimizer = FailingStep(model.parameters(), error)
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=lambda model, batch: model(batch).mean())
    with pytest.raises(torch.OutOfMemoryError) as raised:
        acc.step(rows())
    assert raised.value is error
    assert "autoaccum does not replay an optimizer step" in raised.value.__notes__[0]
    assert "Go back to a checkpoint" in raised.value.__notes__[0]
    assert (optimizer.calls, model.rows_seen) == (1, [2, 2, 2, 2])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("scaled", [False, True])
def test_error_of_the_optimizers_own(scaled: bool) -> None:
    """Another error in the optimizer's step comes out without a note, and the next window runs, with a scaler too."""
    error = ZeroDivisionError("mine")
    model = Net()
    optimizer = FailingStep(model.parameters(), error)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=lambda model, batch: model(batch).mean(), scaler=scaler)
    with pytest.raises(ZeroDivisionError) as raised:
        acc.step(rows())
    assert raised.value is error
    assert not hasattr(raised.value, "__notes__")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not acc.step(rows()).skipped


@pytest.mark.parametrize("scaled", [False, True])
def test_interrupt_in_the_optimizer(scaled: bool) -> None:
    """After Ctrl-C in the optimizer's step gradients are None, and the next window runs."""
    model = Net()
    optimizer = FailingStep(model.parameters(), KeyboardInterrupt())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=lambda model, batch: model(batch).mean(), scaler=scaler)
    with pytest.raises(KeyboardInterrupt):
        acc.step(rows())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not acc.step(rows()).skipped


def test_nothing_leads_to_the_parameters() -> None:
    """A loss that leads to none of the optimizer's parameters is refused before the step."""
    model = Net()
    acc = Accumulator(
        model,
        SGD(model.second.parameters(), lr=0.1),
        micro_batch=2,
        training_step=lambda model, batch: model.first(batch).mean(),  # type: ignore[operator, union-attr]
    )
    with pytest.raises(InvalidRequestError, match="no parameter of the optimizer received a gradient"):
        acc.step(rows())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_refusal_before_the_step_undoes_the_window() -> None:
    """Where no parameter received a gradient the optimizer has not stepped, so buffers and generators are as before."""
    model = Net(noisy=True, normed=True)
    acc = Accumulator(
        model,
        SGD([model.second.weight], lr=0.1),
        micro_batch=2,
        training_step=lambda model, batch: functional.dropout(model.norm(model.first(batch))).mean(),  # type: ignore[operator, union-attr]
    )
    undone(acc, model, rows(), InvalidRequestError)


@pytest.mark.parametrize("place", ["window.total_norm", "accumulate.finishing.refuse_none", "accumulate.run.Run.agree"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_failure_between_the_last_backward_and_the_step(
    kind: type[BaseException], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping runs out of memory, or Ctrl-C comes in between: the window is undone, since nothing has stepped yet."""
    model = Net(noisy=True, normed=True)
    acc = accumulator(model, max_grad_norm=1.0)

    def fails(*_: Any, **__: Any) -> None:
        raise kind("between")

    monkeypatch.setattr(f"autoaccum.{place}", fails)
    assert not hasattr(undone(acc, model, rows(), kind), "__notes__")


def test_window_that_ends_before_its_mark_goes_back_to_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the start of a window is marked leaves buffers and generators alone: the mark is of an earlier window."""
    model = Net(noisy=True, normed=True)
    acc = accumulator(model)
    acc.step(rows())

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoaccum.rewind.Rewinder.mark", interrupted)
    undone(acc, model, rows(), KeyboardInterrupt)


# -- what was learned


def test_limit_is_remembered() -> None:
    """The window after a replay runs at the size that fitted, at once."""
    model = Net(above(3))
    acc = accumulator(model, micro_batch=8)
    first = acc.step(rows(12))
    second = acc.step(rows(12))
    assert (first.replays, second.replays) == (1, 0)
    assert first.micro_batch_sizes == second.micro_batch_sizes == (3,) * 4


def test_limit_grows_back() -> None:
    """When memory is there again the size grows in steps, after windows without trouble, to what was asked for."""
    room = {"rows": 2}
    model = Net(lambda call, rows: full() if rows > room["rows"] else None)
    acc = accumulator(model, micro_batch=8)
    acc.step(rows())
    room["rows"] = 8
    largest = [max(acc.step(rows()).micro_batch_sizes) for _ in range(80)]
    assert largest[0] == 2
    assert largest[-1] == 8
    assert largest == sorted(largest)
    assert largest.index(8) > 15  # not in a hurry


def test_growing_too_early_costs_one_replay() -> None:
    """A limit that grew too early falls back to what ran, at once, and is then left alone for twice as long."""
    acc = accumulator(Net(above(4)), micro_batch=8, lr=0.0)
    steps = [acc.step(rows(24)) for _ in range(120)]
    replayed = [number for number, step in enumerate(steps) if step.replays]
    gaps = [later - earlier for earlier, later in pairwise(replayed)]
    assert gaps == [16, 32, 64]
    assert {step.replays for step in steps} == {0, 1}
    assert {step.micro_batch_sizes for step in steps} == {(4,) * 6}


# -- shapes


class Padded(nn.Module):
    """Takes rows padded with zeros; rows times the longest of them must fit."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 4, padding_idx=0), nn.Linear(4, 1)
        self.limit = limit

    def forward(self, ids: Tensor) -> Tensor:
        if ids.numel() > self.limit:
            raise full()
        counts = (ids != 0).sum(1, keepdim=True)
        return self.head(self.embedding(ids).sum(1) / counts)  # type: ignore[no-any-return]


def epoch(window: int = 32) -> list[Tensor]:
    """200 rows of 8 to 32 numbers and one of 512 at the end, padded window by window."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 50, (length,), generator=generator) for length in (*(8 + i % 25 for i in range(200)), 512)]
    return [nn.utils.rnn.pad_sequence(rows[at : at + window], batch_first=True) for at in range(0, len(rows), window)]


def test_longest_row_comes_last() -> None:
    """Over an epoch whose dearest batch comes last nothing is raised, and every step is the whole batch's."""
    limited, free = Padded(limit=1100).double(), Padded().double()
    acc, reference = (accumulator(model, micro_batch=64) for model in (limited, free))
    steps = []
    for batch in epoch():
        steps.append(acc.step(batch))
        reference.step(batch)
        expected = values_of(free)
        assert (values_of(limited) - expected).norm() <= EXACT * expected.norm()
    assert [step.replays > 0 for step in steps] == [False] * 6 + [True]
    assert max(steps[-1].micro_batch_sizes) == 2


def test_limit_of_a_long_shape_does_not_hold_for_short_ones() -> None:
    """After the long batch has been cut to pairs, short ones still run whole, and the long one needs no second replay."""
    acc = accumulator(Padded(limit=1100), micro_batch=64)
    batches = epoch()
    for batch in batches:
        acc.step(batch)
    again = [acc.step(batch) for batch in batches]
    assert [step.replays for step in again] == [0] * 7
    assert [len(step.micro_batch_sizes) for step in again] == [1] * 6 + [5]


def test_limit_of_a_short_shape_holds_for_longer_ones() -> None:
    """What ran out of memory at one length is not tried at a greater one."""
    acc = accumulator(Padded(limit=80), micro_batch=8)
    first = acc.step(torch.ones(8, 20, dtype=torch.long))
    second = acc.step(torch.ones(8, 21, dtype=torch.long))
    assert (first.replays, first.micro_batch_sizes) == (1, (4, 4))
    assert second.micro_batch_sizes[0] <= 4
    assert second.replays == 1  # from 4 x 21 on, not from 8 x 21


def test_limit_of_one_shape_is_not_that_of_a_smaller_one() -> None:
    """In a window of ready micro-batches, running out of memory with the long ones leaves the short ones as they are."""
    model = nn.Linear(1, 1)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if batch.numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(batch.sum(1, keepdim=True)).mean()

    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=8, training_step=step)
    result = acc.step(Window([torch.randn(8, 3), torch.randn(8, 10), torch.randn(8, 3)]))
    assert result.micro_batch_sizes == (8, 4, 4, 8)
    assert acc.step(Window([torch.randn(8, 3)] * 2)).micro_batch_sizes == (8, 8)
