"""Which levels of which levers may be tried, by what the caller asks for and what the model and the device allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from autoaccum.errors import InvalidRequestError
from autoaccum.levers.base import AbstractLever, Subject
from autoaccum.levers.blocks import find_blocks
from autoaccum.levers.checkpointing import Checkpointing
from autoaccum.levers.offload import Offload
from autoaccum.levers.optimizer import OptimizerImpl
from autoaccum.levers.precision import Precision
from autoaccum.records import Levers, Skipped
from autoaccum.units import shown

LEVERS: tuple[AbstractLever, ...] = (Checkpointing(), Precision(), OptimizerImpl(), Offload())
_BY_NAME = {lever.name: lever for lever in LEVERS}
_BLOCKS = "blocks"  # beside the levers' names: the caller's own list of blocks

Asked = str | Sequence[str] | Mapping[str, Any]


class Space(NamedTuple):
    """What may be tried.

    Attributes:
        levels: Of each lever, the first one being how the caller has it.
        num_blocks: How many blocks can be checkpointed.
        block_names: The caller's own list of them.
        skipped: Levels that cannot be used, with the reasons.
        not_allowed: Levels that could be used, but change the numerics, which was not asked for.
    """

    levels: dict[str, tuple[str, ...]]
    num_blocks: int
    block_names: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    not_allowed: tuple[Levers, ...] = ()

    @property
    def is_trivial(self) -> bool:
        """Nothing can be turned."""
        return all(len(levels) == 1 for levels in self.levels.values())

    def families(self) -> list[Levers]:
        """Every combination, with no block checkpointed yet; the caller's own first."""
        combinations = [dict(zip(self.levels, levels, strict=True)) for levels in product(*self.levels.values())]
        return [msgspec.convert({**levels, "block_names": self._names_for(levels)}, Levers) for levels in combinations]

    def _names_for(self, levels: Mapping[str, str]) -> tuple[str, ...]:
        return () if levels["checkpointing"] == "off" else self.block_names


def check_asked(asked: object) -> None:
    """Refuse what names no lever or no level.

    Raises:
        InvalidRequestError: It says what is expected.
    """
    _wanted(asked)


def space_for(asked: Asked, subject: Subject) -> Space:
    """What may be tried on this model.

    Args:
        asked: "none", "exact" (levers that keep the numerics), "all", one lever's name, names, or `{name: levels}`; with
            `"blocks": [names of modules]` among these, those are the blocks to checkpoint.

    Raises:
        InvalidRequestError: When it names no lever, level or block.
    """
    wanted, names = _wanted(asked)
    blocks = find_blocks(subject.module, names) if asked != "none" else []
    levels: dict[str, tuple[str, ...]] = {}
    skipped: list[Skipped] = []
    for lever in LEVERS:
        tried = wanted.get(lever.name, ())
        reasons = {level: _reason(lever, level, subject, names) for level in tried}
        skipped += [Skipped(lever=lever.name, level=level, reason=reason) for level, reason in reasons.items() if reason]
        off = lever.levels[0]
        levels[lever.name] = (off, *(level for level in tried if level != off and not reasons[level]))
    not_allowed = [
        level for level in Precision.levels[1:] if asked == "exact" and not _reason(Precision(), level, subject, ())
    ]
    return Space(
        levels=levels,
        num_blocks=len(blocks),
        block_names=names,
        skipped=tuple(skipped),
        not_allowed=tuple(Levers(precision=level) for level in not_allowed),  # type: ignore[arg-type]
    )


def common(spaces: Sequence[Space]) -> Space:
    """What may be tried on every one of several devices."""
    first = spaces[0]
    if all(space == first for space in spaces):
        return first
    skipped = dict.fromkeys(one for space in spaces for one in space.skipped)
    return Space(
        levels={
            name: tuple(level for level in of if all(level in other.levels[name] for other in spaces))
            for name, of in first.levels.items()
        },
        num_blocks=min(space.num_blocks for space in spaces),
        block_names=first.block_names,
        skipped=tuple(skipped),
        not_allowed=tuple(one for one in first.not_allowed if all(one in other.not_allowed for other in spaces)),
    )


def _reason(lever: AbstractLever, level: str, subject: Subject, names: Sequence[str]) -> str | None:
    if isinstance(lever, Checkpointing) and names:
        return None  # the caller knows best
    return lever.reason_against(level, subject)


def _wanted(asked: object) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Levels by lever, and the caller's blocks."""
    match asked:
        case "none":
            return {}, ()
        case "exact":
            return {lever.name: lever.levels for lever in LEVERS if lever.keeps_numerics}, ()
        case "all":
            return {lever.name: lever.levels for lever in LEVERS}, ()
        case str():
            return _of_names([asked])
        case Mapping():
            return _of_levels(asked)
        case list() | tuple() | set():
            return _of_names(list(asked))
    raise _unknown(asked)


def _of_names(names: Sequence[object]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    for name in names:
        if not isinstance(name, str) or name not in _BY_NAME:
            raise _unknown(name)
    return {str(name): _BY_NAME[str(name)].levels for name in names}, ()


def _of_levels(asked: Mapping[Any, Any]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, levels in asked.items():
        if name == _BLOCKS:
            continue
        if name not in _BY_NAME:
            raise _unknown(name)
        given = (levels,) if isinstance(levels, str) else tuple(levels) if isinstance(levels, (list, tuple, set)) else ()
        known = _BY_NAME[name].levels
        if not given or any(level not in known for level in given):
            raise InvalidRequestError(f"levers={{{shown(name)}: {shown(levels)}}}: its levels are {', '.join(known)}.")
        found[name] = tuple(level for level in known if level in given)
    blocks = asked.get(_BLOCKS, ())
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(name, str) for name in blocks):
        raise InvalidRequestError(f"levers={{'blocks': {shown(blocks)}}}: expected a list of names of modules.")
    return found, tuple(blocks)


def _unknown(asked: object) -> InvalidRequestError:
    return InvalidRequestError(
        f'levers={shown(asked)} is no lever; expected "none", "exact", "all", one or several of {", ".join(_BY_NAME)}, '
        "or {name: levels}."
    )
