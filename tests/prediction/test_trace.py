"""Traces put in order: sums of gradients that are made in place."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from autoaccum.prediction.fake_tensors import fake_trace

from .cases import BLOCK, Case, live_bytes


class Forked(nn.Module):
    """Wide values that two layers use, so that two gradients are added up; the values are there until after that."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.left, self.right = nn.Linear(4, 256), nn.Linear(256, 4), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.widen(x))
        return (self.left(wide) + self.right(wide)).mean()


def test_sums_in_place_take_no_block() -> None:
    """With sums in place, the sum of two gradients takes the block of the first, and the peak is lower by it."""
    workload = Case(Forked(), torch.randn(4, 4)).workload()
    apart, in_place = (fake_trace(workload, 512, host_batch=False, sums_in_place=each) for each in (False, True))
    wide = 512 * 256 * 4
    assert 0.95 * wide <= max(live_bytes(apart)) - max(live_bytes(in_place)) <= wide
    assert len(apart.events) - len(in_place.events) == 2 * 4  # of four micro-batches


def test_sums_in_place_leave_a_sound_trace(few: Case) -> None:
    """With sums in place, blocks are still allocated before they are freed and never twice, and phases stay in order."""
    trace = fake_trace(few.workload(), 2, host_batch=False, sums_in_place=True)
    alive: set[int] = set()
    for event in trace.events:
        assert (event not in alive) if event >= 0 else (~event in alive)
        (alive.add if event >= 0 else alive.remove)(event if event >= 0 else ~event)
    starts = [mark.event for mark in trace.marks]
    assert starts == sorted(starts) and starts[-1] <= len(trace.events)


def test_sums_in_place_are_what_the_allocator_sees() -> None:
    """With sums in place the peak of a backward pass is the one that the CPU allocator's own log shows, within 1 %."""
    model, batch = Forked(), torch.randn(2048, 4)

    def logged() -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model(batch).backward()
        assert profiler.profiler is not None
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return max(accumulate(sizes))

    def predicted(sums_in_place: bool) -> int:
        case = Case(model, batch, {"optimizer": partial(SGD, lr=0.0)})
        trace = fake_trace(case.workload(), 2048, host_batch=True, sums_in_place=sums_in_place)
        end = next(mark.event for mark in trace.marks if mark[2:] == (0, 1))
        held = live_bytes(trace)[:end]
        return max(held) - sum(-(-p.numel() * 4 // BLOCK) * BLOCK for p in model.parameters()) - 2048 * 4 * 4

    assert predicted(sums_in_place=True) == pytest.approx(logged(), rel=0.01)
    assert predicted(sums_in_place=False) > 1.3 * logged()
