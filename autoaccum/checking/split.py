"""Comparing a whole batch with a split of it without leaving a trace: in which precision, and how much of it fits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.batches.slicing import Slicer
from autoaccum.batches.weights import Weigher
from autoaccum.catching import Failure, attempted
from autoaccum.checking.examination import Examination
from autoaccum.checking.passes import Subject
from autoaccum.devices import device_for
from autoaccum.devices.base import AbstractDevice, Verdict
from autoaccum.errors import AutoaccumError, InvalidRequestError
from autoaccum.losses import MicroBatchLoss
from autoaccum.preserve import Snapshot, preserved
from autoaccum.records import CheckResult
from autoaccum.schedule import whole_number
from autoaccum.workload import Workload


def check_split(
    module: nn.Module,
    batch: Any,
    loss: MicroBatchLoss,
    weigher: Weigher,
    slicer: Slicer,
    *,
    optimizer: Optimizer,
    device: AbstractDevice,
    max_rows: int | None = None,
    steps_of: Callable[[int], int] = lambda rows: 2,
) -> CheckResult:
    """Compare the gradient of a whole batch with that of an uneven split of it; see `Accumulator.check`.

    Args:
        steps_of: Into how many micro-batches training would cut so many rows.
    """
    share = slicer.share(batch)
    rows = share.rows if share.rows is not None else len(share.first([]))
    whole_rows = rows
    if max_rows is not None:
        rows = min(rows, whole_number(max_rows, "max_rows", "the most rows to compare"))
    if rows < 2:
        raise InvalidRequestError(f"a check needs a batch of at least 2 rows, to be split; this one has {rows}.")
    subject = Subject(module, share, loss, weigher, optimizer, device, steps_of)
    with preserved(module, optimizer, device=device.torch_device) as snapshot:
        found: CheckResult | None = None
        why: Exception | None = None  # memory, where that ran out once
        fitted, failed = 1, rows + 1
        while found is None or failed - fitted > max(1, failed // 8):  # close enough to the largest that fits
            examined = _examined(subject, rows, snapshot)
            if isinstance(examined, CheckResult):
                found, fitted = examined, rows
                snapshot.restore(whole=True)  # the diagnosis has taken things out of the model
            elif examined.row.verdict is Verdict.FLOOR:
                fitted, why = rows, why or _too_few_rows(rows, examined)  # and fewer are too few as well
            else:
                failed, why = rows, examined.error
            if found is None and why is not None and failed - fitted <= 1:
                raise why
            rows = max(2, (fitted + failed) // 2)
    if failed > min(whole_rows, max_rows or inf):
        return found
    compared = sum(found.micro_batch_sizes)
    return _with_notes(found, (f"{whole_rows} rows did not fit into memory at once: {compared} were compared.",))


def _too_few_rows(rows: int, failure: Failure) -> InvalidRequestError:
    """What to say of a model, such as one with BatchNorm, that runs no part of so few rows."""
    return InvalidRequestError(
        f"a check splits its batch in two, and the model runs with no split of {rows} rows, because a part has too few of "
        f"them ({failure.message[:300]}); check more rows."
    )


def check_workload(workload: Workload, rows: int, device: object = None) -> CheckResult:
    """What `check_split` says of a workload's own sample, `rows` of it.

    Raises:
        InvalidRequestError: When fewer than 2 rows are asked for or too few for the model to run with a part of them, or
            there is no such device.
        Exception: Whatever the user's code raises.
    """
    workload.refuse_meta()
    workload.set_training_mode()
    source = workload.source
    count = whole_number(rows, "rows", "the rows to compare")
    if source.distinct == 1:
        raise InvalidRequestError(
            "the target's sample has a single row, and copies of it would hide every difference; give it a sample of "
            "several rows, or a function n -> batch."
        )
    if source.length is not None:
        count = min(count, source.length)
    result = check_split(
        workload.module,
        source.varied(count),
        MicroBatchLoss(workload.module, workload.loss.loss_fn, workload.loss.training_step),  # not the mean of the outputs
        workload.weigher,
        Slicer(inf, batch_dim=workload.batch_dim, split=workload.split),
        optimizer=workload.make_optimizer(),
        device=device_for(device, workload.device),
    )
    return _with_notes(result, tuple(workload.warnings))


def _with_notes(result: CheckResult, notes: tuple[str, ...]) -> CheckResult:
    return msgspec.structs.replace(result, notes=(*result.notes, *notes))


def _examined(subject: Subject, rows: int, snapshot: Snapshot) -> CheckResult | Failure:
    """In float64, and where something refuses that in the model's own precision."""

    def run(dtype: torch.dtype | None) -> CheckResult | Failure:
        smallest = 1  # rows of a part: no more than the model needs, which leaves the split uneven
        outcome = _attempted(subject, rows, smallest, dtype, snapshot)
        while isinstance(outcome, Failure) and outcome.row.verdict is Verdict.FLOOR and smallest < rows // 2:
            smallest = min(2 * smallest, rows // 2)
            outcome = _attempted(subject, rows, smallest, dtype, snapshot)
        return outcome

    try:
        return run(torch.float64)
    except AutoaccumError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model says of float64, it may run as it is; else its own error follows
        refusal = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    snapshot.restore(whole=True)
    outcome = run(None)
    if isinstance(outcome, Failure):
        return outcome
    return _with_notes(outcome, (f"compared in {outcome.dtype}, because float64 was refused ({refusal}).",))


def _attempted(
    subject: Subject, rows: int, smallest: int, dtype: torch.dtype | None, snapshot: Snapshot
) -> CheckResult | Failure:
    """One examination; where it fails for its size, nothing of it is left."""
    about_the_size = (Verdict.TOO_LARGE, Verdict.UNCLEAR, Verdict.FLOOR)
    outcome = attempted(lambda: Examination(subject, rows, smallest, dtype).result(), about_the_size)
    if isinstance(outcome, Failure):
        if outcome.row.verdict is Verdict.TOO_LARGE:
            outcome.forget()
        gc.collect()
        subject.device.release()
        snapshot.restore(whole=True)
    return outcome
