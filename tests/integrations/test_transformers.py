"""A ready Hugging Face Trainer is tuned, and then takes the big batch's optimizer steps."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from autoaccum import InvalidRequestError, MissingExtraError, NothingFitsError, Plan, autotune
from autoaccum.integrations import frameworks
from autoaccum.integrations.transformers import training_arguments, tune_trainer
from autoaccum.records import Levers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from autoaccum.integrations.trainer.training import tuned_callback  # noqa: E402 - needs transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

TARGET, MICRO, VOCAB, LENGTH = 12, 3, 32, 10
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(autouse=True)
def _precision_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before transformers 5.10 or so, arguments with bf16=True leave that to every later trainer in the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


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
        embedding_size=8,
        hidden_sizes=[8, 8],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
        downsample_in_first_stage=True,
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
        "multiple_of": MICRO,
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
        if num_items_in_batch is None:  # before transformers 5 no BERT model is counted for
            return cross_entropy(model(**inputs), labels)
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


_FLAGGED = pytest.mark.skipif(
    not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"), reason="this transformers has no loss_is_scaled_for_ga"
)


@pytest.mark.parametrize(
    "kind",
    [
        UsesCount,
        IgnoresCount,
        DividesItself,
        Sums,
        pytest.param(MeanOfMeans, marks=_FLAGGED),
        pytest.param(DividesTwice, marks=_FLAGGED),
    ],
)
def test_custom_loss_is_that_of_the_big_batch(kind: type[Any], tmp_path: Path) -> None:
    """A `compute_loss` that uses the count, ignores it or scales it wrongly steps as the big batch does."""
    make = trainer_of("bert_masked", kind)
    trainer = make(arguments(tmp_path))
    plan = tuned(trainer)
    corrected = any("accumulates another gradient" in text for text in plan.warnings)
    assert corrected == (kind not in (UsesCount, Sums)) or not trainer.model_accepts_loss_kwargs
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6


@pytest.mark.parametrize("head", ["llama", "bert_classes", "vit"])
def test_last_short_window_of_an_epoch_is_that_of_its_rows(head: str, tmp_path: Path) -> None:
    """With 31 rows the third step sees 7 of them in micro-batches of 3, 3 and 1, and their own gradient."""
    make = trainer_of(head, rows=2 * TARGET + 7)
    settings = {"max_steps": -1, "num_train_epochs": 1}
    trainer = make(arguments(tmp_path, **settings))
    tuned(trainer)
    assert distance(trained(trainer), big_batch(make, tmp_path, **settings)) <= 2e-6


class Stream(IterableDataset[dict[str, Any]]):
    """Rows without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows.rows)


def direct_gradient(model: nn.Module, rows: list[dict[str, Any]]) -> torch.Tensor:
    """The gradient of these rows as one batch, by the model alone."""
    model.zero_grad()
    batch = transformers.default_data_collator(rows)
    model(**batch).loss.backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found).double()


@pytest.mark.parametrize(
    ("num_rows", "windows"),
    [
        (15, [[*range(12)], [12, 13, 14, *range(9)], [*range(9, 15), *range(6)]]),
        (6, [[*range(6), *range(6)]] * 3),
    ],
)
def test_window_cut_short_by_a_stream_goes_on_in_the_next_pass(
    num_rows: int, windows: list[list[int]], tmp_path: Path
) -> None:
    """Where the data has no length, no window is torn, added to the next or left out, also where a pass is shorter."""
    model, rows = bert_masked(), Rows(num_rows)
    trainer = transformers.Trainer(model, arguments(tmp_path, learning_rate=0.0), train_dataset=Stream(rows))
    tuned(trainer)
    found = trained(trainer)
    assert trainer.state.global_step == 3
    assert distance(found, [direct_gradient(model, [rows[index] for index in window]) for window in windows]) <= 2e-6


def test_empty_stream_ends_training(tmp_path: Path) -> None:
    """A stream that has nothing left stops, as it does without tuning."""
    rows = Rows(6)
    trainer = transformers.Trainer(llama(), arguments(tmp_path), train_dataset=Stream(rows))
    tuned(trainer)
    rows.rows.clear()
    trainer.train()
    assert trainer.state.global_step == 0


