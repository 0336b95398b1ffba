"""Points of the trade-offs: what a log of trials says of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.records import Candidate, Fit, Levers, OutOfMemory, Refused, Trial
from autoaccum.tradeoffs.points import Point, alike, measured_points, point_of, with_blocks

PLAIN = Levers()
FULL = Levers(checkpointing="full", checkpointed_blocks=3)


def ran(
    size: int,
    *times_s: float,
    levers: Levers = PLAIN,
    peak: int = 100,
    rows: int = 48,
    purpose: str = "confirm",
) -> Trial:
    """A trial that fitted."""
    return Trial(
        candidate=Candidate(micro_batch=size, levers=levers),
        outcome=Fit(peak_bytes=peak, step_times_s=times_s),
        wall_s=1.0,
        rows_per_step=rows,
        purpose=purpose,  # type: ignore[arg-type]
    )


def failed(size: int, levers: Levers = PLAIN, purpose: str = "confirm") -> Trial:
    """A trial that ran out of memory."""
    return Trial(
        candidate=Candidate(micro_batch=size, levers=levers),
        outcome=OutOfMemory(cause="allocator"),
        wall_s=1.0,
        rows_per_step=48,
        purpose=purpose,  # type: ignore[arg-type]
    )


def test_trial_is_of_the_point_it_ran() -> None:
    """A point is the levers and the micro-batch of a trial's candidate."""
    assert point_of(failed(7, FULL)) == Point(FULL, 7)


def test_whole_steps_are_measured_points() -> None:
    """A trial of the plan's own steps gives a point its times and its peak."""
    (found,) = measured_points([ran(16, 1.0, 3.0, 2.0, peak=70)], 48)
    assert (found.point, found.timing.median_s, found.timing.num, found.peak_bytes) == (Point(PLAIN, 16), 2.0, 3, 70)


def test_probes_are_no_measured_points() -> None:
    """Two micro-batches are no optimizer step at the target, so that their times say nothing of one."""
    assert measured_points([ran(16, 1.0, purpose="probe", rows=32)], 48) == []
    assert measured_points([ran(16, 1.0, purpose="probe", rows=48)], 48) == []


def test_steps_that_were_cut_short_are_no_measured_points() -> None:
    """A step that was not run to its end has fewer rows than a whole one, and its time is that of a part."""
    assert measured_points([ran(16, 1.0, rows=32)], 48) == []


def test_steps_without_times_are_no_measured_points() -> None:
    """A trial that took only its first step, which is not timed, is none."""
    assert measured_points([ran(16)], 48) == []


def test_several_trials_of_a_point_are_taken_together() -> None:
    """Times of all its trials make up a point's timing, and the highest peak is its peak."""
    (found,) = measured_points([ran(16, 1.0, 1.0, peak=80), ran(16, 3.0, 3.0, 3.0, peak=70)], 48)
    assert (found.timing.num, found.timing.median_s, found.peak_bytes) == (5, 3.0, 80)


def test_point_that_failed_once_is_left_out() -> None:
    """A setting that ran in one trial and not in another is not one to rely on, whichever came first."""
    assert measured_points([ran(16, 1.0), failed(16)], 48) == []
    assert measured_points([failed(16, purpose="probe"), ran(16, 1.0)], 48) == []


def test_failure_of_other_levers_or_sizes_does_not_count() -> None:
    """A point is left out by its own failures only."""
    assert len(measured_points([ran(16, 1.0), failed(24), failed(16, FULL)], 48)) == 1


def test_refused_trial_counts_as_a_failure() -> None:
    """A size that a model refuses is no setting either."""
    refused = Trial(candidate=Candidate(micro_batch=16), outcome=Refused(bound="floor"), wall_s=1.0, rows_per_step=48)
    assert measured_points([ran(16, 1.0), refused], 48) == []


def test_points_come_in_the_order_first_run() -> None:
    """A point that is measured again keeps its place."""
    found = measured_points([ran(16, 1.0), ran(24, 1.0, levers=FULL), ran(8, 1.0), ran(16, 1.0)], 48)
    assert [one.point.micro_batch for one in found] == [16, 24, 8]


def test_same_size_under_other_levers_is_another_point() -> None:
    """So is the same number of blocks of the other kind of checkpointing."""
    selective = Levers(checkpointing="selective", checkpointed_blocks=3)
    found = measured_points([ran(16, 1.0), ran(16, 2.0, levers=FULL), ran(16, 3.0, levers=selective)], 48)
    assert [one.timing.median_s for one in found] == [1.0, 2.0, 3.0]


@given(st.integers(0, 200), st.integers(0, 200))
def test_levers_that_differ_in_blocks_alone_are_alike(one: int, other: int) -> None:
    """The number of checkpointed blocks makes no other family of settings."""
    assert alike(with_blocks(FULL, one), with_blocks(FULL, other))
    assert with_blocks(FULL, one).checkpointed_blocks == one


def test_levers_that_differ_in_anything_else_are_not_alike() -> None:
    """Another level, another optimizer implementation or other blocks by name are another family."""
    for other in (
        Levers(),
        Levers(checkpointing="selective", checkpointed_blocks=3),
        Levers(checkpointing="full", checkpointed_blocks=3, optimizer_impl="foreach"),
        Levers(checkpointing="full", checkpointed_blocks=3, block_names=("h.0", "h.1", "h.2")),
    ):
        assert not alike(FULL, other)
