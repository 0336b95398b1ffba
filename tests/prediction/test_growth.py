"""From a few traces to every size: exact wherever sizes are polynomials, and refused where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.forecast import in_blocks
from autoaccum.prediction.growth import Growth, NotAffineError, growth_of
from autoaccum.prediction.trace import KINDS, Kind, Mark, Trace
from autoaccum.workload import Workload

pytestmark = pytest.mark.slow

SIZES = (1, 4, 7, 16, 64)
TraceAt = Callable[[int], Trace]


def as_asked(sizes: Any) -> Any:
    """No rounding."""
    return sizes


class Counting:
    """Traces by a formula, and which sizes were asked for."""

    def __init__(self, *sizes_of_blocks: Callable[[int], int], kinds: tuple[Kind, ...] = ()) -> None:
        self.formulas, self.kinds, self.rows = sizes_of_blocks, kinds, list[int]()

    def __call__(self, rows: int) -> Trace:
        self.rows.append(rows)
        blocks = range(len(self.formulas))
        return Trace(
            rows=rows,
            events=(*blocks, *(~block for block in blocks)),
            sizes=tuple(formula(rows) for formula in self.formulas),
            kinds=self.kinds or ("temporaries",) * len(blocks),
        )


def branching(rows: int) -> Trace:
    """One block more below three rows."""
    events = (0, 1, ~1, ~0) if rows < 3 else (0, ~0)
    return Trace(
        rows=rows,
        events=events,
        sizes=(8 * rows, 16)[: len(events) // 2],
        kinds=("batch", "temporaries")[: len(events) // 2],
    )


def looping(rows: int) -> Trace:
    """A block for each row."""
    return Trace(rows=rows, events=tuple(range(rows)), sizes=(8,) * rows, kinds=("temporaries",) * rows)


# -- by formula


@given(constant=st.integers(0, 10**9), slope=st.integers(0, 10**6), rows=st.integers(1, 10**6))
def test_straight_lines_are_exact(constant: int, slope: int, rows: int) -> None:
    """A size with a constant and a part for each row is exact at every number of rows, from two traces."""
    trace_at = Counting(lambda n: constant + slope * n)
    assert growth_of(trace_at).sizes(rows).tolist() == [constant + slope * rows]
    assert len(trace_at.rows) == 2 and max(trace_at.rows) < 10


@given(a=st.integers(0, 10**4), b=st.integers(-50, 10**4), c=st.integers(1, 10**4), rows=st.integers(1, 10**4))
def test_parabolas_are_exact(a: int, b: int, c: int, rows: int) -> None:
    """A size that grows with the square is exact at every number of rows, once a negative constant part gives it away."""

    def size(n: int) -> int:
        return max(a + b * n + c * n * n, 0)

    if min(a + b * n + c * n * n for n in range(1, 10)) < 0:
        return  # not a size
    trace_at = Counting(size, lambda n: 512)
    growth = growth_of(trace_at)
    if len(trace_at.rows) > 2:  # two traces of a parabola with a large constant part look like a line
        assert growth.sizes(rows).tolist() == [size(rows), 512]
    else:
        assert a >= 2 * c


@pytest.mark.parametrize("below", [1, 2])
def test_size_of_fewer_than_the_rows(below: int) -> None:
    """A size of rows less one or two is a straight line, with nothing below zero."""
    trace_at = Counting(lambda n: 8 * (n - below))
    growth = growth_of(trace_at)
    assert [int(growth.sizes(rows)[0]) for rows in (1, 2, 100)] == [max(0, 8 * (rows - below)) for rows in (1, 2, 100)]


@pytest.mark.parametrize("size", [lambda n: n**3, lambda n: 2**n], ids=["cube", "power"])
def test_other_sizes_are_refused(size: Callable[[int], int]) -> None:
    """A size that is no polynomial of degree two at most is refused, not guessed."""
    with pytest.raises(NotAffineError, match="no polynomial"):
        growth_of(Counting(size))


def test_half_of_the_rows_is_no_constant() -> None:
    """A size of half the rows, as mixed batches have it, is exact at even numbers of rows."""
    growth = growth_of(Counting(lambda n: 8 * (n // 2)))
    assert [growth.sizes(rows).tolist() for rows in (10, 1000)] == [[40], [4000]]


def test_shrinking_size_is_not_taken_for_a_line() -> None:
    """A size that falls with the rows calls for more traces and is then refused or exact."""
    trace_at = Counting(lambda n: 240 // n)
    with pytest.raises(NotAffineError):
        growth_of(trace_at)


def test_branch_of_the_smallest_sizes_is_left_out() -> None:
    """Where only sizes below three rows do something else, the others are exact from two more traces."""
    assert growth_of(branching).sizes(10).tolist() == [80]


def test_events_that_grow_are_refused() -> None:
    """A block for each row cannot be told from a few traces; the message says how many events there were."""
    with pytest.raises(NotAffineError, match=r"2, .+ events at 2, .+ rows"):
        growth_of(looping)


@pytest.mark.parametrize("multiple_of", [1, 4, 24])
def test_only_multiples_are_traced(multiple_of: int) -> None:
    """Every traced size is a multiple, and every size between is exact all the same."""
    trace_at = Counting(lambda n: 16 + 8 * n, lambda n: 4 * n * n)
    growth = growth_of(trace_at, multiple_of)
    assert len(trace_at.rows) >= 4 and {rows % multiple_of for rows in trace_at.rows} == {0}
    assert growth.sizes(5 * multiple_of + 1).tolist() == [16 + 8 * (5 * multiple_of + 1), 4 * (5 * multiple_of + 1) ** 2]


def test_branch_beyond_the_traced_sizes_is_noticed_where_it_is_checked() -> None:
    """A branch that begins above the first traced sizes escapes two traces, and not a checked growth."""

    def trace_at(rows: int) -> Trace:
        events = (0, ~0) if rows < 5 else (0, 1, ~1, ~0)
        return Trace(
            rows=rows, events=events, sizes=(8 * rows, 16)[: len(events) // 2], kinds=("batch",) * (len(events) // 2)
        )

    assert growth_of(trace_at).sizes(100).tolist() == [800]
    assert growth_of(trace_at, checked=True).sizes(100).tolist() == [800, 16]


@pytest.mark.parametrize(
    "size", [lambda n: 8 * n + 64, lambda n: 8 * (n // 2), lambda n: 4 * n * (n + 100)], ids=["line", "halves", "square"]
)
def test_checked_growth_is_exact_at_even_sizes(size: Callable[[int], int]) -> None:
    """Lines, halves and parabolas pass the check, and are exact at even numbers of rows."""
    growth = growth_of(Counting(size), checked=True)
    assert [growth.sizes(rows).tolist() for rows in (10, 1000)] == [[size(10)], [size(1000)]]


def test_error_of_a_trace_comes_out() -> None:
    """What tracing raises passes."""

    def trace_at(rows: int) -> Trace:
        raise KeyError("column")

    with pytest.raises(KeyError, match="column"):
        growth_of(trace_at)


def test_sizes_are_not_rounded_down() -> None:
    """Sizes of many terabytes keep every byte."""
    growth = growth_of(Counting(lambda n: 3 + 2**40 * n + 7 * n))
    assert int(growth.sizes(999)[0]) == 3 + 999 * (2**40 + 7)


def test_live_is_the_running_sum() -> None:
    """Live bytes rise with every allocation and fall with every free, rounded block by block."""
    growth = growth_of(Counting(lambda n: 100 * n, lambda n: 600))
    assert growth.live(6, as_asked).tolist() == [600, 1200, 600, 0]
    assert growth.live(6, in_blocks).tolist() == [1024, 2048, 1024, 0]


def test_split_is_what_is_held_then() -> None:
    """Held bytes by kind are those of the blocks that are alive after the event."""
    growth = growth_of(Counting(lambda n: 8 * n, lambda n: 40, kinds=("activations", "weights")))
    assert growth.split(10, 1, as_asked) == {**dict.fromkeys(KINDS, 0), "activations": 80, "weights": 40}
    assert growth.split(10, 2, as_asked) == {**dict.fromkeys(KINDS, 0), "weights": 40}


def test_phase_is_the_last_mark() -> None:
    """An event belongs to the last phase that began at or before it."""
    marks = (Mark(0, "data", 0, 0), Mark(2, "forward", 0, 0), Mark(2, "backward", 0, 0))
    traces = [Trace(rows=r, events=(0, 1, 2), sizes=(8, 8, 8), kinds=("batch",) * 3, marks=marks) for r in (2, 3)]
    growth = Growth(traces)
    assert [growth.phase_at(event) for event in (0, 1)] == ["data", "data"]
    assert growth.phase_at(2) in ("forward", "backward")


def test_workspace_of_another_gpu() -> None:
    """Only workspaces of the one size get the other size, at every number of rows."""
    trace_at = Counting(lambda n: 4096, lambda n: 4096, lambda n: 4096 * n, kinds=("workspaces", "weights", "workspaces"))
    growth = growth_of(trace_at)
    other = growth.with_workspace(4096, 1000)
    assert [other.sizes(rows).tolist() for rows in (1, 9)] == [[1000, 4096, 4096], [1000, 4096, 9 * 4096]]
    assert growth.sizes(9).tolist() == [4096, 4096, 9 * 4096]


def test_workspaces_that_pass_can_be_left_out() -> None:
    """Without passing workspaces, those given back at once are of no size, and those that are kept stay."""
    events = (0, 1, ~1, 2, ~2)
    traces = [
        Trace(rows=r, events=events, sizes=(8, 16 * r, 4 * r), kinds=("workspaces", "workspaces", "activations"))
        for r in (2, 3)
    ]
    without = Growth(traces).without_passing_workspaces()
    assert without is not None and without.sizes(5).tolist() == [8, 0, 20]
    assert without.without_passing_workspaces() is None or without.sizes(5).tolist() == [8, 0, 20]


def test_without_workspaces_there_is_nothing_to_leave_out() -> None:
    """A growth without workspaces has no variant."""
    assert growth_of(Counting(lambda n: n)).without_passing_workspaces() is None


# -- of models


def mlp() -> Workload:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
    return Workload(model, (torch.randn(4, 16), torch.randint(8, (4,))), loss_fn=F.cross_entropy)


def convolutional() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 25, 4)
    )
    return Workload(model, torch.randn(4, 3, 12, 12))


class Layer(nn.Module):
    """Attention over a few positions, checkpointed where it is wanted."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.linear, self.checkpointed = nn.LayerNorm(16), nn.Linear(16, 16), checkpointed

    def inner(self, x: Tensor) -> Tensor:
        x = self.norm(x).unsqueeze(1)
        return F.gelu(self.linear(F.scaled_dot_product_attention(x, x, x).squeeze(1)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Contrastive(nn.Module):
    """In-batch negatives: a matrix of rows times rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        similarity = self.left(x) @ self.right(x).t()
        return F.cross_entropy(similarity, torch.arange(len(x)))


class Differences(nn.Module):
    """Uses rows less one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[1:] - x[:-1]).square().mean()


class Rowwise(nn.Module):
    """A loop over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(row).square().mean() for row in x]).mean()


MODELS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "convolutional": convolutional,
    "attention": lambda: Workload(Layer(), torch.randn(4, 6, 16)),
    "checkpointed": lambda: Workload(Layer(checkpointed=True), torch.randn(4, 6, 16)),
    "contrastive": lambda: Workload(Contrastive(), torch.randn(4, 16)),
    "differences": lambda: Workload(Differences(), torch.randn(4, 16), optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9)),
}


def tracing(workload: Workload, **more: Any) -> TraceAt:
    return lambda rows: fake_trace(workload, rows, host_batch=False, **more)


@pytest.mark.parametrize(
    ("name", "in_place"),
    [
        *(pytest.param(name, False, marks=pytest.mark.slow if name == "attention" else ()) for name in MODELS),
        *(pytest.param(name, True, marks=() if name in ("mlp", "checkpointed") else pytest.mark.slow) for name in MODELS),
    ],
)
def test_growth_is_a_true_trace_at_every_size(name: str, in_place: bool) -> None:
    """What growth says of a size is what a trace of that size says: every event, every byte, every operation."""
    trace_at = tracing(MODELS[name](), sums_in_place=in_place)
    growth = growth_of(trace_at)
    for rows in SIZES:
        if name in ("differences", "convolutional") and rows == 1:
            continue  # the difference of one row is empty, and so is the gradient of its mean
        true = trace_at(rows)
        assert (growth.events, growth.kinds, growth.marks) == (true.events, true.kinds, true.marks)
        assert growth.sizes(rows).tolist() == list(true.sizes)
        if name != "contrastive":
            assert growth.flops(rows) == true.flops


@pytest.mark.parametrize("name", MODELS)
def test_split_sums_to_what_is_live(name: str) -> None:
    """At every event, what is held by kind sums to what is live."""
    growth = growth_of(tracing(MODELS[name]()))
    live, by_kind = growth.live(9, in_blocks), growth.by_kind(9, in_blocks)
    assert np.array_equal(by_kind.sum(axis=0), live) and by_kind.min() >= 0
    for event in range(0, len(growth.events), 17):
        split = growth.split(9, event, in_blocks)
        assert list(split.values()) == by_kind[:, event].tolist() and sum(split.values()) == live[event]


def test_start_is_before_the_first_forward() -> None:
    """At the start there are the weights and what lies on the host, and nothing else."""
    workload = mlp()
    growth = growth_of(lambda rows: fake_trace(workload, rows, host_batch=True))
    held = growth.split(10, growth.start_event, as_asked)
    assert {kind: size for kind, size in held.items() if size} == {
        "weights": (16 * 64 + 64 + 64 * 8 + 8) * 4,
        "batch": 10 * (16 * 4 + 8),
    }


def test_only_activations_and_batch_grow() -> None:
    """Weights, gradients and optimizer state are the same at every size; activations and batch grow in proportion."""
    growth = growth_of(tracing(mlp()))

    def totals(rows: int) -> dict[Kind, int]:
        sizes = growth.sizes(rows)
        return {kind: int(sum(s for s, k in zip(sizes, growth.kinds, strict=True) if k == kind)) for kind in KINDS}

    small, large = totals(10), totals(1000)
    assert {kind for kind in KINDS if small[kind] != large[kind]} == {"batch", "activations", "temporaries"}
    assert large["batch"] == 100 * small["batch"]
    assert 90 * small["activations"] < large["activations"] <= 100 * small["activations"]


def test_matrix_of_rows_times_rows_needs_more_traces() -> None:
    """A similarity matrix is exact at a size far beyond those traced, and grows with the square."""
    growth = growth_of(tracing(MODELS["contrastive"]()))
    assert 300 * 300 * 4 in growth.sizes(300).tolist()
    assert int(growth.live(2000, in_blocks).max()) > 3 * int(growth.live(1000, in_blocks).max())


def test_loop_over_rows_is_refused() -> None:
    """A model that loops over its rows does not allocate by a few lines, and is told by its numbers of events."""
    with pytest.raises(NotAffineError, match=r"\d+, \d+, .* events at .* rows"):
        growth_of(tracing(Workload(Rowwise(), torch.randn(4, 16))))


def test_loop_over_rows_is_searched_without_a_prediction() -> None:
    """Autotune finds the plan of such a model without a prediction, and says why in one line."""
    plan = autoaccum.autotune(Rowwise(), torch.randn(4, 16), 32, device="virtual:40KiB", progress=False, levers="none")
    (note,) = [warning for warning in plan.warnings if "No prediction" in warning]
    assert "events at" in note and "rows" in note and "\n" not in note
    assert (plan.predicted_peak_bytes, plan.micro_batch_sizes, plan.limited_by) == (None, (11, 11, 10), "memory")


def test_multiples_of_models() -> None:
    """A model that only takes multiples of eight rows is traced at those, and exact at all of them."""

    class Grouped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(-1, 8, 16).mean(1))

    workload = Workload(Grouped(16, 4), torch.randn(8, 16))
    growth = growth_of(tracing(workload), multiple_of=8)
    for rows in (8, 40):
        assert growth.sizes(rows).tolist() == list(fake_trace(workload, rows, host_batch=False).sizes)
