"""What a run that fails teaches about the largest micro-batch, and how it is forgotten again."""

from __future__ import annotations

import json
from math import inf, log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from autoaccum.caps import FIRST_PATIENCE, Caps, Shape

SMALL: Shape = (("ids", (128,)), ("labels", ()))
LARGE: Shape = (("ids", (256,)), ("labels", ()))


def quiet(caps: Caps, size: float, windows: int = FIRST_PATIENCE, shape: Shape = ()) -> float:
    """Run so many windows of this size without trouble; gives the limit afterwards."""
    for _ in range(windows):
        caps.run(shape, size)
    return caps.limit(shape)


def test_nothing_is_limited_at_first() -> None:
    """Where nothing has failed there is no limit, and running teaches none."""
    caps = Caps()
    assert quiet(caps, 8) == caps.limit(SMALL) == inf
    assert caps.state() == []


@pytest.mark.parametrize(("size", "half"), [(2, 1), (3, 2), (8, 4), (9, 5), (1001, 501)])
def test_half_of_what_failed_rounded_up(size: int, half: int) -> None:
    """Where nothing has run, the next size to try is half of the one that failed, rounded up."""
    caps = Caps()
    assert caps.fail((), size) == caps.limit(()) == half


def test_failures_in_a_row_halve_again() -> None:
    """Every failure before a first success halves what the last one left."""
    caps = Caps()
    assert [caps.fail((), size) for size in (9, 5, 3, 2)] == [5, 3, 2, 1]


def test_back_to_what_ran() -> None:
    """Where a size has run, a larger one that fails leads back to it, not to half."""
    caps = Caps()
    caps.fail((), 8)
    caps.run((), 3)
    assert caps.fail((), 4) == 3


def test_what_ran_and_then_fails_is_halved() -> None:
    """A size that ran before and fails now is halved: memory has become scarcer."""
    caps = Caps()
    caps.fail((), 8)
    caps.run((), 4)
    assert [caps.fail((), 4), caps.fail((), 2)] == [2, 1]


def test_largest_that_ran_counts() -> None:
    """A small window after a large one does not lower what is known to run."""
    caps = Caps()
    caps.fail((), 20)
    caps.run((), 9)
    caps.run((), 2)
    assert caps.fail((), 10) == 9


def test_grows_after_windows_without_trouble() -> None:
    """The limit stays for `FIRST_PATIENCE` windows and then goes half of the way to what failed."""
    caps = Caps()
    caps.fail((), 16)
    assert quiet(caps, 8, FIRST_PATIENCE - 1) == 8
    assert quiet(caps, 8, 1) == 12


def test_grows_up_to_what_failed() -> None:
    """The limit goes on growing, at last to the very size that failed."""
    caps = Caps()
    limits = [caps.fail((), 16)]
    while limits[-1] < 16:
        limits.append(quiet(caps, limits[-1]))
    assert limits == [8, 12, 14, 15, 16]


def test_forgotten_when_the_failed_size_runs() -> None:
    """Once a size as large as the one that failed has run, there is no limit any more."""
    caps = Caps()
    caps.fail((), 4)
    caps.run((), 4)
    assert caps.limit(()) == inf


def test_not_forgotten_one_row_below() -> None:
    """A size just below the one that failed proves nothing about it."""
    caps = Caps()
    caps.fail((), 4)
    caps.run((), 3)
    assert caps.limit(()) == 2


def test_smallest_failure_counts() -> None:
    """Of several sizes that failed, running the smallest one again is what lifts the limit."""
    caps = Caps()
    caps.fail((), 16)
    caps.fail((), 8)
    assert quiet(caps, 4) == 6
    caps.run((), 8)
    assert caps.limit(()) == inf


def test_smallest_failure_counts_after_a_larger_one() -> None:
    """A larger failure that comes later, after small windows let the limit pass the smaller one, does not hide that one."""
    caps = Caps()
    caps.fail((), 8)
    while caps.limit(()) < 9:
        caps.run((), 3)
    caps.fail((), 9)
    caps.run((), 8)
    assert caps.limit(()) == inf


def test_failed_growth_doubles_the_patience() -> None:
    """Each growth that fails makes the next one wait twice as long."""
    caps, waits = Caps(), []
    caps.fail((), 1000)
    for _ in range(4):
        limit, windows = caps.limit(()), 0
        while caps.limit(()) == limit:
            caps.run((), limit)
            windows += 1
        waits.append(windows)
        caps.fail((), caps.limit(()))
    assert waits == [FIRST_PATIENCE, 2 * FIRST_PATIENCE, 4 * FIRST_PATIENCE, 8 * FIRST_PATIENCE]


def test_growth_that_ran_does_not_double_the_patience() -> None:
    """A failure after the grown size has run is no failed growth, so the patience stays."""
    caps = Caps()
    caps.fail((), 16)
    caps.run((), quiet(caps, 8))
    caps.fail((), 12)
    limit = caps.limit(())
    assert quiet(caps, limit, FIRST_PATIENCE - 1) == limit < quiet(caps, limit, 1)


