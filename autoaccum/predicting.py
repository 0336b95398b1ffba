"""One prediction: from a workload and the names of GPUs to a plan of which nothing has run.

What fits is decided in `prediction`; here it is written down, with what is known of its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from torch import nn

from autoaccum.environment import environment_of
from autoaccum.errors import InvalidRequestError, NothingFitsError
from autoaccum.prediction.fitting import Fitting, Found
from autoaccum.prediction.forecast import in_blocks
from autoaccum.prediction.gpu_traces import Played
from autoaccum.prediction.gpus import GPUS, Gpu
from autoaccum.prediction.timeline import timeline_of
from autoaccum.probing import MICRO_BATCHES_PER_WINDOW, WINDOWS_PER_PROBE
from autoaccum.records import Environment, Levers, Outlook, PlanRecord, Prediction, Timeline
from autoaccum.report.picture import drawing_to
from autoaccum.request import Request
from autoaccum.schedule import whole_number
from autoaccum.shards import is_sharded
from autoaccum.units import format_bytes
from autoaccum.workload import Workload


@final
class Predictor:
    """Predicts one call on any number of GPUs."""

    def __init__(self, workload: Workload, request: Request, world_size: int) -> None:
        self.fitting = Fitting(workload, request, world_size)
        self.workload, self.request = workload, self.fitting.request

    def outlook(self, gpu: Gpu) -> Outlook:
        """One row of the table over GPUs."""
        found = self.fitting.find(gpu)
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
        found = self.fitting.find(gpu)
        if found.best is None or found.schedule is None:
            raise NothingFitsError(self._needed(gpu, found.played), ())
        request, own = self.request, found.schedule.sizes[0]
        assert request.target_batch is not None
        prediction = self._prediction(gpu, own, found, outlooks)
        return PlanRecord(
            target_batch=request.target_batch,
            world_size=self.fitting.world_size,
            effective_batch=sum(map(sum, found.schedule.sizes)),
            micro_batch=max(own),
            accumulation_steps=len(own),
            micro_batch_sizes=own,
            max_micro_batch=found.best,
            limited_by=self.fitting.bound if found.best == self.fitting.sizes[-1] else "memory",
            evidence="predicted",
            multiple_of=request.multiple_of,
            equal_micro_batches=request.equal_micro_batches,
            levers=found.levers,
            budget_bytes=self.fitting.limit_bytes(gpu),
            predicted_peak_bytes=prediction.peak_bytes,
            warnings=(
                *self.workload.warnings,
                *self.fitting.traces(found.levers).notes(),
                *found.schedule.warnings,
                *self._doubts(gpu, prediction),
            ),
            memory=self.workload.account(prediction.by_kind.get("optimizer state")),
            prediction=prediction,
            timeline=self.memory_over_time(gpu, max(own), found.levers),
            skipped=self.fitting.space.skipped,
            environment=self._environment(gpu),
        )

    def _needed(self, gpu: Gpu, played: Played) -> str:
        needed = played.reserved_bytes + gpu.context_bytes
        account = self.workload.account()
        weights = account.trainable_bytes + account.frozen_bytes + account.buffer_bytes
        limit = self.fitting.limit_bytes(gpu)
        larger = next((other.name for other in GPUS if other.total_bytes >= needed * 1.02), None)
        remedy = (
            f"The smallest listed GPU with that much memory is the {larger}."
            if larger
            else f"No listed GPU has that much (the largest, {GPUS[-1].name}, has {format_bytes(GPUS[-1].total_bytes)}): "
            "shard the model over several GPUs, or use a smaller model, sample or optimizer state."
        )
        return (
            f"micro_batch={self.fitting.sizes[0]} is predicted to need {format_bytes(needed)} on a {gpu.name}, and may hold "
            f"{format_bytes(limit)}. Weights and buffers alone take {format_bytes(weights)}, gradients "
            f"{format_bytes(account.gradient_bytes)}. {remedy}"
        )

    def _doubts(self, gpu: Gpu, prediction: Prediction) -> list[str]:
        limit = self.fitting.limit_bytes(gpu)
        if prediction.high_bytes <= limit:
            return []
        return [
            f"The predicted peak of {format_bytes(prediction.peak_bytes)} may be up to "
            f"{format_bytes(prediction.high_bytes)}, more than the {format_bytes(limit)} there are; prove it on the GPU "
            "with autotune."
        ]

    def _prediction(self, gpu: Gpu, own: Sequence[int], found: Found, outlooks: Sequence[Outlook]) -> Prediction:
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
            not_modelled=self.fitting.traces(found.levers).on(gpu).not_modelled,
            outlooks=tuple(outlooks),
        )

    def memory_over_time(self, gpu: Gpu, size: int, levers: Levers) -> Timeline:
        """What is held over the last traced optimizer step, for a picture."""
        return timeline_of(
            self.fitting.traces(levers).on(gpu).growth,
            size,
            in_blocks,
            title=f"One optimizer step on a {gpu.name}, micro-batch {size}, predicted",
            limit_bytes=self.fitting.limit_bytes(gpu) - gpu.context_bytes,
        )

    def _environment(self, gpu: Gpu) -> Environment:
        return environment_of(
            self.workload,
            device=gpu.name,
            device_name=f"{gpu.architecture}, {format_bytes(gpu.total_bytes)}, not here: nothing was run",
            world_size=self.fitting.world_size,
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
        predictor.fitting.limit_bytes(gpu)  # a budget that cannot be is refused before anything is traced
    outlooks = [predictor.outlook(gpu) for gpu in gpus] if len(gpus) > 1 else []
    chosen = next((gpu for gpu, row in zip(gpus, outlooks, strict=False) if row.fits), gpus[-1])
    plan = predictor.plan(chosen, outlooks)
    if draw is not None and plan.timeline is not None:
        draw(plan.timeline)
    return plan
