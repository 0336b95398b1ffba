"""From a ready trainer to a plan, and the plan's numbers into the trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from autoaccum.catching import Failure, attempted
from autoaccum.devices.base import Verdict
from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.trainer.few_rows import few_rows
from autoaccum.integrations.trainer.refusals import refuse_untunable, refuse_without_data
from autoaccum.integrations.trainer.scaling import Finding, examined, weighing_of, weighings_for
from autoaccum.integrations.trainer.training import Tuned, tuned_callback
from autoaccum.integrations.trainer.windows import Weighing
from autoaccum.integrations.trainer.workload import (
    TrainerStep,
    as_in_training,
    optimizer_of,
    refuse_other_batch_size,
    silenced,
    train_loader,
)
from autoaccum.levers.space import LEVERS
from autoaccum.plan import Plan
from autoaccum.preserve import random_states_kept
from autoaccum.ranks import Ranks
from autoaccum.tune import autotune

_COMPARED_NUMBERS = 10**9  # gradients of some batches, each in host memory: some ten seconds
_LOG = logging.getLogger("autoaccum")


def tune(
    trainer: Any, target_batch: int, *, levers: Any, weight: Any, check: bool, sample: Any, options: Mapping[str, Any]
) -> Plan:
    """What `tune_trainer` does once transformers is known to be there."""
    refuse_untunable(trainer)
    refuse_without_data(trainer)
    asked = None if weight is None else weighing_of(weight)
    earlier = tuned_callback(trainer)
    with ExitStack() as undo:
        if earlier is not None:
            earlier.take_off()
            undo.callback(earlier.put_on)
        data = train_loader(trainer) if sample is None else sample
        said: list[str] = []
        with silenced(trainer):
            plan = _searched(trainer, data, target_batch, _allowed(trainer, levers, said), options)
            weighing = _weighing(trainer, data, plan, asked, check, said)
        if trainer.args.dataloader_drop_last and plan.accumulation_steps > 1:
            said.append(
                "dataloader_drop_last=True drops a short micro-batch and not a short window: the last optimizer step of an "
                f"epoch may be of fewer than {target_batch} rows."
            )
        _put_in(trainer, plan, undo, is_own_data=sample is None)
        plan = msgspec.structs.replace(plan, warnings=(*plan.warnings, *said))
        for text in said:
            _LOG.warning(text)
        Tuned(trainer, plan, weighing).put_on()
        undo.pop_all()
    return plan


def _searched(trainer: Any, data: Any, target_batch: int, levers: Any, options: Mapping[str, Any]) -> Plan:
    with as_in_training(trainer):
        plan = autotune(
            trainer.model,
            data,
            target_batch,
            training_step=TrainerStep(trainer),
            optimizer=optimizer_of(trainer),
            levers=levers,
            equal_micro_batches=True,
            **options,
        )
    if plan.world_size != trainer.args.world_size:
        raise InvalidRequestError(
            f"the trainer has {trainer.args.world_size} ranks and torch.distributed {plan.world_size}; "
            "start the trainer's processes with torchrun or accelerate launch."
        )
    return plan


def _allowed(trainer: Any, levers: Any, said: list[str]) -> Any:
    """The levers that can be turned here."""
    if trainer.args.torch_compile and levers != "none":
        said.append("The model is compiled inside train(), where no lever can be turned; none was tried.")
        return "none"
    names = [levers] if isinstance(levers, str) else list(levers)
    if "all" not in names and "precision" not in names:
        return levers
    chosen = dict(levers) if isinstance(levers, Mapping) else {
        lever.name: list(lever.levels) for lever in LEVERS if levers == "all" or lever.name in names
    }  # fmt: skip
    if trainer.accelerator.mixed_precision in ("bf16", "fp16"):
        said.append(
            f"TrainingArguments has {trainer.accelerator.mixed_precision}=True already, so precision was not varied."
        )
        del chosen["precision"]
    else:
        given = chosen["precision"]
        asked = [given] if isinstance(given, str) else list(given)
        chosen["precision"] = [level for level in asked if level != "fp16"]
        if "fp16" in asked:
            said.append("fp16 needs a scaler that the trainer makes first of all: try it with TrainingArguments(fp16=True).")
        if not chosen["precision"]:
            del chosen["precision"]
    return chosen


def _weighing(trainer: Any, data: Any, plan: Plan, asked: Weighing | None, check: bool, said: list[str]) -> Weighing | None:
    """How the trainer's scaling is corrected, None where it needs none."""
    if not check:
        said.append("check=False: whether the trainer's accumulation is that of the big batch was not looked at.")
        return asked
    if plan.accumulation_steps == 1 and asked is None:
        return None  # every window is one micro-batch
    finding = _agreed(trainer, data, plan, asked)
    weighing = finding.weighing
    left = (
        "which was measured to be exact"
        if finding.is_exact
        else f"which leaves an error of {finding.left:.1g}, more than rounding: has the loss a term of the whole batch, "
        "such as the balance of experts?"
    )
    if weighing is not None:
        said.append(
            f"{type(trainer.model).__name__} in this trainer accumulates another gradient than that of the big batch: wrong "
            f"by {finding.error:.2g} over {finding.num_parts} uneven micro-batches, {finding.norm_ratio:.3f} times as long. "
            f"While it trains, each micro-batch's loss is weighted by {weighing.name}, {left}."
        )
    elif not finding.is_exact:
        said.append(f"The trainer's own accumulation is taken as it is, {left}")
    if weighing is None and trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
        said.append(
            "average_tokens_across_devices=False: each rank's tokens are averaged on their own, so ranks with fewer tokens "
            "weigh as much as others; set it to True for the gradient of the big batch."
        )
    return weighing


