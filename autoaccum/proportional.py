"""Shares in proportion to memory: every rank searches its own limit by itself, and then the step is run together.

Levers are left as they are: what a lever gains differs from rank to rank, and all ranks have to train the same model.
"""

from __future__ import annotations

from typing import NamedTuple

from autoaccum.choose import Schedule, evidence, limited_by
from autoaccum.records import AS_IT_IS, Fit, PlanRecord, Trial
from autoaccum.schedule import proportional_sizes
from autoaccum.search import Standing
from autoaccum.session import Search
from autoaccum.session.limit import find_limit
from autoaccum.timing import timing_of
from autoaccum.writing import exactness_remarks


class _Step(NamedTuple):
    """What came of a rank's part of the optimizer step: nothing where it does not fit, no times where it was cut short."""

    peak_bytes: int
    times_s: tuple[float, ...]


def proportional_plan(search: Search) -> PlanRecord:
    """The plan in which every rank has a share in proportion to the largest micro-batch that fits on it.

    Ranks meet once after each search of the limits and once after each run of the step, which is seldom more than one.

    Raises:
        NothingFitsError: When no size fits on this rank; others raise RankMismatchError.
        InvalidRequestError: When the target cannot be divided so.
    """
    request = search.request
    assert request.target_batch is not None
    while True:
        now = _own_limit(search)
        said = search.ranks.gather((now.best or 0, now.floor))
        limits, at_least = tuple(best for best, _ in said), 1 + max(floor for _, floor in said)
        sizes = proportional_sizes(request.target_batch, limits, request.multiple_of, at_least)
        own = sizes[search.ranks.rank]
        steps = search.ranks.gather(_own_step(search, own, now))
        together = [step for step in steps if step is not None]
        if len(together) == len(steps):
            return _written(search, now, limits, at_least, sizes, together)


def _own_limit(search: Search) -> Standing:
    with search.alone():
        now = find_limit(search, AS_IT_IS, search.every_size(), trust=True)
        if now.best is None:
            search.raise_for_nothing()
    return now


def _own_step(search: Search, sizes: tuple[int, ...], now: Standing) -> _Step | None:
    """Run this rank's part of the optimizer step, at the same time as all others."""
    with search.alone():
        if not search.log.fits_at(AS_IT_IS, max(sizes)):
            search.probe(AS_IT_IS, max(sizes))
        schedule = Schedule(sizes=(sizes,))
        trial = search.confirm(AS_IT_IS, schedule, now) if search.log.fits_at(AS_IT_IS, max(sizes)) else None
        if trial is None:
            search.refuse_growing_plans(AS_IT_IS, schedule)
            return None
        return _step_of(trial, sum(sizes))


def _step_of(trial: Trial, rows: int) -> _Step:
    assert isinstance(trial.outcome, Fit)
    times_s = trial.outcome.step_times_s if trial.rows_per_step == rows else ()
    return _Step(trial.outcome.peak_bytes, times_s)


def _written(
    search: Search,
    now: Standing,
    limits: tuple[int, ...],
    at_least: int,
    sizes: tuple[tuple[int, ...], ...],
    steps: list[_Step],
) -> PlanRecord:
    request, rank = search.request, search.ranks.rank
    assert request.target_batch is not None and now.best is not None
    own = sizes[rank]
    timings = [timing_of(step.times_s) for step in steps]
    known = [timing for timing in timings if timing is not None]
    timing = max(known, key=lambda one: one.median_s) if len(known) == len(timings) else None  # all wait for the slowest
    forecast = search.forecasts.known().get(AS_IT_IS)
    with search.alone():
        ladder, log = search.every_size(), search.log.of(AS_IT_IS)
        limited, based_on = limited_by(now, log, ladder[-1], search.bound), evidence(now, ladder)
    return PlanRecord(
        target_batch=request.target_batch,
        world_size=search.ranks.world_size,
        rank=rank,
        effective_batch=sum(sum(of_rank) for of_rank in sizes),
        micro_batch=max(own),
        accumulation_steps=len(own),
        micro_batch_sizes=own,
        max_micro_batch=now.best,
        min_micro_batch=at_least,
        limited_by=limited,
        evidence=based_on,
        multiple_of=request.multiple_of,
        shares=tuple(sum(of_rank) for of_rank in sizes),
        limits=limits,
        budget_bytes=search.budget.budget_bytes,
        measured_peak_bytes=steps[rank].peak_bytes,
        predicted_peak_bytes=None if forecast is None else forecast.peak_bytes(max(own)),
        step_time_s=None if timing is None else timing.median_s,
        samples_per_s=None if timing is None else request.target_batch / timing.median_s,
        timing=timing,
        trials=tuple(search.log.trials),
        warnings=(*search.all_warnings(), *_remarks(search), *exactness_remarks(search, len(own))),
        memory=search.workload.account(search.state_bytes),
        environment=search.environment(),
    )


def _remarks(search: Search) -> list[str]:
    request, said = search.request, list[str]()
    if request.levers != "none":
        said.append('No lever was turned, because of shares="proportional": turn them on every rank, or use shares="equal".')
    if request.cache is not None or request.storage is not None:
        said.append('With shares="proportional" every rank has trials of its own; storage= and cache= were not used.')
    return said
