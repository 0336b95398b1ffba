"""Ways to take optimizer steps at a target batch: by a plan of `autotune`, and as users do today.

A way is a function of a case, the rows of a micro-batch or the plan, and `turn`. It trains, calls `turn()` before its first
optimizer step and after each one (with the step's result, where there is one), and ends when that says False. So a step is
timed with all that belongs to it, loading the data included, in loops that are not ours as well. Run by training.py.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import autoaccum

Turn = Callable[..., bool]
Rows = list[dict[str, Tensor]]
LEARNING_RATE = 1e-4
SEQ_LEN, VOCABULARY, CLASSES, IMAGE = 64, 2000, 8, 32


class Case(NamedTuple):
    """A model, its data and the batch that one optimizer step is to see. `weight`: what its loss is a mean over."""

    build: Callable[[], nn.Module]
    row: Callable[[torch.Generator], dict[str, Tensor]]
    target_batch: int
    room_mib: int
    weight: Any = "samples"

    def model(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return self.build().train()

    def rows(self, count: int) -> Rows:
        """The same rows each time."""
        generator = torch.Generator().manual_seed(1)
        return [self.row(generator) for _ in range(count)]


def gpt() -> nn.Module:
    """A small GPT-2; no dropout, so that gradients can be compared."""
    config = transformers.GPT2Config(
        n_embd=128,
        n_layer=4,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=SEQ_LEN,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        loss_type="ForCausalLM",
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    """A small BERT that classifies."""
    config = transformers.BertConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQ_LEN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    """A small ResNet, with BatchNorm, that classifies."""
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="basic", num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config)  # type: ignore[no-any-return]


def text_row(generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens, of which only the first ones are learned: how many differs from row to row."""
    ids = torch.randint(VOCABULARY, (SEQ_LEN,), generator=generator)
    learned = int(torch.randint(SEQ_LEN // 8, SEQ_LEN + 1, (1,), generator=generator))
    return {"input_ids": ids, "labels": torch.where(torch.arange(SEQ_LEN) < learned, ids, -100)}


def sentence_row(generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens and a class."""
    ids = torch.randint(VOCABULARY, (SEQ_LEN,), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (), generator=generator)}


def image_row(generator: torch.Generator) -> dict[str, Tensor]:
    """Pixels and a class."""
    pixels = torch.randn(3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (), generator=generator)}


CASES = {
    "gpt": Case(gpt, text_row, 128, 160, autoaccum.tokens("labels", shift=True)),
    "bert": Case(bert, sentence_row, 128, 128),
    "resnet": Case(resnet, image_row, 256, 96),
}


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def by_hand(case: Case, micro_batch: int, rows: Rows, turn: Turn) -> None:
    """The loop of many tutorials: every loss over the number of micro-batches, a step after so many."""
    model, steps = case.model(), -(-case.target_batch // micro_batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    turn()
    for index, batch in enumerate(endless(DataLoader(rows, micro_batch)), 1):  # type: ignore[arg-type, var-annotated]
        (model(**batch).loss / steps).backward()
        if index % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
            if not turn():
                return


def by_accelerate(case: Case, micro_batch: int, rows: Rows, turn: Turn) -> None:
    """`accelerator.accumulate`, as its documentation shows it."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=-(-case.target_batch // micro_batch), cpu=True)
    plain = case.model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, DataLoader(rows, micro_batch))  # type: ignore[arg-type, var-annotated]
    turn()
    for batch in endless(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and not turn():
            return


class _TellingCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Calls `turn` from inside the Trainer."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first optimizer step is about to begin."""
        self._turn()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step is over."""
        if not self._turn():
            control.should_training_stop = True


def by_trainer(case: Case, micro_batch: int, rows: Rows, turn: Turn) -> None:
    """Trainer with its own optimizer, which is the fused AdamW; nothing is logged, saved or clipped."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=-(-case.target_batch // micro_batch),
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_steps=10**6,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        callbacks = [_TellingCallback(turn)]
        trainer = transformers.Trainer(case.model(), arguments, train_dataset=rows, callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def by_plan(case: Case, plan: autoaccum.Plan | int, rows: Rows, turn: Turn) -> None:
    """`Accumulator` with a plan, or with micro-batches of at most so many rows."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sized: dict[str, Any] = {"micro_batch": plan} if isinstance(plan, int) else {"plan": plan}
    acc = autoaccum.Accumulator(model, optimizer, weight=case.weight, **sized)
    turn()
    for batch in endless(DataLoader(rows, case.target_batch)):  # type: ignore[arg-type, var-annotated]
        if not turn(acc.step(batch)):
            return


WAYS: dict[str, Callable[[Case, Any, Rows, Turn], None]] = {
    "plan, exact levers": by_plan,
    "plan, no levers": by_plan,
    "loop by hand": by_hand,
    "Trainer": by_trainer,
    "Accelerate": by_accelerate,
}


def gradient_error(name: str, way: str, micro_batch: int, count: int) -> float:
    """How far the gradient of `count` rows is from that of all of them in one, as a fraction of its norm.

    Rows of text have different numbers of labels. A count that is no multiple of `micro_batch` ends with a short one.
    """
    case = CASES[name]._replace(target_batch=count)
    rows = case.rows(count)
    expected = gradients_of(case, lambda seen: _in_one(seen, rows))
    found = gradients_of(case, lambda seen: WAYS[way](seen, micro_batch, rows, Ending()))
    squares = [((a - b).double().norm() ** 2, b.double().norm() ** 2) for a, b in zip(found, expected, strict=True)]
    above, below = (float(sum(parts)) for parts in zip(*squares, strict=True))
    return float((above / below) ** 0.5)


class Ending:
    """A turn that lets one optimizer step through."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, step: Any = None) -> bool:
        """True before the first step."""
        self._calls += 1
        return self._calls == 1


def _in_one(case: Case, rows: Rows) -> None:
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model(**next(iter(DataLoader(rows, len(rows))))).loss.backward()  # type: ignore[arg-type]
    optimizer.step()


def gradients_of(case: Case, train: Callable[[Case], None]) -> list[Tensor]:
    """The gradients of the model that `train` builds, as they are when the first optimizer step begins."""
    models: list[nn.Module] = []
    found: list[list[Tensor]] = []

    def build() -> nn.Module:
        models.append(case.build())
        return models[-1]

    def keep(*_: Any) -> None:
        found.append([p.grad.clone() for p in models[-1].parameters() if p.grad is not None])

    handle = register_optimizer_step_pre_hook(keep)
    try:
        train(case._replace(build=build))
    finally:
        handle.remove()
    return found[0]
