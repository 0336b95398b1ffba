"""The rows on which a trainer's scaling is looked at: unlike ones, so that what is weighed wrongly is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autoaccum import InvalidRequestError, Plan
from autoaccum.integrations.transformers import tune_trainer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from autoaccum.integrations.trainer.few_rows import few_rows  # noqa: E402 - needs transformers

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


class Classifier(nn.Module):
    """The usual head, and a limit above which it runs out of memory while it is looked at."""

    def __init__(self, error: Callable[[], Exception] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.error = nn.Linear(6, 4), error

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.error is not None and len(x) > (3 if self.training else 2):
            raise self.error()
        return {"loss": F.cross_entropy(self.layer(x), labels), "logits": self.layer(x)}


def rows_of(labels: list[int]) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, generator=random), "labels": label} for label in labels]


def trainer_of(kind: type[Any], labels: list[int], folder: Path, model: nn.Module | None = None, **given: Any) -> Any:
    settings = transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, max_steps=1
    )
    return kind(Classifier() if model is None else model, settings, train_dataset=rows_of(labels), **given)


def tuned(trainer: Any, micro_batch: int) -> Plan:
    return tune_trainer(
        trainer,
        12,
        device="virtual:64MiB",
        levers="none",
        max_micro_batch=micro_batch,
        multiple_of=micro_batch,
        time_budget_s=0.01,
        progress=False,
    )


class WeighsClasses(transformers.Trainer):  # type: ignore[misc,name-defined]
    weights = torch.tensor([1.0, 1.0, 1.0, 9.0])

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return F.cross_entropy(model(**inputs)["logits"], inputs["labels"], weight=self.weights)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "labels",
    [[3 * (index % 10 == 5) for index in range(40)], [index % 3 if index % 9 else 3 for index in range(1, 64)]],
    ids=["a tenth of another class", "three classes alike and one unlike"],
)
def test_weighted_classes_are_found_where_one_is_rare(labels: list[int], micro_batch: int, tmp_path: Path) -> None:
    """Among rows of which nearly all weigh the same, those that do not are looked at, however small the micro-batch."""
    with pytest.raises(InvalidRequestError, match="no known weight of micro-batches makes it right"):
        tuned(trainer_of(WeighsClasses, labels, tmp_path), micro_batch)


def test_rows_hold_every_class_and_overlap() -> None:
    """Twelve classes are in batches of two rows, each of which begins with the last row of the one before."""
    data = rows_of([index // 3 for index in range(36)])
    found = few_rows(DataLoader(data, batch_size=4, collate_fn=transformers.default_data_collator), 2)  # type: ignore[arg-type]
    pairs = [batch.whole["labels"].tolist() for batch in found]
    assert {label for pair in pairs for label in pair} == set(range(12))
    assert [pair[1] for pair in pairs[:-1]] == [pair[0] for pair in pairs[1:]]


class AddsAnotherTerm(transformers.Trainer):  # type: ignore[misc,name-defined]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        mean = outputs["logits"].softmax(-1).mean(0)  # as the balance of experts: of the whole batch
        return outputs["loss"] + 0.02 * (mean * mean.log()).sum()


def test_small_term_of_the_whole_batch_is_said(tmp_path: Path) -> None:
    """An error above rounding and below what is refused is in the plan as it was measured, not called exact."""
    plan = tuned(trainer_of(AddsAnotherTerm, [index % 4 for index in range(48)], tmp_path), 4)
    said = [text for text in plan.warnings if "more than rounding" in text]
    assert len(said) == 1 and "leaves an error of" in said[0] and "exact" not in said[0]


@pytest.mark.parametrize(
    "error",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["class", "host", "cublas"],
)
def test_look_that_runs_out_of_memory_takes_two_rows(error: Callable[[], Exception], tmp_path: Path) -> None:
    """In any spelling: what trains with levers may not fit without, and two rows tell as well."""
    plan = tuned(trainer_of(transformers.Trainer, [index % 4 for index in range(48)], tmp_path, Classifier(error)), 3)
    assert plan.micro_batch == 3


class Logs(transformers.Trainer):  # type: ignore[misc,name-defined]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs)["loss"]
        self.log({"seen": float(loss.detach())})
        return loss


class Hears(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        self.logs: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.logs.append(logs)


def test_nothing_is_logged_by_a_search(tmp_path: Path) -> None:
    """What `compute_loss` logs reaches callbacks and history while it trains, and neither while it is tuned."""
    hears = Hears()
    trainer = trainer_of(Logs, [index % 4 for index in range(48)], tmp_path, callbacks=[hears])
    tuned(trainer, 3)
    assert hears.logs == [] and trainer.state.log_history == []
    trainer.train()
    assert any("seen" in logs for logs in hears.logs)
