"""Faults at every step: a small part of what `benchmarks/faults.py` does in full."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes and files as Linux has them"),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fault leaves is seen there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def not_survived(cases: Iterable[Any], at_least: int) -> list[Any]:
    """Those after which something was wrong, of so many at least."""
    found = list(cases)
    assert len(found) >= at_least
    return [case for case in found if case.problems]


@pytest.mark.parametrize(
    "setting",
    [0, *(pytest.param(index, marks=pytest.mark.slow) for index in (1, 2))],
    ids=["plain", "checkpointing", "scaled"],
)
def test_step_survives_every_fault(setting: int) -> None:
    """At the calls of every part of one step, and at some of our own functions, whatever goes wrong is survived."""
    from faulting.injection import KINDS
    from faulting.training import SETTINGS, training_cases

    assert not_survived(training_cases(SETTINGS[setting], KINDS, 2), 45) == []


def test_search_survives_faults() -> None:
    """Ctrl-C at a call of every part of a search."""
    from faulting.searching import SETTINGS, searching_cases

    assert not_survived(searching_cases(SETTINGS[0], ["Ctrl-C"], 1), 6) == []


def test_harness_notices_what_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where windows do not go back to their start, that is found."""
    from faulting.training import SETTINGS, training_cases

    monkeypatch.setattr("autoaccum.rewind.Rewinder.rewind", lambda self: [])
    found = [case for case in training_cases(SETTINGS[0], ["user's exception"], 1) if case.problems]
    assert any("running_mean" in problem for case in found for problem in case.problems)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_search_survives_every_kind() -> None:
    """In every setting, at a call of every part."""
    from faulting.injection import KINDS
    from faulting.searching import SETTINGS, searching_cases

    for setting in SETTINGS:
        assert not_survived(searching_cases(setting, KINDS, 1), 30) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_search_survives_damaged_files() -> None:
    """A remembered plan and a study, cut off and changed at many places, and a cache that cannot be written."""
    from faulting.files import FILE_KINDS, file_cases

    assert not_survived(file_cases(FILE_KINDS), 90) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_survive_a_dead_one() -> None:
    """Either of two ranks is killed, in a search and in training: the other one says so and is put back."""
    from faulting.ranks import RANK_KINDS, rank_cases

    assert not_survived(rank_cases(RANK_KINDS), 20) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["Ctrl-C", "SIGTERM", "disk full"])
def test_command_line_survives_faults(kind: str) -> None:
    """Signals at several times of a run, and files that cannot be written to their end."""
    from faulting.striking import command_cases

    assert not_survived(command_cases([kind], 2), 6) == []
