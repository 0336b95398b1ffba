"""Computed again as if it had run once: gradients, statistics, generators, whatever a model does; and activations let go."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.devices import VirtualDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.levers import Subject, applied
from autoaccum.levers.checkpointing import Checkpointing
from autoaccum.preserve import preserved
from autoaccum.probing import run_trial
from autoaccum.records import Candidate, Fit, Levers
from autoaccum.targets.demos import gpt, resnet
from autoaccum.workload import Workload

from .models import (
    CASE_NAMED,
    HOST,
    Case,
    Mlp,
    Stack,
    Stateful,
    differing,
    full,
    generator_states,
    gradients,
    plan_of,
    seed,
    selective,
    trained,
)

both = pytest.mark.parametrize("level", [selective, full], ids=["selective", "full"])
EXACT = 1e-12


# Every model, every number of blocks: two windows of two micro-batches in float64, with a step between them.

AS_IT_IS: dict[str, Any] = {}


def as_it_is(case: Case) -> Any:
    """The model trained without any lever, once for all tests."""
    if case.name not in AS_IT_IS:
        AS_IT_IS[case.name] = trained(case)
    return AS_IT_IS[case.name]


def some_blocks() -> list[Any]:
    """One block and all of them for every model; the numbers in between are slow."""
    return [
        pytest.param(case, blocks, id=f"{case.name}-{blocks}", marks=() if blocks in (1, case.blocks) else pytest.mark.slow)
        for case in CASE_NAMED.values()
        for blocks in range(1, case.blocks + 1)
    ]


@both
@pytest.mark.parametrize(("model", "blocks"), some_blocks())
def test_training_is_as_without(model: Case, blocks: int, level: Callable[[int], Levers]) -> None:
    """Losses, gradients, weights, buffers, attributes and generators are those of training without the lever."""
    expected, found = as_it_is(model), trained(model, level(blocks))
    assert torch.equal(torch.stack(expected.losses), torch.stack(found.losses))
    assert differing(expected.gradients, found.gradients, rtol=EXACT) == []
    assert differing(expected.weights, found.weights, rtol=EXACT) == []
    assert differing(expected.buffers, found.buffers) == []
    assert differing(expected.attributes, found.attributes, rtol=EXACT) == []
    assert expected.requires_grad == found.requires_grad
    assert torch.equal(expected.generators[0], found.generators[0])
    assert expected.generators[1:] == found.generators[1:]


@pytest.mark.parametrize("levers", [Levers(offload="cpu"), full(1, offload="cpu"), selective(1, offload="cpu")], ids=str)
def test_training_is_as_without_where_offloaded(case: Case, levers: Levers) -> None:
    """With activations in host memory as well, gradients are the same bits and buffers the same values."""
    expected, found = as_it_is(case), trained(case, levers)
    assert differing(expected.gradients, found.gradients, rtol=EXACT if levers.checkpointed_blocks else None) == []
    assert differing(expected.buffers, found.buffers) == []


# Statistics (A12).


@both
def test_statistics_are_counted_once(level: Callable[[int], Levers]) -> None:
    """BatchNorm with momentum and without, and a plain count: each counts every forward pass once."""
    block = Stateful()
    model = Stack(block, Stateful())
    with applied(level(2), Subject(model, HOST)):
        for _ in range(3):
            model(torch.randn(6, 8)).sum().backward()
    assert [int(norm.num_batches_tracked) for norm in (block.exponential, block.cumulative)] == [3, 3]
    assert block.calls == 3


@both
def test_first_pass_in_eval_mode(level: Callable[[int], Levers]) -> None:
    """A block that was first run in eval mode, where it changed nothing, keeps its statistics right in train mode."""

    def tracked(levers: Levers) -> Tensor:
        seed()
        model = Stack(Stateful(), Stateful())
        with applied(levers, Subject(model, HOST)):
            for is_training in (False, True, True):
                model.train(is_training)(torch.randn(6, 8)).sum().backward()
        return torch.cat([buffer.flatten() for buffer in model.buffers()])

    assert torch.equal(tracked(level(2)), tracked(Levers()))


class Rarely(nn.Module):
    """Changes a buffer and a number in every third forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.zeros(8))
        self.calls = self.updates = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        if self.calls % 3 == 0:
            self.updates += 1
            self.shift += y.detach().mean(0)
        return torch.sin(y + self.shift) * (1 + self.updates)


