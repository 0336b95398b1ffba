"""One trial on all ranks at once, and the one outcome that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import msgspec

from autoaccum.company import Company
from autoaccum.devices.base import AbstractDevice
from autoaccum.lockstep import Lockstep
from autoaccum.meeting import Meeting
from autoaccum.preserve import Snapshot
from autoaccum.probing import MICRO_BATCHES_PER_WINDOW, Attempt, IsEnough, run_trial
from autoaccum.records import Candidate, Refused, Trial
from autoaccum.session.clock import Clock
from autoaccum.session.log import Log, Purpose
from autoaccum.session.saying import Said, trial_of_all
from autoaccum.workload import Workload


@final
class Runner:
    """Runs trials, and adds them to the log.

    Args:
        clock: Ranks agree on it after each trial.
        snapshot: Restores the workload after each trial.

    Attributes:
        state_bytes: What the optimizer really held after its first step, on the rank where it was most; None before one.
    """

    def __init__(
        self,
        workload: Workload,
        device: AbstractDevice,
        ranks: Meeting,
        clock: Clock,
        log: Log,
        *,
        together: Lockstep,
        process_group: Any,
        snapshot: Snapshot,
    ) -> None:
        self._workload, self._device, self._ranks, self._clock, self._log = workload, device, ranks, clock, log
        self._together, self._group = together, process_group
        self._snapshot = snapshot
        self.state_bytes: int | None = None

    def run(
        self,
        candidate: Candidate,
        windows: Sequence[Sequence[int]],
        feed: Callable[[Sequence[int]], Sequence[Any]],
        purpose: Purpose,
        *,
        budget_bytes: int,
        is_enough: IsEnough | None = None,
        floor: Candidate | None = None,
        num_micro_batches: int = MICRO_BATCHES_PER_WINDOW,
        warm_up: int | None = None,
    ) -> Trial:
        """Run one trial, agree on its outcome over the ranks, and add it to the log.

        Args:
            windows: Rows of each micro-batch of each optimizer step, on this rank.
            feed: Gives micro-batches of so many rows.
            budget_bytes: The limit on this rank.
            is_enough: Whether the last window need not run once more; None: as often as it stands there.
            floor: What the trial is of when it was too small to run.
            num_micro_batches: Of each window, the most of all ranks.
            warm_up: Micro-batches of the first window, which is not timed; None: all of them.
        """
        with self._log.running(candidate, purpose):
            attempt = run_trial(
                self._workload,
                self._device,
                candidate,
                budget_bytes=budget_bytes,
                snapshot=self._snapshot,
                windows=windows,
                feed=feed,
                purpose=purpose,
                is_enough=is_enough,
                warm_up=warm_up,
                company=Company(self._together, self._group, num_micro_batches=num_micro_batches),
            )
        trial = self._agreed(attempt)
        if floor is not None and isinstance(trial.outcome, Refused) and trial.outcome.bound == "floor":
            trial = msgspec.structs.replace(trial, candidate=floor)
        if attempt.error is not None:
            self._log.errors[candidate] = attempt.error
        self._log.add(trial)
        return trial

    def _agreed(self, attempt: Attempt) -> Trial:
        """The trial as all ranks have it: the first one's, with the worst outcome."""
        own = Said(attempt.trial, attempt.optimizer_state_bytes, self._clock.own_s(), attempt.called_off)
        study = self._log.study
        if study is not None and self._ranks.world_size > 1:
            own = own._replace(news=tuple(study.news()), busy=frozenset(study.busy()))
        said = self._ranks.gather(own)
        self._log.trials += said[0].news
        self._log.busy = said[0].busy
        self._clock.agree([rank.elapsed_s for rank in said])
        held = [rank.state_bytes for rank in said if rank.state_bytes is not None]
        self.state_bytes = max(held, default=self.state_bytes)
        return trial_of_all(said)
