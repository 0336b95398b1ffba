"""The setting to use on a GPU that is not here: the largest micro-batch that fits, with as little computed again as fits.

Nothing is run or timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from autoaccum.choose import Schedule, schedule_for
from autoaccum.errors import InvalidRequestError
from autoaccum.levers import Subject, space_for
from autoaccum.prediction.forecast import in_blocks
from autoaccum.prediction.gpu_traces import CUDA, Basis, GpuTraces, Played
from autoaccum.prediction.gpus import Gpu
from autoaccum.records import AS_IT_IS, Levers, LimitedBy
from autoaccum.request import Request, checked, largest_of_use
from autoaccum.schedule import ladder, shares
from autoaccum.tradeoffs.choosing import recomputation
from autoaccum.tradeoffs.points import with_blocks
from autoaccum.units import Share, format_bytes, parse_size, shown
from autoaccum.workload import Workload


class Found(NamedTuple):
    """The largest size that fits on a GPU (None: none does), or the smallest with what it would take."""

    best: int | None
    played: Played
    schedule: Schedule | None
    levers: Levers = AS_IT_IS

    def order(self) -> tuple[int, float, tuple[int, int]]:
        """What is to be preferred: fewer micro-batches, then fewer operations, then less that is computed again."""
        steps = 0 if self.schedule is None else len(self.schedule.sizes[0])
        return steps, sum(self.played.growth.flops(1).values()), recomputation(self.levers)


@final
class Fitting:
    """What fits on any number of GPUs, for one call."""

    def __init__(self, workload: Workload, request: Request, world_size: int) -> None:
        self.request = checked(request, world_size)
        assert self.request.target_batch is not None
        self.workload, self.world_size = workload, world_size
        self.share = shares(self.request.target_batch, world_size)[0]
        self.top, self.bound = self._top()
        self.sizes = self._sizes()
        self._traces: dict[Levers, GpuTraces] = {}
        self.space = space_for(self.request.levers, self._subject())

    def _subject(self) -> Subject:
        optimizer = None if self.request.levers == "none" else self.workload.make_optimizer()
        return Subject(self.workload.module, CUDA, optimizer, is_here=False)

    def traces(self, levers: Levers) -> GpuTraces:
        """Traces under these levers, made when they are first asked for."""
        return self._traces.setdefault(levers, GpuTraces(self.workload, self.request.multiple_of, levers))

    def _top(self) -> tuple[int, LimitedBy]:
        found = largest_of_use(self.request, self.share, self.workload.source.length)
        assert found is not None  # the share is always known
        return found

    def _sizes(self) -> Sequence[int]:
        multiple_of = self.request.multiple_of
        if self.request.equal_micro_batches:  # only what divides the share can be used
            allowed_sizes = range(multiple_of, self.top + 1, multiple_of)
            divisors = [size for size in allowed_sizes if self.share % size == 0]
            return divisors if self.top < self.share or self.share in divisors else [*divisors, self.share]
        allowed = self.top // multiple_of * multiple_of
        return sorted({*ladder(self.share, self.top, multiple_of), allowed or self.top})

    def limit_bytes(self, gpu: Gpu) -> int:
        """What the process may hold on this GPU."""
        if self.request.budget is None:
            return gpu.total_bytes
        asked = parse_size(self.request.budget)
        size = int(gpu.total_bytes * asked.frac) if isinstance(asked, Share) else asked
        if size > gpu.total_bytes:
            raise InvalidRequestError(
                f"budget={shown(self.request.budget)} is larger than the {gpu.name}, which has "
                f"{format_bytes(gpu.total_bytes)}; lower it, or name another GPU."
            )
        return size

    def find(self, gpu: Gpu) -> Found:
        """The setting to use on this GPU: as it is, where that fits; else with as little computed again as fits.

        Nothing is timed, so that a larger micro-batch is not bought with levers.
        """
        found = self._find(gpu, AS_IT_IS)
        if found.best is not None or self.space.is_trivial:
            return found
        turned = (self._turned(gpu, family) for family in self.space.families())
        return min((other for other in turned if other is not None), key=Found.order, default=found)

    def _turned(self, gpu: Gpu, family: Levers) -> Found | None:
        """The largest size with all blocks checkpointed, with the smallest number of blocks with which that size fits."""
        if family == AS_IT_IS:
            return None
        if family.checkpointing == "off":
            found = self._find(gpu, family)
            return None if found.best is None else found
        best: Found | None = None
        low, high = 0, self.space.num_blocks + 1
        while high - low > 1:  # the first one with all blocks
            blocks = high - 1 if best is None else (low + high) // 2
            found = self._find(gpu, with_blocks(family, blocks))
            if found.best is None or (best is not None and found.best < (best.best or 0)):
                if best is None:
                    return None
                low = blocks
            else:
                best, high = found, blocks
        return best

    def _find(self, gpu: Gpu, levers: Levers) -> Found:
        """The largest size of use that runs on this GPU without the allocator flushing its cache."""
        basis = self.traces(levers).on(gpu)
        growth = basis.growth
        allowed = self.limit_bytes(gpu) - gpu.context_bytes
        low, high = 0, len(self.sizes)
        while low < high:  # live bytes grow with the size, reserved ones may not
            middle = (low + high) // 2
            if int(growth.live(self.sizes[middle], in_blocks).max()) <= allowed:
                low = middle + 1
            else:
                high = middle
        for size in reversed(self.sizes[:low]):
            played = basis.replay(size)
            if played.reserved_bytes <= allowed:
                return self._found(size, basis, played, levers)
        return Found(None, basis.replay(self.sizes[0]), None, levers)

    def _found(self, size: int, basis: Basis, played: Played, levers: Levers) -> Found:
        assert self.request.target_batch is not None
        schedule = schedule_for(
            self.request.target_batch,
            self.world_size,
            size,
            multiple_of=self.request.multiple_of,
            equal=self.request.equal_micro_batches,
        )
        used = schedule.micro_batch
        return Found(size, played if used == size else basis.replay(used), schedule, levers)
