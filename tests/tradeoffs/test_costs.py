"""What a step is expected to take at settings that have not run, from those that have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.records import Levers, Timing
from autoaccum.tradeoffs.costs import CostModel
from autoaccum.tradeoffs.points import Measured, Point

PLAIN = Levers()
FUSED, FOREACH = Levers(optimizer_impl="fused"), Levers(optimizer_impl="foreach")
OFFLOADED = Levers(offload="cpu")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def full(blocks: int = 4) -> Levers:
    return Levers(checkpointing="full", checkpointed_blocks=blocks)


def ran(seconds: float, levers: Levers = PLAIN, size: int = 16, noise: float = 0.01) -> Measured:
    """A setting whose step takes so long, give or take the noise."""
    timing = Timing(median_s=seconds, first_quartile_s=seconds, third_quartile_s=seconds, num=20, interval_frac=noise)
    return Measured(Point(levers, size), timing, 100)


def unknown(point: Point) -> float:
    """Nothing is known of the operations."""
    return 1.0


def expected_s(measured: Sequence[Measured], point: Point, work: Callable[[Point], float] = unknown) -> float:
    return CostModel(measured, work).expected(point).step_s


all_levers = st.builds(
    Levers,
    checkpointing=st.sampled_from(["off", "selective", "full"]),
    precision=st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
    optimizer_impl=st.sampled_from(["default", "for-loop", "foreach", "fused"]),
    offload=st.sampled_from(["off", "cpu"]),
)
points = st.builds(Point, all_levers, st.sampled_from(SIZES))
logs = st.lists(
    st.tuples(points, st.floats(0.01, 10), st.floats(0.0, 0.05)), min_size=1, max_size=8, unique_by=lambda one: one[0]
).map(lambda found: [ran(seconds, point.levers, point.micro_batch, noise) for point, seconds, noise in found])


@given(logs, points)
def test_same_input_gives_the_same_output(measured: list[Measured], point: Point) -> None:
    """Nothing random is in it: ranks and reruns expect the same."""
    assert CostModel(measured, unknown).expected(point) == CostModel(measured, unknown).expected(point)


@given(logs, points)
def test_expectations_are_times(measured: list[Measured], point: Point) -> None:
    """Whatever was measured, what is expected is a number of seconds above zero, and the best is no longer than that."""
    found = CostModel(measured, unknown).expected(point)
    assert isfinite(found.step_s) and 0 < found.at_best_s <= found.step_s


@given(st.floats(0.01, 10), all_levers, st.sampled_from(SIZES), st.floats(0.0, 0.05))
def test_single_measurement_is_expected_again(seconds: float, levers: Levers, size: int, noise: float) -> None:
    """Where one setting was measured, that setting is expected to take what it took."""
    (one,) = measured = [ran(seconds, levers, size, noise)]
    found = CostModel(measured, unknown).expected(one.point)
    assert found.step_s == pytest.approx(seconds, rel=1e-6)
    assert found.at_best_s >= seconds * (1 - max(noise, 0.005) * 1.01)


def test_measured_points_are_expected_within_their_noise() -> None:
    """Measurements that the beliefs allow for are reproduced within what they are known to."""
    measured = [
        ran(1.0),
        ran(1.05, size=8),
        ran(1.12, size=4),
        ran(0.98, FUSED),
        ran(1.0, FOREACH),
        ran(1.31, full(), 32),
        ran(1.35, full()),
        ran(1.6, OFFLOADED, 32),
    ]
    model = CostModel(measured, lambda point: 1.33 if point.levers.checkpointed_blocks else 1.0)
    for one in measured:
        assert model.expected(one.point).step_s == pytest.approx(one.timing.median_s, rel=0.01)


def test_what_was_measured_well_is_believed_more_than_what_was_not() -> None:
    """Of two settings that contradict the beliefs, the one with less noise is reproduced more closely."""

    def off(noise: float) -> float:
        measured = [ran(1.0), ran(1.3, size=15, noise=noise)]
        return abs(expected_s(measured, measured[1].point) - 1.3)

    assert off(0.005) < off(0.1)


def test_lever_measured_at_one_size_shifts_the_others() -> None:
    """A lever that doubled the time at one size is expected to double it at other sizes too."""
    before = expected_s([ran(1.0)], Point(OFFLOADED, 64))
    after = expected_s([ran(1.0), ran(2.0, OFFLOADED)], Point(OFFLOADED, 64))
    plain = expected_s([ran(1.0), ran(2.0, OFFLOADED)], Point(PLAIN, 64))
    assert after / plain == pytest.approx(2.0, rel=0.05)
    assert after > 1.3 * before


def test_lever_measured_together_with_another_shifts_it_alone() -> None:
    """What offloading costs was seen with checkpointing on, and is expected without it too."""
    work = {True: 1.3, False: 1.0}
    both = Levers(checkpointing="full", checkpointed_blocks=4, offload="cpu")
    measured = [ran(1.0), ran(1.3, full()), ran(2.6, both)]
    found = expected_s(measured, Point(OFFLOADED, 16), lambda point: work[point.levers.checkpointing == "full"])
    assert found == pytest.approx(2.0, rel=0.1)


def test_lever_does_not_shift_what_runs_without_it() -> None:
    """A lever that was slow says little of the setting without it."""
    before, after = (expected_s(measured, Point(PLAIN, 16)) for measured in ([ran(1.0)], [ran(1.0), ran(3.0, OFFLOADED)]))
    assert after == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("ratio", [1.1, 1.33, 2.0])
def test_recomputation_costs_what_the_work_says(ratio: float) -> None:
    """Before it has run, a checkpointed setting takes longer by the operations that are computed again."""
    found = expected_s([ran(1.0)], Point(full(), 16), lambda point: ratio if point.levers.checkpointed_blocks else 1.0)
    assert found == pytest.approx(ratio, rel=0.01)


def test_more_blocks_take_longer_by_their_work() -> None:
    """Each block more that is computed again costs its share of the work, also after some were measured."""

    def work(point: Point) -> float:
        return 1.0 + point.levers.checkpointed_blocks / 18  # a third, of six blocks

    measured = [ran(1.0), ran(1.17, full(3), 24)]
    times_s = [expected_s(measured, Point(full(blocks), 24), work) for blocks in (1, 2, 3, 4, 5, 6)]
    assert times_s == sorted(times_s)
    assert times_s[5] / times_s[0] == pytest.approx((1 + 6 / 18) / (1 + 1 / 18), rel=0.01)


def test_slope_over_the_sizes_is_learned() -> None:
    """Where each doubling saved a tenth, the next one is expected to save about as much, and a halving to cost it."""
    measured = [ran(1.0, size=8), ran(0.9, size=16), ran(0.81, size=32)]
    assert expected_s(measured, Point(PLAIN, 64)) == pytest.approx(0.73, rel=0.05)
    assert expected_s(measured, Point(PLAIN, 4)) == pytest.approx(1.11, rel=0.05)


def test_uncertainty_grows_with_the_distance() -> None:
    """The further a size is from what ran, the better it may turn out to be."""
    model = CostModel([ran(1.0)], unknown)
    room = [1 - found.at_best_s / found.step_s for found in (model.expected(Point(PLAIN, size)) for size in (16, 32, 64))]
    assert room[0] < room[1] < room[2]


def test_lever_that_has_not_run_may_be_better_than_one_that_has() -> None:
    """What nobody has tried is given more room than what was measured next to it."""
    model = CostModel([ran(1.0), ran(1.0, FOREACH)], unknown)
    tried, untried = (model.expected(Point(levers, 16)) for levers in (FOREACH, FUSED))
    assert untried.at_best_s / untried.step_s < tried.at_best_s / tried.step_s


def test_hopeless_lever_is_ruled_out_by_one_measurement() -> None:
    """A lever that was three times as slow at one size is not expected to be the best at the next one, even at its best."""
    model = CostModel([ran(1.0), ran(3.0, OFFLOADED)], unknown)
    assert model.expected(Point(OFFLOADED, 24)).at_best_s > 1.0


def test_unit_of_time_does_not_matter() -> None:
    """Milliseconds instead of seconds are the same problem."""
    log = [ran(1.0), ran(1.2, OFFLOADED), ran(0.9, size=32)]
    small = [one._replace(timing=_scaled(one.timing, 1e-3)) for one in log]
    point = Point(OFFLOADED, 32)
    assert expected_s(small, point) == pytest.approx(expected_s(log, point) / 1000, rel=1e-9)


def test_point_measured_twice_under_the_same_name_is_no_singular_matrix() -> None:
    """Two measurements of one setting, as from two machines, are averaged."""
    assert expected_s([ran(1.0), ran(1.1)], Point(PLAIN, 16)) == pytest.approx(1.05, rel=0.02)


@settings(max_examples=20)
@given(logs)
def test_a_hundred_settings_are_handled(measured: list[Measured]) -> None:
    """A log as long as a search makes it is no numerical trouble."""
    longer = [ran(one.timing.median_s * (1 + index / 100), *one.point) for one in measured for index in range(15)]
    found = CostModel(longer, unknown).expected(measured[0].point)
    assert isfinite(found.step_s) and found.at_best_s <= found.step_s


def _scaled(timing: Timing, factor: float) -> Timing:
    return Timing(
        median_s=timing.median_s * factor,
        first_quartile_s=timing.first_quartile_s * factor,
        third_quartile_s=timing.third_quartile_s * factor,
        num=timing.num,
        interval_frac=timing.interval_frac,
    )
