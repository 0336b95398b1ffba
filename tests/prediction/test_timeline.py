"""One optimizer step's memory in few points: the peak, and where the phases begin, are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.forecast import in_blocks
from autoaccum.prediction.growth import Growth, growth_of
from autoaccum.prediction.timeline import timeline_of
from autoaccum.prediction.trace import KINDS, Mark, Trace
from autoaccum.records import Phase, Timeline, from_json, to_json
from autoaccum.workload import Workload

MOST_POINTS = 400
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")


def as_asked(sizes: Any) -> Any:
    """No rounding."""
    return sizes


def growth(counts: Sequence[int], spike: int | None = None) -> Growth:
    """Two windows of two micro-batches whose phases allocate and free so many blocks each; one of them is a large one.

    Args:
        counts: Blocks of each phase of one micro-batch, and of the optimizer's step.
        spike: The block, of all of them, that is the large one.
    """
    events: list[int] = []
    marks: list[Mark] = []
    block = 0
    for window in range(2):
        for micro_batch in range(2):
            for phase, count in zip(PHASES[:3], counts, strict=False):
                marks.append(Mark(len(events), phase, window, micro_batch))
                blocks = range(block, block + count)
                events += [event for each in blocks for event in (each, ~each)]
                block += count
        marks.append(Mark(len(events), "optimizer", window, 1))
        blocks = range(block, block + counts[3])
        events += [event for each in blocks for event in (each, ~each)]
        block += counts[3]

    def trace_at(rows: int) -> Trace:
        sizes = tuple(8 * rows * (1000 if each == spike else 1 + each % 7) for each in range(block))
        return Trace(
            rows=rows,
            events=tuple(events),
            sizes=sizes,
            kinds=tuple(KINDS[each % len(KINDS)] for each in range(block)),
            marks=tuple(marks),
        )

    return growth_of(trace_at)


def drawn(of: Growth, rows: int = 16, limit_bytes: int | None = None) -> Timeline:
    return timeline_of(of, rows, as_asked, title="one step", limit_bytes=limit_bytes)


def totals(timeline: Timeline) -> list[int]:
    """Bytes held at each point, of all kinds."""
    return [sum(at_once) for at_once in zip(*timeline.held_bytes.values(), strict=True)]


def last_window(of: Growth, rows: int) -> np.ndarray[Any, Any]:
    """Bytes held after each event of the last optimizer step."""
    start = next(mark.event for mark in of.marks if mark.window == of.marks[-1].window)
    return of.live(rows, as_asked)[start:]


counts = st.lists(st.integers(1, 700), min_size=4, max_size=4)


def test_short_step_is_kept_whole() -> None:
    """A step of a few hundred events is drawn with all of them, in order."""
    of = growth((5, 20, 30, 10))
    assert totals(drawn(of)) == last_window(of, 16).tolist()


@given(counts, st.data())
def test_peak_is_kept(counts: list[int], data: st.DataObject) -> None:
    """Wherever in a step the most is held, however many events it has, that much is in the picture."""
    of = growth(counts, spike=data.draw(st.integers(0, 2 * (2 * sum(counts[:3]) + counts[3]) - 1)))
    assert max(totals(drawn(of))) == last_window(of, 16).max()


@given(counts)
def test_points_are_few(counts: list[int]) -> None:
    """A step of thousands of events has a few hundred points, as many for every kind."""
    found = drawn(growth(counts))
    assert set(found.held_bytes) == set(KINDS)
    (count,) = {len(held) for held in found.held_bytes.values()}
    assert 1 <= count <= MOST_POINTS + 8


@given(counts)
def test_every_point_is_one_of_the_step(counts: list[int]) -> None:
    """Points are events of the step in their order, none is made up or averaged."""
    of = growth(counts)
    whole, kept = last_window(of, 16).tolist(), totals(drawn(of))
    at = iter(whole)
    assert all(value in at for value in kept)


@given(counts)
def test_phases_are_in_order(counts: list[int]) -> None:
    """Both micro-batches' phases and the optimizer's step begin one after the other, the first of them at the start."""
    found = drawn(growth(counts))
    assert [phase for _, phase in found.phases] == [*PHASES[:3], *PHASES[:3], "optimizer"]
    begins = [point for point, _ in found.phases]
    assert begins == sorted(begins) and begins[0] == 0 and begins[-1] < len(totals(found))


@given(counts)
def test_phase_begins_at_its_own_event(counts: list[int]) -> None:
    """Where a phase begins, what is held is what was held at that event of the step."""
    of = growth(counts)
    marks = [mark for mark in of.marks if mark.window == 1]
    whole, found = last_window(of, 16), drawn(of)
    for mark, (point, phase) in zip(marks, found.phases, strict=True):
        assert phase == mark.phase
        assert totals(found)[point] == whole[mark.event - marks[0].event]


def test_only_the_last_step_is_drawn() -> None:
    """What the first step did, when there was no optimizer state yet, is left out."""
    of = growth((5, 20, 30, 10), spike=3)
    assert max(totals(drawn(of))) < of.live(16, as_asked).max()


def test_rows_and_rounding_are_those_asked_for() -> None:
    """The same step with more rows holds more, and what is held is rounded as the memory's owner does."""
    of = growth((5, 20, 30, 10))
    assert max(totals(drawn(of, 32))) == 2 * max(totals(drawn(of, 16)))
    rounded = timeline_of(of, 16, in_blocks, title="one step", limit_bytes=None)
    assert max(totals(rounded)) == -(-max(totals(drawn(of, 16))) // 512) * 512


def test_phase_without_events_has_its_place() -> None:
    """A phase at the very end that allocates nothing is still in the picture, within it."""
    found = drawn(growth((3, 4, 5, 0)))
    assert found.phases[-1][1] == "optimizer"
    assert found.phases[-1][0] <= len(totals(found))


def test_timeline_is_a_record() -> None:
    """Title and limit are kept, and it goes through JSON unchanged."""
    found = drawn(growth((5, 20, 30, 10)), limit_bytes=12345)
    assert (found.title, found.limit_bytes) == ("one step", 12345)

    class Holder(Timeline, frozen=True, kw_only=True, tag_field="record", tag="holder"):
        schema_version: int = 1

    held = Holder(title=found.title, held_bytes=found.held_bytes, phases=found.phases, limit_bytes=found.limit_bytes)
    assert from_json(to_json(held), Holder) == held


def test_traced_step_holds_what_a_prediction_says() -> None:
    """Of a real model, the highest point of the last step is the predicted peak."""

    def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()

    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    workload = Workload(model, torch.ones(2, 32), training_step=mean_of, optimizer=torch.optim.AdamW)
    of = growth_of(lambda rows: fake_trace(workload, rows, host_batch=False))
    found = timeline_of(of, 48, in_blocks, title="one step", limit_bytes=None)
    assert max(totals(found)) == of.live(48, in_blocks).max()
    assert {"weights", "gradients", "optimizer state", "batch"} <= {
        kind for kind, held in found.held_bytes.items() if max(held)
    }
