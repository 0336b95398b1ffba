"""Lightning: a callback that tunes when `fit` starts and makes every window's gradient that of its rows; plain keywords.

Lightning divides each loss by `accumulate_grad_batches`, whatever a micro-batch weighs and however short the window is. The
callback multiplies each loss by its weight before the backward pass, and divides the gradient by what the window weighed,
over all ranks, before it is clipped. With manual optimization steps are the module's own: there an `Accumulator` belongs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from autoaccum.batches.layout import BatchDim, find_layout
from autoaccum.batches.weights import Weigher, has_ignored_labels
from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.frameworks import framework
from autoaccum.integrations.window_loader import WindowLoader, WindowSchedule, refuse_own_batching
from autoaccum.levers import LEVERS, check_asked
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

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_OTHER_CALLBACKS = {
    "BatchSizeFinder": "it looks for a batch size as well, and changes it; leave it out.",
    "GradientAccumulationScheduler": "it sets accumulate_grad_batches, which the plan sets; leave it out.",
}
_PRECISION = {"fp32": {}, "bf16": {"precision": "bf16-mixed"}, "fp16": {"precision": "16-mixed"}}
_LEVERS_HERE = {lever.name: lever.levels for lever in LEVERS if lever.name != "precision"}


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
        self._sample, self._batch_dim, self._levers = sample, batch_dim, _levers_here(levers)
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
        self._data: _Data | None = None
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
        _refuse_settings(trainer, pl_module)
        check_target(self.target_batch, trainer.world_size)
        _refuse_training_step(pl_module)
        schedule = WindowSchedule(self.target_batch, trainer.world_size, multiple_of=self._multiple_of)
        # One micro-batch stands for a window until the size is known: then `estimated_stepping_batches` is right already.
        self._data = _Data(trainer.fit_loop._data_source, schedule, trainer.global_rank)
        self._put_back_later(trainer.fit_loop, "_data_source", self._data)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Search, on every rank, with the module and the optimizer where they are to train."""
        if self._data is None:
            return
        loader = self._data.users_loader()
        refuse_own_batching(loader, trainer.world_size)
        _refuse_data(loader, self._data.schedule)
        is_stream = isinstance(loader.dataset, IterableDataset)
        sample = loader if self._sample is None else self._sample
        plan = self._tuned(trainer, pl_module, sample, is_stream) if self._ready_plan is None else self._ready_plan
        _refuse_plan(plan, trainer, is_stream)
        self.plan, self._full_weight = plan, self._weight_of_target(pl_module, sample, plan)
        self._take_over(trainer, plan, is_stream)

    def _tuned(self, trainer: Any, pl_module: Any, sample: Any, is_stream: bool) -> Plan:
        """What `autotune` finds, with nothing written anywhere meanwhile."""
        levers = self._levers
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            # A fused step unscales by itself, and Lightning refuses to clip before it.
            levers = {name: levels for name, levels in levers.items() if name != "optimizer_impl"}
        with _silenced(trainer, pl_module):
            plan = autotune(
                pl_module,
                sample,
                self.target_batch,
                training_step=_step_of(trainer, pl_module),
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
            logger.warning(
                "some labels are -100, and weight='samples' weighs micro-batches by rows: if the loss is a mean over "
                "labels, pass weight=autoaccum.tokens('labels'), with shift=True for causal language models"
            )

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


def trainer_kwargs(plan: Plan) -> dict[str, Any]:
    """The plan as keywords of `lightning.pytorch.Trainer`, for a loader that yields micro-batches of `plan.micro_batch`.

    Lightning itself then weighs the last, shorter window of an epoch too little, and tokens wrongly where micro-batches have
    different numbers of them; `AutoAccum(plan=plan)` in the trainer's callbacks does not, and takes any plan.

    Raises:
        InvalidRequestError: When micro-batches differ in size, or a lever is on that Trainer cannot turn.

    Example:
        >>> import torch, autoaccum
        >>> model, sample = torch.nn.Linear(4, 2), torch.randn(2, 4)
        >>> plan = autoaccum.autotune(model, sample, 10, max_micro_batch=5, device="virtual:1MiB", levers="none")
        >>> trainer_kwargs(plan)
        {'accumulate_grad_batches': 2}
    """
    sizes = {size for rank in range(plan.world_size) for size in plan.schedule(rank)}
    if len(sizes) > 1:
        raise InvalidRequestError(
            f"the plan's micro-batches have {min(sizes)} to {max(sizes)} rows, and Trainer counts them as equal; call "
            "autotune with equal_micro_batches=True, or use the callback AutoAccum(plan=plan)."
        )
    levers = plan.levers
    if levers.precision not in _PRECISION:
        raise InvalidRequestError(
            f"precision={levers.precision!r} is no precision of Trainer; call torch.set_float32_matmul_precision('high') "
            "and tune again."
        )
    others = [name for name in _LEVERS_HERE if getattr(levers, name) not in ("off", "default")]
    if others:
        raise InvalidRequestError(
            f"Trainer cannot turn {', '.join(others)}, without which the plan may not fit; use the callback "
            "AutoAccum(plan=plan), or tune with levers='precision' or 'none'."
        )
    return {"accumulate_grad_batches": plan.accumulation_steps, **_PRECISION[levers.precision]}


@final
class _Data:
    """Stands in for the trainer's source of training data: the user's loader, made anew with micro-batches.

    The user's own is asked for once for tuning and the first epoch, and then as often as the trainer wants it anew.
    """

    def __init__(self, inner: Any, schedule: WindowSchedule, rank: int) -> None:
        self.schedule = schedule
        self._inner, self._rank = inner, rank
        self._kept: Any = None
        self._has_begun = False
        self._loader: WindowLoader | None = None

    @property
    def instance(self) -> Any:
        """Where the data comes from, as Lightning calls it."""
        return self._inner.instance

    @instance.setter
    def instance(self, instance: Any) -> None:
        self._inner.instance = instance

    @property
    def name(self) -> str:
        """The hook that gives it, as Lightning calls it."""
        return str(self._inner.name)

    def is_defined(self) -> bool:
        """Whether there is any."""
        return bool(self._inner.is_defined())

    def is_module(self) -> bool:
        """Whether a hook gives it."""
        return bool(self._inner.is_module())

    def users_loader(self) -> Any:
        """The user's own."""
        loader = self._inner.dataloader() if self._kept is None else self._kept
        self._kept = None if self._has_begun else loader
        return loader

    def begin(self) -> None:
        """Ask the user anew from now on, whenever the trainer does."""
        self._has_begun, self._kept = True, None

    def dataloader(self) -> WindowLoader:
        """What the trainer is to use."""
        self._loader = WindowLoader(self.users_loader(), self.schedule, self._rank)
        return self._loader

    def num_windows(self) -> int | None:
        """Of an epoch, None where that is not known; while a window is one micro-batch."""
        try:
            return len(WindowLoader(self.users_loader(), self.schedule, self._rank))
        except TypeError:  # a stream, or a sampler without a length
            return None

    def take_rows(self) -> int | None:
        """The rows of the micro-batch that begins; None where only the batch itself tells."""
        return None if self._loader is None else self._loader.take_rows()


def _multiply(gradients: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():
        torch._foreach_mul_([gradient for gradient in gradients if not gradient.is_sparse], factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)


# -- the module's own training step, for a search


def _step_of(trainer: Any, pl_module: Any) -> Callable[[nn.Module, Any], Tensor]:
    """What Lightning runs for a micro-batch: its conversions, the hooks around the transfer, the step under its autocast."""
    takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1
    precision = trainer.precision_plugin

    def step(module: Any, batch: Any) -> Tensor:  # on a copy of the module as well, which has no trainer
        batch = module._on_before_batch_transfer(precision.convert_input(batch))
        batch = module._apply_batch_transfer_handler(batch, device=next(module.parameters()).device)
        with precision.train_step_context():
            out = module.training_step(batch, 0) if takes_index else module.training_step(batch)
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if not isinstance(loss, Tensor):
            raise InvalidRequestError(
                f"training_step returned {type(loss).__name__} for the sample; expected a loss, or a mapping with 'loss'."
            )
        return loss

    return step


def _unlogged(*args: Any, **kwargs: Any) -> None:
    """Stands in for `log` and `log_dict` while sizes are tried."""


@contextmanager
def _silenced(trainer: Any, pl_module: Any) -> Iterator[None]:
    """Nothing reaches a logger, and plain numbers that modules count come back."""
    from lightning.pytorch.loggers.logger import DummyLogger

    loggers, should_stop = trainer.loggers, trainer.should_stop
    counts = [(vars(module), _plain_numbers(module)) for module in pl_module.modules()]
    if loggers:
        trainer.loggers = [DummyLogger()]
    vars(pl_module).update(log=_unlogged, log_dict=_unlogged)
    try:
        yield
    finally:
        for attributes, before in counts:
            attributes.update(before)
        del pl_module.log, pl_module.log_dict
        trainer.loggers, trainer.should_stop = loggers, should_stop


def _plain_numbers(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str, type(None)))}


