"""One prediction: from a workload and the names of GPUs to a plan of which nothing has run.

Traces come from `prediction`; here a micro-batch is chosen by them, as the search would, and written down.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TypeVar, final

import psutil
import torch
from torch import nn

from autoaccum.choose import Schedule, schedule_for
from autoaccum.errors import InvalidRequestError, NothingFitsError
from autoaccum.levers import Subject, space_for
from autoaccum.prediction.allocator import Replay, replay
from autoaccum.prediction.apart import ProcessDiedError, apart, can_run_apart
from autoaccum.prediction.corrections import as_on, kernel_choices
from autoaccum.prediction.forecast import in_blocks, reason_of
from autoaccum.prediction.gpus import GPUS, Gpu
from autoaccum.prediction.growth import Growth, NotAffineError, growth_of
from autoaccum.prediction.timeline import timeline_of
from autoaccum.prediction.trace import Trace, fake_trace, is_refusal, load_fake_tensors, record_windows
from autoaccum.preserve import Snapshot, preserved
from autoaccum.probing import MICRO_BATCHES_PER_WINDOW, WINDOWS_PER_PROBE
from autoaccum.records import Environment, Levers, LimitedBy, Outlook, PlanRecord, Prediction, Timeline
from autoaccum.report.picture import drawing_to
from autoaccum.request import Request, checked, largest_of_use
from autoaccum.schedule import ladder, shares, whole_number
from autoaccum.shards import is_sharded
from autoaccum.tradeoffs.choosing import recomputation
from autoaccum.tradeoffs.points import with_blocks
from autoaccum.units import Share, format_bytes, parse_size, shown
from autoaccum.workload import Workload, num_bytes

T = TypeVar("T")

_AS_IT_IS, _GPU = Levers(), torch.device("cuda")
_ROOM_TO_RUN = 6  # weights, gradients, two optimizer states and a copy of the weights to put back, and some activations


class Played(NamedTuple):
    """The allocations of a size, and what the caching allocator makes of them."""

    growth: Growth
    replay: Replay

    @property
    def reserved_bytes(self) -> int:
        """The most that is reserved at once."""
        return self.replay.peak_reserved_bytes


class Basis(NamedTuple):
    """The growth that a GPU's predictions rest on, and what it does not contain."""

    growth: Growth
    not_modelled: tuple[str, ...]

    def replay(self, rows: int) -> Played:
        """What the allocator makes of it: with the workspaces that a library may take and without, what reserves more.

        Workspaces come and go between other blocks, so that with them less may be reserved in the end.
        """
        variants = [self.growth, self.growth.without_passing_workspaces()]
        played = [Played(one, replay(one.events, one.sizes(rows).tolist())) for one in variants if one is not None]
        return max(played, key=lambda found: found.replay.peak_reserved_bytes)


class _Refused(NamedTuple):
    """Why fake tensors tell nothing; where it is neither of the two, real tensors may tell."""

    reason: str
    is_users: bool = False
    is_not_affine: bool = False


def _not_affine(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"this training step cannot be predicted: {reason}. autotune, on the device itself, searches without."
    )


def _isolated(run: Callable[[], T]) -> T:
    """In a process of its own where that can be, so that nothing the step keeps elsewhere comes to hold fake tensors."""
    if not can_run_apart():
        return run()
    load_fake_tensors()
    return apart(run)


