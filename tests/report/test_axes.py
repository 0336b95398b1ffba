"""Axes: ticks are round and enclose what is drawn, values keep their order, and texts do not run into one another."""

from __future__ import annotations

from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.report.axes import (
    BOTTOM_PX,
    BYTES,
    LEFT_PX,
    LETTER_PX,
    RATES,
    RIGHT_PX,
    SECONDS,
    TOP_PX,
    across_axis,
    doubling_axis,
    events_axis,
    fitting,
    nice_ticks,
    upright_axis,
)

POSITIVE = st.floats(1e-6, 1e15)


@given(POSITIVE, POSITIVE)
def test_ticks_enclose_the_values(one: float, other: float) -> None:
    """The first tick is not above the lowest value and the last one not below the highest, and there are 3 to 8 of them."""
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low * (1 + 1e-6) and ticks[-1] >= high * (1 - 1e-6)
    assert 3 <= len(ticks) <= 8 and ticks == sorted(set(ticks))


@given(POSITIVE, st.floats(1.001, 1000))
def test_ticks_are_round(low: float, factor: float) -> None:
    """Neighbouring ticks are 1, 2 or 5 times a power of ten apart."""
    ticks = nice_ticks(low, low * factor)
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    leading = step / 10 ** int(f"{step:e}".partition("e")[2])
    assert any(isclose(leading, digit, rel_tol=1e-6) for digit in (1, 2, 5, 10))


@pytest.mark.parametrize(("value", "expected"), [(0, [-1.0, -0.5, 0.0, 0.5, 1.0]), (7, [6.0, 6.5, 7.0, 7.5, 8.0])])
def test_a_single_value_has_room(value: float, expected: list[float]) -> None:
    """A single value lies between ticks, even where it is nothing."""
    assert nice_ticks(value, value) == expected


@pytest.mark.parametrize(("largest", "name"), [(0, "B"), (1023, "B"), (2**20, "MiB"), (3 * 2**30, "GiB"), (2**50, "TiB")])
def test_unit_fits_the_largest(largest: float, name: str) -> None:
    """The unit is the largest one of which there is at least one."""
    assert fitting(BYTES, largest).name == name


def test_unit_stands_with_the_name() -> None:
    """An axis is named with its unit, and its ticks are numbers in that unit."""
    axis = across_axis([3 * 2**30], "peak", BYTES)
    assert axis.label == "peak (GiB)" and [text for _, text in axis.ticks] == ["0", "1", "2", "3"]
    assert upright_axis([0.25], "step", SECONDS).label == "step (ms)"
    assert upright_axis([5000], "", RATES).label == "thousand samples/s"


def test_axis_may_begin_above_zero() -> None:
    """Where only differences matter, the axis begins near the lowest value, with digits that tell ticks apart."""
    axis = across_axis([6.81 * 2**30, 7.9 * 2**30], "peak", BYTES, from_zero=False)
    assert [text for _, text in axis.ticks] == ["6.5", "7.0", "7.5", "8.0"]


@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=20), st.booleans())
def test_values_lie_inside_the_frame(values: list[float], from_zero: bool) -> None:
    """Every value lies inside the frame, on level axes and on upright ones."""
    across = across_axis(values, "", BYTES, from_zero=from_zero)
    up = upright_axis(values, "", BYTES, from_zero=from_zero)
    assert all(LEFT_PX - 0.1 <= across.at(value) <= RIGHT_PX + 0.1 for value in values)
    assert all(TOP_PX - 0.1 <= up.at(value) <= BOTTOM_PX + 0.1 for value in values)


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=20))
def test_texts_of_doublings_stay_apart(sizes: list[int]) -> None:
    """On an axis of doublings there is at least one tick, and no text runs into the next one."""
    axis = doubling_axis(sizes, "micro-batch")
    assert axis.ticks and all(LEFT_PX <= axis.at(size) <= RIGHT_PX for size in sizes)
    for (value, text), (later, other) in pairwise(axis.ticks):
        assert axis.at(later) - axis.at(value) >= (len(text) + len(other)) / 2 * LETTER_PX


@pytest.mark.parametrize(
    ("sizes", "texts"), [([4, 64], ["4", "8", "16", "32", "64"]), ([37], ["37"]), ([40, 50], ["40", "50"])]
)
def test_ticks_of_doublings(sizes: list[int], texts: list[str]) -> None:
    """Ticks are powers of two, or the sizes themselves where there are less than two powers among them."""
    assert [text for _, text in doubling_axis(sizes, "").ticks] == texts


@pytest.mark.parametrize("num", [1, 2, 7, 999, 1234, 10**7])
def test_events_fill_the_axis(num: int) -> None:
    """An axis of events ends at the last one, and its ticks are whole numbers of them."""
    axis = events_axis(num, "events")
    assert axis.at(num) == RIGHT_PX and all(value == int(value) <= num for value, _ in axis.ticks)
