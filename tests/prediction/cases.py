"""Training steps of every kind, and what a trace or a real probe of them holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoaccum
from autoaccum.prediction.trace import Trace
from autoaccum.targets.libraries import hf_workload
from autoaccum.workload import Workload

BLOCK = 512


@dataclass(frozen=True)
class Case:
    """A training step: its model, a sample, and how it is trained."""

    model: nn.Module
    sample: Any
    more: dict[str, Any] = field(default_factory=dict)

    def workload(self) -> Workload:
        return Workload(self.model, self.sample, **self.more)


def live_bytes(trace: Trace) -> list[int]:
    """Bytes held after each event, every storage rounded to the allocator's blocks."""
    sizes = [-(-size // BLOCK) * BLOCK for size in trace.sizes]
    held, total = [], 0
    for event in trace.events:
        total += sizes[event] if event >= 0 else -sizes[~event]
        held.append(total)
    return held


def measured(case: Case, rows: int) -> int:
    """The peak of a real probe of this size."""
    result = autoaccum.probe(
        case.model, case.sample, device="virtual:1TiB", max_micro_batch=rows, multiple_of=rows, progress=False, **case.more
    )
    assert result.measured_peak_bytes is not None
    return result.measured_peak_bytes


def held_as(trace: Trace, kind: str) -> int:
    """All bytes of one kind, whenever they were held."""
    return sum(size for size, own in zip(trace.sizes, trace.kinds, strict=True) if own == kind)


class Attention(nn.Module):
    """A decoder block with LayerNorm, attention and an MLP."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.inward(self.norms[0](x)).view(split).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        x = x + self.outward(found.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    """Tokens to a mean cross-entropy, with a head that may be tied to the embedding."""

    def __init__(
        self, body: nn.Module, vocabulary: int = 50, width: int = 32, tied: bool = True, sparse: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(vocabulary, width, sparse=sparse), body
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.tokens(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


class Checkpointed(nn.Module):
    """Runs blocks under activation checkpointing."""

    def __init__(self, *blocks: nn.Module, reentrant: bool = False, **more: Any) -> None:
        super().__init__()
        self.blocks, self.more = nn.ModuleList(blocks), {"use_reentrant": reentrant, **more}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.more)
        return x


class Recurrent(nn.Module):
    """The mean of what a recurrent layer says."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].mean()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def pairs(width: int = 16, classes: int = 8, count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width), torch.randint(classes, (count,))


def ids(vocabulary: int = 50, time: int = 12, count: int = 4) -> dict[str, Tensor]:
    found = torch.randint(vocabulary, (count, time))
    return {"input_ids": found, "labels": found.clone()}


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 12, 12), torch.randint(5, (4,))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def classified(**more: Any) -> dict[str, Any]:
    return {"loss_fn": F.cross_entropy, **more}


def optimized(make: Callable[..., Optimizer], **more: Any) -> Case:
    return Case(mlp(), pairs(), classified(optimizer=partial(make, lr=0.01, **more)))


def with_own_optimizer(make: Callable[[nn.Module], Optimizer], steps: int = 0) -> Case:
    """The user's optimizer, which may have stepped already."""
    model = mlp()
    optimizer = make(model)
    for _ in range(steps):
        model(torch.randn(2, 16)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Case(model, pairs(), classified(optimizer=optimizer))


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: Tensor = model(**batch)["loss"]
    return loss


def penalized(model: nn.Module, batch: Any) -> Tensor:
    """A loss of two terms, one of them a penalty on the weights."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-4 * penalty


class Owner(nn.Module):
    """A training step that is a method of a module, which is not the model."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp()
        self.register_buffer("weight", torch.ones(8))

    def training_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=self.weight)


def step_of_the_model_itself() -> Case:
    owner = Owner()
    return Case(owner.network, pairs(), {"training_step": owner.training_step})


def step_over_items(model: nn.Module, items: list[dict[str, Tensor]]) -> Tensor:
    logits = model(torch.stack([item["x"] for item in items]))
    return F.cross_entropy(logits, torch.stack([item["y"] for item in items]))


def frozen_body() -> Case:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return Case(model, pairs(), classified())


def saving_matrix_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selectively() -> Any:
    return create_selective_checkpoint_contexts(saving_matrix_products)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(mlp(), pairs(), classified()),
    "mean of outputs": lambda: Case(mlp(), torch.randn(4, 16)),
    "one row of one value": lambda: Case(nn.Linear(1, 1), torch.randn(4, 1)),
    "batch norm": lambda: Case(convolutional(), images(), classified()),
    "channels last": lambda: Case(convolutional().to(memory_format=torch.channels_last), images(), classified()),
    "attention": lambda: Case(Language(nn.Sequential(Attention(), Attention())), ids()),
    "attention with dropout": lambda: Case(Language(Attention(dropout=0.1)), ids()),
    "attention, not causal": lambda: Case(Language(Attention(causal=False), tied=False), ids()),
    "dropout": lambda: Case(nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 8)), pairs(), classified()),
    "embedding bag": lambda: Case(nn.EmbeddingBag(100, 8, mode="sum"), torch.randint(100, (4, 5))),
    "frozen": frozen_body,
    "gru": lambda: Case(Recurrent(nn.GRU(16, 8, num_layers=2, batch_first=True)), torch.randn(4, 5, 16)),
    "transformer layer": lambda: Case(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(4, 5, 16)
    ),
    "checkpointed": lambda: Case(Language(Checkpointed(Attention(), Attention())), ids()),
    "checkpointed, reentrant": lambda: Case(Language(Checkpointed(Attention(), reentrant=True)), ids()),
    "checkpointed with dropout": lambda: Case(Language(Checkpointed(Attention(dropout=0.1), Attention())), ids()),
    "checkpointed selectively": lambda: Case(Language(Checkpointed(Attention(), context_fn=selectively)), ids()),
    "autocast": lambda: Case(Language(Attention()), ids(), {"training_step": under_autocast}),
    "autocast and checkpointed": lambda: Case(Language(Checkpointed(Attention())), ids(), {"training_step": under_autocast}),
    "bfloat16": lambda: Case(Language(Attention()).bfloat16(), ids()),
    "float64": lambda: Case(mlp().double(), torch.randn(4, 16, dtype=torch.float64)),
    "complex": lambda: Case(nn.Linear(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64), {
        "training_step": lambda model, batch: model(batch).abs().mean()
    }),
    "adamw loop": lambda: optimized(AdamW, foreach=False),
    "adamw foreach": lambda: optimized(AdamW, foreach=True),
    "adamw fused": lambda: optimized(AdamW, fused=True),
    "adamw amsgrad": lambda: optimized(AdamW, amsgrad=True),
    "sgd": lambda: optimized(SGD),
    "momentum": lambda: optimized(SGD, momentum=0.9, foreach=True),
    "rmsprop": lambda: optimized(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adagrad": lambda: optimized(Adagrad),
    "own adagrad": lambda: with_own_optimizer(lambda model: Adagrad(model.parameters())),
    "own fresh adamw": lambda: with_own_optimizer(lambda model: AdamW(model.parameters())),
    "own adamw with state": lambda: with_own_optimizer(lambda model: AdamW(model.parameters(), foreach=True), steps=2),
    "own fused adamw with state": lambda: with_own_optimizer(lambda model: AdamW(model.parameters(), fused=True), steps=1),
    "own momentum with state": lambda: with_own_optimizer(lambda model: SGD(model.parameters(), 0.1, 0.9), steps=1),
    "own adamw of the last layer": lambda: with_own_optimizer(lambda model: AdamW(model[4].parameters())),
    "class weights": lambda: Case(mlp(), pairs(), {"loss_fn": nn.CrossEntropyLoss(weight=torch.rand(8))}),
    "loss with two terms": lambda: Case(mlp(), pairs(), {"training_step": penalized}),
    "method of a module": step_of_the_model_itself,
    "list of dicts": lambda: Case(nn.Linear(16, 4), [{"x": torch.randn(16), "y": torch.tensor(i)} for i in range(3)], {
        "training_step": step_over_items
    }),
    "nested": lambda: Case(mlp(), {"x": [torch.randn(4, 16)], "y": (torch.randint(8, (4,)), "a name")}, {
        "training_step": lambda model, batch: F.cross_entropy(model(batch["x"][0]), batch["y"][0])
    }),
}  # fmt: skip

LESS_COMMON = (
    "gru", "transformer layer", "autocast and checkpointed", "checkpointed with dropout", "attention, not causal", "complex",
    "embedding bag", "adamw amsgrad", "rmsprop", "adagrad", "own fused adamw with state", "nested", "float64", "sgd",
    "momentum", "own adagrad", "own fresh adamw", "adamw loop", "checkpointed, reentrant", "loss with two terms",
)  # fmt: skip


def small_transformer(kind: str) -> Workload:
    """A model of the transformers library with one layer, for 12 tokens."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
    options: dict[str, dict[str, Any]] = {
        "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16},
        "bert": small,
        "llama": {**small, "num_key_value_heads": 2},
        "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64},
    }
    return hf_workload(kind, {**options[kind], "seq_len": 12})


class Doing(nn.Module):
    """Does something with the output of a linear layer."""

    def __init__(self, do: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(16, 8), do

    def forward(self, x: Tensor) -> Any:
        return self.do(self.linear(x))