@final
class GpuTraces:
    """Traces of one workload for any GPU; GPUs that would take the same kernels share them."""

    def __init__(self, workload: Workload, multiple_of: int = 1, levers: Levers = _AS_IT_IS) -> None:
        self._workload, self._multiple_of, self._levers = workload, multiple_of, levers
        self._known: list[tuple[Gpu, set[frozenset[str]], Growth]] = []
        self._refusal: str | None = None

    def on(self, gpu: Gpu) -> Basis:
        """What this GPU would allocate.

        Raises:
            InvalidRequestError: When the training step cannot be traced.
            Exception: Whatever the user's code raises.
        """
        for other, seen, growth in self._known:
            if kernel_choices(seen, gpu) == kernel_choices(seen, other):
                return Basis(growth.with_workspace(other.workspace_bytes, gpu.workspace_bytes), self._not_modelled())
        seen = set()
        growth = self._traced(gpu, seen)
        self._known.append((gpu, seen, growth))
        return Basis(growth, self._not_modelled())

    def _traced(self, gpu: Gpu, seen: set[frozenset[str]]) -> Growth:
        try:
            found = _isolated(partial(self._attempted, gpu))
        except ProcessDiedError as error:
            found = _Refused(str(error))
        if not isinstance(found, _Refused):
            growth, notes = found
            seen |= notes
            return growth
        if found.is_users:  # raised again here, with its own traceback
            fake_trace(
                self._workload,
                2 * self._multiple_of,
                host_batch=False,
                adjusted=as_on(gpu),
                levers=self._levers,
                device=_GPU,
            )
        if found.is_not_affine:
            raise _not_affine(found.reason)
        self._refusal = found.reason
        self._check_room()
        with preserved(
            self._workload.module, self._workload.own_optimizer, device=self._workload.device, on_disk=True
        ) as snapshot:
            try:
                return growth_of(partial(self._really_traced, gpu, snapshot), self._multiple_of)
            except NotAffineError as error:
                raise _not_affine(str(error)) from None

    def _attempted(self, gpu: Gpu) -> tuple[Growth, set[frozenset[str]]] | _Refused:
        seen: set[frozenset[str]] = set()
        adjusted = as_on(gpu, seen=seen)
        try:
            growth = growth_of(
                lambda rows: fake_trace(
                    self._workload,
                    rows,
                    host_batch=False,
                    sums_in_place=True,
                    adjusted=adjusted,
                    levers=self._levers,
                    device=_GPU,
                ),
                self._multiple_of,
                checked=True,
            )
        except NotAffineError as error:
            return _Refused(str(error), is_not_affine=True)
        except Exception as error:  # noqa: BLE001 - the user's own comes out below
            is_users = self._workload.device.type != "cpu" and not is_refusal(error)
            return _Refused(reason_of(error), is_users=is_users)
        return growth, seen

    def _really_traced(self, gpu: Gpu, snapshot: Snapshot, rows: int) -> Trace:
        batch = self._workload.source.take(rows)
        try:
            return record_windows(
                self._workload,
                batch,
                rows,
                host_batch=False,
                sums_in_place=True,
                adjusted=as_on(gpu, real=True),
                levers=self._levers,
                device=_GPU,
            )
        finally:
            snapshot.restore()

    def _check_room(self) -> None:
        """Real passes need a model with values, on the host, and room for its training."""
        remedy = (
            "It can be traced on real tensors at two small sizes instead, for which the model has to be on the cpu and hold "
            "values; or let autotune search on the device itself."
        )
        if self._workload.device.type != "cpu":
            raise InvalidRequestError(f"fake tensors cannot run this training step ({self._refusal}). {remedy}")
        needed = _ROOM_TO_RUN * num_bytes(self._workload.module.parameters())
        free = psutil.virtual_memory().available
        if needed > free:
            raise InvalidRequestError(
                f"fake tensors cannot run this training step ({self._refusal}), and to trace it on real tensors would take "
                f"some {format_bytes(needed)} of host memory, of which {format_bytes(free)} are free."
            )

    def notes(self) -> tuple[str, ...]:
        """What was done instead of fake tensors, where they were refused."""
        if self._refusal is None:
            return ()
        return (
            f"The training step does not run on fake tensors ({self._refusal}); it was traced on real ones, small sizes.",
        )

    def _not_modelled(self) -> tuple[str, ...]:
        found = [
            "batches of other shapes than the sample's, such as texts of other lengths",
            "temporaries inside kernels (attention's backward, reductions)",
            "other processes and the desktop on the GPU",
        ]
        modules = list(self._workload.module.modules())
        if any(isinstance(module, (nn.modules.conv._ConvNd)) for module in modules):
            found.append(
                "which workspaces cuDNN takes for convolutions: its versions differ, and all that it may take are counted"
            )
        if any(isinstance(module, nn.RNNBase) for module in modules):
            found.append("cuDNN's reserve for recurrent layers, which are traced in their parts")
        if self._refusal is not None:
            found.append(
                "the GPU's attention kernels, since the training step was traced on real tensors in host memory, and what "
                "depends on values: the small sizes that were traced may keep more or less of their rows than others"
            )
        return tuple(found)


class _Found(NamedTuple):
    """The largest size that fits on a GPU (None: none does), or the smallest with what it would take."""

    best: int | None
    played: Played
    schedule: Schedule | None
    levers: Levers = _AS_IT_IS

    def order(self) -> tuple[int, float, tuple[int, int]]:
        """What is to be preferred: fewer micro-batches, then fewer operations, then less that is computed again."""
        steps = 0 if self.schedule is None else len(self.schedule.sizes[0])
        return steps, sum(self.played.growth.flops(1).values()), recomputation(self.levers)


