"""Ranks that meet, as threads over one store: what each says, who failed, who is missing, and how often they meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autoaccum import meeting
from autoaccum.errors import InvalidRequestError, RankMismatchError
from autoaccum.meeting import Meeting, telling

Run = Callable[..., list[Any]]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a function of a meeting on so many ranks at once; gives what each returns, or its error."""
    pool = ThreadPoolExecutor(4)

    def run(work: Callable[[Meeting], Any], world: int = 3, present: int | None = None) -> list[Any]:
        store = dist.HashStore()
        monkeypatch.setattr(meeting, "Ranks", lambda group: SimpleNamespace(rank=group, world_size=world))
        monkeypatch.setattr(Meeting, "_joined", lambda self, group: store)

        def of_rank(rank: int) -> Any:
            ranks = Meeting(rank)
            try:
                return work(ranks)
            except BaseException as error:  # noqa: BLE001 - whatever it is, is the answer
                ranks.leave(error)
                return error
            finally:
                ranks._over.set()

        return list(pool.map(of_rank, range(world if present is None else present)))

    yield run
    pool.shutdown()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits that a test can wait for."""
    for name, seconds in (("BEAT_S", 0.05), ("SILENT_S", 1.5), ("ABSENT_S", 1.5), ("_PARTING_S", 0.1)):
        monkeypatch.setattr(meeting, name, seconds)


def test_all_hear_all(meet: Run) -> None:
    """What every rank says, in order of rank, on every rank, time after time."""
    found = meet(lambda ranks: [ranks.gather((ranks.rank, index)) for index in range(20)])
    assert found == [[[(rank, index) for rank in range(3)] for index in range(20)]] * 3


def test_exchanges_are_counted(meet: Run) -> None:
    """Each gather counts once, and so does the end, at which all wait for all."""

    def work(ranks: Meeting) -> int:
        for _ in range(3):
            ranks.gather(None)
        ranks.leave()
        return ranks.num_exchanges

    assert meet(work) == [4, 4, 4]


def test_nobody_waits_apart(meet: Run) -> None:
    """Inside `apart` each rank is alone, whatever number of exchanges it has, and together again afterwards."""

    def work(ranks: Meeting) -> Any:
        with ranks.apart():
            alone = [(ranks.gather(ranks.rank), ranks.world_size) for _ in range(threading.get_ident() % 5)]
        return alone, ranks.gather(ranks.rank), ranks.num_exchanges

    for alone, together, exchanges in meet(work):
        assert all(one == ([0], 1) for one in alone) and together == [0, 1, 2] and exchanges == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failure_of_one_rank_reaches_all_others(failing: int, meet: Run) -> None:
    """Whichever rank fails between two exchanges: the others name it with its error, and it keeps its own."""

    def work(ranks: Meeting) -> Any:
        ranks.gather(None)
        if ranks.rank == failing:
            raise KeyError("missing")
        return [ranks.gather(None) for _ in range(3)]

    found = meet(work)
    assert isinstance(found.pop(failing), KeyError)
    assert all(type(error) is RankMismatchError for error in found)
    assert all(f"rank {failing} failed (KeyError: 'missing')" in str(error) for error in found)


def test_interrupt_of_one_rank_reaches_all_others(meet: Run) -> None:
    """Ctrl-C that only one rank gets ends the others as well."""

    def work(ranks: Meeting) -> Any:
        if ranks.rank == 2:
            raise KeyboardInterrupt
        return ranks.gather(None)

    found = meet(work)
    assert ["rank 2 failed (KeyboardInterrupt" in str(error) for error in found] == [True, True, False]


def test_end_is_common(meet: Run) -> None:
    """A rank that fails after the last exchange, but before the end, leaves no other rank with a result."""

    def work(ranks: Meeting) -> Any:
        ranks.gather(None)
        if ranks.rank == 1:
            raise KeyError("missing")
        ranks.leave()
        return "a plan"

    assert "a plan" not in meet(work)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("dead", [0, 1])
def test_rank_without_a_sign_of_life_is_named(dead: int, meet: Run) -> None:
    """One that has come and then gives no sign of life, as after kill -9, is named by all others in time."""

    def work(ranks: Meeting) -> Any:
        ranks.gather(None)
        if ranks.rank == dead:
            ranks._over.set()  # its thread is gone with it
            return None
        begun = time.monotonic()
        with pytest.raises(RankMismatchError, match=f"rank {dead} has not answered for [12] s: it has died"):
            ranks.gather(None)
        return time.monotonic() - begun

    found = meet(work)
    assert all(seconds < 10 for seconds in found if seconds is not None)


@pytest.mark.usefixtures("impatient")
def test_rank_that_does_not_come_is_named(meet: Run) -> None:
    """Two of three ranks call: both are told which one did not."""
    found = meet(lambda ranks: ranks.gather(None), present=2)
    assert all("rank 2 has not come" in str(error) for error in found)


@pytest.mark.usefixtures("impatient")
def test_busy_rank_is_no_dead_rank(meet: Run) -> None:
    """A rank that says nothing for longer than a dead one would be given is waited for."""

    def work(ranks: Meeting) -> Any:
        time.sleep(4 if ranks.rank == 1 else 0)
        return ranks.gather(ranks.rank)

    assert meet(work) == [[0, 1, 2]] * 3


@pytest.mark.usefixtures("impatient")
def test_rank_that_hangs_is_named(meet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lives and says nothing is not waited for for ever."""
    monkeypatch.setattr(meeting, "UNANSWERED_S", 0.6)

    def work(ranks: Meeting) -> Any:
        if ranks.rank == 1:
            time.sleep(2)
            return None
        return ranks.gather(None)

    found = meet(work)
    assert "rank 1 is alive, but has said nothing" in str(found[0]) and str(found[0]) == str(found[2])


