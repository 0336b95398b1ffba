"""One search: the log of trials, and the loop that adds to it until the answer stands.

The loop is three lines: propose a size from the log, run it, add what came of it. Everything that decides is pure and lives
in rows above; everything that runs the user's code is in `probing`.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any, Literal, Protocol, final

import torch

from autoaccum.budget import resolved_budget, weights_in_words
from autoaccum.choose import Schedule, evidence, limited_by, remarks, schedule_for
from autoaccum.devices import device_for
from autoaccum.devices.base import Steadiness
from autoaccum.errors import AutoaccumError, InvalidRequestError, NothingFitsError
from autoaccum.prediction.forecast import Forecast, take_first_step, traced
from autoaccum.preserve import Snapshot, preserved
from autoaccum.probing import (
    MICRO_BATCHES_PER_WINDOW,
    WINDOWS_PER_PROBE,
    Attempt,
    older_objects_set_aside,
    run_trial,
)
from autoaccum.ranks import Ranks, Report
from autoaccum.records import (
    Candidate,
    Environment,
    Fit,
    LimitedBy,
    OutOfMemory,
    PlanRecord,
    ProbeResult,
    Record,
    Refused,
    Trial,
)
from autoaccum.schedule import check_target, ladder, shares, smallest, whole_number
from autoaccum.search import NOISE_FRAC, Standing, is_closed_by_convexity, propose, standing
from autoaccum.units import format_bytes
from autoaccum.workload import Workload

_ROWS_WITHOUT_BOUND = 1_048_576  # where nothing bounds the search: 2**20 rows
_INEXACT_FRAC = 0.05  # exact=False ends when the limit is known to within 5 %
_TIMED_S = 10.0  # a plan's optimizer step is timed twice when that takes no longer than this
_WORTH_PREDICTING = 3  # sizes; fewer are tried in less time than two traces take
_MOST_CONFIRMS = 3  # plans whose own step failed, before it is not the size that is at fault
_LONGEST_S = 60.0  # and once up to here; a longer step is not run to the end

Purpose = Literal["probe", "confirm"]


class Request(Record, frozen=True, kw_only=True):
    """The numbers of one call, as they can be written down; the model, the sample and the device come beside it.

    `predict`: start where a trace says that the limit is; for comparison, and where tracing ended a worker.
    """

    target_batch: int | None = None
    budget: int | str | None = None
    levers: str = "none"
    max_micro_batch: int | None = None
    multiple_of: int = 1
    equal_micro_batches: bool = False
    time_budget_s: float | None = None
    exact: bool = True
    predict: bool = True


class Listener(Protocol):
    """Follows a search: a progress bar, or a parent process."""

    def bounded(self, top: int) -> None:
        """No size above this one will be tried."""

    def started(self, candidate: Candidate, purpose: str) -> None:
        """A trial begins."""

    def finished(self, trial: Trial) -> None:
        """A trial is over."""


@final
class Search:
    """One call's log of trials and what is needed to add to it. A context: the state comes back on the way out."""

    def __init__(
        self,
        workload: Workload,
        request: Request,
        device: object,
        process_group: Any,
        listener: Listener | None,
        log: Sequence[Trial],
    ) -> None:
        self._begun = time.monotonic()
        self.workload, self.listener = workload, listener
        self.ranks = Ranks(process_group)
        self.trials: list[Trial] = list(log)
        self.warnings: list[str] = []
        self._latest: dict[str, str | None] = {}  # what may be said again, when only the last word counts
        self._errors: dict[int, Exception] = {}
        self._state_bytes: int | None = None
        self._forecast: Forecast | None = None
        self._is_foreseen = False
        self._time_is_up = False
        self._stack = ExitStack()
        try:
            self._check(request, device)
        except AutoaccumError as error:
            self.ranks.gather(None, f"{type(error).__name__}: {error}"[:500])
            raise
        self._agree_on_bounds()

    def _check(self, request: Request, device: object) -> None:
        """Everything that can be refused before anything runs."""
        self.workload.refuse_meta()
        self.request = checked(request, self.ranks.world_size)
        self.device = device_for(device, self.workload.device)
        target = self.request.target_batch
        self.share = None if target is None else shares(target, self.ranks.world_size)[0]
        self.top, self.bound = self._top()
        self.budget = resolved_budget(self.request.budget, self.device, self.workload, self.warnings)

    def _agree_on_bounds(self) -> None:
        """One ladder and one prediction for all ranks, whatever the data and memory of each: all propose the same sizes."""
        bounds = self.ranks.gather((self.top, self.bound, self.budget.budget_bytes))
        self.top, self.bound, _ = min(bounds, key=lambda of_rank: of_rank[0])
        self._guide_bytes = min(budget_bytes for _, _, budget_bytes in bounds)

    def __enter__(self) -> Search:
        with ExitStack() as stack:
            stack.enter_context(older_objects_set_aside())
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
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    # -- the two answers

    def plan(self) -> PlanRecord:
        """Search, divide the target, run the plan's own step, and write it all down."""
        request, share = self.request, self.share
        assert share is not None and request.target_batch is not None
        sizes = self._plan_ladder(share)
        confirmed: Trial | None = None
        while confirmed is None:
            now = self._search(sizes, trust=True)
            schedule = self._schedule(now)
            if not self._fits_at(schedule.micro_batch):
                self._try(schedule.micro_batch)
                continue
            if self._time_is_up:
                break
            confirmed = self._confirm(now, schedule)
        return self._plan_record(now, sizes, schedule, confirmed)

    def result(self) -> ProbeResult:
        """Search one micro-batch's limit and write it down."""
        sizes = range(self.request.multiple_of, self.top + 1, self.request.multiple_of) or (self.top,)
        now = self._search(sizes, 0.0 if self.request.exact else _INEXACT_FRAC)
        assert now.best is not None
        self._settle(now, now.best)
        return ProbeResult(
            max_micro_batch=now.best,
            limited_by=limited_by(now, self.trials, sizes[-1], self.bound),
            evidence=evidence(now, sizes),
            measured_peak_bytes=now.best_peak_bytes,
            budget_bytes=self.budget.budget_bytes,
            trials=tuple(self.trials),
            warnings=self._all_warnings(),
            memory=self.workload.account(self._state_bytes),
            environment=self._environment(),
        )

    # -- the loop

    def _search(self, sizes: Sequence[int], tolerance_frac: float = 0.0, *, trust: bool = False) -> Standing:
        if self.listener is not None:
            self.listener.bounded(sizes[-1])
        self._foresee(sizes)
        while not (self._time_is_up and standing(self.trials).best is not None):
            size = propose(
                self.trials,
                sizes,
                budget_bytes=self._guide_bytes,
                cautious=self.device.cautious,
                tolerance_frac=tolerance_frac,
                forecast=self._forecast,
                trust=trust,
                noise_frac=self._noise_frac(),
            )
            size = self.ranks.gather(size)[0]  # forecasts of ranks differ with their data; all run what the first one says
            if size is None or self._is_hopeless():
                break
            self._try(size)
        now = standing(self.trials)
        if now.best is None:
            self._raise_for_nothing(now)
        return now

    def _foresee(self, sizes: Sequence[int]) -> None:
        """Predict the peak of every size, once, where there is something to choose from."""
        if self._is_foreseen or not self.request.predict or len(sizes) < _WORTH_PREDICTING:
            return
        self._is_foreseen = True
        found = traced(
            self.workload,
            self.device,
            multiple_of=self.request.multiple_of,
            snapshot=self._snapshot,
            budget_bytes=self.budget.budget_bytes,
        )
        self._latest["forecast"] = found.note
        if found.growth is not None:
            if self.device.is_host:
                take_first_step()
            gc.collect()
            self.device.release()  # what earlier work left in a cache is used again, and would be counted twice
            is_cut = self.device.is_host and self.workload.source.cuts_views
            self._forecast = Forecast(
                found.growth,
                unit=self.device.unit,
                held_bytes=self.device.held_bytes(self.workload.resident()),
                whole_batch=self.share if is_cut else None,
            )

    def _noise_frac(self) -> float:
        return NOISE_FRAC if self._forecast is None else self._forecast.noise_frac

    def _try(self, size: int) -> Trial:
        return self._run(size, self._probe_windows(size), self._probe_feed, "probe").trial

    def _run(
        self, size: int, windows: Sequence[Sequence[int]], feed: Callable[[Sequence[int]], Sequence[Any]], purpose: Purpose
    ) -> Attempt:
        """Run one trial, agree on its outcome over the ranks, and add it to the log."""
        candidate = Candidate(micro_batch=size)
        if self.listener is not None:
            self.listener.started(candidate, purpose)
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
            )
        except Exception as error:
            self.ranks.agree(Report(None, f"{type(error).__name__}: {error}"[:500]))
            raise
        agreed = self.ranks.agree(Report(attempt.trial.outcome, None, self._is_late()))
        assert agreed.outcome is not None
        self._time_is_up = agreed.time_is_up
        trial = attempt.trial if self.ranks.world_size == 1 else _changed(attempt.trial, outcome=agreed.outcome)
        if attempt.error is not None:
            self._errors[size] = attempt.error
        if attempt.optimizer_state_bytes is not None:
            self._state_bytes = attempt.optimizer_state_bytes
        self.trials.append(trial)
        if self.listener is not None:
            self.listener.finished(trial)
        return attempt._replace(trial=trial)

    def _is_late(self) -> bool:
        limit = self.request.time_budget_s
        return limit is not None and time.monotonic() - self._begun > limit

    def _is_hopeless(self) -> bool:
        """Two sizes failed with an error that may not mean memory, and none has run: then it is the user's error."""
        unclear = [t for t in self.trials if isinstance(t.outcome, OutOfMemory) and t.outcome.cause == "unclear"]
        return len(unclear) >= 2 and standing(self.trials).best is None

    def _raise_for_nothing(self, now: Standing) -> None:
        """Nothing ran. The user's own error where memory is not certain, else what was missing."""
        certain = [t for t in self.trials if isinstance(t.outcome, OutOfMemory) and t.outcome.cause != "unclear"]
        if not certain and self._errors:
            raise self._errors[min(self._errors)]
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

    # -- what is run

    def _probe_windows(self, size: int) -> Sequence[Sequence[int]]:
        return [[size] * MICRO_BATCHES_PER_WINDOW] * WINDOWS_PER_PROBE

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

    def _confirm(self, now: Standing, schedule: Schedule) -> Trial | None:
        """Run the plan's own optimizer steps; None when they do not fit after all, which lowers the ceiling.

        On every rank the trial bears the largest size of all ranks, so that their logs stay the same.
        """
        self._settle(now, schedule.micro_batch)
        windows = self._plan_windows(schedule.sizes[self.ranks.rank])
        trial = self._run(schedule.micro_batch, windows, self.workload.source.micro_batches, "confirm").trial
        if isinstance(trial.outcome, Fit):
            return trial
        if isinstance(trial.outcome, Refused) and trial.outcome.bound == "floor":
            # The largest size was probed and runs: it is the smallest one of the plan that is too small.
            self.trials[-1] = _changed(trial, candidate=Candidate(micro_batch=smallest(schedule.sizes)))
        elif sum(t.purpose == "confirm" for t in self.trials) >= _MOST_CONFIRMS:
            raise NothingFitsError(
                f"the plan's own step of {len(schedule.sizes[0])} micro-batches does not fit, although one micro-batch of "
                f"{schedule.micro_batch} rows does, and so did smaller ones: memory grows from one micro-batch to the next. "
                "Does the model, the loss or the sample keep tensors, or does collating the whole step need the memory?",
                self.trials,
            )
        return None

    def _settle(self, now: Standing, size: int) -> None:
        """Let the device choose the settings that training will run under, from what was measured at this size."""
        at_ceiling = [t.outcome for t in self.trials if t.candidate.micro_batch == now.ceiling]
        by_budget = all(isinstance(outcome, OutOfMemory) and outcome.cause == "budget" for outcome in at_ceiling)
        note = self._steadiness.settle(
            peak_bytes=max(fit.peak_bytes for fit in self._fits_at(size)),
            held_bytes=self.budget.held_bytes,
            budget_bytes=self.budget.budget_bytes if by_budget else None,
        )
        self._latest["allocator"] = note

    def _plan_windows(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """As many whole optimizer steps as there is time for; the first one is not timed."""
        times = [
            trial.outcome.median_step_s / trial.rows_per_step
            for trial in self.trials
            if isinstance(trial.outcome, Fit) and trial.outcome.median_step_s
        ]
        step_s = min(times, default=0.0) * (self.share or sum(sizes))
        limit = self.request.time_budget_s
        left_s = _LONGEST_S if limit is None else max(0.0, limit - (time.monotonic() - self._begun))
        self._latest["timing"] = None
        if step_s * 3 <= min(_TIMED_S, left_s):
            return [sizes] * 3
        if step_s * 2 <= min(_LONGEST_S, left_s):
            return [sizes] * 2
        self._latest["timing"] = (
            f"One optimizer step at the target takes about {step_s:.0f} s, so it was not run to the end and not timed."
        )
        return [sizes[:MICRO_BATCHES_PER_WINDOW]] * WINDOWS_PER_PROBE

    def _fits_at(self, size: int) -> list[Fit]:
        return [t.outcome for t in self.trials if t.candidate.micro_batch == size and isinstance(t.outcome, Fit)]

    # -- bounds and schedule

    def _top(self) -> tuple[int, LimitedBy]:
        """The largest size worth trying, and what sets it."""
        bounds: list[tuple[int | None, LimitedBy]] = [
            (self.share, "target"),
            (self.workload.source.length, "data"),
            (self.request.max_micro_batch, "caller"),
        ]
        known = [(size, kind) for size, kind in bounds if size is not None]
        if not known:
            self._latest["bound"] = (
                f"Nothing bounds this search, so it goes no further than {_ROWS_WITHOUT_BOUND:,} rows; "
                "max_micro_batch sets another bound."
            )
            return _ROWS_WITHOUT_BOUND, "caller"
        top, bound = min(known, key=lambda item: item[0])
        if top < self.request.multiple_of and top != self.share:
            raise InvalidRequestError(
                f"multiple_of={self.request.multiple_of} is larger than the largest micro-batch allowed ({top} rows); "
                "lower it, or raise max_micro_batch."
            )
        length = self.workload.source.length
        if length is not None and self.share is not None and self.share > length:
            self.warnings.append(
                f"target_batch={self.request.target_batch} asks {self.share} samples of each rank per optimizer step, and "
                f"the data has only {length}: one step would see samples more than once."
            )
        return top, bound

    def _plan_ladder(self, share: int) -> Sequence[int]:
        multiple_of = self.request.multiple_of
        if self.request.equal_micro_batches:
            return range(multiple_of, self.top + 1, multiple_of) or (self.top,)
        allowed = self.top // multiple_of * multiple_of  # tried too, so that a bound that fits is known to fit
        return sorted({*ladder(share, self.top, multiple_of), allowed or self.top})

    def _schedule(self, now: Standing) -> Schedule:
        assert now.best is not None and self.request.target_batch is not None
        return schedule_for(
            self.request.target_batch,
            self.ranks.world_size,
            now.best,
            at_least=now.floor + 1,
            multiple_of=self.request.multiple_of,
            equal=self.request.equal_micro_batches,
        )

    # -- writing it down

    def _plan_record(self, now: Standing, sizes: Sequence[int], schedule: Schedule, confirmed: Trial | None) -> PlanRecord:
        assert now.best is not None and self.request.target_batch is not None
        own = schedule.sizes[self.ranks.rank]
        fit = confirmed.outcome if confirmed is not None else None
        whole = confirmed is not None and confirmed.rows_per_step == sum(own)
        step_time_s = fit.median_step_s if isinstance(fit, Fit) and whole else None
        layers = self.workload.training_batch_norms()
        if layers and len(own) > 1:
            self.warnings.append(
                f"BatchNorm in train mode normalises by the micro-batch, so accumulating {len(own)} of them is not exactly "
                f"the large batch for these layers: {', '.join(layers[:8])}" + (" ..." if len(layers) > 8 else "")
            )
        return PlanRecord(
            target_batch=self.request.target_batch,
            world_size=self.ranks.world_size,
            rank=self.ranks.rank,
            effective_batch=sum(sum(of_rank) for of_rank in schedule.sizes),
            micro_batch=max(own),
            accumulation_steps=len(own),
            micro_batch_sizes=own,
            max_micro_batch=now.best,
            min_micro_batch=now.floor + 1,
            limited_by=limited_by(
                now,
                self.trials,
                sizes[-1],
                self.bound,
                proved=is_closed_by_convexity(self.trials, sizes, self._guide_bytes, self._noise_frac()),
            ),
            evidence=evidence(now, sizes),
            multiple_of=self.request.multiple_of,
            equal_micro_batches=self.request.equal_micro_batches,
            budget_bytes=self.budget.budget_bytes,
            measured_peak_bytes=fit.peak_bytes if isinstance(fit, Fit) else now.best_peak_bytes,
            predicted_peak_bytes=None if self._forecast is None else self._forecast.peak_bytes(max(own)),
            step_time_s=step_time_s,
            samples_per_s=None if step_time_s is None else self.request.target_batch / step_time_s,
            trials=tuple(self.trials),
            warnings=(*self._all_warnings(), *schedule.warnings),
            memory=self.workload.account(self._state_bytes),
            environment=self._environment(),
        )

    def _all_warnings(self) -> tuple[str, ...]:
        late = f"time_budget_s={self.request.time_budget_s} ended the search; a larger micro-batch may fit."
        latest = [text for text in self._latest.values() if text is not None]
        said = (
            *self.workload.warnings,
            *self.warnings,
            *latest,
            *remarks(self.trials),
            *((late,) if self._time_is_up else ()),
        )
        return tuple(dict.fromkeys(said))

    def _environment(self) -> Environment:
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
        )


def _changed(trial: Trial, **changes: Any) -> Trial:
    return Trial(**{name: changes.get(name, getattr(trial, name)) for name in Trial.__struct_fields__})


def checked(request: Request, world_size: int) -> Request:
    """The request with every number checked; nothing has been touched yet."""
    target = None if request.target_batch is None else check_target(request.target_batch, world_size)
    largest = request.max_micro_batch
    if largest is not None:
        largest = whole_number(largest, "max_micro_batch", "rows of the largest micro-batch to try")
    if request.levers != "none":
        raise InvalidRequestError(f'levers={request.levers!r} is not available in this version; expected "none".')
    limit = request.time_budget_s
    if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
        raise InvalidRequestError(f"time_budget_s={limit!r} is not possible; expected seconds above 0.")
    return Request(
        target_batch=target,
        budget=request.budget,
        max_micro_batch=largest,
        multiple_of=whole_number(request.multiple_of, "multiple_of", "what micro-batches are to be multiples of"),
        equal_micro_batches=bool(request.equal_micro_batches),
        time_budget_s=limit,
        exact=bool(request.exact),
        predict=bool(request.predict),
    )
