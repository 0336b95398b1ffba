"""The trials of one search in the order they came, told to the study that keeps them and to the caller who follows.

It knows nothing of how a trial is run, nor of what is to be run next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, final

from autoaccum.records import Candidate, Fit, Levers, Trial
from autoaccum.report.following import Follower
from autoaccum.session.giving_up import is_of_memory
from autoaccum.study import Study
from autoaccum.tradeoffs.points import Point

Purpose = Literal["probe", "confirm"]


@final
class Log:
    """The same on every rank.

    Args:
        trials: Those that were run before.

    Attributes:
        listener: Hears of every trial; None: nobody does.
        trials: All of them, those of earlier runs and of other machines among them.
        errors: The user's own, which ended a trial.
        study: Where trials are kept; on the first rank alone.
        has_study: Whether there is one, on whichever rank.
        busy: What other machines that share the study are running, as all ranks have heard.
    """

    def __init__(self, trials: Sequence[Trial], listener: Follower | None) -> None:
        self.listener = listener
        self.trials: list[Trial] = list(trials)
        self.errors: dict[Candidate, Exception] = {}
        self.study: Study | None = None
        self.has_study = False
        self.busy: frozenset[Point] = frozenset()

    def of(self, levers: Levers) -> list[Trial]:
        """The trials under one position of the levers."""
        return [trial for trial in self.trials if trial.candidate.levers == levers]

    def fits_at(self, levers: Levers, size: int) -> list[Fit]:
        """What was measured of this size."""
        at_size = [trial.outcome for trial in self.of(levers) if trial.candidate.micro_batch == size]
        return [outcome for outcome in at_size if isinstance(outcome, Fit)]

    def keep_in(self, study: Study | None, stored: Sequence[Trial]) -> None:
        """From now on trials are kept there as well.

        Args:
            study: None on all ranks but the first.
            stored: What it has already.
        """
        self.study, self.has_study = study, True
        if not any(isinstance(trial.outcome, Fit) for trial in stored):  # what was uncertain then is to be seen again
            stored = [trial for trial in stored if is_of_memory(trial)]
        unknown = [trial for trial in self.trials if trial not in stored]
        self.trials = [*stored, *unknown]
        if study is not None:
            for trial in unknown:
                study.end(trial)

    @contextmanager
    def running(self, candidate: Candidate, purpose: Purpose) -> Iterator[None]:
        """While inside, this is run here."""
        if self.listener is not None:
            self.listener.started(candidate, purpose)
        if self.study is not None:
            self.study.begin(candidate)
        try:
            yield
        except BaseException:
            if self.study is not None:
                self.study.abandon()
            raise

    def add(self, trial: Trial) -> None:
        """This was run here."""
        self.trials.append(trial)
        if self.study is not None:
            self.study.end(trial)
        if self.listener is not None:
            self.listener.finished(trial)
