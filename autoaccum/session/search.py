"""One search: what bounds it, what is predicted, and the two kinds of trials that it runs.

What to run next is decided in `limit` and in the rows above; everything that runs the user's code is in `probing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, final

from autoaccum.agreeing import call_of, refuse_differing
from autoaccum.budget import counting_device, resolved_budget
from autoaccum.choose import Schedule, remarks
from autoaccum.devices import device_for
from autoaccum.devices.base import Steadiness
from autoaccum.environment import environment_of
from autoaccum.errors import InvalidRequestError
from autoaccum.fingerprint import fingerprint_of
from autoaccum.levers import Space, common, space_for
from autoaccum.lockstep import Lockstep
from autoaccum.meeting import Meeting
from autoaccum.preserve import Snapshot, preserved
from autoaccum.probing import MICRO_BATCHES_PER_WINDOW, WINDOWS_PER_PROBE, older_objects_set_aside, subject_on
from autoaccum.records import AS_IT_IS, Candidate, Environment, Fit, Levers, OutOfMemory, Trial
from autoaccum.report.following import Follower
from autoaccum.request import Request, checked, sizes_of_use
from autoaccum.schedule import shares, smallest
from autoaccum.search import Standing
from autoaccum.session.bounds import bounds_of
from autoaccum.session.clock import Clock
from autoaccum.session.forecasts import Forecasts
from autoaccum.session.giving_up import nothing_runs, refuse_growing_plans
from autoaccum.session.log import Log
from autoaccum.session.pace import Pace, pace_of
from autoaccum.session.running import Runner
from autoaccum.study import Study
from autoaccum.workload import Workload


@final
class Search:
    """One call's log and what is needed to add to it. A context: the state comes back on the way out.

    Every rank has the same log, the same predictions and the same clock, so all come to the same decisions by themselves:
    ranks meet a few times at the start, once for each trial, once for each prediction, and once at the end.

    Args:
        trials: Those that were run before.
        call: What was called, for ranks that called something else.
    """

    def __init__(
        self,
        workload: Workload,
        request: Request,
        device: object,
        process_group: Any,
        listener: Follower | None,
        trials: Sequence[Trial],
        call: str = "autotune",
    ) -> None:
        self._clock = Clock()
        self.workload = workload
        self.ranks, self._group = Meeting(process_group), process_group
        self.log = Log(trials, listener)
        self.warnings: list[str] = []
        self.latest: dict[str, str | None] = {}  # what may be said again, when only the last word counts
        self.time_is_up = False
        self._clock.is_shared = self.ranks.world_size > 1
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
        self.device = counting_device(self.request.budget, device_for(device, self.workload.device))
        self.together = Lockstep(self.workload.module, self.ranks.group, self._group, self.device.off_device)
        if self.request.shares == "proportional" and self.together.is_needed:
            raise InvalidRequestError(
                'shares="proportional" needs ranks that run independently, and FSDP and SyncBatchNorm make all ranks run '
                'the same number of micro-batches; use shares="equal".'
            )
        target = self.request.target_batch
        self.share = None if target is None else shares(target, self.ranks.world_size)[0]
        length = self.workload.source.length
        bounds = bounds_of(self.request, share=self.share, length=length, world_size=self.ranks.world_size)
        self.own_top = self.top, self.bound = bounds.top, bounds.bound
        self.latest["bound"] = bounds.note
        if length is not None and self.share is not None and self.share > length:
            self.warnings.append(
                f"target_batch={target} asks {self.share} samples of each rank per optimizer step, and the data has only "
                f"{length}: one step would see samples more than once."
            )
        self.budget = resolved_budget(self.request.budget, self.device, self.workload, self.warnings)

    def _agree_on_bounds(self) -> None:
        """One ladder and one prediction for all ranks, whatever the data and memory of each: all propose the same sizes."""
        bounds = self.ranks.gather((self.top, self.bound, self.budget))
        self.top, self.bound, _ = min(bounds, key=lambda of_rank: of_rank[0])
        self.guide_bytes = min(budget.budget_bytes for _, _, budget in bounds)
        self.guide_held_bytes = max(budget.held_bytes for _, _, budget in bounds)

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
            self.snapshot: Snapshot = stack.enter_context(
                preserved(
                    self.workload.module,
                    self.workload.own_optimizer,
                    device=self.workload.device,
                    on_disk=self.device.is_host,
                )
            )
            self._stack = stack.pop_all()
        self._runner = Runner(
            self.workload,
            self.device,
            self.ranks,
            self._clock,
            self.log,
            together=self.together,
            process_group=self._group,
            snapshot=self.snapshot,
        )
        self.forecasts = Forecasts(
            self.workload,
            self.device,
            self.ranks,
            self._clock,
            snapshot=self.snapshot,
            multiple_of=self.request.multiple_of,
            budget_bytes=self.budget.budget_bytes,
            share=self.share,
            is_wanted=self.request.predict,
            is_possible=not (self.together.is_sharded or self.together.is_needed),
        )

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
        kept = self.top, self.bound, self.guide_bytes, self.guide_held_bytes
        self.top, self.bound = self.own_top
        self.guide_bytes, self.guide_held_bytes = self.budget.budget_bytes, self.budget.held_bytes
        try:
            with self.ranks.apart():
                yield
        finally:
            self.top, self.bound, self.guide_bytes, self.guide_held_bytes = kept

    def use_study(self, storage: Any) -> None:
        """Go on from the trials that are stored there, and store those to come; with several ranks, by the first one.

        Only what the first rank was given counts; the others' may be None.
        """
        study: Study | None = None
        if self.ranks.rank == 0:
            study = Study(
                storage,
                fingerprint_of(self.workload, self.device, self.request, self.ranks.world_size),
                budget_bytes=self.guide_bytes,
                objective=self.request.objective,
                seed=self.request.seed,
            )
        self.log.keep_in(study, self.ranks.gather([] if study is None else study.news())[0])

    # -- running

    def probe(self, levers: Levers, size: int) -> Trial:
        """Run one size: an optimizer step of one micro-batch, then one of two."""
        windows = [[size] * MICRO_BATCHES_PER_WINDOW] * WINDOWS_PER_PROBE
        # The second step has gradients, optimizer state and the next micro-batch at once; one micro-batch makes the state.
        warm_up = None if self.together.is_needed else 1
        candidate = Candidate(micro_batch=size, levers=levers)
        trial = self._runner.run(
            candidate,
            windows,
            self._probe_feed,
            "probe",
            budget_bytes=self.budget.budget_bytes,
            warm_up=warm_up,
        )
        self.time_is_up = self.is_late()
        return trial

    def confirm(self, levers: Levers, schedule: Schedule, now: Standing | None = None) -> Trial | None:
        """Run the plan's own optimizer steps and time them; None when they do not fit after all, which lowers the ceiling.

        On every rank the trial bears the largest size of all ranks, and the rows of the largest share, so that their logs
        stay the same.

        Args:
            now: What is known of the limit under these levers; then an allocator is settled for it.
        """
        if now is not None:
            self.settle(levers, now, schedule.micro_batch)
        pace = self._pace(levers, schedule.sizes[self.ranks.rank])
        self.latest["timing"] = pace.note
        # The caller's own setting runs whole steps from the first one on: its data is what may hold a NaN.
        warm_up = None if levers == AS_IT_IS or self.together.is_needed else MICRO_BATCHES_PER_WINDOW
        # Of a step that is too long to be run to its end, no rank runs more micro-batches than this.
        at_most = None if pace.note is None else MICRO_BATCHES_PER_WINDOW
        num_micro_batches = max(len(of_rank[:at_most]) for of_rank in schedule.sizes)
        candidate = Candidate(micro_batch=schedule.micro_batch, levers=levers)
        # Where a size is too small it is the smallest one of the plan: the largest was probed and runs.
        floor = Candidate(micro_batch=smallest(schedule.sizes), levers=levers)
        trial = self._runner.run(
            candidate,
            pace.windows,
            self.workload.source.micro_batches,
            "confirm",
            budget_bytes=self.budget.budget_bytes,
            is_enough=pace.is_enough,
            floor=floor,
            num_micro_batches=num_micro_batches,
            warm_up=warm_up,
        )
        self.time_is_up = self.is_late()
        return trial if isinstance(trial.outcome, Fit) else None

    def _pace(self, levers: Levers, sizes: Sequence[int]) -> Pace:
        return pace_of(
            sizes,
            rows=sum(sizes) if self.share is None or self.ranks.world_size == 1 else self.share,
            logs=(self.log.of(levers), self.log.trials),
            time_budget_s=self.request.time_budget_s,
            elapsed_s=self.elapsed_s(),
            is_in_lockstep=self.together.is_needed,
        )

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

    def settle(self, levers: Levers, now: Standing, size: int) -> None:
        """Let the device choose the settings that training will run under, from what was measured at this size."""
        at_ceiling = [t.outcome for t in self.log.of(levers) if t.candidate.micro_batch == now.ceiling]
        by_budget = all(isinstance(outcome, OutOfMemory) and outcome.cause == "budget" for outcome in at_ceiling)
        note = self._steadiness.settle(
            peak_bytes=max(fit.peak_bytes for fit in self.log.fits_at(levers, size)),
            held_bytes=self.budget.held_bytes,
            budget_bytes=self.budget.budget_bytes if by_budget else None,
        )
        self.latest["allocator"] = note

    def is_late(self) -> bool:
        """Whether the caller's time is up; on all ranks or on none."""
        limit = self.request.time_budget_s
        return limit is not None and self.elapsed_s() > limit

    def elapsed_s(self) -> float:
        """How long this search has taken; with several ranks, how long it had when they met last."""
        return self._clock.elapsed_s()

    # -- when nothing runs

    def refuse_growing_plans(self, levers: Levers, schedule: Schedule, least: int = 1) -> None:
        """Give up when several plans' own steps failed though their micro-batches fit; `least`: the smallest one possible.

        Raises:
            NothingFitsError: With what may be the reason.
        """
        refuse_growing_plans(self.log.of(levers), schedule, self.log.trials, least)

    def raise_for_nothing(self) -> NoReturn:
        """Nothing ran. The user's own error where memory is not certain, else what was missing."""
        raise nothing_runs(self.log.trials, self.log.errors, self.device, self.budget, self.workload)

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
        return self._runner.state_bytes

    def all_warnings(self) -> tuple[str, ...]:
        """Everything that is to be said, once."""
        late = f"time_budget_s={self.request.time_budget_s} ended the search; what was not run may fit, or be better."
        latest = [text for text in (self.forecasts.note, *self.latest.values()) if text is not None]
        said = (
            *self.workload.warnings,
            *self.warnings,
            *latest,
            *remarks(self.log.trials),
            *((late,) if self.time_is_up else ()),
        )
        return tuple(dict.fromkeys(said))

    def environment(self) -> Environment:
        """Where and on what all of this ran."""
        return environment_of(
            self.workload,
            device=self.device.name,
            device_name=self.device.description(),
            world_size=self.ranks.world_size,
            driver=self.device.driver(),
        )
