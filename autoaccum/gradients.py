"""The gradients of one window: from None, micro-batch by micro-batch, to what the optimizer steps with.

Decides in which precision they accumulate, what is no such window, and how they are measured and clipped. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum.backward import Backward
from autoaccum.errors import InvalidRequestError

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Gradients of some other dtype than the parameter's: torch 2.13 has it, torch 2.6 has not.
_HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer trains, each once."""
    found = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    return list(found.values())


@final
class Accumulation:
    """Where the gradients of one window add up.

    Gradients of bfloat16 and float16 parameters add up in float32: natively every addition rounds, so the error grows with
    the number of micro-batches, and many equal contributions stop adding up at all.

    Args:
        parameters: Without gradients.
        backward: The backward pass.
        wide: Whether low precision adds up in float32. Not needed for a single micro-batch.
    """

    def __init__(self, parameters: Sequence[Tensor], backward: Backward, *, wide: bool) -> None:
        self.parameters = parameters
        self._backward = backward
        low = [p for p in parameters if p.dtype in LOW_PRECISION and not is_traceable_wrapper_subclass(p)] if wide else []
        self._low = low
        self._own_dtypes: list[Any] = []
        self._apart: dict[int, Tensor] = {}  # float32 sums, where a parameter cannot hold one
        self._sparse: list[Tensor] | None = None
        self._witnesses: list[_Witness] = []
        if _HAS_GRAD_DTYPE:
            self._own_dtypes = [parameter.grad_dtype for parameter in low]
            for parameter in low:
                parameter.grad_dtype = torch.float32

    def add(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch's part of the loss."""
        self._refuse_touched()
        self._backward(loss, self.parameters, is_first=self._sparse is None)
        if self._sparse is None:
            self._sparse = [p for p in self.parameters if p.grad is not None and p.grad.is_sparse]
        for parameter in self._sparse:  # else their entries grow with every micro-batch
            if parameter.grad is not None:
                parameter.grad = parameter.grad.coalesce()
        if not _HAS_GRAD_DTYPE:
            self._set_apart()
        ends = (next(filter(_is_plain, several), None) for several in (self.parameters, reversed(self.parameters)))
        self._witnesses = [_Witness.of(parameter) for parameter in ends if parameter is not None]

    def _refuse_touched(self) -> None:
        """Refuse a training step that steps, clears or adds to gradients itself.

        Two parameters are looked at, the first and the last: a table of embeddings with `max_norm` changes while it is read.

        Raises:
            InvalidRequestError: With what happened.
        """
        if not self._witnesses:
            if self._sparse is None and self.parameters and self.parameters[0].grad is not None:
                raise InvalidRequestError(
                    "the training step has run backward itself (loss.backward(), or accelerator.backward(loss), which also "
                    f"divides by gradient_accumulation_steps); {_OURS}"
                )
            return
        if all(seen.parameter._version != seen.version for seen in self._witnesses):
            raise InvalidRequestError(f"the training step has changed the parameters, as optimizer.step() does; {_OURS}")
        for seen in self._witnesses:
            gradient = seen.parameter.grad
            if gradient is not seen.gradient or gradient is None or gradient._version != seen.gradient_version:
                raise InvalidRequestError(
                    f"the training step has cleared or changed gradients, as zero_grad() does; {_OURS}"
                )

    def complete(self) -> None:
        """After the last micro-batch: sparse gradients that came only after the first one have repeated entries.

        Raises:
            InvalidRequestError: When the training step has touched gradients.
        """
        if self._witnesses:
            self._refuse_touched()
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()

    def _set_apart(self) -> None:
        for parameter in self._low:
            if parameter.grad is not None:
                summed = self._apart.get(id(parameter))
                self._apart[id(parameter)] = parameter.grad.float() if summed is None else summed.add_(parameter.grad)
                parameter.grad = None

    def gradients(self) -> list[Tensor | None]:
        """The gradient of every parameter, in the precision in which it adds up."""
        if not self._apart:
            return [parameter.grad for parameter in self.parameters]
        return [self._apart.get(id(parameter), parameter.grad) for parameter in self.parameters]

    def fill(self, index: int) -> None:
        """Give a parameter without a gradient one of zeros, because another rank has one."""
        parameter = self.parameters[index]
        zeros = torch.zeros_like(parameter, dtype=torch.float32 if self._is_low(parameter) else None)
        self.set(index, zeros)

    def set(self, index: int, gradient: Tensor) -> None:
        """Put a gradient in the place of a parameter's own."""
        parameter = self.parameters[index]
        if self._is_low(parameter) and not _HAS_GRAD_DTYPE:
            self._apart[id(parameter)] = gradient
        else:
            parameter.grad = gradient

    def _is_low(self, parameter: Tensor) -> bool:
        return any(parameter is low for low in self._low)

    def narrow(self, *, looks: bool = True) -> bool:
        """Give every parameter its gradient in its own precision, which is what optimizers take.

        Args:
            looks: Read from the device whether a sum is beyond float16.

        Returns:
            False where a finite sum is beyond float16, as far as was looked.
        """
        finite = True
        for index, parameter in enumerate(self._low):
            gradient = self._apart.pop(id(parameter), parameter.grad)
            parameter.grad = None
            if _HAS_GRAD_DTYPE:
                parameter.grad_dtype = self._own_dtypes[index]
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)
                in_doubt = looks and parameter.dtype == torch.float16
                finite = finite and (not in_doubt or bool(torch.isfinite(_values(parameter.grad)).all()))
        self._low = []
        return finite

    def narrow_where_apart(self) -> None:
        """Narrow where sums are kept apart from the parameters: a gradient scaler looks at the parameters."""
        if not _HAS_GRAD_DTYPE:
            self.narrow()

    def discard(self) -> None:
        """Let go of all gradients; the parameters are as they were before the window."""
        for parameter in self.parameters:
            parameter.grad = None
        self._apart.clear()
        self.narrow()


