"""What ranks tell each other after a trial, and the one outcome that all of them then have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from autoaccum.errors import RankMismatchError
from autoaccum.ranks import worst
from autoaccum.records import Trial
from autoaccum.tradeoffs.points import Point


class Said(NamedTuple):
    """What a rank says after a trial.

    Attributes:
        state_bytes: What the optimizer held.
        elapsed_s: How long the search has taken so far.
        called_off: It broke off because another rank had failed, and what came of the trial is for that one to say.
        news, busy: From the study that other machines share: trials run there, and what runs there now.
    """

    trial: Trial
    state_bytes: int | None
    elapsed_s: float
    called_off: bool
    news: tuple[Trial, ...] = ()
    busy: frozenset[Point] = frozenset()


def trial_of_all(said: Sequence[Said]) -> Trial:
    """The first rank's trial, with the worst outcome of all.

    Raises:
        RankMismatchError: When ranks ran different trials.
    """
    trials = [rank.trial for rank in said]
    if any(trial.candidate != trials[0].candidate for trial in trials):
        raise RankMismatchError(
            f"the ranks ran different trials ({', '.join(str(trial.candidate) for trial in trials[:4])}), which is a "
            "bug of autoaccum; please report it."
        )
    if len(trials) == 1:
        return trials[0]
    outcome = worst([rank.trial.outcome for rank in said if not rank.called_off])
    return msgspec.structs.replace(trials[0], outcome=outcome, wall_s=max(trial.wall_s for trial in trials))
