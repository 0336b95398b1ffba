"""Puts everything back, bit for bit: the user's model, optimizer, random generators and modes.

A snapshot is taken once and restored after every trial. It takes no memory that a budget would miss: it lies in host memory
for a device, and in an unnamed temporary file where host memory itself is what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autoaccum.preserve.ambient import keep_random_states, keep_settings
from autoaccum.preserve.attributes import generators_in, keep_generator
from autoaccum.preserve.modules import KeptModule, plain_attributes
from autoaccum.preserve.optimizers import keep_optimizer, optimizers_in, own_attributes
from autoaccum.preserve.restoring import run_all, uninterrupted
from autoaccum.preserve.tensors import keep_tensor
from autoaccum.preserve.vault import Vault


@contextmanager
def preserved(
    model: nn.Module, optimizer: Optimizer | None = None, *, device: torch.device, on_disk: bool = False
) -> Iterator[Snapshot]:
    """Give a snapshot that can be restored at any time, and restore it on the way out, whatever happened.

    Kept: parameters, buffers, gradients, `requires_grad`, train/eval flags, hooks, tensors that modules hold as plain
    attributes or in lists and dicts there, optimizer state and parameter groups (of optimizers inside an optimizer too), the
    generators of python, numpy, torch, the device and those that modules hold, grad mode, autocast, default dtype and the
    flags of `torch.backends`. Counters, flags and texts that modules hold are put back on the way out alone, or with hooks
    and tensors that they belong to: what counts the calls of a search goes on counting from one trial to the next.

    Args:
        model: Its tensors are restored in place, so views and tied weights stay what they are.
        optimizer: The user's own, None where the probe makes one.
        device: Whose generator is kept, besides the CPU's.
        on_disk: Keep the bytes in a temporary file that has no name, so that nothing is left even after `kill -9`.
    """
    snapshot = Snapshot(model, optimizer, device=device, on_disk=on_disk)
    try:
        yield snapshot
    except BaseException as error:
        try:
            snapshot.restore(whole=True)
        except RuntimeError as failure:  # a lost device context: the user's error matters more than this one
            error.add_note(f"autoaccum could not put the model back: {failure}")
        raise
    else:
        snapshot.restore(whole=True)
    finally:
        snapshot.close()


@final
class Snapshot:
    """What was found, and how to put it back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, *, device: torch.device, on_disk: bool) -> None:
        self._vault = Vault(on_disk)
        optimizers = optimizers_in(optimizer)
        self._modules = [KeptModule(module) for module in model.modules()]
        self._optimizers = [keep_optimizer(one) for one in optimizers]
        try:
            self._tensors = [keep_tensor(tensor, self._vault) for tensor in _tensors_of(model, optimizers)]
            self._vault.flush()
        except BaseException:
            self._vault.close()  # there may be no room for all of it
            raise
        self._ambient = [*keep_random_states(device), *keep_settings(device.type)]
        self._ambient += [keep_generator(one) for one in generators_in(map(vars, model.modules()))]

    def restore(self, *, whole: bool = False) -> None:
        """Put everything back; Ctrl-C waits until that is done.

        Args:
            whole: Counters, flags and texts that modules hold as well. They are in any case with hooks that were registered
                in between: "hooks are installed" is one of those flags.

        Raises:
            RuntimeError: The first error of a part that could not be put back, after all other parts were.
        """
        failures: list[RuntimeError] = []
        with uninterrupted():
            whole = whole or any(module.has_other_hooks() for module in self._modules)
            modules = [partial(module.put_back, whole=whole) for module in self._modules]
            with torch.no_grad():
                run_all((*modules, *self._optimizers, *self._tensors), failures)
            run_all(self._ambient, failures)  # grad mode is one of them, and leaving `no_grad` sets it as well
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Let go of the kept bytes."""
        self._vault.close()


def _tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The tensors whose values are kept, each once."""
    found: list[Any] = []
    for module in model.modules():
        found += [*module._parameters.values(), *module._buffers.values()]
        found += [leaf for leaf in tree_leaves(plain_attributes(module)) if isinstance(leaf, Tensor) and leaf.is_leaf]
    for optimizer in optimizers:
        found += tree_leaves([list(optimizer.state.values()), optimizer.param_groups])
        found += [leaf for leaf in tree_leaves(own_attributes(optimizer)) if isinstance(leaf, Tensor) and leaf.is_leaf]
    held = {id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}
    gradients = [tensor.grad for tensor in held.values() if tensor.is_leaf and tensor.grad is not None]
    return list((held | {id(gradient): gradient for gradient in gradients}).values())
