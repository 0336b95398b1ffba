"""The Accumulator: windows in a training loop. Each takes the optimizer step of the whole batch, or none at all.

Until the optimizer steps, a window is a transaction: whatever goes wrong, gradients, random generators and buffers are as
they were at its start.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from math import inf, isfinite, nan
from typing import Any, Literal, Self, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autoaccum.batches.layout import BatchDim
from autoaccum.batches.slicing import AbstractShare, CostFn, Piece, Slicer, Window
from autoaccum.batches.sources import SplitFn
from autoaccum.batches.structure import tensors_in
from autoaccum.batches.weights import Weigher
from autoaccum.calling import checked_loss
from autoaccum.caps import Caps
from autoaccum.catching import Failure, attempted
from autoaccum.checking.split import check_split
from autoaccum.devices import ERROR_ROWS, device_for
from autoaccum.devices.base import Verdict, recognise
from autoaccum.errors import AutoaccumError, InvalidRequestError
from autoaccum.gradients import Accumulation, Backward, parameters_of, refuse_none, refuse_present
from autoaccum.losses import LossFn, MicroBatchLoss, TrainingStep
from autoaccum.plan import Plan
from autoaccum.records import CheckResult, PlanRecord, StepResult
from autoaccum.reduction import Agreement, Reducer, Standing, Status
from autoaccum.rewind import Rewinder
from autoaccum.schedule import whole_number
from autoaccum.sharding import Sharding, refuse_engines
from autoaccum.window import Progress, Step, accumulate, added, scaled, take_step, training_modes
from autoaccum.workload import Weight, checked_optimizer, single_device, unwrapped

T = TypeVar("T")

logger = logging.getLogger("autoaccum")

_TOO_LARGE = (Verdict.TOO_LARGE, Verdict.UNCLEAR, Verdict.CEILING)


@final
class Accumulator:
    """Takes optimizer steps whose gradient is that of the whole batch, with one micro-batch at a time in memory.

    The batch stays where the loader put it; one micro-batch at a time goes to the model's device, without waiting where its
    memory is pinned (`DataLoader(pin_memory=True)`). When memory runs out, the window is run again from its start in smaller
    micro-batches, with random generators and buffers put back.

    Args:
        model: Called as it is; inside a DistributedDataParallel the module itself, since gradients are reduced here.
        optimizer: Over parameters of this model. What else the loss leads to receives no gradient.
        plan: From `autotune`: its micro-batch, its schedule for a window of exactly its size, its levers.
        micro_batch: The most rows on this rank in one micro-batch. Give this or `plan`.
        loss_fn: `loss_fn(output, target)` -> scalar, for batches shaped `(input, ..., target)`.
        training_step: `training_step(model, batch)` -> scalar; wins over `loss_fn`. With neither, the model's own loss.
        weight: What the loss is a mean over: "samples", `tokens("labels")`, or `batch -> number`. With "samples", one of
            torch's own losses is weighed by what it divides by: class weights, labels that are not ignored, elements.
            One with `reduction="sum"` adds up as it is.
        scaler: A `torch.amp.GradScaler`; used and updated here, once per window.
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
        refuse_engines(model)
        module = unwrapped(model)
        if isinstance(model, nn.DataParallel):
            module = model  # spreads a micro-batch over several devices in its own forward
        if not isinstance(checked_optimizer(optimizer, module), Optimizer):
            raise InvalidRequestError(
                f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer over model.parameters()."
            )
        _check_options(scaler, max_grad_norm, scheduler, on_oom, split)
        self._model, self._module, self._optimizer, self._plan = model, module, optimizer, plan
        self._wrapped = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._max_grad_norm, self._scheduler, self._on_oom = max_grad_norm, scheduler, on_oom
        self._loss = MicroBatchLoss(module, loss_fn, training_step)
        self._weigher = Weigher(weight, None if training_step is not None else loss_fn)
        self._device = device_for(None, single_device(module))
        if process_group is None and isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        self._reducer = Reducer(process_group)
        self._slicer = _slicer(plan, micro_batch, cost, max_cost, self._reducer, batch_dim=batch_dim, split=split)
        self._caps = Caps(whole=cost is None)
        self._sharding = Sharding(module, self._reducer.ranks)
        self._backward = Backward(self._scaler, module=module, look_for_others=not self._sharding.is_sharded)
        self._rewinder = Rewinder(module, self._device.torch_device)
        self._counts = {"windows": 0, "skipped": 0, "replays": 0}
        self._fingerprinted = bool(self._wrapped) or self._sharding.is_sharded  # those start with the same parameters

    def _fingerprint(self) -> float:
        """The sum of all parameters, before the first step of a model that nothing has made the same on all ranks."""
        if self._fingerprinted or self._reducer.world_size == 1:
            return 0.0
        return sum(float(parameter.detach().double().sum()) for parameter in self._module.parameters())

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
        run = _Run(self, batch)
        with run.contexts():
            while not run.attempt():
                pass
            return run.finish()

    def window(self, batch: Any) -> OpenWindow:
        """One window for a loop of one's own; see `OpenWindow`.

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
        return OpenWindow(_Run(self, batch))

    def windows(self, loader: Iterable[Any], steps: int | None = None) -> Iterator[Window]:
        """Group a loader's ready micro-batches into windows of `steps`; the last one may be short, and none is left over.

        Several ranks may have different numbers of micro-batches: a rank whose loader has ended gets empty windows as long
        as another one has data, so every rank takes the same number of steps. Iterate on every rank, to the end.

        Args:
            loader: Any iterable; its length is not asked for. Its batches are held until their step, a window at a time.
            steps: Micro-batches per window on this rank. None: the plan's accumulation_steps.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(4, 1)
            >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
            >>> [len(window) for window in acc.windows(torch.randn(10, 4).split(2), steps=4)]
            [4, 1]
        """
        if steps is None and self._plan is None:
            raise InvalidRequestError("steps=None needs a plan; expected the number of micro-batches per window.")
        chosen = self._plan.accumulation_steps if steps is None and self._plan is not None else steps
        return self._windows(loader, whole_number(chosen, "steps", "the micro-batches of one window"))

    def _windows(self, loader: Iterable[Any], steps: int) -> Iterator[Window]:
        micro_batches = iter(loader)
        while True:
            try:
                ready = list(islice(micro_batches, steps))
            except Exception:
                self._reducer.any(False, failed=True)
                raise
            if not self._reducer.any(bool(ready)):
                return
            yield Window(ready)

    def check(self, batch: Any, *, max_rows: int | None = None) -> CheckResult:
        """Compare the gradient of a whole batch with that of an uneven split of it, on this rank alone.

        In float64 where the model allows, with dropout off. Where the whole batch does not fit, the largest part that does.

        Args:
            batch: As for `step`, at least two rows.
            max_rows: Use no more rows than this.

        Raises:
            InvalidRequestError: When the batch has a single row, or cannot be cut.
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
        if self._sharding.is_sharded:
            raise InvalidRequestError("check runs on one rank alone, which FSDP cannot; check the model before sharding it.")
        return check_split(
            self._module,
            batch,
            self._loss,
            self._weigher,
            Slicer(inf, batch_dim=self._slicer.batch_dim, split=self._slicer.split),
            optimizer=self._optimizer,
            device=self._device,
            max_rows=max_rows,
            steps_of=lambda rows: len(self._slicer.sizes(rows, inf)),
        )

    def state_dict(self) -> dict[str, Any]:
        """What was counted and learned, as plain values. No gradients: nothing is carried over between windows."""
        return {"version": 1, **self._counts, "caps": self._caps.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, under another micro-batch or plan as well: learned limits stay limits.

        Raises:
            InvalidRequestError: When it is not such a state.
        """
        try:
            if state["version"] != 1:
                raise InvalidRequestError(f"the state has version {state['version']!r}; this autoaccum reads version 1.")
            counts = {name: int(state[name]) for name in self._counts}
            caps = Caps(whole=self._slicer.cost is None)
            caps.load(state["caps"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"this is not the state of an Accumulator: {type(error).__name__} {error}.") from None
        self._counts, self._caps = counts, caps


@final
class _Run:
    """One window on its way: attempts until one goes through, and then the step."""

    def __init__(self, acc: Accumulator, batch: Any) -> None:
        self.acc = acc
        self.progress = Progress()
        self.scales: list[float] = []
        self.loss: Tensor | None = None
        self.accumulation: Accumulation | None = None
        self._batch = batch
        self._parameters = parameters_of(acc._optimizer)
        self._share: AbstractShare | None = None
        self.pieces: tuple[Piece, ...] = ()
        self._weight = 0.0
        self._agreement: Agreement | None = None
        self._versions: list[tuple[Tensor, int]] = []
        self._replays = 0
        self._limits_before: list[dict[str, Any]] | None = None

    def contexts(self) -> ExitStack:
        """The plan's levers on, the reducers of DistributedDataParallel off."""
        acc, stack = self.acc, ExitStack()
        if acc._plan is not None:
            stack.enter_context(acc._plan.applied(acc._module, acc._optimizer))
        for wrapped in acc._wrapped:  # a step may call the wrapped model by a name of its own
            stack.enter_context(_unsynchronised(wrapped))
        return stack

    def attempt(self) -> bool:
        """Accumulate the whole window once; False when it has to be run again in smaller micro-batches."""
        outcome = self.guarded(lambda: attempted(self._accumulate, (*_TOO_LARGE, Verdict.FLOOR)))
        if isinstance(outcome, Failure):
            return self._recover(outcome)
        self.loss = outcome
        return self.agree()

    def guarded(self, run: Callable[[], T]) -> T:
        """Undo the window when its code raises, and let no other rank wait for this one."""
        try:
            return run()
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Undo the window, and let no other rank wait for this one."""
        try:
            lost = self.undo()
        except RuntimeError as failure:  # a lost device context: the user's error matters more than this one
            error.add_note(f"autoaccum could not undo the window: {failure}")
        else:
            if lost:
                error.add_note(f"autoaccum kept no copy of the buffers {', '.join(lost[:5])}, which the window has changed.")
        if isinstance(error, Exception):  # Ctrl-C reaches every rank by itself
            self._tell_failure()

    def complete(self) -> None:
        """After the last micro-batch."""
        assert self.accumulation is not None
        self.accumulation.complete()

    def piece_at_work(self) -> Piece:
        """The micro-batch that was run last."""
        return self.pieces[min(self.progress.index, len(self.pieces) - 1)]  # ranks in lockstep repeat the last one

    def _accumulate(self) -> Tensor | None:
        acc = self.acc
        micro_batches = self.begin()
        assert self.accumulation is not None
        loss = accumulate(
            micro_batches,
            self.scales,
            loss=acc._loss,
            place=self.place,
            accumulation=self.accumulation,
            progress=self.progress,
            run_all=acc._sharding.lockstep,
        )
        acc._reducer.prepare(self._gradients())
        return loss

    def begin(self) -> Iterator[Any]:
        """Start an attempt; gives the micro-batches, not yet placed, in the order of `scales`."""
        acc = self.acc
        if self._share is None:
            refuse_present(self._parameters)
            self._share = acc._slicer.share(self._batch)
            acc._rewinder.mark()
            self._versions = [(tensor, tensor._version) for tensor in self._tensors_in_reach()]
        pieces, make = self._share.cut(acc._caps.limit)
        self.pieces = pieces
        weights = self._weights(make)
        self._weight = float(sum(weights))
        self.scales = acc._sharding.scales(weights, acc._weigher.summed)
        wide = len(self.scales) > 1 or acc._reducer.world_size > 1
        self.accumulation = Accumulation(self._parameters, acc._backward, wide=wide)
        return acc._sharding.padded(make(), weights, len(self.scales))

    def place(self, micro_batch: Any) -> Any:
        """Put a micro-batch on the device, when its turn comes."""
        self.acc._sharding.entering(self.progress.index, len(self.scales))
        return self.acc._device.place(micro_batch)

    def _tensors_in_reach(self) -> list[Tensor]:
        """The batch's tensors that a training step could write into, because micro-batches are views of them."""
        whole = list(self._batch) if isinstance(self._batch, Window) else self._batch
        near = [tensor for tensor in tensors_in(whole) if tensor.device.type == self.acc._device.torch_device.type]
        return [tensor for tensor in near if not tensor.is_inference()]

    def _weights(self, make: Callable[[], Iterator[Any]]) -> list[float]:
        weigher = self.acc._weigher
        if any(piece.rows is None for piece in self.pieces) and weigher.counts_rows:
            raise InvalidRequestError(
                "the rows of a ready micro-batch cannot be counted; pass weight=: a function micro_batch -> number."
            )
        return weigher.weights([piece.rows or 0 for piece in self.pieces], make)

    def _gradients(self) -> list[Tensor | None]:
        """One entry per parameter on every rank; none where there is nothing to reduce, or FSDP has done it already."""
        if self.acc._sharding.is_sharded or self.acc._reducer.world_size == 1:
            return []
        return [None] * len(self._parameters) if self.accumulation is None else self.accumulation.gradients()

    def undo(self) -> list[str]:
        """Back to the start of the window; gives the names of buffers that could not be put back."""
        if self.accumulation is not None:
            self.accumulation.discard()
            self.accumulation = None
        return self.acc._rewinder.rewind() if self._share is not None else []

    def _tell_failure(self) -> None:
        if not self.acc._sharding.lockstep:  # there the others wait inside the model, where nothing can be said
            with suppress(RuntimeError):  # a lost connection: this rank's own error matters more
                self.acc._reducer.agree(Standing(Status.FAILED), self._gradients())

    def _recover(self, failure: Failure) -> bool:
        """After a failure that depends on the size: go back to the start, and cut otherwise, on every rank."""
        acc, phase = self.acc, self.progress.phase
        lost = self._set_back()
        hindrance = self._hindrance(lost) or self._cut_otherwise(failure)
        if hindrance is not None:
            failure.error.add_note(f"autoaccum did not replay the window: {hindrance}")
            if failure.row.verdict is Verdict.UNCLEAR and self._limits_before is not None:
                acc._caps.load(self._limits_before)  # it was not the size
            self._tell_failure()
            raise failure.error
        piece = self.piece_at_work()
        limit = acc._caps.limit(piece.shape)
        agreement = acc._reducer.agree(Standing(Status.OUT_OF_MEMORY, limit=limit), self._gradients())
        size = f"{piece.size:g} rows" if acc._slicer.cost is None else f"a cost of {piece.size:g}"
        self._note_replay(agreement.limit, f"{failure.message.splitlines()[0]} ({size}, {phase} pass)")
        return False

    def _cut_otherwise(self, failure: Failure) -> str | None:
        """Learn from the failure how to cut; why that is impossible, if it is."""
        slicer, caps, piece, floor = self.acc._slicer, self.acc._caps, self.piece_at_work(), self.acc._slicer.at_least
        self._limits_before = caps.state() if self._limits_before is None else self._limits_before
        if failure.row.verdict is Verdict.FLOOR:
            slicer.at_least = max(floor, (piece.rows or 0) + 1)
        elif piece.cuttable:
            caps.fail(piece.shape, piece.size)
        else:
            rows = "a single row" if piece.rows == 1 else "a micro-batch that cannot be cut (batch_dim= or split= may help)"
            return f"it failed with {rows}."
        assert self._share is not None
        if self._share.cut(caps.limit).pieces != self.pieces:
            return None
        slicer.at_least = floor
        return f"these {sum(piece.rows or 0 for piece in self.pieces)} rows cannot be cut in another way."

    def _set_back(self) -> list[str]:
        self.loss = None
        lost = self.undo()
        gc.collect()
        self.acc._device.release()
        return lost

    def _hindrance(self, lost: Sequence[str]) -> str | None:
        """Why the window cannot be run again at all, None when it can."""
        if self.acc._on_oom == "raise":
            return "on_oom='raise'."
        if self.acc._sharding.lockstep:
            return "ranks run together (FSDP, SyncBatchNorm): the others wait inside the model. Use a smaller micro_batch."
        if not self.pieces:
            return "it failed before the batch was cut."
        if lost:
            return f"the buffers {', '.join(lost[:5])} have changed and no copy of them was kept."
        if any(tensor._version != version for tensor, version in self._versions):
            return "the training step has written into the batch; let it work on a copy."
        return None

    def agree(self) -> bool:
        """Hear how the window went on the other ranks; False when one of them ran out of memory."""
        acc = self.acc
        try:
            standing = Standing(Status.DONE, self._weight, fingerprint=acc._fingerprint())
            agreement = acc._reducer.agree(standing, self._gradients())
        except BaseException:
            self.undo()
            raise
        if agreement.status is Status.DONE:
            self._agreement, acc._fingerprinted = agreement, True
            return True
        lost = self._set_back()
        if lost:
            self.guarded(lambda: _raise_lost(lost))
        self._note_replay(agreement.limit, "another rank could not run it")
        return False

    def _note_replay(self, limit: float, where: str) -> None:
        for piece in self.pieces:
            self.acc._caps.lower(piece.shape, piece.size, limit)
        self._replays += 1
        self.acc._counts["replays"] += 1
        cut = "cut otherwise" if limit == inf else f"in micro-batches of at most {limit:g}"
        logger.warning("the window is run again, %s: %s", cut, where)

    def finish(self) -> StepResult:
        """Take the step that all ranks agreed on."""
        acc, agreement = self.acc, self._agreement
        assert agreement is not None and self.accumulation is not None
        sizes = tuple(piece.rows for piece in self.pieces)
        if not agreement.weight:
            self.accumulation.discard()
            acc._counts["windows"] += 1
            acc._counts["skipped"] += 1
            logger.warning("a window without any weight (no rows, or no labels that count) took no step")
            return StepResult(loss=nan, weight=0.0, micro_batch_sizes=sizes, replays=self._replays, skipped=True)
        part = 1.0 if acc._weigher.summed else self._weight / agreement.weight
        part = 1.0 / acc._reducer.world_size if acc._sharding.is_sharded else part
        try:
            step = self._step(agreement, part)
            loss = 0.0 if self.loss is None else float(self.loss) * part
        except BaseException as error:
            self._give_up(error)
            raise
        loss = acc._reducer.settle(failed=False, loss=loss)
        acc._counts["windows"] += 1
        acc._rewinder.learn()
        if not step.taken:
            acc._counts["skipped"] += 1
            logger.warning("a gradient was not finite: the window took no step")
        for shape in {piece.shape for piece in self.pieces}:
            acc._caps.run(shape, max(piece.size for piece in self.pieces if piece.shape == shape))
        return StepResult(
            loss=loss,
            weight=agreement.weight,
            micro_batch_sizes=sizes,
            replays=self._replays,
            skipped=not step.taken,
            grad_norm=None if acc._max_grad_norm is None else float(step.grad_norm),
        )

    def _step(self, agreement: Agreement, part: float) -> Step:
        acc = self.acc
        assert self.accumulation is not None
        if not acc._sharding.is_sharded:
            acc._reducer.reduce(self.accumulation, agreement, part)
            if getattr(acc._model, "broadcast_buffers", True):  # DistributedDataParallel's own switch
                acc._reducer.broadcast(acc._module.buffers())
        refuse_none(self.accumulation)
        self.progress.phase = "optimizer"
        step = take_step(self.accumulation, acc._optimizer, scaler=acc._scaler, max_grad_norm=acc._max_grad_norm)
        if step.taken and acc._scheduler is not None:
            acc._scheduler.step()
        return step

    def _give_up(self, error: BaseException) -> None:
        """After an error when the gradients were complete; what the optimizer has done cannot be taken back."""
        acc = self.acc
        if self.progress.phase != "optimizer":
            self.undo()
        elif self.accumulation is not None:
            self.accumulation.discard()
        if acc._scaler is not None:
            with suppress(AssertionError):  # it has seen no gradient yet
                acc._scaler.update()
        row = recognise(error, ERROR_ROWS)
        if row is not None and row.verdict in _TOO_LARGE:
            error.add_note(
                "autoaccum does not replay an optimizer step: parameters and optimizer state may be changed in part. Go "
                "back to a checkpoint, and leave the optimizer more room: a smaller budget or micro_batch, or foreach=False."
            )
        if isinstance(error, Exception):
            with suppress(RuntimeError):  # a lost connection: this rank's own error matters more
                acc._reducer.settle(failed=True, loss=0.0)


@final
class OpenWindow:
    """A window whose loop is written by the user. Made by `Accumulator.window`.

    Entered, it is iterated over once; every micro-batch comes placed on the device and is followed by one `backward` with
    its mean loss. Leaving the block takes the step. When memory runs out inside, no body can be run again from here: the
    error comes out with the window undone and a smaller limit remembered, so running the same block again replays it.
    """

    def __init__(self, run: _Run) -> None:
        self._run, self._stack = run, ExitStack()
        self._micro_batches: Iterator[Any] = iter(())
        self._scale: float | None = None
        self._ended = False
        self._result: StepResult | None = None

    @property
    def result(self) -> StepResult:
        """What the window did; there after the block.

        Raises:
            InvalidRequestError: Before its end.
        """
        if self._result is None:
            raise InvalidRequestError("the window has no result before its block has ended.")
        return self._result

    def __enter__(self) -> Self:
        if self._run.accumulation is not None or self._ended:
            raise InvalidRequestError("a window is entered once; make another one with Accumulator.window(batch).")
        self._stack.enter_context(self._run.contexts())
        try:
            self._micro_batches = self._run.guarded(self._run.begin)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        if self._ended or self._scale is not None or run.progress.index:
            raise InvalidRequestError("a window is iterated over once.")
        for index, (micro_batch, scale) in enumerate(zip(self._micro_batches, run.scales, strict=True)):
            run.progress.index, run.progress.phase = index, "data"
            if scale == 0 and not run.acc._sharding.lockstep:
                continue
            placed = run.place(micro_batch)
            run.progress.phase, self._scale = "forward", scale
            yield placed
            if self._scale is not None:
                raise InvalidRequestError(f"micro-batch {index} had no window.backward(loss); expected one for each.")
        self._ended = True

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch; `loss` is its mean, neither divided nor scaled.

        Raises:
            InvalidRequestError: When it is called twice for a micro-batch, or the loss is no scalar with a graph.
        """
        run = self._run
        if self._scale is None or run.accumulation is None:
            raise InvalidRequestError("window.backward(loss) is called once for each micro-batch, inside the loop.")
        scale, self._scale = self._scale, None
        with training_modes():
            part = scaled(checked_loss(loss, "the loop"), scale)
            run.progress.phase = "backward"
            run.accumulation.add(part)
        run.loss = added(run.loss, part)

    def in_order(self, outputs: Sequence[Tensor]) -> Tensor:
        """Outputs of the micro-batches, one row for each of theirs, as one tensor in the order of the batch's rows."""
        whole = torch.cat(list(outputs))
        positions = [position for piece in self._run.pieces for position in piece.positions or ()]
        return whole[torch.tensor(positions, device=whole.device).argsort()] if positions else whole

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        with self._stack:
            if error is not None:
                self._advise(error)
                self._run.abandon(error)
                return
            if not self._ended:
                self._run.guarded(_raise_unfinished)
            self._run.complete()
            if not self._run.agree():
                raise AutoaccumError(
                    "another rank ran out of memory, and a loop of one's own cannot be replayed; run the block again."
                )
            self._result = self._run.finish()

    def _advise(self, error: BaseException) -> None:
        run = self._run
        row = recognise(error, ERROR_ROWS)
        if row is None or row.verdict not in _TOO_LARGE or not run.pieces:
            return
        piece = run.piece_at_work()
        if piece.cuttable:
            limit = run.acc._caps.fail(piece.shape, piece.size)
            error.add_note(
                "autoaccum cannot replay a loop of one's own. The window is undone; run the block again, and it will use "
                f"micro-batches of at most {limit:g}, or use Accumulator.step, which replays by itself."
            )


@contextmanager
def _unsynchronised(wrapped: DistributedDataParallel) -> Iterator[None]:
    """No collective in forward or backward: no_sync leaves the first forward's broadcast of buffers."""
    before = wrapped.require_forward_param_sync
    wrapped.require_forward_param_sync = False
    try:
        with wrapped.no_sync():
            yield
    finally:
        wrapped.require_forward_param_sync = before


def _raise_lost(lost: Sequence[str]) -> None:
    raise AutoaccumError(
        f"another rank ran out of memory, but this rank's buffers {', '.join(lost[:5])} changed and cannot be put back."
    )


def _raise_unfinished() -> None:
    raise InvalidRequestError(
        "the loop over the window ended before its last micro-batch; expected all of them, each with window.backward(loss)."
    )


def _slicer(
    plan: object,
    micro_batch: object,
    cost: CostFn | None,
    max_cost: float | None,
    reducer: Reducer,
    *,
    batch_dim: BatchDim,
    split: SplitFn | None,
) -> Slicer:
    if (cost is None) != (max_cost is None) or (cost is not None and split is not None):
        raise InvalidRequestError("cost= and max_cost= go together, without split=; expected both or none.")
    if cost is not None:
        if micro_batch is not None:
            raise InvalidRequestError("micro_batch= counts rows, and with cost= the limit is max_cost=; give one of them.")
        if not callable(cost) or not isinstance(max_cost, (int, float)) or max_cost is True or not 0 < max_cost < inf:
            raise InvalidRequestError(f"cost={cost!r}, max_cost={max_cost!r}; expected a function and a number above 0.")
        return Slicer(inf, batch_dim=batch_dim, cost=cost, max_cost=max_cost)
    if (plan is None) == (micro_batch is None):
        raise InvalidRequestError("give either plan= or micro_batch= (rows), or cost= with max_cost=.")
    if plan is None:
        rows = whole_number(micro_batch, "micro_batch", "the most rows of one micro-batch on this rank")
        return Slicer(rows, batch_dim=batch_dim, split=split)
    if not isinstance(plan, PlanRecord):
        raise InvalidRequestError(f"plan is a {type(plan).__name__}; expected a Plan, from autotune or Plan.load.")
    planned: tuple[int, ...] = ()
    if plan.world_size == reducer.world_size:
        planned = Plan.of(plan).schedule(reducer.ranks.rank)
    else:
        logger.warning(
            "the plan is for %d ranks and there are %d: only its micro-batch is used", plan.world_size, reducer.world_size
        )
    return Slicer(
        plan.micro_batch,
        batch_dim=batch_dim,
        split=split,
        multiple_of=plan.multiple_of,
        at_least=plan.min_micro_batch,
        planned=planned,
    )


def _check_options(scaler: object, max_grad_norm: object, scheduler: object, on_oom: object, split: object) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidRequestError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler.")
    number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool) and isfinite(max_grad_norm)
    if max_grad_norm is not None and not (number and float(max_grad_norm) > 0):  # type: ignore[arg-type]
        raise InvalidRequestError(f"max_grad_norm={max_grad_norm!r} is not possible; expected a finite number above 0.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidRequestError(
            "ReduceLROnPlateau needs a metric for its step; leave scheduler= out and call it yourself, with step.loss or a "
            "validation loss."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise InvalidRequestError(
            f"scheduler is a {type(scheduler).__name__} without step(); expected a scheduler of torch."
        )
    if on_oom not in ("replay", "raise"):
        raise InvalidRequestError(f'on_oom={on_oom!r} is unknown; expected "replay" or "raise".')
    if split is not None and not callable(split):
        raise InvalidRequestError(f"split={split!r} cannot be called; expected a function.")
