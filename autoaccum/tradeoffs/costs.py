"""How long an optimizer step is expected to take at settings that have not run, from those that have.

A Gaussian process on the logarithm of the step time: each lever multiplies the time by a factor that is the same at other
settings, recomputation costs what the traces count, and micro-batches of similar size are similarly fast. The table says
what is believed of each before anything is measured; every measurement then sharpens all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log, log2
from typing import NamedTuple

import numpy as np

from autoaccum.records import Levers
from autoaccum.timing import noise_frac
from autoaccum.tradeoffs.points import Measured, Point


class Belief(NamedTuple):
    """The logarithm of a factor on the step time: what is expected of it, and how sure that is."""

    expected: float
    deviation: float


# Expected from nothing, so wide: a lever is ruled out by what was measured, not by what is written here.
_BELIEFS: dict[tuple[str, str], Belief] = {
    ("checkpointing", "selective"): Belief(0.03, 0.05),
    ("checkpointing", "full"): Belief(0.0, 0.05),
    ("precision", "tf32"): Belief(-0.3, 0.4),
    ("precision", "bf16"): Belief(-0.2, 0.7),
    ("precision", "fp16"): Belief(-0.2, 0.7),
    ("optimizer_impl", "for-loop"): Belief(0.05, 0.15),
    ("optimizer_impl", "foreach"): Belief(0.0, 0.15),
    ("optimizer_impl", "fused"): Belief(-0.05, 0.15),
    ("offload", "cpu"): Belief(0.3, 0.4),
}
_PER_DOUBLING = Belief(-0.03, 0.10)  # twice the micro-batch: a little less overhead, or more, where caches overflow
_WIGGLE, _WIGGLE_DOUBLINGS = 0.03, 1.0  # sizes have their own ups and downs, alike within about one doubling
_OWN = 0.08  # and kernels work on tiles: a size may be that much faster or slower than its neighbours
_LEAST_NOISE = 0.005


class Expected(NamedTuple):
    """What a step is expected to take, and what it may take at best, in seconds."""

    step_s: float
    at_best_s: float


class CostModel:
    """Step times at any point, given those that were measured.

    Args:
        measured: At least one.
        work: Operations per row at a point, relative to the caller's own setting: 1.3 where a third of the forward pass is
            computed again; 1.0 where it is not known.
    """

    def __init__(self, measured: Sequence[Measured], work: Callable[[Point], float]) -> None:
        self._work = work
        self._reference = log2(measured[0].point.micro_batch)
        self._points = [one.point for one in measured]
        noises = [max(_LEAST_NOISE, noise_frac(one.timing)) for one in measured]
        self._offset = log(measured[0].timing.median_s) - self._prior(measured[0].point)
        values = np.array([log(one.timing.median_s) for one in measured]) - self._means(self._points)
        self._gain = np.linalg.inv(self._covariance(self._points, self._points) + np.diag(np.square(noises)))
        self._weights = self._gain @ values

    def expected(self, point: Point) -> Expected:
        """The step time at this point."""
        across = self._covariance([point], self._points)
        mean = float(self._means([point])[0] + (across @ self._weights)[0])
        own = float(self._covariance([point], [point])[0, 0])
        variance = max(0.0, own - float((across @ self._gain @ across.T)[0, 0]))
        return Expected(exp(mean), exp(mean - variance**0.5))

    def _prior(self, point: Point) -> float:
        factors = sum(belief.expected for belief, _ in _beliefs_of(point.levers))
        return log(self._work(point)) + factors + _PER_DOUBLING.expected * self._doublings(point)

    def _means(self, points: Sequence[Point]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([self._offset + self._prior(point) for point in points])

    def _covariance(
        self, points: Sequence[Point], others: Sequence[Point]
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.array([[self._alike(one, other) for other in others] for one in points])

    def _alike(self, one: Point, other: Point) -> float:
        """Prior covariance of two points: of what they have in common."""
        doublings = self._doublings(one), self._doublings(other)
        alike = 1.0 + _PER_DOUBLING.deviation**2 * doublings[0] * doublings[1]  # 1.0: how fast the machine is, is not known
        alike += _WIGGLE**2 * exp(-(((doublings[0] - doublings[1]) / _WIGGLE_DOUBLINGS) ** 2) / 2)
        alike += _OWN**2 * (one.micro_batch == other.micro_batch)
        shared = {key: belief for belief, key in _beliefs_of(one.levers)}.items()
        others = {key for _, key in _beliefs_of(other.levers)}
        return alike + sum(belief.deviation**2 for key, belief in shared if key in others)

    def _doublings(self, point: Point) -> float:
        return log2(point.micro_batch) - self._reference


def _beliefs_of(levers: Levers) -> list[tuple[Belief, tuple[str, str]]]:
    keys = [(name, getattr(levers, name)) for name in ("checkpointing", "precision", "optimizer_impl", "offload")]
    return [(_BELIEFS[key], key) for key in keys if key in _BELIEFS]
