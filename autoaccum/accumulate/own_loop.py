"""A window whose loop is written by the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self, final

import torch
from torch import Tensor

from autoaccum.accumulate.finishing import finish
from autoaccum.accumulate.run import TOO_LARGE, Run
from autoaccum.calling import checked_loss
from autoaccum.devices import ERROR_ROWS
from autoaccum.devices.base import recognise
from autoaccum.errors import AutoaccumError, InvalidRequestError
from autoaccum.records import StepResult
from autoaccum.window import added, scaled, training_modes


@final
class OpenWindow:
    """A window whose loop is written by the user. Made by `Accumulator.window`.

    Entered, it is iterated over once; every micro-batch comes placed on the device and is followed by one `backward` with
    its mean loss. Leaving the block takes the step. When memory runs out inside, no body can be run again from here: the
    error comes out with the window undone and a smaller limit remembered, so running the same block again replays it.
    """

    def __init__(self, run: Run) -> None:
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
            if scale == 0 and not run.training.sharding.lockstep:
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
            loss = checked_loss(loss, "the loop")
            run.look_at(loss)
            part = scaled(loss, scale)
            run.progress.phase = "backward"
            run.accumulation.add(part)
        run.loss = added(run.loss, part)

    def in_order(self, outputs: Sequence[Tensor]) -> Tensor:
        """Outputs of the micro-batches, one row for each of theirs, as one tensor in the order of the batch's rows."""
        whole = torch.cat(list(outputs))
        positions = [position for piece in self._run.cut.pieces for position in piece.positions or ()]
        return whole[torch.tensor(positions, device=whole.device).argsort()] if positions else whole

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        with self._stack, self._run.whole_or_undone():
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
            self._result = finish(self._run)

    def _advise(self, error: BaseException) -> None:
        run = self._run
        row = recognise(error, ERROR_ROWS)
        if row is None or row.verdict not in TOO_LARGE or not run.cut.pieces:
            return
        piece = run.piece_at_work()
        if piece.cuttable:
            limit = run.training.caps.fail(piece.shape, piece.size)
            error.add_note(
                "autoaccum cannot replay a loop of one's own. The window is undone; run the block again, and it will use "
                f"micro-batches of at most {limit:g}, or use Accumulator.step, which replays by itself."
            )


def _raise_unfinished() -> None:
    raise InvalidRequestError(
        "the loop over the window ended before its last micro-batch; expected all of them, each with window.backward(loss)."
    )