def test_label_smoothing_is_that_of_the_big_batch(tmp_path: Path) -> None:
    """The trainer's own label smoother is run, and steps as the big batch does."""
    make = trainer_of("bert_masked")
    trainer = make(arguments(tmp_path, label_smoothing_factor=0.1))
    tuned(trainer)
    assert distance(trained(trainer), big_batch(make, tmp_path, label_smoothing_factor=0.1)) <= 2e-6


def test_loss_function_without_the_count_is_that_of_the_big_batch(tmp_path: Path) -> None:
    """A `compute_loss_func` that takes a mean and ignores `num_items_in_batch` is corrected."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return cross_entropy(outputs, labels)

    make = trainer_of("bert_masked", compute_loss_func=loss)
    trainer = make(arguments(tmp_path))
    plan = tuned(trainer)
    assert any("weighted by labels other than -100" in text for text in plan.warnings)
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6


class Regularises(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


def test_term_that_every_micro_batch_adds_counts_once(tmp_path: Path) -> None:
    """A penalty on the weights, which the trainer would add once per micro-batch, is that of the big batch."""
    make = trainer_of("llama", Regularises)
    trainer = make(arguments(tmp_path))
    plan = tuned(trainer)
    assert any("accumulates another gradient" in text for text in plan.warnings)
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


class WeighsClasses(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, weight=CLASS_WEIGHTS)


def test_loss_over_weighted_classes_is_refused_until_its_weight_is_given(tmp_path: Path) -> None:
    """What no known weight makes exact is refused with the numbers, and taken when the caller gives the weight."""
    make = trainer_of("bert_classes", WeighsClasses)
    trainer = make(arguments(tmp_path))
    with pytest.raises(InvalidRequestError, match=r"no known weight .*rows: .*pass weight=batch -> number"):
        tuned(trainer)
    plan = tuned(trainer, weight=lambda batch: CLASS_WEIGHTS[batch["labels"]].sum())
    assert any("weighted by the caller's weight" in text for text in plan.warnings)
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6


class ComparesRows(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def test_loss_that_compares_rows_is_refused(tmp_path: Path) -> None:
    """No accumulation of a contrastive loss is exact; it is only taken unlooked at, which the plan says."""
    trainer = trainer_of("bert_classes", ComparesRows)(arguments(tmp_path))
    with pytest.raises(InvalidRequestError, match="compares rows with each other"):
        tuned(trainer)
    assert any("check=False" in text for text in tuned(trainer, check=False).warnings)


# -- what is left behind


def state_of(trainer: Any) -> list[Any]:
    """Everything that a call could change, and the next random number."""
    named = [*trainer.model.named_parameters(), *trainer.model.named_buffers()]
    args = trainer.args
    return [
        [(name, tensor.clone(), tensor.grad, tensor.requires_grad) for name, tensor in named],
        [(name, part.training, list(vars(part)), len(part._forward_hooks)) for name, part in trainer.model.named_modules()],
        sorted(vars(trainer)),
        [type(callback) for callback in trainer.callback_handler.callbacks],
        (trainer.optimizer, trainer._train_batch_size, len(trainer.accelerator._dataloaders)),
        {name: value for name, value in vars(args).items() if isinstance(value, (int, float, str, bool, type(None)))},
        torch.get_rng_state(),
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_refused_trainer_is_as_it_was(settings: dict[str, Any], tmp_path: Path) -> None:
    """After an error nothing of the trainer, its model, arguments or random numbers has changed."""
    trainer = trainer_of("bert_classes", ComparesRows)(arguments(tmp_path, **settings))
    before = state_of(trainer)
    with pytest.raises(InvalidRequestError, match="compares rows"):
        tuned(trainer)
    assert same(before, state_of(trainer))


def test_tuned_trainer_differs_in_its_numbers_only(tmp_path: Path) -> None:
    """The model, the optimizer and the random numbers are as they were; the numbers and four wrappers are new."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path))
    before = state_of(trainer)
    tuned(trainer)
    after = state_of(trainer)
    assert same(before[:2], after[:2]) and same(before[6], after[6])
    assert set(after[2]) - set(before[2]) == {
        "train",
        "get_train_dataloader",
        "get_batch_samples",
        "training_step",
        "compute_loss",
    }
    changed = {name for name, value in after[5].items() if value != before[5][name]}
    assert changed == {"per_device_train_batch_size", "gradient_accumulation_steps"}


