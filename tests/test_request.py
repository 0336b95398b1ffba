"""The numbers of one call: checked before anything runs, and what follows from them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoaccum
from autoaccum.errors import InvalidRequestError
from autoaccum.request import Request, checked, largest_of_use, sizes_of_use
from autoaccum.schedule import split_rows, steps_for


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_batch": 0}, "target_batch=0"),
        ({"target_batch": 7.5}, "target_batch=7.5"),
        ({"target_batch": "64"}, "target_batch='64'"),
        ({"target_batch": True}, "target_batch=True"),
        ({"target_batch": 3}, "smaller than world_size=4"),
        ({"max_micro_batch": 0}, "max_micro_batch=0"),
        ({"max_micro_batch": -1}, "max_micro_batch=-1"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"multiple_of": None}, "multiple_of=None"),
        ({"objective": "speed"}, 'objective=\'speed\'.*"throughput" or "memory"'),
        ({"objective": None}, "objective=None"),
        ({"shares": "fair"}, 'shares=\'fair\'.*"equal" or "proportional"'),
        ({"time_budget_s": 0}, "time_budget_s=0"),
        ({"time_budget_s": -1.0}, "time_budget_s=-1.0"),
        ({"time_budget_s": float("nan")}, "time_budget_s=nan"),
        ({"time_budget_s": "60"}, "time_budget_s='60'"),
        ({"levers": "fast"}, "levers='fast'"),
        ({"levers": None}, "levers=None"),
        ({"levers": 3}, "levers=3"),
        ({"levers": ["checkpointing", "speed"]}, "levers='speed'"),
        ({"levers": {"speed": ["on"]}}, "levers='speed'"),
        ({"levers": {"checkpointing": ["some"]}}, "its levels are off, selective, full"),
        ({"levers": {"checkpointing": []}}, "its levels are off, selective, full"),
        ({"levers": {"checkpointing": "full", "blocks": "h.0"}}, "expected a list of names of modules"),
        ({"levers": {"checkpointing": "full", "blocks": [1]}}, "expected a list of names of modules"),
    ],
)
def test_impossible_number_is_named(changes: dict[str, Any], said: str) -> None:
    """Each number that cannot be is refused with its name, its value and what was expected."""
    with pytest.raises(InvalidRequestError, match=said):
        checked(Request(**changes), world_size=4)


@pytest.mark.parametrize(
    "levers",
    [
        {"checkpointing": 3},
        {"checkpointing": None},
        {"checkpointing": [["full"]]},
        {"checkpointing": "full", "blocks": None},
        {"checkpointing": "full", "blocks": 3},
        [["checkpointing"]],
        [None],
        7,
        None,
        "",
    ],
)
def test_levers_of_any_shape_are_refused_by_autotune_in_words(levers: Any) -> None:
    """Whatever is given for levers, what is wrong with it is said, and no error comes from inside."""
    import torch

    with pytest.raises(InvalidRequestError, match="levers"):
        autoaccum.autotune(torch.nn.Linear(4, 2), torch.randn(2, 4), 8, device="virtual:1MiB", levers=levers)


@pytest.mark.parametrize("levers", ["none", "exact", "all", "offload", ["checkpointing"], {"precision": "bf16"}, [], {}])
def test_levers_that_can_be_are_taken_as_they_are(levers: Any) -> None:
    """A word, names, or levels by name: the request keeps them as they were written."""
    assert checked(Request(target_batch=8, levers=levers), 1).levers == levers


@pytest.mark.parametrize("value", [8, 8.0])
def test_whole_numbers_become_ints(value: Any) -> None:
    """A number that is whole is an int afterwards, in whatever type it came."""
    found = checked(Request(target_batch=value, max_micro_batch=value, multiple_of=value), 1)
    assert [type(number) for number in (found.target_batch, found.max_micro_batch, found.multiple_of)] == [int] * 3


def test_checked_request_keeps_every_number() -> None:
    """What is right passes through unchanged, all of it."""
    request = Request(
        target_batch=96,
        budget="2GiB",
        levers={"checkpointing": ["full"], "blocks": ["h.0"]},
        objective="memory",
        max_micro_batch=24,
        multiple_of=8,
        equal_micro_batches=True,
        time_budget_s=60.0,
        exact=False,
        predict=False,
        storage="sqlite:///x.db",
        cache="plans",
        seed=7,
    )
    assert checked(request, 2) == request
    assert checked(Request(), 1) == Request()


def test_request_goes_through_json() -> None:
    """A request reaches the worker process as JSON and is the same there."""
    request = Request(target_batch=96, levers={"checkpointing": ["full"], "blocks": ["h.0"]}, budget="80%")
    assert msgspec.json.decode(msgspec.json.encode(request), type=Request) == request


@pytest.mark.parametrize(
    ("share", "length", "largest", "found"),
    [
        (None, None, None, None),
        (48, None, None, (48, "target")),
        (None, 20, None, (20, "data")),
        (None, None, 7, (7, "caller")),
        (48, 20, 7, (7, "caller")),
        (48, 20, 32, (20, "data")),
        (8, 20, 32, (8, "target")),
        (8, 8, 8, (8, "target")),
        (9, 8, 8, (8, "data")),
    ],
)
def test_smallest_bound_is_the_one_that_counts(
    share: int | None, length: int | None, largest: int | None, found: Any
) -> None:
    """The target, the data and the caller bound the micro-batch, and the plan says which one did; the target at a draw."""
    assert largest_of_use(Request(max_micro_batch=largest), share, length) == found


shares = st.integers(1, 3000)


@given(shares, st.integers(1, 3000), st.integers(1, 16), st.booleans())
def test_sizes_of_use_are_ascending_and_bounded(share: int, top: int, multiple_of: int, equal: bool) -> None:
    """There is always a size to try, none above the bound, and none twice."""
    request = Request(multiple_of=multiple_of, equal_micro_batches=equal)
    sizes = list(sizes_of_use(request, share, min(top, share)))
    assert sizes and sizes == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] <= min(top, share)


@given(shares, st.integers(1, 16))
def test_every_division_of_the_target_has_its_size(share: int, multiple_of: int) -> None:
    """Whatever limit memory sets, the largest micro-batch of the division for that limit is among the sizes."""
    sizes = set(sizes_of_use(Request(multiple_of=multiple_of), share, share))
    for limit in {multiple_of, share, *range(multiple_of, share + 1, max(multiple_of, share // 20))}:
        if limit >= min(multiple_of, share):
            assert max(split_rows(share, steps_for(share, limit, multiple_of), multiple_of)) in sizes


@given(shares, st.integers(1, 16))
def test_sizes_of_use_are_few_for_large_targets(share: int, multiple_of: int) -> None:
    """Between two divisions of the target nothing is tried, so that there are about twice the square root of it."""
    assert len(sizes_of_use(Request(multiple_of=multiple_of), share, share)) <= 2 * share**0.5 + 2


@given(st.integers(2, 3000), st.data())
def test_bound_that_is_no_division_is_tried_as_well(share: int, data: st.DataObject) -> None:
    """The caller's own bound is known to fit where it does, though the target is not divided so."""
    top = data.draw(st.integers(1, share))
    assert sizes_of_use(Request(), share, top)[-1] == top


