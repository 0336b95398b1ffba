"""XPU and MPS through their modules of torch.

Written to the documented interfaces; this project has not run it on such hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from autoaccum.batches.structure import move
from autoaccum.devices.base import AbstractDevice, ErrorRow, Holder, Verdict, Watch, gpu_reserve_bytes


@final
class XpuDevice(AbstractDevice):
    """One Intel GPU."""

    def __init__(self, index: int) -> None:
        self.name = f"xpu:{index}"
        self.torch_device = torch.device("xpu", index)

    def description(self) -> str:
        return str(torch.xpu.get_device_name(self.torch_device))

    def total_bytes(self) -> int:
        return int(torch.xpu.mem_get_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        return int(torch.xpu.mem_get_info(self.torch_device)[0])

    def reserve_bytes(self) -> int:
        return gpu_reserve_bytes(self.total_bytes())

    def held_bytes(self, resident: Sequence[Tensor]) -> int:
        return int(torch.xpu.memory_reserved(self.torch_device))

    def holders(self) -> tuple[Holder, ...]:
        return ()

    @contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        if not hasattr(torch.xpu, "get_per_process_memory_fraction"):
            yield  # an older torch has no cap for XPU: the measured peak judges alone
            return
        before = torch.xpu.get_per_process_memory_fraction(self.torch_device)
        allowed = min(before, budget_bytes / self.total_bytes())
        torch.xpu.set_per_process_memory_fraction(allowed, self.torch_device)
        try:
            yield
        finally:
            torch.xpu.set_per_process_memory_fraction(before, self.torch_device)

    @contextmanager
    def watched(self, resident: Sequence[Tensor]) -> Iterator[Watch]:
        watch = Watch()
        torch.xpu.reset_peak_memory_stats(self.torch_device)
        yield watch
        self.synchronize()
        watch.peak_allocated_bytes = torch.xpu.max_memory_allocated(self.torch_device)
        watch.peak_reserved_bytes = torch.xpu.max_memory_reserved(self.torch_device)
        watch.peak_bytes = watch.peak_reserved_bytes

    def release(self) -> None:
        torch.xpu.empty_cache()

    def synchronize(self) -> None:
        torch.xpu.synchronize(self.torch_device)

    def place(self, batch: Any) -> Any:
        return move(batch, self.torch_device)


@final
class MpsDevice(AbstractDevice):
    """An Apple GPU. It shares the host's memory, so its budget is the driver's recommended maximum, not all there is."""

    def __init__(self) -> None:
        self.name = "mps"
        self.torch_device = torch.device("mps")

    def description(self) -> str:
        return "Apple GPU"

    def total_bytes(self) -> int:
        return int(torch.mps.recommended_max_memory())

    def free_bytes(self) -> int:
        return max(0, self.total_bytes() - int(torch.mps.driver_allocated_memory()))

    def reserve_bytes(self) -> int:
        return gpu_reserve_bytes(self.total_bytes())

    def held_bytes(self, resident: Sequence[Tensor]) -> int:
        return int(torch.mps.driver_allocated_memory())

    def holders(self) -> tuple[Holder, ...]:
        return ()

    @contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        # By default MPS goes on to 1.7 times the recommended maximum and swaps. The old value cannot be asked for.
        torch.mps.set_per_process_memory_fraction(min(1.0, budget_bytes / self.total_bytes()))
        try:
            yield
        finally:
            torch.mps.set_per_process_memory_fraction(1.7)

    @contextmanager
    def watched(self, resident: Sequence[Tensor]) -> Iterator[Watch]:
        watch = Watch()
        self.release()
        yield watch
        self.synchronize()
        # There is no peak counter; the allocator keeps what it once had until `release`, so this is the high-water mark.
        watch.peak_reserved_bytes = watch.peak_bytes = int(torch.mps.driver_allocated_memory())

    def release(self) -> None:
        torch.mps.empty_cache()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def place(self, batch: Any) -> Any:
        return move(batch, self.torch_device)


ACCELERATOR_ROWS = (
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("xpu out of memory",), "c10/xpu/XPUCachingAllocator.cpp"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("ur_result_error_out_of_device_memory",), "Intel's unified runtime"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("ur_result_error_out_of_resources",), "Intel's unified runtime"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("pi_error_out_of_resources",), "SYCL before it; ipex-llm #9467"),
    ErrorRow(
        Verdict.TOO_LARGE,
        RuntimeError,
        ("allocation is out of device memory on current platform",),
        "Intel's extension for PyTorch, in place of OUT_OF_RESOURCES",
    ),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("mps backend out of memory",), "aten/src/ATen/mps/MPSAllocator.mm"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("module:pt_devmem allocation failed",), "Habana; accelerate 1.15"),
    ErrorRow(Verdict.TOO_LARGE, RuntimeError, ("npu out of memory",), "Ascend, torch_npu"),
    # The status alone is also that of a quota or of a message that is too long.
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("resource_exhausted", "allocat"), "XLA; some of its memory is on the chip"),
    ErrorRow(Verdict.UNCLEAR, RuntimeError, ("resource_exhausted", "attempting to reserve"), "XLA on TPU; xla #3470"),
    ErrorRow(Verdict.CEILING, RuntimeError, ("invalid buffer size:",), "MPSAllocator.mm: one buffer above Metal's limit"),
    ErrorRow(Verdict.CEILING, RuntimeError, ("dims larger than int_max",), "MPSGraph"),
)
