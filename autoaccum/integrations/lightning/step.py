"""What Lightning runs for one micro-batch, for a search: the module's own training step, heard by no logger."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autoaccum.errors import InvalidRequestError


def step_of(trainer: Any, pl_module: Any) -> Callable[[nn.Module, Any], Tensor]:
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
def silenced(trainer: Any, pl_module: Any) -> Iterator[None]:
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
