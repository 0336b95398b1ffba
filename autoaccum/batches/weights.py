"""What a loss is a mean over, counted micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final


@final
class Tokens:
    """Counts the labels of a micro-batch that the loss is a mean over. Made by `tokens`."""

    def __init__(self, key: str | int, ignore_index: int, shift: bool) -> None:
        self.key, self.ignore_index, self.shift = key, ignore_index, shift

    def __call__(self, batch: Any) -> int:
        """Valid labels of this micro-batch."""
        ready = isinstance(batch, Mapping) and "shift_labels" in batch
        labels = batch["shift_labels"] if ready else batch[self.key]
        if self.shift and not ready:
            labels = labels[..., 1:]
        return int((labels != self.ignore_index).sum())


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
