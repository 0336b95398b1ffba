"""autotune and probe: the public calls, and the same for a workload that is ready.

What they do is in `session`; here are the arguments, their meaning and the bar.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.batches.layout import BatchDim
from autoaccum.batches.sources import SplitFn
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.losses import LossFn, TrainingStep
from autoaccum.plan import Plan
from autoaccum.records import ProbeResult, Trial
from autoaccum.session import Listener, Request, Search
from autoaccum.workload import OptimizerFactory, Weight, Workload


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
    levers: str = "none",
    objective: str = "throughput",
    max_micro_batch: int | None = None,
    multiple_of: int = 1,
    equal_micro_batches: bool = False,
    time_budget_s: float | None = None,
    process_group: Any = None,
    storage: None = None,
    cache: None = None,
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
            On the CPU that is the resident set, interpreter included. None: what is free, less a reserve.
        device: None: the model's. Text ("cpu", "cuda:1", "virtual:8GiB"), a `torch.device`, or a `VirtualDevice`.
        batch_dim: Which dimension holds the rows, where it cannot be seen: an int, or `{leaf name: int or None}`.
        split: `split(batch, sizes) -> list of micro-batches`, for batches that cannot be cut by rows.
        levers: "none"; memory levers are not searched yet.
        objective: "throughput"; with no levers to choose between, the largest micro-batch that fits is taken.
        storage, cache: None; shared studies and remembered plans are not available yet.
        max_micro_batch: No micro-batch above this many rows.
        multiple_of: Every micro-batch but a rank's last is a multiple of it.
        equal_micro_batches: One size for all micro-batches, where one number must serve (HF Trainer, DeepSpeed).
        time_budget_s: Seconds after which no further size is tried, once one fits.
        process_group: The ranks that train together; None: the default group where one is initialised. Call on every rank.
        progress: Show a bar. None: when stderr is a terminal.

    Returns:
        A `Plan`; its `effective_batch` is `target_batch`, always.

    Raises:
        InvalidRequestError: When the call cannot be satisfied as written.
        NothingFitsError: When the smallest micro-batch does not fit; `.trials` says what was run.
        Exception: Whatever the model, loss or optimizer raises, unchanged, at the first trial.

    Leaves behind:
        Nothing of the search. On the CPU with glibc, malloc's thresholds are at 32 MiB and 64 MiB afterwards, where glibc's
        own adapting ends; or at 64 KiB where the plan needs that to stay inside the budget, which `warnings` then says.

    Example:
        >>> import torch, autoaccum
        >>> model = torch.nn.Linear(1024, 1024)
        >>> plan = autoaccum.autotune(model, torch.randn(8, 1024), 4096, device="virtual:48MiB")
        >>> plan.effective_batch, sum(plan.micro_batch_sizes), plan.limited_by
        (4096, 4096, 'memory')
    """
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
    for name, value, available in (
        ("objective", objective, "throughput"),
        ("storage", storage, None),
        ("cache", cache, None),
    ):
        if value != available:
            raise InvalidRequestError(f"{name}={value!r} is not available in this version; expected {available!r}.")
    if target_batch is None:
        raise InvalidRequestError("target_batch=None: autotune needs a target; probe() says how many samples fit.")
    request = Request(
        target_batch=target_batch,
        budget=budget,
        levers=levers,
        max_micro_batch=max_micro_batch,
        multiple_of=multiple_of,
        equal_micro_batches=equal_micro_batches,
        time_budget_s=time_budget_s,
    )
    with _shown(progress) as listener:
        return tune_workload(workload, request, device=device, process_group=process_group, listener=listener)


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
    levers: str = "none",
    max_micro_batch: int | None = None,
    multiple_of: int = 1,
    time_budget_s: float | None = None,
    process_group: Any = None,
    progress: bool | None = None,
    exact: bool = True,
) -> ProbeResult:
    """Find how many samples fit into one micro-batch on each rank, by running them.

    Takes what `autotune` takes. The search is bounded by the rank's share of `target_batch`, the data set's length and
    `max_micro_batch`, and without any of these by 1,048,576 rows.

    Args:
        exact: False ends the search when the limit is known to within 5 %.

    Returns:
        A `ProbeResult`; its `max_micro_batch` was run in this search.

    Raises:
        InvalidRequestError: When the call cannot be satisfied as written.
        NothingFitsError: When the smallest micro-batch does not fit; `.trials` says what was run.
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
        levers=levers,
        max_micro_batch=max_micro_batch,
        multiple_of=multiple_of,
        time_budget_s=time_budget_s,
        exact=exact,
    )
    with _shown(progress) as listener:
        return probe_workload(workload, request, device=device, process_group=process_group, listener=listener)


def tune_workload(
    workload: Workload,
    request: Request,
    *,
    device: object = None,
    process_group: Any = None,
    listener: Listener | None = None,
    log: Sequence[Trial] = (),
) -> Plan:
    """What `autotune` does, going on from a log of trials already run."""
    with Search(workload, request, device, process_group, listener, log) as search:
        return Plan.of(search.plan())


def probe_workload(
    workload: Workload,
    request: Request,
    *,
    device: object = None,
    process_group: Any = None,
    listener: Listener | None = None,
    log: Sequence[Trial] = (),
) -> ProbeResult:
    """What `probe` does, going on from a log of trials already run."""
    with Search(workload, request, device, process_group, listener, log) as search:
        return search.result()


class _Silent:
    """No one follows the search."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: Any) -> None:
        return None


def _shown(progress: bool | None) -> Any:
    """A progress bar where one is wanted, else nothing."""
    wanted = sys.stderr.isatty() if progress is None else progress
    if not wanted:
        return _Silent()
    from autoaccum.report.progress import ProgressBar

    return ProgressBar()
