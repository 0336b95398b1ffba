"""The trainer's accumulation windows, made exact while it trains.

Decides what each micro-batch's loss is multiplied by, and that no window is torn by the end of a pass over the data. Must
never know why a weight is the right one: that is measured in `scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from accelerate.utils import find_batch_size
from torch import Tensor

from autoaccum.errors import InvalidRequestError
from autoaccum.integrations.trainer.workload import replaced
from autoaccum.window import scaled


class Weighing(NamedTuple):
    """What a trainer's loss is a mean over.

    Attributes:
        name: In words, as in "weighted by rows".
        weight: Of a micro-batch; None for a loss that is a sum.
    """

    name: str
    weight: Callable[[Any], float] | None


def rows_of(micro_batch: Any) -> float:
    """The rows of a micro-batch: the first dimension of its first tensor."""
    return float(find_batch_size(micro_batch))


@final
class Windows:
    """Stands between a trainer and its own methods: its loader, `get_batch_samples`, `training_step`, `compute_loss`.

    With a weighing, each micro-batch is a batch of its own to the trainer: it counts the labels of that one alone, divides
    by no number of steps, and the mean that comes out is multiplied by weight / weight of the window. So it does not matter
    which of them the model, the loss or the trainer would have divided by.

    A window that the end of the data cuts short is kept and filled up from the next pass; left alone, a trainer whose data
    has no length would neither step nor clear it, and add it to the next window.

    A window waits in host memory, where a trainer's loader would put all of it on the device at once: what was measured is
    one micro-batch there.

    Args:
        trainer: The one.
        weighing: None leaves the trainer's own scaling alone.
        world_size: Ranks whose gradients are averaged.
    """

    _NAMES = ("get_train_dataloader", "get_batch_samples")
    _SCALING_NAMES = ("training_step", "compute_loss")

    def __init__(self, trainer: Any, weighing: Weighing | None, world_size: int) -> None:
        self._trainer, self._weighing, self._world_size = trainer, weighing, world_size
        self._own: dict[str, Callable[..., Any]] = {}
        self._before: dict[str, Any] = {}
        self._scales: dict[int, tuple[Any, float]] = {}
        self._scale: float | None = None
        self.held: list[Any] = []
        self.starts_fresh()

    def starts_fresh(self) -> None:
        """A pass over the data begins."""
        self.num_windows, self.num_kept = 0, 0

    def put_on(self) -> None:
        """Stand in the trainer's way."""
        for name in (*self._NAMES, *(self._SCALING_NAMES if self._weighing is not None else ())):
            self._own[name] = getattr(self._trainer, name)
            if name in vars(self._trainer):
                self._before[name] = vars(self._trainer)[name]
            vars(self._trainer)[name] = getattr(self, name)

    def take_off(self) -> None:
        """Leave the trainer as it was."""
        for name in self._own:
            del vars(self._trainer)[name]
        vars(self._trainer).update(self._before)
        self._own, self._before = {}, {}

    def get_train_dataloader(self) -> Any:
        """The trainer's own loader, whose batches `_prepare_inputs` moves to the device when their turn comes."""
        with replaced(self._trainer.accelerator, device_placement=False):
            return self._own["get_train_dataloader"]()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *rest: Any) -> tuple[list[Any], Any]:
        """The next window, or none where the pass ends before it is full."""
        kept, self.held = self.held, []
        found, count = self._own["get_batch_samples"](chain(kept, epoch_iterator), num_batches, *rest)
        if len(found) < num_batches:
            self.num_kept += len(found) - len(kept)
            self.held = found
            return [], None
        self.num_windows += 1
        if self._weighing is not None:
            self._weigh(found)
        return found, count

    def _weigh(self, found: list[Any]) -> None:
        """What each micro-batch of this window is multiplied by; over ranks, whose gradients are averaged."""
        assert self._weighing is not None
        if self._weighing.weight is None:
            scales = [float(self._world_size)] * len(found)
        else:
            weights = [float(self._weighing.weight(micro_batch)) for micro_batch in found]
            total = self._over_ranks(sum(weights))
            scales = [self._world_size * weight / total if total else 0.0 for weight in weights]
        # The micro-batches themselves are kept as well, so that no other object can have their ids.
        self._scales = {id(one): (one, scale) for one, scale in zip(found, scales, strict=True)}

    def _over_ranks(self, weight: float) -> float:
        """The weight of the window on all ranks."""
        if self._world_size == 1:
            return weight
        total = torch.tensor(weight, dtype=torch.float32, device=self._trainer.args.device)
        return float(self._trainer.accelerator.reduce(total, "sum"))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The trainer's own step, for this micro-batch as a batch of its own."""
        if id(inputs) not in self._scales:
            raise InvalidRequestError(
                "training_step was called with a micro-batch that get_batch_samples did not give, so its weight is not "
                "known; tune the trainer with check=False and scale the loss yourself."
            )
        trainer = self._trainer
        alone = replaced(trainer.args, average_tokens_across_devices=False, gradient_accumulation_steps=1)
        with alone, replaced(trainer, current_gradient_accumulation_steps=1):
            _, own_count = self._own["get_batch_samples"](iter([inputs]), 1, trainer.args.device)
            self._scale = self._scales[id(inputs)][1]
            try:
                loss: Tensor = self._own["training_step"](model, inputs, own_count)
            finally:
                self._scale = None
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own loss; in a training step this micro-batch's part of the window's."""
        found = self._own["compute_loss"](*args, **kwargs)
        if self._scale is None:
            return found
        if isinstance(found, tuple):
            return (scaled(found[0], self._scale), *found[1:])
        return scaled(found, self._scale)
