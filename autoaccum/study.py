"""The trials of a search as a study of Optuna's: a store that survives, that machines share, and a sampler of large spaces.

Everything goes through Optuna's own storages, so that optuna-dashboard shows it. A trial of ours is kept whole in the
attribute "trial" of Optuna's trial; its parameters are the levers and the micro-batch, its value the seconds of one
optimizer step (and, for the objective "memory", the peak). What ran out of memory violates the constraint.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import log
from typing import TYPE_CHECKING, Any, Literal, final

import msgspec
import psutil

from autoaccum.errors import AutoaccumError, InvalidRequestError
from autoaccum.fingerprint import digest
from autoaccum.optuna_terms import CHOICES, claim_of, distributions, params_of, point_in, space_of, trial_in
from autoaccum.records import Candidate, Fit, OutOfMemory, Trial
from autoaccum.tradeoffs.points import Point
from autoaccum.units import one_line, shown

if TYPE_CHECKING:
    import optuna

_MOST_ASKS = 30  # suggestions that are no setting worth running, before the first one that is gets its turn
_NO_PEAK = 1.0  # the constraint of a trial without a measured peak: above the budget by one budget
# What SQLite says while another process makes the same tables; it is asked so often again, with so long a pause.
_BEING_MADE = ("already exists", "UNIQUE constraint failed", "database is locked", "no such table")
_OPENINGS, _PAUSE_S = 50, 0.1


@final
class Study:
    """One study, named by a fingerprint of what is searched, so that other searches in the same storage stay apart.

    Args:
        storage: A URL ("sqlite:///runs.db"), a file name that ends in .log or .journal, or an Optuna storage.
        fingerprint: What the trials depend on: those of another one are never taken over.
        budget_bytes: What a peak must not exceed.
        objective: "throughput" is sampled by TPE for the step time, "memory" by NSGA-II for step time and peak.
        seed: The same seed gives the same suggestions after the same trials.

    Raises:
        InvalidRequestError: When the storage cannot be opened.
    """

    def __init__(self, storage: Any, fingerprint: dict[str, str], *, budget_bytes: int, objective: str, seed: int) -> None:
        self._seed, self._objective, self._budget_bytes = seed, objective, budget_bytes
        self._asked: tuple[optuna.Trial, Point] | None = None
        self._running: optuna.Trial | None = None
        self._storage = storage
        with _quiet():
            self._study = _opened(storage, f"autoaccum-{digest(fingerprint)[:12]}", objective)
        with _quiet(), self._reached():
            if not self._study.user_attrs:
                for name, value in fingerprint.items():
                    self._study.set_user_attr(name, value)
            self._end_abandoned()
        self._seen: set[int] = set()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Whatever fails inside is the storage's, and is told with its name: no code of the user's runs there.

        Raises:
            AutoaccumError: When it does.
        """
        try:
            yield
        except Exception as error:
            raise AutoaccumError(
                f"storage={shown(self._storage, 300)} failed: {type(error).__name__}: {one_line(str(error), 400)}. Expected "
                "one that can be read and written; is its disk full, or was the file changed by something else? What was "
                "stored so far is kept."
            ) from error

    # -- the log

    def news(self) -> list[Trial]:
        """What has been finished since this was asked last, by earlier runs and by other machines, in the order begun."""
        found = []
        with self._reached():
            others = self._study.get_trials(deepcopy=False)
        for other in others:
            if other.state.is_finished() and other.number not in self._seen:
                self._seen.add(other.number)
                found.append(trial_in(other))
        return [self._judged(trial) for trial in found if trial is not None]

    def _judged(self, trial: Trial) -> Trial:
        """By the budget of now: where it follows from what is free, it was another one when the trial ran."""
        fit = trial.outcome
        if not isinstance(fit, Fit) or fit.peak_bytes <= self._budget_bytes:
            return trial
        above = OutOfMemory(cause="budget", peak_bytes=fit.peak_bytes, message="ran when the budget was larger")
        return msgspec.structs.replace(trial, outcome=above)

    def busy(self) -> set[Point]:
        """What other machines are running now."""
        own = None if self._running is None else self._running.number
        with self._reached():
            running = [other for other in self._study.get_trials(deepcopy=False) if other.state.name == "RUNNING"]
        found = {point_in(other) for other in running if other.number != own}
        return {point for point in found if point is not None}

    def begin(self, candidate: Candidate) -> None:
        """This is going to run here."""
        with self._reached():
            self._begin(candidate)

    def _begin(self, candidate: Candidate) -> None:
        point, asked = Point(candidate.levers, candidate.micro_batch), self._asked
        self._asked = None
        if asked is not None and asked[1] == point:
            self._running = asked[0]
            self._running.suggest_int("checkpointed_blocks", *[point.levers.checkpointed_blocks] * 2)
            for name, value in claim_of(candidate).items():
                self._running.set_user_attr(name, value)
        else:
            self._running = self._claimed(candidate)

    def abandon(self) -> None:
        """What was begun did not come to its end. The error that ended it matters more than one of the storage."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(Exception):
                self._fail(running.number)

    def end(self, trial: Trial) -> None:
        """This came of it."""
        with self._reached():
            self._end(trial)

    def _end(self, trial: Trial) -> None:
        from optuna.trial import TrialState

        running = self._running
        if running is None:  # run by a worker that has died since
            self._begin(trial.candidate)
            running = self._running
        assert running is not None
        running.set_user_attr("trial", msgspec.json.encode(trial).decode())
        running.set_user_attr("purpose", trial.purpose)
        running.set_constraint("memory", self._excess(trial))
        values = self._values(trial)
        with _quiet():
            self._study.tell(running.number, values, state=TrialState.PRUNED if values is None else TrialState.COMPLETE)
        self._seen.add(running.number)
        self._running = None

    def _values(self, trial: Trial) -> list[float] | None:
        """Only whole optimizer steps have a value."""
        fit = trial.outcome
        if trial.purpose != "confirm" or not isinstance(fit, Fit) or fit.median_step_s is None:
            return None
        return [fit.median_step_s] if self._objective == "throughput" else [fit.median_step_s, float(fit.peak_bytes)]

    def _excess(self, trial: Trial) -> float:
        peak = getattr(trial.outcome, "peak_bytes", None)
        return _NO_PEAK if peak is None else (peak - self._budget_bytes) / max(self._budget_bytes, 1)

    def _claimed(self, candidate: Candidate) -> optuna.Trial:
        """A running trial of this, written down at one stroke: kill -9 leaves none that is nobody's."""
        import optuna

        attributes = claim_of(candidate)
        params = params_of(Point(candidate.levers, candidate.micro_batch))
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=params,
                distributions=distributions(),
                user_attrs=attributes,
            )
        )
        known = reversed(self._study.get_trials(deepcopy=False))
        found = next(other for other in known if other.user_attrs.get("claim") == attributes["claim"])
        return optuna.Trial(self._study, found._trial_id)

    def _end_abandoned(self) -> None:
        """Trials of processes of this machine that are gone, as after kill -9."""
        for other in self._study.get_trials(deepcopy=False):
            if other.state.name == "RUNNING":
                host, _, pid = str(other.user_attrs.get("owner")).rpartition(":")
                if host == socket.gethostname() and _is_gone(pid):
                    self._fail(other.number)

    def _fail(self, number: int) -> None:
        from optuna.trial import TrialState

        with _quiet():
            self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    # -- large spaces

    def sampled(self, points: Sequence[Point]) -> Point | None:
        """One of these points, as the sampler suggests after everything that has been told; None of none.

        What it suggests and is not among them is told to be pruned, without running.
        """
        with self._reached():
            return self._sampled(points) if points else None

    def _sampled(self, points: Sequence[Point]) -> Point:
        from optuna.trial import TrialState

        for _ in range(_MOST_ASKS):
            self._study.sampler = self._sampler()
            asked = self._study.ask(space_of(points))
            family = [point for point in points if all(asked.params[n] == getattr(point.levers, n) for n in CHOICES)]
            if family:
                nearest = min(family, key=lambda point: abs(log(point.micro_batch / asked.params["micro_batch"])))
                self._asked = (asked, nearest)
                return nearest
            with _quiet():
                self._study.tell(asked, state=TrialState.PRUNED)
            self._seen.add(asked.number)
        return points[0]

    def _sampler(self) -> Any:
        """Made anew for each suggestion, from the seed and the number of trials: a study that goes on suggests the same."""
        from optuna.samplers import NSGAIISampler, TPESampler

        seed = self._seed + len(self._study.get_trials(deepcopy=False))
        return TPESampler(seed=seed) if self._objective == "throughput" else NSGAIISampler(seed=seed, population_size=10)