class Keeping(nn.Module):
    """Keeps what it has seen in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.history: list[float] = []
        self.sums = {"calls": 0, "seen": torch.zeros(8)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.history.append(float(y.detach().sum()))
        self.sums["calls"] += 1
        self.sums["seen"] += y.detach().mean(0)
        return torch.sin(y + self.sums["seen"]) * self.sums["calls"] * len(self.history)


class OwnGenerators(nn.Module):
    """Draws from generators of its own: torch's, NumPy's and Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.torchs, self.numpys = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.pythons = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.linear(x)) * torch.rand(8, generator=self.torchs)
        y = torch.sin(y) * torch.from_numpy(self.numpys.random(8)).to(x.dtype)
        return torch.sin(y) * torch.tensor([self.pythons.random() for _ in range(8)])


class Noting(nn.Module):
    """Leaves an auxiliary loss in an attribute that is None, or not there, before the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.outlet = nn.Linear(8, 8), nn.Linear(8, 8)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.auxiliary, self.noted = y.pow(2).mean(), y.mean()
        return x + self.outlet(y).sin()


class Caching(nn.Module):
    """Makes a table when it first needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table: Tensor | None = None
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table, self.late = torch.rand(8), torch.rand(8)
        self.late = self.late * 0.5
        return torch.sin(self.linear(x) * self.table) + self.late


def plainly(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).sin() + 1).pow(2).mean()


def same_as_without(make: Callable[[], nn.Module], levers: Levers, loss: Callable[..., Tensor] = plainly) -> bool:
    """Whether seven passes give the gradients of seven passes without the lever, to the last bit but for rounding."""
    found = []
    for turned in (levers, Levers()):
        seed()
        model = make()
        found.append(gradients(model, [torch.randn(6, 8) for _ in range(7)], loss, turned))
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(*found, strict=True))


@both
@pytest.mark.parametrize("kind", [Rarely, Keeping, OwnGenerators, Noting, Caching])
def test_what_a_block_remembers(kind: type[nn.Module], level: Callable[[int], Levers]) -> None:
    """Whatever a block keeps from one pass to the next, and wherever, is in the second run what it was in the first."""
    assert same_as_without(lambda: Stack(kind(), kind()), level(2))


@both
def test_lists_are_appended_to_once(level: Callable[[int], Levers]) -> None:
    """A list that a block appends to, and a dictionary that it counts in, do not see the second run."""
    block = Keeping()
    history = block.history
    model = Stack(block, Keeping())
    with applied(level(2), Subject(model, HOST)):
        for _ in range(2):
            model(torch.randn(6, 8)).sum().backward()
    assert block.history is history
    assert (len(history), block.sums["calls"]) == (2, 2)


@both
def test_attribute_is_that_of_the_first_run(level: Callable[[int], Levers]) -> None:
    """What a forward pass leaves in an attribute is still the same object after the block was computed again."""
    model = Stack(Noting(), Noting())
    with applied(level(2), Subject(model, HOST)):
        loss = plainly(model, torch.randn(6, 8))
        noted = [(block.auxiliary, block.noted) for block in model.blocks]
        (loss + sum(block.auxiliary for block in model.blocks)).backward()
    assert all(block.auxiliary is one and block.noted is two for block, (one, two) in zip(model.blocks, noted, strict=True))


