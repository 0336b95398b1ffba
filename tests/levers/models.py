"""The models that every lever is turned on, and how they are trained.

Each is a way of writing models that levers have to leave alone: buffers that a forward pass updates, blocks that are called
with keywords or several times, weights that are no floating-point numbers, hooks, generators other than torch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoaccum import Plan
from autoaccum.levers import Subject, applied
from autoaccum.records import Levers
from autoaccum.targets.demos import Gpt, resnet

HOST = torch.device("cpu")


class Made(NamedTuple):
    """A model in training mode, two micro-batches, and the loss of one of them."""

    module: nn.Module
    batches: tuple[Any, Any]
    loss: Callable[[nn.Module, Any], Tensor]


class Case(NamedTuple):
    """A model by name. `blocks`: how many of its parts are repeated."""

    name: str
    build: Callable[[], Made]
    blocks: int = 3

    def make(self, dtype: torch.dtype = torch.float64) -> Made:
        """The same one every time, in this precision."""
        seed()
        with defaulting_to(dtype):
            made = self.build()
        made.module.train()
        return made


@contextmanager
def defaulting_to(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this dtype while inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def seed(value: int = 7) -> None:
    """Start all generators from here."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


class Stack(nn.Module):
    """Blocks one after the other, between two layers."""

    def __init__(self, *blocks: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.outlet(x)
        return out


class Mlp(nn.Module):
    """The plainest block with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.narrow(torch.tanh(self.wide(x))))


class Adapted(nn.Module):
    """A frozen base of integers and two trained adapters of rank 2."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        base = torch.randint(0, 255, (width, width), dtype=torch.uint8)
        self.base = nn.Parameter(base, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(width, 2) * 0.1), nn.Parameter(torch.randn(2, width) * 0.1)
        self.norm = nn.LayerNorm(width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        base = (self.base.to(x.dtype) - 128) * self.scale / 128
        return torch.tanh(self.norm(x) @ base + x @ self.down @ self.up)


class Noisy(nn.Module):
    """Spectral norms of both kinds, and numbers of Python's and NumPy's generators."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.old = nn.utils.spectral_norm(nn.Linear(width, width))
        self.new = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.tensor(np.random.rand(*x.shape), dtype=x.dtype)
        gate = torch.tensor([random.random() for _ in range(x.shape[-1])], dtype=x.dtype)
        return torch.sin(self.new(torch.tanh(self.old(x)) * noise)) * gate


class Stateful(nn.Module):
    """Statistics of every kind that a forward pass updates, and a count that is a plain number."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.2)
        self.exponential, self.cumulative = nn.BatchNorm1d(width), nn.BatchNorm1d(width, momentum=None)
        self.instance = nn.InstanceNorm1d(width, track_running_stats=True)
        self.register_buffer("average", torch.zeros(width))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.cumulative(self.exponential(self.linear(x)))
        y = self.instance(y.t()[None])[0].t()
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return torch.sin(self.drop(y) + self.average * self.calls)


class Structured(nn.Module):
    """Takes keywords, None and a dictionary; returns a tuple with a dictionary in it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, x: Tensor, *, bias: Tensor | None = None, more: dict[str, Tensor] | None = None, power: int = 1
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        y = torch.tanh(self.linear(x))
        y = y if bias is None else y * bias
        y = y if more is None else y + more["residual"].sin()
        return y**power, None, {"residual": self.other(y)}


class StructuredModel(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured(width) for _ in range(3))
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x, _, more = self.blocks[0](x)
        x, _, more = self.blocks[1](x, bias=self.gate.exp(), more=more, power=2)
        x, nothing, more = self.blocks[2](x, bias=None, more=more)
        assert nothing is None
        return x + more["residual"]


class Repeating(nn.Module):
    """Calls its first block three times."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stateful(width), Stateful(width)])

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 0, 1, 0):
            x = self.blocks[index](x)
        return x


class Hooked(nn.Module):
    """Hooks on its blocks: before, after, in the backward pass; each counts how often it runs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(3))
        self.ran: list[str] = []
        for block in self.blocks:
            block.register_forward_pre_hook(self._before)
            block.register_forward_hook(self._after)
            block.register_full_backward_hook(self._backward)

    def _before(self, module: nn.Module, args: Any) -> Any:
        self.ran.append("before")
        return tuple(part * 1.5 for part in args)

    def _after(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.ran.append("after")
        return out * 0.5

    def _backward(self, module: nn.Module, into: Any, out: Any) -> None:
        self.ran.append("backward")

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


class OwnForward(nn.Module):
    """Blocks whose `forward` was set on the instance, as libraries that patch models do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(3))
        for block in self.blocks:
            block.forward = _doubled(block.forward)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _doubled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Doubled:  # deep copies follow it, unlike a closure
        def __init__(self) -> None:
            self.forward = forward

        def __call__(self, x: Tensor) -> Tensor:
            return 2 * self.forward(x)

    return Doubled()


