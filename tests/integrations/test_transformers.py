"""A ready Hugging Face Trainer is tuned, and then takes the big batch's optimizer steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from autoaccum import InvalidRequestError, MissingExtraError, NothingFitsError, Plan, autotune, tokens
from autoaccum.integrations import frameworks
from autoaccum.integrations.transformers import training_arguments, tune_trainer
from autoaccum.records import Levers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

TARGET, MICRO, VOCAB, LENGTH = 12, 3, 32, 10
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


class Rows(Dataset[dict[str, Any]]):
    """Rows of tokens of which a different number is labelled, or images, or classes."""

    def __init__(self, count: int, kind: str = "tokens") -> None:
        random = torch.Generator().manual_seed(3)
        self.rows = [self._row(kind, random) for _ in range(count)]

    @staticmethod
    def _row(kind: str, random: torch.Generator) -> dict[str, Any]:
        if kind == "images":
            image = torch.randn(3, 16, 16, generator=random)
            return {"pixel_values": image, "labels": int(torch.randint(3, (), generator=random))}
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=random)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if kind == "classes":
            return row | {"labels": int(torch.randint(3, (), generator=random))}
        labels = ids.clone()
        labels[int(torch.randint(2, LENGTH, (), generator=random)) :] = -100
        return row | {"labels": labels}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **SIZES)
    return transformers.LlamaForCausalLM(config)


def bert_config() -> Any:
    return transformers.BertConfig(
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SIZES,
    )


def bert_classes() -> nn.Module:
    return transformers.BertForSequenceClassification(bert_config())


def bert_masked() -> nn.Module:
    return transformers.BertForMaskedLM(bert_config())


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SIZES)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3, downsample_in_first_stage=True
    )
    model = transformers.ResNetForImageClassification(config)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):  # frozen, since no accumulation gives the big batch's statistics
            part.eval()
            part.train = lambda mode=True, part=part: part  # type: ignore[method-assign]
    return model


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "tokens"),
    "bert_classes": (bert_classes, "classes"),
    "bert_masked": (bert_masked, "tokens"),
    "t5": (t5, "tokens"),
    "vit": (vit, "images"),
    "resnet": (resnet, "images"),
}


def arguments(folder: Path, **changes: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_grad_norm": 0.0,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_steps": 3,
    }
    return transformers.TrainingArguments(**{**settings, **changes})


def tuned(trainer: Any, target: int = TARGET, **changes: Any) -> Plan:
    """Tuned to micro-batches of at most three rows, quickly."""
    settings = {
        "device": "virtual:64MiB",
        "levers": "none",
        "max_micro_batch": MICRO,
        "time_budget_s": 0.01,
        "progress": False,
    }
    return tune_trainer(trainer, target, **{**settings, **changes})


class Gradients(transformers.TrainerCallback):
    """Keeps what every optimizer step sees."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        found = [p.grad.flatten() for p in given["model"].parameters() if p.grad is not None]
        self.seen.append(torch.cat(found).double())


def trained(trainer: Any) -> list[torch.Tensor]:
    """The gradients of a whole training."""
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    trainer.remove_callback(gradients)
    return gradients.seen


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of a step."""
    assert len(found) == len(expected) > 0
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


def big_batch(make: Callable[..., Any], folder: Path, **changes: Any) -> list[torch.Tensor]:
    """What a trainer without accumulation sees, from the same weights and in the same order."""
    return trained(make(arguments(folder, per_device_train_batch_size=TARGET, **changes)))


def trainer_of(head: str, kind: type[Any] | None = None, rows: int = 3 * TARGET, **given: Any) -> Callable[[Any], Any]:
    """Makes trainers of one head from the same weights."""
    make, data = HEADS[head]
    torch.manual_seed(0)
    weights = make().state_dict()

    def trainer(args: Any) -> Any:
        model = make()
        model.load_state_dict(weights)
        return (kind or transformers.Trainer)(model, args, train_dataset=Rows(rows, data), **given)

    return trainer


# -- the big batch's step


@pytest.mark.parametrize("head", HEADS)
def test_three_steps_are_those_of_the_big_batch(head: str, tmp_path: Path) -> None:
    """After tuning, every optimizer step of `train()` sees the gradient of the big batch, whatever the head."""
    make = trainer_of(head)
    trainer = make(arguments(tmp_path))
    plan = tuned(trainer)
    assert (plan.micro_batch, plan.accumulation_steps) == (MICRO, TARGET // MICRO)
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == TARGET
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6


def cross_entropy(outputs: Any, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction=reduction)


class UsesCount(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        return cross_entropy(model(**inputs), labels, "sum") / num_items_in_batch


class IgnoresCount(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        return cross_entropy(model(**inputs), labels)


class MeanOfMeans(IgnoresCount):
    loss_is_scaled_for_ga = False


class DividesItself(IgnoresCount):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return super().compute_loss(model, inputs) / self.args.gradient_accumulation_steps


class DividesTwice(UsesCount):
    loss_is_scaled_for_ga = False


class Sums(IgnoresCount):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        return cross_entropy(model(**inputs), labels, "sum") / 100


@pytest.mark.parametrize("kind", [UsesCount, IgnoresCount, MeanOfMeans, DividesItself, DividesTwice, Sums])
def test_custom_loss_is_that_of_the_big_batch(kind: type[Any], tmp_path: Path) -> None:
    """A `compute_loss` that uses the count, ignores it or scales it wrongly steps as the big batch does."""
    make = trainer_of("bert_masked", kind)
    trainer = make(arguments(tmp_path))
    plan = tuned(trainer)
    corrected = any("accumulates another gradient" in text for text in plan.warnings)
    assert corrected == (kind not in (UsesCount, Sums))
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6