def test_lost_store_names_who_keeps_it(meet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that went away with its process is no hang and no puzzle."""

    def work(ranks: Meeting) -> Any:
        def broken(*args: Any) -> Any:
            raise dist.DistNetworkError("Connection reset by peer")

        ranks._store = SimpleNamespace(**dict.fromkeys(("set", "get", "check", "add", "delete_key"), broken))
        return ranks.gather(None)

    found = meet(work, world=2)
    assert all("rank 0 does, which then has ended or died" in str(error) for error in found)


def test_little_is_left_in_the_store(meet: Run) -> None:
    """What was said is forgotten once all have heard it."""
    stores = []

    def work(ranks: Meeting) -> None:
        for _ in range(50):
            ranks.gather("x" * 1000)
        ranks.leave()
        stores.append(ranks._store)

    meet(work)
    assert stores[0].num_keys() < 15


def test_failure_before_the_meeting_is_told(meet: Run) -> None:
    """What fails before a rank could come is heard by those that are there."""

    def work(ranks: Meeting) -> Any:
        if ranks.rank == 1:
            with telling(1):
                raise ValueError("no model")
        return ranks.gather(None)

    found = meet(work, world=2)
    assert "rank 1 failed (ValueError: no model)" in str(found[0]) and isinstance(found[1], ValueError)


def test_one_process_meets_itself() -> None:
    """Without a process group there is no thread, no store and no exchange."""
    before = threading.active_count()
    ranks = Meeting()
    assert (ranks.world_size, ranks.rank, ranks.gather("said"), ranks.num_exchanges) == (1, 0, ["said"], 0)
    ranks.leave()
    assert threading.active_count() == before


def test_group_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI has none; the error says what has one."""
    monkeypatch.setattr(meeting, "Ranks", lambda group: SimpleNamespace(rank=0, world_size=2))
    monkeypatch.setattr(meeting, "_get_default_store", lambda: None)
    with pytest.raises(InvalidRequestError, match="the process group has no store; initialise torch"):
        Meeting(SimpleNamespace(group_name="0"))
