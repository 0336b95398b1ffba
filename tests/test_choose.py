"""From a finished log to a schedule, and what is said about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.choose import evidence, limited_by, schedule_for
from autoaccum.errors import InvalidRequestError
from autoaccum.records import Candidate, Fit, Outcome, OutOfMemory, Refused, Trial
from autoaccum.search import standing


def trial(size: int, outcome: Outcome) -> Trial:
    return Trial(candidate=Candidate(micro_batch=size), outcome=outcome, wall_s=0.0, rows_per_step=2 * size)


FITS, FULL = Fit(peak_bytes=1), OutOfMemory(cause="allocator")


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 700), st.integers(1, 9))
def test_schedule_sums_to_the_target(target: int, world_size: int, limit: int, multiple_of: int) -> None:
    """Over all ranks the sizes are the target, none above the limit or the share, and steps differ by none."""
    if target < world_size or limit < multiple_of:
        return
    schedule = schedule_for(target, world_size, limit, multiple_of=multiple_of)
    assert sum(map(sum, schedule.sizes)) == target
    assert len(schedule.sizes) == world_size
    assert schedule.micro_batch <= max(limit, 1)
    assert all(size >= 1 for sizes in schedule.sizes for size in sizes)
    assert all(size % multiple_of == 0 for sizes in schedule.sizes for size in sizes[:-1])


@given(st.integers(1, 3000), st.integers(1, 4), st.integers(1, 300), st.integers(1, 3))
def test_equal_schedule_is_one_size_or_refused(target: int, world_size: int, limit: int, at_least: int) -> None:
    """With equal micro-batches there is one size that divides every share, else an error that names near targets."""
    if target < world_size or limit < at_least:
        return
    try:
        schedule = schedule_for(target, world_size, limit, at_least=at_least, equal=True)
    except InvalidRequestError as error:
        assert "use " in str(error) or "near targets" in str(error)
        return
    sizes = {size for of_rank in schedule.sizes for size in of_rank}
    assert len(sizes) == 1
    assert sum(map(sum, schedule.sizes)) == target
    assert at_least <= sizes.pop() <= limit


def test_shares_that_differ_cannot_be_equal() -> None:
    """A target that does not divide over the ranks is refused where sizes must be equal, naming those that do."""
    with pytest.raises(InvalidRequestError, match="near targets that do: 8 = 4 x 1 x 2, 10 = 1 x 5 x 2"):
        schedule_for(9, 2, 4, equal=True)


def test_too_small_a_rest_is_refused() -> None:
    """Where a micro-batch would be below what runs, the target is refused with one that works."""
    with pytest.raises(InvalidRequestError, match="use target_batch=2"):
        schedule_for(3, 1, 2, at_least=2)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (FULL, "memory"),
        (OutOfMemory(cause="unclear"), "memory"),
        (Refused(bound="ceiling"), "other"),
        (Refused(bound="ceiling", limited_by="host"), "host"),
    ],
)
def test_ceiling_names_the_limit(outcome: Outcome, expected: str) -> None:
    """What failed first above the answer is what limits it."""
    trials = [trial(4, FITS), trial(5, outcome)]
    assert limited_by(standing(trials), trials, 100, "target") == expected


def test_bound_that_fits_names_itself() -> None:
    """Where the largest allowed size fits, the limit is what set it."""
    trials = [trial(4, FITS)]
    assert limited_by(standing(trials), trials, 4, "data") == "data"


def test_search_cut_short_is_limited_by_the_caller() -> None:
    """Where nothing failed and the bound was not reached, the caller's time was up."""
    trials = [trial(4, FITS)]
    assert limited_by(standing(trials), trials, 100, "target") == "caller"


def test_a_limit_shown_by_the_peaks_is_memory() -> None:
    """Where the measured peaks show that the next size cannot fit, memory is the limit, though nothing failed."""
    trials = [trial(4, FITS)]
    assert limited_by(standing(trials), trials, 100, "target", proved=True) == "memory"
    assert limited_by(standing(trials), trials, 4, "target", proved=True) == "target"


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([trial(4, FITS), trial(5, FULL)], "exact"),
        ([trial(4, FITS), trial(8, FULL)], "measured"),
        ([trial(4, FITS)], "measured"),
        ([trial(10, FITS)], "measured"),
    ],
)
def test_evidence_is_exact_only_when_the_next_size_failed(trials: list[Trial], expected: str) -> None:
    """A gap between the answer and the failure, or no failure at all, is not exact."""
    assert evidence(standing(trials), range(1, 11)) == expected
