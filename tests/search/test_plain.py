"""The search, against simulated devices of which the true limit is known.

A device here runs every size up to its limit, refuses those up to its floor, and reports peaks that may be straight,
bent, constant, random or missing. The answer must be what trying every size would give.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import ceil, log2
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoaccum.records import Candidate, Fit, Outcome, OutOfMemory, Refused, Trial
from autoaccum.schedule import ladder as balanced_ladder
from autoaccum.search import Standing, probe_ceiling, propose, standing

BUDGET = 10**6
Ladder = Sequence[int]


def trial(size: int, outcome: Outcome, **fields: Any) -> Trial:
    """What a probe of this size would have written down."""
    return Trial(candidate=Candidate(micro_batch=size), outcome=outcome, wall_s=0.1, rows_per_step=2 * size, **fields)


def fit(size: int, peak_bytes: int = 1) -> Trial:
    """A size that fitted."""
    return trial(size, Fit(peak_bytes=peak_bytes))


def oom(size: int, peak_bytes: int | None = None) -> Trial:
    """A size that was too large."""
    return trial(size, OutOfMemory(cause="allocator", phase="backward", peak_bytes=peak_bytes))


class Device(NamedTuple):
    """Something to search: sizes above `floor` and up to `limit` run."""

    limit: int
    floor: int = 0
    peak_of: Callable[[int], int] = lambda size: 1
    failure_of: Callable[[int], Outcome] = lambda size: OutOfMemory(cause="allocator")

    def run(self, size: int) -> Trial:
        if size <= self.floor:
            return trial(size, Refused(bound="floor", message="more than one row is needed"))
        if size <= self.limit:
            return fit(size, self.peak_of(size))
        return trial(size, self.failure_of(size))

    def answer(self, sizes: Ladder) -> int | None:
        """What trying every size gives."""
        return max((size for size in sizes if self.floor < size <= self.limit), default=None)


def search(device: Device, sizes: Ladder, log: Sequence[Trial] = (), **options: Any) -> list[Trial]:
    """Run every proposal until there is none, from this log on."""
    trials = list(log)
    while (size := propose(trials, sizes, **options)) is not None:
        trials.append(device.run(size))
        assert len(trials) < 1000, "the search does not end"
    return trials


def tried(trials: Sequence[Trial]) -> list[int]:
    """The sizes of a log, in order."""
    return [trial.candidate.micro_batch for trial in trials]


def steps_to_limit(device: Device, sizes: Ladder) -> float:
    """The limit in steps of the ladder; the floor where nothing runs, for it has to be passed as well."""
    step = sizes.step if isinstance(sizes, range) else 1
    return max(device.answer(sizes) or 0, min(device.floor, sizes[-1]), step) / step


def largest_within(peak_of: Callable[[int], int], top: int) -> int:
    """The last size before a growing peak crosses the budget."""
    return max((size for size in range(1, top + 1) if peak_of(size) <= BUDGET), default=0)


FAILURES: list[Callable[[int], Outcome]] = [
    lambda size: OutOfMemory(cause="allocator"),
    lambda size: OutOfMemory(cause="budget", peak_bytes=BUDGET + size),
    lambda size: Refused(bound="ceiling"),
    lambda size: OutOfMemory(cause="allocator") if size % 2 else OutOfMemory(cause="budget", peak_bytes=2 * BUDGET),
]


@st.composite
def ladders(draw: st.DrawFn) -> Ladder:
    """Sizes worth trying: all, all multiples, those of a balanced window, or any others."""
    top = draw(st.integers(1, 2000) | st.integers(1, 40))
    multiple_of = draw(st.integers(1, 16))
    match draw(st.sampled_from(["all", "multiples", "balanced", "high", "any"])):
        case "all":
            return range(1, top + 1)
        case "multiples":
            return range(multiple_of, max(top, multiple_of) + 1, multiple_of)
        case "balanced":
            return balanced_ladder(top, top, multiple_of)
        case "high":
            return range(top, top + draw(st.integers(1, 3000)))
        case _:
            return sorted(draw(st.sets(st.integers(1, 5000), min_size=1, max_size=60)))


@st.composite
def devices(draw: st.DrawFn, top: int) -> Device:
    """A device whose peaks are straight, bent, constant, falling, random or in the way."""
    kind = draw(st.sampled_from(["straight", "bent", "constant", "falling", "random", "misleading"]))
    fixed, slope, kink = draw(st.integers(0, BUDGET)), draw(st.integers(1, 5000)), draw(st.integers(1, top))
    failure_of = draw(st.sampled_from(FAILURES))
    peaks: dict[str, Callable[[int], int]] = {
        "straight": lambda size: fixed + slope * size,
        "bent": lambda size: max(fixed + slope * size, fixed + slope * kink + 20 * slope * (size - kink)),
        "constant": lambda size: fixed,
        "falling": lambda size: max(BUDGET - slope * size, 0),
        "random": lambda size: (size * 2_654_435_761 + fixed) % BUDGET,
        "misleading": lambda size: BUDGET - (1 if size > kink else slope),
    }
    consistent = kind in {"straight", "bent"}
    limit = largest_within(peaks[kind], top) if consistent else draw(st.integers(0, top) | st.just(top))
    floor = draw(st.just(0) | st.just(0) | st.just(1) | st.integers(0, limit + 1))
    return Device(limit, floor, peaks[kind], failure_of)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Device, Ladder, dict[str, Any]]:
    """A device, the sizes worth trying, and the options of a search that has to be exact."""
    sizes = draw(ladders())
    budget_bytes = draw(st.sampled_from([BUDGET, None]))
    return draw(devices(sizes[-1])), sizes, {"budget_bytes": budget_bytes, "cautious": draw(st.booleans())}


@given(tasks())
@settings(max_examples=250)
@example((Device(limit=100, floor=40), range(1, 129), {}))
@example((Device(limit=150_000), range(100_000, 200_001), {}))
@example((Device(limit=11), range(1, 65), {}))
def test_answer_is_that_of_trying_everything(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """Whatever the peaks say, the answer is the largest size that fits, and it was run."""
    device, sizes, options = task
    trials = search(device, sizes, **options)
    answer = device.answer(sizes)
    assert standing(trials).best == answer
    assert answer is None or answer in tried(trials)


@given(tasks())
def test_answer_is_proven(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """At the end the next larger size was run and failed, or there is none."""
    device, sizes, options = task
    trials = search(device, sizes, **options)
    best = standing(trials).best
    if best is not None:
        larger = [size for size in sizes if size > best]
        assert not larger or larger[0] in tried(trials)


@given(tasks())
def test_every_probe_is_new_and_on_the_ladder(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """Only sizes worth trying are tried, and none twice."""
    device, sizes, options = task
    probed = tried(search(device, sizes, **options))
    assert set(probed) <= set(sizes) and len(set(probed)) == len(probed)


@given(tasks())
@settings(max_examples=250)
@example((Device(limit=2**10 - 1), range(1, 2**10 + 1), {}))
@example((Device(limit=2**10), range(1, 2**10 + 1), {}))
@example((Device(limit=33, floor=31), range(1, 2**10), {}))
def test_probes_are_few(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """A search that is not cautious needs at most 2 * ceil(log2(limit)) + 2 probes, one more with a floor."""
    device, sizes, options = task
    trials = search(device, sizes, **{**options, "cautious": False})
    assert len(trials) <= 2 * ceil(log2(steps_to_limit(device, sizes))) + 2 + (device.floor > 0)


@given(tasks())
def test_caution_costs_at_most_four_probes(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """A cautious search needs at most four probes more than that."""
    device, sizes, options = task
    trials = search(device, sizes, **{**options, "cautious": True})
    assert len(trials) <= 2 * ceil(log2(steps_to_limit(device, sizes))) + 6 + (device.floor > 0)


@given(ladders(), st.integers(0, 2**32), st.booleans())
def test_search_ends_on_a_device_that_makes_no_sense(sizes: Ladder, seed: int, cautious: bool) -> None:
    """On a device whose sizes fit and fail at random, the search still ends within its ceiling."""
    outcomes: list[Outcome] = [
        Fit(peak_bytes=seed % BUDGET),
        OutOfMemory(cause="unclear"),
        Refused(bound="floor"),
        Refused(bound="ceiling"),
        Fit(peak_bytes=BUDGET + 1),
    ]
    trials: list[Trial] = []
    while (size := propose(trials, sizes, budget_bytes=BUDGET, cautious=cautious)) is not None:
        trials.append(trial(size, outcomes[(size * 2_654_435_761 + seed) // 7 % len(outcomes)]))
    assert len(trials) <= probe_ceiling(sizes)


@given(tasks())
def test_sound_search_never_reaches_its_ceiling(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """The ceiling on probes is above what any sound search needs."""
    device, sizes, options = task
    assert len(search(device, sizes, **options)) < probe_ceiling(sizes)


@given(ladders(), st.integers(0, 5))
def test_nothing_is_proposed_beyond_the_ceiling(sizes: Ladder, more: int) -> None:
    """A log with as many probes as the ceiling ends the search, whatever they say."""
    log = [trial(sizes[0], Refused(bound="floor"))] * (probe_ceiling(sizes) + more)
    assert propose(log, sizes) is None


@given(tasks())
def test_resumes_from_every_prefix(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """A search interrupted anywhere goes on, from its written log, exactly as it would have."""
    device, sizes, options = task
    whole = search(device, sizes, **options)
    written = msgspec.json.encode(whole)
    for length in range(len(whole) + 1):
        prefix = msgspec.json.decode(written, type=list[Trial])[:length]
        following = whole[length].candidate.micro_batch if length < len(whole) else None
        assert propose(prefix, sizes, **options) == following


@given(tasks())
def test_same_log_same_proposal(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """A proposal depends on the log and on nothing that an earlier call left behind."""
    device, sizes, options = task
    whole = search(device, sizes, **options)
    prefixes = [whole[:length] for length in range(len(whole) + 1)]
    forwards = [propose(prefix, sizes, **options) for prefix in prefixes]
    backwards = [propose(prefix, sizes, **options) for prefix in reversed(prefixes)]
    assert forwards == backwards[::-1]


@given(tasks(), st.randoms(use_true_random=False))
def test_order_of_the_log_does_not_matter(task: tuple[Device, Ladder, dict[str, Any]], random: Any) -> None:
    """The same trials in another order lead to the same proposal."""
    device, sizes, options = task
    whole = search(device, sizes, **options)
    prefix = whole[: random.randint(0, len(whole))]
    shuffled = random.sample(prefix, len(prefix))
    assert propose(shuffled, sizes, **options) == propose(prefix, sizes, **options)


@given(tasks(), st.data())
def test_trials_of_another_search_are_used(task: tuple[Device, Ladder, dict[str, Any]], data: st.DataObject) -> None:
    """From any few true trials, of a plan or of an earlier run, the search arrives at the same answer."""
    device, sizes, options = task
    earlier = data.draw(st.lists(st.sampled_from(sizes), max_size=4, unique=True))
    trials = search(device, sizes, [device.run(size) for size in earlier], **options)
    assert standing(trials).best == device.answer(sizes)


@given(tasks(), st.floats(0, 0.5))
def test_tolerance_is_respected(task: tuple[Device, Ladder, dict[str, Any]], tolerance_frac: float) -> None:
    """With a tolerance the answer is a size that fits, and misses the largest by no more than that fraction."""
    device, sizes, options = task
    best = standing(search(device, sizes, tolerance_frac=tolerance_frac, **options)).best
    answer = device.answer(sizes)
    assert (best is None) == (answer is None)
    if best is not None and answer is not None:
        assert best <= answer <= best + tolerance_frac * best


@given(st.integers(10, 5000), st.floats(0.05, 0.5))
def test_tolerance_saves_probes(limit: int, tolerance_frac: float) -> None:
    """A tolerance never costs a probe."""
    device, sizes = Device(limit), range(1, 2 * limit)
    assert len(search(device, sizes, tolerance_frac=tolerance_frac)) <= len(search(device, sizes))


@given(ladders(), st.booleans())
def test_upper_end_is_tried_when_everything_fits(sizes: Ladder, cautious: bool) -> None:
    """Where everything fits, the largest size is run, and nothing after it."""
    trials = search(Device(limit=sizes[-1]), sizes, budget_bytes=BUDGET, cautious=cautious)
    assert tried(trials)[-1] == sizes[-1]


@given(st.integers(1, 2**20))
def test_only_doubling_when_everything_fits(top: int) -> None:
    """Where everything fits, the sizes are doubled and the bound is the last of them."""
    assert tried(search(Device(limit=top), range(1, top + 1))) == [
        *(2**power for power in range(30) if 2**power < top),
        top,
    ]


@pytest.mark.parametrize(("cap", "bound", "answer"), [(11, 64, 11), (12, 12, 12), (10**9, 16, 16), (1, 64, 1), (1, 1, 1)])
def test_caps_people_met(cap: int, bound: int, answer: int) -> None:
    """The largest size below a cap is found, the upper end is tried itself, and nothing above it ever is."""
    trials = search(Device(limit=cap), range(1, bound + 1))
    assert standing(trials).best == answer
    assert answer in tried(trials) and max(tried(trials)) <= bound


def test_smallest_size_comes_first() -> None:
    """The first size tried is the smallest one."""
    assert propose([], range(4, 100, 4)) == 4


def test_nothing_fits() -> None:
    """When the smallest size is too large the search ends after one probe, without an answer."""
    trials = search(Device(limit=0), range(1, 10**6))
    assert (len(trials), standing(trials).best) == (1, None)


def test_a_model_that_refuses_one_row() -> None:
    """A floor at one row costs one probe and moves the answer not at all."""
    with_floor, without = (search(Device(limit=100, floor=floor), range(1, 1001)) for floor in (1, 0))
    assert standing(with_floor).best == standing(without).best == 100
    assert standing(with_floor).floor == 1 and len(with_floor) <= len(without) + 1


def test_no_size_at_all() -> None:
    """An empty ladder has no proposal and no probes."""
    assert propose([], []) is None and probe_ceiling([]) == 0


@given(st.integers(1, 2**20), st.integers(0, BUDGET // 2))
def test_straight_peaks_lead_straight_to_the_limit(limit: int, fixed: int) -> None:
    """On a device whose peak grows evenly, no probe after the second is more than one row too large."""
    slope = max((BUDGET - fixed) // limit, 1)
    device = Device((BUDGET - fixed) // slope, 0, lambda size: fixed + slope * size)
    trials = search(device, range(1, 2**21), budget_bytes=BUDGET, cautious=True)
    assert standing(trials).best == device.limit
    assert max(tried(trials)[2:], default=0) <= device.limit + 1


@given(st.integers(3, 2**20), st.integers(0, BUDGET // 2))
def test_straight_peaks_save_the_bisection(limit: int, fixed: int) -> None:
    """Where peaks grow evenly, the search ends within three probes of the last doubling."""
    slope = max((BUDGET - fixed) // limit, 1)
    device = Device((BUDGET - fixed) // slope, 0, lambda size: fixed + slope * size)
    trials = search(device, range(1, 2**21), budget_bytes=BUDGET)
    assert len(trials) <= ceil(log2(max(device.limit, 2))) + 4


@given(tasks())
def test_standing_is_what_the_log_says(task: tuple[Device, Ladder, dict[str, Any]]) -> None:
    """Best, ceiling and floor are the extremes of what was run, each with its own peak."""
    device, sizes, options = task
    trials = search(device, sizes, **options)
    now = standing(trials)
    fits = {t.candidate.micro_batch: t.outcome.peak_bytes for t in trials if isinstance(t.outcome, Fit)}
    failures = {
        t.candidate.micro_batch: getattr(t.outcome, "peak_bytes", None)
        for t in trials
        if isinstance(t.outcome, OutOfMemory) or (isinstance(t.outcome, Refused) and t.outcome.bound == "ceiling")
    }
    assert now.best == max(fits, default=None) and now.best_peak_bytes == fits.get(now.best or 0)
    assert now.ceiling == min(failures, default=None) and now.ceiling_peak_bytes == failures.get(now.ceiling or 0)
    assert now.floor == max((size for size in tried(trials) if size <= device.floor), default=0)
    assert now.num_probes == len(trials)


def test_an_empty_log_says_nothing() -> None:
    """Without trials nothing is known."""
    assert standing([]) == Standing(best=None, ceiling=None, floor=0, num_probes=0)


def test_a_size_that_fitted_and_failed_has_failed() -> None:
    """A size that ran once and failed once is too large."""
    now = standing([fit(4), fit(8), oom(8)])
    assert (now.best, now.ceiling) == (4, 8)


def test_a_fit_above_a_failure_is_not_the_answer() -> None:
    """A size that fitted above one that failed, as fragmentation may do, is not trusted."""
    now = standing([fit(4), oom(6), fit(9)])
    assert (now.best, now.ceiling) == (4, 6)


def test_repeated_fits_count_with_their_largest_peak() -> None:
    """Of two peaks of one size the larger one counts."""
    assert standing([fit(4, 70), fit(4, 90), fit(4, 80)]).best_peak_bytes == 90


def test_trials_of_the_plan_are_no_probes() -> None:
    """A trial that confirms a plan is used for what it says and not counted as a probe."""
    now = standing([fit(4), trial(8, Fit(peak_bytes=2), purpose="confirm")])
    assert (now.best, now.num_probes) == (8, 1)


@given(st.permutations([fit(1, 10), fit(2, 20), fit(4, 40), oom(8, 80), oom(16), trial(32, Refused(bound="ceiling"))]))
def test_standing_does_not_depend_on_order(log: list[Trial]) -> None:
    """The same trials in any order sum up to the same."""
    assert standing(log) == Standing(best=4, best_peak_bytes=40, ceiling=8, ceiling_peak_bytes=80, floor=0, num_probes=6)


def test_prediction_between_fit_and_failure_is_tried() -> None:
    """Between a size that fits and one that does not, the size at which the line crosses the budget comes next."""
    log = [fit(8, 800), fit(16, 1600), oom(32)]
    assert propose(log, range(1, 65), budget_bytes=2900) == 29


def test_prediction_is_not_tried_where_it_could_cost_too_much() -> None:
    """Once the probes are as many as bisection can afford, a prediction is not followed."""
    log = [fit(size, 100 * size) for size in (1, 2, 4, 8, 16)] + [oom(32)]
    assert propose(log, range(1, 65), budget_bytes=2900) == 24


def test_without_a_budget_the_middle_is_tried() -> None:
    """Without a budget peaks are not used, and the middle comes next."""
    log = [fit(size, 100 * size) for size in (1, 2, 4, 8, 16)] + [oom(32)]
    assert propose(log, range(1, 65)) == 24


def test_a_range_is_not_walked() -> None:
    """A ladder of ten to the fifteen sizes is searched as quickly as a short one."""
    limit = 123_456_789_012_345
    trials = search(Device(limit), range(1, 10**15))
    assert standing(trials).best == limit
    assert len(trials) <= 2 * ceil(log2(limit)) + 2


def test_every_limit_of_a_small_ladder() -> None:
    """For every limit and floor up to 70, the answer is right and the number of probes within the bound."""
    for limit, floor in itertools.product(range(1, 71), (0, 1, 2, 5, 30)):
        device = Device(limit, floor)
        trials = search(device, range(1, 71))
        assert standing(trials).best == device.answer(range(1, 71)), (limit, floor)
        if device.answer(range(1, 71)) is not None:
            assert len(trials) <= 2 * ceil(log2(limit)) + 2 + (floor > 0), (limit, floor)