class Encoder(nn.Module):
    """torch's own encoder, which calls its layers with keywords, under a mask."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))
        return out


class ResidualBlock(nn.Module):
    """Two convolutions with normalisations, and a sequence on the shortcut, as torchvision has it."""

    def __init__(self, channels_in: int, channels_out: int | None = None) -> None:
        super().__init__()
        width = channels_out or channels_in
        self.conv1, self.bn1 = nn.Conv2d(channels_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(channels_in, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


def _rows(module: nn.Module, *shape: int) -> Made:
    """A model of rows of numbers; its loss is not symmetric."""
    return Made(
        module, (torch.randn(*shape), torch.randn(*shape)), lambda model, batch: (model(batch).sin() + 1).pow(3).mean()
    )


def _own_loss(module: nn.Module, batches: tuple[Any, Any]) -> Made:
    return Made(module, batches, lambda model, batch: model(**batch)["loss"])


def _gpt() -> Made:
    first, second = torch.randint(64, (2, 3, 12)).unbind()
    batches = ({"input_ids": first, "labels": first}, {"input_ids": second, "labels": second})
    return _own_loss(Gpt(vocabulary=64, seq_len=12, layers=3, width=16, heads=2), batches)


def _resnet() -> Made:
    workload = resnet(image=8, width=4, blocks=1)
    batches = tuple((torch.randn(4, 3, 8, 8), torch.randint(10, (4,))) for _ in range(2))
    return Made(workload.module, batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))  # type: ignore[arg-type]


_SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 64}


def _llama() -> Made:
    transformers = pytest.importorskip("transformers")
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, max_position_embeddings=16))
    assert module.config.use_cache
    first, second = torch.randint(3, 64, (2, 2, 6)).unbind()
    return _own_loss(module, ({"input_ids": first, "labels": first}, {"input_ids": second, "labels": second}))


def _bert() -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**_SMALL, max_position_embeddings=16, hidden_dropout_prob=0.2)
    first, second = torch.randint(3, 64, (2, 2, 6)).unbind()
    batches = tuple(
        {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids).tril(2)} for ids in (first, second)
    )
    return _own_loss(transformers.BertForMaskedLM(config), batches)  # type: ignore[arg-type]


def _adapted() -> Made:
    module = Stack(*(Adapted() for _ in range(3)))
    module.inlet.requires_grad_(False)  # so that nothing that enters the first block requires a gradient
    return _rows(module, 4, 8)


CASES = (
    Case("gpt", _gpt),
    Case("resnet", _resnet),
    Case("llama", _llama),
    Case("bert", _bert),
    Case("adapters on integers", _adapted),
    Case("spectral norms and noise", lambda: _rows(Stack(*(Noisy() for _ in range(2))), 4, 8), 2),
    Case("statistics", lambda: _rows(Stack(*(Stateful() for _ in range(3))), 6, 8)),
    Case("shared block", lambda: _rows(Repeating(), 6, 8), 2),
    Case("torch's encoder", lambda: _rows(Encoder(), 3, 5, 8)),
    Case("structures", lambda: _rows(StructuredModel(), 4, 8)),
    Case("hooks", lambda: _rows(Hooked(), 4, 8)),
    Case("own forward", lambda: _rows(OwnForward(), 4, 8)),
)
CASE_NAMED = {case.name: case for case in CASES}


class Trained(NamedTuple):
    """What two windows of two micro-batches, with a step in between, leave behind."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    attributes: dict[str, Any]
    generators: tuple[Tensor, Any, Any]
    requires_grad: dict[str, bool]
    weights: dict[str, Tensor]


def trained(case: Case, levers: Levers = Levers(), *, dtype: torch.dtype = torch.float64) -> Trained:  # noqa: B008 - frozen
    """Train the model under these levers, from the same start each time."""
    made = case.make(dtype)
    module, losses = made.module, []
    seed(3)
    with defaulting_to(dtype), applied(levers, Subject(module, HOST, worth_moving_bytes=0)):
        for window in range(2):
            if window:
                _step(module)
            for batch in made.batches:
                loss = made.loss(module, batch) / 2
                loss.backward()
                losses.append(loss.detach())
    return Trained(
        losses,
        {name: parameter.grad for name, parameter in module.named_parameters()},
        dict(module.named_buffers()),
        attributes_of(module),
        generator_states(),
        {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        {name: parameter.detach() for name, parameter in module.named_parameters()},
    )


def _step(module: nn.Module) -> None:
    """A step of plain gradient descent, which leaves no gradients."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Every plain value that a module holds besides its registries."""
    plain = (int, float, str, type(None), Tensor)
    return {
        f"{name}.{key}": value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, plain)
    }


def generator_states() -> tuple[Tensor, Any, Any]:
    """Where the generators of torch, Python and NumPy are."""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state(), random.getstate(), (name, keys.tolist(), *rest)


def full(blocks: int, **more: Any) -> Levers:
    """So many blocks are computed again."""
    return Levers(checkpointing="full", checkpointed_blocks=blocks, **more)


def selective(blocks: int, **more: Any) -> Levers:
    """So many blocks are computed again, but for their matrix products."""
    return Levers(checkpointing="selective", checkpointed_blocks=blocks, **more)


def differing(one: dict[str, Any], other: dict[str, Any], *, rtol: float | None = None) -> list[str]:
    """The names of different values in two dictionaries; tensors may differ by so much, relative to the largest entry."""
    return [name for name in one.keys() | other.keys() if not _same(one.get(name), other.get(name), rtol)]


def _same(one: Any, other: Any, rtol: float | None) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) if rtol is None else bool((one - other).abs().max() <= rtol * one.abs().max())


def gradients(
    module: nn.Module, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor], levers: Levers
) -> list[Tensor]:
    """The sum of the gradients of some batches under these levers, of the parameters that have one."""
    seed(5)
    with applied(levers, Subject(module, HOST, worth_moving_bytes=0)):
        for batch in batches:
            loss(module, batch).backward()
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for parameter in module.parameters():
        parameter.grad = None
    return found


def plan_of(levers: Levers, rows: int = 6, micro_batch: int = 2) -> Plan:
    """A plan that nothing was measured for."""
    steps = rows // micro_batch
    return Plan(
        target_batch=rows,
        world_size=1,
        effective_batch=rows,
        micro_batch=micro_batch,
        accumulation_steps=steps,
        micro_batch_sizes=(micro_batch,) * steps,
        max_micro_batch=micro_batch,
        limited_by="target",
        evidence="measured",
        budget_bytes=2**30,
        levers=levers,
    )
