"""CUDA and ROCm: the caching allocator's own counters, a cap by memory fraction, and NVML for everybody else's memory.

What counts against a budget is what the driver sees of this process: the allocator's reserved bytes and the context with
its modules, which lie outside the allocator. The context is measured, never assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, final

import psutil
import torch
from torch import Tensor

from autoaccum.batches.structure import move
from autoaccum.devices import nvml
from autoaccum.devices.base import AbstractDevice, ErrorRow, Holder, Unit, Verdict, Watch, gpu_reserve_bytes


@final
class CudaDevice(AbstractDevice):
    """One CUDA (or ROCm) device; a MIG instance is a device of its own size."""

    unit: ClassVar[Unit] = "segments"

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        torch.empty(1, device=self.torch_device)  # creates the context, so that its size can be measured
        torch.cuda.synchronize(self.torch_device)

    def description(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return f"{properties.name}, compute capability {properties.major}.{properties.minor}"

    def driver(self) -> str:
        return nvml.driver_version() or ""

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])  # of the MIG instance, not of its parent

    def free_bytes(self) -> int:
        free = int(torch.cuda.mem_get_info(self.torch_device)[0])
        if self._shares_host_memory():
            # Jetson, GB10: the driver reports MemFree; what the kernel can give back counts as well.
            free = max(free, int(psutil.virtual_memory().available))
        return free + torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)

    def reserve_bytes(self) -> int:
        return gpu_reserve_bytes(self.total_bytes())

    def held_bytes(self, resident: Sequence[Tensor]) -> int:
        return self.context_bytes() + torch.cuda.memory_reserved(self.torch_device)

    def context_bytes(self) -> int:
        """What this process holds outside the allocator: context, modules, library handles.

        NVML's figure for this process less the allocator's. Where NVML does not tell (a container, MIG, unified memory):
        what is used on the device, less the allocator's and the other processes' bytes that can be seen.
        """
        reserved = torch.cuda.memory_reserved(self.torch_device)
        own = self._own_bytes()
        if own is not None:
            return max(0, own - reserved)
        if self._shares_host_memory():
            return 0
        free, total = torch.cuda.mem_get_info(self.torch_device)
        # A process that cannot be seen from here may be this one under its number outside the container.
        others = sum(holder.held_bytes or 0 for holder in self.holders() if psutil.pid_exists(holder.pid))
        return max(0, int(total) - int(free) - reserved - others)

    def holders(self) -> tuple[Holder, ...]:
        own = psutil.Process().pid
        return tuple(holder for holder in nvml.holders(self._uuid()) if holder.pid != own)

    @contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory  # what the fraction is a fraction of
        before = _memory_fraction(self.torch_device)
        allowed = max(0, budget_bytes - self.context_bytes())
        torch.cuda.set_per_process_memory_fraction(min(before, allowed / total), self.torch_device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.torch_device)

    @contextmanager
    def watched(self, resident: Sequence[Tensor]) -> Iterator[Watch]:
        watch = Watch()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        retries = self._retries()
        yield watch
        # Only after success: on an error nobody reads these, and the context may be lost.
        self.synchronize()
        watch.peak_allocated_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        watch.peak_reserved_bytes = torch.cuda.max_memory_reserved(self.torch_device)
        watch.peak_bytes = watch.peak_reserved_bytes + self.context_bytes()
        watch.allocator_retries = self._retries() - retries

    def release(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def place(self, batch: Any) -> Any:
        return move(batch, self.torch_device)

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def _own_bytes(self) -> int | None:
        own = psutil.Process().pid
        return next((holder.held_bytes for holder in nvml.holders(self._uuid()) if holder.pid == own), None)

    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    def _shares_host_memory(self) -> bool:
        return bool(torch.cuda.get_device_properties(self.torch_device).is_integrated)


def _memory_fraction(device: torch.device) -> float:
    """The fraction now in force; torch 2.6 cannot say, there it is taken to be the default of all memory."""
    known = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if known is None else float(known(device))


_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
_ALLOCATOR_NOTES = {
    "expandable_segments:True": "segments grow, so reserved stays close to allocated",
    "backend:cudaMallocAsync": "the driver's own pool, so reserved is the driver's figure",
    "PYTORCH_NO_CUDA_MEMORY_CACHING=": "no cache, so every allocation asks the driver and timings mean little",
}


def allocator_in_words(environment: Mapping[str, str]) -> str:
    """The settings of the allocator that change what fits, with what they mean.

    Example:
        >>> allocator_in_words({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
        'PYTORCH_ALLOC_CONF=expandable_segments:True (segments grow, so reserved stays close to allocated)'
    """
    settings = [f"{name}={environment[name]}" for name in _ALLOCATOR_VARIABLES if environment.get(name)]
    notes = [note for mark, note in _ALLOCATOR_NOTES.items() if any(mark in setting for setting in settings)]
    return " ".join(settings) + (f" ({'; '.join(notes)})" if notes else "") or "native, default settings"


def toolkit() -> str:
    """Versions of the driver and of what torch was built with."""
    built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"driver {nvml.driver_version() or 'not found'}, torch built for {built}"


_CUDA_ASYNC = "seen at a later call than the one that failed, since kernels run asynchronously"
CUDA_ROWS = (
    ErrorRow(Verdict.DEAD, RuntimeError, ("device-side assert triggered",), "cudaErrorAssert: the context is lost"),
    ErrorRow(Verdict.DEAD, RuntimeError, ("illegal memory access",), "cudaErrorIllegalAddress: the context is lost"),
    ErrorRow(Verdict.DEAD, RuntimeError, ("misaligned address",), "cudaErrorMisalignedAddress: the context is lost"),
    ErrorRow(Verdict.DEAD, RuntimeError, ("illegal instruction was",), "cudaErrorIllegalInstruction"),
    ErrorRow(Verdict.DEAD, RuntimeError, ("unspecified launch failure",), "cudaErrorLaunchFailure"),
    ErrorRow(Verdict.DEAD, RuntimeError, ("uncorrectable ecc error",), "cudaErrorECCUncorrectable"),
    ErrorRow(Verdict.DEAD, RuntimeError, ("context is destroyed",), "cudaErrorContextIsDestroyed"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cuda out of memory",), "c10/cuda/CUDACachingAllocator.cpp, also re-raised"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cuda error: out of memory",), "cudaErrorMemoryAllocation outside the pool"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cudaerrormemoryallocation",), "torch.AcceleratorError names the code"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cuda driver error: out of memory",), "expandable segments, cuMemCreate"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cuda_error_out_of_memory",), "the driver API, as Triton and CuPy show it"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("triton error [cuda]: out of memory",), "triton's launcher"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cuda runtime error (2)",), "THC, torch before 1.5; pytorch #6504"),
    ErrorRow(Verdict.TOO_LARGE, Exception, ("cuda out of memory",), "torch.multiprocessing: a process's text, passed on"),
    ErrorRow(Verdict.TOO_LARGE, Exception, ("cuda error: out of memory",), "torch.multiprocessing, the same"),
    ErrorRow(Verdict.TOO_LARGE, Exception, ("cudaerrormemoryallocation",), "torch.multiprocessing, the same"),
    ErrorRow(Verdict.TOO_LARGE, Exception, ("cuda_error_out_of_memory",), "numba, CudaAPIError(Exception)"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("hip out of memory",), "ROCm; pytorch #138002"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("hip error: out of memory",), "ROCm, hipErrorOutOfMemory"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("hiperroroutofmemory",), "ROCm, the code's name"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cublas_status_alloc_failed",), "cuBLAS handle or workspace; RVC #915"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cublaslt_status_alloc_failed",), "cuBLASLt workspace"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("hipblas_status_alloc_failed",), "hipBLAS handle or workspace"),
    ErrorRow(
        Verdict.TOO_LARGE,
        RuntimeError,
        ("rocblas_status_memory_error",),
        "rocBLAS and rocSOLVER workspace; hipBLAS passes it on as ALLOC_FAILED",
    ),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cudnn_status_alloc_failed",), "cuDNN handle or workspace"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("device_allocation_failed",), "cuDNN 9, an INTERNAL_ERROR of this kind"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cusolver_status_alloc_failed",), "cuSOLVER workspace"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cusparse_status_alloc_failed",), "cuSPARSE workspace"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cusparse_status_insufficient_resources",), "cuSPARSE workspace"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("cufft_alloc_failed",), "cuFFT plan"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("failed to cuda malloc",), "NCCL's own buffers"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("nccl", "'out of memory'"), "NCCL reports the CUDA failure by name"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cublas_status_not_initialized",), "cublasCreate with a full device"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cublas_status_internal_error",), "cuBLAS with a full device; " + _CUDA_ASYNC),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cublas_status_execution_failed",), "cuBLAS; " + _CUDA_ASYNC),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cusolver_status_internal_error",), "cusolverDnCreate, full device; UVTR #13"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cufft_internal_error",), "cuFFT with a full device"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cudnn_status_not_supported",), "no algorithm for the shape or the space"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cudnn_status_internal_error",), "ultralytics' retry list"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cudnn_status_execution_failed",), "cuDNN; " + _CUDA_ASYNC),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cudnn_status_not_initialized",), "cudnnCreate with a full device"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("unable to find a valid cudnn algorithm",), "Lightning #5897"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("unable to find an engine",), "cuDNN front end; ultralytics' retry list"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("no valid execution plans",), "cuDNN front end"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("mha_graph",), "cuDNN attention under memory pressure"),
    ErrorRow(
        Verdict.UNCLEAR, RuntimeError, ("nvml_success == r",), "the allocator asks NVML while failing; accelerate #3803"
    ),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("cuda driver error: device not ready",), "torch-max-mem 0.1.6"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("miopenstatus",), "MIOpen statuses for workspace and algorithm"),
    ErrorRow(
        Verdict.CEILING, RuntimeError, ("invalid configuration argument",), "grid limits; Lightning #20614, 65,535 rows"
    ),
    ErrorRow(Verdict.CEILING, RuntimeError, ("too many resources requested for launch",), "cudaErrorLaunchOutOfResources"),
)
