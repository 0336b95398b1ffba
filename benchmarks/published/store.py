"""Writes the traces that tests/prediction/test_published_peaks.py replays: run by the family's interpreter.

    python benchmarks/published/store.py cnn tests/prediction/traces

A trace is gzipped JSON of a few kilobytes. `steps`, in order of time: 0 allocates the next block, a number above 0
frees the block that was allocated so many blocks before the next one. `sizes`: of each block, an index into
`different_sizes`, in bytes as asked for.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from cases import Case, read_cases
from environments import versions
from predict import recorded

from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.trace import Trace

STORED = (
    "distilgpt2-adamw-b47-3060-cac7",
    "opt-125m-adamw-b55-3060-71b6",  # at the card's edge
    "t5-small-adam-b21-3060-f414",
    "opt-350m-adamw-b26-4060-8ef7",  # died
    "convnexttiny-sgd-b516-3060-74bf",
    "regnety400mf-adam-b698-4060-6d34",
    "resnet101-sgd-b351-3060-c2f6",
    "resnet101-sgd-b399-4060-d75e",  # died
)
SOURCE = "https://github.com/Stone-ResearchLife/xMem (MIT)"


def main() -> None:
    """Write the stored traces of a family."""
    family, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for case in read_cases():
        if case.family == family and case.id in STORED:
            text = json.dumps(_described(case) | _shortened(recorded(case)), separators=(",", ":"))
            path = folder / f"{case.id}.json.gz"
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{path.name}: {path.stat().st_size:,} bytes")


def _described(case: Case) -> dict[str, Any]:
    return {
        "id": case.id,
        "source": f"{SOURCE}, {case.source_path}",
        "model": case.model,
        "optimizer": case.optimizer,
        "batch_size": case.batch_size,
        "gpu": gpu_for(case.gpu).name,
        "published_peak_bytes": case.ground_peak_bytes,
        "out_of_memory": case.out_of_memory,
        "recorded_with": versions(),
    }


def _shortened(trace: Trace) -> dict[str, list[int]]:
    different = sorted(set(trace.sizes))
    index_of = {size: index for index, size in enumerate(different)}
    place: dict[int, int] = {}  # of a block in the order of allocation
    steps = []
    for event in trace.events:
        if event >= 0:
            place[event] = len(place)
        steps.append(0 if event >= 0 else len(place) - place[~event])
    return {"different_sizes": different, "sizes": [index_of[trace.sizes[block]] for block in place], "steps": steps}


if __name__ == "__main__":
    main()