@final
class Predictor:
    """Predicts one call on any number of GPUs."""

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
        return Subject(self.workload.module, _GPU, optimizer, is_here=False)

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

    def find(self, gpu: Gpu) -> _Found:
        """The setting to use on this GPU: as it is, where that fits; else with as little computed again as fits.

        Nothing is timed, so that a larger micro-batch is not bought with levers.
        """
        found = self._find(gpu, _AS_IT_IS)
        if found.best is not None or self.space.is_trivial:
            return found
        turned = (self._turned(gpu, family) for family in self.space.families())
        return min((other for other in turned if other is not None), key=_Found.order, default=found)

    def _turned(self, gpu: Gpu, family: Levers) -> _Found | None:
        """The largest size with all blocks checkpointed, with the smallest number of blocks with which that size fits."""
        if family == _AS_IT_IS:
            return None
        if family.checkpointing == "off":
            found = self._find(gpu, family)
            return None if found.best is None else found
        best: _Found | None = None
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

    def _find(self, gpu: Gpu, levers: Levers) -> _Found:
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
        return _Found(None, basis.replay(self.sizes[0]), None, levers)

    def _found(self, size: int, basis: Basis, played: Played, levers: Levers) -> _Found:
        assert self.request.target_batch is not None
        schedule = schedule_for(
            self.request.target_batch,
            self.world_size,
            size,
            multiple_of=self.request.multiple_of,
            equal=self.request.equal_micro_batches,
        )
        used = schedule.micro_batch
        return _Found(size, played if used == size else basis.replay(used), schedule, levers)

    def outlook(self, gpu: Gpu) -> Outlook:
        """One row of the table over GPUs."""
        found = self.find(gpu)
        sizes = None if found.schedule is None else found.schedule.sizes[0]
        return Outlook(
            gpu=gpu.name,
            total_bytes=gpu.total_bytes,
            fits=sizes is not None,
            peak_bytes=found.played.reserved_bytes + gpu.context_bytes,
            micro_batch=None if sizes is None else max(sizes),
            accumulation_steps=None if sizes is None else len(sizes),
            levers=found.levers,
        )

    def plan(self, gpu: Gpu, outlooks: Sequence[Outlook] = ()) -> PlanRecord:
        """The plan for this GPU.

        Raises:
            NothingFitsError: When the smallest micro-batch does not fit, with what would be needed.
        """
        found = self.find(gpu)
        if found.best is None or found.schedule is None:
            raise NothingFitsError(self._needed(gpu, found.played), ())
        request, own = self.request, found.schedule.sizes[0]
        assert request.target_batch is not None
        prediction = self._prediction(gpu, own, found, outlooks)
        return PlanRecord(
            target_batch=request.target_batch,
            world_size=self.world_size,
            effective_batch=sum(map(sum, found.schedule.sizes)),
            micro_batch=max(own),
            accumulation_steps=len(own),
            micro_batch_sizes=own,
            max_micro_batch=found.best,
            limited_by=self.bound if found.best == self.sizes[-1] else "memory",
            evidence="predicted",
            multiple_of=request.multiple_of,
            equal_micro_batches=request.equal_micro_batches,
            levers=found.levers,
            budget_bytes=self.limit_bytes(gpu),
            predicted_peak_bytes=prediction.peak_bytes,
            warnings=(
                *self.workload.warnings,
                *self.traces(found.levers).notes(),
                *found.schedule.warnings,
                *self._doubts(gpu, prediction),
            ),
            memory=self.workload.account(prediction.by_kind.get("optimizer state")),
            prediction=prediction,
            timeline=self.memory_over_time(gpu, max(own), found.levers),
            skipped=self.space.skipped,
            environment=self._environment(gpu),
        )

    def _needed(self, gpu: Gpu, played: Played) -> str:
        needed = played.reserved_bytes + gpu.context_bytes
        account = self.workload.account()
        weights = account.trainable_bytes + account.frozen_bytes + account.buffer_bytes
        limit = self.limit_bytes(gpu)
        larger = next((other.name for other in GPUS if other.total_bytes >= needed * 1.02), None)
        remedy = (
            f"The smallest listed GPU with that much memory is the {larger}."
            if larger
            else f"No listed GPU has that much (the largest, {GPUS[-1].name}, has {format_bytes(GPUS[-1].total_bytes)}): "
            "shard the model over several GPUs, or use a smaller model, sample or optimizer state."
        )
        return (
            f"micro_batch={self.sizes[0]} is predicted to need {format_bytes(needed)} on a {gpu.name}, and may hold "
            f"{format_bytes(limit)}. Weights and buffers alone take {format_bytes(weights)}, gradients "
            f"{format_bytes(account.gradient_bytes)}. {remedy}"
        )

    def _doubts(self, gpu: Gpu, prediction: Prediction) -> list[str]:
        limit = self.limit_bytes(gpu)
        if prediction.high_bytes <= limit:
            return []
        return [
            f"The predicted peak of {format_bytes(prediction.peak_bytes)} may be up to "
            f"{format_bytes(prediction.high_bytes)}, more than the {format_bytes(limit)} there are; prove it on the GPU "
            "with autotune."
        ]

    def _prediction(self, gpu: Gpu, own: Sequence[int], found: _Found, outlooks: Sequence[Outlook]) -> Prediction:
        played = found.played
        growth, peak_bytes = played.growth, played.reserved_bytes + gpu.context_bytes
        event = played.replay.peak_event
        held = growth.split(max(own), event, in_blocks)
        allocated = sum(held.values())
        error = interval_frac(self.workload.module)
        fixed, per_row = growth.flops(0), growth.flops(1)
        traced = WINDOWS_PER_PROBE * MICRO_BATCHES_PER_WINDOW
        flops = sum(fixed.values()) * len(own) + (sum(per_row.values()) - sum(fixed.values())) * sum(own)
        return Prediction(
            gpu=gpu.name,
            total_bytes=gpu.total_bytes,
            peak_bytes=peak_bytes,
            low_bytes=int(peak_bytes * (1 - error)),
            high_bytes=int(peak_bytes * (1 + error)),
            allocated_bytes=allocated,
            parts=(
                *((kind, kind_bytes) for kind, kind_bytes in held.items() if kind_bytes),
                ("cached", played.reserved_bytes - allocated),
                ("context", gpu.context_bytes),
            ),
            phase=growth.phase_at(event),
            flops_per_step=flops // traced,
            not_modelled=self.traces(found.levers).on(gpu).not_modelled,
            outlooks=tuple(outlooks),
        )

    def memory_over_time(self, gpu: Gpu, size: int, levers: Levers) -> Timeline:
        """What is held over the last traced optimizer step, for a picture."""
        return timeline_of(
            self.traces(levers).on(gpu).growth,
            size,
            in_blocks,
            title=f"One optimizer step on a {gpu.name}, micro-batch {size}, predicted",
            limit_bytes=self.limit_bytes(gpu) - gpu.context_bytes,
        )

    def _environment(self, gpu: Gpu) -> Environment:
        return Environment(
            device=gpu.name,
            device_name=f"{gpu.architecture}, {format_bytes(gpu.total_bytes)}, not here: nothing was run",
            model=type(self.workload.module).__name__,
            optimizer=self.workload.optimizer_name,
            batch=self.workload.source.description,
            world_size=self.world_size,
            python_version=platform.python_version(),
            torch_version=str(torch.__version__),
            autoaccum_version=version("autoaccum"),
            platform=platform.platform(),
        )