def test_second_tuning_replaces_the_first(tmp_path: Path) -> None:
    """A trainer that is tuned twice has one callback, and steps as the second target's big batch does."""
    make = trainer_of("bert_classes")
    trainer = make(arguments(tmp_path))
    tuned(trainer, 2 * TARGET)
    count = len(trainer.callback_handler.callbacks)
    tuned(trainer)
    assert len(trainer.callback_handler.callbacks) == count
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6


def test_refused_second_tuning_leaves_the_first(tmp_path: Path) -> None:
    """When tuning again fails, the trainer is tuned as before."""
    make = trainer_of("bert_classes")
    trainer = make(arguments(tmp_path))
    tuned(trainer)
    with pytest.raises(NothingFitsError):
        tuned(trainer, 2 * TARGET, budget="20KiB")
    assert distance(trained(trainer), big_batch(make, tmp_path)) <= 2e-6


def test_numbers_changed_after_tuning_are_refused(tmp_path: Path) -> None:
    """When the product is no longer the target, training does not begin."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path))
    tuned(trainer)
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(InvalidRequestError, match=r"tuned for 12 rows .* 3 rows x 2 steps"):
        trainer.train()


# -- levers


class Watches(transformers.TrainerCallback):
    """Notes whether layers are checkpointed when steps begin, and may end the training."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.seen = error, list[bool]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(is_checkpointed(given["model"]))
        if self.error is not None:
            raise self.error


def is_checkpointed(model: nn.Module) -> bool:
    return any(vars(module).get("gradient_checkpointing") is True for module in model.modules())


CHECKPOINTED = Levers(checkpointing="full", checkpointed_blocks=1)


def tuned_with(trainer: Any, levers: Levers) -> None:
    """Tuned, with these levers as if the search had chosen them."""
    plan = tuned(trainer)
    callback = tuned_callback(trainer)
    assert callback is not None
    callback.plan = msgspec.structs.replace(plan, levers=levers)


@pytest.mark.slow
def test_levers_are_searched(tmp_path: Path) -> None:
    """Asked for the lowest peak, the search checkpoints the model's layers, and the trainer is given that plan."""
    trainer = trainer_of("bert_masked")(arguments(tmp_path))
    plan = tuned(trainer, levers={"checkpointing": ["full"]}, objective="memory", time_budget_s=None)
    assert plan.levers == CHECKPOINTED
    assert trainer.train().global_step == 3


def test_levers_are_turned_while_it_trains(tmp_path: Path) -> None:
    """Layers that the plan checkpoints are so inside `train()` only, and the steps stay those of the big batch."""
    make = trainer_of("bert_masked")
    trainer = make(arguments(tmp_path))
    tuned_with(trainer, CHECKPOINTED)
    watches = Watches()
    trainer.add_callback(watches)
    found = trained(trainer)
    assert (watches.seen, is_checkpointed(trainer.model)) == ([True] * 3, False)
    assert distance(found, big_batch(make, tmp_path)) <= 2e-6


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=repr)
def test_levers_are_turned_back_when_training_is_cut_short(error: BaseException, tmp_path: Path) -> None:
    """An error or Ctrl-C inside `train()` comes out as it is and leaves no lever turned."""
    trainer = trainer_of("bert_masked")(arguments(tmp_path))
    tuned_with(trainer, CHECKPOINTED)
    watches = Watches(error)
    trainer.add_callback(watches)
    with pytest.raises(type(error)):
        trainer.train()
    assert (watches.seen, is_checkpointed(trainer.model)) == ([True], False)


