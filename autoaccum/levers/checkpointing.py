"""Activation checkpointing of the model's repeated blocks: off, selective or full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, final

from torch import nn

from autoaccum.errors import InvalidRequestError
from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.levers.blocks import Block, find_blocks, is_marked
from autoaccum.levers.recomputing import Recomputation
from autoaccum.records import Levers

_MISSING = object()


@final
class Checkpointing(AbstractLever):
    """Blocks are computed again in the backward pass instead of keeping their activations.

    The earliest blocks are taken: their activations would be held the longest, and are computed again last, when those of
    the other blocks are gone. "selective" keeps the results of matrix products, convolutions and attention.
    """

    name: ClassVar[str] = "checkpointing"
    levels: ClassVar[tuple[str, ...]] = ("off", "selective", "full")

    def reason_against(self, level: str, subject: Subject) -> str | None:
        if level == "off":
            return None
        if _is_compiled(subject.module):
            return "the model is compiled, and compiled code decides itself what it computes again"
        blocks = find_blocks(subject.module)
        if not blocks:
            return "no repeated blocks were found in the model"
        if any(_is_checkpointed_already(block.module) for block in blocks):
            return "the model's layers are checkpointed already"
        return None

    @contextmanager
    def applied(self, levers: Levers, subject: Subject) -> Iterator[None]:
        if levers.checkpointing == "off" or levers.checkpointed_blocks == 0:
            yield
            return
        blocks = find_blocks(subject.module, levers.block_names)
        if len(blocks) < levers.checkpointed_blocks:
            raise InvalidRequestError(
                f"checkpointed_blocks={levers.checkpointed_blocks}, but the model has {len(blocks)} repeated blocks; "
                "is it the model that the plan was made for?"
            )
        put_back = _cache_turned_off(subject.module)
        for block in blocks[: levers.checkpointed_blocks]:
            put_back += _checkpointed(block, selective=levers.checkpointing == "selective")
        try:
            yield
        finally:
            for module, name, value in reversed(put_back):
                _own(module).pop(name, None)
                if value is not _MISSING:
                    _own(module)[name] = value


_Change = tuple[Any, str, Any]  # an object, the name of an attribute of it, and what its own dictionary held there


def _checkpointed(block: Block, *, selective: bool) -> list[_Change]:
    """Make one block be computed again. Forward hooks stay outside, so that they run once."""
    module = block.module
    recomputation = Recomputation(module, selective=selective)
    if is_marked(module):  # it also takes care of the cache of keys and values
        return [
            _set(module, "gradient_checkpointing", True),
            _set(module, "_gradient_checkpointing_func", recomputation.run),
        ]
    return [_set(module, "forward", partial(recomputation.run, module.forward))]


def _cache_turned_off(model: nn.Module) -> list[_Change]:
    """Models of transformers keep keys and values while they train, which a second run would add to."""
    configs = {id(config): config for config in (vars(module).get("config") for module in model.modules())}
    return [_set(config, "use_cache", False) for config in configs.values() if getattr(config, "use_cache", None) is True]


def _set(owner: Any, name: str, value: Any) -> _Change:
    before = _own(owner).get(name, _MISSING)
    _own(owner)[name] = value
    return owner, name, before


def _own(owner: Any) -> dict[str, Any]:
    """What an object holds itself. Past its `__setattr__`: a module would register what is put there."""
    held: dict[str, Any] = owner.__dict__
    return held


def _is_checkpointed_already(block: nn.Module) -> bool:
    return vars(block).get("gradient_checkpointing") is True


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules())
