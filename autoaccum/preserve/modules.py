"""How to put a module back: its registries, hooks and modes, and what else it holds."""

from __future__ import annotations

import copy
from typing import Any, final

from torch import nn

from autoaccum.preserve.attributes import keep_held_tensors, keep_plain
from autoaccum.preserve.restoring import Restore, differs, refill

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


@final
class KeptModule:
    """A module as it is now, without the modules inside it and the values of its tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        own = vars(module)
        # TorchScript has registries of its own kind, out of which nothing can be taken.
        self._registries = {name: dict(own[name]) for name in _REGISTRIES if isinstance(own.get(name), dict)}
        self._marks = {name: copy.copy(own[name]) for name in _MARKS if name in own}
        self._tensors = keep_held_tensors(own, _LOOKED_AFTER)
        is_wrapper = type(module).__module__.startswith(_WRAPPERS)
        self._plain: Restore = (lambda: None) if is_wrapper else keep_plain(own, _LOOKED_AFTER)

    def has_other_hooks(self) -> bool:
        """Whether hooks were registered or removed since."""
        return any(self._has_changed(name) for name in _HOOK_REGISTRIES)

    def put_back(self, *, whole: bool) -> None:
        """As it was.

        Args:
            whole: Counters, flags and texts in attributes too. They are in any case where other tensors are held than
                before: the length of a table of positions goes with the table.
        """
        has_other_tensors = any(self._has_changed(name) for name in _REGISTRIES if name not in _HOOK_REGISTRIES)
        for name, before in self._registries.items():
            refill(vars(self._module)[name], before)
        vars(self._module).update((name, copy.copy(mark)) for name, mark in self._marks.items())
        has_other_tensors = self._tensors() or has_other_tensors
        if whole or has_other_tensors:
            self._plain()

    def _has_changed(self, name: str) -> bool:
        return name in self._registries and differs(vars(self._module)[name], self._registries[name])


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What the module holds besides its registries: a remembered attention map there would keep a trial's memory alive."""
    return {name: value for name, value in vars(module).items() if name not in _LOOKED_AFTER}
