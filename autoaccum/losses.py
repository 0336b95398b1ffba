"""The loss of one micro-batch: how the user's step, loss function or model gives it.

Knows nothing of optimizers, memory or trials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autoaccum.batches.structure import is_plain_sequence
from autoaccum.calling import binds, call, checked_loss, inputs_and_target, is_item_list, is_one_per_row, own_loss
from autoaccum.errors import InvalidRequestError

LossFn = Callable[[Any, Any], Tensor]
TrainingStep = Callable[[nn.Module, Any], Tensor]

UNUSED_LOSS_FN = "loss_fn is not used, since training_step gives the loss itself; leave one of the two out."


@final
class MicroBatchLoss:
    """Runs the model on a micro-batch and gives its scalar loss, with its graph.

    Args:
        module: What is called.
        loss_fn: `loss_fn(output, target)`, for batches shaped `(input, ..., target)`.
        training_step: `training_step(module, batch)`; wins over `loss_fn`.
        warn: Told, when the mean of the outputs stands in for a loss that nobody gave. None: that is an error, because
            nobody wants to train on it.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn | None,
        training_step: TrainingStep | None,
        *,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        for name, value in (("loss_fn", loss_fn), ("training_step", training_step)):
            if value is not None and not callable(value):
                raise InvalidRequestError(f"{name}={value!r} cannot be called; expected a function.")
        self.module, self.loss_fn, self.training_step = module, loss_fn, training_step
        self._warn = warn

    def __call__(self, batch: Any) -> Tensor:
        """The scalar loss of one micro-batch.

        Raises:
            InvalidRequestError: When it is not a scalar, has no gradient, or the batch has not the shape `loss_fn` needs.
            Exception: Whatever the user's code raises.
        """
        if self.training_step is not None:
            return checked_loss(self.training_step(self.module, batch), "training_step")
        if self.loss_fn is not None:
            inputs, target = inputs_and_target(batch)
            if isinstance(inputs, list) and is_one_per_row(inputs, target):
                return checked_loss(self.loss_fn(self.module(inputs), target), "loss_fn")
            return checked_loss(self.loss_fn(call(self.module, inputs), target), "loss_fn")
        output = self._call_with_all(batch)
        own = own_loss(output)
        return checked_loss(self._mean_of(output) if own is None else own, "the model")

    def _call_with_all(self, batch: Any) -> Any:
        """Call the model with a whole batch; a pair for a model of one argument is taken as (input, target)."""
        if is_plain_sequence(batch) and not is_item_list(batch) and not binds(self.module, *batch) and len(batch) > 1:
            if self._warn is not None:
                self._warn(
                    "The sample's last part was taken as the target and not used, since there is no loss_fn and the model "
                    "does not take it."
                )
            return call(self.module, inputs_and_target(batch)[0])
        return call(self.module, batch)

    def _mean_of(self, output: Any) -> Tensor:
        if self._warn is None:
            raise InvalidRequestError(
                "no loss was given and the model returns none; pass loss_fn=(output, target) -> loss or "
                "training_step=(model, batch) -> loss."
            )
        self._warn(
            "No loss was given and the model returns none: the mean of its outputs was used. The memory figures hold for "
            "everything but the loss itself; pass loss_fn= or training_step= to include it."
        )
        parts = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not parts:
            raise InvalidRequestError(
                "the model's output has no part with a gradient and no loss; pass training_step=(model, batch) -> loss."
            )
        return torch.stack([part.float().mean() for part in parts]).mean()
