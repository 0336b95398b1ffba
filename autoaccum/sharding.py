"""Models whose ranks must run together: FSDP2 shards parameters, SyncBatchNorm shares statistics.

There collectives run inside a window. So all ranks run the same number of micro-batches, and running out of memory cannot
be replayed: the others are already waiting in one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, final

from torch import nn

from autoaccum.errors import InvalidRequestError
from autoaccum.ranks import Ranks
from autoaccum.shards import mesh_size, sharded_parts


@final
class Sharding:
    """How the micro-batches of all ranks are kept in step, where they have to be.

    Attributes:
        is_sharded: FSDP2: gradients are reduced in the backward pass, as a mean over ranks.
        lockstep: Every rank must run the same number of micro-batches.

    Raises:
        InvalidRequestError: When a sharded model would not train as a whole.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._shards: list[Any] = sharded_parts(module)
        self.is_sharded = bool(self._shards)
        if self.is_sharded:
            _refuse_other_ranks(module, ranks)
        synchronised = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        self.lockstep = ranks.world_size > 1 and (self.is_sharded or synchronised)

    def scales(self, weights: Sequence[float], summed: bool) -> list[float]:
        """What each micro-batch's loss is multiplied by; where ranks run together, as many on every rank.

        Over ranks that do not run together this is the mean over this rank; the reduction makes it the mean over all.

        Raises:
            RankMismatchError: When another rank has given up.
            InvalidRequestError: On every rank, when ranks that run together do not all have data.
        """
        total, count = sum(weights), len(weights)
        if self.lockstep:
            given = self._ranks.gather((total, count))
            if not all(of_rank for _, of_rank in given):
                raise InvalidRequestError(
                    "a rank has no data in this window, but FSDP and SyncBatchNorm need all ranks to run; "
                    "give every rank at least one row."
                )
            count = max(of_rank for _, of_rank in given)
            total = sum(weight for weight, _ in given) if self.is_sharded else total
        size = self._ranks.world_size if self.is_sharded else 1  # FSDP divides by it
        scales = [size * (1.0 if summed else weight / total if total else 0.0) for weight in weights]
        return scales + [0.0] * (count - len(scales))

    def give_up(self, error: Exception) -> None:
        """Say that this rank has failed before its first micro-batch, where the others wait in `scales`."""
        self._ranks.gather((0.0, 0), f"{type(error).__name__}: {error}")

    def padded(self, micro_batches: Iterable[Any], weights: Sequence[float], count: int) -> Iterator[Any]:
        """The micro-batches, and the last one again as often as other ranks have more."""
        last: Any = None
        for last in micro_batches:
            yield last
        yield from repeat(last, count - len(weights))

    def entering(self, index: int, count: int) -> None:
        """Before micro-batch `index` of `count`: replicas of shards (HSDP) exchange gradients after the last one only."""
        for shard in self._shards:
            shard.set_requires_all_reduce(index == count - 1, recurse=False)


def _refuse_other_ranks(module: nn.Module, ranks: Ranks) -> None:
    """Refuse a model of which not all that is trained is reduced, or over other ranks than those that train together.

    Raises:
        InvalidRequestError: With the remedy.
    """
    sizes = {name: mesh_size(parameter) for name, parameter in module.named_parameters() if parameter.requires_grad}
    whole = [name for name, size in sizes.items() if size is None]
    if whole:
        raise InvalidRequestError(
            f"parameter {whole[0]!r} is trained and not sharded, so that its gradients would differ between ranks; "
            "call fully_shard(model) on the whole model as well."
        )
    others = sorted({size for size in sizes.values() if size is not None and size != ranks.world_size})
    if others:
        raise InvalidRequestError(
            f"the model is sharded over {others[0]} ranks, and {ranks.world_size} train together; pass process_group= with "
            "the ranks of its mesh."
        )
