"""What came of an exploration, written down as a plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, final

import msgspec

from autoaccum.batches.weights import UNKNOWN_LOSS
from autoaccum.checking.glance import Glance, glance
from autoaccum.choose import Schedule, evidence, limited_by
from autoaccum.exploring import Exploration, Explored
from autoaccum.prediction.timeline import timeline_of
from autoaccum.records import AS_IT_IS, Evidence, Fit, LimitedBy, PlanRecord, Setting, Skipped, Timeline
from autoaccum.search import standing
from autoaccum.session import Search
from autoaccum.session.limit import is_closed
from autoaccum.timing import SETTLED_FRAC, noise_frac
from autoaccum.tradeoffs.advice import advice_for
from autoaccum.tradeoffs.points import Measured, Point, point_of


def explored_plan(search: Search, exploration: Exploration) -> PlanRecord:
    """Explore, and write it all down.

    Raises:
        NothingFitsError: When no size fits under any lever that may be turned.
    """
    return _Writer(search, exploration, exploration.run()).plan()


@final
class _Writer:
    def __init__(self, search: Search, exploration: Exploration, explored: Explored) -> None:
        self._search, self._exploration, self._explored = search, exploration, explored
        self._chosen, self._now = explored.chosen, explored.now
        self._foresight, self._space = exploration.foresight, exploration.space
        self._floor = standing(search.log.trials).floor
        self._of_chosen = next((one for one in explored.measured if one.point == explored.chosen), None)

    def plan(self) -> PlanRecord:
        search, request, chosen = self._search, self._search.request, self._chosen
        assert request.target_batch is not None
        schedule = self._schedule()
        own = schedule.sizes[search.ranks.rank]
        timing = None if self._of_chosen is None else self._of_chosen.timing
        max_micro_batch, limited, based_on = self._limit()
        return PlanRecord(
            target_batch=request.target_batch,
            world_size=search.ranks.world_size,
            rank=search.ranks.rank,
            effective_batch=sum(sum(of_rank) for of_rank in schedule.sizes),
            micro_batch=max(own),
            accumulation_steps=len(own),
            micro_batch_sizes=own,
            max_micro_batch=max_micro_batch,
            min_micro_batch=self._floor + 1,
            limited_by=limited,
            evidence=based_on,
            multiple_of=request.multiple_of,
            equal_micro_batches=request.equal_micro_batches,
            objective=request.objective,
            levers=chosen.levers,
            budget_bytes=search.budget.budget_bytes,
            measured_peak_bytes=self._measured_peak(),
            predicted_peak_bytes=self._foresight.known_peak(chosen.levers, max(own)),
            step_time_s=None if timing is None else timing.median_s,
            samples_per_s=None if timing is None else request.target_batch / timing.median_s,
            timing=timing,
            settings=self._settings(),
            advice=self._advice(),
            trials=tuple(search.log.trials),
            skipped=(*self._space.skipped, *self._unpredicted()),
            warnings=(*self._search.all_warnings(), *self._remarks(len(own)), *schedule.warnings),
            memory=search.workload.account(search.state_bytes),
            timeline=self._timeline(),
            environment=search.environment(),
        )

    def _schedule(self) -> Schedule:
        """The chosen division; where it is the largest that fits as it is, with what is to be said of that."""
        now, chosen = self._now, self._chosen
        if chosen.levers == AS_IT_IS and now.best is not None:
            largest = self._exploration.schedule(now.best, now.floor)
            if largest.micro_batch == chosen.micro_batch:
                return largest
        return self._exploration.schedule(chosen.micro_batch, self._floor)

    def _has_forecast(self) -> bool:
        """A prediction for the record is not made after the fact."""
        return self._foresight.forecast_of(self._chosen.levers) is not None

    def _limit(self) -> tuple[int, LimitedBy, Evidence]:
        """The largest size known to fit with these levers, what keeps it from being larger, and what that rests on.

        A setting is chosen because it is fast, or lean: larger sizes may not have run with it, but be predicted to fit.
        """
        search, sizes = self._search, self._search.sizes()
        if self._chosen.levers == AS_IT_IS and self._now.best is not None:
            log, proved = search.log.of(AS_IT_IS), is_closed(search, AS_IT_IS, sizes)
            limited = limited_by(self._now, log, sizes[-1], search.bound, proved=proved)
            return self._now.best, limited, evidence(self._now, sizes)
        of_levers = standing(search.log.of(self._chosen.levers))
        size, rests_on = of_levers.best or self._chosen.micro_batch, evidence(of_levers, sizes)
        larger = self._predicted_to_fit(sizes, size)
        if larger is not None:
            size, rests_on = larger, "predicted"
        return size, search.bound if size == sizes[-1] else "memory", rests_on

    def _predicted_to_fit(self, sizes: Sequence[int], above: int) -> int | None:
        """The largest of the larger sizes that fits with the chosen levers by traces that were made already."""
        foresight, levers = self._foresight, self._chosen.levers
        for size in reversed(sizes[bisect_right(sizes, above) :]):
            if foresight.known_peak(levers, size) is not None and foresight.fits(levers, size):
                return size
        return None

    def _measured_peak(self) -> int | None:
        """Of the plan's own steps, also where they were cut short; else of the probe of its size."""
        if self._of_chosen is not None:
            return self._of_chosen.peak_bytes
        trials = [t for t in self._search.log.trials if point_of(t) == self._chosen and isinstance(t.outcome, Fit)]
        trials.sort(key=lambda trial: trial.purpose == "confirm")
        return trials[-1].outcome.peak_bytes if trials and isinstance(trials[-1].outcome, Fit) else self._now.best_peak_bytes

    # -- the trade-offs

    def _settings(self) -> tuple[Setting, ...]:
        measured = self._explored.measured
        known = {one.point for one in measured}
        failed = {
            point_of(trial)
            for trial in self._search.log.trials
            if not isinstance(trial.outcome, Fit) and trial.candidate.levers != AS_IT_IS
        }
        late = self._search.time_is_up or self._explored.is_cut
        reason = "The time was up." if late else "It is not expected to be faster than what was measured."
        if self._search.request.objective == "memory" and not late:
            reason = "It is not expected to need less than what was measured."
        return (
            *(_row_of(self._exploration, one, one.point == self._chosen) for one in measured),
            *(self._row(point, "does not fit") for point in sorted(failed - known, key=_order)),
            *(self._row(point, "not run", reason) for point in sorted(self._explored.left, key=_order)),
            *self._not_allowed(),
        )

    def _row(self, point: Point, place: Any, note: str = "") -> Setting:
        return Setting(
            levers=point.levers,
            standing=place,
            micro_batch=point.micro_batch,
            accumulation_steps=len(self._exploration.schedule(point.micro_batch).sizes[self._search.ranks.rank]),
            predicted_peak_bytes=self._foresight.known_peak(point.levers, point.micro_batch),
            predicted_step_s=self._explored.left.get(point),
            note=note,
        )

    def _not_allowed(self) -> list[Setting]:
        """What levers that change the numerics would make possible, by prediction alone."""
        rows = []
        for levers in self._space.not_allowed if self._foresight.forecast_of(AS_IT_IS) is not None else ():
            known = [size for size in self._exploration.divisions if self._foresight.peak(levers, size) is not None]
            fitting = [size for size in known if self._foresight.fits(levers, size)]
            if fitting:
                note = 'It changes the numerics; levers="all" would try it.'
                rows.append(self._row(Point(levers, fitting[-1]), "not allowed", note))
        return rows

    def _advice(self) -> tuple[str, ...]:
        largest = self._limit()[0]
        larger = [size for size in self._exploration.divisions if size > largest]
        if self._search.request.objective == "memory" or not self._has_forecast():
            return ()
        return advice_for(
            self._chosen,
            budget_bytes=self._search.guide_bytes,
            largest=largest,
            next_size=larger[0] if larger else None,
            peak=self._foresight.peak,
            not_allowed=[(row.levers, row.micro_batch) for row in self._not_allowed()],
        )

    def _unpredicted(self) -> list[Skipped]:
        left = [family for family in self._space.families() if not self._foresight.is_affordable(family)]
        reason = "predicting it together with other levers as well would have taken too long"
        found = [Skipped(lever="checkpointing", level=family.checkpointing, reason=reason) for family in left]
        return list(dict.fromkeys(found))

    def _timeline(self) -> Timeline | None:
        forecast = self._foresight.forecast_of(self._chosen.levers)
        if forecast is None:
            return None
        size, budget = self._chosen.micro_batch, self._search.budget
        return timeline_of(
            forecast.growth,
            size,
            forecast.rounded,
            title=f"One optimizer step, micro-batch {size}, predicted",
            limit_bytes=budget.budget_bytes - budget.held_bytes + forecast.weights_bytes(size),
        )

    def _remarks(self, steps: int) -> list[str]:
        said = exactness_remarks(self._search, steps)
        noise = 0.0 if self._of_chosen is None or self._space.is_trivial else noise_frac(self._of_chosen.timing)
        if noise > SETTLED_FRAC:
            said.append(f"The step time is known to within {noise:.0%} only; settings closer than that count as equal.")
        return said