@pytest.mark.parametrize(
    ("settings", "levers", "remark"),
    [
        ({"bf16": True}, {"precision": ["fp32", "bf16"]}, "bf16=True already"),
        ({}, {"precision": ["fp32", "fp16"]}, "fp16 needs a scaler"),
    ],
)
def test_lever_that_cannot_be_turned_is_said(
    settings: dict[str, Any], levers: dict[str, Any], remark: str, tmp_path: Path
) -> None:
    """What the trainer's own arguments decide is left to them, with the reason."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path, **settings))
    plan = tuned(trainer, levers=levers)
    assert plan.levers == Levers() and any(remark in text for text in plan.warnings)


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_what_the_arguments_turn_on_is_in_the_measurement(settings: dict[str, Any], tmp_path: Path) -> None:
    """With checkpointing or bf16 in the arguments the same step is measured to take less than without."""
    make = trainer_of("bert_masked")
    measured = [
        tuned(make(arguments(tmp_path, **changes)), max_micro_batch=12, multiple_of=12).measured_peak_bytes or 0
        for changes in ({}, settings)
    ]
    assert measured[1] < measured[0]


def test_model_in_eval_mode_is_measured_as_it_trains(tmp_path: Path) -> None:
    """A loaded model is in eval mode, and `train()` changes that: so does the measurement, which puts the mode back."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path))
    trainer.model.eval()
    plan = tuned(trainer)
    assert not any("eval mode" in text for text in plan.warnings)
    assert not any(module.training for module in trainer.model.modules())


def test_trained_trainer_is_tuned(tmp_path: Path) -> None:
    """After training, with an optimizer that Accelerate prepared, a trainer is tuned as before, and goes on."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path, bf16=True, optim="adamw_torch"))
    trainer.train()
    kept = [value.clone() for state in trainer.optimizer.state.values() for value in state.values()]
    plan = tuned(trainer)
    assert same(kept, [value for state in trainer.optimizer.state.values() for value in state.values()])
    assert (plan.micro_batch_sizes, trainer.train().global_step) == ((3, 3, 3, 3), 3)


def test_too_little_memory_for_the_check_is_said(tmp_path: Path) -> None:
    """Where not even two rows fit outside the plan's levers, the trainer is refused with the remedy, and as it was."""

    class RunsOut(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer = trainer_of("bert_classes", RunsOut)(arguments(tmp_path))
    before = state_of(trainer)
    with pytest.raises(InvalidRequestError, match=r"two rows without levers do not fit.*check=False"):
        tuned(trainer)
    assert same(before, state_of(trainer))


def test_windows_wait_in_host_memory(tmp_path: Path) -> None:
    """The loader of a tuned trainer puts nothing on the device: one micro-batch is there at a time, as was measured."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path))
    assert trainer.get_train_dataloader().device is not None
    tuned(trainer)
    assert trainer.get_train_dataloader().device is None


# -- whose data, which model


def test_adapters_are_tuned(tmp_path: Path) -> None:
    """Of a PEFT model only the adapters are trained, and stepped as by the big batch."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted(args: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
        return transformers.Trainer(peft.get_peft_model(llama(), config), args, train_dataset=Rows(3 * TARGET))

    trainer = adapted(arguments(tmp_path))
    plan = tuned(trainer)
    assert plan.memory is not None and plan.memory.frozen_parameters > plan.memory.trainable_parameters
    assert distance(trained(trainer), big_batch(adapted, tmp_path)) <= 2e-6


class OfManyLengths(Rows):
    """Rows of 2 to 10 tokens."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value[: 2 + index % 9] for name, value in self.rows[index].items()}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that pads to the longest row and masks labels at random, as those for masked language models do."""
    fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=filler)
        for name, filler in fillers.items()
    }
    drop = torch.rand(batch["labels"].shape) < 0.3
    return batch | {"labels": batch["labels"].masked_fill(drop, -100)}


