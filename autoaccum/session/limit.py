"""The largest size that fits under one position of the levers.

The loop is three lines: propose a size from the log, run it, add what came of it. Everything that decides is pure and lives
in `search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

from autoaccum.records import Levers, OutOfMemory
from autoaccum.search import (
    Forecast,
    Standing,
    is_closed_by_convexity,
    line_through,
    next_to_measure,
    propose,
    standing,
)
from autoaccum.session.search import Search

_SHORT_S = 2.5  # a trial that takes no longer costs no more than a trace, which takes 2 to 4 s even of small models
_WORTH_PREDICTING = 3  # sizes; fewer are tried in less time than two traces take


def find_limit(
    search: Search,
    levers: Levers,
    sizes: Sequence[int],
    tolerance_frac: float = 0.0,
    *,
    trust: bool = False,
    needs_trace: bool = True,
) -> Standing:
    """Search the largest of these sizes that fits under these levers; none may.

    Args:
        trust: See `propose`.
        needs_trace: A prediction is of use for more than this search.
    """
    if search.log.listener is not None:
        search.log.listener.bounded(sizes[-1])
    forecast: Forecast | None = None
    if len(sizes) >= _WORTH_PREDICTING and search.request.predict:
        if needs_trace or not _is_quick(search, levers, sizes):
            forecast = search.forecasts.of(levers)
        else:
            forecast = line_through(search.log.of(levers), search.guide_bytes)
    while not (search.time_is_up and standing(search.log.of(levers)).best is not None):
        size = propose(
            search.log.of(levers),
            sizes,
            budget_bytes=search.guide_bytes,
            cautious=search.device.cautious,
            tolerance_frac=tolerance_frac,
            forecast=forecast,
            trust=trust,
            noise_frac=search.forecasts.noise_frac(levers),
        )
        if size is None or _is_hopeless(search, levers):
            break
        search.probe(levers, size)
    return standing(search.log.of(levers))


def is_closed(search: Search, levers: Levers, sizes: Sequence[int]) -> bool:
    """Whether the measured peaks alone show that the next size cannot fit."""
    return is_closed_by_convexity(search.log.of(levers), sizes, search.guide_bytes, search.forecasts.noise_frac(levers))


def _is_quick(search: Search, levers: Levers, sizes: Sequence[int]) -> bool:
    """Try small sizes; whether trials are so short that those to come take less time than a trace."""
    budget_bytes = search.guide_bytes
    if not search.device.is_host:  # on others nothing was measured yet that would say what is short
        return False
    held_bytes = search.guide_held_bytes
    while not search.time_is_up:
        size = next_to_measure(search.log.of(levers), sizes, budget_bytes=budget_bytes, held_bytes=held_bytes)
        if size is None:
            return True
        search.probe(levers, size)
        log = search.log.of(levers)
        now, line = standing(log), line_through(log, budget_bytes)
        longest_s = max(trial.wall_s for trial in log[1:] or log)  # the first one loads what steps need
        if now.best is None:
            return False
        if now.ceiling is not None:
            return longest_s * ceil(log2(now.ceiling - now.best + 1)) <= _SHORT_S
        if line is not None or (longest_s > _SHORT_S and len(log) > 1):
            return line is not None and longest_s * max(1.0, line.crossing(budget_bytes) / size) <= _SHORT_S
    return True


def _is_hopeless(search: Search, levers: Levers) -> bool:
    """Two sizes failed with an error that may not mean memory, and none has run: then it is the user's error."""
    log = search.log.of(levers)
    unclear = [t for t in log if isinstance(t.outcome, OutOfMemory) and t.outcome.cause == "unclear"]
    return len(unclear) >= 2 and standing(log).best is None
