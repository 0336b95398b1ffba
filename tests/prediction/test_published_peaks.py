"""What the allocator makes of recorded training runs, against the peaks that others measured for these runs on real GPUs.

The traces are stored (benchmarks/published/store.py), so that these tests hold the allocator, the table of GPUs and the
limit to the measurements; that recording gives such traces is held by benchmarks/accuracy_gpu.py. A published peak is what
the whole GPU held, less what it held before training: up to 20 MiB of it are kernels, loaded outside of the allocator.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from autoaccum.prediction.allocator import Replay, replay
from autoaccum.prediction.gpu_names import gpu_for

TRACES = Path(__file__).parent / "traces"
TRANSFORMERS = ("distilgpt2-adamw-b47-3060-cac7", "opt-125m-adamw-b55-3060-71b6", "t5-small-adam-b21-3060-f414")
CONVOLUTIONAL = ("convnexttiny-sgd-b516-3060-74bf", "regnety400mf-adam-b698-4060-6d34", "resnet101-sgd-b351-3060-c2f6")
DIED = ("opt-350m-adamw-b26-4060-8ef7", "resnet101-sgd-b399-4060-d75e")
AT_THE_EDGE = "opt-125m-adamw-b55-3060-71b6"


class Published(NamedTuple):
    """A recorded run: its allocations as `replay` takes them, its GPU, and the peak that was measured on it."""

    events: list[int]
    sizes: list[int]
    gpu: str
    peak_bytes: int
    is_out_of_memory: bool


def published(name: str) -> Published:
    """Read a stored run; how allocations are written is said in benchmarks/published/store.py."""
    with gzip.open(TRACES / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        stored: dict[str, Any] = json.load(file)
    events: list[int] = []
    made = 0
    for back in stored["steps"]:
        events.append(~(made - back) if back else made)
        made += not back
    return Published(
        events=events,
        sizes=[stored["different_sizes"][index] for index in stored["sizes"]],
        gpu=stored["gpu"],
        peak_bytes=stored["published_peak_bytes"],
        is_out_of_memory=stored["out_of_memory"],
    )


def replayed(run: Published) -> Replay:
    """What the run's GPU would come to, at the most that its allocator may reserve."""
    return replay(run.events, run.sizes, limit_bytes=gpu_for(run.gpu).usable_bytes)


def test_each_stored_trace_is_tested() -> None:
    """No stored run is left out below."""
    assert {path.name.removesuffix(".json.gz") for path in TRACES.iterdir()} == {*TRANSFORMERS, *CONVOLUTIONAL, *DIED}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_is_within_one_percent(name: str) -> None:
    """The predicted reserved memory of a transformer is within 1 % of the published peak."""
    run = published(name)
    assert replayed(run).peak_reserved_bytes == pytest.approx(run.peak_bytes, rel=0.01)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional_network_is_within_eight_percent(name: str) -> None:
    """The predicted reserved memory of a convolutional network is within 8 % of the published peak."""
    run = published(name)
    assert replayed(run).peak_reserved_bytes == pytest.approx(run.peak_bytes, rel=0.08)


@pytest.mark.parametrize("name", [*TRANSFORMERS, *CONVOLUTIONAL])
def test_run_that_was_trained_fits(name: str) -> None:
    """A run that reached its end on the GPU is predicted to fit there."""
    assert replayed(published(name)).fits


@pytest.mark.parametrize("name", DIED)
def test_run_that_died_does_not_fit(name: str) -> None:
    """A run that ran out of memory on the GPU is predicted to run out of memory there."""
    run = published(name)
    assert run.is_out_of_memory
    assert not replayed(run).fits


def test_run_at_the_edge_gives_its_cache_back() -> None:
    """A run that reserved 11 560 of 12 037 MiB fits only because the allocator gave its cache back, once."""
    assert replayed(published(AT_THE_EDGE)).flushes == 1


def test_run_at_the_edge_would_reserve_more_on_a_larger_gpu() -> None:
    """Without a limit the run at the edge would have reserved over 1 % more than was measured."""
    run = published(AT_THE_EDGE)
    assert replay(run.events, run.sizes).peak_reserved_bytes > 1.01 * run.peak_bytes
