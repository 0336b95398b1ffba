"""What a loss is a mean over, counted micro-batch by micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from autoaccum.batches.denominators import Denominator, denominator_of
from autoaccum.errors import InvalidRequestError
from autoaccum.units import shown

IGNORED_LABELS = (  # said where `has_ignored_labels` and rows are counted
    "some labels are -100, and weight='samples' weighs micro-batches by rows: if the loss is a mean over labels, pass "
    "weight=autoaccum.tokens('labels'), with shift=True for causal language models"
)
UNKNOWN_LOSS = (  # said where a loss is `taken_at_its_word` and there are several micro-batches
    "loss_fn is none of torch's own losses, so it is taken to be a mean over samples; if it divides by something else, such "
    "as the weights of the classes, or compares samples, accumulation is not exact: Accumulator.check(batch) tells, and "
    "weight= says what it divides by"
)


@final
class Tokens:
    """Counts the labels of a micro-batch that the loss is a mean over. Made by `tokens`."""

    def __init__(self, key: str | int, ignore_index: int, shift: bool) -> None:
        self.key, self.ignore_index, self.shift = key, ignore_index, shift

    def __call__(self, batch: Any) -> int:
        """Valid labels of this micro-batch.

        Raises:
            InvalidRequestError: When the batch has no such labels.
        """
        ready = isinstance(batch, Mapping) and batch.get("shift_labels") is not None
        labels = batch["shift_labels"] if ready else self._labels(batch)
        if self.shift and not ready:
            labels = labels[..., 1:]
        return int((labels != self.ignore_index).sum())

    def _labels(self, batch: Any) -> Any:
        try:
            return batch[self.key]
        except (KeyError, IndexError, TypeError):
            has = f"has {shown(sorted(map(str, batch)))}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
            raise InvalidRequestError(
                f"tokens({shown(self.key)}) finds no labels: the micro-batch {has}; expected a name or an index of "
                "its parts."
            ) from None


def tokens(key: str | int, ignore_index: int = -100, shift: bool = False) -> Tokens:
    """Weigh micro-batches by their valid labels, for a loss that is a mean over tokens.

    Args:
        key: Where the labels are in a batch: a name, or an index for tuples. A ready `shift_labels` entry is counted
            instead, as it is.
        ignore_index: Labels of this value do not count.
        shift: Leave out the first position, as causal language models do inside.

    Example:
        >>> import torch
        >>> tokens("labels")({"labels": torch.tensor([[5, 7, -100], [2, -100, -100]])})
        3
    """
    return Tokens(key, ignore_index, shift)


@final
class Weigher:
    """Gives the weight of a micro-batch: the denominator of its mean loss.

    Args:
        weight: As the user gave it. With "samples" one of torch's own losses is asked what it divides by.
        loss_fn: None where the loss is not one of `(output, target)`.
    """

    def __init__(self, weight: str | Tokens | Callable[[Any], float], loss_fn: object = None) -> None:
        if weight != "samples" and not callable(weight):
            raise InvalidRequestError(
                f"weight={shown(weight)} is unknown; expected 'samples', autoaccum.tokens('labels'), or a function "
                "batch -> number."
            )
        self._count = weight if callable(weight) else None
        self._loss_fn = loss_fn

    @property
    def _denominator(self) -> Denominator | None:
        """What the loss divides by now: its settings may be changed between windows."""
        return None if self._count is not None else denominator_of(self._loss_fn)

    @property
    def summed(self) -> bool:
        """Whether the loss is a sum, so that micro-batches add up as they are."""
        denominator = self._denominator
        return denominator is not None and denominator.summed

    @property
    def counts_rows(self) -> bool:
        """Whether nothing of the batch has to be looked at."""
        denominator = self._denominator
        return self._count is None and (denominator is None or denominator.summed)

    @property
    def taken_at_its_word(self) -> bool:
        """Whether the loss is one of the user's own of which nobody has said what it divides by."""
        return self._count is None and self._loss_fn is not None and self._denominator is None

    def __call__(self, batch: Any, rows: int) -> float:
        """The weight of a micro-batch of so many rows.

        Raises:
            InvalidRequestError: When the user's function gives no finite number of at least zero.
        """
        return self.weights([rows], lambda: [batch])[0]

    def weights(self, rows: Sequence[int], make: Callable[[], Iterable[Any]]) -> list[float]:
        """The weights of the micro-batches of a window.

        Args:
            rows: Of each micro-batch.
            make: Gives the micro-batches; only called where they have to be looked at.
        """
        denominator = self._denominator
        if self._count is None and (denominator is None or denominator.summed):
            return [float(count) for count in rows]
        return [self._weight(batch, count, denominator) for batch, count in zip(make(), rows, strict=True)]

    def _weight(self, batch: Any, rows: int, denominator: Denominator | None) -> float:
        if self._count is not None:
            return _checked(self._count(batch))
        if denominator is not None:
            pair = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and len(batch) > 1
            if pair and isinstance(batch[-1], Tensor):
                return denominator(batch[-1])
        return float(rows)


def has_ignored_labels(batch: Any) -> bool:
    """Whether a batch has `labels` of which some are -100, as losses over tokens leave out."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, Tensor) and not labels.is_floating_point() and bool((labels == -100).any())


def _checked(weight: Any) -> float:
    try:
        number = float(weight.detach() if isinstance(weight, Tensor) else weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise InvalidRequestError(
            f"weight= gave {shown(weight)} for a micro-batch; expected a finite number >= 0: what its loss is a mean over."
        )
    return number