@both
def test_auxiliary_losses(level: Callable[[int], Levers]) -> None:
    """A loss that reads attributes which blocks have set has the gradients that it has without the lever."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return plainly(model, batch) + sum(block.auxiliary for block in model.blocks)

    assert same_as_without(lambda: Stack(Noting(), Noting()), level(2), loss)


@both
def test_sparse_buffer(level: Callable[[int], Levers]) -> None:
    """A block with a sparse matrix among its buffers, as graph networks have, is computed again."""

    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("adjacent", torch.eye(6).roll(1, 0).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.linear(torch.sparse.mm(self.adjacent, x)))

    assert same_as_without(lambda: Stack(Neighbours(), Neighbours()), level(2))


# In place.


class Masked(nn.Module):
    """Attention that adds its mask to the scores in place, as many implementations do."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inlet(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2)
        scores += torch.full((x.shape[1], x.shape[1]), -3.0, dtype=x.dtype).triu(1)
        return x + self.outlet((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Rectified(nn.Module):
    """A ReLU that writes into the result of a matrix product, which something after it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(torch.sin(self.relu(self.inlet(x)) + 1))


class Convolved(nn.Module):
    """Convolution and a ReLU in place, without a normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x.transpose(1, 2)).transpose(1, 2) + x)


class Added(nn.Module):
    """Adds the residual in place to the result of a matrix product, and goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inlet(x.sin())
        y += x
        y.mul_(1.5)
        return self.outlet(y.sin())


@both
@pytest.mark.parametrize("kind", [Masked, Rectified, Convolved, Added])
def test_block_that_writes_into_its_results(kind: type[nn.Module], level: Callable[[int], Levers]) -> None:
    """A block that changes in place what a matrix product or convolution gave has the gradients of the block as it is."""
    found = []
    for levers in (Levers(), level(2)):
        seed()
        model = Stack(kind(), kind()).double()
        found.append(gradients(model, [torch.randn(2, 5, 8, dtype=torch.float64)], plainly, levers))
    assert all(torch.allclose(one, other, rtol=EXACT) for one, other in zip(*found, strict=True))


@both
def test_result_that_the_model_writes_into(level: Callable[[int], Levers]) -> None:
    """A block's result may be a matrix product's, and the model may add to it in place."""

    class Residual(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                y = block(x)
                y += x
                x = y.sin()
            return x

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet, self.outlet = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.outlet(torch.tanh(self.inlet(x)))

    assert same_as_without(lambda: Residual(Product(), Product()), level(2))


# How blocks are called.


@both
@pytest.mark.parametrize("name", ["function", "self_", "args", "use_reentrant", "context_fn", "determinism_check", "debug"])
def test_keywords_may_have_any_name(name: str, level: Callable[[int], Levers]) -> None:
    """A block may take keywords that have names of checkpointing's own."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, **more: Tensor) -> Tensor:
            return torch.sin(self.linear(x) * more[name])

    class Calling(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, **{name: x.exp()})
            return x

    assert same_as_without(lambda: Calling(Named(), Named()), level(2))


