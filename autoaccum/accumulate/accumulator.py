"""The Accumulator: optimizer steps of whole batches, in micro-batches that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from typing import Any, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulate.finishing import finish
from autoaccum.accumulate.own_loop import OpenWindow
from autoaccum.accumulate.run import Run
from autoaccum.accumulate.training import Training
from autoaccum.batches.layout import BatchDim
from autoaccum.batches.opaque import SplitFn
from autoaccum.batches.pieces import Window
from autoaccum.batches.slicing import CostFn, Slicer
from autoaccum.caps import Caps
from autoaccum.checking.split import check_split
from autoaccum.errors import InvalidRequestError
from autoaccum.losses import LossFn, TrainingStep
from autoaccum.plan import Plan
from autoaccum.records import CheckResult, StepResult
from autoaccum.schedule import whole_number
from autoaccum.workload import Weight


@final
class Accumulator:
    """Takes optimizer steps whose gradient is that of the whole batch, with one micro-batch at a time in memory.

    The batch stays where the loader put it; one micro-batch at a time goes to the model's device, without waiting where its
    memory is pinned (`DataLoader(pin_memory=True)`). When memory runs out, the window is run again from its start in smaller
    micro-batches, with random generators and buffers put back.

    Args:
        model: Called as it is; inside a DistributedDataParallel the module itself, since gradients are reduced here.
        optimizer: Over parameters of this model. What else the loss leads to receives no gradient.
        plan: From `autotune`: its micro-batch, its schedule for a window of exactly its size, its levers. Made with
            `shares="proportional"`, it may be any rank's: each rank is handed `plan.shares[rank]` rows a step.
        micro_batch: The most rows on this rank in one micro-batch, >= 1. Give this or `plan`.
        loss_fn: `loss_fn(output, target)` -> scalar, for batches shaped `(input, ..., target)`.
        training_step: `training_step(model, batch)` -> scalar; wins over `loss_fn`. With neither, the model's own loss.
        weight: What the loss is a mean over: "samples", `tokens("labels")`, or `batch -> number`. With "samples", one of
            torch's own losses is weighed by what it divides by: class weights, labels that are not ignored, elements.
            One with `reduction="sum"` adds up as it is.
        scaler: A `torch.amp.GradScaler`; used and updated here, once per window. None: one is made where the plan's
            precision is fp16, and its state is part of `state_dict`.
        max_grad_norm: Clip the gradient of the whole window to this 2-norm, over all ranks.
        scheduler: Stepped once per window that took a step.
        batch_dim: Which dimension holds the rows, where it cannot be seen: an int, or `{leaf name: int or None}`.
        split: `split(batch, sizes) -> list of micro-batches`, for batches that cannot be cut by rows.
        process_group: The ranks that train together; the default group where one is initialised. Every rank must take every
            window.
        on_oom: "replay", or "raise" when memory runs out.
        cost: `cost(micro_batch)` -> number. Rows are put together by first-fit decreasing, so that no micro-batch costs more
            than `max_cost`; for rows padded to the longest, rows times the longest. Called on the host, about rows times
            micro-batches times for a window.
        max_cost: See `cost`; stands in for `micro_batch`.

    Raises:
        InvalidRequestError: When the arguments do not fit together, or nothing exact can be done with them.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> acc = Accumulator(model, optimizer, micro_batch=3, loss_fn=torch.nn.CrossEntropyLoss())
        >>> step = acc.step((torch.randn(8, 4), torch.randint(2, (8,))))
        >>> step.micro_batch_sizes, step.weight, step.skipped
        ((3, 3, 2), 8.0, False)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        plan: Plan | None = None,
        micro_batch: int | None = None,
        loss_fn: LossFn | None = None,
        training_step: TrainingStep | None = None,
        weight: Weight = "samples",
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
        batch_dim: BatchDim = None,
        split: SplitFn | None = None,
        process_group: Any = None,
        on_oom: Literal["replay", "raise"] = "replay",
        cost: CostFn | None = None,
        max_cost: float | None = None,
    ) -> None:
        self._training = Training(
            model,
            optimizer,
            plan=plan,
            micro_batch=micro_batch,
            loss_fn=loss_fn,
            training_step=training_step,
            weight=weight,
            scaler=scaler,
            max_grad_norm=max_grad_norm,
            scheduler=scheduler,
            batch_dim=batch_dim,
            split=split,
            process_group=process_group,
            on_oom=on_oom,
            cost=cost,
            max_cost=max_cost,
        )

    def step(self, batch: Any) -> StepResult:
        """Take one optimizer step with the gradient of this rank's whole batch, together with all other ranks' batches.

        Args:
            batch: Any number of rows on this rank; a list is one batch. A `Window` holds ready micro-batches. None, no rows
                or an empty window: this rank adds nothing; where no rank adds anything, no step is taken.

        Raises:
            InvalidRequestError: When gradients are present, rows cannot be told, or nothing leads to the parameters.
            RankMismatchError: When another rank could not finish.
            Exception: Whatever the user's code raises; running out of memory with a single row, or in the optimizer's step.

        Leaves behind:
            Gradients are None. After an error before the optimizer's step, generators and buffers are as they were.
        """
        run = Run(self._training, batch)
        with run.contexts(), run.whole_or_undone():
            while not run.attempt():
                pass
            return finish(run)

    def window(self, batch: Any) -> OpenWindow:
        """One window for a loop of one's own; see `OpenWindow`.

        Args:
            batch: As for `step`. Nothing is looked at before the window is entered.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(4, 1)
            >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
            >>> with acc.window(torch.randn(5, 4)) as window:
            ...     for micro_batch in window:
            ...         window.backward(model(micro_batch).pow(2).mean())
            >>> window.result.micro_batch_sizes
            (2, 2, 1)
        """
        return OpenWindow(Run(self._training, batch))

    def windows(self, loader: Iterable[Any], steps: int | None = None) -> Iterator[Window]:
        """Group a loader's ready micro-batches into windows of `steps`; the last one may be short, and none is left over.

        Several ranks may have different numbers of micro-batches: a rank whose loader has ended gets empty windows as long
        as another one has data, so every rank takes the same number of steps. Iterate on every rank, to the end.

        Args:
            loader: Any iterable; its length is not asked for. Its batches are held until their step, a window at a time.
            steps: Micro-batches per window on this rank, >= 1. None: the plan's accumulation_steps.

        Raises:
            InvalidRequestError: When there is neither a number of steps nor a plan.
            RankMismatchError: When another rank's loader has failed.
            Exception: Whatever the loader raises.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(4, 1)
            >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
            >>> [len(window) for window in acc.windows(torch.randn(10, 4).split(2), steps=4)]
            [4, 1]
        """
        if steps is None:
            if self._training.plan is None:
                raise InvalidRequestError("steps=None needs a plan; expected the number of micro-batches per window.")
            steps = self._training.plan.accumulation_steps
        return self._windows(loader, whole_number(steps, "steps", "the micro-batches of one window"))

    def _windows(self, loader: Iterable[Any], steps: int) -> Iterator[Window]:
        micro_batches = iter(loader)
        while True:
            try:
                ready = list(islice(micro_batches, steps))
            except Exception:
                self._training.reducer.any(False, failed=True)
                raise
            if not self._training.reducer.any(bool(ready)):
                return
            yield Window(ready)

    def check(self, batch: Any, *, max_rows: int | None = None) -> CheckResult:
        """Compare the gradient of a whole batch with that of an uneven split of it, on this rank alone.

        In float64 where the model allows, with dropout off. Where the whole batch does not fit, the largest part that does.

        Args:
            batch: As for `step`, at least two rows; four where the model needs two to run, as with BatchNorm.
            max_rows: Use no more rows than this.

        Raises:
            InvalidRequestError: When the batch has a single row, or too few for the model to run with a part of them, or
                cannot be cut.
            Exception: Whatever the user's code raises.

        Leaves behind:
            Nothing: model, gradients, optimizer, generators and modes are as before, and no step is taken.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(4, 3)
            >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2,
            ...                   loss_fn=torch.nn.CrossEntropyLoss())
            >>> acc.check((torch.randn(8, 4), torch.randint(3, (8,)))).exact
            True
        """
        if self._training.sharding.is_sharded:
            raise InvalidRequestError("check runs on one rank alone, which FSDP cannot; check the model before sharding it.")
        return check_split(
            self._training.module,
            batch,
            self._training.loss,
            self._training.weigher,
            Slicer(
                inf,
                batch_dim=self._training.slicer.batch_dim,
                split=self._training.slicer.split,
                refuse=self._training.slicer.refuse,
            ),
            optimizer=self._training.optimizer,
            device=self._training.device,
            max_rows=max_rows,
            steps_of=lambda rows: len(self._training.slicer.sizes(rows, inf)),
        )

    def state_dict(self) -> dict[str, Any]:
        """What was counted and learned, as plain values. No gradients: nothing is carried over between windows."""
        training = self._training
        scaler = {"scaler": training.scaler.state_dict()} if training.owns_scaler and training.scaler is not None else {}
        return {"version": 1, **training.counts, "caps": training.caps.state(), **scaler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, under another micro-batch or plan as well: learned limits stay limits.

        Raises:
            InvalidRequestError: When it is not such a state.
        """
        try:
            if state["version"] != 1:
                raise InvalidRequestError(f"the state has version {state['version']!r}; this autoaccum reads version 1.")
            counts = {name: int(state[name]) for name in self._training.counts}
            caps = Caps(whole=self._training.slicer.cost is None)
            caps.load(state["caps"])
            if self._training.owns_scaler and self._training.scaler is not None and "scaler" in state:
                self._training.scaler.load_state_dict(state["scaler"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"this is not the state of an Accumulator: {type(error).__name__} {error}.") from None
        self._training.counts = counts
        self._training.caps.load(caps.state())