def test_trouble_starts_the_count_again() -> None:
    """Windows without trouble count from the last failure on."""
    caps = Caps()
    caps.fail((), 16)
    quiet(caps, 8, FIRST_PATIENCE - 1)
    caps.fail((), 8)
    assert quiet(caps, 4, FIRST_PATIENCE - 1) == 4
    assert quiet(caps, 4, 1) == 6


# -- shapes


def test_larger_shape_has_the_limit_of_a_smaller_one() -> None:
    """What failed for a shape holds for every shape that is nowhere smaller."""
    caps = Caps()
    caps.fail(SMALL, 8)
    assert (caps.limit(SMALL), caps.limit(LARGE)) == (4, 4)


def test_smaller_shape_is_not_limited_by_a_larger_one() -> None:
    """What failed for a large shape says nothing about a smaller one."""
    caps = Caps()
    caps.fail(LARGE, 8)
    assert caps.limit(SMALL) == inf


def test_tightest_of_the_covered_shapes_counts() -> None:
    """A shape without a limit of its own has the smallest of those of the shapes that it covers."""
    caps = Caps()
    caps.fail((("x", (4, 2)),), 20)
    caps.fail((("x", (2, 4)),), 8)
    assert caps.limit((("x", (4, 4)),)) == 4


def test_own_limit_goes_before_a_covered_one() -> None:
    """A shape that has failed itself keeps to its own limit when it grows, whatever a smaller one's is."""
    caps = Caps()
    caps.fail(SMALL, 8)
    caps.fail(LARGE, 4)
    assert (caps.limit(LARGE), caps.limit(SMALL)) == (2, 4)


@pytest.mark.parametrize(
    "other",
    [
        (("ids", (256,)),),
        (("ids", (256,)), ("targets", ())),
        (("ids", (256, 256)), ("labels", ())),
        (("labels", ()), ("ids", (256,))),
        (("ids", (127,)), ("labels", ())),
        (),
    ],
    ids=["fewer parts", "other name", "more dimensions", "other order", "one smaller", "none"],
)
def test_other_kinds_of_batches_are_not_limited(other: Shape) -> None:
    """A batch of other parts, other dimensions, or with any part smaller is not covered."""
    caps = Caps()
    caps.fail(SMALL, 8)
    assert caps.limit(other) == inf


def test_one_part_smaller_is_not_covered() -> None:
    """A shape that is larger in one dimension and smaller in another is not covered."""
    caps = Caps()
    caps.fail((("x", (8, 8)),), 8)
    assert caps.limit((("x", (16, 4)),)) == inf


def test_windows_of_one_shape_do_not_lift_anothers_limit() -> None:
    """Only windows of a shape let its limit grow."""
    caps = Caps()
    caps.fail(SMALL, 8)
    quiet(caps, 8, 100, LARGE)
    assert caps.limit(SMALL) == 4


# -- another rank's limit


def test_limit_of_another_rank_is_taken_over() -> None:
    """A rank that would have run a larger size takes over the limit."""
    caps = Caps()
    caps.lower((), 8, 3)
    assert caps.limit(()) == 3


@pytest.mark.parametrize("size", [2, 3])
def test_limit_of_another_rank_above_ones_own_size_teaches_nothing(size: int) -> None:
    """A rank whose micro-batches are within that limit anyway remembers nothing."""
    caps = Caps()
    caps.lower((), size, 3)
    assert caps.state() == []


def test_a_tighter_limit_of_ones_own_stays() -> None:
    """A limit that is lower already is not lifted by another rank's."""
    caps = Caps()
    caps.fail((), 4)
    caps.lower((), 8, 3)
    assert caps.limit(()) == 2


def test_limit_of_another_rank_grows_back() -> None:
    """A limit that was taken over grows and is forgotten like one's own, counted from when it was taken over."""
    caps = Caps()
    caps.fail((), 8)
    quiet(caps, 4, FIRST_PATIENCE - 1)
    caps.lower((), 4, 2)
    assert quiet(caps, 2, FIRST_PATIENCE - 1) == 2 < quiet(caps, 2, 1)
    caps.run((), 8)
    assert caps.limit(()) == inf


# -- costs


@pytest.mark.parametrize("failed", [1e-6, 0.75, 5, 1e9])
def test_costs_are_halved_exactly(failed: float) -> None:
    """A cost is no whole number, so half of it is half of it."""
    assert Caps(whole=False).fail((), failed) == failed / 2


def test_costs_grow_to_what_failed() -> None:
    """A cost grows by halves of the way, and from within 5 % takes what failed itself."""
    caps = Caps(whole=False)
    limits = [caps.fail((), 100.0)]
    while limits[-1] < 100:
        limits.append(quiet(caps, limits[-1]))
    assert limits == [50, 75, 87.5, 93.75, 96.875, 100]


def test_failed_cost_that_runs_is_forgotten() -> None:
    """When what failed runs again, the limit of a cost is gone as well."""
    caps = Caps(whole=False)
    caps.fail((), 0.5)
    caps.run((), 0.5)
    assert caps.limit(()) == inf


