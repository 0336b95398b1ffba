"""Which micro-batch fits a GPU that is not here, within every bound of the call."""

from __future__ import annotations

import pytest

from autoaccum.prediction import gpu_traces
from autoaccum.prediction.gpu_names import gpu_for

from ..predictions import SMALL, predict


def test_multiple_of_holds() -> None:
    """Every micro-batch but the last is a multiple, and so is the limit."""
    found = predict(multiple_of=64)
    assert all(size % 64 == 0 for size in found.micro_batch_sizes[:-1]) and found.max_micro_batch % 64 == 0
    assert sum(found.micro_batch_sizes) == 10_000_000


def test_equal_micro_batches_are_equal() -> None:
    """One size for all micro-batches divides the target, and fits."""
    found = predict(100_000, equal_micro_batches=True, budget="1GiB")
    assert len(set(found.micro_batch_sizes)) == 1 and found.accumulation_steps > 1
    assert found.predicted_peak_bytes is not None and found.predicted_peak_bytes <= found.budget_bytes


def test_equal_micro_batches_take_few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size for all is found without replaying every size below the limit."""
    sizes: list[int] = []
    true = gpu_traces.replay
    monkeypatch.setattr(gpu_traces, "replay", lambda *args, **more: (sizes.append(1), true(*args, **more))[1])
    predict(100_000, equal_micro_batches=True, budget="1GiB")
    assert len(sizes) <= 40


def test_callers_bound_holds() -> None:
    """No micro-batch is above the caller's bound, which the plan names as the limit."""
    found = predict(max_micro_batch=1000)
    assert (found.micro_batch, found.max_micro_batch, found.limited_by) == (1000, 1000, "caller")


def test_world_size_divides_the_target() -> None:
    """Over eight ranks each takes its share, and the plan's schedules sum to the target."""
    found = predict(10_000_001, world_size=8)
    assert (found.world_size, found.rank, sum(found.micro_batch_sizes)) == (8, 0, 1_250_001)
    assert sum(sum(found.schedule(rank)) for rank in range(8)) == 10_000_001


def test_budget_is_held() -> None:
    """With a budget the peak, context included, stays inside it."""
    half, whole = predict(budget="50%"), predict()
    assert half.budget_bytes == gpu_for(SMALL).total_bytes // 2
    assert half.predicted_peak_bytes is not None and half.predicted_peak_bytes <= half.budget_bytes
    assert half.max_micro_batch < whole.max_micro_batch


def test_more_memory_is_never_less_rows() -> None:
    """A larger budget does not lower the micro-batch."""
    found = [predict(budget=f"{gib}GiB").max_micro_batch for gib in (2, 5, 11)]
    assert found == sorted(found) and found[0] < found[-1]
