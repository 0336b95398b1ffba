"""DeepSpeed: a plan as its configuration, with the three batch numbers that its engine checks against each other.

DeepSpeed itself is not needed to write one. The engine owns gradients and steps, so nothing is run or trained from here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.carrying import refuse_early, refuse_uneven, warn_of_levers
from autoaccum.plan import Plan

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_CASTING = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # blocks that cast the weights, by the precision they mean
_SPELLINGS = {"bf16": ("bf16", "bfloat16", "torch.bfloat16"), "fp16": ("fp16", "float16", "torch.float16", "half")}
_SHARING = ("tensor_parallel", "sequence_parallel_size")  # with these several ranks have one share of the batch
_REMEDY = "train without its engine, by autoaccum.Accumulator(model, optimizer, plan=plan)."


def deepspeed_config(plan: Plan, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize` that takes the optimizer steps of the plan.

    `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` are the plan's, for its number of
    ranks; DeepSpeed itself rounds down what is missing. The loader yields `plan.micro_batch` rows on each rank, and the loss
    is a mean over rows. By default the engine counts: `engine.step()` follows every `engine.backward(loss)`. With
    `"managed_gradient_accumulation": False` in `config` it does not: `engine.step()` follows after
    `plan.accumulation_steps` of them. (DeepSpeed before 0.19.4 ignores that key, and counts.)

    Precision becomes `torch_autocast`, which is what was measured: weights stay float32. (ZeRO over several ranks exchanges
    gradients of linear layers and convolutions in that type.) A `bf16` or `fp16` block casts the weights, and stays where
    the config has it. No other lever has a word there that means the same: `activation_checkpointing` is about calls of
    `deepspeed.checkpointing`, and offload moves optimizer state and weights, not activations. Run the loop inside
    `plan.applied(module, optimizer)` for those.

    The memory was measured without the engine. ZeRO's partitions need less of it, its buckets and casts need more.

    Args:
        plan: Equal micro-batches on all ranks. `world_size` are the ranks that share a batch, without tensor or sequence
            parallel ones.
        config: What else is wanted, such as `zero_optimization`; "auto" stands for a number of the plan's.

    Returns:
        A new dict; whatever the config says besides the three numbers is in it as it was.

    Raises:
        InvalidRequestError: When two numbers could not say the plan without rounding, with near targets; when the config has
            other batch numbers or another precision, naming both; when there are several ranks and the search was made for
            one, before they knew of each other.

    Leaves behind:
        Nothing; the config is not changed. Levers that are left are logged as a warning.

    Example:
        >>> import torch, autoaccum
        >>> plan = autoaccum.autotune(torch.nn.Linear(4, 2), torch.randn(2, 4), 64, levers="none", device="virtual:1MiB")
        >>> deepspeed_config(plan, {"train_batch_size": "auto", "zero_optimization": {"stage": 2}})["train_batch_size"]
        64
    """
    if not (config is None or isinstance(config, Mapping)):
        raise InvalidRequestError(f"config is a {type(config).__name__}; expected a dict: json.load the file first.")
    refuse_uneven(plan, "DeepSpeed", _REMEDY)
    if not set(_SHARING) & set(config or ()):
        refuse_early(plan, "call deepspeed.init_distributed() before the search, and tune on every rank.")
    made = copy.deepcopy(dict(config or {}))
    numbers = {
        "train_batch_size": plan.target_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
    }
    other = {name: made[name] for name in numbers if made.get(name) not in (None, "auto", numbers[name])}
    if other:
        raise InvalidRequestError(
            f"the config has {_listed(other)} and the plan has {_listed(numbers)} on world_size={plan.world_size}; remove "
            'what differs from the config or set it to "auto", or tune for what the config says.'
        )
    warn_of_levers(plan, tuple(_DTYPES))
    return made | numbers | _precision(plan, made)


def _precision(plan: Plan, config: Mapping[str, Any]) -> dict[str, Any]:
    """The block that autocasts as the plan does; none where the plan leaves it alone or the config has that precision."""
    wanted = plan.levers.precision
    if wanted not in _DTYPES:
        return {}
    blocks = {name: config[name] for name in ("torch_autocast", *_CASTING) if _is_on(config.get(name))}
    had = {name: _CASTING.get(name, str(block.get("dtype"))) for name, block in blocks.items()}
    differing = [name for name, precision in had.items() if precision not in _SPELLINGS[wanted]]
    if differing:
        raise InvalidRequestError(
            f"the config enables {differing[0]} ({had[differing[0]]}) and the plan turns precision to {wanted}; remove the "
            'block, or tune with levers="exact".'
        )
    return {} if blocks else {"torch_autocast": {"enabled": True, "dtype": _DTYPES[wanted]}}


def _is_on(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("enabled") is True


def _listed(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in numbers.items())
