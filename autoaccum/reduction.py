"""One gradient for all ranks: one exchange of what each did, and one reduction of what each accumulated.

No collective runs inside a window. So ranks may have different numbers of micro-batches or no data at all, and one that runs
out of memory leaves nobody waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from math import inf, isclose
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from autoaccum.errors import RankMismatchError
from autoaccum.gradients import Accumulation
from autoaccum.ranks import Ranks

_BUCKET_BYTES = 25 * 2**20  # the size that DistributedDataParallel chose for its own buckets


class Status(IntEnum):
    """How a rank's part of a window ended."""

    DONE = 0
    OUT_OF_MEMORY = 1  # a smaller size can be tried
    FAILED = 2


class Standing(NamedTuple):
    """What a rank says at the end of its part.

    Attributes:
        weight: Over all its micro-batches.
        limit: The micro-batch that it can still try, where memory ran out.
        fingerprint: Of its parameters, where they have to be compared.
    """

    status: Status
    weight: float = 0.0
    limit: float = inf
    fingerprint: float = 0.0


class Agreement(NamedTuple):
    """What all ranks said together.

    Attributes:
        weight: Over all ranks.
        limit: The smallest of all.
        dense, sparse: How many ranks have such a gradient, by parameter.
    """

    weight: float
    status: Status
    limit: float
    dense: tuple[int, ...] = ()
    sparse: tuple[int, ...] = ()