def _opened(storage: Any, name: str, objective: str) -> optuna.Study:
    import optuna

    minimize: Literal["minimize"] = "minimize"
    for is_last in (*[False] * _OPENINGS, True):
        try:
            return optuna.create_study(
                storage=_storage_named(storage),
                study_name=name,
                directions=[minimize] * (1 if objective == "throughput" else 2),
                load_if_exists=True,
            )
        except Exception as error:
            if is_last or not any(words in str(error) for words in _BEING_MADE):
                raise InvalidRequestError(
                    f"storage={shown(storage, 300)} cannot be opened: {type(error).__name__}: {one_line(str(error), 400)}. "
                    "Expected a URL such as 'sqlite:///runs.db', a file name that ends in .log, or an Optuna storage; a "
                    "damaged file has to be removed."
                ) from error
            time.sleep(_PAUSE_S)
    raise AssertionError("unreachable")


def _storage_named(storage: Any) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if isinstance(storage, str) and storage.endswith((".log", ".journal")) and "://" not in storage:
        return JournalStorage(JournalFileBackend(storage))
    return storage


def _is_gone(pid: str) -> bool:
    """Whether there is no such process on this machine."""
    return not pid.isdecimal() or len(pid) > 9 or not psutil.pid_exists(int(pid))


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna tells of every trial otherwise."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
