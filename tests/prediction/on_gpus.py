"""What runs, and what is traced, as on a GPU that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.prediction.corrections import as_on
from autoaccum.prediction.fake_tensors import fake_trace
from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.trace import Trace
from autoaccum.workload import Workload

AMPERE, TURING, HOPPER, AMD = "RTX 3060 12GB", "T4 16GB", "H100 80GB", "MI300X 192GB"
Do = Callable[[Tensor], Tensor]


class Ran(NamedTuple):
    """One operation of a trace, and what it gave."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]


class Doing(nn.Module):
    """Does something with the output of a linear layer."""

    def __init__(self, do: Do, width: int = 16) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(width, width), do

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self.linear(x))


def operations(workload: Workload, gpu: str = AMPERE, rows: int = 2, **more: Any) -> list[Ran]:
    """Everything that runs in a trace as on this GPU."""
    found: list[Ran] = []

    def note(operation: Any, args: Any, out: Any) -> None:
        tensors = [part for part in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(part, Tensor)]
        found.append(Ran(str(operation), tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors)))

    @contextmanager
    def adjusted(recorder: Recorder, optimizer: Optimizer) -> Iterator[None]:
        with as_on(gpu_for(gpu), **more)(recorder, optimizer):
            recorder.listeners.append(note)
            yield

    fake_trace(workload, rows, host_batch=False, adjusted=adjusted)
    return found


def names(ran: list[Ran]) -> set[str]:
    return {each.name for each in ran}


def trace_of(workload: Workload, gpu: str | None = AMPERE, rows: int = 2) -> Trace:
    adjusted = None if gpu is None else as_on(gpu_for(gpu))
    return fake_trace(workload, rows, host_batch=False, adjusted=adjusted)


def held_as(trace: Trace, kind: str) -> list[int]:
    return [size for size, own in zip(trace.sizes, trace.kinds, strict=True) if own == kind]


BOOL_MASK = torch.ones(6, 6, dtype=torch.bool).tril()


def attending(
    dtype: torch.dtype = torch.float32,
    width: int = 16,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    dimensions: int = 4,
) -> Workload:
    """Attention over six positions."""

    def do(x: Tensor) -> Tensor:
        q = x.unsqueeze(1) if dimensions == 4 else x
        given = None if mask is None else mask if mask.dtype == torch.bool else mask.to(dtype)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=given, dropout_p=dropout, is_causal=causal).mean()

    return Workload(Doing(do, width).to(dtype), torch.randn(4, 6, width).to(dtype))
