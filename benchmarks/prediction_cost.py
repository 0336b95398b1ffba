"""What a prediction costs: time and memory of two traces and of a replay.

    python benchmarks/prediction_cost.py

GPT-2 small (512 tokens) and a Llama of 7 billion parameters (2048 tokens), built without values from the configs of the
installed transformers, for an RTX 3060 and an H100; each in a process of its own, so that the memory is its own.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time

TARGETS = (("hf:gpt2?seq_len=512", "RTX 3060 12GB", 8), ("hf:llama?seq_len=2048", "H100 80GB", 1))


def measure(target: str, name: str, rows: int) -> dict[str, object]:
    """One target, traced and replayed."""
    import torch

    from autoaccum.prediction.allocator import replay
    from autoaccum.prediction.corrections import as_on
    from autoaccum.prediction.fake_tensors import fake_trace
    from autoaccum.prediction.gpu_names import gpu_for
    from autoaccum.prediction.growth import growth_of
    from autoaccum.targets import load_target

    begun = time.perf_counter()
    workload = load_target(target, without_values=True)
    built = time.perf_counter()
    adjusted = as_on(gpu_for(name))
    growth = growth_of(lambda size: fake_trace(workload, size, host_batch=False, sums_in_place=True, adjusted=adjusted))
    traced = time.perf_counter()
    played = replay(growth.events, growth.sizes(rows).tolist())
    replayed = time.perf_counter()
    return {
        "target": target,
        "gpu": name,
        "parameters": workload.num_trainable,
        "events": len(growth.events),
        "build_s": round(built - begun, 2),
        "two_traces_s": round(traced - built, 2),
        "replay_s": round(replayed - traced, 4),
        "events_per_s": round(len(growth.events) / (replayed - traced)),
        "resident_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rows": rows,
        "reserved_mib": played.peak_reserved_bytes >> 20,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Print one record for each target."""
    if len(sys.argv) > 1:
        target, name, rows = sys.argv[1:]
        print(json.dumps(measure(target, name, int(rows))))
        return
    found = []
    for target, name, rows in TARGETS:
        done = subprocess.run(
            [sys.executable, __file__, target, name, str(rows)], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