# -- kept and loaded

events = st.lists(
    st.tuples(st.sampled_from([(), SMALL, LARGE]), st.sampled_from(["fail", "run", "lower"]), st.integers(2, 64)),
    max_size=40,
)


def applied(caps: Caps, made: list[tuple[Shape, str, int]]) -> list[float]:
    """The limits after each of these events."""
    limits = []
    for shape, kind, size in made:
        if kind == "lower":
            caps.lower(shape, size, size // 2)
        else:
            (caps.fail if kind == "fail" else caps.run)(shape, size)
        limits.append(caps.limit(shape))
    return limits


@given(before=events, after=events, whole=st.booleans())
@settings(max_examples=60)
def test_goes_on_from_its_state(before: list[tuple[Shape, str, int]], after: Any, whole: bool) -> None:
    """What was learned goes through JSON and back, and goes on as if nothing had been between."""
    caps, again = Caps(whole=whole), Caps(whole=whole)
    applied(caps, before)
    again.load(json.loads(json.dumps(caps.state())))
    assert json.dumps(again.state()) == json.dumps(caps.state())
    assert applied(again, after) == applied(caps, after)


def test_state_replaces_what_was_learned() -> None:
    """Loading a state forgets what was there before it."""
    caps = Caps()
    caps.fail((), 8)
    caps.load(Caps().state())
    assert caps.limit(()) == inf


def test_state_is_a_copy() -> None:
    """What is learned later does not change a state that was taken before."""
    caps = Caps()
    caps.fail((), 8)
    state = json.dumps(caps.state())
    taken = caps.state()
    caps.fail((), 4)
    assert json.dumps(taken) == state


# -- against a memory that has an end


@given(rows=st.integers(2, 4096), room=st.integers(1, 4096), windows=st.integers(1, 300), whole=st.booleans())
def test_few_attempts_are_lost(rows: int, room: int, windows: int, whole: bool) -> None:
    """Under one limit of memory the failures are a descent by halves, and then one for every doubling of the patience."""
    caps, failures = Caps(whole=whole), 0
    for _ in range(windows):
        while (size := min(rows, caps.limit(()))) > room:
            caps.fail((), size)
            failures += 1
        caps.run((), size)
    descent = log2(max(rows / room, 1)) + 1
    assert failures <= descent + log2(1 + windows / FIRST_PATIENCE) + 1


@given(rows=st.integers(2, 4096), room=st.integers(1, 4096))
@settings(max_examples=30)
def test_freed_memory_is_used_again(rows: int, room: int) -> None:
    """When memory becomes free again, the limit grows until it is forgotten, one patience a step."""
    caps = Caps()
    while (size := min(rows, caps.limit(()))) > room:
        caps.fail((), size)
    for _ in range(FIRST_PATIENCE * 14 + 1):
        caps.run((), min(rows, caps.limit(())))
    assert caps.limit(()) == inf


class Training(RuleBasedStateMachine):
    """Windows of any size on a device whose room changes, with what was learned kept in a file now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.caps, self.room = Caps(), 64
        self.failed_at: dict[int, int] = {}
        self.windows = 0

    @rule(room=st.integers(1, 128))
    def room_changes(self, room: int) -> None:
        self.room = room

    @rule()
    def saved_and_loaded(self) -> None:
        state = json.loads(json.dumps(self.caps.state()))
        self.caps = Caps()
        self.caps.load(state)

    @rule(rows=st.integers(1, 128), count=st.integers(1, 2 * FIRST_PATIENCE))
    def train(self, rows: int, count: int) -> None:
        for _ in range(count):
            attempts = 0
            while (size := int(min(rows, self.caps.limit(())))) > self.room and size > 1:
                self.refuse_a_size_that_failed_just_now(size)
                self.failed_at[size] = self.windows
                assert self.caps.fail((), size) < size, "a replay must be smaller"
                attempts += 1
            assert attempts <= 8, "replays come to an end"
            self.caps.run((), size)
            self.windows += 1
            if size >= min(self.failed_at, default=129):
                self.failed_at = {}  # it ran: what failed before proves nothing any more

    def refuse_a_size_that_failed_just_now(self, size: int) -> None:
        for failed, at in self.failed_at.items():
            assert size < failed or self.windows - at >= FIRST_PATIENCE, "a failure is remembered for its patience"

    @invariant()
    def one_row_is_always_allowed(self) -> None:
        assert self.caps.limit(()) >= 1

    @invariant()
    def no_limit_without_a_failure(self) -> None:
        assert self.caps.limit(()) == inf or self.failed_at


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


def test_other_pieces_of_a_failed_window_have_not_failed() -> None:
    """Another rank's limit is compared with the largest piece: a smaller one that runs later does not end the limit."""
    caps = Caps()
    caps.fail((), 4)
    caps.lower((), 4, 2)
    caps.run((), 2)
    caps.run((), 3)
    assert caps.limit(()) == 2
