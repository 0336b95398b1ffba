"""How many rows fit into one micro-batch when levers may be turned for it, whatever time that takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

import msgspec

from autoaccum.choose import evidence, limited_by
from autoaccum.foreseeing import Foresight
from autoaccum.levers import Space
from autoaccum.records import AS_IT_IS, Fit, Levers, ProbeResult
from autoaccum.search import Standing, standing
from autoaccum.session import Search
from autoaccum.session.limit import find_limit
from autoaccum.tradeoffs.choosing import recomputation
from autoaccum.tradeoffs.points import with_blocks

_INEXACT_FRAC = 0.05  # exact=False ends when the limit is known to within 5 %


def probed(search: Search) -> ProbeResult:
    """Search the limit of one micro-batch and write it down.

    With levers to turn, those that are predicted to make the most room are turned as far as they go, the limit is searched,
    and then as few blocks are left checkpointed as hold it.

    Raises:
        NothingFitsError: When not even the smallest size fits.
    """
    sizes = search.every_size()
    space = search.space()
    foresight = Foresight(search, space)
    levers = AS_IT_IS if space.is_trivial else _roomiest(search, space, foresight, sizes)
    tolerance_frac = 0.0 if search.request.exact else _INEXACT_FRAC
    now = find_limit(search, levers, sizes, tolerance_frac, needs_trace=not space.is_trivial)
    if now.best is None:
        search.raise_for_nothing()
    assert now.best is not None
    turned = _with_fewest_blocks(search, foresight, levers, now.best)
    search.settle(turned, standing(search.log.of(turned)), now.best)
    return ProbeResult(
        max_micro_batch=now.best,
        limited_by=limited_by(now, search.log.of(levers), sizes[-1], search.bound),
        evidence=evidence(now, sizes),
        measured_peak_bytes=_peak_bytes(search, turned, now),
        budget_bytes=search.budget.budget_bytes,
        levers=turned,
        trials=tuple(search.log.trials),
        warnings=search.all_warnings(),
        memory=search.workload.account(search.state_bytes),
        environment=search.environment(),
    )


def _roomiest(search: Search, space: Space, foresight: Foresight, sizes: Sequence[int]) -> Levers:
    """The family with the largest predicted limit, of equals the one that turns least; all of its blocks checkpointed."""
    families = [with_blocks(family, 0 if family.checkpointing == "off" else space.num_blocks) for family in space.families()]
    affordable = [family for family in families if foresight.is_affordable(family)]
    limits = {family: _predicted_limit(search, foresight, family, sizes) for family in affordable}
    return min(limits, key=lambda family: (-limits[family], *_turned(family)))


def _predicted_limit(search: Search, foresight: Foresight, levers: Levers, sizes: Sequence[int]) -> int:
    """The number of sizes that are predicted to fit; without a prediction as if all of the levers' room were needed."""
    if foresight.peak(levers, sizes[0]) is None:
        return len(sizes) if levers.checkpointing == "full" else 0
    key = partial(_peak_or_none, foresight, levers)
    return bisect_right(sizes, search.guide_bytes, key=key)


def _peak_or_none(foresight: Foresight, levers: Levers, size: int) -> int:
    return foresight.peak(levers, size) or 0


def _turned(levers: Levers) -> tuple[tuple[int, int], int, str]:
    """How much is turned, as something to sort by."""
    defaults = msgspec.structs.asdict(AS_IT_IS)
    changed = sum(value != defaults[name] for name, value in msgspec.structs.asdict(levers).items())
    return recomputation(levers), changed, levers.optimizer_impl


def _with_fewest_blocks(search: Search, foresight: Foresight, levers: Levers, size: int) -> Levers:
    """As few blocks as this size is predicted to fit with, if it really does."""
    if levers.checkpointing == "off":
        return levers
    for blocks in _fewer(foresight, levers, size):
        fewer = with_blocks(levers, blocks)
        if isinstance(search.probe(fewer, size).outcome, Fit):
            return fewer
    return levers


def _fewer(foresight: Foresight, levers: Levers, size: int) -> list[int]:
    """Numbers of blocks to try: the predicted one, and one more where that is wrong."""
    found = foresight.fewest_predicted(with_blocks(levers, 0), size, levers.checkpointed_blocks)
    return [blocks for blocks in (found, found + 1) if 0 < blocks < levers.checkpointed_blocks]


def _peak_bytes(search: Search, levers: Levers, now: Standing) -> int | None:
    fits = search.log.fits_at(levers, now.best or 0)
    return max((fit.peak_bytes for fit in fits), default=now.best_peak_bytes)
