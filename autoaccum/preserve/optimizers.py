"""How to put an optimizer back: its state, its parameter groups, what else it holds, and the optimizers inside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoaccum.preserve.attributes import keep_held_tensors, keep_plain
from autoaccum.preserve.restoring import Restore

_LOOKED_AFTER = ("state", "param_groups", "defaults")


def optimizers_in(optimizer: Optimizer | None) -> list[Optimizer]:
    """The optimizer and those it holds, each once: Lookahead, SAM and ZeRO step another one."""
    found: dict[int, Optimizer] = {}
    waiting = [] if optimizer is None else [optimizer]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += _optimizers(list(own_attributes(one).values()))
    return list(found.values())


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer holds besides its state and groups."""
    return {name: value for name, value in vars(optimizer).items() if name not in _LOOKED_AFTER}


def keep_optimizer(optimizer: Optimizer) -> Restore:
    """How to put this optimizer back as it is now, without the values of its tensors."""
    leaves, structure = tree_flatten(dict(optimizer.state))
    leaves = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    own_groups = list(optimizer.param_groups)
    groups = [dict(group, params=list(group["params"])) for group in own_groups]
    tensors = keep_held_tensors(vars(optimizer), _LOOKED_AFTER)
    plain = keep_plain(vars(optimizer), _LOOKED_AFTER)  # counters, such as the marks that learning rate schedulers set

    def put_back() -> None:
        fresh = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
        optimizer.state.clear()
        optimizer.state.update(tree_unflatten(fresh, structure))
        for group, before in zip(own_groups, groups, strict=True):
            group.clear()
            group.update(before, params=list(before["params"]))
        optimizer.param_groups[:] = own_groups
        tensors()
        plain()

    return put_back


def _optimizers(values: list[Any]) -> Iterator[Optimizer]:
    for value in values:
        if isinstance(value, Optimizer):
            yield value
        elif type(value) in (list, tuple, dict):
            yield from _optimizers(list(value.values() if isinstance(value, dict) else value))
