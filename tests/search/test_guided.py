"""The search that starts from a forecast, against simulated devices: good forecasts save probes, bad ones change nothing.

A device here has a convex peak, the largest of a few affine terms, as every model has; the first of them may be flat, as
an optimizer step makes it. What exceeds the budget fails with its peak or without one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.records import Candidate, Fit, Outcome, OutOfMemory, Refused, Trial
from autoaccum.schedule import ladder as balanced_ladder
from autoaccum.search import is_closed_by_convexity, probe_ceiling, propose, standing

BUDGET = 10**9
Ladder = Sequence[int]

MIB = 2**20


@dataclass(frozen=True)
class Curve:
    """A peak: the largest of affine terms (fixed bytes, bytes per row), plus what an allocator adds, up to `noise_bytes`."""

    terms: tuple[tuple[int, int], ...]
    noise_bytes: int = 0

    def __call__(self, size: int) -> int:
        noise = size * 2_654_435_761 % 1009 * self.noise_bytes // 1009
        return max(fixed + per_row * size for fixed, per_row in self.terms) + noise


class Given(NamedTuple):
    """A forecast of any shape."""

    peak_of: Callable[[int], int]
    error_frac: float = 0.03

    def peak_bytes(self, size: int) -> int:
        return self.peak_of(size)


class Case(NamedTuple):
    """A device and what is to be searched on it."""

    curve: Curve
    sizes: Ladder
    with_peak: bool = False  # of sizes that exceed the budget
    floor: int = 0
    cautious: bool = False

    def run(self, size: int) -> Trial:
        """What a probe of this size would have written down."""
        return Trial(candidate=Candidate(micro_batch=size), outcome=self._outcome(size), wall_s=0.1, rows_per_step=2 * size)

    def _outcome(self, size: int) -> Outcome:
        peak = self.curve(size)
        if size <= self.floor:
            return Refused(bound="floor")
        if peak <= BUDGET:
            return Fit(peak_bytes=peak)
        return OutOfMemory(cause="budget", peak_bytes=peak) if self.with_peak else OutOfMemory(cause="allocator")

    def search(self, forecast: Given | None = None, trust: bool = False) -> list[Trial]:
        """Run every proposal until there is none."""
        trials: list[Trial] = []
        while (size := self.next(trials, forecast, trust)) is not None:
            trials.append(self.run(size))
        assert len(trials) < probe_ceiling(self.sizes)
        return trials

    def next(self, trials: Sequence[Trial], forecast: Given | None, trust: bool = False) -> int | None:
        """The next proposal."""
        return propose(trials, self.sizes, budget_bytes=BUDGET, cautious=self.cautious, forecast=forecast, trust=trust)


def sizes_of(trials: Sequence[Trial]) -> list[int]:
    """The sizes of a log, in order."""
    return [trial.candidate.micro_batch for trial in trials]


def failures(trials: Sequence[Trial]) -> int:
    """How many trials ran out of memory."""
    return sum(isinstance(trial.outcome, OutOfMemory) for trial in trials)


def curve_with(limit: float, kinks: Sequence[tuple[float, float]], last_share: float, flat: float) -> Curve:
    """A convex curve that crosses the budget at `limit`.

    Args:
        last_share: What part of the budget grows with the size on the last, steepest piece.
        kinks: Further, flatter pieces: (where they meet the last one, as a part of the limit; their part of its slope).
        flat: A flat first piece, as a part of the budget.
    """
    slope = last_share * BUDGET / limit
    fixed = BUDGET * (1 - last_share)
    terms = [(int(fixed), max(int(slope), 1)), (int(flat * BUDGET), 0)]
    for at, part in kinks:
        meet = at * limit
        terms.append((int(fixed + slope * meet * (1 - part)), int(slope * part)))
    return Curve(tuple(terms))


@st.composite
def ladders(draw: st.DrawFn) -> Ladder:
    """All sizes up to a top, those of a balanced window, or multiples."""
    top = draw(st.integers(1, 2**20) | st.integers(1, 3000) | st.integers(1, 40))
    multiple_of = draw(st.sampled_from([1, 1, 1, 8]))
    if draw(st.booleans()):
        return balanced_ladder(top, top, multiple_of)
    return range(multiple_of, max(top, multiple_of) + 1, multiple_of)


@st.composite
def cases(draw: st.DrawFn, cautious: bool | None = None) -> Case:
    """Devices of every convex shape, with limits of every magnitude."""
    sizes = draw(ladders())
    limit = draw(st.floats(1, 1.3 * sizes[-1]) | st.floats(0.5, 20))
    part = st.floats(0, 1)
    kinks = draw(st.lists(st.tuples(part, part), max_size=3))
    curve = curve_with(limit, kinks, draw(st.floats(0.05, 1)), draw(st.floats(0, 0.95)))
    floor = draw(st.sampled_from([0, 0, 0, 1]))
    return Case(curve, sizes, draw(st.booleans()), floor, draw(st.booleans()) if cautious is None else cautious)


BAD: dict[str, Callable[[Curve, int], int]] = {
    "3 x too high": lambda curve, size: 3 * curve(size),
    "3 x too low": lambda curve, size: curve(size) // 3,
    "constant below": lambda curve, size: BUDGET // 3,
    "constant near": lambda curve, size: BUDGET - 1,
    "constant above": lambda curve, size: 2 * BUDGET,
    "zero": lambda curve, size: 0,
    "random": lambda curve, size: size * 2_654_435_761 % (2 * BUDGET),
    "astronomical": lambda curve, size: 10**30 * size,
    "far too low": lambda curve, size: curve(size) // 1000,
    "non-monotone": lambda curve, size: int(curve(size) * (0.5 if size % 3 else 1.5)),
    "decreasing": lambda curve, size: max(2 * BUDGET - curve(size), 0),
    "wrong slope": lambda curve, size: curve(0) + (curve(size) - curve(0)) // 5,
    "one row each": lambda curve, size: size,
    "negative": lambda curve, size: -curve(size),
}


@st.composite
def forecasts(draw: st.DrawFn, curve: Curve) -> Given:
    """Any function of the size."""
    kind = draw(st.sampled_from([*BAD, "other curve", "steps", "good"]))
    if kind in BAD:
        return Given(lambda size: BAD[kind](curve, size))
    if kind == "good":
        return draw(good_forecasts(curve))
    values = draw(st.lists(st.integers(0, 3 * BUDGET), min_size=1, max_size=12))
    if kind == "steps":
        return Given(lambda size: values[size.bit_length() % len(values)])
    return Given(lambda size: values[0] % BUDGET + values[-1] * size // (1 + values[0] % 10**6))


@st.composite
def good_forecasts(draw: st.DrawFn, curve: Curve) -> Given:
    """Within the error it admits: growth up to that much too steep or too flat, and any small constant left out."""
    error_frac = draw(st.sampled_from([0.0, 0.01, 0.03, 0.05]))
    slope = 1 + draw(st.floats(-1, 1)) * error_frac / 1.06
    offset = int(draw(st.floats(-0.05, 0.05)) * BUDGET)
    return Given(lambda size: int(curve(size) * slope) + offset, error_frac)


@st.composite
def tasks(draw: st.DrawFn, good: bool = False) -> tuple[Case, Given]:
    """A device and a forecast of it."""
    case = draw(cases())
    return case, draw(good_forecasts(case.curve) if good else forecasts(case.curve))


def straight(limit: float, top: int, **fields: object) -> Case:
    """A device whose peak grows evenly from a third of the budget."""
    return Case(curve_with(limit, [], 2 / 3, 0.0), range(1, top + 1), **fields)  # type: ignore[arg-type]


@given(tasks(), st.booleans())
@settings(max_examples=300)
def test_no_forecast_changes_the_answer(task: tuple[Case, Given], trust: bool) -> None:
    """Whatever is predicted, the answer is that of the search without a forecast, and it was run."""
    case, forecast = task
    trials = case.search(forecast, trust)
    best = standing(trials).best
    assert best == standing(case.search()).best
    assert best is None or best in sizes_of(trials)


@given(tasks())
@settings(max_examples=150)
def test_answer_is_proven(task: tuple[Case, Given]) -> None:
    """Without trust, the next larger size was run and failed at the end, or there is none."""
    case, forecast = task
    trials = case.search(forecast)
    best = standing(trials).best
    larger = [size for size in case.sizes if best is not None and size > best][:1]
    assert set(larger) <= set(sizes_of(trials))


@given(tasks())
@settings(max_examples=150)
def test_trust_ends_only_on_measured_grounds(task: tuple[Case, Given]) -> None:
    """With trust, the next size failed, or there is none, or the measured peaks alone say that it cannot fit."""
    case, forecast = task
    trials = case.search(forecast, trust=True)
    best = standing(trials).best
    larger = [size for size in case.sizes if best is not None and size > best][:1]
    assert set(larger) <= set(sizes_of(trials)) or is_closed_by_convexity(trials, case.sizes, BUDGET)


@given(tasks(), st.booleans())
@settings(max_examples=300)
def test_probes_are_bounded_whatever_is_predicted(task: tuple[Case, Given], trust: bool) -> None:
    """Any forecast leaves the search within four probes of what doubling and bisection need at most."""
    case, forecast = task
    trials = case.search(forecast, trust)
    lowest = case.sizes[0]
    limit = max(standing(trials).best or 0, min(case.floor, case.sizes[-1]), lowest) / lowest
    plain = 2 * ceil(log2(limit)) + 2 + (case.floor > 0) + 4 * case.cautious
    assert len(trials) <= plain + 4 < probe_ceiling(case.sizes)


@given(tasks(), st.booleans())
@settings(max_examples=100)
def test_every_probe_is_new_and_on_the_ladder(task: tuple[Case, Given], trust: bool) -> None:
    """Only sizes worth trying are tried, and none twice."""
    case, forecast = task
    probed = sizes_of(case.search(forecast, trust))
    assert all(size in case.sizes for size in probed) and len(set(probed)) == len(probed)


@given(tasks(), st.booleans())
@settings(max_examples=100)
def test_resumes_from_every_prefix(task: tuple[Case, Given], trust: bool) -> None:
    """A search interrupted anywhere goes on, from its written log, exactly as it would have; nothing else is kept."""
    case, forecast = task
    whole = case.search(forecast, trust)
    written = msgspec.json.decode(msgspec.json.encode(whole), type=list[Trial])
    for length in reversed(range(len(whole) + 1)):
        following = whole[length].candidate.micro_batch if length < len(whole) else None
        assert case.next(written[:length], forecast, trust) == following


@given(tasks())
@settings(max_examples=100)
def test_without_a_budget_a_forecast_is_not_used(task: tuple[Case, Given]) -> None:
    """Without a budget nothing can be predicted to fit, and the search is the one without a forecast."""
    case, forecast = task
    log = case.search()[:3]
    assert propose(log, case.sizes, forecast=forecast, trust=True) == propose(log, case.sizes)


@given(cases())
@settings(max_examples=100)
def test_trust_needs_a_forecast(case: Case) -> None:
    """Without a forecast, trust changes nothing."""
    assert sizes_of(case.search(None, trust=True)) == sizes_of(case.search())


def random_case(random: random.Random) -> Case:
    """One of many cases, the same in every run."""
    top = int(2 ** random.uniform(0, 20))
    sizes = balanced_ladder(top, top, random.choice([1, 1, 8])) if random.random() < 0.5 else range(1, top + 1)
    limit = random.choice([2 ** random.uniform(-0.5, 21), top * random.uniform(0.001, 1.3)])
    kinks = [(random.random(), random.random()) for _ in range(random.randint(0, 3))]
    curve = curve_with(max(limit, 0.6), kinks, random.uniform(0.05, 1), random.choice([0, random.uniform(0, 0.95)]))
    return Case(curve, sizes, random.random() < 0.5, random.choice([0, 0, 0, 1]))


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_forecast_costs_four_probes_at_most(kind: str, cautious: bool) -> None:
    """On the same device, a forecast wrong in this way costs at most four probes more than none."""
    choices = random.Random(kind)
    for _ in range(100):
        case = random_case(choices)._replace(cautious=cautious)
        forecast = Given(lambda size, curve=case.curve: BAD[kind](curve, size))  # type: ignore[misc]
        extra = len(case.search(forecast)) - len(case.search())
        assert extra <= 4, case


@given(st.integers(20, 4096), st.floats(1, 4096), st.floats(0.1, 1), st.booleans(), st.data())
@settings(max_examples=200)
def test_a_good_forecast_needs_few_probes(
    top: int, limit: float, last_share: float, with_peak: bool, data: st.DataObject
) -> None:
    """Within the error it admits, and for any constant left out, at most five probes and two failures."""
    case = Case(curve_with(limit, [], last_share, 0.3), range(1, top + 1), with_peak)
    trials = case.search(data.draw(good_forecasts(case.curve)))
    assert len(trials) <= 5 and failures(trials) <= 2


@given(st.integers(20, 100_000), st.floats(1, 100_000), st.floats(0.1, 1), st.booleans(), st.data())
@settings(max_examples=200)
def test_a_trusted_good_forecast_needs_fewer(
    top: int, limit: float, last_share: float, with_peak: bool, data: st.DataObject
) -> None:
    """Over the few sizes of a balanced window, at most four probes and two failures."""
    case = Case(curve_with(limit, [], last_share, 0.3), balanced_ladder(top, top), with_peak)
    trials = case.search(data.draw(good_forecasts(case.curve)), trust=True)
    assert len(trials) <= 4 and failures(trials) <= 2


def test_a_safe_size_then_the_limit_then_the_failure() -> None:
    """Where the forecast is right, half of the limit, the limit and the next size are all that is run."""
    case = straight(100.5, 1000)
    assert sizes_of(case.search(Given(case.curve, 0.005))) == [50, 100, 101]


def test_trust_ends_without_a_failure() -> None:
    """Where the sizes are few and the forecast is right, two fits are proof enough."""
    case = straight(40, 1)._replace(sizes=balanced_ladder(128, 128))
    trials = case.search(Given(case.curve), trust=True)
    assert sizes_of(trials) == [16, 32] and failures(trials) == 0
    assert is_closed_by_convexity(trials, case.sizes, BUDGET)


@pytest.mark.parametrize("cautious", [False, True])
def test_a_top_that_needs_little_comes_first(cautious: bool) -> None:
    """Where even the largest size is predicted to need a small part of the budget, it is the only one run."""
    case = Case(Curve(((BUDGET // 10, BUDGET // 1000),)), range(1, 65), cautious=cautious)
    assert sizes_of(case.search(Given(case.curve))) == [64]


def test_a_limit_among_the_lowest_comes_first() -> None:
    """Where only the lowest few sizes are predicted to fit, the limit is run at once."""
    assert straight(3.5, 100).next([], Given(straight(3.5, 100).curve)) == 3


def test_a_constant_left_out_is_measured() -> None:
    """What the forecast leaves out altogether is seen in the first peak."""
    case = straight(100.5, 1000)
    assert sizes_of(case.search(Given(lambda size: case.curve(size) - BUDGET // 20, 0.0))) == [54, 100, 101]


def test_a_million_rungs_with_a_limit_of_three() -> None:
    """A forecast of a million where three fit costs little more than no forecast."""
    case = straight(3.5, 10**6)
    trials = case.search(Given(lambda size: 500 * size))
    assert standing(trials).best == 3 and len(trials) <= len(case.search()) + 4


def test_a_cautious_search_begins_lower_and_never_far_above() -> None:
    """Where real peaks are three times the predicted ones, nothing is run that needs far more than the budget."""
    case = straight(1000.5, 10**5, cautious=True)
    trials = case.search(Given(lambda size: case.curve(size) // 3))
    assert max(map(case.curve, sizes_of(trials))) <= 1.5 * BUDGET
    assert standing(trials).best == 1000


def test_an_unclear_failure_asks_the_lowest_size() -> None:
    """An error that may not be memory is asked again where memory cannot be short."""
    case = straight(1000, 10**5)
    failed = Trial(
        candidate=Candidate(micro_batch=500), outcome=OutOfMemory(cause="unclear"), wall_s=0.1, rows_per_step=1000
    )
    assert case.next([failed], Given(case.curve)) == 1


def test_a_tolerance_is_used() -> None:
    """With a tolerance, the size tried above the limit is as far above as the answer may be off."""
    case = straight(1000.5, 10**5)
    trials: list[Trial] = []
    while (
        size := propose(trials, case.sizes, budget_bytes=BUDGET, tolerance_frac=0.05, forecast=Given(case.curve))
    ) is not None:
        trials.append(case.run(size))
    assert len(trials) <= 3 and standing(trials).best in range(953, 1001)


def test_a_forecast_is_not_called_often() -> None:
    """On a ladder of a million sizes, one proposal asks for the logarithm of that many predictions, a few times."""
    case = straight(54_321, 2**20)
    asked: list[int] = []

    def peak_of(size: int) -> int:
        asked.append(size)
        return case.curve(size)

    num_trials = len(case.search(Given(peak_of)))
    assert len(asked) <= (num_trials + 1) * 3 * 20


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({8: 400, 16: 900}, True),  # the line is at 1025 with 18 rows
        ({8: 800, 16: 900}, False),  # 925
        ({8: 500, 16: 980}, True),  # 1100
        ({8: 950, 16: 990}, False),  # 1000: not above the budget
        ({8: 920, 16: 985}, False),  # 1001: within what is not exactly convex
        ({16: 999}, False),  # one peak is no line
    ],
)
def test_the_line_through_two_fits_closes_the_search(peaks: dict[int, int], expected: bool) -> None:
    """The next size cannot fit when the line through two fits is above the budget by more than a little."""
    log = [
        Trial(candidate=Candidate(micro_batch=size), outcome=Fit(peak_bytes=peak * MIB), wall_s=0.1, rows_per_step=size)
        for size, peak in peaks.items()
    ]
    assert is_closed_by_convexity(log, [8, 16, 18, 32], 1000 * MIB) == expected


def test_a_failure_of_the_next_size_needs_no_line() -> None:
    """Where the next size ran and failed, nothing is left to be shown; where there is no next one, neither."""
    case = straight(16, 17)
    log = [case.run(8), case.run(16)]
    assert not is_closed_by_convexity([*log, case.run(17)], case.sizes, BUDGET)
    assert not is_closed_by_convexity(log, [8, 16], BUDGET)
    assert not is_closed_by_convexity([], [8, 16], BUDGET)
