"""Which trainers cannot be tuned, and what to do instead. Touches nothing."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.trainer_utils import has_length

from autoaccum.errors import InvalidRequestError

# They step for every micro-batch, in the backward pass.
_STEPS_IN_BACKWARD = ("lomo", "adalomo")


def refuse_untunable(trainer: Any) -> None:
    """Refuse what is no trainer, or one whose effective batch or memory cannot be known before it trains.

    Raises:
        InvalidRequestError: With the reason and the remedy.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise InvalidRequestError(f"trainer is a {type(trainer).__name__}; expected a transformers.Trainer.")
    args: Any = trainer.args
    optim = str(getattr(args.optim, "value", args.optim))
    for is_so, reason in (
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True makes the micro-batch smaller when memory runs out and leaves the accumulation steps "
            "as they are, so the effective batch changes, and starts again from weights that have moved; "
            "use TrainingArguments(auto_find_batch_size=False): what is found here fits.",
        ),
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed shards the model inside train(), so what one process holds cannot be measured before; "
            "give DeepSpeed the numbers of a plan (autoaccum.integrations.deepspeed).",
        ),
        (
            trainer.is_fsdp_enabled or bool(args.fsdp),
            "FSDP shards the model inside train(), so what one process holds cannot be measured before; shard the model "
            "with torch.distributed.fsdp.fully_shard, call autotune on it, and pass training_arguments(plan).",
        ),
        (
            args.n_gpu > 1,
            f"this process sees {args.n_gpu} GPUs and would use torch.nn.DataParallel; start one process per GPU with "
            "torchrun, or let it see one GPU (CUDA_VISIBLE_DEVICES=0).",
        ),
        (
            getattr(trainer.accelerator, "parallelism_config", None) is not None,
            "a parallelism_config divides rows among ranks in its own way; call autotune on the model, with its ranks.",
        ),
        (
            bool(args.accelerator_config.split_batches) and args.world_size > 1,
            "accelerator_config has split_batches=True, which takes the batch size to be that of all ranks; set it to "
            "False.",
        ),
        (
            str(getattr(args, "train_sampling_strategy", "")) == "batch_rebalance",
            'train_sampling_strategy="batch_rebalance" makes micro-batches of other sizes than the one that is found; '
            'use "group_by_length" or "random".',
        ),
        (
            optim in _STEPS_IN_BACKWARD or optim.endswith("_layerwise"),
            f"optim={optim!r} steps in the backward pass of every micro-batch, which no accumulation can undo; "
            'use another one, such as "adafactor".',
        ),
    ):
        if is_so:
            raise InvalidRequestError(f"this trainer cannot be tuned: {reason}")


def refuse_without_data(trainer: Any) -> None:
    """Refuse a trainer without training data, or with none in it.

    Raises:
        InvalidRequestError: With the remedy.
    """
    overridden = type(trainer).get_train_dataloader is not transformers.Trainer.get_train_dataloader
    if overridden:
        return
    data = trainer.train_dataset
    if data is None or (has_length(data) and len(data) == 0):
        what = "the trainer has no training data" if data is None else "the trainer's train_dataset has 0 rows"
        raise InvalidRequestError(f"{what}; expected Trainer(train_dataset=...), whose rows are what is run.")