def interval_frac(module: nn.Module) -> float:
    """How far the truth may lie from a prediction on a GPU, as a fraction (benchmarks/accuracy_gpu.py)."""
    return 0.10 if any(isinstance(layer, nn.modules.conv._ConvNd) for layer in module.modules()) else 0.03


def predict_workload(
    workload: Workload,
    request: Request,
    gpus: Sequence[Gpu],
    *,
    world_size: int = 1,
    picture: str | Path | None = None,
) -> PlanRecord:
    """What `predict` does for a workload that is ready: the plan for the smallest of these GPUs that trains it.

    Raises:
        InvalidRequestError, MissingExtraError: When no such picture can be drawn, or the model is sharded.
        NothingFitsError: When none of them does.
    """
    if not gpus:
        raise InvalidRequestError("no GPU was named; expected a name, a size, or all.")
    if is_sharded(workload.module):
        raise InvalidRequestError(
            "the model is sharded by fully_shard, and what ranks exchange cannot be traced; predict it before it is sharded "
            "(for one GPU that holds all of it), or call autotune on every rank."
        )
    draw = None if picture is None else drawing_to(picture)
    predictor = Predictor(workload, request, whole_number(world_size, "world_size", "the ranks that train together"))
    for gpu in gpus:
        predictor.limit_bytes(gpu)  # a budget that cannot be is refused before anything is traced
    outlooks = [predictor.outlook(gpu) for gpu in gpus] if len(gpus) > 1 else []
    chosen = next((gpu for gpu, row in zip(gpus, outlooks, strict=False) if row.fits), gpus[-1])
    plan = predictor.plan(chosen, outlooks)
    if draw is not None and plan.timeline is not None:
        draw(plan.timeline)
    return plan