def exactness_remarks(search: Search, steps: int) -> list[str]:
    """What accumulation of so many micro-batches cannot make exact, or what it does not know to be so."""
    if steps == 1:
        return []
    layers, said = search.workload.training_batch_norms(), list[str]()
    if layers:
        said.append(
            f"BatchNorm in train mode normalises by the micro-batch, so accumulating {steps} of them is not exactly "
            f"the large batch for these layers: {', '.join(layers[:8])}" + (" ..." if len(layers) > 8 else "")
        )
    seen = _glance_of(search)
    if seen is not None:
        first, second = seen.sizes
        said.append(
            f"The loss does not split: on {first + second} rows of the sample it is {seen.whole:.4g}, and {seen.split:.4g} "
            f"from micro-batches of {first} and {second}, so accumulation is not exact. weight= says what a loss divides by "
            "(labels that count, weights of classes); one that compares rows with each other cannot be accumulated, and its "
            "micro-batch is the batch that counts. Accumulator.check(batch) tells which it is."
        )
    elif search.workload.weigher.taken_at_its_word:
        said.append(UNKNOWN_LOSS[0].upper() + UNKNOWN_LOSS[1:] + ".")
    return said


def _glance_of(search: Search) -> Glance | None:
    """Where one process trains on its own: in a training step of several the others may be waited for."""
    log = search.log.of(AS_IT_IS)
    sizes = [trial.candidate.micro_batch for trial in log if isinstance(trial.outcome, Fit)]
    if not sizes or search.time_is_up or search.together.is_needed or search.ranks.world_size > 1:
        return None
    return glance(
        search.workload,
        search.device,
        search.snapshot,
        budget_bytes=search.budget.budget_bytes,
        at_most=max(sizes),
        at_least=standing(log).floor + 1,
        multiple_of=search.request.multiple_of,
    )


def _row_of(exploration: Exploration, one: Measured, is_chosen: bool) -> Setting:
    point = one.point
    return Setting(
        levers=point.levers,
        standing="chosen" if is_chosen else "measured",
        micro_batch=point.micro_batch,
        accumulation_steps=len(exploration.schedule(point.micro_batch).sizes[0]),
        peak_bytes=one.peak_bytes,
        predicted_peak_bytes=exploration.foresight.known_peak(point.levers, point.micro_batch),
        timing=one.timing,
    )


def _order(point: Point) -> tuple[int, int, str]:
    return (-point.micro_batch, point.levers.checkpointed_blocks, str(msgspec.to_builtins(point.levers)))
