"""From a search to the best setting: which settings of the levers to run, until none that is left can be the best.

With no levers to choose between, the largest micro-batch that fits is taken. Otherwise predictions rule out what does not
fit and what cannot be faster, the rest is run at the target, the one expected to be best first, and the best is chosen by
what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, final

import msgspec

from autoaccum.choose import Schedule, schedule_for
from autoaccum.divisions import largest_divisor
from autoaccum.errors import InvalidRequestError
from autoaccum.foreseeing import Foresight
from autoaccum.records import AS_IT_IS, Fit, Levers, Trial
from autoaccum.search import Standing, standing
from autoaccum.session import Search
from autoaccum.session.giving_up import cap_of_plans
from autoaccum.session.limit import find_limit
from autoaccum.tradeoffs.choosing import best, recomputation, rivals
from autoaccum.tradeoffs.costs import CostModel
from autoaccum.tradeoffs.points import Measured, Point, alike, measured_points, point_of, with_blocks
from autoaccum.tradeoffs.sizes import sizes_of_interest

_WORTH_FRAC = 0.01  # a setting that can be faster by no more than this is not run
_QUICK_S = 1.0  # half of the fastest micro-batch is run in any case where an optimizer step takes no longer
_RIVALS = 3  # settings that are measured again before one is chosen, at most
_MEASURED_TIMES = 2
_ENUMERATED = 64  # points; more are sampled by the study
_SAMPLED = 40  # and no more of them than this are run
_COMPARING_S = 90.0  # where the caller sets no time, no further setting is run after so long
_COMPARED = 4  # but so many are


class Explored(NamedTuple):
    """What came of an exploration.

    Attributes:
        now: What is known of the limit with no lever turned.
        measured: Every setting whose optimizer steps were timed.
        chosen: The setting to use.
        left: Settings that were not run, with what their step was expected to take, in seconds.
        is_cut: Whether settings that may be better were left because it took long.
    """

    now: Standing
    measured: list[Measured]
    chosen: Point
    left: dict[Point, float | None]
    is_cut: bool = False


@final
class Exploration:
    """One search and the settings it chooses between."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._sizes = search.sizes()
        self.space = search.space()
        self.foresight = Foresight(search, self.space)
        self._expected_s: dict[Point, float] = {}  # when it was last looked at

    def run(self) -> Explored:
        """Search and choose.

        Raises:
            NothingFitsError: When no size fits under any lever that may be turned.
        """
        now, is_cut = self._as_it_is(), False
        if self._compares:
            begun_s = self._search.elapsed_s()
            while (point := self._next(now)) is not None:
                is_cut = self._takes_long(begun_s)
                if is_cut:
                    break
                self._measure(point)
            self._measure_rivals()
        measured = self.measured()
        if not measured and now.best is None:
            self._search.raise_for_nothing()
        left = self._open_points(now) if self._compares else []
        expected = {point: self._expected_s.get(point) for point in left}
        return Explored(now, measured, self._chosen(measured, now), expected, is_cut)

    def _takes_long(self, begun_s: float) -> bool:
        """Whether comparing has taken long enough, where something was measured and the caller has set no time."""
        search = self._search
        is_over = search.request.time_budget_s is None and search.elapsed_s() - begun_s > _COMPARING_S
        if is_over and len(self.measured()) >= _COMPARED:
            search.warnings.append(
                f"Settings were compared for {_COMPARING_S:.0f} s and not to the end; time_budget_s= sets another limit."
            )
            return True
        return False

    def _chosen(self, measured: Sequence[Measured], now: Standing) -> Point:
        if measured and (now.best is None or self._compares):
            noise_bytes = int(self._search.forecasts.noise_frac(AS_IT_IS) * self._search.guide_bytes)
            return best(measured, self._search.request.objective, noise_bytes).point
        assert now.best is not None
        return Point(AS_IT_IS, self.schedule(now.best, now.floor).micro_batch)

    @property
    def _compares(self) -> bool:
        """Whether there is anything to choose between: the largest size that fits is never the leanest."""
        return not self.space.is_trivial or self._search.request.objective == "memory"

    # -- with no lever turned

    def _as_it_is(self) -> Standing:
        """The limit with no lever turned, and the largest micro-batch's own optimizer steps."""
        search = self._search
        while True:
            cap = max(cap_of_plans(search.log.of(AS_IT_IS), self._sizes[-1]), self._sizes[0])
            now = find_limit(search, AS_IT_IS, [size for size in self._sizes if size <= cap], trust=True)
            if now.best is None:
                if self.space.is_trivial:
                    search.raise_for_nothing()
                return now
            limit = min(now.best, cap)
            now = msgspec.structs.replace(now, best=limit)
            try:
                schedule = self.schedule(limit, now.floor)
            except InvalidRequestError:
                if self.space.is_trivial:
                    raise
                return Standing(floor=now.floor, num_probes=now.num_probes)  # levers may make room for one that divides
            if not search.log.fits_at(AS_IT_IS, schedule.micro_batch):
                search.probe(AS_IT_IS, schedule.micro_batch)
            elif search.time_is_up or self._has_run(schedule) or search.confirm(AS_IT_IS, schedule, now) is not None:
                return now
            else:
                search.refuse_growing_plans(AS_IT_IS, schedule, least=max(self._sizes[0], now.floor + 1))

    def _has_run(self, schedule: Schedule) -> bool:
        """Whether an earlier search, whose log this one goes on from, has run these steps."""
        wanted = Point(AS_IT_IS, schedule.micro_batch)
        return any(
            trial.purpose == "confirm" and point_of(trial) == wanted and isinstance(trial.outcome, Fit)
            for trial in self._search.log.trials
        )

    def schedule(self, limit: int, floor: int = 0) -> Schedule:
        """The division of the target with no micro-batch above the limit and none that is too small to run."""
        request = self._search.request
        assert request.target_batch is not None
        return schedule_for(
            request.target_batch,
            self._search.ranks.world_size,
            limit,
            at_least=floor + 1,
            multiple_of=request.multiple_of,
            equal=request.equal_micro_batches,
        )

    # -- what to run next

    def measured(self) -> list[Measured]:
        """Every setting whose optimizer steps were timed."""
        search = self._search
        assert search.share is not None
        return measured_points(search.log.trials, search.share)

    @cached_property
    def divisions(self) -> list[int]:
        """Every largest micro-batch that a division of the target can have, ascending."""
        search = self._search
        assert search.share is not None
        if not search.request.equal_micro_batches:
            return sorted({self.schedule(size).micro_batch for size in self._sizes})
        share, multiple_of = search.share, search.request.multiple_of
        divisors = [size for size in self._sizes if share % size == 0]
        largest = largest_divisor(share, search.top, multiple_of=multiple_of)
        return sorted({*divisors, *([] if largest is None else [largest])})

    def _next(self, now: Standing) -> Point | None:
        """The point to run next, None when none is left that can be the best."""
        return None if self._search.time_is_up else self._proposed(now)

    def _proposed(self, now: Standing) -> Point | None:
        busy = self._hear_of_others()
        open_points = [point for point in self._open_points(now) if point not in busy]
        measured = self.measured()
        if self._search.request.objective == "memory":
            return self._leanest(open_points, measured)
        if len(open_points) > _ENUMERATED:
            return self._sampled(self._worth(open_points, measured))
        worth = self._worth(open_points, measured)
        if measured:
            expected = min(worth, key=lambda point: self._expected_s[point], default=None)
            return expected or self._half_of_the_fastest(open_points, measured)
        return min(worth, key=lambda point: (point.levers.checkpointed_blocks, -point.micro_batch), default=None)

    def _hear_of_others(self) -> set[Point]:
        """Take over what other machines that share the study have run; gives what they are running."""
        log = self._search.log
        if self._search.ranks.world_size > 1:  # the first one has told all after the latest trial
            return set(log.busy)
        if log.study is None:
            return set()
        log.trials += log.study.news()
        return log.study.busy()

    def _sampled(self, worth: Sequence[Point]) -> Point | None:
        """What the study's sampler suggests, until enough have run; on several ranks that of the first one."""
        search = self._search
        if sum(trial.candidate.levers != AS_IT_IS for trial in search.log.trials) >= _SAMPLED:
            return None
        if not search.log.has_study:
            search.use_study(None)
        return search.ranks.gather(None if search.log.study is None else search.log.study.sampled(worth))[0]

    def _worth(self, open_points: Sequence[Point], measured: Sequence[Measured]) -> list[Point]:
        """Those that may be faster than everything that was measured, by more than is worth running them for."""
        if not measured or self._search.request.objective == "memory":
            return list(open_points)
        model = CostModel(measured, self.foresight.work)
        limit_s = min(one.timing.median_s for one in measured) * (1 - _WORTH_FRAC)
        expected = {point: model.expected(point) for point in open_points}
        self._expected_s |= {point: found.step_s for point, found in expected.items()}
        return [point for point, found in expected.items() if found.at_best_s < limit_s]

    def _half_of_the_fastest(self, open_points: Sequence[Point], measured: Sequence[Measured]) -> Point | None:
        """The fastest setting with half of its micro-batch, where it has not run and that takes little time.

        What fits into a cache, or onto a kernel's tile, can be far faster than the sizes above it let expect.
        """
        fastest = min(measured, key=lambda one: one.timing.median_s)
        if fastest.timing.median_s > _QUICK_S:
            return None
        below = [size for size in self.divisions if size <= fastest.point.micro_batch // 2]
        halves = [point for point in open_points if alike(point.levers, fastest.point.levers)]
        return next((point for point in halves if below and point.micro_batch == below[-1]), None)

    def _leanest(self, open_points: Sequence[Point], measured: Sequence[Measured]) -> Point | None:
        """The point with the lowest expected peak, as long as it is below what was measured."""
        lowest = min((one.peak_bytes for one in measured), default=None)
        expected = {point: self.foresight.peak(point.levers, point.micro_batch) for point in open_points}
        known = {point: peak for point, peak in expected.items() if peak is not None and (lowest is None or peak < lowest)}
        return min(known, key=lambda p: (known[p], recomputation(p.levers), -p.micro_batch), default=None)

    def _open_points(self, now: Standing) -> list[Point]:
        """Points that are predicted to fit, have not run, and are not beaten at their size by one with a lever less."""
        tried = {point_of(trial) for trial in self._search.log.trials if _settles(trial)}
        floor = standing(self._search.log.trials).floor
        sizes = [size for size in self._interesting(now) if self._can_run(size, floor)]
        families = [family for family in self.space.families() if self.foresight.is_affordable(family)]
        points = [self._point(family, size) for family in families for size in sizes]
        return [point for point in dict.fromkeys(points) if point is not None and point not in tried]

    def _can_run(self, size: int, floor: int) -> bool:
        """Whether the target can be divided so, with no micro-batch that is too small to run."""
        try:
            self.schedule(size, floor)
        except InvalidRequestError:
            return False
        return True

    def _interesting(self, now: Standing) -> list[int]:
        if self._search.request.objective == "memory":
            return sizes_of_interest(self.divisions, None)
        fastest = min(self.measured(), key=lambda one: one.timing.median_s, default=None)
        fits = None if now.best is None else self.schedule(now.best, now.floor).micro_batch
        return sizes_of_interest(self.divisions, fits, None if fastest is None else fastest.point.micro_batch)

    def _point(self, family: Levers, size: int) -> Point | None:
        """The setting of this family at this size, with as few blocks checkpointed as fit; None where it is pointless."""
        if self._search.request.objective == "memory":
            blocks = 0 if family.checkpointing == "off" else self.space.num_blocks
            levers = with_blocks(family, blocks)
            return Point(levers, size) if self.foresight.fits(levers, size) else None
        if self._has_lever_too_many(family, size):
            return None
        found = self.foresight.blocks_for(family, size)
        return None if found is None else Point(with_blocks(family, found), size)

    def _has_lever_too_many(self, family: Levers, size: int) -> bool:
        """Whether it fits with one of its memory levers less, which then takes less time."""
        fewer = [
            msgspec.structs.replace(family, **{name: "off"}, **({"block_names": ()} if name == "checkpointing" else {}))
            for name in ("checkpointing", "offload")
            if getattr(family, name) != "off"
        ]
        return any(self.foresight.blocks_for(other, size) is not None for other in fewer)

    # -- running

    def _measure(self, point: Point) -> None:
        floor = standing(self._search.log.trials).floor
        self._search.confirm(point.levers, self.schedule(point.micro_batch, floor))

    def _measure_rivals(self) -> None:
        """A second time, in turn, so that what the machine did in between weighs less; not again when a search goes on."""
        if self._search.request.objective == "memory":
            return
        for one in rivals(self.measured(), _RIVALS):
            times = sum(trial.purpose == "confirm" and point_of(trial) == one.point for trial in self._search.log.trials)
            if times < _MEASURED_TIMES and not self._search.time_is_up:
                self._measure(one.point)


def _settles(trial: Trial) -> bool:
    """Whether the trial leaves nothing open about its point: whole steps were run, or it failed."""
    return trial.purpose == "confirm" or not isinstance(trial.outcome, Fit)