@final
class Reducer:
    """The exchanges of one window over the ranks that train together."""

    def __init__(self, process_group: Any = None) -> None:
        self.ranks = Ranks(process_group)
        self._group = process_group
        self._stages: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self.ranks.world_size

    def agree(self, standing: Standing, gradients: Sequence[Tensor | None]) -> Agreement:
        """Say how this rank's part ended and hear all others.

        Args:
            gradients: Of every parameter, the same number on every rank.

        Raises:
            RankMismatchError: When another rank failed, on the ranks that did not; when their parameters differ, on all.
        """
        if self.world_size == 1:
            return Agreement(standing.weight, standing.status, standing.limit)
        world, count = self.world_size, len(gradients)
        own = [len(gradients), sum(g is not None and not g.is_sparse for g in gradients)]
        limit = -1.0 if standing.limit == inf else standing.limit
        by_rank = torch.zeros(5, world, dtype=torch.float64)  # a column for each rank
        by_rank[:, self.ranks.rank] = torch.tensor(
            [float(standing.status), limit, standing.fingerprint, *own], dtype=torch.float64
        )
        heard = self._summed(torch.cat([torch.tensor([standing.weight], dtype=torch.float64), by_rank.flatten()]))
        statuses, limits, fingerprints, counts, dense = heard[1:].view(5, world).tolist()
        self._raise_for(statuses, standing.status)
        status = Status(int(max(statuses)))
        if status is Status.DONE:
            _refuse_differing(fingerprints, counts)
        # Which rank lacks which gradient is only asked where one lacks any.
        complete = status is not Status.DONE or dense == counts
        kinds = [(world, 0)] * count if complete else self._kinds(gradients)
        return Agreement(
            weight=float(heard[0]),
            status=status,
            limit=min(inf if limit < 0 else limit for limit in limits),
            dense=tuple(dense_ranks for dense_ranks, _ in kinds),
            sparse=tuple(sparse_ranks for _, sparse_ranks in kinds),
        )

    def _kinds(self, gradients: Sequence[Tensor | None]) -> list[tuple[int, int]]:
        """On how many ranks each parameter has a dense and a sparse gradient."""
        own = [(g is not None and not g.is_sparse, g is not None and g.is_sparse) for g in gradients]
        return [(int(dense), int(sparse)) for dense, sparse in self._summed(torch.tensor(own, dtype=torch.float64)).tolist()]

    def settle(self, failed: bool, loss: float) -> float:
        """Say whether this rank's step was taken, and its part of the loss; gives the loss over all ranks.

        Raises:
            RankMismatchError: When the step of another rank failed.
        """
        if self.world_size == 1:
            return loss
        said = torch.zeros(1 + self.world_size, dtype=torch.float64)
        said[0], said[1 + self.ranks.rank] = loss, float(Status.FAILED if failed else Status.DONE)
        heard = self._summed(said).tolist()
        self._raise_for(heard[1:], Status.FAILED if failed else Status.DONE)
        return float(heard[0])

    def any(self, flag: bool, failed: bool = False) -> bool:
        """Whether the flag is up on any rank.

        Raises:
            RankMismatchError: When another rank failed.
        """
        return self.settle(failed, float(flag)) > 0

    def _raise_for(self, statuses: Sequence[float], own: Status) -> None:
        failed = [rank for rank, status in enumerate(statuses) if status == Status.FAILED]
        if failed and own is not Status.FAILED:
            raise RankMismatchError(
                f"rank {failed[0]} could not finish the window, so no rank can; its own traceback says why."
            )

    def _summed(self, said: Tensor) -> Tensor:
        # On the host where the group can: reading from the device would wait for everything queued there.
        where = "cpu" if "gloo" in str(dist.get_backend_config(self._group)) else torch.accelerator.current_accelerator()
        placed = said.to(where)
        with _naming_lost_ranks():
            dist.all_reduce(placed, group=self._group)
        return placed.cpu()

    def prepare(self, gradients: Iterable[Tensor | None]) -> None:
        """Get the memory for the reduction, while running out of it can still be told to the others."""
        if self.world_size > 1:
            for bucket in _buckets([g for g in gradients if g is not None and not g.is_sparse]):
                if not _is_in_place(bucket):
                    self._staging(bucket)

    def reduce(self, accumulation: Accumulation, agreement: Agreement, factor: float) -> None:
        """Replace every gradient by the sum over ranks of `factor` times it; ranks end bit-equal.

        A parameter that is without a gradient on every rank stays so.
        """
        if self.world_size == 1:
            return
        for index, gradient in enumerate(accumulation.gradients()):
            if gradient is None and (agreement.dense[index] or agreement.sparse[index]):
                accumulation.fill(index)
        dense = []
        for index, gradient in enumerate(accumulation.gradients()):
            if gradient is None:
                continue
            if agreement.dense[index]:  # on some rank; another may have a sparse one
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                    accumulation.set(index, gradient)
                dense.append(gradient)
            else:
                sparse = gradient if gradient.is_sparse else gradient.to_sparse(1)
                accumulation.set(index, self._sum_of_sparse(sparse, factor))
        for bucket in _buckets(dense):
            self._sum_bucket(bucket, factor)

    def _sum_bucket(self, bucket: Sequence[Tensor], factor: float) -> None:
        if _is_in_place(bucket):
            dist.all_reduce(bucket[0].mul_(factor).view(-1), group=self._group)
            return
        flat = self._staging(bucket)
        torch.cat([gradient.reshape(-1) for gradient in bucket], out=flat)
        dist.all_reduce(flat.mul_(factor), group=self._group)
        _unflatten(flat, bucket)

    def _staging(self, bucket: Sequence[Tensor]) -> Tensor:
        """Memory for this bucket, the same in every window."""
        count, like = sum(tensor.numel() for tensor in bucket), bucket[0]
        key = (like.dtype, like.device)
        if key not in self._stages or self._stages[key].numel() < count:
            self._stages[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._stages[key][:count]

    def _sum_of_sparse(self, gradient: Tensor, factor: float) -> Tensor:
        """Gathered and added in order of rank: not every backend sums sparse tensors."""
        own = gradient.coalesce()
        parts = self.ranks.gather((own.indices().cpu(), own.values().mul(factor).cpu()))
        indices = torch.cat([part for part, _ in parts], dim=1).to(own.device)
        values = torch.cat([part for _, part in parts]).to(own.device)
        return torch.sparse_coo_tensor(indices, values, own.shape, check_invariants=False).coalesce()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first one's values, as DistributedDataParallel does with buffers."""
        if self.world_size == 1:
            return
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        with torch.no_grad():
            for bucket in _buckets(list(tensors)):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.broadcast(flat, source, group=self._group)
                _unflatten(flat, bucket)


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """A connection that breaks while ranks say how they stand is the fault of one that is gone."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError is one
        raise RankMismatchError(
            "another rank cannot be reached any more: it has ended or died, and its own output says why. Start all ranks "
            f"again, from a checkpoint ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})."
        ) from error


def _refuse_differing(fingerprints: Sequence[float], counts: Sequence[float]) -> None:
    if len(set(counts)) > 1:
        raise RankMismatchError(
            f"the ranks train different numbers of parameters ({[int(count) for count in counts[:8]]}); freeze the same "
            "ones on all ranks."
        )
    if not all(isclose(fingerprint, fingerprints[0], rel_tol=1e-12) for fingerprint in fingerprints):
        raise RankMismatchError(
            "the ranks' parameters differ before the first step; give all ranks the same, by the same seed or checkpoint, "
            "or wrap the model in DistributedDataParallel."
        )


def fingerprint_of(tensors: Iterable[Tensor]) -> float:
    """A number in which values and their order count, and NaN does not."""
    total = 0.0
    for tensor in tensors:
        for index, part in enumerate(torch.split(tensor.detach().reshape(-1), 2**20)):
            values = part.double().nan_to_num()
            places = torch.linspace(1.0, 2.0 + index, len(values), dtype=torch.float64, device=values.device)
            total = total * 0.7 + float(values @ places)
    return total


def _is_in_place(bucket: Sequence[Tensor]) -> bool:
    """Whether it is reduced where it lies, and takes no memory."""
    return len(bucket) == 1 and bucket[0].is_contiguous()


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, values in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, together about as large as a bucket."""
    waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bucket = waiting.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(held.nbytes for held in bucket) + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = waiting[(tensor.dtype, tensor.device)] = []
        bucket.append(tensor)
    yield from waiting.values()