def test_longest_rows_are_run_through_the_collator(tmp_path: Path) -> None:
    """With rows grouped by length a micro-batch may be all long ones: those are what is measured."""
    lengths: list[int] = []

    class Notes(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            lengths.append(inputs["input_ids"].shape[1])
            return super().compute_loss(model, inputs, *args, **kwargs)

    by_length = "train_sampling_strategy" in transformers.TrainingArguments.__dataclass_fields__
    settings: dict[str, Any] = {"train_sampling_strategy": "group_by_length"} if by_length else {"group_by_length": True}
    trainer = Notes(bert_masked(), arguments(tmp_path, **settings), train_dataset=OfManyLengths(40), data_collator=padded)
    plan = tuned(trainer, check=False)
    assert set(lengths) == {LENGTH}
    assert trainer.train().global_step == 3
    assert plan.environment is not None and "the largest first" in plan.environment.batch


def test_rows_that_a_collator_masks_at_random_are_compared_with_themselves(tmp_path: Path) -> None:
    """Labels drawn anew in every collating do not make right accumulation look wrong, nor wrong look right."""
    trainer = transformers.Trainer(bert_masked(), arguments(tmp_path), train_dataset=OfManyLengths(40), data_collator=padded)
    before = torch.get_rng_state()
    plan = tuned(trainer)
    assert any("labels other than -100" in text for text in plan.warnings)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="before transformers 5 packed rows see each other without flash attention, which is refused",
)
def test_rows_packed_into_one_are_those_of_the_big_batch(tmp_path: Path) -> None:
    """Where a collator puts rows one after the other, batches cannot be cut by rows: each micro-batch is collated."""

    class Lists(OfManyLengths):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            return {name: row[name].tolist() for name in ("input_ids", "labels")}

    def packing(args: Any) -> Any:
        torch.manual_seed(0)
        collator = transformers.DataCollatorWithFlattening()
        return transformers.Trainer(llama(), args, train_dataset=Lists(3 * TARGET), data_collator=collator)

    trainer = packing(arguments(tmp_path))
    tuned(trainer)
    assert distance(trained(trainer), big_batch(packing, tmp_path)) <= 2e-6


class OwnLoader(transformers.Trainer):
    """Brings its own loader of eight rows."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(24), batch_size=8)


class OwnBatches(transformers.Trainer):
    """Brings ready batches that are no loader."""

    def get_train_dataloader(self) -> Any:
        return [transformers.default_data_collator(Rows(MICRO).rows)] * 40


def test_loader_that_ignores_the_batch_size_is_refused(tmp_path: Path) -> None:
    """A loader of the trainer's own that yields other sizes would make another effective batch."""
    trainer = OwnLoader(bert_masked(), arguments(tmp_path))
    with pytest.raises(InvalidRequestError, match="batches of 8 rows where per_device_train_batch_size is 3"):
        tuned(trainer)
    assert trainer.args.per_device_train_batch_size == 8


def test_loader_that_cannot_be_looked_at_needs_a_sample(tmp_path: Path) -> None:
    """What is no DataLoader is refused with the remedy, which works."""
    trainer = OwnBatches(bert_masked(), arguments(tmp_path))
    with pytest.raises(InvalidRequestError, match="a list, whose data cannot be looked at; pass sample="):
        tuned(trainer)
    plan = tuned(trainer, sample=transformers.default_data_collator(Rows(8).rows))
    assert plan.micro_batch_sizes == (3, 3, 3, 3)


# -- refusals


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True makes .* the effective batch changes"),
        ({"optim": "adalomo"}, "steps in the backward pass"),
    ],
)
def test_trainer_that_cannot_be_tuned_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Arguments that change the effective batch, or step for every micro-batch, are refused with the remedy."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path, **settings))
    with pytest.raises(InvalidRequestError, match=reason):
        tuned(trainer)


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        ("trainer", "is_deepspeed_enabled", "DeepSpeed shards the model inside train"),
        ("trainer", "is_fsdp_enabled", "FSDP shards the model inside train"),
        ("args", "_n_gpu", "sees 2 GPUs .* torchrun"),
        ("accelerator", "parallelism_config", "parallelism_config"),
    ],
)
def test_sharded_trainer_is_refused(owner: str, name: str, reason: str, tmp_path: Path) -> None:
    """What is sharded or copied inside `train()` cannot be measured before, and is refused with what to do instead."""
    trainer = trainer_of("bert_classes")(arguments(tmp_path))
    holder = {"trainer": trainer, "args": trainer.args, "accelerator": trainer.accelerator}[owner]
    kept = trainer.accelerator.state.__dict__.copy()
    target = holder.state if owner == "accelerator" else holder
    setattr(target, name, 2 if name == "_n_gpu" else True)
    try:
        with pytest.raises(InvalidRequestError, match=reason):
            tuned(trainer)
    finally:
        trainer.accelerator.state.__dict__.pop("parallelism_config", None)
        trainer.accelerator.state.__dict__.update(kept)


