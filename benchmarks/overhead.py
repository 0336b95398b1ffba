"""What a window of the Accumulator costs over a correct loop written by hand: time and peak memory.

    python benchmarks/overhead.py

Times are of paired runs: the two loops take turns on one model and optimizer (two copies of a model were seen to differ by
8 % in speed, by where they lie in memory), and every pair gives a difference. The loop by hand counts the labels
that its loss counts before the first backward, scales every loss, clips, checks, steps, and reads the loss once; what it
lacks is the replay. Peak memory is counted by a virtual device.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.devices import VirtualDevice
from autoaccum.devices.base import AbstractDevice

PAIRS, MAX_NORM = 100, 1.0
HOST = VirtualDevice("64GiB")  # host memory, counted


def build(width: int, layers: int) -> nn.Module:
    """An MLP whose step takes a few tens of milliseconds on two cores."""
    torch.manual_seed(0)
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), *inner, nn.Linear(width, 10))


class ByHand:
    """The loop that a careful user writes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int) -> None:
        self.model, self.optimizer, self.micro_batch = model, optimizer, micro_batch

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """One optimizer step of the whole batch."""
        inputs, targets = batch
        parts = list(zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
        counts = [int((labels != -100).sum()) for _, labels in parts]
        device = next(self.model.parameters()).device
        total = torch.zeros((), device=device)
        for (rows, labels), count in zip(parts, counts, strict=True):
            part = functional.cross_entropy(self.model(rows.to(device)), labels.to(device)) * (count / sum(counts))
            part.backward()
            total = total + part.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


class ByAccumulator:
    """The same by the Accumulator."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.acc = autoaccum.Accumulator(
            model, optimizer, micro_batch=micro_batch, loss_fn=functional.cross_entropy, max_grad_norm=MAX_NORM
        )

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """One optimizer step of the whole batch."""
        return self.acc.step(batch).loss


def timed(step: object, batch: object, device: AbstractDevice) -> float:
    """Seconds of one call, until all that it has queued has run."""
    begun = time.perf_counter()
    step(batch)  # type: ignore[operator]
    device.synchronize()
    return time.perf_counter() - begun


def compare(width: int, layers: int, rows: int, micro_batch: int, device: AbstractDevice = HOST) -> dict[str, object]:
    """Paired times and peaks of one setting, on a device."""
    model = build(width, layers).to(device.torch_device)
    batch = (torch.randn(rows, 64), torch.randint(10, (rows,)))
    optimizer = torch.optim.AdamW(model.parameters())
    loops = [ByHand(model, optimizer, micro_batch), ByAccumulator(model, optimizer, micro_batch)]
    for loop in loops * 5:
        loop.step(batch)
    times: list[list[float]] = [[], []]
    for pair in range(PAIRS):
        for which in (0, 1) if pair % 2 else (1, 0):
            times[which].append(timed(loops[which].step, batch, device))
    hand, own = (statistics.median(of_loop) for of_loop in times)
    extra = statistics.median(b - a for a, b in zip(*times, strict=True))
    steps = -(-rows // micro_batch)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows": rows,
        "micro_batches": steps,
        "by_hand_ms": round(hand * 1e3, 2),
        "accumulator_ms": round(own * 1e3, 2),
        "ratio": round(1 + extra / hand, 4),
        "extra_us_per_micro_batch": round(extra / steps * 1e6, 1),
        "peak_ratio": round(peak_bytes(loops[1], batch, device) / peak_bytes(loops[0], batch, device), 4),
    }


def peak_bytes(loop: ByHand | ByAccumulator, batch: tuple[torch.Tensor, torch.Tensor], device: AbstractDevice) -> int:
    """Bytes in tensors at the peak of one step, parameters and optimizer state included."""
    state = [value for values in loop.optimizer.state.values() for value in values.values()]
    with device.watched([*loop.model.parameters(), *state]) as watch:
        loop.step(batch)
    return watch.peak_allocated_bytes or 0


def main() -> None:
    """Print and write one row per setting."""
    settings = ((256, 6, 4096, 512), (256, 6, 1024, 128), (512, 4, 512, 64), (512, 4, 64, 64), (64, 2, 64, 2))
    rows = [compare(*setting) for setting in settings]
    text = json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}, indent=2)
    print(text)
    (Path(__file__).parent / "results" / "overhead.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
