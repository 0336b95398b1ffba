"""A plan in the words of TrainingArguments; what these cannot say is refused."""

from __future__ import annotations

from typing import Any

import transformers

from autoaccum.errors import InvalidRequestError
from autoaccum.plan import Plan


def training_keywords(plan: Plan) -> dict[str, Any]:
    """What `training_arguments` does once transformers is known to be there."""
    sizes = set(plan.micro_batch_sizes)
    if len(sizes) != 1 or plan.target_batch % plan.world_size:
        raise InvalidRequestError(
            f"the plan has micro-batches of {', '.join(map(str, sorted(sizes, reverse=True)))} rows, and TrainingArguments "
            "takes one number; make it with autotune(..., equal_micro_batches=True)."
        )
    found: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "auto_find_batch_size": False,
    }
    levers = plan.levers
    if levers.offload != "off":
        raise InvalidRequestError(_UNSAYABLE.format("offload='cpu'"))
    if levers.precision != "fp32":
        found[levers.precision] = True
    if levers.checkpointing != "off" and levers.checkpointed_blocks:
        new = "activation_checkpointing" in transformers.TrainingArguments.__dataclass_fields__
        name = "activation_checkpointing" if new else "gradient_checkpointing"
        found[name], found[f"{name}_kwargs"] = True, {"use_reentrant": False}
    if levers.optimizer_impl != "default":
        found |= _optimizer_keywords(plan)
    return found


_UNSAYABLE = (
    "the plan has {}, which TrainingArguments cannot say; use tune_trainer, which turns it while the trainer trains, "
    "or make the plan without."
)


def _optimizer_keywords(plan: Plan) -> dict[str, Any]:
    name = "" if plan.environment is None else plan.environment.optimizer
    device = "" if plan.environment is None else plan.environment.device
    if plan.levers.optimizer_impl == "fused" and name.startswith("AdamW"):
        return {"optim": "adamw_torch_fused"}
    if plan.levers.optimizer_impl == "foreach" and name.startswith("AdamW") and device.startswith("cuda"):
        return {"optim": "adamw_torch"}  # torch's own choice there
    raise InvalidRequestError(
        _UNSAYABLE.format(f"optimizer_impl={plan.levers.optimizer_impl!r} of {name or 'an optimizer'}")
    )
