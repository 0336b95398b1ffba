"""What stays in a tuned trainer: levers turned and windows exact while it trains, and nothing of either afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, final

import transformers

from autoaccum.engines import own_optimizer
from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.trainer.windows import Weighing, Windows
from autoaccum.plan import Plan


@final
class Tuned(transformers.TrainerCallback):
    """A callback of a trainer and what it holds of it.

    The plan's levers are turned when training begins, and turned back when `train()` is left, also by an error or Ctrl-C:
    callbacks are not called then, so `train` itself is wrapped.
    """

    def __init__(self, trainer: Any, plan: Plan, weighing: Weighing | None) -> None:
        self.trainer, self.plan = trainer, plan
        self._windows = Windows(trainer, weighing, plan.world_size)
        self._stack = ExitStack()
        self._own_train: Any = None
        self._had_train: dict[str, Any] = {}
        self._was_stopping = False

    def put_on(self) -> None:
        """Become a part of the trainer."""
        held = vars(self.trainer)
        self._own_train, self._had_train = self.trainer.train, {k: v for k, v in held.items() if k == "train"}
        held["train"] = self._train
        self._windows.put_on()
        self.trainer.callback_handler.callbacks.append(self)

    def take_off(self) -> None:
        """Leave the trainer as it was before `put_on`."""
        held = vars(self.trainer)
        del held["train"]
        held.update(self._had_train)
        self._windows.take_off()
        self.trainer.callback_handler.callbacks.remove(self)

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own `train`; levers are turned back however it ends."""
        try:
            return self._own_train(*args, **kwargs)
        finally:
            self._stack.close()
            self._windows.held = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Turn the levers on the model that is trained, which a `model_init` may have made anew."""
        self._refuse_other_numbers(args)
        self._windows.held = []
        self._stack.enter_context(self.plan.applied(given["model"], own_optimizer(given["optimizer"])))

    def _refuse_other_numbers(self, args: Any) -> None:
        steps, target = args.gradient_accumulation_steps, self.plan.target_batch
        effective = args.per_device_train_batch_size * steps * args.world_size
        if effective != target or args.auto_find_batch_size or args.train_batch_size != self.trainer._train_batch_size:
            raise InvalidRequestError(
                f"the trainer was tuned for {target} rows per optimizer step, and now has "
                f"{args.per_device_train_batch_size} rows x {steps} steps x {args.world_size} ranks "
                f"(auto_find_batch_size={args.auto_find_batch_size}); set them back, or tune again."
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A pass over the data begins."""
        self._windows.starts_fresh()
        self._was_stopping = control.should_training_stop

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A pass too short for a window is no reason to stop: its micro-batches wait for the next pass."""
        windows = self._windows
        if windows.num_kept and not windows.num_windows and not self._was_stopping:
            control.should_training_stop = False


def tuned_callback(trainer: Any) -> Tuned | None:
    """What an earlier call has put on this trainer."""
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, Tuned)), None)
