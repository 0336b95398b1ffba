"""How to put an optimizer back: its state, its parameter groups, and the counters that schedulers set."""

from __future__ import annotations

import copy

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoaccum.preserve.restoring import Restore

_COUNTERS = (int, float, str, type(None))  # plain attributes, such as the marks that learning rate schedulers set


def keep_optimizer(optimizer: Optimizer) -> Restore:
    """How to put this optimizer back as it is now, without the values of its tensors."""
    leaves, structure = tree_flatten(dict(optimizer.state))
    leaves = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    own_groups = list(optimizer.param_groups)
    groups = [dict(group, params=list(group["params"])) for group in own_groups]
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, _COUNTERS)}

    def put_back() -> None:
        fresh = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
        optimizer.state.clear()
        optimizer.state.update(tree_unflatten(fresh, structure))
        for group, before in zip(own_groups, groups, strict=True):
            group.clear()
            group.update(before, params=list(before["params"]))
        optimizer.param_groups[:] = own_groups
        for name in [name for name, value in vars(optimizer).items() if isinstance(value, _COUNTERS) and name not in plain]:
            delattr(optimizer, name)
        vars(optimizer).update(plain)

    return put_back
