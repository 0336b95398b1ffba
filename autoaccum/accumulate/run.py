"""One window on its way: attempts until one goes through on all ranks. `finishing` takes the step then."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from typing import Any, TypeVar, final

from torch import Tensor

from autoaccum.accumulate.cut import Cut
from autoaccum.accumulate.training import Training
from autoaccum.batches.pieces import Piece, Window
from autoaccum.batches.structure import tensors_in
from autoaccum.batches.weights import IGNORED_LABELS, UNKNOWN_LOSS, has_ignored_labels
from autoaccum.catching import Failure, attempted
from autoaccum.devices.base import Verdict
from autoaccum.engines import refuse_deferred_step
from autoaccum.errors import AutoaccumError, InvalidRequestError, RankMismatchError
from autoaccum.gradients import Accumulation, parameters_of, refuse_present
from autoaccum.mean_losses import DivisorWatch
from autoaccum.reduction import Agreement, Standing, Status
from autoaccum.window import Progress, accumulate
from autoaccum.wrapped import unsynchronised

T = TypeVar("T")

logger = logging.getLogger("autoaccum")

TOO_LARGE = (Verdict.TOO_LARGE, Verdict.UNCLEAR, Verdict.CEILING)


@final
class Run:
    """One window on its way: attempts until one goes through on all ranks.

    `agreement` is then what the ranks said of it, `weight` this rank's part, `replays` how often it was begun again.
    """

    def __init__(self, training: Training, batch: Any) -> None:
        self.training = training
        self.progress = Progress()
        self.scales: list[float] = []
        self.loss: Tensor | None = None
        self.accumulation: Accumulation | None = None
        self._batch = batch
        self._parameters = parameters_of(training.optimizer)
        self.cut = Cut(training.slicer, training.caps)
        self.weight = 0.0
        self.agreement: Agreement | None = None
        self._versions: list[tuple[Tensor, int]] = []
        self.replays = 0
        self._divisors: DivisorWatch | None = None
        self._is_told = False  # that labels are ignored
        self._in_step = False  # with the other ranks, where they run together
        self._is_marked = False

    def contexts(self) -> ExitStack:
        """The plan's levers on, the reducers of DistributedDataParallel off."""
        training = self.training
        with ExitStack() as stack:
            if training.plan is not None:
                stack.enter_context(training.plan.applied(training.module, training.optimizer))
            # A step may call the wrapped model, or another one, by a name of its own.
            stack.enter_context(unsynchronised(training.wrapped, look_for_others=not training.is_compiled))
            return stack.pop_all()

    @contextmanager
    def whole_or_undone(self) -> Iterator[None]:
        """Ctrl-C comes anywhere, also between the parts that undo the window by themselves: nothing of it is left then."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # a lost device context: the error at hand matters more
                if self.progress.phase != "optimizer":
                    self.undo()
                elif self.accumulation is not None:
                    self.accumulation.discard()
            raise

    def attempt(self) -> bool:
        """Accumulate the whole window once; False when it has to be run again in smaller micro-batches."""
        outcome = self.guarded(lambda: attempted(self._accumulate, (*TOO_LARGE, Verdict.FLOOR)))
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
            self._tell_failure(error)

    def complete(self) -> None:
        """After the last micro-batch."""
        assert self.accumulation is not None
        self.accumulation.complete()

    def piece_at_work(self) -> Piece:
        """The micro-batch that was run last."""
        return self.cut.piece_at(self.progress.index)

    def _accumulate(self) -> Tensor | None:
        training = self.training
        micro_batches = self.begin()
        assert self.accumulation is not None
        loss = accumulate(
            micro_batches,
            self.scales,
            loss=self._loss,
            place=self.place,
            accumulation=self.accumulation,
            progress=self.progress,
            run_all=training.sharding.lockstep,
        )
        training.reducer.prepare(self._gradients())
        return loss

    def _loss(self, placed: Any) -> Tensor:
        loss = self.training.loss_in_window(placed)
        self.look_at(loss)
        return loss

    def look_at(self, loss: Tensor) -> None:
        """Say it, in the first window, where a loss divides by something else than what its micro-batch is weighed by."""
        said = None if self._divisors is None else self._divisors.note(loss, self.scales[self.progress.index])
        if said is not None:
            logger.warning(said)

    def begin(self) -> Iterator[Any]:
        """Start an attempt; gives the micro-batches, not yet placed, in the order of `scales`."""
        training = self.training
        if not self._is_marked:
            training.refuse_broken()
            refuse_deferred_step(*training.given)
            refuse_present(self._parameters)
            self.cut.begin(self._batch)
            training.rewinder.mark()
            if not training.counts["windows"] and training.weigher.counts_rows and has_ignored_labels(self._batch):
                logger.warning(IGNORED_LABELS)
                self._is_told = True
            self._versions = [(tensor, tensor._version) for tensor in self._tensors_in_reach()]
            self._is_marked = True  # there is a mark of this window to go back to
        make = self.cut.again()
        is_first = not training.counts["windows"] and not self.replays
        several = len(self.cut.pieces) > 1
        if is_first and training.weigher.taken_at_its_word and several:
            logger.warning(UNKNOWN_LOSS)
        looks = not training.counts["windows"] and several and not training.weigher.summed and not self._is_told
        self._divisors = DivisorWatch() if looks else None
        weights = self._weights(make)
        self.weight = float(sum(weights))
        self._in_step = True
        self.scales = training.sharding.scales(weights, training.weigher.summed)
        wide = len(self.scales) > 1 or training.reducer.world_size > 1
        self.accumulation = Accumulation(self._parameters, training.backward, wide=wide)
        return training.sharding.padded(make(), weights, len(self.scales))

    def place(self, micro_batch: Any) -> Any:
        """Put a micro-batch on the device, when its turn comes."""
        self.training.sharding.entering(self.progress.index, len(self.scales))
        return self.training.device.place(micro_batch)

    def _tensors_in_reach(self) -> list[Tensor]:
        """The batch's tensors that a training step could write into, because micro-batches are views of them."""
        whole = list(self._batch) if isinstance(self._batch, Window) else self._batch
        near = [tensor for tensor in tensors_in(whole) if tensor.device.type == self.training.device.torch_device.type]
        return [tensor for tensor in near if not tensor.is_inference()]

    def _weights(self, make: Callable[[], Iterator[Any]]) -> list[float]:
        weigher = self.training.weigher
        if any(piece.rows is None for piece in self.cut.pieces) and weigher.counts_rows:
            raise InvalidRequestError(
                "the rows of a ready micro-batch cannot be counted; pass weight=: a function micro_batch -> number."
            )
        return weigher.weights([piece.rows or 0 for piece in self.cut.pieces], make)

    def _gradients(self) -> list[Tensor | None]:
        """One entry per parameter on every rank; none where there is nothing to reduce, or FSDP has done it already."""
        if self.training.sharding.is_sharded or self.training.reducer.world_size == 1:
            return []
        return [None] * len(self._parameters) if self.accumulation is None else self.accumulation.gradients()

    def undo(self) -> list[str]:
        """Back to the start of the window; gives the names of buffers that could not be put back."""
        if self.accumulation is not None:
            self.accumulation.discard()
            self.accumulation = None
        return self.training.rewinder.rewind() if self._is_marked else []

    def _tell_failure(self, error: Exception) -> None:
        if self.training.sharding.lockstep:
            if not self._in_step:  # else the others wait inside the model, where nothing can be said
                self.training.sharding.give_up(error)
        else:
            with suppress(RuntimeError, RankMismatchError):  # a lost connection: this rank's own error matters more
                self.training.reducer.agree(Standing(Status.FAILED), self._gradients())

    def _recover(self, failure: Failure) -> bool:
        """After a failure that depends on the size: go back to the start, and cut otherwise, on every rank."""
        training, phase = self.training, self.progress.phase
        lost = self._set_back()
        hindrance = self._hindrance(lost) or self.cut.otherwise(self.piece_at_work(), failure.row.verdict)
        if hindrance is not None:
            failure.error.add_note(f"autoaccum did not replay the window: {hindrance}")
            if failure.row.verdict is Verdict.UNCLEAR:
                self.cut.forget()
            self._tell_failure(failure.error)
            raise failure.error
        piece = self.piece_at_work()
        limit = self.cut.limit_of(piece)
        agreement = training.reducer.agree(Standing(Status.OUT_OF_MEMORY, limit=limit), self._gradients())
        if agreement.limit < limit:
            self.cut.lower(agreement.limit)
        failure.forget()
        self._note_replay(agreement.limit, f"{failure.message.splitlines()[0]} ({self.cut.in_words(piece)}, {phase} pass)")
        return False

    def _set_back(self) -> list[str]:
        self.loss = None
        lost = self.undo()
        gc.collect()
        self.training.device.release()
        return lost

    def _hindrance(self, lost: Sequence[str]) -> str | None:
        """Why the window cannot be run again at all, None when it can."""
        if self.training.on_oom == "raise":
            return "on_oom='raise'."
        if self.training.sharding.lockstep:
            return "ranks run together (FSDP, SyncBatchNorm): the others wait inside the model. Use a smaller micro_batch."
        if not self.cut.pieces:
            return "it failed before the batch was cut."
        if lost:
            return f"the buffers {', '.join(lost[:5])} have changed and no copy of them was kept."
        if any(tensor._version != version for tensor, version in self._versions):
            return "the training step has written into the batch; let it work on a copy."
        return None

    def agree(self) -> bool:
        """Hear how the window went on the other ranks; False when one of them ran out of memory."""
        training = self.training
        try:
            standing = Standing(Status.DONE, self.weight, fingerprint=training.fingerprint())
            agreement = training.reducer.agree(standing, self._gradients())
        except BaseException:
            self.undo()
            raise
        if agreement.status is Status.DONE:
            self.agreement, training.fingerprinted = agreement, True
            return True
        lost = self._set_back()
        if lost:
            self.guarded(lambda: _raise_lost(lost))
        self.cut.lower(agreement.limit)
        self._note_replay(agreement.limit, "another rank could not run it")
        return False

    def _note_replay(self, limit: float, where: str) -> None:
        self.replays += 1
        self.training.counts["replays"] += 1
        cut = "cut otherwise" if limit == inf else f"in micro-batches of at most {limit:g}"
        logger.warning("the window is run again, %s: %s", cut, where)


def _raise_lost(lost: Sequence[str]) -> None:
    raise AutoaccumError(
        f"another rank ran out of memory, but this rank's buffers {', '.join(lost[:5])} changed and cannot be put back."
    )
