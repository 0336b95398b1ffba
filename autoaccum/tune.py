"""autotune, probe and predict: the public calls, and the same for a workload that is ready.

What they do is in `exploring`, `reaching` and `predicting`; here are the arguments and their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.admitting import OptimizerFactory
from autoaccum.batches.layout import BatchDim
from autoaccum.batches.opaque import SplitFn
from autoaccum.cache import Cache
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.exploring import Exploration
from autoaccum.losses import LossFn, TrainingStep
from autoaccum.meeting import telling
from autoaccum.plan import Plan
from autoaccum.predicting import predict_workload
from autoaccum.prediction.gpu_names import gpus_for
from autoaccum.prediction.gpus import Gpu
from autoaccum.proportional import proportional_plan
from autoaccum.reaching import probed
from autoaccum.records import ProbeResult, Trial
from autoaccum.report.following import Follower, following
from autoaccum.request import Request
from autoaccum.session import Search
from autoaccum.workload import Weight, Workload
from autoaccum.writing import explored_plan


def autotune(
    model: nn.Module,
    sample: Any,
    target_batch: int,
    *,
    loss_fn: LossFn | None = None,
    training_step: TrainingStep | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    weight: Weight = "samples",
    budget: int | str | None = None,
    device: str | torch.device | AbstractDevice | None = None,
    batch_dim: BatchDim = None,
    split: SplitFn | None = None,
    levers: str | Sequence[str] | Mapping[str, Any] = "exact",
    objective: Literal["throughput", "memory"] = "throughput",
    max_micro_batch: int | None = None,
    multiple_of: int = 1,
    equal_micro_batches: bool = False,
    shares: Literal["equal", "proportional"] = "equal",
    time_budget_s: float | None = None,
    process_group: Any = None,
    storage: Any = None,
    cache: str | Path | None = None,
    progress: bool | None = None,
) -> Plan:
    """Find how to take one optimizer step of `target_batch` samples inside the budget, by running it.

    Every size that the plan uses was run: two optimizer steps of two micro-batches, with the optimizer's state in memory,
    and then the plan's own optimizer step.

    Args:
        model: Left as it was, bit for bit. In train mode as the caller set it; a model that is wholly in eval mode is probed
            in train mode.
        sample: A batch of any size >= 1 (tensor, tuple, list, mapping, dataclass, nested; a list of per-item dicts), a
            `Dataset`, a `DataLoader` (never iterated), or a callable `n -> batch`. Rows are the leading dimension that the
            tensors share. From a data set the largest items looked at are used, and its length bounds the micro-batch.
        target_batch: Samples per optimizer step over all ranks, >= the number of ranks.
        loss_fn: `loss_fn(output, target)` -> scalar mean loss, for samples shaped `(input, target)`.
        training_step: `training_step(model, batch)` -> scalar loss; wins over `loss_fn`. With neither, the loss that the
            model returns is used, or else the mean of its outputs, which the plan then says.
        optimizer: An `Optimizer` on this model's parameters, or a factory `params -> Optimizer`. None: AdamW. It really
            steps; its step hooks are left out.
        weight: What the loss is a mean over: "samples", `tokens("labels")`, or `batch -> number`.
        budget: Bytes, or text such as "8GiB" or "80%" (of the device's total): all that this process may hold on the device.
            On the CPU that is the resident set, interpreter included. None: what is free, less a reserve. Where a `ulimit
            -d` or `-v` of this process leaves less than the host, None and percentages are of that, and of what it counts.
        device: None: the model's. Text ("cpu", "cuda:1", "virtual:8GiB"), a `torch.device`, or a `VirtualDevice`.
        batch_dim: Which dimension holds the rows, where it cannot be seen: an int, or `{leaf name: int or None}`.
        split: `split(batch, sizes) -> list of micro-batches`, for batches that cannot be cut by rows.
        levers: Which may be turned. "exact": those that keep the numerics (activation checkpointing, the optimizer's
            implementation, offload); "all": mixed precision as well; names of levers, or `{name: levels}`, where
            `"blocks": [names of modules]` are the blocks to checkpoint instead of those that are found. "none": none, and
            the largest micro-batch that fits is taken without comparing times.
        objective: "throughput": the fastest optimizer step inside the budget; of those that are equal within the noise the
            one that computes least again, then the one with the lowest peak. "memory": the lowest peak, the fastest among
            equals.
        storage: An Optuna storage, its URL ("sqlite:///runs.db"), or the name of a journal file (.log): an interrupted
            search goes on from its trials, machines of a kind share one study, and optuna-dashboard shows it.
        cache: A folder in which plans are remembered; the same call on the same setup then costs one probe.
        max_micro_batch: No micro-batch above this many rows.
        multiple_of: Every micro-batch but a rank's last is a multiple of it.
        equal_micro_batches: One size for all micro-batches, where one number must serve (HF Trainer, DeepSpeed).
        shares: How the target is divided over ranks. "equal": all have the same number of rows, or one more, and go by the
            rank with the least room. "proportional": to the largest micro-batch that fits on each, so that a larger card
            takes more rows; levers are left as they are, `storage` and `cache` are not used, and ranks must not run in
            lockstep (FSDP, SyncBatchNorm).
        time_budget_s: Seconds after which no further size is tried, once one fits; what runs by then is run to its end.
            None: no further setting of the levers is run after 90 s, and sizes are tried to the end.
        process_group: The ranks that train together; None: the default group where one is initialised. Call on every rank,
            with the same arguments; only `budget`, `device` and the sample may differ, and of `storage` and `cache` those of
            rank 0 count. A rank that dies is named 60 s after its last sign of life, one that does not call after 300 s.
        progress: Show a bar. None: when stderr is a terminal.

    Returns:
        A `Plan`; its `effective_batch` is `target_batch`, always. Where it has several micro-batches and one process trains,
        `warnings` says so if the loss of up to 16 rows of the sample is another one when they are split.

    Raises:
        InvalidRequestError: When the call cannot be satisfied as written.
        NothingFitsError: When the smallest micro-batch does not fit; `.trials` says what was run.
        RankMismatchError: When another rank failed, died, stayed away, or was called with other arguments; it is named.
        Exception: Whatever the model, loss or optimizer raises, unchanged, at the first trial.

    Leaves behind:
        Nothing of the search. On the CPU with glibc, malloc's thresholds are at 32 MiB and 64 MiB afterwards, where glibc's
        own adapting ends; or at 64 KiB where the plan needs that to stay inside the budget, which `warnings` then says.
        A model sharded by FSDP2 is set up as its first forward pass would; call `fully_shard` on all parts before.

    Example:
        >>> import torch, autoaccum
        >>> model = torch.nn.Linear(1024, 1024)
        >>> plan = autoaccum.autotune(model, torch.randn(8, 1024), 4096, device="virtual:48MiB", levers="none")
        >>> plan.effective_batch, sum(plan.micro_batch_sizes), plan.limited_by
        (4096, 4096, 'memory')
    """
    with telling(process_group):
        if target_batch is None:
            raise InvalidRequestError("target_batch=None: autotune needs a target; probe() says how many samples fit.")
        workload = Workload(
            model,
            sample,
            loss_fn=loss_fn,
            training_step=training_step,
            optimizer=optimizer,
            weight=weight,
            batch_dim=batch_dim,
            split=split,
        )
    request = Request(
        target_batch=target_batch,
        budget=budget,
        levers=_plain(levers),
        max_micro_batch=max_micro_batch,
        multiple_of=multiple_of,
        equal_micro_batches=equal_micro_batches,
        shares=shares,
        time_budget_s=time_budget_s,
        objective=objective,
        cache=None if cache is None else str(cache),
    )
    with following(progress) as listener:
        return tune_workload(
            workload, request, device=device, process_group=process_group, listener=listener, storage=storage
        )


def probe(
    model: nn.Module,
    sample: Any,
    target_batch: int | None = None,
    *,
    loss_fn: LossFn | None = None,
    training_step: TrainingStep | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    weight: Weight = "samples",
    budget: int | str | None = None,
    device: str | torch.device | AbstractDevice | None = None,
    batch_dim: BatchDim = None,
    split: SplitFn | None = None,
    levers: str | Sequence[str] | Mapping[str, Any] = "none",
    max_micro_batch: int | None = None,
    multiple_of: int = 1,
    time_budget_s: float | None = None,
    process_group: Any = None,
    progress: bool | None = None,
    exact: bool = True,
) -> ProbeResult:
    """Find how many samples fit into one micro-batch on each rank, by running them.

    Takes what `autotune` takes, but with `levers="none"`: the step as it is. With levers, the limit is that with the levers
    turned that make the most room, whatever time they take; `result.levers` says how. The search is bounded by the rank's
    share of `target_batch`, the data set's length and `max_micro_batch`, and without any of these by 1,048,576 rows.

    Args:
        exact: False ends the search when the limit is known to within 5 %.

    Returns:
        A `ProbeResult`; its `max_micro_batch` was run in this search.

    Raises:
        InvalidRequestError: When the call cannot be satisfied as written.
        NothingFitsError: When the smallest micro-batch does not fit; `.trials` says what was run.
        RankMismatchError: As `autotune`.
        Exception: Whatever the model, loss or optimizer raises, unchanged, at the first trial.

    Leaves behind:
        What `autotune` leaves behind.

    Example:
        >>> import torch, autoaccum
        >>> model = torch.nn.Linear(1024, 1024)
        >>> result = autoaccum.probe(model, torch.randn(8, 1024), device="virtual:48MiB")
        >>> result.limited_by, result.evidence, result.measured_peak_bytes <= 48 * 2**20
        ('memory', 'exact', True)
    """
    with telling(process_group):
        workload = Workload(
            model,
            sample,
            loss_fn=loss_fn,
            training_step=training_step,
            optimizer=optimizer,
            weight=weight,
            batch_dim=batch_dim,
            split=split,
        )
    request = Request(
        target_batch=target_batch,
        budget=budget,
        levers=_plain(levers),
        max_micro_batch=max_micro_batch,
        multiple_of=multiple_of,
        time_budget_s=time_budget_s,
        exact=exact,
    )
    with following(progress) as listener:
        return probe_workload(workload, request, device=device, process_group=process_group, listener=listener)


def predict(
    model: nn.Module,
    sample: Any,
    target_batch: int,
    *,
    gpu: str | int | Gpu | Sequence[str | int | Gpu],
    loss_fn: LossFn | None = None,
    training_step: TrainingStep | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    weight: Weight = "samples",
    budget: int | str | None = None,
    batch_dim: BatchDim = None,
    split: SplitFn | None = None,
    levers: str | Sequence[str] | Mapping[str, Any] = "none",
    max_micro_batch: int | None = None,
    multiple_of: int = 1,
    equal_micro_batches: bool = False,
    world_size: int = 1,
    picture: str | Path | None = None,
) -> Plan:
    """Say what one optimizer step of `target_batch` samples would take on a GPU that is not here. Nothing is run.

    The training step is traced at two small sizes on fake tensors, which take no memory, with the kernels that the GPU would
    take; the allocations of every other size follow, and are replayed through torch's caching allocator.

    Args:
        model: In host memory, or on the meta device (`with torch.device("meta"): ...`), where it takes no memory at all.
        sample, loss_fn, training_step, optimizer, weight, batch_dim, split, max_micro_batch, multiple_of,
            equal_micro_batches: As for `autotune`.
        levers: As for `autotune`. Nothing is timed here, so they are turned only where the step does not fit as it is, and
            then as little as fits.
        target_batch: Samples per optimizer step over all ranks.
        gpu: A name ("RTX 3060 12GB", "A100 80GB"), a size ("24GiB", bytes), a list of these, or "all": the plan is then for
            the smallest that trains this, and `plan.prediction.outlooks` has a row for each.
        budget: Bytes, or text such as "8GiB" or "80%" (of the GPU's total): all that the process may hold, context included.
            None: all of it.
        world_size: Ranks that train together, each on such a GPU.
        picture: Write a picture of the memory over one optimizer step to this file, .svg or .png.

    Returns:
        A `Plan` with `evidence="predicted"`; `prediction` says what holds the peak and what was not modelled.

    Raises:
        InvalidRequestError: When the call cannot be satisfied as written, the GPU is not known, or the training step can be
            traced neither on fake tensors nor on real ones in host memory.
        NothingFitsError: When the smallest micro-batch is predicted not to fit; the message says what it needs.
        MissingExtraError: When a picture is wanted and matplotlib is not installed.
        Exception: Whatever the model, loss or optimizer raises, unchanged.

    Leaves behind:
        Nothing but the picture.

    Example:
        >>> import torch, autoaccum
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(16384, 16384)
        >>> plan = autoaccum.predict(model, torch.randn(8, 16384), 4096, gpu="RTX 3060 12GB")
        >>> plan.evidence, plan.effective_batch, plan.predicted_peak_bytes > 4 * 2**30
        ('predicted', 4096, True)
    """
    if target_batch is None:
        raise InvalidRequestError("target_batch=None: predict needs a target, the samples of one optimizer step.")
    named = gpus_for(gpu)
    workload = Workload(
        model,
        sample,
        loss_fn=loss_fn,
        training_step=training_step,
        optimizer=optimizer,
        weight=weight,
        batch_dim=batch_dim,
        split=split,
    )
    request = Request(
        target_batch=target_batch,
        budget=budget,
        levers=_plain(levers),
        max_micro_batch=max_micro_batch,
        multiple_of=multiple_of,
        equal_micro_batches=equal_micro_batches,
    )
    return Plan.of(predict_workload(workload, request, named, world_size=world_size, picture=picture))


def tune_workload(
    workload: Workload,
    request: Request,
    *,
    device: object = None,
    process_group: Any = None,
    listener: Follower | None = None,
    log: Sequence[Trial] = (),
    storage: Any = None,
) -> Plan:
    """What `autotune` does, going on from a log of trials already run."""
    with Search(workload, request, device, process_group, listener, log) as search:
        if search.request.shares == "proportional" and search.ranks.world_size > 1:
            return Plan.of(proportional_plan(search))
        stored = request.storage if storage is None else storage
        has_cache, has_study = search.ranks.gather((request.cache is not None, stored is not None))[0]
        cache = Cache(request.cache, search) if has_cache else None
        remembered = None if cache is None else cache.verified()
        if remembered is not None:
            return Plan.of(remembered)
        if has_study:
            search.use_study(stored)
        plan = explored_plan(search, Exploration(search))
        return Plan.of(plan if cache is None else cache.remember(plan))


def probe_workload(
    workload: Workload,
    request: Request,
    *,
    device: object = None,
    process_group: Any = None,
    listener: Follower | None = None,
    log: Sequence[Trial] = (),
) -> ProbeResult:
    """What `probe` does, going on from a log of trials already run."""
    with Search(workload, request, device, process_group, listener, log, call="probe") as search:
        return probed(search)


def _plain(levers: str | Sequence[str] | Mapping[str, Any]) -> Any:
    """As it can be written down; what it means, and whether it is right, is checked where it is used."""
    if isinstance(levers, Mapping):
        return {name: _listed(levels) for name, levels in levers.items()}
    return _listed(levers)


def _listed(names: Any) -> Any:
    """A set in an order that is the same in every process."""
    if isinstance(names, (set, frozenset)):
        return sorted(names, key=str)
    return list(names) if isinstance(names, tuple) else names
