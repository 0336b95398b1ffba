"""How the optimizer's step is implemented: one parameter after the other, in lists, or in one kernel."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.records import Levers
from autoaccum.shards import distributed_as, local_part

_FLAGS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}

_UNSCALES = "_step_supports_amp_scaling"


@final
class OptimizerImpl(AbstractLever):
    """The step's implementation: "foreach" needs a temporary as large as the weights, "fused" needs none.

    Leaves behind: where the fused step needs its counters on the device, they stay there, with the same values.
    """

    name: ClassVar[str] = "optimizer_impl"
    levels: ClassVar[tuple[str, ...]] = ("default", "for-loop", "foreach", "fused")

    def reason_against(self, level: str, subject: Subject) -> str | None:
        optimizer = subject.optimizer
        if level == "default" or optimizer is None:
            return None
        name = type(optimizer).__name__
        wanted = _FLAGS[level]
        missing = [flag for flag, value in wanted.items() if value and flag not in optimizer.defaults]
        if missing or "foreach" not in optimizer.defaults:
            return f"{name} has no {level} implementation"
        if all(_uses_already(group, level, subject.device) for group in optimizer.param_groups):
            return f"{name} uses it already"
        if level == "fused" and _has_sparse_gradients(subject.module):
            return "gradients of the embeddings are sparse, which fused steps refuse"
        return _reason_of_trial(optimizer, level)

    @contextmanager
    def applied(self, levers: Levers, subject: Subject) -> Iterator[None]:
        optimizer = subject.optimizer
        if levers.optimizer_impl == "default" or optimizer is None:
            yield
            return
        wanted = _FLAGS[levers.optimizer_impl]
        before = [(group, {flag: group[flag] for flag in wanted if flag in group}) for group in optimizer.param_groups]
        for group, flags in before:
            group.update({flag: wanted[flag] for flag in flags})
        # A fused step unscales gradients itself, which its constructor tells GradScaler; the others cannot.
        marks = {_UNSCALES: vars(optimizer)[_UNSCALES]} if _UNSCALES in vars(optimizer) else {}
        try:
            if levers.optimizer_impl == "fused":
                _move_counters(optimizer)
            else:
                vars(optimizer).update(dict.fromkeys(marks, False))
            yield
        finally:
            vars(optimizer).update(marks)
            for group, flags in before:
                group.update(flags)


def _uses_already(group: dict[str, Any], level: str, device: torch.device) -> bool:
    """`_default_to_fused_or_foreach` in torch/optim/optimizer.py: lists on accelerators, one by one elsewhere."""
    if group.get("fused"):
        return level == "fused"
    foreach = group.get("foreach")
    by_default = device.type != "cpu" and not group.get("differentiable")
    return level == ("foreach" if (by_default if foreach is None else foreach) else "for-loop")


def _has_sparse_gradients(module: nn.Module) -> bool:
    return any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse for part in module.modules())


_PLAIN = (int, float, str, tuple, type(None))


def _reason_of_trial(optimizer: Optimizer, level: str) -> str | None:
    """Whether the optimizer takes one step of a few numbers so; on the device and in the type of its parameters."""
    kinds = {(p.device, p.dtype): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    tiny = copy.copy(optimizer)
    # Optimizers copy their groups and state only; classes that derive from torch's step with attributes of their own.
    vars(tiny).update({name: v for name, v in vars(optimizer).items() if name not in vars(tiny) and isinstance(v, _PLAIN)})
    parameters = {_tiny(parameter): parameter for parameter in kinds.values() if parameter.device.type != "meta"}
    # Some make their state when they are made (Adagrad until torch 2.6), so that there must be some.
    tiny.state = defaultdict(dict, {made: _tiny_state(optimizer.state, whole) for made, whole in parameters.items()})
    tiny.param_groups = [{**optimizer.param_groups[0], **_FLAGS[level], "params": list(parameters)}]
    try:
        tiny.step()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return f"{type(optimizer).__name__} cannot: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


def _tiny(parameter: torch.Tensor) -> nn.Parameter:
    # Distributed as the parameter is: not every operation knows what to do with that.
    made = nn.Parameter(distributed_as(parameter, torch.zeros_like(_first(local_part(parameter.detach())))))
    made.grad = torch.zeros_like(made)
    return made


def _tiny_state(states: Mapping[Any, dict[str, Any]], parameter: torch.Tensor) -> dict[str, Any]:
    """What the optimizer holds for this parameter, for the first few of its numbers."""
    found = dict(states[parameter]) if parameter in states else {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            here = local_part(value.detach())
            found[name] = distributed_as(value, _first(here) if value.shape == parameter.shape else here.clone())
    return found


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """A few of its numbers, in as many dimensions."""
    return tensor[tuple(slice(2) for _ in tensor.shape)].clone()


def _move_counters(optimizer: Optimizer) -> None:
    """A step that was taken otherwise counts on the host, and the fused kernel reads the count on the device."""
    for parameter, state in optimizer.state.items():
        count = state.get("step")
        if isinstance(count, torch.Tensor) and count.device != parameter.device:
            state["step"] = count.to(parameter.device)
