"""The backward pass of a micro-batch, and whose gradients it gives. Knows nothing of windows, precision or steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from autoaccum.scaled_losses import refuse_scaled_loss

_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"  # its backward refuses `inputs=`


@final
class Backward:
    """The backward pass of a micro-batch, with gradients for the given parameters and for no others.

    What else a loss leads to (the discriminator, in a generator's loss; parameters that another optimizer has) is looked for
    once for every kind of loss. Only where there is such a thing is torch told whose gradients are wanted, which costs a
    walk over the graph each time.

    Args:
        scaler: Multiplies the loss, which a training step must not have scaled itself.
        module: Whose parameters reentrant checkpointing may hide from a look at the graph.
        look_for_others: False where parameters stand in for others while they run, as FSDP's do.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler | None = None,
        *,
        module: nn.Module | None = None,
        look_for_others: bool = True,
    ) -> None:
        self._scaler, self._module, self._looks = scaler, module, look_for_others
        self._reach: dict[Any, _Reach] = {}
        self._last = _Reach()

    def __call__(self, loss: Tensor, parameters: Sequence[Tensor], *, is_first: bool = True) -> None:
        """Add this loss's gradients to those of the parameters. `is_first`: of the window, whose losses are all alike."""
        reach = self._last = self._reach_of(loss, parameters) if is_first else self._last
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        if reach.others and not reach.hides and parameters:
            torch.autograd.backward(scaled, inputs=list(parameters))
            return
        others = self._others(reach, parameters) if reach.hides else []
        held = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            scaled.backward()  # type: ignore[no-untyped-call]
        finally:
            for parameter, gradient in zip(others, held, strict=True):
                parameter.grad = gradient

    def _reach_of(self, loss: Tensor, parameters: Sequence[Tensor]) -> _Reach:
        if not self._looks:
            return _Reach()
        kind = (_top_of(loss), len(parameters))  # parameters may join an optimizer, and a loss get another term
        if kind not in self._reach:
            if self._scaler is not None:
                refuse_scaled_loss(loss, self._scaler)
            self._reach[kind] = _look(loss, {id(parameter) for parameter in parameters})
        return self._reach[kind]

    def _others(self, reach: _Reach, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
        own = {id(parameter) for parameter in parameters}
        hidden = [] if self._module is None else self._module.parameters()
        found = {id(other): other for other in (*reach.parameters, *hidden) if other.requires_grad and id(other) not in own}
        return list(found.values())


class _Reach(NamedTuple):
    """Where a loss leads.

    Attributes:
        others: To other leaves than the optimizer's.
        hides: Through reentrant checkpointing, which hides its part of the graph and refuses `inputs=`.
        parameters: The other leaves that are parameters, where they are needed.
    """

    others: bool = False
    hides: bool = False
    parameters: tuple[nn.Parameter, ...] = ()


def _top_of(loss: Tensor) -> tuple[str, ...]:
    """The names of the last operations: another term of a loss shows there."""
    level, names = [] if loss.grad_fn is None else [loss.grad_fn], []
    for _ in range(4):
        names += [node.name() for node in level]
        level = [following for node in level for following, _ in node.next_functions if following is not None]
    return tuple(names)


def _look(loss: Tensor, own: set[int]) -> _Reach:
    """Walk over the whole graph of a loss."""
    seen: set[Any] = set()
    found: list[Tensor] = []
    waiting, hides = [loss.grad_fn], False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        hides = hides or node.name() == _REENTRANT_CHECKPOINT
        leaf = getattr(node, "variable", None)  # only AccumulateGrad has one
        if isinstance(leaf, Tensor) and id(leaf) not in own:
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    parameters = tuple(leaf for leaf in found if isinstance(leaf, nn.Parameter))
    return _Reach(bool(found), hides, parameters if hides else ())  # other leaves may be a batch, which is not kept alive
