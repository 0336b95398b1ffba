"""Hugging Face Trainer: tune one that is ready, or give a plan's numbers to its arguments.

Here are the arguments and their meaning; what is done is in the folder `trainer`, which needs transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from autoaccum.batches.weights import Tokens
from autoaccum.devices.base import AbstractDevice
from autoaccum.integrations.frameworks import framework
from autoaccum.plan import Plan

if TYPE_CHECKING:
    from transformers import Trainer


def tune_trainer(
    trainer: Trainer,
    target_batch: int,
    *,
    budget: int | str | None = None,
    device: str | torch.device | AbstractDevice | None = None,
    levers: str | Sequence[str] | Mapping[str, Any] = "exact",
    objective: Literal["throughput", "memory"] = "throughput",
    weight: str | Tokens | Callable[[Any], float] | None = None,
    check: bool = True,
    sample: Any = None,
    max_micro_batch: int | None = None,
    multiple_of: int = 1,
    time_budget_s: float | None = None,
    storage: Any = None,
    cache: str | Path | None = None,
    progress: bool | None = None,
) -> Plan:
    """Find how this trainer takes optimizer steps of `target_batch` rows inside the budget, and set it up so.

    What is run is what the trainer runs: its data and collator (the longest rows looked at), its `compute_loss`, its label
    smoothing, its autocast and checkpointing, the optimizer that it has or would make.

    Then its accumulation is measured: the gradient of a few of its rows as an uneven window, against that of the same rows
    as one batch. With many heads other than causal language models transformers multiplies gradients by the number of
    steps, as with a `compute_loss` that ignores `num_items_in_batch`. Where it is wrong it is corrected while the trainer
    trains, measured again, and `plan.warnings` says so; where nothing known makes it right, it is refused.

    Args:
        trainer: A `transformers.Trainer`. Its model and optimizer are left as they were, bit for bit.
        target_batch: Rows per optimizer step over all ranks, a multiple of their number.
        budget, device, objective, max_micro_batch, multiple_of, time_budget_s, storage, cache, progress: As for `autotune`.
        levers: As for `autotune`; "exact" keeps the numerics. Turned inside `train()` only.
        weight: What the loss is a mean over, where that cannot be found: "samples", `tokens("labels")`, or
            `micro_batch -> number`. None: measured.
        check: False takes the accumulation as it is, or as `weight` says, unmeasured.
        sample: What to run instead of the trainer's own data, as for `autotune`, where its `get_train_dataloader` gives no
            `DataLoader`; what that gives has to be micro-batches of `args.per_device_train_batch_size` rows.

    Returns:
        The `Plan`, with equal micro-batches. Call on every rank; every rank gets its own.

    Raises:
        MissingExtraError: When transformers is missing or too old.
        InvalidRequestError: When the trainer has no data, uses `auto_find_batch_size`, DeepSpeed or FSDP, when its
            accumulation is inexact and cannot be corrected, or when the call cannot be satisfied as written.
        NothingFitsError: When the smallest micro-batch does not fit.
        Exception: Whatever the model, loss, collator or optimizer raises, unchanged.

    Leaves behind:
        `args.per_device_train_batch_size` and `args.gradient_accumulation_steps`, whose product over all ranks is
        `target_batch`; a callback; and wrappers of `train`, `get_batch_samples` and, where the scaling is corrected,
        `training_step` and `compute_loss` on this one trainer. A window that the end of data without a length cuts short is
        filled up from the next pass. The last window of an epoch of data with a length stays as short as the data makes it.
        After an error the trainer is as it was.

    Example:
        >>> from transformers import Trainer
        >>> def ready(trainer: Trainer):
        ...     plan = tune_trainer(trainer, 64, budget="8GiB")
        ...     trainer.train()
        ...     return plan
    """
    framework("transformers")
    from autoaccum.integrations.trainer.tuning import tune

    options = {
        "budget": budget,
        "device": device,
        "objective": objective,
        "max_micro_batch": max_micro_batch,
        "multiple_of": multiple_of,
        "time_budget_s": time_budget_s,
        "storage": storage,
        "cache": cache,
        "progress": progress,
    }
    return tune(trainer, target_batch, levers=levers, weight=weight, check=check, sample=sample, options=options)


def training_arguments(plan: Plan) -> dict[str, Any]:
    """The plan as keywords for `transformers.TrainingArguments`.

    Checkpointing of any kind becomes that of all layers, which takes no more memory. Whether the trainer's accumulation is
    exact is not looked at here: `tune_trainer` does.

    Args:
        plan: With equal micro-batches on all ranks: `autotune(..., equal_micro_batches=True)`.

    Raises:
        MissingExtraError: When transformers is missing or too old.
        InvalidRequestError: When the plan's micro-batches are not equal, or it has a lever that the arguments cannot say.

    Leaves behind:
        Nothing.

    Example:
        >>> import torch, autoaccum
        >>> model, sample = torch.nn.Linear(4, 2), torch.randn(2, 4)
        >>> settings = {"equal_micro_batches": True, "levers": "none"}
        >>> plan = autoaccum.autotune(model, sample, 10, device="virtual:1MiB", **settings)
        >>> training_arguments(plan)
        {'per_device_train_batch_size': 10, 'gradient_accumulation_steps': 1, 'auto_find_batch_size': False}
    """
    framework("transformers")
    from autoaccum.integrations.trainer.arguments import training_keywords

    return training_keywords(plan)
