"""How to put a module back: its registries, hooks and modes, and what else it holds."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from autoaccum.preserve.attributes import keep_held_tensors, keep_plain
from autoaccum.preserve.restoring import Restore, refill

# The module's own registries of hooks, in torch.nn.Module.__init__.
_HOOK_REGISTRIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOK_REGISTRIES)
# What registering and removing leaves in a module besides: the mode, names of buffers, which kind of hook is in use.
_MARKS = ("training", "_non_persistent_buffers_set", "_is_full_backward_hook")
_LOOKED_AFTER = (*_REGISTRIES, *_MARKS)
# Wrappers of torch's own, whose attributes say what their machinery has done already.
_WRAPPERS = ("torch.nn.parallel", "torch._dynamo")


def keep_module(module: nn.Module) -> Restore:
    """How to put this module back as it is now, without the modules inside it and the values of its tensors."""
    # TorchScript has registries of its own kind, out of which nothing can be taken.
    registries = {name: dict(vars(module)[name]) for name in _REGISTRIES if isinstance(vars(module).get(name), dict)}
    marks = {name: copy.copy(vars(module)[name]) for name in _MARKS if name in vars(module)}
    tensors = keep_held_tensors(vars(module), _LOOKED_AFTER)

    def put_back() -> None:
        for name, before in registries.items():
            refill(vars(module)[name], before)
        vars(module).update((name, copy.copy(mark)) for name, mark in marks.items())
        tensors()

    return put_back


def keep_own_state(module: nn.Module) -> Restore:
    """How to put back the counters, flags and texts that the module keeps in attributes, which steps may change."""
    if type(module).__module__.startswith(_WRAPPERS):
        return lambda: None
    return keep_plain(vars(module), _LOOKED_AFTER)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What the module holds besides its registries: a remembered attention map there would keep a trial's memory alive."""
    return {name: value for name, value in vars(module).items() if name not in _LOOKED_AFTER}
