"""What of a plan the Trainer's own settings can carry, and which levers may be turned beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.carrying import all_sizes
from autoaccum.levers import LEVERS, check_asked
from autoaccum.plan import Plan

_PRECISION = {"fp32": {}, "bf16": {"precision": "bf16-mixed"}, "fp16": {"precision": "16-mixed"}}

_LEVERS_HERE = {lever.name: lever.levels for lever in LEVERS if lever.name != "precision"}


def trainer_kwargs(plan: Plan) -> dict[str, Any]:
    """The plan as keywords of `lightning.pytorch.Trainer`, for a loader that yields micro-batches of `plan.micro_batch`.

    Lightning itself then weighs the last, shorter window of an epoch too little, and tokens wrongly where micro-batches have
    different numbers of them; `AutoAccum(plan=plan)` in the trainer's callbacks does not, and takes any plan.

    Raises:
        InvalidRequestError: When micro-batches differ in size, or a lever is on that Trainer cannot turn.

    Example:
        >>> import torch, autoaccum
        >>> model, sample = torch.nn.Linear(4, 2), torch.randn(2, 4)
        >>> plan = autoaccum.autotune(model, sample, 10, max_micro_batch=5, device="virtual:1MiB", levers="none")
        >>> trainer_kwargs(plan)
        {'accumulate_grad_batches': 2}
    """
    sizes = all_sizes(plan)
    if len(sizes) > 1:
        raise InvalidRequestError(
            f"the plan's micro-batches have {sizes[0]} to {sizes[-1]} rows, and Trainer counts them as equal; call "
            "autotune with equal_micro_batches=True, or use the callback AutoAccum(plan=plan)."
        )
    levers = plan.levers
    if levers.precision not in _PRECISION:
        raise InvalidRequestError(
            f"precision={levers.precision!r} is no precision of Trainer; call torch.set_float32_matmul_precision('high') "
            "and tune again."
        )
    others = [name for name in _LEVERS_HERE if getattr(levers, name) not in ("off", "default")]
    if others:
        raise InvalidRequestError(
            f"Trainer cannot turn {', '.join(others)}, without which the plan may not fit; use the callback "
            "AutoAccum(plan=plan), or tune with levers='precision' or 'none'."
        )
    return {"accumulate_grad_batches": plan.accumulation_steps, **_PRECISION[levers.precision]}


def levers_here(levers: Any) -> dict[str, Any]:
    """The levers that may be turned beside a Trainer, whose precision is its own, with their levels."""
    check_asked(levers)
    named = {levers} if isinstance(levers, str) else set(levers)
    if named & {"precision", "all"}:
        raise InvalidRequestError(
            f"levers={levers!r} would turn the precision, which the trainer sets: Trainer(precision='bf16-mixed'). Expected "
            f"'exact', 'none', or some of {', '.join(_LEVERS_HERE)}."
        )
    if isinstance(levers, Mapping):
        return dict(levers)
    return {name: levels for name, levels in _LEVERS_HERE.items() if named & {"exact", name}}
