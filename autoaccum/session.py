"""The log of one search, and what adds to it: trials, the limit of a micro-batch, whole optimizer steps.

The loop is three lines: propose a size from the log, run it, add what came of it. Everything that decides is pure and lives
in rows above; everything that runs the user's code is in `probing`.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from math import inf
from typing import Any, Literal, NamedTuple, Protocol, final

import torch

from autoaccum.agreeing import call_of, refuse_differing
from autoaccum.budget import resolved_budget, weights_in_words
from autoaccum.choose import Schedule, remarks
from autoaccum.company import Company
from autoaccum.devices import device_for
from autoaccum.devices.base import Steadiness
from autoaccum.errors import InvalidRequestError, NothingFitsError, RankMismatchError
from autoaccum.fingerprint import fingerprint_of
from autoaccum.levers import Space, common, space_for
from autoaccum.lockstep import Lockstep
from autoaccum.meeting import Meeting
from autoaccum.prediction.forecast import Forecast, Traced, take_first_step, traced
from autoaccum.preserve import Snapshot, preserved
from autoaccum.probing import (
    MICRO_BATCHES_PER_WINDOW,
    WINDOWS_PER_PROBE,
    Attempt,
    IsEnough,
    older_objects_set_aside,
    run_trial,
    subject_on,
)
from autoaccum.ranks import worst
from autoaccum.records import (
    Candidate,
    Environment,
    Fit,
    Levers,
    LimitedBy,
    OutOfMemory,
    Refused,
    Trial,
)
from autoaccum.request import ROWS_WITHOUT_BOUND, Request, checked, largest_of_use, sizes_of_use
from autoaccum.schedule import shares, smallest
from autoaccum.search import NOISE_FRAC, Standing, is_closed_by_convexity, propose, standing
from autoaccum.study import Study
from autoaccum.timing import is_settled, timing_of
from autoaccum.tradeoffs.points import Point
from autoaccum.units import format_bytes, format_seconds
from autoaccum.workload import Workload

_WORTH_PREDICTING = 3  # sizes; fewer are tried in less time than two traces take
_MOST_CONFIRMS = 3  # plans whose own step failed, before it is not the size that is at fault
_MEASURED_S = 5.0  # a setting's optimizer steps are repeated no longer than this
_MOST_STEPS = 50  # nor more often
_BEATEN_FRAC, _BEATEN_STEPS = 0.1, 3  # nor when the best of so many steps is slower than the fastest setting by this much
_LONGEST_S = 60.0  # two optimizer steps that take longer than this are not run to their end
_AS_IT_IS = Levers()

Purpose = Literal["probe", "confirm"]


class Listener(Protocol):
    """Follows a search: a progress bar, a parent process, a study."""

    def bounded(self, top: int) -> None:
        """No size above this one will be tried."""

    def started(self, candidate: Candidate, purpose: str) -> None:
        """A trial begins."""

    def finished(self, trial: Trial) -> None:
        """A trial is over."""


class _Said(NamedTuple):
    """What a rank says after a trial.

    Attributes:
        state_bytes: What the optimizer held.
        elapsed_s: How long the search has taken so far.
        called_off: It broke off because another rank had failed, and what came of the trial is for that one to say.
        news, busy: From the study that other machines share: trials run there, and what runs there now.
    """

    trial: Trial
    state_bytes: int | None
    elapsed_s: float
    called_off: bool
    news: tuple[Trial, ...] = ()
    busy: frozenset[Point] = frozenset()


@final
class Search:
    """One call's log of trials and what is needed to add to it. A context: the state comes back on the way out.

    Every rank has the same log, the same predictions and the same clock, so all come to the same decisions by themselves:
    ranks meet a few times at the start, once for each trial, once for each prediction, and once at the end.

    Args:
        log: Trials that were run before.
        call: What was called, for ranks that called something else.
    """

    def __init__(
        self,
        workload: Workload,
        request: Request,
        device: object,
        process_group: Any,
        listener: Listener | None,
        log: Sequence[Trial],
        call: str = "autotune",
    ) -> None:
        self._begun = time.monotonic()
        self._agreed_s = 0.0
        self.tracing_s = 0.0  # spent on predictions, on all ranks the same
        self.workload, self.listener = workload, listener
        self.ranks, self._group = Meeting(process_group), process_group
        self.trials: list[Trial] = list(log)
        self.warnings: list[str] = []
        self.latest: dict[str, str | None] = {}  # what may be said again, when only the last word counts
        self._errors: dict[Candidate, Exception] = {}
        self._state_bytes: int | None = None
        self._forecasts: dict[Levers, Forecast | None] = {}
        self.study: Study | None = None  # on the first rank alone
        self.uses_study = False
        self.busy: frozenset[Point] = frozenset()  # what other machines that share the study are running
        self.time_is_up = False
        self._stack = ExitStack()
        try:
            refuse_differing(self.ranks, call_of(workload, request, call), workload)
            self._check(request, device)
            self._agree_on_bounds()
        except BaseException as error:
            self.ranks.leave(error)
            raise

    def _check(self, request: Request, device: object) -> None:
        """Everything that can be refused before anything runs."""
        self.workload.refuse_meta()
        self.request = checked(request, self.ranks.world_size)
        self.device = device_for(device, self.workload.device)
        self.together = Lockstep(self.workload.module, self.ranks.group, self._group, self.device.off_device)
        if self.request.shares == "proportional" and self.together.is_needed:
            raise InvalidRequestError(
                'shares="proportional" needs ranks that run independently, and FSDP and SyncBatchNorm make all ranks run '
                'the same number of micro-batches; use shares="equal".'
            )
        target = self.request.target_batch
        self.share = None if target is None else shares(target, self.ranks.world_size)[0]
        self.top, self.bound = self._top()
        self.own_top = self.top, self.bound
        self.budget = resolved_budget(self.request.budget, self.device, self.workload, self.warnings)

    def _agree_on_bounds(self) -> None:
        """One ladder and one prediction for all ranks, whatever the data and memory of each: all propose the same sizes."""
        bounds = self.ranks.gather((self.top, self.bound, self.budget.budget_bytes))
        self.top, self.bound, _ = min(bounds, key=lambda of_rank: of_rank[0])
        self.guide_bytes = min(budget_bytes for _, _, budget_bytes in bounds)

    def _top(self) -> tuple[int, LimitedBy]:
        """The largest size worth trying, and what sets it."""
        length = self.workload.source.length
        most = self.share
        if self.request.shares == "proportional" and self.ranks.world_size > 1:
            assert self.request.target_batch is not None
            most = self.request.target_batch - (self.ranks.world_size - 1)  # the others have a row each
        found = largest_of_use(self.request, most, length)
        if found is None:
            self.latest["bound"] = (
                f"Nothing bounds this search, so it goes no further than {ROWS_WITHOUT_BOUND:,} rows; "
                "max_micro_batch sets another bound."
            )
            return ROWS_WITHOUT_BOUND, "caller"
        top, bound = found
        if top < self.request.multiple_of and top != most:
            raise InvalidRequestError(
                f"multiple_of={self.request.multiple_of} is larger than the largest micro-batch allowed ({top} rows); "
                "lower it, or raise max_micro_batch."
            )
        if length is not None and self.share is not None and self.share > length:
            self.warnings.append(
                f"target_batch={self.request.target_batch} asks {self.share} samples of each rank per optimizer step, and "
                f"the data has only {length}: one step would see samples more than once."
            )
        return top, bound

    def __enter__(self) -> Search:
        try:
            self._enter()
        except BaseException as error:
            self.ranks.leave(error)
            raise
        return self

    def _enter(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(older_objects_set_aside())
            stack.enter_context(self.together.connected())
            self._steadiness: Steadiness = stack.enter_context(self.device.steadied())
            self._snapshot: Snapshot = stack.enter_context(
                preserved(
                    self.workload.module,
                    self.workload.own_optimizer,
                    device=self.workload.device,
                    on_disk=self.device.is_host,
                )
            )
            self._stack = stack.pop_all()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        except BaseException as failure:
            error = error or failure
            raise
        finally:
            self.ranks.leave(error)  # all have an answer, or none

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While inside, this rank searches by itself: its own bounds, budget, predictions and clock."""
        kept = self.top, self.bound, self.guide_bytes
        self.top, self.bound = self.own_top
        self.guide_bytes = self.budget.budget_bytes
        try:
            with self.ranks.apart():
                yield
        finally:
            self.top, self.bound, self.guide_bytes = kept

    def use_study(self, storage: Any) -> None:
        """Go on from the trials that are stored there, and store those to come; with several ranks, by the first one.

        Only what the first rank was given counts; the others' may be None.
        """
        self.uses_study = True
        if self.ranks.rank == 0:
            self.study = Study(
                storage,
                fingerprint_of(self.workload, self.device, self.request, self.ranks.world_size),
                budget_bytes=self.guide_bytes,
                objective=self.request.objective,
                seed=self.request.seed,
            )
        stored = self.ranks.gather([] if self.study is None else self.study.news())[0]
        if not any(isinstance(trial.outcome, Fit) for trial in stored):  # what was uncertain then is to be seen again
            stored = [trial for trial in stored if _is_of_memory(trial)]
        unknown = [trial for trial in self.trials if trial not in stored]
        self.trials = stored + unknown
        if self.study is not None:
            for trial in unknown:
                self.study.end(trial)

    # -- how many fit

    def log_of(self, levers: Levers) -> list[Trial]:
        """The trials under one position of the levers."""
        return [trial for trial in self.trials if trial.candidate.levers == levers]

    def limit(self, levers: Levers, sizes: Sequence[int], tolerance_frac: float = 0.0, *, trust: bool = False) -> Standing:
        """Search the largest of these sizes that fits under these levers; none may."""
        if self.listener is not None:
            self.listener.bounded(sizes[-1])
        forecast = self.forecast(levers) if len(sizes) >= _WORTH_PREDICTING else None
        while not (self.time_is_up and standing(self.log_of(levers)).best is not None):
            size = propose(
                self.log_of(levers),
                sizes,
                budget_bytes=self.guide_bytes,
                cautious=self.device.cautious,
                tolerance_frac=tolerance_frac,
                forecast=forecast,
                trust=trust,
                noise_frac=self.noise_frac(levers),
            )
            if size is None or self._is_hopeless(levers):
                break
            self.probe(levers, size)
        return standing(self.log_of(levers))

    def is_closed(self, levers: Levers, sizes: Sequence[int]) -> bool:
        """Whether the measured peaks alone show that the next size cannot fit."""
        return is_closed_by_convexity(self.log_of(levers), sizes, self.guide_bytes, self.noise_frac(levers))

    # -- predictions

    def forecast(self, levers: Levers) -> Forecast | None:
        """The predicted peak of every size under these levers, traced once; None where there is no prediction."""
        if levers not in self._forecasts:
            self._forecasts[levers] = self._traced(levers) if self.request.predict else None
        return self._forecasts[levers]

    def _traced(self, levers: Levers) -> Forecast | None:
        if self.together.is_sharded or self.together.is_needed:
            self.latest["forecast"] = (
                "No prediction: ranks exchange parameters or statistics inside this model's step, which cannot be traced; "
                "sizes were searched by doubling and bisection."
            )
            return None
        begun = time.monotonic()
        # Ranks' data and memory may differ. All go by the first one's prediction, above what the fullest one holds.
        found: Traced | None = None
        if self.ranks.rank == 0:
            found = traced(
                self.workload,
                self.device,
                multiple_of=self.request.multiple_of,
                snapshot=self._snapshot,
                budget_bytes=self.budget.budget_bytes,
                levers=levers,
            )
        if self.device.is_host:
            take_first_step()
        gc.collect()
        self.device.release()  # what earlier work left in a cache is used again, and would be counted twice
        held_bytes = self.device.held_bytes(self.workload.resident())
        own = found if self.ranks.rank == 0 else None
        heard = self.ranks.gather((own, held_bytes, time.monotonic() - begun, self._elapsed_s()))
        found = heard[0][0]
        self.tracing_s += max(tracing_s for _, _, tracing_s, _ in heard)
        self._agreed_s = max(elapsed_s for _, _, _, elapsed_s in heard)
        assert found is not None
        if levers == _AS_IT_IS:
            self.latest["forecast"] = found.note
        if found.growth is None:
            return None
        is_cut = self.device.is_host and self.workload.source.cuts_views
        return Forecast(
            found.growth,
            unit=self.device.unit,
            held_bytes=max(of_rank for _, of_rank, _, _ in heard),
            whole_batch=self.share if is_cut else None,
        )

    def known_forecasts(self) -> dict[Levers, Forecast]:
        """The predictions that were made."""
        return {levers: forecast for levers, forecast in self._forecasts.items() if forecast is not None}

    def noise_frac(self, levers: Levers) -> float:
        """By how much peaks wander here, as a fraction of the budget."""
        forecast = self._forecasts.get(levers)
        return NOISE_FRAC if forecast is None else forecast.noise_frac

    # -- running

    def probe(self, levers: Levers, size: int) -> Trial:
        """Run one size: two optimizer steps of two micro-batches."""
        windows = [[size] * MICRO_BATCHES_PER_WINDOW] * WINDOWS_PER_PROBE
        return self._run(Candidate(micro_batch=size, levers=levers), windows, self._probe_feed, "probe").trial

    def confirm(self, levers: Levers, schedule: Schedule, now: Standing | None = None) -> Trial | None:
        """Run the plan's own optimizer steps and time them; None when they do not fit after all, which lowers the ceiling.

        On every rank the trial bears the largest size of all ranks, and the rows of the largest share, so that their logs
        stay the same.

        Args:
            now: What is known of the limit under these levers; then an allocator is settled for it.
        """
        if now is not None:
            self.settle(levers, now, schedule.micro_batch)
        windows, is_enough = self._plan_windows(levers, schedule.sizes[self.ranks.rank])
        # Of a step that is too long to be run to its end, no rank runs more micro-batches than this.
        at_most = None if self.latest["timing"] is None else MICRO_BATCHES_PER_WINDOW
        num_micro_batches = max(len(of_rank[:at_most]) for of_rank in schedule.sizes)
        candidate = Candidate(micro_batch=schedule.micro_batch, levers=levers)
        # Where a size is too small it is the smallest one of the plan: the largest was probed and runs.
        floor = Candidate(micro_batch=smallest(schedule.sizes), levers=levers)
        feed = self.workload.source.micro_batches
        trial = self._run(candidate, windows, feed, "confirm", is_enough, floor, num_micro_batches).trial
        return trial if isinstance(trial.outcome, Fit) else None

    def _run(
        self,
        candidate: Candidate,
        windows: Sequence[Sequence[int]],
        feed: Callable[[Sequence[int]], Sequence[Any]],
        purpose: Purpose,
        is_enough: IsEnough | None = None,
        floor: Candidate | None = None,
        num_micro_batches: int = MICRO_BATCHES_PER_WINDOW,
    ) -> Attempt:
        """Run one trial, agree on its outcome over the ranks, and add it to the log.

        Args:
            floor: What the trial is of when it was too small to run.
            num_micro_batches: Of each window, the most of all ranks.
        """
        if self.listener is not None:
            self.listener.started(candidate, purpose)
        if self.study is not None:
            self.study.begin(candidate)
        try:
            attempt = run_trial(
                self.workload,
                self.device,
                candidate,
                budget_bytes=self.budget.budget_bytes,
                snapshot=self._snapshot,
                windows=windows,
                feed=feed,
                purpose=purpose,
                is_enough=is_enough,
                company=Company(self.together, self._group, num_micro_batches=num_micro_batches),
            )
        except BaseException:
            if self.study is not None:
                self.study.abandon()
            raise
        trial = self._agreed(attempt)
        if floor is not None and isinstance(trial.outcome, Refused) and trial.outcome.bound == "floor":
            trial = _changed(trial, candidate=floor)
        if attempt.error is not None:
            self._errors[candidate] = attempt.error
        self.trials.append(trial)
        if self.study is not None:
            self.study.end(trial)
        if self.listener is not None:
            self.listener.finished(trial)
        return attempt._replace(trial=trial)

    def _agreed(self, attempt: Attempt) -> Trial:
        """The trial as all ranks have it: the first one's, with the worst outcome."""
        own = _Said(attempt.trial, attempt.optimizer_state_bytes, self._elapsed_s(), attempt.called_off)
        if self.study is not None and self.ranks.world_size > 1:
            own = own._replace(news=tuple(self.study.news()), busy=frozenset(self.study.busy()))
        said = self.ranks.gather(own)
        self.trials += said[0].news
        self.busy = said[0].busy
        self._agreed_s = max(rank.elapsed_s for rank in said)
        self.time_is_up = self.is_late()
        held = [rank.state_bytes for rank in said if rank.state_bytes is not None]
        self._state_bytes = max(held, default=self._state_bytes)
        trials = [rank.trial for rank in said]
        if any(trial.candidate != trials[0].candidate for trial in trials):
            raise RankMismatchError(
                f"the ranks ran different trials ({', '.join(str(trial.candidate) for trial in trials[:4])}), which is a "
                "bug of autoaccum; please report it."
            )
        if len(trials) == 1:
            return trials[0]
        outcome = worst([rank.trial.outcome for rank in said if not rank.called_off])
        return _changed(trials[0], outcome=outcome, wall_s=max(trial.wall_s for trial in trials))

    def _probe_feed(self, sizes: Sequence[int]) -> Sequence[Any]:
        """One micro-batch, used for the whole window.

        Where host memory is what is measured, it is cut from the whole share of the rank, since a training loop that hands
        over its effective batch holds that as well.
        """
        source, size = self.workload.source, sizes[0]
        if self.device.is_host and source.cuts_views and self.share is not None and self.share > size:
            micro_batch = source.micro_batches([size, self.share - size])[0]
        else:
            micro_batch = source.take(size)
        return [micro_batch] * len(sizes)

    def _plan_windows(self, levers: Levers, sizes: Sequence[int]) -> tuple[Sequence[Sequence[int]], IsEnough | None]:
        """Whole optimizer steps until their median is known; the first one is not timed."""
        rows = sum(sizes) if self.share is None or self.ranks.world_size == 1 else self.share
        step_s = self._expected_step_s(levers, rows)
        limit = self.request.time_budget_s
        left_s = _LONGEST_S if limit is None else min(_LONGEST_S, max(0.0, limit - self.elapsed_s()))
        if step_s * 2 > left_s:
            short = "" if left_s == _LONGEST_S else f" and little is left of time_budget_s={limit}"
            self.latest["timing"] = (
                f"One optimizer step at the target takes about {format_seconds(step_s)}{short}, so the last one was not "
                "run to the end and not timed."
            )
            return [sizes[:MICRO_BATCHES_PER_WINDOW]] * WINDOWS_PER_PROBE, None
        self.latest["timing"] = None
        allowed_s = min(_MEASURED_S, left_s)
        if self.together.is_needed:  # all ranks take the same number, which is known before
            return [sizes] * max(2, min(_MOST_STEPS, int(allowed_s / max(step_s, 1e-3)))), None
        begun, fastest_s = time.monotonic(), self._fastest_step_s(sum(sizes))

        def is_enough(times_s: Sequence[float]) -> bool:
            is_late = time.monotonic() - begun + times_s[-1] > allowed_s
            is_beaten = len(times_s) >= _BEATEN_STEPS and min(times_s) > fastest_s * (1 + _BEATEN_FRAC)
            return is_late or is_beaten or len(times_s) >= _MOST_STEPS or is_settled(timing_of(times_s))

        return [sizes] * 2, is_enough

    def _fastest_step_s(self, rows: int) -> float:
        """The median of the fastest setting so far, infinite where none was measured."""
        steps = [trial for trial in self.trials if trial.purpose == "confirm" and trial.rows_per_step == rows]
        times = [trial.outcome.median_step_s for trial in steps if isinstance(trial.outcome, Fit)]
        return min((seconds for seconds in times if seconds is not None), default=inf)

    def _expected_step_s(self, levers: Levers, rows: int) -> float:
        """What an optimizer step of so many rows takes, by the trials so far; under other levers where there are none."""
        for log in (self.log_of(levers), self.trials):
            times = [
                trial.outcome.median_step_s / trial.rows_per_step
                for trial in log
                if isinstance(trial.outcome, Fit) and trial.outcome.median_step_s
            ]
            if times:
                return min(times) * rows
        return 0.0

    def settle(self, levers: Levers, now: Standing, size: int) -> None:
        """Let the device choose the settings that training will run under, from what was measured at this size."""
        at_ceiling = [t.outcome for t in self.log_of(levers) if t.candidate.micro_batch == now.ceiling]
        by_budget = all(isinstance(outcome, OutOfMemory) and outcome.cause == "budget" for outcome in at_ceiling)
        note = self._steadiness.settle(
            peak_bytes=max(fit.peak_bytes for fit in self.fits_at(levers, size)),
            held_bytes=self.budget.held_bytes,
            budget_bytes=self.budget.budget_bytes if by_budget else None,
        )
        self.latest["allocator"] = note

    def fits_at(self, levers: Levers, size: int) -> list[Fit]:
        """What was measured of this size."""
        log = self.log_of(levers)
        return [t.outcome for t in log if t.candidate.micro_batch == size and isinstance(t.outcome, Fit)]

    def is_late(self) -> bool:
        """Whether the caller's time is up; on all ranks or on none."""
        limit = self.request.time_budget_s
        return limit is not None and self.elapsed_s() > limit

    def elapsed_s(self) -> float:
        """How long this search has taken; with several ranks, how long it had when they met last."""
        return self._elapsed_s() if self.ranks.world_size == 1 else self._agreed_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def _is_hopeless(self, levers: Levers) -> bool:
        """Two sizes failed with an error that may not mean memory, and none has run: then it is the user's error."""
        log = self.log_of(levers)
        unclear = [t for t in log if isinstance(t.outcome, OutOfMemory) and t.outcome.cause == "unclear"]
        return len(unclear) >= 2 and standing(log).best is None

    # -- when nothing runs

    def refuse_growing_plans(self, levers: Levers, schedule: Schedule) -> None:
        """Give up when several plans' own steps failed though their micro-batches fit.

        Raises:
            NothingFitsError: With what may be the reason.
        """
        if sum(t.purpose == "confirm" and not isinstance(t.outcome, Fit) for t in self.log_of(levers)) >= _MOST_CONFIRMS:
            raise NothingFitsError(
                f"the plan's own step of {len(schedule.sizes[0])} micro-batches does not fit, although one micro-batch of "
                f"{schedule.micro_batch} rows does, and so did smaller ones: memory grows from one micro-batch to the next. "
                "Does the model, the loss or the sample keep tensors, or does collating the whole step need the memory?",
                self.trials,
            )

    def raise_for_nothing(self) -> None:
        """Nothing ran. The user's own error where memory is not certain, else what was missing."""
        now = standing(self.trials)
        certain = [trial for trial in self.trials if _is_of_memory(trial)]
        if not certain and self._errors:
            raise self._errors[min(self._errors, key=lambda candidate: candidate.micro_batch)]
        if not certain:
            message = next(str(getattr(trial.outcome, "message", "")) for trial in reversed(self.trials))
            raise RankMismatchError(f"no size runs on some other rank, whose own traceback says where ({message[:300]}).")
        lowest = min(certain, key=lambda trial: trial.candidate.micro_batch)
        assert isinstance(lowest.outcome, OutOfMemory)
        refused = f" Sizes up to {now.floor} are too small to run at all." if now.floor else ""
        peak, phase, message = lowest.outcome.peak_bytes, lowest.outcome.phase, lowest.outcome.message
        ran_out = f"memory ran out in the {phase} phase" if phase else "it failed"
        needed = f"it took {format_bytes(peak)}" if peak else ran_out
        remedy = "Raise the budget, or use a smaller model, sample or optimizer state."
        if lowest.outcome.cause == "process":
            remedy = (
                "A process that dies at the smallest size may have met a bug in the target rather than a lack of memory."
            )
        raise NothingFitsError(
            f"micro_batch={lowest.candidate.micro_batch} does not fit into {format_bytes(self.budget.budget_bytes)} on "
            f"{self.device.name}: {needed} ({message[:300]}). Before the first trial "
            f"{format_bytes(self.budget.held_bytes)} were held. {weights_in_words(self.workload)}{refused} {remedy}",
            self.trials,
        )

    # -- what is there

    def space(self) -> Space:
        """Which levers may be turned."""
        optimizer = None if self.request.levers == "none" else self.workload.make_optimizer()
        own = space_for(self.request.levers, subject_on(self.workload.module, self.device, optimizer))
        return common(self.ranks.gather(own))

    def every_size(self) -> Sequence[int]:
        """Every micro-batch that may be asked for."""
        multiple_of = self.request.multiple_of
        return range(multiple_of, self.top + 1, multiple_of) or (self.top,)

    def sizes(self) -> Sequence[int]:
        """The micro-batches that the target can be divided into."""
        assert self.share is not None
        return sizes_of_use(self.request, self.share, self.top)

    @property
    def state_bytes(self) -> int | None:
        """What the optimizer really held after its first step."""
        return self._state_bytes

    def all_warnings(self) -> tuple[str, ...]:
        """Everything that is to be said, once."""
        late = f"time_budget_s={self.request.time_budget_s} ended the search; a larger micro-batch may fit."
        latest = [text for text in self.latest.values() if text is not None]
        said = (
            *self.workload.warnings,
            *self.warnings,
            *latest,
            *remarks(self.trials),
            *((late,) if self.time_is_up else ()),
        )
        return tuple(dict.fromkeys(said))

    def environment(self) -> Environment:
        """Where and on what all of this ran."""
        return Environment(
            device=self.device.name,
            device_name=self.device.description(),
            model=type(self.workload.module).__name__,
            optimizer=self.workload.optimizer_name,
            batch=self.workload.source.description,
            world_size=self.ranks.world_size,
            python_version=platform.python_version(),
            torch_version=str(torch.__version__),
            autoaccum_version=version("autoaccum"),
            platform=platform.platform(),
            driver=self.device.driver(),
        )


def _is_of_memory(trial: Trial) -> bool:
    """Whether it is certain that memory ran out."""
    return isinstance(trial.outcome, OutOfMemory) and trial.outcome.cause != "unclear"


def _changed(trial: Trial, **changes: Any) -> Trial:
    return Trial(**{name: changes.get(name, getattr(trial, name)) for name in Trial.__struct_fields__})
