"""The log of a search: what it has of each setting, what it keeps, and who is told."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from autoaccum.records import AS_IT_IS, Candidate, Fit, Levers, Outcome, OutOfMemory, Trial
from autoaccum.session.log import Log
from autoaccum.study import Study

FULL = Levers(checkpointing="full", checkpointed_blocks=2)
FITS, UNCLEAR = Fit(peak_bytes=100), OutOfMemory(cause="unclear")
OUT = OutOfMemory(cause="allocator")


def trial(size: int, outcome: Outcome = FITS, levers: Levers = AS_IT_IS) -> Trial:
    candidate = Candidate(micro_batch=size, levers=levers)
    return Trial(candidate=candidate, outcome=outcome, wall_s=0.5, rows_per_step=8, purpose="probe")


def in_memory() -> Study:
    """A study that nobody else has."""
    return Study(optuna.storages.InMemoryStorage(), {"model": "one"}, budget_bytes=1000, objective="throughput", seed=0)


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def started(self, candidate: Candidate, purpose: str) -> None:
        self.heard.append((candidate.micro_batch, purpose))

    def finished(self, trial: Trial) -> None:
        self.heard.append(trial)

    def bounded(self, top: int) -> None:
        raise AssertionError("a log has no bound")


def test_trials_are_apart_by_levers() -> None:
    """One position of the levers has its own trials, in their order."""
    log = Log([trial(1), trial(2, levers=FULL), trial(4)], None)
    assert [of.candidate.micro_batch for of in log.of(AS_IT_IS)] == [1, 4]


def test_only_what_fits_was_measured() -> None:
    """Of a size under some levers, the measurements, and nothing of trials that ran out of memory."""
    log = Log([trial(2), trial(2, OUT), trial(2, levers=FULL), trial(4)], None)
    assert log.fits_at(AS_IT_IS, 2) == [FITS]


def test_stored_trials_come_first() -> None:
    """What was stored comes before what was run here, each once, and what the study did not know it is told."""
    study, log = in_memory(), Log([trial(1), trial(2)], None)
    log.keep_in(study, [trial(1), trial(4)])
    assert log.trials == [trial(1), trial(4), trial(2)]
    assert in_study(study) == [2]


def in_study(study: Study) -> list[int]:
    study._seen.clear()
    return [stored.candidate.micro_batch for stored in study.news()]


def test_uncertain_trials_are_seen_again_where_nothing_fitted() -> None:
    """A stored search that ended with the user's own error leaves nothing that would hide it now."""
    log = Log([], None)
    log.keep_in(None, [trial(1, UNCLEAR), trial(2, OUT)])
    assert log.trials == [trial(2, OUT)] and log.has_study and log.study is None


def test_trial_is_told_to_the_study_and_the_listener() -> None:
    """Who follows hears the beginning and the end, and the study has the trial."""
    study, listener = in_memory(), Listener()
    log = Log([], listener)
    log.keep_in(study, [])
    with log.running(Candidate(micro_batch=2), "probe"):
        pass
    log.add(trial(2))
    assert listener.heard == [(2, "probe"), trial(2)]
    assert log.trials == [trial(2)] and in_study(study) == [2]


def test_trial_that_was_broken_off_is_nobodys() -> None:
    """After an error in the midst of a trial the study says that nothing is running."""
    study = in_memory()
    log = Log([], None)
    log.keep_in(study, [])
    with pytest.raises(KeyboardInterrupt), log.running(Candidate(micro_batch=2), "probe"):
        raise KeyboardInterrupt
    assert [stored.state.name for stored in study._study.trials] == ["FAIL"] and log.trials == []
