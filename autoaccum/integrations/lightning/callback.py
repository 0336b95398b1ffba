"""The callback that tunes when `fit` starts and makes every window's gradient that of its rows.

Lightning divides each loss by `accumulate_grad_batches`, whatever a micro-batch weighs and however short the window is. The
callback multiplies each loss by its weight before the backward pass, and divides the gradient by what the window weighed,
over all ranks, before it is clipped. With manual optimization steps are the module's own: there an `Accumulator` belongs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from autoaccum.batches.layout import BatchDim, find_layout
from autoaccum.batches.weights import IGNORED_LABELS, Weigher, has_ignored_labels
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.frameworks import framework
from autoaccum.integrations.lightning.data import WindowData
from autoaccum.integrations.lightning.refusals import refuse_data, refuse_plan, refuse_settings, refuse_training_step
from autoaccum.integrations.lightning.settings import levers_here
from autoaccum.integrations.lightning.step import silenced, step_of
from autoaccum.integrations.window_loader import WindowSchedule, refuse_own_batching
from autoaccum.plan import Plan
from autoaccum.ranks import Ranks
from autoaccum.schedule import check_target, whole_number
from autoaccum.tune import autotune
from autoaccum.workload import Weight, Workload

try:
    from lightning.pytorch import Callback
except ImportError:  # said by `framework` where the callback is made
    Callback = object  # type: ignore[assignment,misc]

logger = logging.getLogger("autoaccum")


@final
class AutoAccum(Callback):  # type: ignore[misc,unused-ignore]
    """Tunes when `fit` starts, and then trains with an effective batch of exactly `target_batch` samples over all ranks.

    The training data may be given to `fit`, by the module or by a data module; its batch size does not matter, since the
    loader is made anew with the plan's micro-batches, in the same order. On one device or with DDP. Batches that `Trainer`
    arguments count (`limit_train_batches`, `val_check_interval` as whole numbers) are effective batches. Every window's
    gradient is that of its rows, the last and shorter one of an epoch as well. Where other callbacks look at gradients
    before the optimizer's step, this one comes first in the list. Running out of memory in training ends it, as ever.

    Args:
        target_batch: Samples per optimizer step over all ranks. Give this or `plan`.
        plan: A ready one; then nothing is searched.
        weight: What the module's loss is a mean over: "samples", `tokens("labels")`, or `batch -> number`.
        sample: What to probe with, where it is not to be the training data; see `autotune`.
        levers: As for `autotune`, without "precision", which `Trainer(precision=...)` sets. They are on while `fit` trains.
        budget, device, batch_dim, objective, max_micro_batch, multiple_of, time_budget_s, storage, cache, progress: As for
            `autotune`.

    Attributes:
        plan: There once `fit` has started, on every rank the same.

    Raises:
        MissingExtraError: When Lightning is not installed, or too old.
        InvalidRequestError: Here or when `fit` starts, for what cannot be made exact, with the reason and the remedy.
        NothingFitsError: When `fit` starts and the smallest micro-batch does not fit.

    Leaves behind:
        Nothing of the search: model, optimizer, generators, loggers and counters are as before. After `fit`, the trainer's
        own settings and data are back, and levers are off.

    Example:
        >>> callback = AutoAccum(256, budget="8GiB") if Callback is not object else None
    """

    def __init__(
        self,
        target_batch: int | None = None,
        *,
        plan: Plan | None = None,
        weight: Weight = "samples",
        sample: Any = None,
        budget: int | str | None = None,
        device: str | torch.device | AbstractDevice | None = None,
        batch_dim: BatchDim = None,
        levers: str | Sequence[str] | Mapping[str, Any] = "exact",
        objective: Literal["throughput", "memory"] = "throughput",
        max_micro_batch: int | None = None,
        multiple_of: int = 1,
        time_budget_s: float | None = None,
        storage: Any = None,
        cache: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        framework("lightning")
        if (target_batch is None) == (plan is None):
            raise InvalidRequestError("give either target_batch= (samples per optimizer step over all ranks) or plan=.")
        self.target_batch = check_target(target_batch if plan is None else plan.target_batch, 1)
        self.plan, self._ready_plan = plan, plan
        self._weigher, self._weight = Weigher(weight), weight
        self._sample, self._batch_dim, self._levers = sample, batch_dim, levers_here(levers)
        self._multiple_of = whole_number(multiple_of, "multiple_of", "what micro-batches are to be multiples of")
        self._options: dict[str, Any] = {
            "budget": budget,
            "device": device,
            "objective": objective,
            "max_micro_batch": max_micro_batch,
            "time_budget_s": time_budget_s,
            "storage": storage,
            "cache": cache,
            "progress": progress,
        }
        self._stack = ExitStack()  # what has to be put back when fit ends
        self._data: WindowData | None = None
        self._full_weight = float(self.target_batch)  # of a whole window, about
        self._next_weight = self._window_weight = 0.0
        self._has_warned = False

    # -- before training

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be made exact, and let windows stand in for the training data."""
        self._stack.close()  # of a fit that has ended in a way of its own
        if stage != "fit":
            return
        if trainer.fast_dev_run:
            logger.warning("fast_dev_run: nothing is tuned, and the training data is taken as it is")
            return
        refuse_settings(trainer, pl_module, AutoAccum)
        check_target(self.target_batch, trainer.world_size)
        refuse_training_step(pl_module)
        schedule = WindowSchedule(self.target_batch, trainer.world_size, multiple_of=self._multiple_of)
        # One micro-batch stands for a window until the size is known: then `estimated_stepping_batches` is right already.
        self._data = WindowData(trainer.fit_loop._data_source, schedule, trainer.global_rank)
        self._put_back_later(trainer.fit_loop, "_data_source", self._data)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Search, on every rank, with the module and the optimizer where they are to train."""
        if self._data is None:
            return
        loader = self._data.users_loader()
        refuse_own_batching(loader, trainer.world_size)
        refuse_data(loader, self._data.schedule)
        is_stream = isinstance(loader.dataset, IterableDataset)
        sample = loader if self._sample is None else self._sample
        plan = self._tuned(trainer, pl_module, sample, is_stream) if self._ready_plan is None else self._ready_plan
        refuse_plan(plan, trainer, is_stream)
        self.plan, self._full_weight = plan, self._weight_of_target(pl_module, sample, plan)
        self._take_over(trainer, plan, is_stream)

    def _tuned(self, trainer: Any, pl_module: Any, sample: Any, is_stream: bool) -> Plan:
        """What `autotune` finds, with nothing written anywhere meanwhile."""
        levers = self._levers
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            # A fused step unscales by itself, and Lightning refuses to clip before it.
            levers = {name: levels for name, levels in levers.items() if name != "optimizer_impl"}
        with silenced(trainer, pl_module):
            plan = autotune(
                pl_module,
                sample,
                self.target_batch,
                training_step=step_of(trainer, pl_module),
                optimizer=trainer.optimizers[0],
                weight=self._weight,
                batch_dim=self._batch_dim,
                multiple_of=self._multiple_of,
                equal_micro_batches=is_stream,
                levers=levers or "none",
                **self._options,
            )
        logger.info("%s", plan)
        return plan

    def _weight_of_target(self, pl_module: Any, sample: Any, plan: Plan) -> float:
        """About what a whole window weighs, the same number on all ranks: keeps scaled losses near their own size."""
        if self._weigher.counts_rows:
            return float(plan.target_batch)
        rows = plan.micro_batch
        batch = Workload(pl_module, sample, batch_dim=self._batch_dim).source.take(rows)
        return max(Ranks().gather(self._weigher(batch, rows) / rows)) * plan.target_batch or 1.0

    def _take_over(self, trainer: Any, plan: Plan, is_stream: bool) -> None:
        """Give the trainer the plan's numbers."""
        assert self._data is not None
        num_windows = self._data.num_windows()
        self._data.schedule = self._data.schedule._replace(micro_batch=plan.micro_batch, multiple_of=plan.multiple_of)
        steps = plan.accumulation_steps if is_stream else self._data.schedule.steps
        self._put_back_later(trainer, "accumulate_grad_batches", steps)
        for name in ("limit_train_batches", "val_check_interval"):
            count = getattr(trainer, name)
            if isinstance(count, int):
                self._put_back_later(trainer, name, count * steps)
        part = trainer.limit_train_batches
        if isinstance(part, float) and part < 1.0 and num_windows is not None and int(num_windows * part):
            self._put_back_later(trainer, "limit_train_batches", int(num_windows * part) * steps)
        loop = trainer.fit_loop
        if loop._combined_loader is not None:  # made for `estimated_stepping_batches`, of whole windows
            loop._data_fetcher.teardown()
            loop._combined_loader = loop._data_fetcher = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Levers on. Not earlier: a checkpoint may have brought its own optimizer settings."""
        if self._data is None or self.plan is None:
            return
        self._data.begin()
        self._window_weight = 0.0
        self._stack.enter_context(self.plan.applied(pl_module, trainer.optimizers[0]))

    # -- a window

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Weigh the micro-batch."""
        if self._data is None:
            return
        rows = self._data.take_rows()
        if rows is None and self._weigher.counts_rows:
            rows = find_layout(batch, self._batch_dim).rows
        self._next_weight = 0.0 if rows == 0 else self._weigher(batch, rows or 0)
        if not self._has_warned and self._weigher.counts_rows and has_ignored_labels(batch):
            self._has_warned = True
            logger.warning(IGNORED_LABELS)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """A window begins: this comes before its first backward pass."""
        self._window_weight = 0.0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Scale the loss, which Lightning has divided by the number of micro-batches and DDP divides by that of ranks."""
        if self._data is None:
            return
        self._window_weight += self._next_weight
        if not self._next_weight:
            loss.nan_to_num_()  # a mean over nothing
        loss.mul_(self._next_weight * trainer.accumulate_grad_batches * trainer.world_size / self._full_weight)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Divide the gradient by what the window weighed over all ranks. It is complete, unscaled and not yet clipped."""
        if self._data is None:
            return
        window_weight = self._window_weight
        if trainer.world_size > 1:
            of_rank = torch.tensor(window_weight, dtype=torch.float64, device=pl_module.device)
            window_weight = float(trainer.strategy.reduce(of_rank, reduce_op="sum"))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not window_weight:
            logger.warning("a window without any weight (no labels that count) moved no parameter")
            for parameter in parameters:
                parameter.grad = None  # which an optimizer leaves alone
            return
        if window_weight != self._full_weight:
            _multiply([p.grad for p in parameters if p.grad is not None], self._full_weight / window_weight)

    # -- after training

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put back what was changed."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put back what was changed."""
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put back what was changed."""
        self._end()

    def _end(self) -> None:
        self._data = None
        self._stack.close()

    def _put_back_later(self, owner: Any, name: str, value: Any) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _multiply(gradients: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():
        torch._foreach_mul_([gradient for gradient in gradients if not gradient.is_sparse], factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)
