"""What a search costs: trials and failures until the exact limit is known, by brute force checked.

    python benchmarks/search_cost.py

A model on a virtual device whose capacity is set so that exactly `limit` rows fit; `autoaccum.probe` without any bound.
"""

from __future__ import annotations

import json
import time

import torch
from torch import nn

import autoaccum
from autoaccum.records import Fit


def build() -> nn.Module:
    """A small MLP whose memory the batch dominates."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))


def peak_bytes(rows: int) -> int:
    """Measured peak at this size, with memory to spare."""
    result = autoaccum.probe(build(), torch.randn(4, 64), device="virtual:8GiB", max_micro_batch=rows, multiple_of=rows)
    assert result.measured_peak_bytes is not None
    return result.measured_peak_bytes


def main() -> None:
    """Print one row per limit."""
    rows = []
    for limit in (60, 100, 365, 1000, 2000):
        capacity = peak_bytes(limit)
        begun = time.perf_counter()
        result = autoaccum.probe(build(), torch.randn(4, 64), device=autoaccum.VirtualDevice(capacity))
        expected = limit
        while peak_bytes(expected + 1) <= capacity:  # rounding to 512 bytes can let a row more in
            expected += 1
        rows.append(
            {
                "limit": expected,
                "answer": result.max_micro_batch,
                "trials": len(result.trials),
                "failures": sum(not isinstance(trial.outcome, Fit) for trial in result.trials),
                "seconds": round(time.perf_counter() - begun, 2),
            }
        )
        assert result.max_micro_batch == expected, rows[-1]
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
