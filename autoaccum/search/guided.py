"""The search with a forecast: a safe size, then the predicted limit, corrected by what was measured.

A forecast that is wrong costs a few probes and never the answer: then the search goes on by what was measured alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import takewhile
from math import log2

from autoaccum.records import Fit, OutOfMemory, Trial
from autoaccum.search.guide import Guide
from autoaccum.search.plain import Gap, gallop, narrow, predicted_limit
from autoaccum.search.standing import Standing, standing

FORECAST_PROBES = 4  # what a wrong forecast may cost beyond the search without one
_SAFE_PART = 4  # a cautious search begins with this part of the predicted limit, and grows by no more at a time
_FEW_RUNGS = 3  # a limit among the lowest few sizes is tried at once
_NEAR_FRAC = 0.01  # of the budget: a peak that close above it shows where the limit is
_FAILURES_BELOW = 2  # with nothing that fits, before the lowest size is tried


def guided(gap: Gap, guide: Guide, trust: bool, tolerance_frac: float) -> int:
    """The next rung by the forecast, while it is worth following, else by what was measured alone."""
    best, ladder = gap.now.best, gap.ladder
    # Doubling up to `best` would have cost these probes, so a forecast that led here may spend them.
    saved = 0 if best is None else max(0, int(log2(max(best / ladder[0], 1))) - 1)
    if guide.is_refuted or gap.now.num_probes >= FORECAST_PROBES + saved:
        return _plain_upwards(gap, guide)
    if best is not None:
        return _from_fit(gap, guide, trust, tolerance_frac)
    return _first(gap, guide, trust) if gap.now.ceiling is None else _down(gap, guide)


def _plain_upwards(gap: Gap, guide: Guide) -> int:
    """As without a forecast, but a failure far above, which only a forecast could lead to, is not halved towards."""
    if gap.now.best is None:
        return gap.lowest
    reach = 2 * gap.now.best
    # The failures before anything fitted are what the forecast cost; without any, it cost at most what it may.
    astray = sum(1 for _ in takewhile(lambda trial: isinstance(trial.outcome, OutOfMemory), guide.trials))
    gap = gap._replace(allowance=astray or FORECAST_PROBES)
    if gap.now.ceiling is not None and gap.now.ceiling <= reach:
        return (gap.low + gap.high) // 2 if _is_slow(gap, guide.trials) else narrow(gap)
    below = Standing(best=gap.now.best, best_peak_bytes=gap.now.best_peak_bytes)
    predicted = predicted_limit(guide.trials, below, guide.budget_bytes)
    return min(gallop(gap._replace(predicted=predicted)), gap.high - 1)


def _is_slow(gap: Gap, trials: Sequence[Trial]) -> bool:
    """Whether the latest two trials left more than half of what was open between a fit and a failure."""
    before = standing(trials[:-2])
    if before.best is None or before.ceiling is None:
        return False
    was_open = bisect_left(gap.ladder, before.ceiling) - bisect_right(gap.ladder, before.best)
    return 2 * (gap.high - gap.low) > was_open


def _first(gap: Gap, guide: Guide, trust: bool) -> int:
    """Nothing ran yet: the top if it needs little, a limit among the lowest sizes, else a safe part of the limit.

    On a cautious device the top, or the growth to the safe part, still fits when three times of it is needed.
    """
    ladder, top = gap.ladder, gap.high - 1
    top_bytes = guide.raw_bytes(ladder[top])
    if gap.cautious and top_bytes == guide.raw_bytes(ladder[gap.low]):
        return gap.lowest  # flat: true where the optimizer step needs the most, but nothing to jump by
    if top_bytes <= (0.3 if gap.cautious else 0.6) * guide.budget_bytes:
        return top
    limit = guide.limit(gap)
    if limit < gap.low + _FEW_RUNGS and not gap.cautious and not trust:
        return max(gap.lowest, limit)
    return max(gap.lowest, gap.rung(ladder[max(limit, gap.low)] // (_SAFE_PART if gap.cautious else 2)))


def _down(gap: Gap, guide: Guide) -> int:
    """A predicted size failed and nothing has run yet: far down, and soon to the lowest."""
    failures = [trial for trial in guide.trials if not isinstance(trial.outcome, Fit)]
    unclear = any(isinstance(trial.outcome, OutOfMemory) and trial.outcome.cause == "unclear" for trial in failures)
    if len(failures) >= _FAILURES_BELOW or unclear:  # unclear: whether it is memory at all, only the lowest size can tell
        return gap.lowest
    assert gap.now.ceiling is not None
    over = max((gap.now.ceiling_peak_bytes or 0) / max(guide.budget_bytes, 1), 2)
    return min(max(gap.lowest, gap.rung(gap.now.ceiling / (2 * over))), gap.high - 1)


def _from_fit(gap: Gap, guide: Guide, trust: bool, tolerance_frac: float) -> int:
    """Something fits: the corrected limit, or up from it by doubling steps where the correction was too high."""
    low, high, now, error_frac = gap.low, gap.high, gap.now, guide.error_frac
    assert now.best is not None
    near_miss = now.ceiling_peak_bytes is not None and now.ceiling_peak_bytes <= guide.budget_bytes * (1 + _NEAR_FRAC)
    if (
        now.ceiling is not None
        and not near_miss
        and (guide.too_low >= 2 or guide.upper_bytes(now.ceiling, now.best, error_frac) <= guide.budget_bytes)
    ):
        return _plain_upwards(gap, guide)  # it is further off than it should be
    if now.ceiling is not None and not near_miss and _is_slow(gap, guide.trials):
        return (low + high) // 2 if now.ceiling <= 2 * now.best else _plain_upwards(gap, guide)
    limit, within = guide.limit(gap), gap.rung(now.best * (1 + tolerance_frac))
    if near_miss and guide.too_low >= 2:  # memory that grows with every size that is tried: down by doubling steps
        return max(low, min(limit, high - 1) - (1 << (guide.too_low - 1)) + 1)
    if max(low, limit) <= within:
        return min(within, high - 1)  # a failure here ends the search
    if limit < low:
        steps = low + (1 << guide.too_high) - 1
        return min(steps, high - 1) if now.ceiling is None else min(steps, (low + high) // 2)
    certain = max(low, guide.limit(gap._replace(high=limit + 1), error_frac))
    # One rung is not worth a probe of its own; nor is more once two peaks have corrected the slope as well.
    refuted = now.ceiling is not None and guide.peak_bytes(now.ceiling) <= guide.budget_bytes
    careful = refuted or (not guide.has_slope and (trust or limit - certain > 1))
    next_best = certain if careful else limit
    return min(next_best, _farthest(gap, guide)) if gap.cautious else next_best


def _farthest(gap: Gap, guide: Guide) -> int:
    """How far a cautious search may go: to where three times the predicted growth still fits, or to a few times the size."""
    best = gap.now.best or 0
    few_times = max(gap.low, gap.rung(best * (2 if guide.is_wild else _SAFE_PART)))
    says_little = guide.is_wild or guide.raw_bytes(gap.ladder[gap.high - 1]) <= guide.raw_bytes(best)
    return few_times if says_little else max(few_times, guide.limit(gap, margin_frac=2.0))
