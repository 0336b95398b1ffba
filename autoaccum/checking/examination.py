"""One comparison of a whole batch's gradient with that of an uneven split, and what it says."""

from __future__ import annotations

from math import isnan
from typing import NamedTuple, final

import torch
from torch import Tensor

from autoaccum.batches.structure import leaves_of, name_of
from autoaccum.checking import reasons
from autoaccum.checking.diagnosis import Diagnosis
from autoaccum.checking.dropout import without_dropout
from autoaccum.checking.passes import Gradients, Passes, Subject
from autoaccum.records import CheckResult


class _Carried(NamedTuple):
    """The gradients of parts of which the second saw what the first had left, and the buffers in which it was left."""

    gradients: Gradients
    names: list[str]


@final
class Examination:
    """One comparison and its diagnosis, in one precision. Leaves the model as the caller's snapshot finds it.

    Args:
        rows: So many are compared, at least twice `smallest`.
        smallest: Rows of a part, at least.
        dtype: The precision; None: the model's own.
    """

    def __init__(self, subject: Subject, rows: int, smallest: int, dtype: torch.dtype | None) -> None:
        self._passes = Passes(subject, rows, smallest, dtype)

    def result(self) -> CheckResult:
        """The comparison, with its reasons."""
        told, notes, in_backward = list[str](), self._about_labels(), self._passes.take_hooks("_post_accumulate_grad_hooks")
        with without_dropout(self._passes.module):
            gradients = self._passes.gradients()
            error, ratio = gradients.error(), gradients.norm_ratio()
            divisor, is_certain = self._divided_by()
            if isnan(error):
                told.append(reasons.NOT_A_NUMBER)
            elif not float(gradients.whole.norm()):
                told.append(reasons.NO_GRADIENT)
            elif error > self._passes.tolerance:
                told += Diagnosis(self._passes).reasons(gradients)
            elif (carried := self._carried_over(gradients)) is not None:
                error, ratio = carried.gradients.error(), carried.gradients.norm_ratio()
                told.append(reasons.carried_over(carried.names))
            elif divisor is not None and is_certain:
                error, ratio = 1 - 1 / divisor, 1 / divisor
                told.append(reasons.already_divided(divisor))
            elif divisor is not None:
                notes.append(reasons.perhaps_divided(divisor))
        if in_backward:
            told.append(reasons.optimizer_in_backward(in_backward))
        return CheckResult(
            exact=not told,
            relative_error=error,
            norm_ratio=ratio,
            reasons=tuple(told),
            micro_batch_sizes=self._passes.sizes,
            dtype=str(self._passes.ran_in).removeprefix("torch."),
            notes=tuple(notes),
        )

    def _carried_over(self, gradients: Gradients) -> _Carried | None:
        """What a micro-batch leaves behind that the next one is computed with, as in training; None where nothing counts."""
        passes = self._passes
        first = passes.gradient(passes.parts[0], passes.scales[0])
        moved = passes.moved_buffers()
        second = passes.gradient_as_it_comes(passes.parts[1], passes.scales[1])
        carried = Gradients(gradients.whole, [first, second])
        if carried.error() <= passes.tolerance or passes.is_random():
            return None
        return _Carried(carried, moved)

    def _about_labels(self) -> list[str]:
        """What this batch cannot show: a weight by label, where all labels are the same."""
        labels = [
            (path, leaf) for path, leaf in leaves_of(self._passes.whole) if isinstance(leaf, Tensor) and leaf.numel() > 1
        ]
        return [
            reasons.same_labels(name_of(path))
            for path, leaf in labels
            if leaf.dtype == torch.int64 and bool((leaf == leaf.flatten()[0]).all())
        ]

    def _divided_by(self) -> tuple[float | None, bool]:
        """The number of micro-batches, where the loss of the whole and of each part is divided by just that.

        And whether that is what it is: half of a loss, and a mean of several losses, are written in the same way.
        """
        divisors = set(self._passes.divisors[:3])
        only = divisors.pop() if len(divisors) == 1 else None
        if only is None or only.number != self._passes.steps:
            return None, False
        return only.number, self._passes.steps > 2 and not only.of_a_sum
