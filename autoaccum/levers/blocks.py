"""The repeated blocks of a model: found, not configured."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autoaccum.errors import InvalidRequestError
from autoaccum.units import shown

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Block(NamedTuple):
    """A part of the model that can be computed again on its own."""

    name: str
    module: nn.Module


def find_blocks(model: nn.Module, names: Sequence[str] = ()) -> list[Block]:
    """The blocks of a model, in the order in which they are registered, which is nearly always the order in which they run.

    Layers that transformers marks as such; else the outermost members of lists and sequences that have parts of their own
    and whose class occurs at least twice: transformer blocks, residual blocks of all stages. Sequences in sequences are
    stages, unless nothing inside of them is repeated.

    Args:
        names: The caller's own list, as `named_modules` names them.

    Raises:
        InvalidRequestError: When the model has no module of such a name, or one lies inside another.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)), nn.Linear(4, 1))
        >>> [block.name for block in find_blocks(model)]
        ['0', '1', '2']
    """
    if names:
        return _named(model, names)
    marked = _marked_layers(model)
    if marked:
        return marked
    inner = _repeated([block for block in _members(model, "", through_sequences=True) if _can_be_block(block.module)])
    return inner or _repeated(
        [block for block in _members(model, "", through_sequences=False) if _can_be_block(block.module)]
    )


def _named(model: nn.Module, names: Sequence[str]) -> list[Block]:
    known = dict(model.named_modules())
    missing = [name for name in names if name not in known or not name]
    if missing:
        raise InvalidRequestError(
            f"the model has no block {shown(missing[0])}; expected names as model.named_modules() has them."
        )
    nested = [name for name in names for other in names if name.startswith(f"{other}.")]
    if nested:
        raise InvalidRequestError(f"block {shown(nested[0])} lies inside another block of the list; name one of the two.")
    return [Block(name, known[name]) for name in dict.fromkeys(names)]


def _marked_layers(model: nn.Module) -> list[Block]:
    """Layers that transformers itself can checkpoint, without those inside another one."""
    kind = _marked_kind()
    return [] if kind is None else list(_outermost(model, "", kind))


def _outermost(module: nn.Module, prefix: str, kind: type[nn.Module]) -> Iterator[Block]:
    for name, child in module.named_children():
        if isinstance(child, kind):
            yield Block(prefix + name, child)
        else:
            yield from _outermost(child, f"{prefix}{name}.", kind)


def is_marked(module: nn.Module) -> bool:
    """Whether transformers itself can checkpoint this layer."""
    kind = _marked_kind()
    return kind is not None and isinstance(module, kind)


def _marked_kind() -> Any:
    library = sys.modules.get("transformers.modeling_layers")  # no layer is of its kind where it was never imported
    return getattr(library, "GradientCheckpointingLayer", None)


def _members(module: nn.Module, prefix: str, *, through_sequences: bool) -> Iterator[Block]:
    """Members of containers that are no containers themselves; with `through_sequences` sequences count as containers."""
    passed = _CONTAINERS if through_sequences else (nn.ModuleList, nn.ModuleDict)
    for name, child in module.named_children():
        is_member = isinstance(module, _CONTAINERS) and not isinstance(child, passed)
        if is_member and any(True for _ in child.children()):
            yield Block(prefix + name, child)
        else:
            yield from _members(child, f"{prefix}{name}.", through_sequences=through_sequences)


def _can_be_block(module: nn.Module) -> bool:
    is_compiled = isinstance(module, torch.jit.ScriptModule)
    return not is_compiled and any(True for _ in module.parameters())


def _repeated(blocks: Sequence[Block]) -> list[Block]:
    counts = Counter(type(block.module) for block in blocks)
    seen: set[int] = set()
    found = []
    for block in blocks:
        if counts[type(block.module)] > 1 and id(block.module) not in seen:
            seen.add(id(block.module))
            found.append(block)
    return found
