"""How to put a module back: its registries, hooks and modes, and what else it holds that keeps tensors alive."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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


def keep_module(module: nn.Module) -> Restore:
    """How to put this module back as it is now, without the modules inside it and the values of its tensors."""
    registries = {name: dict(vars(module)[name]) for name in _REGISTRIES if name in vars(module)}
    marks = {name: copy.copy(vars(module)[name]) for name in _MARKS if name in vars(module)}
    attributes = plain_attributes(module)
    had_tensors = {name for name, value in attributes.items() if _holds_tensors(value)}
    contents = _keep_contents(list(attributes.values()))

    def put_back() -> None:
        for name, before in registries.items():
            refill(vars(module)[name], before)
        vars(module).update((name, copy.copy(mark)) for name, mark in marks.items())
        for name in had_tensors.union(name for name, value in plain_attributes(module).items() if _holds_tensors(value)):
            if name in attributes:
                object.__setattr__(module, name, attributes[name])
            else:
                del vars(module)[name]  # `delattr` would take a parameter of that name that has just been put back
        for put_contents_back in contents:
            put_contents_back()

    return put_back


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What the module holds besides its registries: a remembered attention map there would keep a trial's memory alive."""
    return {name: value for name, value in vars(module).items() if name not in (*_REGISTRIES, *_MARKS)}


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _keep_contents(nodes: Iterable[Any]) -> list[Restore]:
    """How to empty lists and dicts, nested ones as well, of the tensors that were put into them, and to refill them."""
    found: list[Restore] = []
    for node in nodes:
        if type(node) in (list, dict):
            found.append(partial(_put_contents_back, node, copy.copy(node)))
        if isinstance(node, (list, tuple, dict)):
            found += _keep_contents(node.values() if isinstance(node, dict) else node)
    return found


def _put_contents_back(node: Any, before: Any) -> None:
    if not _holds_tensors(node) and not _holds_tensors(before):
        return  # numbers and names are the user's business
    if isinstance(node, dict):
        refill(node, before)
    else:
        node[:] = before
