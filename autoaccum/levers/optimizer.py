"""How the optimizer's step is implemented: one parameter after the other, in lists, or in one kernel."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.records import Levers

_FLAGS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


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
        if levers.optimizer_impl == "fused":
            _move_counters(optimizer)
        try:
            yield
        finally:
            for group, flags in before:
                group.update(flags)


def _uses_already(group: dict[str, Any], level: str, device: torch.device) -> bool:
    """`_default_to_fused_or_foreach` in torch/optim/optimizer.py: lists on accelerators, one by one elsewhere."""
    if group.get("fused"):
        return level == "fused"
    foreach = group.get("foreach")
    by_default = device.type != "cpu" and not group.get("differentiable")
    return level == ("foreach" if (by_default if foreach is None else foreach) else "for-loop")


def _reason_of_trial(optimizer: Optimizer, level: str) -> str | None:
    """Whether the optimizer takes one step of a few numbers so; on the device and in the type of its parameters."""
    kinds = {(p.device, p.dtype): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    tiny = copy.copy(optimizer)
    tiny.state = defaultdict(dict)
    parameters = [_tiny(parameter) for parameter in kinds.values() if parameter.device.type != "meta"]
    tiny.param_groups = [{**optimizer.param_groups[0], **_FLAGS[level], "params": parameters}]
    try:
        tiny.step()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return f"{type(optimizer).__name__} cannot: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


def _tiny(parameter: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(4, dtype=parameter.dtype, device=parameter.device))
    made.grad = torch.zeros_like(made)
    return made


def _move_counters(optimizer: Optimizer) -> None:
    """A step that was taken otherwise counts on the host, and the fused kernel reads the count on the device."""
    for parameter, state in optimizer.state.items():
        count = state.get("step")
        if isinstance(count, torch.Tensor) and count.device != parameter.device:
            state["step"] = count.to(parameter.device)