def test_equal_micro_batches_leave_every_multiple_open() -> None:
    """Where one size must serve, every multiple up to the bound is a size whose limit may be asked."""
    assert list(sizes_of_use(Request(equal_micro_batches=True, multiple_of=8), 100, 50)) == [8, 16, 24, 32, 40, 48]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"equal_micro_batches": True}, "equal_micro_batches=True"),
        ({"objective": "memory"}, 'objective="memory"'),
        ({"target_batch": None}, "target_batch=None"),
    ],
)
def test_what_does_not_go_with_shares_in_proportion_is_named(changes: dict[str, Any], said: str) -> None:
    """The error names both and the way out."""
    with pytest.raises(InvalidRequestError, match=f'shares="proportional" does not go with {said}.*use shares="equal"'):
        checked(Request(**{"target_batch": 8, "shares": "proportional", **changes}), world_size=2)


def test_target_that_cannot_be_equal_on_all_ranks_is_refused_at_the_door() -> None:
    """Before a search that could find no division, with near targets that have one."""
    with pytest.raises(InvalidRequestError, match="252 = 2 x 18 x 7, 259 = 1 x 37 x 7, 266 = 2 x 19 x 7"):
        checked(Request(target_batch=256, max_micro_batch=2, equal_micro_batches=True), 7)
    assert checked(Request(target_batch=256, max_micro_batch=2), 7).target_batch == 256
