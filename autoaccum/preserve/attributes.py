"""How to put back what an object holds in attributes of its own: tensors, counters and flags, generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoaccum.preserve.restoring import Restore, differs, refill

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def keep_held_tensors(own: dict[str, Any], skip: Collection[str]) -> Callable[[], bool]:
    """How to put back which tensors these attributes hold, by themselves or in lists and dicts, without their values.

    What is returned says whether there was anything to put back.

    Args:
        own: The attributes, as `vars` gives them.
        skip: Names that somebody else looks after.
    """
    attributes = _without(own, skip)
    had_tensors = {name for name, value in attributes.items() if _holds_tensors(value)}
    contents = _keep_contents(list(attributes.values()))

    def put_back() -> bool:
        differing = False
        for name in had_tensors.union(name for name, value in _without(own, skip).items() if _holds_tensors(value)):
            differing = differing or name not in attributes or own.get(name, _MISSING) is not attributes[name]
            if name in attributes:
                own[name] = attributes[name]
            else:
                del own[name]
        for put_contents_back in contents:
            differing = put_contents_back() or differing
        return differing

    return put_back


def keep_plain(own: dict[str, Any], skip: Collection[str]) -> Restore:
    """How to put back numbers, flags and texts: a mark that says "initialised", a step counter.

    Args:
        own: The attributes, as `vars` gives them.
        skip: Names that somebody else looks after.
    """
    names = set(own).difference(skip)
    plain = {name: own[name] for name in names if type(own[name]) in _PLAIN}

    def put_back() -> None:
        new = set(own).difference(names, skip)
        for name in [name for name in new if type(own[name]) in _PLAIN]:
            del own[name]
        own.update((name, value) for name, value in plain.items() if type(own.get(name)) in _PLAIN)

    return put_back


def generators_in(several: Iterable[dict[str, Any]]) -> list[Any]:
    """The random generators that these attributes hold, each once."""
    found = {id(one): one for own in several for value in own.values() for one in _generators(value)}
    return list(found.values())


def keep_generator(generator: Any) -> Restore:
    """How to put a generator of torch, numpy or python back as it is now."""
    if isinstance(generator, np.random.Generator):
        state = copy.deepcopy(generator.bit_generator.state)
        return partial(setattr, generator.bit_generator, "state", state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _generators(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _generators(part)


def _without(own: dict[str, Any], skip: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in skip}


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _keep_contents(nodes: Iterable[Any]) -> list[Callable[[], bool]]:
    """How to empty lists and dicts, nested ones as well, of the tensors that were put into them, and to refill them."""
    found: list[Callable[[], bool]] = []
    for node in nodes:
        if type(node) in (list, dict):
            found.append(partial(_put_contents_back, node, copy.copy(node)))
        if isinstance(node, (list, tuple, dict)):
            found += _keep_contents(node.values() if isinstance(node, dict) else node)
    return found


def _put_contents_back(node: Any, before: Any) -> bool:
    if not _holds_tensors(node) and not _holds_tensors(before):
        return False  # what is noted in a list, such as the sizes of batches, is a log of the user's
    if isinstance(node, dict):
        differing = differs(node, before)
        refill(node, before)
    else:
        differing = len(node) != len(before) or any(one is not other for one, other in zip(node, before, strict=True))
        node[:] = before
    return differing
