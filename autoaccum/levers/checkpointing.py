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
        if any(vars(module).get("gradient_checkpointing") is True for module in subject.module.modules()):
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
        put_back: list[_Change] = []
        try:
            _turn_cache_off(subject.module, put_back)
            for block in blocks[: levers.checkpointed_blocks]:
                _checkpoint(block, put_back, selective=levers.checkpointing == "selective")
            yield
        finally:
            for owner, name, value in reversed(put_back):
                if value is _MISSING:
                    _own(owner).pop(name, None)
                else:
                    _own(owner)[name] = value  # without a pop before: the order of keys stays


_Change = tuple[Any, str, Any]  # an object, the name of an attribute of it, and what its own dictionary held there


def _checkpoint(block: Block, put_back: list[_Change], *, selective: bool) -> None:
    """Make one block be computed again. Forward hooks stay outside, so that they run once."""
    module = block.module
    recomputation = Recomputation(module, selective=selective)
    if is_marked(module):  # it also takes care of the cache of keys and values
        _set(module, "_gradient_checkpointing_func", recomputation.run, put_back)
        _set(module, "gradient_checkpointing", True, put_back)
    else:
        _set(module, "forward", partial(recomputation.run, module.forward), put_back)


def _turn_cache_off(model: nn.Module, put_back: list[_Change]) -> None:
    """Models of transformers keep keys and values while they train, which a second run would add to."""
    configs = {id(config): config for config in (vars(module).get("config") for module in model.modules())}
    for config in configs.values():
        if getattr(config, "use_cache", None) is True:
            _set(config, "use_cache", False, put_back)


def _set(owner: Any, name: str, value: Any, put_back: list[_Change]) -> None:
    put_back.append((owner, name, _own(owner).get(name, _MISSING)))
    _own(owner)[name] = value


def _own(owner: Any) -> dict[str, Any]:
    """What an object holds itself. Past its `__setattr__`: a module would register what is put there."""
    held: dict[str, Any] = owner.__dict__
    return held


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules())
