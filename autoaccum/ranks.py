"""The processes of a group: how many, which one this is, what they say while they train, and one outcome for all of them.

How they talk while a search runs is in `meeting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist

from autoaccum.errors import InvalidRequestError, RankMismatchError
from autoaccum.records import Fit, Outcome, OutOfMemory, Refused

T = TypeVar("T")


@final
class Ranks:
    """The processes that train together; one process on its own where no group is initialised.

    Args:
        process_group: None takes the default group where there is one.

    Raises:
        InvalidRequestError: When this process is not in the group.
    """

    def __init__(self, process_group: Any = None) -> None:
        self._group = process_group
        self._together = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(process_group) if self._together else 1
        self.rank = dist.get_rank(process_group) if self._together else 0
        if self.rank < 0:
            raise InvalidRequestError("this process is not one of the ranks of process_group=; it cannot take part.")

    def gather(self, value: T, error: str | None = None) -> list[T]:
        """What every rank gives, in order of rank. `error`: what ended this rank's work, if anything did.

        Raises:
            RankMismatchError: On the ranks that did not fail, naming the one that did.
        """
        if self.world_size == 1:
            return [value]
        given: list[tuple[T, str | None]] = [(value, error)] * self.world_size
        dist.all_gather_object(given, (value, error), group=self._group)
        failed = [(rank, other) for rank, (_, other) in enumerate(given) if other is not None]
        if failed and error is None:
            raise RankMismatchError(f"rank {failed[0][0]} failed ({failed[0][1]}); its own traceback says where.")
        return [value for value, _ in given]


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that all ranks must go by: a failure before a fit, a fit with the largest peak and the longest times."""
    for kind in (OutOfMemory, Refused):
        found = next((outcome for outcome in outcomes if isinstance(outcome, kind)), None)
        if found is not None:
            return found
    fits = [outcome for outcome in outcomes if isinstance(outcome, Fit)]
    highest = max(fits, key=lambda fit: fit.peak_bytes)
    slowest = tuple(max(times) for times in zip(*(fit.step_times_s for fit in fits), strict=False))
    return Fit(
        peak_bytes=highest.peak_bytes,
        peak_allocated_bytes=highest.peak_allocated_bytes,
        peak_reserved_bytes=highest.peak_reserved_bytes,
        step_times_s=slowest,
    )
