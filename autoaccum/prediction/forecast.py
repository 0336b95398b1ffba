"""The predicted peak of every size on the device that will be searched, for the search to start from.

Traces on fake tensors; where they are refused, on real ones at two tiny sizes; where that fails as well, says why and leaves
the search without a prediction. A forecast may be wrong: it decides where a search starts, never where it ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, final

import numpy as np
import torch

from autoaccum.devices.base import AbstractDevice
from autoaccum.prediction.allocator import replay
from autoaccum.prediction.allocator_settings import MIN_BLOCK_BYTES, AllocatorSettings
from autoaccum.prediction.apart import ProcessDiedError, apart, can_run_apart
from autoaccum.prediction.corrections import as_on
from autoaccum.prediction.fake_tensors import fake_trace, is_refusal, load_fake_tensors
from autoaccum.prediction.gpus import Gpu
from autoaccum.prediction.growth import Growth, NotAffineError, growth_of
from autoaccum.prediction.recording import Adjusted, record_windows
from autoaccum.prediction.trace import Trace
from autoaccum.prediction.workspaces import on_host
from autoaccum.preserve import Snapshot, random_states_kept
from autoaccum.records import AS_IT_IS, Levers
from autoaccum.window import training_modes
from autoaccum.workload import Workload

_PAGE_BYTES = 4096
_MMAP_BYTES = 64 * 2**10  # from here on glibc maps pages of their own, as devices/cpu.py sets it
_MALLOC_BYTES = 64 + 16  # alignment of c10/core/impl/alloc_cpu.cpp (gAlignment), and malloc's own header

# One-sided relative errors beyond the part that a first probe measures: benchmarks/accuracy.py.
_ERROR_FRAC = {"storages": 0.001, "pages": 0.02, "segments": 0.05}

# By how much peaks of the same size wander, as a fraction of the budget: not at all where storages are counted; resident
# sets by some hundred KiB of some hundred MiB (benchmarks/search.py); what is reserved by segments of 20 MiB.
_NOISE_FRAC = {"storages": 0.0, "pages": 0.003, "segments": 0.01}

Sizes = np.ndarray[tuple[int], np.dtype[np.int64]]


def in_blocks(sizes: Sizes) -> Sizes:
    """Rounded as the caching allocator rounds requests.

    Example:
        >>> in_blocks(np.array([0, 1, 513])).tolist()
        [0, 512, 1024]
    """
    return -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def in_pages(sizes: Sizes) -> Sizes:
    """Rounded as large host allocations are: to whole pages, with malloc's header and torch's alignment."""
    mapped = -(-(sizes + _MALLOC_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
    return np.where(sizes >= _MMAP_BYTES, mapped, sizes)


class Traced(NamedTuple):
    """Traces of a workload, or why there are none. `note` says what was done instead of fake tensors."""

    growth: Growth | None
    note: str | None = None


@final
class Forecast:
    """Predicted peaks of one device; satisfies `search.Forecast`.

    Args:
        growth: The allocations of every size.
        unit: How the device counts, see `AbstractDevice.unit`.
        held_bytes: What counts against the budget before anything runs, the model's tensors included.
        whole_batch: Rows of the batch that a micro-batch is cut from, where all of it lies in the memory that counts.
    """

    def __init__(self, growth: Growth, *, unit: str, held_bytes: int, whole_batch: int | None = None) -> None:
        self.error_frac, self.noise_frac = _ERROR_FRAC[unit], _NOISE_FRAC[unit]
        self.growth, self._held_bytes, self._whole_batch = growth, held_bytes, whole_batch
        self.rounded = in_pages if unit == "pages" else in_blocks
        self.peak_bytes: Callable[[int], int] = lru_cache(maxsize=None)(
            self._reserved_peak if unit == "segments" else self._live_peak
        )

    def phase_peak_bytes(self, rows: int, *, in_optimizer: bool) -> int:
        """The highest sum of live blocks in the optimizer's step, or in everything else."""
        peak = self.growth.live_peak(rows, self.rounded, in_optimizer=in_optimizer)
        return self._held_bytes + peak - self.weights_bytes(rows)

    def work_per_row(self, rows: int) -> float:
        """Floating-point operations of forward and backward passes for one row."""
        flops = self.growth.flops(rows)
        return sum(count for phase, count in flops.items() if phase != "optimizer") / rows

    def _live_peak(self, rows: int) -> int:
        """Highest sum of live storages, above what the model held at the start."""
        live = self.growth.live(rows, self.rounded)
        return self._held_bytes + int(live.max()) - self.weights_bytes(rows) + self._rest_of_batch_bytes(rows)

    def _reserved_peak(self, rows: int) -> int:
        """What the caching allocator reserves, and what it does not own."""
        environment = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
        played = replay(self.growth.events, self.growth.sizes(rows).tolist(), settings=AllocatorSettings.parse(environment))
        return max(self._held_bytes, self._held_bytes - self.weights_bytes(rows) + played.peak_reserved_bytes)

    def weights_bytes(self, rows: int) -> int:
        """What of a trace is there before anything runs: counted in what the device holds already."""
        split = self.growth.split(rows, self.growth.start_event, self.rounded)
        return split["weights"] + split["optimizer state"]

    def _rest_of_batch_bytes(self, rows: int) -> int:
        if self._whole_batch is None or self._whole_batch <= rows:
            return 0
        start = self.growth.start_event
        whole, part = (self.growth.split(size, start, self.rounded)["batch"] for size in (self._whole_batch, rows))
        return whole - part


