"""How large a micro-batch may be in training, learned from what failed. Pure: knows neither batches nor devices.

A limit holds for batches of one shape and for larger shapes. It grows back, half of the way to what failed after some
windows without trouble and at last to that size itself, because memory may have become free again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any, final

Shape = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of the parts of a batch, each with its shape without the rows."""

FIRST_PATIENCE = 16
"""Windows without trouble before a limit grows. An attempt that fails costs about one window, so at most 6 % here; every
one that fails doubles it."""

_SHAPES_KEPT = 256  # of sequences of every length; the oldest is forgotten and learned again


@dataclass
class _Cap:
    """What is known about one shape: the limit now, the largest size that ran, the smallest that failed."""

    limit: float
    ran: float
    failed: float
    quiet: int = 0
    patience: int = FIRST_PATIENCE
    growing: bool = False


@final
class Caps:
    """The learned limits of micro-batches by shape, in rows or in whatever they are cut by.

    Args:
        whole: Sizes are whole numbers.

    Example:
        >>> caps = Caps()
        >>> caps.limit(()), caps.fail((), 8), caps.limit(())
        (inf, 4, 4)
    """

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        self._caps: dict[Shape, _Cap] = {}

    def limit(self, shape: Shape) -> float:
        """The largest size to try for this shape, infinite where nothing has failed."""
        if shape in self._caps:
            return self._caps[shape].limit
        return min((cap.limit for known, cap in self._caps.items() if _covers(shape, known)), default=inf)

    def fail(self, shape: Shape, size: float) -> float:
        """Write down that this size, more than one row, ran out of memory; gives the next limit.

        That is the largest size that has run, where one has, else half, rounded up.
        """
        cap = self._caps.setdefault(shape, _Cap(limit=size, ran=0, failed=size))
        half = (size + 1) // 2 if self._whole else size / 2
        cap.limit = cap.ran if 0 < cap.ran < size else half
        cap.ran = min(cap.ran, cap.limit)
        cap.failed = min(cap.failed, size)
        cap.patience *= 2 if cap.growing else 1
        cap.quiet, cap.growing = 0, False
        for other, larger in self._caps.items():
            if _covers(other, shape):
                larger.limit = min(larger.limit, cap.limit)
        return cap.limit

    def lower(self, shape: Shape, size: float, limit: float) -> None:
        """Take over a limit that another rank needs, where this one would have run `size`."""
        if size > limit:
            cap = self._caps.setdefault(shape, _Cap(limit=limit, ran=0, failed=size))
            cap.limit, cap.failed = min(cap.limit, limit), min(cap.failed, size)
            cap.ran, cap.quiet, cap.growing = min(cap.ran, cap.limit), 0, False

    def run(self, shape: Shape, size: float) -> None:
        """Write down that a window ran whose largest micro-batch of this shape had this size; its limit may grow."""
        cap = self._caps.get(shape) or self._inherited(shape)
        if cap is None:
            return
        cap.ran, cap.quiet, cap.growing = max(cap.ran, size), cap.quiet + 1, cap.growing and size < cap.limit
        if cap.ran >= cap.failed:
            del self._caps[shape]
        elif cap.quiet >= cap.patience:
            cap.limit, cap.quiet, cap.growing = self._grown(cap), 0, True

    def _inherited(self, shape: Shape) -> _Cap | None:
        """A cap of its own for a shape that has gone by a smaller one's, so that it can grow."""
        smaller = [cap for known, cap in self._caps.items() if _covers(shape, known)]
        if not smaller:
            return None
        lowest = min(smaller, key=lambda cap: cap.limit)
        if len(self._caps) >= _SHAPES_KEPT:
            del self._caps[next(iter(self._caps))]
        self._caps[shape] = _Cap(limit=lowest.limit, ran=0, failed=lowest.failed)
        return self._caps[shape]

    def _grown(self, cap: _Cap) -> float:
        middle = (cap.limit + cap.failed) / 2
        if self._whole:
            return max(int(middle), cap.limit + 1)
        if cap.limit >= cap.failed:  # packed micro-batches may never cost just as much as the limit
            return cap.limit * 1.05
        return middle if cap.failed - cap.limit > cap.failed / 20 else cap.failed

    def state(self) -> list[dict[str, Any]]:
        """What was learned, as plain values."""
        return [{"shape": shape, **asdict(cap)} for shape, cap in self._caps.items()]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Take over what `state` gave."""
        self._caps = {}
        for entry in state:
            values = dict(entry)
            shape = tuple((str(name), tuple(int(size) for size in sizes)) for name, sizes in values.pop("shape"))
            cap = _Cap(**values)
            if not all(isinstance(value, (int, float)) for value in asdict(cap).values()):
                raise TypeError(f"a limit is not made of numbers: {entry}")
            self._caps[shape] = cap


def _covers(shape: Shape, known: Shape) -> bool:
    """Whether every part of a shape is at least as large as in the known one, so that it needs at least its memory."""
    return len(shape) == len(known) and all(
        name == other and len(sizes) == len(others) and all(a >= b for a, b in zip(sizes, others, strict=True))
        for (name, sizes), (other, others) in zip(shape, known, strict=True)
    )
