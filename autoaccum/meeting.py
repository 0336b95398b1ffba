"""The ranks of one search meet: each says something, all hear it, and a rank that does not come is named.

What is said goes through the store of torch.distributed, which every process reaches whatever became of the others: nothing
is sent over the devices, and no collective is left half done. Knows nothing of what is said.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from autoaccum.errors import AutoaccumError, InvalidRequestError, RankMismatchError
from autoaccum.ranks import Ranks

T = TypeVar("T")

BEAT_S = 1.0  # a thread of every rank gives a sign of life that often, whatever the rank is running
SILENT_S = 60.0  # a rank without a sign of life for so long has died, or has been stopped
ABSENT_S = 300.0  # so much later than the first rank may another one call: models load at different speeds
UNANSWERED_S = 1800.0  # a rank that lives and says nothing for so long hangs: two steps of a trial take a minute or so
_PARTING_S = 2.0  # the first rank, which may keep the store, leaves last, but waits no longer than this
_PAUSES_S = 0.001, 0.02  # between two looks, from the first to the longest


class _Verdict(NamedTuple):
    """Said by the first rank to all others instead of what was gathered."""

    text: str


class _AbsentError(Exception):
    """A rank that is waited for will say nothing; the text says which and why."""


@final
class Meeting:
    """The ranks of one call of autotune or probe, from its start until `leave`; one process where no group is initialised.

    Args:
        process_group: None takes the default group where there is one.

    Attributes:
        group: The same ranks as they train.
        num_exchanges: How often all ranks had to wait for each other.

    Raises:
        InvalidRequestError: When this process is not in the group, or there is nothing to send through.

    Leaves behind:
        After `leave`, nothing but a few short entries in the store of the process group.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.group = Ranks(process_group)
        self._world_size, self._rank = self.group.world_size, self.group.rank
        self._is_apart = False
        self.num_exchanges = 0
        self._over = threading.Event()
        if self._world_size > 1:
            self._store = self._joined(process_group)
            self._beat()
            threading.Thread(target=self._keep_beating, name="autoaccum sign of life", daemon=True).start()

    def _joined(self, process_group: Any) -> Any:
        """A part of the store for this call alone: the n-th call of one rank meets the n-th call of all others."""
        group: Any = dist.group.WORLD if process_group is None else process_group
        store = _get_default_store()
        if store is None:
            raise InvalidRequestError(
                "the process group has no store; initialise torch.distributed with env:// (torchrun), tcp:// or file://."
            )
        of_group = PrefixStore(f"autoaccum/{group.group_name}", store)
        with _naming_the_store():
            call = of_group.add(f"calls/{self._rank}", 1)
        return PrefixStore(str(call), of_group)

    @property
    def world_size(self) -> int:
        """How many ranks there are; 1 inside `apart`."""
        return 1 if self._is_apart else self._world_size

    @property
    def rank(self) -> int:
        """This one, from 0; 0 inside `apart`."""
        return 0 if self._is_apart else self._rank

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While inside, every rank is on its own, and nobody waits."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def gather(self, value: T) -> list[T]:
        """What every rank says, in order of rank. All ranks have to call this equally often.

        Raises:
            RankMismatchError: When a rank has failed or died, or does not come; it is named.
        """
        if self.world_size == 1:
            return [value]
        index, self.num_exchanges = self.num_exchanges, self.num_exchanges + 1
        with _naming_the_store():
            return self._collected(index, value) if self._rank == 0 else self._told(index, value)

    def _collected(self, index: int, value: T) -> list[T]:
        """By the first rank: hear all others, and say it to all."""
        values = [value]
        try:
            for rank in range(1, self._world_size):
                values.append(self._heard(f"{index}/{rank}", rank))
        except _AbsentError as error:
            self._say(f"{index}/all", _Verdict(str(error)))
            raise RankMismatchError(str(error)) from None
        self._say(f"{index}/all", values)
        for name in ("all", *range(1, self._world_size)) if index else ():
            self._store.delete_key(f"{index - 1}/{name}")  # all have heard it, or they would not have come to this one
        return values

    def _told(self, index: int, value: T) -> list[T]:
        """By every other rank: say it to the first one, and hear all from it."""
        self._say(f"{index}/{self._rank}", value)
        try:
            answer: list[T] | _Verdict = self._heard(f"{index}/all", 0)
        except _AbsentError as error:
            raise RankMismatchError(str(error)) from None
        if isinstance(answer, _Verdict):
            raise RankMismatchError(answer.text)
        return answer

    def _say(self, key: str, value: object) -> None:
        self._store.set(key, pickle.dumps(value))

    def _heard(self, key: str, rank: int) -> Any:
        """What this rank says there, when it does.

        Raises:
            _AbsentError: When it has left, died, or waits for something else.
        """
        begun = seen = looked = time.monotonic()
        beats, pause_s = 0, _PAUSES_S[0]
        while not self._store.check([key]):
            if self._store.check([f"gone/{rank}"]) and not self._store.check([key]):
                raise _AbsentError(self._store.get(f"gone/{rank}").decode())
            now = time.monotonic()
            if now - looked >= BEAT_S:
                looked, counted = now, self._store.add(f"beats/{rank}", 0)
                beats, seen = (counted, now) if counted != beats else (beats, seen)
                _refuse_silence(rank, beats, now - seen, now - begun)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _PAUSES_S[1])
        return pickle.loads(self._store.get(key))

    def leave(self, error: BaseException | None = None) -> None:
        """The end of the meeting for this rank, which all others hear of when they wait for it.

        Args:
            error: What ended its work; None when that is done, and then every rank waits until all are.

        Raises:
            RankMismatchError: Without an error of its own, when another rank could not finish.
        """
        if self._world_size == 1 or self._over.is_set():
            return
        try:
            if error is None:
                self.gather(None)
        except BaseException as found:
            error = found
            raise
        finally:
            self._over.set()
            with suppress(RuntimeError):  # the store may be gone with the rank that kept it
                self._part(error)

    def _part(self, error: BaseException | None) -> None:
        self._store.set(f"gone/{self._rank}", _last_words(self._rank, error).encode())
        left, until = self._store.add("left", 1), time.monotonic() + _PARTING_S
        while self._rank == 0 and left < self._world_size and time.monotonic() < until:
            time.sleep(_PAUSES_S[1])
            left = self._store.add("left", 0)

    def _beat(self) -> None:
        with _naming_the_store():
            self._store.add(f"beats/{self._rank}", 1)

    def _keep_beating(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._beat()
            except RankMismatchError:  # whoever needs the store next says so
                return


@contextmanager
def telling(process_group: Any) -> Iterator[None]:
    """What fails inside, before a rank comes to the meeting, is told to those that are there already."""
    try:
        yield
    except Exception as error:
        with suppress(AutoaccumError):  # this rank's own error matters more
            Meeting(process_group).leave(error)
        raise


def _last_words(rank: int, error: BaseException | None) -> str:
    if isinstance(error, RankMismatchError):
        return str(error)  # it is of another rank
    text = "" if error is None else f"{type(error).__name__}: {error}"[:500]
    return f"rank {rank} failed ({text}); its own traceback says where." if error else f"rank {rank} has left already."


@contextmanager
def _naming_the_store() -> Iterator[None]:
    """A store that is gone is the fault of the rank that kept it."""
    try:
        yield
    except RankMismatchError:
        raise
    except RuntimeError as error:  # torch.distributed.DistError is one
        raise RankMismatchError(
            "the store of the process group cannot be reached any more. Unless torchrun keeps it, rank 0 does, which then "
            f"has ended or died ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})."
        ) from error


def _refuse_silence(rank: int, beats: int, silent_s: float, waited_s: float) -> None:
    if beats == 0 and waited_s > ABSENT_S:
        raise _AbsentError(
            f"rank {rank} has not come for {ABSENT_S:.0f} s; autotune and probe have to be called on every rank."
        )
    if beats and silent_s > SILENT_S:
        raise _AbsentError(f"rank {rank} has not answered for {SILENT_S:.0f} s: it has died, or was stopped.")
    if waited_s > UNANSWERED_S * (1 if rank else 2):  # the first one may itself be waiting for another, and names it then
        raise _AbsentError(f"rank {rank} is alive, but has said nothing for {waited_s:.0f} s: it hangs.")
