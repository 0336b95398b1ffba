"""Predicted peaks against those that `torch.cuda.memory_stats` counts: allocated and reserved, model by model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import MissingExtraError, NothingFitsError
from autoaccum.prediction.allocator import AllocatorSettings, replay
from autoaccum.prediction.forecast import traced
from autoaccum.preserve import preserved
from autoaccum.records import Fit
from autoaccum.request import Request
from autoaccum.tune import probe_workload
from autoaccum.workload import Workload

from .common import GPT, RESNET, emptied, on_device

ROWS = (8, 32)


class Lstm(nn.Module):
    """Two layers of LSTM and a head at the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 32)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Scores of a sequence."""
        return self.head(self.lstm(x_btc)[0][:, -1])  # type: ignore[no-any-return]


def lstm(device: AbstractDevice) -> Workload:
    """A workload on sequences of 128 vectors."""
    torch.manual_seed(0)
    workload = Workload(Lstm(), torch.randn(4, 128, 256), training_step=lambda model, batch: model(batch).pow(2).mean())
    workload.move_to(device.torch_device)
    return workload


TARGETS = {
    "gpt": GPT,
    "resnet": RESNET,
    "gpt2": "hf:gpt2?n_embd=512&n_layer=6&n_head=8&seq_len=256",
    "bert": "hf:bert?hidden_size=512&num_hidden_layers=6&num_attention_heads=8&intermediate_size=2048&seq_len=128",
    "llama": "hf:llama?hidden_size=512&num_hidden_layers=6&num_attention_heads=8&num_key_value_heads=4"
    "&intermediate_size=1408&vocab_size=32000&seq_len=256",
    "t5": "hf:t5?d_model=512&num_layers=4&num_heads=8&seq_len=128",
    "distilbert": "hf:distilbert?dim=512&n_layers=4&n_heads=8&hidden_dim=2048&seq_len=128",
    "resnet50": "torchvision:resnet50?image=128",
    "mobilenet": "torchvision:mobilenet_v3_large?image=128",
}
Build = Callable[[AbstractDevice], Workload]
MODELS: dict[str, Build] = {**{name: partial(on_device, target) for name, target in TARGETS.items()}, "lstm": lstm}


def run(
    device: AbstractDevice, models: Mapping[str, Build] = MODELS, sizes: Sequence[int] = ROWS
) -> Iterator[dict[str, Any]]:
    """One row for each model and size, from an allocator that begins empty."""
    for name, build in models.items():
        try:
            yield from _of_model(device, name, build, sizes)
        except MissingExtraError as error:
            yield {"model": name, "not_run": str(error)}


def _of_model(device: AbstractDevice, name: str, build: Build, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    emptied(device)
    workload = build(device)
    with preserved(workload.module, workload.own_optimizer, device=workload.device) as snapshot:
        found = traced(workload, device, snapshot=snapshot)
    if found.growth is None:
        yield {"model": name, "not_run": str(found.note)}
        return
    settings = AllocatorSettings.parse(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    for rows in sizes:
        emptied(device)
        try:
            fit = measured(workload, device, rows)
        except NothingFitsError:
            yield {"model": name, "rows": rows, "not_run": "more than this card has"}
            continue
        played = replay(found.growth.events, found.growth.sizes(rows).tolist(), settings=settings)
        yield {
            "model": name,
            "rows": rows,
            **compared("allocated", played.peak_allocated_bytes, fit.peak_allocated_bytes),
            **compared("reserved", played.peak_reserved_bytes, fit.peak_reserved_bytes),
        }


def measured(workload: Workload, device: AbstractDevice, rows: int) -> Fit:
    """The peaks of a probe's two optimizer steps of two micro-batches of this size."""
    request = Request(max_micro_batch=rows, multiple_of=rows, predict=False)
    outcome = probe_workload(workload, request, device=device).trials[-1].outcome
    assert isinstance(outcome, Fit), outcome
    return outcome


def compared(what: str, predicted_bytes: int, measured_bytes: int | None) -> dict[str, Any]:
    """Two figures and how far the first is from the second; a device that has no such figure says None."""
    error = None if not measured_bytes else round(predicted_bytes / measured_bytes - 1, 5)
    return {
        f"predicted_{what}_bytes": predicted_bytes,
        f"measured_{what}_bytes": measured_bytes,
        f"{what}_error_frac": error,
    }
