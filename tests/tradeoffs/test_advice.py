"""What would be needed for the next step up is said in sentences with numbers, and only where it would bring something."""

from __future__ import annotations

from typing import Any

from autoaccum.records import Levers
from autoaccum.tradeoffs.advice import advice_for
from autoaccum.tradeoffs.points import Point

MIB = 2**20
PLAIN = Levers()
FULL = Levers(checkpointing="full", checkpointed_blocks=4, optimizer_impl="foreach")


def peak(levers: Levers, size: int) -> int:
    """One MiB for each row, a third of it with checkpointing."""
    return size * MIB // (3 if levers.checkpointed_blocks else 1)


def advice(chosen: Point, **changes: Any) -> tuple[str, ...]:
    arguments: dict[str, Any] = {"budget_bytes": 40 * MIB, "next_size": None, "peak": peak, "not_allowed": []}
    arguments["largest"] = chosen.micro_batch
    return advice_for(chosen, **{**arguments, **changes})


def test_memory_that_would_make_checkpointing_needless_is_named() -> None:
    """A setting that computes blocks again says by how much it misses running as it is."""
    assert advice(Point(FULL, 48)) == ("8.00 MiB more would make checkpointing needless at micro-batch 48.",)


def test_checkpointing_that_brings_no_size_is_not_advised_against() -> None:
    """Where the size would fit without checkpointing too, no memory is missing."""
    assert advice(Point(FULL, 32)) == ()


def test_setting_without_levers_is_told_of_the_next_size() -> None:
    """How much more the next larger micro-batch needs is said for the same levers."""
    assert advice(Point(PLAIN, 32), next_size=48) == ("8.00 MiB more would allow a micro-batch of 48 with the same levers.",)


def test_next_size_that_fits_is_no_matter_of_memory() -> None:
    """A larger size that fits was not chosen for its speed, and more memory would not change that."""
    assert advice(Point(PLAIN, 32), next_size=40) == ()


def test_largest_size_has_no_next_one() -> None:
    """At the target itself nothing larger is offered."""
    assert advice(Point(PLAIN, 48)) == ()


def test_both_are_said_together() -> None:
    """What checkpointing costs and what the next size takes are two sentences."""
    assert len(advice(Point(FULL, 64), next_size=128)) == 2


def test_unknown_peaks_are_not_advised_by() -> None:
    """Without a prediction there is no advice."""
    assert advice(Point(FULL, 48), next_size=96, peak=lambda levers, size: None) == ()


def test_other_numerics_are_offered_where_they_bring_more() -> None:
    """A lever that changes the numerics is named with what it would bring, and with how to allow it."""
    (said,) = advice(Point(PLAIN, 24), not_allowed=[(Levers(precision="bf16"), 48)])
    assert said.startswith("bf16 would double the micro-batch, from 24 to 48 (predicted)")
    assert 'levers="all"' in said


def test_gain_of_other_numerics_is_worded_by_its_size() -> None:
    """More than double is said as a multiple, less than double without a number of times."""
    (threefold,) = advice(Point(PLAIN, 16), not_allowed=[(Levers(precision="bf16"), 48)])
    (little,) = advice(Point(PLAIN, 32), not_allowed=[(Levers(precision="fp16"), 48)])
    assert "3-fold" in threefold and "from 16 to 48" in threefold
    assert "fp16 would raise the micro-batch, from 32 to 48" in little


def test_other_numerics_that_bring_nothing_are_not_offered() -> None:
    """A lever under which no larger micro-batch fits is not mentioned."""
    assert advice(Point(PLAIN, 48), not_allowed=[(Levers(precision="bf16"), 48), (Levers(precision="fp16"), 24)]) == ()


def test_other_numerics_are_measured_by_what_fits() -> None:
    """A setting that was chosen below the largest size for its speed is not promised what fits already."""
    assert advice(Point(PLAIN, 3), largest=8, not_allowed=[(Levers(precision="bf16"), 8)]) == ()
    assert len(advice(Point(PLAIN, 3), largest=6, not_allowed=[(Levers(precision="bf16"), 8)])) == 1
