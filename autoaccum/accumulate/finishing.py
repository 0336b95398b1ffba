"""The end of a window that went through on all ranks: gradients reduced, the optimizer's step, and what is told of it."""

from __future__ import annotations

import logging
from contextlib import suppress
from math import isnan, nan
from typing import final

from autoaccum.accumulate.run import TOO_LARGE, Run
from autoaccum.devices import ERROR_ROWS
from autoaccum.devices.base import recognise
from autoaccum.errors import RankMismatchError
from autoaccum.gradients import refuse_none
from autoaccum.records import StepResult
from autoaccum.window import Step, take_step

logger = logging.getLogger("autoaccum")


def finish(run: Run) -> StepResult:
    """Take the step that all ranks agreed on."""
    return _Finish(run).finished()


@final
class _Finish:
    """The end of one window."""

    def __init__(self, run: Run) -> None:
        assert run.agreement is not None and run.accumulation is not None
        self._run, self._training = run, run.training
        self._agreement, self._accumulation = run.agreement, run.accumulation
        self._others_step = False  # nothing that fails here keeps them from it

    def finished(self) -> StepResult:
        run, training, agreement = self._run, self._training, self._agreement
        if not agreement.weight:
            return self._without_weight()
        part = 1.0 if training.weigher.summed else run.weight / agreement.weight
        part = 1.0 / training.reducer.world_size if training.sharding.is_sharded else part
        try:
            step = self._step(part)
            loss = 0.0 if run.loss is None else float(run.loss) * part
        except BaseException as error:
            self._give_up(error)
            raise
        try:
            loss = training.reducer.settle(failed=False, loss=loss)
        except RankMismatchError:
            training.broken = True
            raise
        if isnan(loss) and step.taken:
            logger.warning(
                "the loss of a window is NaN though its gradient is finite: is a micro-batch without labels in it?"
            )
        training.counts["windows"] += 1
        training.rewinder.learn()
        if not step.taken:
            training.counts["skipped"] += 1
            logger.warning("a gradient was not finite: the window took no step")
        run.cut.learn()
        return StepResult(
            loss=loss,
            weight=agreement.weight,
            micro_batch_sizes=self._sizes(),
            replays=run.replays,
            skipped=not step.taken,
            grad_norm=None if training.max_grad_norm is None else float(step.grad_norm),
        )

    def _sizes(self) -> tuple[int | None, ...]:
        return tuple(piece.rows for piece in self._run.cut.pieces)

    def _without_weight(self) -> StepResult:
        self._accumulation.discard()
        self._training.counts["windows"] += 1
        self._training.counts["skipped"] += 1
        logger.warning("a window without any weight (no rows, or no labels that count) took no step")
        return StepResult(loss=nan, weight=0.0, micro_batch_sizes=self._sizes(), replays=self._run.replays, skipped=True)

    def _step(self, part: float) -> Step:
        training = self._training
        if not training.sharding.is_sharded:
            training.reducer.reduce(self._accumulation, self._agreement, part)
            if getattr(training.model, "broadcast_buffers", True):  # DistributedDataParallel's own switch
                training.reducer.broadcast(training.module.buffers())
        refuse_none(self._accumulation)
        self._others_step = training.reducer.world_size > 1
        step = take_step(
            self._accumulation,
            training.optimizer,
            scaler=training.scaler,
            max_grad_norm=training.max_grad_norm,
            progress=self._run.progress,
        )
        if step.taken and training.scheduler is not None:
            training.scheduler.step()
        return step

    def _give_up(self, error: BaseException) -> None:
        """After an error when the gradients were complete; what the optimizer has done cannot be taken back."""
        training, in_optimizer = self._training, self._run.progress.phase == "optimizer"
        if in_optimizer:
            self._accumulation.discard()
        else:
            self._run.undo()
        if training.scaler is not None:
            with suppress(AssertionError):  # it has seen no gradient yet
                training.scaler.update()
        training.broken = training.broken or self._others_step
        row = recognise(error, ERROR_ROWS) if in_optimizer else None
        if row is not None and row.verdict in TOO_LARGE:
            error.add_note(
                "autoaccum does not replay an optimizer step: parameters and optimizer state may be changed in part. Go "
                "back to a checkpoint, and leave the optimizer more room: a smaller budget or micro_batch, or "
                "foreach=False."
            )
        if isinstance(error, Exception):
            with suppress(RuntimeError, RankMismatchError):  # a lost connection: this rank's own error matters more
                training.reducer.settle(failed=True, loss=0.0)
