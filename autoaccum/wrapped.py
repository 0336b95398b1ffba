"""DistributedDataParallel kept quiet: nothing is exchanged inside a window, whose gradients are reduced once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from autoaccum.errors import InvalidRequestError


def refuse_wrapped(model: object, process_group: Any) -> None:
    """Refuse options of DistributedDataParallel that exchange gradients by themselves, or a group that is not its own.

    Raises:
        InvalidRequestError: With the remedy.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if getattr(model, "_delay_all_reduce_params", None):
        raise InvalidRequestError(
            "DistributedDataParallel with delay_all_reduce_named_params exchanges gradients in every backward pass, also "
            "under no_sync; make it without."
        )
    if process_group is not None and process_group is not model.process_group:
        raise InvalidRequestError(
            "process_group= is not the group of the DistributedDataParallel model; leave it out, or wrap the model in it."
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has wrapped a part of it; such a part warns of hooks on all modules."""
    return any(type(part).__name__ == "OptimizedModule" for part in model.modules())


@contextmanager
def unsynchronised(known: Iterable[DistributedDataParallel], *, look_for_others: bool = True) -> Iterator[None]:
    """No collective of DistributedDataParallel while inside, neither of these nor of any other that is called.

    A training step may call wrapped models that the accumulator does not know, such as the other network of a GAN.

    Args:
        look_for_others: By a hook on the forward of all modules.
    """
    with ExitStack() as stack:
        quiet: set[int] = set()

        def silence(wrapped: DistributedDataParallel) -> None:
            if id(wrapped) not in quiet:
                quiet.add(id(wrapped))
                wrapped.reducer._reset_state()  # a forward before the window, to look at an output, has armed it
                # no_sync leaves the first forward's broadcast of buffers
                stack.callback(setattr, wrapped, "require_forward_param_sync", wrapped.require_forward_param_sync)
                wrapped.require_forward_param_sync = False
                stack.enter_context(wrapped.no_sync())

        def before_forward(module: nn.Module, args: object) -> None:
            if isinstance(module, DistributedDataParallel):
                silence(module)

        for wrapped in known:
            silence(wrapped)
        if look_for_others and dist.is_available() and dist.is_initialized():
            stack.callback(register_module_forward_pre_hook(before_forward).remove)
        yield
