"""Hugging Face Accelerate: its own accumulation set to a plan, where that trains exactly what the plan says.

`autotune` and `Accumulator` take what an `Accelerator` has prepared and need nothing from here. This file is for loops that
stay inside `accelerator.accumulate`. It prepares, runs and steps nothing.
"""

from __future__ import annotations

from typing import Any

from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.carrying import refuse_early, refuse_uneven, warn_of_levers
from autoaccum.integrations.frameworks import framework
from autoaccum.plan import Plan

_PRECISIONS = ("bf16", "fp16")  # Accelerate has no word for TF32
_REMEDY = "train with autoaccum.Accumulator(model, optimizer, plan=plan), which weighs every micro-batch."


def accelerator_kwargs(plan: Plan) -> dict[str, Any]:
    """What `Accelerator(**accelerator_kwargs(plan))` needs to accumulate as the plan says, inside `accelerator.accumulate`.

    That divides every loss by the number of steps. It is exact for losses that are means over rows, in micro-batches of
    `plan.micro_batch` rows each: `DataLoader(..., batch_size=plan.micro_batch, drop_last=True)`, prepared without
    `split_batches`. For means over tokens, uneven micro-batches and short last windows use `Accumulator`. Windows go on from
    one pass over the data into the next, because Accelerate would take a short one for a whole one.

    Args:
        plan: Equal micro-batches on all ranks; for as many ranks as will run.

    Returns:
        `gradient_accumulation_plugin`, and `mixed_precision` where the plan turns that.

    Raises:
        InvalidRequestError: When `accelerator.accumulate` could not train this plan exactly, with near targets; when there
            are several ranks and the search was made for one, before they knew of each other.
        MissingExtraError: When Accelerate is not installed, or too old.

    Leaves behind:
        Nothing. Levers that Accelerate has no word for are logged as a warning: `plan.applied(model, optimizer)` around the
        loop turns them.

    Example:
        >>> import torch, autoaccum
        >>> limits = {"max_micro_batch": 2, "levers": "none", "device": "virtual:1MiB"}
        >>> plan = autoaccum.autotune(torch.nn.Linear(4, 2), torch.randn(2, 4), 8, **limits)
        >>> accelerator_kwargs(plan)["gradient_accumulation_plugin"].num_steps
        4
    """
    accelerate = framework("accelerate")
    refuse_uneven(plan, "accelerator.accumulate", _REMEDY)
    refuse_early(plan, "make the Accelerator before the search, and call follow_plan(accelerator, plan).")
    warn_of_levers(plan, _PRECISIONS)
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=plan.accumulation_steps, sync_with_dataloader=False)
    precision = {"mixed_precision": plan.levers.precision} if plan.levers.precision in _PRECISIONS else {}
    return {"gradient_accumulation_plugin": plugin, **precision}


def follow_plan(accelerator: Any, plan: Plan) -> None:
    """Let an `Accelerator` that is already there accumulate as the plan says; see `accelerator_kwargs`.

    For a loop inside `accelerator.accumulate`. An `Accumulator` needs none of it: it scales by itself, whatever number the
    accelerator has.

    Args:
        accelerator: Between two windows, with as many processes as the plan has ranks.
        plan: Equal micro-batches on all ranks.

    Raises:
        InvalidRequestError: When the accelerator is in the middle of a window, has another number of processes or another
            precision, or could not train this plan exactly.

    Leaves behind:
        `gradient_accumulation_steps` is the plan's, windows go on into the next pass over the data, and the count of
        micro-batches is 0.

    Example:
        >>> plan = autoaccum.autotune(model, loader, 256, equal_micro_batches=True)  # doctest: +SKIP
        >>> follow_plan(accelerator, plan)  # doctest: +SKIP
    """
    wanted = accelerator_kwargs(plan)
    if not accelerator.sync_gradients:
        raise InvalidRequestError(
            "the accelerator is in the middle of a window (sync_gradients is False); call follow_plan before its first "
            "micro-batch, outside of accelerator.accumulate()."
        )
    if accelerator.num_processes != plan.world_size:
        raise InvalidRequestError(
            f"the plan is for world_size={plan.world_size} and the accelerator has {accelerator.num_processes} processes; "
            "tune on every one of them, after the accelerator was made."
        )
    precision = wanted.get("mixed_precision", accelerator.mixed_precision)
    if precision != accelerator.mixed_precision:
        raise InvalidRequestError(
            f"the plan turns precision to {precision!r} and the accelerator has {accelerator.mixed_precision!r}, which it "
            f"keeps from its start; make it with mixed_precision={precision!r} and tune again, or use an Accumulator."
        )
    accelerator.gradient_state.plugin_kwargs.update(wanted["gradient_accumulation_plugin"].to_kwargs())
    accelerator.step = 0