def test_trainer_without_data_is_refused(tmp_path: Path) -> None:
    """Without training data there is nothing to run."""
    with pytest.raises(InvalidRequestError, match="no training data"):
        tuned(transformers.Trainer(bert_classes(), arguments(tmp_path)))


def test_trainer_with_empty_data_is_refused(tmp_path: Path) -> None:
    """A data set without rows is refused before torch refuses to sample from it."""
    with pytest.raises(InvalidRequestError, match="train_dataset has 0 rows; expected"):
        tuned(transformers.Trainer(bert_classes(), arguments(tmp_path), train_dataset=[]))


def test_what_is_no_trainer_is_refused() -> None:
    """Anything else is named."""
    with pytest.raises(InvalidRequestError, match=r"trainer is a Linear; expected a transformers.Trainer"):
        tune_trainer(nn.Linear(2, 2), 8)  # type: ignore[arg-type]


def test_target_without_an_equal_division_is_refused(tmp_path: Path) -> None:
    """A trainer takes one number: where no size that fits divides the target, the error names near ones."""
    with pytest.raises(InvalidRequestError, match="target_batch=13"):
        tuned(trainer_of("bert_classes")(arguments(tmp_path)), 13)


def test_weight_that_is_none_is_refused(tmp_path: Path) -> None:
    """A weight is a name, tokens or a function."""
    with pytest.raises(InvalidRequestError, match="weight='rows' is unknown"):
        tuned(trainer_of("bert_classes")(arguments(tmp_path)), weight="rows")


