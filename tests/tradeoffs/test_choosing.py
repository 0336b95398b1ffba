"""The best of what was measured: the fastest, or the leanest; and of those that are equal the one that costs least."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.records import Levers, Timing
from autoaccum.timing import timing_of
from autoaccum.tradeoffs.choosing import best, recomputation, rivals
from autoaccum.tradeoffs.points import Measured, Point


def full(blocks: int) -> Levers:
    return Levers(checkpointing="full", checkpointed_blocks=blocks)


def selective(blocks: int) -> Levers:
    return Levers(checkpointing="selective", checkpointed_blocks=blocks)


PLAIN = Levers()


def ran(seconds: float, peak: int = 100, levers: Levers = PLAIN, size: int = 16, noise: float = 0.01) -> Measured:
    """A setting whose step takes so long, give or take the noise."""
    timing = Timing(median_s=seconds, first_quartile_s=seconds, third_quartile_s=seconds, num=20, interval_frac=noise)
    return Measured(Point(levers, size), timing, peak)


def once(seconds: float, peak: int) -> Measured:
    """A setting whose step was timed a single time."""
    timing = timing_of([seconds])
    assert timing is not None
    return Measured(Point(PLAIN, peak), timing, peak)


all_levers = st.one_of(
    st.just(PLAIN), st.integers(1, 8).map(full), st.integers(1, 8).map(selective), st.just(Levers(optimizer_impl="fused"))
)
settings = st.builds(
    ran,
    st.floats(0.01, 10),
    st.integers(1, 2**40),
    all_levers,
    st.integers(1, 64),
    st.floats(0, 0.1),
)
several = st.lists(settings, min_size=1, max_size=12)


# -- throughput


def test_fastest_is_chosen() -> None:
    """The setting with the shortest optimizer step is the one to use, whatever memory and levers it takes."""
    fast = ran(1.0, peak=500, levers=full(4))
    assert best([ran(2.0, peak=1), fast, ran(1.5)], "throughput", 0) is fast


def test_equal_within_the_noise_goes_to_the_one_that_computes_least_again() -> None:
    """A setting that is faster by less than the noise is no reason to compute blocks again."""
    plain = ran(1.005, peak=500)
    assert best([ran(1.0, levers=full(4)), plain, ran(1.002, levers=selective(4))], "throughput", 0) is plain


def test_fewer_blocks_are_less_recomputation() -> None:
    """Of two equal settings the one with fewer blocks checkpointed is taken."""
    fewer = ran(1.004, levers=full(2))
    assert best([ran(1.0, levers=full(3)), fewer], "throughput", 0) is fewer


def test_selective_recomputes_less_than_full() -> None:
    """Any number of selectively checkpointed blocks comes before a single fully checkpointed one."""
    lean = ran(1.004, levers=selective(8))
    assert best([ran(1.0, levers=full(1)), lean], "throughput", 0) is lean
    assert recomputation(PLAIN) < recomputation(selective(1)) < recomputation(selective(8)) < recomputation(full(1))


def test_equal_and_nothing_recomputed_goes_to_the_lower_peak() -> None:
    """Where nothing is computed again in either, the memory decides."""
    lean = ran(1.005, peak=50)
    assert best([ran(1.0, peak=100), lean], "throughput", 0) is lean


def test_slower_than_the_noise_is_not_equal() -> None:
    """A setting that is slower by more than either is known to be is never taken, however lean."""
    fast = ran(1.0, peak=10**6, levers=full(8))
    assert best([fast, ran(1.02, peak=1)], "throughput", 10**9) is fast


def test_noise_alone_makes_nothing_equal() -> None:
    """Where a step was timed once, a setting that was 5 % slower is not taken for its memory, and one 2 % slower is."""
    fast, slow, near = (once(step_s, peak) for step_s, peak in ((1.0, 9), (1.05, 1), (1.02, 2)))
    assert best([fast, slow], "throughput", 0) is fast
    assert best([fast, near], "throughput", 0) is near


@given(several)
def test_chosen_is_never_slower_than_the_fastest_by_more_than_the_noise(measured: Sequence[Measured]) -> None:
    """Whatever else is weighed, the choice is the fastest or equal to it within the noise of one of the two."""
    chosen = best(measured, "throughput", 0).timing
    fastest = min((one.timing for one in measured), key=lambda timing: timing.median_s)
    noise_s = max(t.median_s * (t.interval_frac or 0) for t in (chosen, fastest))
    assert chosen.median_s <= fastest.median_s + noise_s


@given(several, st.randoms(use_true_random=False))
def test_order_of_the_settings_does_not_matter(measured: list[Measured], random: object) -> None:
    """The choice depends on what was measured, not on what was measured first."""
    other = list(measured)
    random.shuffle(other)  # type: ignore[attr-defined]
    for objective in ("throughput", "memory"):
        chosen, again = (best(some, objective, 10) for some in (measured, other))  # type: ignore[arg-type]
        alike = chosen.timing == again.timing or chosen.timing.median_s == again.timing.median_s
        assert alike or (recomputation(chosen.point.levers), chosen.peak_bytes) == (
            recomputation(again.point.levers),
            again.peak_bytes,
        )


# -- memory


def test_leanest_is_chosen_for_memory() -> None:
    """The lowest peak wins, however slow it is."""
    lean = ran(9.0, peak=10, levers=full(4))
    assert best([ran(1.0, peak=100), lean], "memory", 0) is lean


def test_fastest_of_equal_peaks_is_chosen_for_memory() -> None:
    """Of settings with the same peak, give or take how much peaks wander, the fastest one is taken."""
    fast = ran(1.0, peak=104)
    assert best([ran(2.0, peak=100), fast, ran(0.5, peak=106)], "memory", 5) is fast


# -- rivals


def test_single_setting_has_no_rival() -> None:
    """Where one setting is clearly the fastest, nothing is to be measured again."""
    assert rivals([ran(1.0), ran(1.2), ran(2.0)], 3) == []


def test_settings_close_behind_are_rivals() -> None:
    """Settings within 5 % of the fastest are to be measured again, the fastest first."""
    found = rivals([ran(1.04), ran(2.0), ran(1.0), ran(1.06)], 3)
    assert [one.timing.median_s for one in found] == [1.0, 1.04]


def test_what_would_be_chosen_is_a_rival() -> None:
    """Where only so many are measured again, the lean one that counts as equal is among them."""
    lean = ran(1.009, peak=1)
    found = rivals([lean, ran(1.0, peak=10), ran(1.001, peak=10), ran(1.002, peak=10)], 2)
    assert [one.timing.median_s for one in found] == [1.0, 1.009]
