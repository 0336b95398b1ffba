"""How repeatable resident peaks are on the CPU, with glibc's usual thresholds and with the ones that probes run under.

    python benchmarks/cpu_peaks.py

Each setting runs in a process of its own: optimizer steps of a small transformer at sizes up and down, the peak of each and
its time. Printed: the largest distance of a peak from a straight line through all of them, the spread at one size, what the
usual settings need above the steady ones, and what the steady ones cost in time (paired: the same sizes in the same order).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time

SIZES = (2, 32, 16, 64, 8, 32, 64, 16, 128, 64, 32, 128)


def measure(steady: bool) -> None:
    """Print one JSON list of [size, peak_bytes, seconds]."""
    import numpy  # noqa: F401 - loaded before the first peak, as in any training process
    import torch
    from torch import nn

    from autoaccum.devices.cpu import CpuDevice

    device = CpuDevice()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    found = []

    def steps(size: int) -> None:
        batch = torch.randn(size, 64, 256)
        for _ in range(2):
            for _ in range(2):
                model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def run() -> None:
        steps(2)
        for size in SIZES:
            gc.collect()
            device.release()
            begun = time.perf_counter()
            with device.watched(()) as watch:
                steps(size)
            found.append([size, watch.peak_bytes, time.perf_counter() - begun])

    if steady:
        with device.steadied():
            run()
    else:
        run()
    print(json.dumps(found))


def main() -> None:
    """Run both settings and print the comparison as JSON."""
    import numpy as np

    runs = {}
    for name in ("usual", "steady"):
        out = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True).stdout
        runs[name] = np.array(json.loads(out))
    report = {}
    for name, rows in runs.items():
        sizes, peaks = rows[:, 0], rows[:, 1]
        line = np.polynomial.Polynomial.fit(sizes, peaks, 1)
        spreads = [np.ptp(peaks[sizes == size]) / peaks[sizes == size].min() for size in np.unique(sizes)]
        report[name] = {
            "mib_per_row": round(float(line.convert().coef[1]) / 2**20, 3),
            "largest_distance_from_the_line_frac": round(float(np.max(np.abs(peaks - line(sizes)) / peaks)), 4),
            "largest_spread_at_one_size_frac": round(float(max(spreads)), 4),
        }
    base = runs["steady"][:, 1].min() - report["steady"]["mib_per_row"] * 2 * 2**20
    extra = (runs["usual"][:, 1] - base) / (runs["steady"][:, 1] - base)
    large = runs["steady"][:, 0] >= 16
    report["usual_over_steady_batch_part"] = {
        "median": round(float(np.median(extra[large])), 3),
        "largest": round(float(extra[large].max()), 3),
    }
    report["steady_over_usual_time"] = round(float(np.median(runs["steady"][large, 2] / runs["usual"][large, 2])), 3)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1] == "steady")
    else:
        main()