@both
def test_everything_by_keyword(level: Callable[[int], Levers]) -> None:
    """A block whose tensors are all keywords, dropout in it, is the same in both runs."""

    class Calling(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x)
            return x

    assert same_as_without(lambda: Calling(Mlp(), Mlp()), level(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device in this process")
@both
def test_dropout_by_keyword_on_a_gpu(level: Callable[[int], Levers]) -> None:
    """On a GPU as well, where torch puts only those generators back on whose devices it sees tensors."""

    class Calling(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x)
            return x

    found = []
    for levers in (Levers(), level(2)):
        seed()
        model = Calling(Mlp(), Mlp()).cuda()
        found.append(gradients(model, [torch.randn(6, 8).cuda()], plainly, levers))
    assert all(torch.allclose(one, other) for one, other in zip(*found, strict=True))


def test_devices_of_keywords_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks at what it is passed by position for the devices whose generators it puts back: all tensors are there."""
    seen: list[Any] = []
    original = torch.utils.checkpoint._infer_device_type

    def spied(*args: Any) -> str:
        seen.extend(args)
        return original(*args)

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", spied)
    block = Mlp()
    model, x = nn.ModuleList([block, Mlp()]), torch.randn(2, 8)
    with applied(full(2), Subject(model, HOST)):
        block(x=x).sum().backward()
    assert any(part is x for part in seen)


def test_block_is_run_twice_where_asked_and_once_elsewhere() -> None:
    """Only the blocks that were asked for, the earliest ones, are computed again."""
    ran: list[int] = []

    class Counted(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(blocks.index(self))
            return super().forward(x)

    blocks = [Counted() for _ in range(4)]
    model = Stack(*blocks)
    with applied(full(2), Subject(model, HOST)):
        model(torch.randn(2, 8)).sum().backward()
    assert ran == [0, 1, 2, 3, 1, 0]


def test_selective_computes_no_matrix_product_again() -> None:
    """With "selective" the backward pass runs as many products of matrices as without; with "full" it runs more."""
    from torch.utils.flop_counter import FlopCounterMode

    counted = {}
    for levers in (Levers(), selective(3), full(3)):
        made = CASE_NAMED["gpt"].make()
        with FlopCounterMode(display=False) as counter, applied(levers, Subject(made.module, HOST)):
            made.loss(made.module, made.batches[0]).backward()
        counted[levers.checkpointing] = counter.get_total_flops()
    assert counted["selective"] == counted["off"] < counted["full"]


def test_hooks_of_a_block_run_once() -> None:
    """Forward, pre-forward and backward hooks of a block run once for each micro-batch."""
    made = CASE_NAMED["hooks"].make()
    with applied(full(3), Subject(made.module, HOST)):
        made.loss(made.module, made.batches[0]).backward()
    assert sorted(made.module.ran) == ["after"] * 3 + ["backward"] * 3 + ["before"] * 3  # type: ignore[arg-type]


@both
def test_same_dropout_mask(level: Callable[[int], Levers]) -> None:
    """The gradient of a dropout's input is zero just where its output was."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(400))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.scale, 0.5)

    model = nn.Sequential(Dropping(), nn.Identity(), Dropping())
    model = nn.Sequential(nn.Sequential(model[0]), nn.Sequential(model[2]))
    with applied(level(2), Subject(model, HOST)):
        x = torch.ones(400, requires_grad=True)
        out = model(x)
        out.sum().backward()
    assert torch.equal(out != 0, x.grad != 0)  # type: ignore[operator]


@both
def test_window_that_is_run_again(level: Callable[[int], Levers]) -> None:
    """Where memory runs out in a block and the window is run again, weights and statistics are those without the lever."""

    class Limited(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 3:
                raise torch.OutOfMemoryError("full")
            return super().forward(x)

    found = []
    for levers in (Levers(), level(2)):
        seed()
        model = Stack(Limited(), Limited())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, plan=plan_of(levers, 12, 6), training_step=plainly)
        seed()
        steps = [accumulator.step(torch.randn(12, 8)) for _ in range(2)]
        assert steps[0].replays > 0
        found.append((model.state_dict(), generator_states()[0]))
    assert differing(found[0][0], found[1][0], rtol=1e-5) == []
    assert torch.equal(found[0][1], found[1][1])


# LoRA, frozen and integer weights (A13).


@both
@pytest.mark.parametrize("blocks", [1, 3])
def test_adapters_on_integers(blocks: int, level: Callable[[int], Levers]) -> None:
    """Every adapter gets a gradient, nothing else does, flags stay, and integer weights are the same bytes."""
    made = CASE_NAMED["adapters on integers"].make()
    flags = {name: parameter.requires_grad for name, parameter in made.module.named_parameters()}
    bases = {name: parameter.clone() for name, parameter in made.module.named_parameters() if name.endswith("base")}
    with applied(level(blocks), Subject(made.module, HOST)):
        made.loss(made.module, made.batches[0]).backward()
    with_gradient = {name for name, parameter in made.module.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, required in flags.items() if required}
    assert {name: parameter.requires_grad for name, parameter in made.module.named_parameters()} == flags
    assert all(torch.equal(dict(made.module.named_parameters())[name], base) for name, base in bases.items())
    assert len(bases) == 3


@both
def test_block_of_frozen_weights_alone(level: Callable[[int], Levers]) -> None:
    """Blocks that train nothing, at the start and in the middle, let gradients through to those that train."""

    def make() -> nn.Module:
        model = Stack(Mlp(), Mlp(), Mlp())
        model.inlet.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        return model

    assert same_as_without(make, level(3))


# What can be done with the graph.


@both
def test_gradients_by_autograd_grad(level: Callable[[int], Levers]) -> None:
    """`torch.autograd.grad` works, also for inputs and for some parameters only."""
    found = []
    for levers in (Levers(), level(2)):
        seed()
        model, x = Stack(Mlp(), Mlp()), torch.randn(3, 8, requires_grad=True)
        with applied(levers, Subject(model, HOST)):
            found.append(torch.autograd.grad(plainly(model, x), [x, model.blocks[0].wide.weight]))
    assert all(map(torch.equal, *found))


@both
def test_two_backward_passes(level: Callable[[int], Levers]) -> None:
    """With `retain_graph` a second backward pass adds the same gradients again, and statistics are counted once."""
    model = Stack(Stateful(), Stateful())
    with applied(level(2), Subject(model, HOST)):
        loss = plainly(model, torch.randn(6, 8))
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        loss.backward()
    assert all(torch.allclose(p.grad, 2 * one) for p, one in zip(model.parameters(), once, strict=True))  # type: ignore[arg-type]
    assert model.blocks[0].calls == 1
    assert int(model.blocks[0].exponential.num_batches_tracked) == 1


@both
def test_two_losses_of_one_forward_pass(level: Callable[[int], Levers]) -> None:
    """Two losses of one forward pass, each with a backward pass of its own, have the gradients of their sum."""

    def two(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        out.sin().mean().backward(retain_graph=True)
        return out.cos().mean()

    assert same_as_without(lambda: Stack(Mlp(), Mlp()), level(2), two)


@both
def test_gradient_of_a_gradient(level: Callable[[int], Levers]) -> None:
    """A penalty on the gradient has the gradients that it has without the lever."""

    def penalty(model: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.requires_grad_()
        (slope,) = torch.autograd.grad(plainly(model, batch), batch, create_graph=True)
        return slope.pow(2).sum()

    assert same_as_without(lambda: Stack(Mlp(), Mlp()), level(2), penalty)


@both
def test_nothing_is_kept_without_gradients(level: Callable[[int], Levers]) -> None:
    """Under `no_grad` and in inference mode a block runs once, as it is."""
    model, x = Stack(Stateful(), Stateful()), torch.randn(6, 8)
    with applied(level(2), Subject(model, HOST)):
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert not model(x).requires_grad
    assert model.blocks[0].calls == 2


@both
def test_block_under_no_grad_inside_the_model(level: Callable[[int], Levers]) -> None:
    """A model that runs its first block without gradients has the gradients that it has without the lever."""

    class Frozen(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[0](x)
            return self.outlet(self.blocks[1](self.inlet(x)))

    assert same_as_without(lambda: Frozen(Mlp(), Mlp()), level(2))


@both
def test_eval_mode(case: Case, level: Callable[[int], Levers]) -> None:
    """In eval mode, with gradients, everything is as without the lever."""

    def found(levers: Levers) -> list[Tensor]:
        made = case.make()
        return gradients(made.module.eval(), made.batches, made.loss, levers)

    assert all(torch.equal(one, other) for one, other in zip(found(Levers()), found(level(case.blocks)), strict=True))


@both
def test_error_in_a_block_comes_out(level: Callable[[int], Levers]) -> None:
    """An error of the user's in a block's forward pass is the same object outside."""
    error = KeyError("lables")

    class Failing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model = Stack(Failing(), Failing())
    with pytest.raises(KeyError) as caught, applied(level(2), Subject(model, HOST)):
        model(torch.randn(2, 8))
    assert caught.value is error


@both
def test_error_in_a_block_leaves_torch_alone(level: Callable[[int], Levers]) -> None:
    """After an error in a block, which somebody still holds, other models are trained as ever."""

    class Failing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(str(self.wide(x).exp().shape))

    model, held = Stack(Failing(), Failing()), []
    try:
        with applied(level(2), Subject(model, HOST)):
            model(torch.randn(2, 8))
    except KeyError as error:
        held.append(error)
    x = torch.ones(3, requires_grad=True)
    x.exp().sum().backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]
    assert held


@both
def test_error_in_the_second_run_leaves_statistics(level: Callable[[int], Levers]) -> None:
    """An error while a block is computed again, such as running out of memory, leaves what it holds as the first run did."""

    class Failing(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if len(ran) >= 2:
                raise torch.OutOfMemoryError("full")
            ran.append(1)
            return out.sin()

    ran: list[int] = []
    model = Stack(Failing(), Failing())
    with applied(level(2), Subject(model, HOST)):
        loss = plainly(model, torch.randn(6, 8))
        before = copy.deepcopy(dict(model.named_buffers()))
        state = torch.get_rng_state()
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    assert differing(before, dict(model.named_buffers())) == []
    assert [block.calls for block in model.blocks] == [1, 1]
    assert torch.equal(state, torch.get_rng_state())


# Memory.


def peak_bytes(workload: Workload, rows: int, levers: Levers) -> int:
    """The measured peak of a probe on a virtual device."""
    device = VirtualDevice("8GiB")
    with preserved(workload.module, workload.own_optimizer, device=workload.device) as snapshot:
        trial = run_trial(
            workload,
            device,
            Candidate(micro_batch=rows, levers=levers),
            budget_bytes=2**33,
            snapshot=snapshot,
            windows=[[rows, rows]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        ).trial
    assert isinstance(trial.outcome, Fit)
    return trial.outcome.peak_bytes


def small_gpt() -> Workload:
    return gpt(vocabulary=128, seq_len=32, layers=5, width=64, heads=2)


def small_resnet() -> Workload:
    return resnet(image=32, width=8, blocks=2)


def small_llama() -> Workload:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, intermediate_size=128, num_hidden_layers=4, vocab_size=64
    )
    ids = torch.randint(64, (4, 32))
    return Workload(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(("make", "blocks"), [(small_gpt, 5), (small_llama, 4)])
def test_activations_are_let_go(make: Callable[[], Workload], blocks: int) -> None:
    """The peak is lowest where all blocks are computed again, and lower than without where it is done selectively."""
    workload = make()
    peaks = [peak_bytes(workload, 8, levers) for levers in (full(blocks), selective(blocks), Levers())]
    assert peaks[0] < peaks[1] < peaks[2]


def test_activations_of_convolutions_are_let_go() -> None:
    """The peak of a ResNet is lowest where all blocks are computed again; selectively, it keeps nearly all there is."""
    workload = small_resnet()
    peaks = [peak_bytes(workload, 8, levers) for levers in (full(6), selective(6), Levers())]
    assert peaks[0] < 0.9 * peaks[2]
    assert peaks[0] < peaks[1] < 1.05 * peaks[2]


@pytest.mark.parametrize("level", [full, selective], ids=["full", "selective"])
def test_each_block_saves_as_much(level: Callable[[int], Levers]) -> None:
    """With k blocks of a GPT computed again the peak is lower by k times the same number of bytes."""
    workload = small_gpt()
    peaks = [peak_bytes(workload, 8, level(blocks)) for blocks in range(1, 5)]
    saved = np.diff(peaks)
    assert (saved < 0).all()
    assert np.ptp(saved) <= 0.02 * abs(saved).max()


def test_nothing_of_the_second_run_is_kept() -> None:
    """A block that leaves its auxiliary loss in an attribute does not hold the activations of its second run there."""

    class Leaving(nn.Module):
        def __init__(self, leaves: bool) -> None:
            super().__init__()
            self.inlet, self.outlet = nn.Linear(64, 256), nn.Linear(256, 64)
            self.leaves, self.auxiliary = leaves, None

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.inlet(x))
            if self.leaves:
                self.auxiliary = y.mean().square()
            return x + torch.tanh(self.outlet(y.sin()))

    def peak(leaves: bool, levers: Levers) -> int:
        def step(model: nn.Module, batch: Tensor) -> Tensor:
            loss = nn.Sequential(*model)(batch).pow(2).mean()  # type: ignore[arg-type]
            return loss + sum(block.auxiliary for block in model) if leaves else loss  # type: ignore[misc, return-value]

        model = nn.ModuleList(Leaving(leaves) for _ in range(8))
        return peak_bytes(Workload(model, torch.randn(64, 64), training_step=step), 64, levers)

    activation_bytes = 64 * 256 * 4
    assert peak(True, full(8)) - peak(False, full(8)) < 2 * activation_bytes


# What is said against it, and what is asked for in vain.


def test_reason_without_blocks() -> None:
    """A model in which nothing is repeated is told so."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert Checkpointing().reason_against("full", Subject(model, HOST)) == "no repeated blocks were found in the model"


def test_reason_where_the_model_is_compiled() -> None:
    """A compiled model is left alone, whether the whole of it or a part is compiled."""
    model = Stack(Mlp(), Mlp())
    assert Checkpointing().reason_against("full", Subject(model, HOST)) is None
    model.blocks[0].compile()
    assert "compiled" in (Checkpointing().reason_against("full", Subject(model, HOST)) or "")


def test_reason_where_the_caller_checkpoints() -> None:
    """A model of transformers whose own checkpointing is on is left alone."""
    made = CASE_NAMED["llama"].make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the method has got another name
        made.module.gradient_checkpointing_enable()  # type: ignore[operator]
    assert "already" in (Checkpointing().reason_against("full", Subject(made.module, HOST)) or "")


def test_reason_for_a_scripted_model() -> None:
    """A scripted model can be asked about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call it deprecated
        model = torch.jit.script(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))))
    assert Checkpointing().reason_against("full", Subject(model, HOST)) == "no repeated blocks were found in the model"


def test_more_blocks_than_there_are() -> None:
    """A plan for more blocks than the model has is refused in words, and nothing is changed."""
    model = Stack(Mlp(), Mlp())
    with pytest.raises(InvalidRequestError, match="the model has 2 repeated blocks"), applied(full(3), Subject(model, HOST)):
        pass
    assert all("forward" not in vars(block) for block in model.blocks)


def test_blocks_by_name() -> None:
    """The caller's own list of blocks is what is computed again, the first ones of it."""
    model = Stack(Mlp(), Mlp(), Mlp())
    levers = full(2, block_names=("blocks.2", "outlet", "blocks.0"))
    with applied(levers, Subject(model, HOST)):
        changed = {name for name, part in model.named_modules() if "forward" in vars(part)}
    assert changed == {"blocks.2", "outlet"}


def test_cache_is_off_only_while_inside() -> None:
    """A model of transformers keeps no keys and values while inside, and does so again afterwards."""
    made = CASE_NAMED["llama"].make()
    config = made.module.config
    with applied(full(1), Subject(made.module, HOST)):
        assert config.use_cache is False
        assert made.module(**made.batches[0]).past_key_values is None
    assert config.use_cache is True
    assert made.module(**made.batches[0]).past_key_values is not None


@both
def test_t5(level: Callable[[int], Levers]) -> None:
    """An encoder and decoder of transformers, which adds its biases in place, has the gradients that it has without."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 64}
    found = []
    for levers in (Levers(), level(5)):
        seed()
        config = transformers.T5Config(**sizes, num_layers=2, num_decoder_layers=3, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config).double().train()
        ids = torch.randint(3, 64, (3, 8))
        found.append(gradients(model, [{"input_ids": ids, "labels": ids}], lambda model, batch: model(**batch).loss, levers))
    assert all(torch.allclose(one, other, rtol=EXACT, atol=1e-15) for one, other in zip(*found, strict=True))