def _levers_here(levers: Any) -> dict[str, Any]:
    """The levers that may be turned beside a Trainer, whose precision is its own, with their levels."""
    check_asked(levers)
    named = {levers} if isinstance(levers, str) else set(levers)
    if named & {"precision", "all"}:
        raise InvalidRequestError(
            f"levers={levers!r} would turn the precision, which the trainer sets: Trainer(precision='bf16-mixed'). Expected "
            f"'exact', 'none', or some of {', '.join(_LEVERS_HERE)}."
        )
    if isinstance(levers, Mapping):
        return dict(levers)
    return {name: levels for name, levels in _LEVERS_HERE.items() if named & {"exact", name}}


# -- what cannot be made exact


def _refuse_settings(trainer: Any, pl_module: Any) -> None:
    """Refuse a trainer that sets what the plan sets, or that steps in a way of its own."""
    if not pl_module.automatic_optimization:
        raise InvalidRequestError(
            "the module optimizes manually, and takes its steps itself; use autoaccum.Accumulator inside training_step, one "
            "for each optimizer."
        )
    if trainer.accumulate_grad_batches != 1:
        raise InvalidRequestError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and AutoAccum both set the accumulation; "
            "leave it at 1."
        )
    if trainer.overfit_batches:
        raise InvalidRequestError(
            f"Trainer(overfit_batches={trainer.overfit_batches}) counts batches of a loader that is made anew; give a data "
            "set of that many samples instead, such as torch.utils.data.Subset."
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _OTHER_CALLBACKS:
                raise InvalidRequestError(f"the callback {kind.__name__}: {_OTHER_CALLBACKS[kind.__name__]}")
    if sum(isinstance(callback, AutoAccum) for callback in trainer.callbacks) > 1:
        raise InvalidRequestError("there are several AutoAccum callbacks; expected one.")
    if type(trainer.strategy).__name__ not in _STRATEGIES:
        raise InvalidRequestError(
            f"the strategy {type(trainer.strategy).__name__} is not supported; expected one device or 'ddp'. For FSDP2, "
            "fully_shard the model and use autoaccum.Accumulator, with Fabric or without."
        )
    if trainer.world_size > 1 and not trainer._accelerator_connector.use_distributed_sampler:
        raise InvalidRequestError(
            "Trainer(use_distributed_sampler=False) leaves the ranks' data to the caller, and windows are divided over "
            "ranks here; leave it at True."
        )


def _refuse_training_step(pl_module: Any) -> None:
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise InvalidRequestError(
            "training_step(dataloader_iter) takes its batches itself; expected training_step(batch, batch_idx)."
        )


def _refuse_data(loader: Any, schedule: WindowSchedule) -> None:
    """Refuse data of which no window would come."""
    if isinstance(loader.dataset, IterableDataset) or not loader.drop_last:
        return
    order = loader.dataset if isinstance(loader.sampler, DistributedSampler) else loader.sampler
    if isinstance(order, Sized) and len(order) < schedule.target_batch:
        raise InvalidRequestError(
            f"drop_last=True drops every window: the data has {len(order)} samples and "
            f"target_batch={schedule.target_batch}. Leave it out, or "
            "lower the target."
        )


def _refuse_plan(plan: Plan, trainer: Any, is_stream: bool) -> None:
    """Refuse a ready plan for something else."""
    if plan.world_size != trainer.world_size:
        raise InvalidRequestError(
            f"the plan is for {plan.world_size} ranks and the trainer has {trainer.world_size}; tune with as many."
        )
    if plan.levers.precision != "fp32":
        raise InvalidRequestError(
            f"the plan turns precision={plan.levers.precision!r}, which the trainer sets: Trainer(precision=...); tune with "
            "levers='exact'."
        )
    sizes = {size for rank in range(plan.world_size) for size in plan.schedule(rank)}
    if is_stream and len(sizes) > 1:
        raise InvalidRequestError(
            f"over a stream all micro-batches have one size, and the plan's have {min(sizes)} to {max(sizes)} rows; tune "
            "with equal_micro_batches=True."
        )
