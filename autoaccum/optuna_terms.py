"""A trial of ours in Optuna's terms: the space, the parameters, the attributes, and what of them is believed when read."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints
from uuid import uuid4

import msgspec

from autoaccum.records import Candidate, Fit, Levers, Trial
from autoaccum.tradeoffs.points import Point

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

# Every lever that has levels, with them.
CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(kind) for name, kind in get_type_hints(Levers).items() if get_origin(kind) is Literal
}
_MOST_ROWS, _MOST_BLOCKS = 10**9, 10**5


def distributions() -> dict[str, BaseDistribution]:
    """Of every parameter that a trial of ours may have."""
    from optuna.distributions import IntDistribution

    return _levels() | {
        "checkpointed_blocks": IntDistribution(0, _MOST_BLOCKS),
        "micro_batch": IntDistribution(1, _MOST_ROWS, log=True),
    }


def space_of(points: Sequence[Point]) -> dict[str, BaseDistribution]:
    """What is sampled: the number of blocks follows from the rest."""
    from optuna.distributions import IntDistribution

    sizes = [point.micro_batch for point in points]
    return _levels() | {"micro_batch": IntDistribution(min(sizes), max(sizes), log=True)}


def _levels() -> dict[str, BaseDistribution]:
    from optuna.distributions import CategoricalDistribution

    return {name: CategoricalDistribution(levels) for name, levels in CHOICES.items()}


def params_of(point: Point) -> dict[str, Any]:
    """A setting as parameters."""
    levers = {name: getattr(point.levers, name) for name in CHOICES}
    return {**levers, "checkpointed_blocks": point.levers.checkpointed_blocks, "micro_batch": point.micro_batch}


def point_in(other: FrozenTrial) -> Point | None:
    """The setting that somebody has claimed; None where it is none of ours."""
    try:
        candidate = msgspec.json.decode(other.user_attrs.get("candidate", ""), type=Candidate)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return None
    return Point(candidate.levers, candidate.micro_batch)


def trial_in(other: FrozenTrial) -> Trial | None:
    """What we wrote into it; nothing that somebody else wrote is trusted."""
    try:
        trial = msgspec.json.decode(other.user_attrs.get("trial", ""), type=Trial)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return None
    times = trial.outcome.step_times_s if isinstance(trial.outcome, Fit) else ()
    peak = getattr(trial.outcome, "peak_bytes", None) or 0
    sound = (
        1 <= trial.candidate.micro_batch <= _MOST_ROWS
        and 0 <= trial.candidate.levers.checkpointed_blocks <= _MOST_BLOCKS
        and trial.rows_per_step >= 1
        and 0 <= peak < 2**60
        and all(0 < seconds < inf for seconds in times)
    )
    return trial if sound else None


def claim_of(candidate: Candidate) -> dict[str, str]:
    """Who runs what; the claim is one of its kind."""
    return {
        "owner": f"{socket.gethostname()}:{os.getpid()}",
        "candidate": msgspec.json.encode(candidate).decode(),
        "claim": uuid4().hex,
    }