def traced(
    workload: Workload,
    device: AbstractDevice,
    *,
    multiple_of: int = 1,
    snapshot: Snapshot | None = None,
    budget_bytes: int | None = None,
    levers: Levers = AS_IT_IS,
) -> Traced:
    """Trace a workload at a few small sizes, on fake tensors or else on real ones.

    Args:
        multiple_of: Sizes are multiples of this.
        snapshot: Restores the workload after real passes; None: no real passes.
        budget_bytes: The limit under which real passes run.
        levers: Turned while they run.

    Leaves behind:
        Nothing.
    """
    found = _on_fake_tensors(workload, device, multiple_of, levers)
    if isinstance(found, Growth):
        return Traced(found)
    if snapshot is None or workload.device.type != "cpu" or not found.can_be_real:
        return Traced(None, f"No prediction: {found.reason}; sizes were searched by doubling and bisection.")
    try:
        growth = growth_of(partial(_real, workload, device, snapshot, budget_bytes, levers), multiple_of)
    except Exception as error:  # noqa: BLE001 - as above
        text = (
            f"No prediction: {found.reason}, nor could small sizes be traced ({reason_of(error)}); sizes were searched by "
        )
        return Traced(None, text + "doubling and bisection.")
    return Traced(growth, f"Predictions rest on real passes at small sizes, since {found.reason}.")


class _Refusal(NamedTuple):
    """Why fake tensors tell nothing. `can_be_real`: real ones may."""

    reason: str
    can_be_real: bool


def _on_fake_tensors(workload: Workload, device: AbstractDevice, multiple_of: int, levers: Levers) -> Growth | _Refusal:
    attempt = partial(_attempted, partial(_fake, workload, device, levers), multiple_of)
    # In a process of its own, what the step keeps outside of the model (a cache, a list) does not come to hold fake tensors,
    # and where host memory counts, what fake tensors load does not stay. A process with a GPU's context cannot be copied.
    if not can_run_apart():
        return attempt()
    if not device.is_host:
        load_fake_tensors()  # once here, rather than in every copy
    try:
        return apart(attempt)
    except ProcessDiedError as error:
        return _Refusal(f"the training step does not run on fake tensors ({error})", True)


def _attempted(trace_at: Callable[[int], Trace], multiple_of: int) -> Growth | _Refusal:
    try:
        return growth_of(trace_at, multiple_of)
    except NotAffineError as error:
        return _Refusal(str(error), False)
    except Exception as error:  # noqa: BLE001 - fake tensors refuse in many ways, and real trials raise what is the user's
        return _Refusal(f"the training step does not run on fake tensors ({reason_of(error)})", is_refusal(error))


def _fake(workload: Workload, device: AbstractDevice, levers: Levers, rows: int) -> Trace:
    return fake_trace(
        workload,
        rows,
        host_batch=device.is_host,
        sums_in_place=device.unit != "storages",
        adjusted=_adjusted(device),
        levers=levers,
        device=device.torch_device,
    )


def _adjusted(device: AbstractDevice) -> Adjusted | None:
    match device.unit:
        case "segments":
            return as_on(gpu_of(device.torch_device))
        case "pages":
            return on_host
        case _:
            return None  # a virtual device counts what fake tensors show


def gpu_of(device: torch.device) -> Gpu:
    """A GPU that is here, as the corrections need it."""
    found = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    return Gpu(
        name=found.name,
        total_bytes=found.total_memory,
        compute_capability=(0, 0) if is_amd else (found.major, found.minor),
        architecture=found.gcnArchName if is_amd else "",
        vendor="AMD" if is_amd else "NVIDIA",
        context_bytes=0,  # measured on the device itself
        source="torch.cuda.get_device_properties",
    )


def _real(
    workload: Workload,
    device: AbstractDevice,
    snapshot: Snapshot,
    budget_bytes: int | None,
    levers: Levers,
    rows: int,
) -> Trace:
    try:
        with device.limited_to(device.total_bytes() if budget_bytes is None else budget_bytes):
            return record_windows(
                workload,
                workload.source.take(rows),
                rows,
                host_batch=device.is_host,
                sums_in_place=device.unit != "storages",
                levers=levers,
                device=device.torch_device,
            )
    finally:
        snapshot.restore()


def take_first_step() -> None:
    """Train a small layer, so that what torch loads for the first training step of a process is there."""
    with random_states_kept(), training_modes():
        layer = torch.nn.Linear(256, 256)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.zeros(256, 256)).mean().backward()
        optimizer.step()


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    operation = getattr(error, "func", None)  # torch's DynamicOutputShapeException and DataDependentOutputException
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    named = f"{type(error).__name__}: {operation if operation is not None else first_line}"
    return named if len(named) <= 300 else named[:300] + "..."