def _agreed(trainer: Any, data: Any, plan: Plan, asked: Weighing | None) -> Finding:
    """One finding for all ranks, that of the first one which found its trainer wrong."""
    ranks = Ranks()
    try:
        finding, known = _found(trainer, data, plan.micro_batch, asked)
    except Exception as error:
        ranks.gather(None, f"{type(error).__name__}: {error}"[:500])
        raise
    names = ranks.gather(None if finding.weighing is None else finding.weighing.name)
    wanted = next((name for name in names if name is not None), None)
    return finding._replace(weighing=next((one for one in known if one.name == wanted), None))


def _found(trainer: Any, data: Any, at_most: int, asked: Weighing | None) -> tuple[Finding, list[Weighing]]:
    """What was measured of a few rows, of two where more do not fit, and what they may be weighted by."""
    shifts = bool(getattr(trainer, "_loss_shifts_labels", False))
    trainable = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    most = max(2, _COMPARED_NUMBERS // max(1, trainable))
    for count in (at_most, 2):
        with random_states_kept():
            several = few_rows(data, count)[:most]
        known = weighings_for(several[0].whole, shifts) if asked is None else [asked]
        finding = attempted(partial(examined, trainer, several, known), (Verdict.TOO_LARGE,))
        if not isinstance(finding, Failure):
            return finding, known
        finding.forget()
    raise InvalidRequestError(
        "two rows without levers do not fit, so the scaling of the loss could not be checked; pass check=False, and weight= "
        "where the loss is a mean that the trainer does not scale."
    )


def _put_in(trainer: Any, plan: Plan, undo: ExitStack, *, is_own_data: bool) -> None:
    """Give the trainer the plan's numbers."""
    args = trainer.args
    before = (args.per_device_train_batch_size, args.gradient_accumulation_steps, trainer._train_batch_size)

    def put_back() -> None:
        args.per_device_train_batch_size, args.gradient_accumulation_steps, trainer._train_batch_size = before

    undo.callback(put_back)
    args.per_device_train_batch_size = plan.micro_batch
    args.gradient_accumulation_steps = plan.accumulation_steps
    trainer._train_batch_size = args.train_batch_size
    if is_own_data:
        refuse_other_batch_size(trainer)