@pytest.mark.parametrize("call", [lambda: tune_trainer(None, 8), lambda: training_arguments(None)])  # type: ignore[arg-type]
def test_old_transformers_are_refused(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old a version is said with what breaks, before anything else."""
    monkeypatch.setattr(frameworks, "version", lambda name: "4.49.0")
    with pytest.raises(MissingExtraError, match=r"transformers 4\.49\.0 is too old.*last short window"):
        call()


# -- plans as arguments


_QUICK: dict[str, Any] = {"levers": "none", "time_budget_s": 0.01}


def plan_with(levers: Levers = Levers(), **changes: Any) -> Plan:  # noqa: B008 - a frozen record
    """A plan of 3 x 4 rows, with other levers."""
    plan = autotune(nn.Linear(4, 2), torch.randn(2, 4), 12, device="virtual:1MiB", max_micro_batch=4, **_QUICK, **changes)
    return msgspec.structs.replace(plan, levers=levers)


def test_arguments_make_a_trainer_of_that_batch(tmp_path: Path) -> None:
    """The keywords are taken by TrainingArguments as they are."""
    found = training_arguments(plan_with(equal_micro_batches=True))
    assert found == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "auto_find_batch_size": False}
    assert arguments(tmp_path, **found).gradient_accumulation_steps == 3


@pytest.mark.parametrize(
    ("levers", "expected"),
    [
        (Levers(precision="bf16"), {"bf16": True}),
        (Levers(precision="tf32"), {"tf32": True}),
        (Levers(optimizer_impl="fused"), {"optim": "adamw_torch_fused"}),
    ],
)
def test_levers_become_arguments(levers: Levers, expected: dict[str, Any]) -> None:
    """What the arguments can say of the levers, they say."""
    assert training_arguments(plan_with(levers)).items() >= expected.items()


def test_checkpointing_becomes_that_of_all_layers(tmp_path: Path) -> None:
    """Under the name that this transformers gives it, so that nothing is deprecated."""
    found = training_arguments(plan_with(Levers(checkpointing="selective", checkpointed_blocks=2)))
    assert found[next(name for name in found if name.endswith("_kwargs"))] == {"use_reentrant": False}
    assert arguments(tmp_path, **found).gradient_checkpointing is True


@pytest.mark.parametrize("levers", [Levers(offload="cpu"), Levers(optimizer_impl="for-loop")], ids=str)
def test_lever_without_an_argument_is_refused(levers: Levers) -> None:
    """What the arguments cannot say is refused, with who can."""
    with pytest.raises(InvalidRequestError, match="cannot say; use tune_trainer"):
        training_arguments(plan_with(levers))


def test_unequal_micro_batches_are_refused() -> None:
    """One number cannot say 4, 4, 3: the error says how to make a plan that it can."""
    plan = autotune(nn.Linear(4, 2), torch.randn(2, 4), 11, device="virtual:1MiB", max_micro_batch=4, **_QUICK)
    with pytest.raises(InvalidRequestError, match=r"micro-batches of 4, 3 rows.*equal_micro_batches=True"):
        training_arguments(plan)


# -- in processes of their own

_HELPERS = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("helpers", {str(Path(__file__))!r})
helpers = importlib.util.module_from_spec(spec)
sys.modules["helpers"] = helpers
spec.loader.exec_module(helpers)
"""


@pytest.mark.slow
def test_tuned_to_host_memory_it_trains_inside_the_budget(run_child: Any, tmp_path: Path) -> None:
    """Under a real limit of the process's own memory it is limited by that, and three real steps stay inside."""
    found = run_child(
        f"""
        import pathlib, psutil, torch, transformers
        from autoaccum.integrations.transformers import tune_trainer
        config = transformers.BertConfig(
            vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=512
        )
        data = [{{"input_ids": torch.arange(96) + i, "labels": torch.arange(96) + i}} for i in range(192)]
        settings = transformers.TrainingArguments(
            output_dir={str(tmp_path)!r}, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=3
        )
        trainer = transformers.Trainer(transformers.BertForMaskedLM(config), settings, train_dataset=data)
        budget = psutil.Process().memory_info().rss + 100 * 2**20
        plan = tune_trainer(trainer, 32, device="cpu", budget=budget, levers="none")
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        steps = trainer.train().global_step
        status = pathlib.Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        answer([plan.limited_by, plan.micro_batch * plan.accumulation_steps, steps, peak, budget])
        """
    )
    limited_by, effective, steps, peak, budget = found
    assert (limited_by, effective, steps) == ("memory", 32, 3)
    assert peak <= budget


@pytest.mark.slow
def test_ranks_step_as_the_big_batch(tmp_path: Path) -> None:
    """On two ranks every step is that of the big batch in one process, corrected or not, and both have the same plan."""
    heads = ("llama", "bert_masked")
    source = _HELPERS + textwrap.dedent(
        f"""
        import os, pathlib, torch
        folder = pathlib.Path({str(tmp_path)!r})
        for head in {heads!r}:
            trainer = helpers.trainer_of(head)(helpers.arguments(folder))
            plan = helpers.tuned(trainer)
            steps = helpers.trained(trainer)
            torch.save([plan.micro_batch_sizes, steps], folder / f"{{head}}-{{os.environ['RANK']}}.pt")
        os._exit(0)  # Python's own end may meet a thread of gloo that still holds a tensor, which aborts the process
        """
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    files = [log.open("w") for log in logs]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source],
            stdout=opened,
            stderr=subprocess.STDOUT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, opened in enumerate(files)
    ]
    try:
        codes = [process.wait(timeout=150) for process in processes]
    finally:
        for process, opened in zip(processes, files, strict=True):
            process.kill()
            process.wait()
            opened.close()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    for head in heads:
        expected = big_batch(trainer_of(head), tmp_path)
        for rank in range(2):
            sizes, steps = torch.load(tmp_path / f"{head}-{rank}.pt")
            assert sizes == (3, 3)
            assert distance(steps, expected) <= 2e-6