_OURS = "backward, step and zero_grad happen here, once per window: a training step returns the loss and does no more."


class _Witness(NamedTuple):
    """A parameter with its gradient as they were after a backward pass."""

    parameter: Tensor
    version: int
    gradient: Tensor
    gradient_version: int

    @staticmethod
    def of(parameter: Tensor) -> _Witness:
        """As they are now."""
        assert parameter.grad is not None
        return _Witness(parameter, parameter._version, parameter.grad, parameter.grad._version)


def _is_plain(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and not gradient.is_sparse and not is_traceable_wrapper_subclass(gradient)


def refuse_present(parameters: Sequence[Tensor]) -> None:
    """Refuse to add a window's gradients to others, or to nothing.

    Raises:
        InvalidRequestError: With the remedy.
    """
    if not parameters:
        raise InvalidRequestError("the optimizer has no parameter that requires a gradient; expected at least one.")
    held = sum(parameter.grad is not None for parameter in parameters)
    if held:
        raise InvalidRequestError(
            f"{held} of the optimizer's {len(parameters)} parameters already hold gradients, which would be stepped with as "
            "well; call optimizer.zero_grad() first (its default sets them to None)."
        )


def refuse_none(accumulation: Accumulation) -> None:
    """Refuse a step when nothing that was run led to the optimizer's parameters.

    Raises:
        InvalidRequestError: With the likely reasons.
    """
    if all(gradient is None for gradient in accumulation.gradients()):
        hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in accumulation.parameters)
        raise InvalidRequestError(
            "no parameter of the optimizer received a gradient: the training step ran nothing that leads to them. "
            + (
                "Some parameters have a hook that runs after their gradient is accumulated: an optimizer in the backward "
                "pass steps for every micro-batch, and cannot be accumulated over."
                if hooked
                else "Does the loss depend on the model that was passed in, and an optimizer factory on its argument?"
            )
        )


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients, on the device; of the whole gradient where it is sharded."""
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm([_values(gradient) for gradient in gradients])
    return norm.full_tensor() if is_traceable_wrapper_subclass(norm) else norm


def all_finite(gradients: Sequence[Tensor], norm: Tensor) -> bool:
    """Whether no gradient holds an infinity or NaN. Reads from the device."""
    if bool(torch.isfinite(norm)):
        return True
    if any(is_traceable_wrapper_subclass(gradient) for gradient in gradients):
        return False  # each rank has a part, and all must come to the same answer
    # The square of a large gradient can overflow, so its norm proves nothing.
    return all(bool(torch.isfinite(_values(gradient)).all()) for gradient in gradients)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients down so that their norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # 1e-6: clip_grad_norm_'s own
    for gradient in gradients:
        _values(gradient).mul_(scale.to(gradient.device))


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
