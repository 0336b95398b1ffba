"""Why the gradient of a split differs from that of the whole: one thing after another is taken out of the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose
from typing import Any, final

import torch
from torch import Tensor, nn

from autoaccum.batches.structure import leaves_of
from autoaccum.batches.weights import Tokens
from autoaccum.checking import reasons
from autoaccum.checking.passes import Gradients, Passes, relative

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@final
class Diagnosis:
    """The causes of one difference. Leaves the model as the caller's snapshot finds it."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._closeness = 10 * passes.tolerance  # of factors, which carry the errors of several gradients

    def reasons(self, gradients: Gradients) -> list[str]:
        """Why the gradients differ: one thing after another is taken out of the way, until they agree."""
        if self._passes.is_random():
            return [reasons.RANDOM]
        told = []
        for take_out, sentence, at_most in (
            (self._freeze_batch_norms, self._about_batch_norm, 0.99),
            # A hook that only scales changes the error a little where something else is the cause.
            (self._take_tensor_hooks, reasons.hooks_on_gradients, 0.5),
        ):
            names = take_out()
            if names:
                before, gradients = gradients.error(), self._passes.gradients()
                if gradients.error() <= at_most * before:
                    told.append(sentence(names))
                if gradients.error() <= self._passes.tolerance:
                    return told
        mixing = self._mixing_layer()
        return [*told, self._about_the_loss(gradients) if mixing is None else reasons.mixing_layer(*mixing)]

    def _freeze_batch_norms(self) -> list[str]:
        found = []
        for name, module in self._passes.module.named_modules():
            if isinstance(module, _BATCH_NORMS) and module.training and module.running_mean is not None:
                module.training = False
                found.append(name)
        return found

    def _about_batch_norm(self, names: list[str]) -> str:
        momentum = getattr(self._passes.module.get_submodule(names[0]), "momentum", None)
        return reasons.batch_norm(names, momentum, self._passes.steps)

    def _take_tensor_hooks(self) -> list[str]:
        return self._passes.take_hooks("_backward_hooks")

    def _mixing_layer(self) -> tuple[str, str] | None:
        """The first layer whose output for some rows is another one in a part than in the whole, though its input is not."""
        in_whole, in_part = self._calls(self._passes.whole), self._calls(self._passes.parts[0])
        for (name, *whole), (other, *part) in zip(in_whole, in_part, strict=False):
            if name == other and self._agree(part[0], whole[0]) and self._agree(part[1], whole[1]) is False:
                return name, type(self._passes.module.get_submodule(name)).__name__
        return None

    def _agree(self, part: Tensor | None, whole: Tensor | None) -> bool | None:
        """Whether the rows of a part are the first ones of the whole; None where they cannot be compared."""
        if part is None or whole is None:
            return None
        rows = self._passes.sizes[0]
        if len(part) != rows or whole.shape != (sum(self._passes.sizes), *part.shape[1:]):
            return None
        return relative(part, whole[:rows]) <= self._passes.tolerance

    def _calls(self, batch: Any) -> list[tuple[str, Tensor | None, Tensor | None]]:
        """Every call of a layer in order of its end: its name, its first input and its output, where these are tensors."""
        found: list[tuple[str, Tensor | None, Tensor | None]] = []

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, given: Any, output: Any) -> None:
                found.append((name, _kept(given[0] if given else None), _kept(output)))

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in self._passes.module.named_modules()]
        try:
            self._passes.gradient(batch, 1.0)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _about_the_loss(self, gradients: Gradients) -> str:
        """What the factors say with which the parts' gradients make up the whole's."""
        parts = [part / scale if scale else part for part, scale in zip(gradients.parts, self._passes.scales, strict=True)]
        stacked = torch.stack(parts, 1)
        factors = torch.linalg.lstsq(stacked.T @ stacked, stacked.T @ gradients.whole, driver="gelsd").solution
        left = relative(stacked @ factors, gradients.whole)
        loss = self._loss_name()
        if left > self._passes.tolerance / 5 or not bool(torch.isfinite(factors).all()):
            return reasons.compares_rows(loss)
        shares = [float(factor) for factor in factors]
        if all(isclose(share, 1.0, rel_tol=self._closeness) for share in shares):
            return reasons.is_a_sum(loss)
        suggestion = self._matching_weight(shares)
        if suggestion is not None or isclose(sum(shares), 1.0, rel_tol=self._closeness):
            return reasons.other_weight(loss, shares, self._passes.scales, suggestion)
        return reasons.nonlinear(loss, shares)

    def _matching_weight(self, factors: Sequence[float]) -> str | None:
        """A weight that gives these factors, in words."""
        candidates: dict[str, list[float]] = {'weight="samples"': [float(size) for size in self._passes.sizes]}
        for path, leaf in leaves_of(self._passes.whole):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.ndim and len(path) == 1:
                key: str | int = path[0] if isinstance(self._passes.whole, dict) or not path[0].isdigit() else int(path[0])
                for shift in (False, True) if leaf.ndim > 1 else (False,):
                    count = Tokens(key, -100, shift)
                    text = f"weight=autoaccum.tokens({key!r}{', shift=True' if shift else ''})"
                    candidates[text] = [float(count(part)) for part in self._passes.parts]
        for text, weights in candidates.items():
            total = sum(weights)
            if total and all(isclose(w / total, f, rel_tol=self._closeness) for w, f in zip(weights, factors, strict=True)):
                return text
        return None

    def _loss_name(self) -> str:
        if self._passes.loss.training_step is not None:
            return "The loss of training_step"
        if self._passes.loss.loss_fn is not None:
            named = getattr(self._passes.loss.loss_fn, "__name__", type(self._passes.loss.loss_fn).__name__)
            return f"The loss {named}"
        return f"The loss of {type(self._passes.module).__name__}"


def _kept(value: Any) -> Tensor | None:
    """A copy of a tensor with rows, to be compared later."""
    is_comparable = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
    return value.detach().clone() if is_comparable else None
