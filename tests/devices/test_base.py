"""How an error is recognised: the table itself, the many spellings of running out, and what is nobody's business."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from autoaccum.devices import ERROR_ROWS
from autoaccum.devices.base import ErrorRow, Verdict, chain_of, recognise
from autoaccum.errors import InvalidRequestError


def verdict_of(error: BaseException, handled: list[BaseException] | None = None) -> Verdict | None:
    """What the table of all devices says."""
    row = recognise(error, ERROR_ROWS, handled or [])
    return None if row is None else row.verdict


def raised_by(code: str) -> BaseException:
    """The error that this code ends with, with everything behind it."""
    try:
        exec(code, {"torch": torch, "out_of_memory": out_of_memory, "lost": lost})
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was asked for
        return error
    raise AssertionError("nothing was raised")


def out_of_memory() -> torch.OutOfMemoryError:
    """An error that certainly means memory."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def lost() -> RuntimeError:
    """An error after which the device context is gone."""
    return RuntimeError("CUDA error: device-side assert triggered")


def row_name(row: ErrorRow) -> str:
    """A row as the name of its test."""
    return "+".join(row.texts) or row.error.__name__


rows = pytest.mark.parametrize("row", ERROR_ROWS, ids=row_name)


@rows
def test_row_says_where_it_is_known_from(row: ErrorRow) -> None:
    """Every row of the table names its source."""
    assert row.source.strip()


@rows
def test_row_is_written_as_it_is_compared(row: ErrorRow) -> None:
    """Texts of a row are in lower case, since they are looked for in the error's text in lower case."""
    assert all(text and text == text.lower() for text in row.texts)


@rows
def test_row_recognises_its_own_text(row: ErrorRow) -> None:
    """An error of the row's class with the row's texts, in capitals and among other words, has the row's verdict."""
    error = row.error("step failed: " + " ... ".join(row.texts).upper() + " (see the manual)")
    assert verdict_of(error) is row.verdict


@rows
def test_row_is_not_shadowed(row: ErrorRow) -> None:
    """No row has the class and the texts of another one."""
    assert sum((other.error, other.texts) == (row.error, row.texts) for other in ERROR_ROWS) == 1


class CudaAPIError(Exception):
    """As numba defines its own."""


class OwnValueError(ValueError):
    """As a user or a library may define one."""


CERTAIN = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.57 GiB"),
    torch.OutOfMemoryError("Allocation on device "),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    getattr(torch, "AcceleratorError", RuntimeError)(
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 191.98 GiB"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("XPU out of memory. Tried to allocate 40.00 GiB. GPU 0 has a total capacity of 15.91 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 96 KB, max allowed: 18.1 GB)"),
    RuntimeError("cuda runtime error (2) : out of memory at THCStorage.cu:58"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: error code 12"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:82] data. DefaultCPUAllocator: not enough memory: you tried to allocate"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA out of memory encountered on a different rank"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\nCuda failure 2 'out of memory'"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) -5 (PI_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("Allocation is out of device memory on current platform."),
    RuntimeError("$ Torch: not enough memory: you tried to allocate 64GB. Buy new RAM! at aten/src/TH/THGeneral.cpp:204"),
    RuntimeError("CUDA error: rocblas_status_memory_error when calling `rocblas_create_handle(handle)`"),
    Exception("CUDA out of memory. Tried to allocate 2.00 GiB."),
    CudaAPIError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    ProcessRaisedException("-- Process 1 terminated:\ntorch.OutOfMemoryError: CUDA out of memory.", 1, 4242),
]


@pytest.mark.parametrize("error", CERTAIN, ids=lambda error: f"{type(error).__name__}-{str(error)[:40]}")
def test_spelling_that_is_certain(error: Exception) -> None:
    """A message that some allocator prints when memory runs out means that the size is too large."""
    assert verdict_of(error) is Verdict.TOO_LARGE


UNCLEAR = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1154",
    "CUDA driver error: device not ready",
    "could not create a primitive",
    "TPU out of memory in hbm",
    "RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0",
    "RESOURCE_EXHAUSTED: Attempting to reserve 10.51G at the bottom of memory. That was not possible.",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
]


@pytest.mark.parametrize("text", UNCLEAR, ids=lambda text: text[:40])
def test_spelling_that_is_unclear(text: str) -> None:
    """A message that often, not always, means memory is not taken as certain."""
    assert verdict_of(RuntimeError(text)) is Verdict.UNCLEAR


OTHER_LIMITS = [
    (RuntimeError("CUDA error: invalid configuration argument"), Verdict.CEILING),
    (RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements"), Verdict.CEILING),
    (RuntimeError("Invalid buffer size: 18.00 GB"), Verdict.CEILING),
    (RuntimeError("DataLoader worker (pid 4242) is killed by signal: Killed. "), Verdict.HOST),
    (RuntimeError("DataLoader worker (pid(s) 4242, 4243) exited unexpectedly"), Verdict.HOST),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), Verdict.HOST),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), Verdict.DEAD),
]


@pytest.mark.parametrize(("error", "verdict"), OTHER_LIMITS, ids=lambda value: str(value)[:40])
def test_limit_that_is_not_memory(error: Exception, verdict: Verdict) -> None:
    """Index limits, loader deaths and lost contexts each have their own verdict."""
    assert verdict_of(error) is verdict


def test_allocation_of_torch_itself() -> None:
    """What torch really raises for a petabyte is recognised."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert verdict_of(caught.value) is Verdict.TOO_LARGE


def test_allocation_of_numpy_itself() -> None:
    """What NumPy really raises for an exabyte is recognised."""
    with pytest.raises(MemoryError) as caught:
        np.empty(2**60, dtype=np.uint8)
    assert verdict_of(caught.value) is Verdict.TOO_LARGE


def test_batch_norm_with_one_row() -> None:
    """What BatchNorm really raises for a single row is a floor."""
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        nn.BatchNorm1d(4)(torch.zeros(1, 4))
    assert verdict_of(caught.value) is Verdict.FLOOR


@pytest.mark.slow
def test_killed_loader_worker(run_child: object) -> None:
    """What a DataLoader really raises when the kernel kills its worker is the host's limit."""
    verdict = run_child(  # type: ignore[operator]
        """
        import os, signal, torch
        from autoaccum.devices import ERROR_ROWS
        from autoaccum.devices.base import recognise

        class Killed(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): os.kill(os.getpid(), signal.SIGKILL)

        try:
            next(iter(torch.utils.data.DataLoader(Killed(), num_workers=1, multiprocessing_context="fork")))
        except RuntimeError as error:
            answer(recognise(error, ERROR_ROWS).verdict.name)
        """
    )
    assert verdict == "HOST"


USER_ERRORS = [
    KeyError("lables"),
    AssertionError("loss is negative"),
    IndexError("index out of range in self"),
    RuntimeError("index out of range: Tried to access index 5 out of table with 4 rows"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)"),
    RuntimeError("grad can be implicitly created only for scalar outputs"),
    RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
    RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    ValueError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    TypeError("forward() missing 1 required positional argument"),
    InvalidRequestError("the loss is NaN on the sample"),
    NotImplementedError("no kernel for this dtype"),
    TypeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    KeyError("CUDA_ERROR_OUT_OF_MEMORY"),
    AssertionError("CUDA error: out of memory"),
    OwnValueError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    StopIteration("CUDA out of memory"),
    Exception("the data set is out of memory of the cache"),
    CudaAPIError("[700] Call to cuMemcpyDtoH results in CUDA_ERROR_INVALID_VALUE"),
    RuntimeError("RESOURCE_EXHAUSTED: Quota exceeded for requests per minute"),
    RuntimeError("RESOURCE_EXHAUSTED: Received message larger than max (5242880 vs. 4194304)"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    RuntimeError("Native API failed. Native API returns: -30 (PI_ERROR_INVALID_VALUE)"),
    RuntimeError("Requested data type is unsupported on current platform."),
    RuntimeError("$ Torch: invalid memory size -- maybe an overflow?"),
    RuntimeError("CUDA error: rocblas_status_invalid_size when calling `rocblas_sgemm`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnSgetrf`"),
]


@pytest.mark.parametrize("error", USER_ERRORS, ids=lambda error: f"{type(error).__name__}-{str(error)[:40]}")
def test_error_of_the_user(error: Exception) -> None:
    """An ordinary error, or memory's words in a class that no allocator raises, fits no row."""
    assert verdict_of(error) is None


def test_real_shape_error() -> None:
    """What torch really raises for layers that do not fit together fits no row."""
    with pytest.raises(RuntimeError) as caught:
        nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 2))(torch.randn(4, 8))
    assert verdict_of(caught.value) is None


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('the step failed') from out_of_memory()",
        "try:\n    raise out_of_memory()\nexcept RuntimeError:\n    raise ValueError('the step failed')",
        "try:\n    raise out_of_memory()\nexcept RuntimeError:\n    raise ValueError('the step failed') from None",
        "raise ExceptionGroup('ranks', [KeyError('lables'), ExceptionGroup('inner', [out_of_memory()])])",
        "try:\n    raise ValueError('first') from out_of_memory()\nexcept ValueError as first:\n"
        "    raise KeyError('second') from first",
    ],
    ids=["cause", "context", "hidden-context", "group", "two-steps"],
)
def test_error_behind(code: str) -> None:
    """An out-of-memory error behind the one that was raised counts, however it stands behind it."""
    assert verdict_of(raised_by(code)) is Verdict.TOO_LARGE


def test_handled_error_does_not_count() -> None:
    """An out-of-memory error that was being handled before the call began is not this call's."""
    before = out_of_memory()
    error = raised_by("raise KeyError('lables')")
    error.__context__ = before
    assert verdict_of(error) is Verdict.TOO_LARGE
    assert verdict_of(error, [before]) is None


def test_own_error_counts_beside_a_handled_one() -> None:
    """With one out-of-memory error handled before, a second one of this call's own still counts."""
    before, own = out_of_memory(), out_of_memory()
    own.__context__ = before
    assert verdict_of(own, [before]) is Verdict.TOO_LARGE


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupt_stays_an_interrupt(interrupt: type[BaseException]) -> None:
    """Ctrl-C while an out-of-memory error is handled is not running out of memory."""
    error = interrupt()
    error.__context__ = out_of_memory()
    assert verdict_of(error) is None


def test_group_with_an_interrupt_stays_an_interrupt() -> None:
    """A group that holds Ctrl-C besides an out-of-memory error is not running out of memory."""
    assert verdict_of(BaseExceptionGroup("ranks", [KeyboardInterrupt(), out_of_memory()])) is None


def test_lost_context_wins() -> None:
    """A lost device context wins over an out-of-memory error, whichever of them stands in front."""
    assert verdict_of(raised_by("raise out_of_memory() from lost()")) is Verdict.DEAD
    assert verdict_of(raised_by("raise lost() from out_of_memory()")) is Verdict.DEAD


PRECEDENCE = [
    (RuntimeError("CUDA error: device-side assert triggered"), Verdict.DEAD),
    (out_of_memory(), Verdict.TOO_LARGE),
    (RuntimeError("32-bit index math"), Verdict.CEILING),
    (RuntimeError("DataLoader worker (pid 1) exited unexpectedly"), Verdict.HOST),
    (ValueError("Expected more than 1 value per channel when training"), Verdict.FLOOR),
    (RuntimeError("cudnn_status_internal_error"), Verdict.UNCLEAR),
]


@pytest.mark.parametrize("index", range(len(PRECEDENCE) - 1))
def test_precedence(index: int) -> None:
    """Of two errors in one chain the verdict that says more decides, whichever stands in front."""
    (strong, verdict), (weak, _) = PRECEDENCE[index : index + 2]
    assert verdict_of(ExceptionGroup("both", [strong, weak])) is verdict
    assert verdict_of(ExceptionGroup("both", [weak, strong])) is verdict


def test_every_verdict_has_a_precedence() -> None:
    """No verdict is missing from the order that decides between two of them."""
    assert {verdict for _, verdict in PRECEDENCE} == set(Verdict)


def test_chain_begins_with_the_error_itself() -> None:
    """The chain holds the error first, then its cause, its context and members of groups."""
    cause, context, member = KeyError("cause"), KeyError("context"), KeyError("member")
    error = ExceptionGroup("all", [member])
    error.__cause__, error.__context__ = cause, context
    assert chain_of(error) == [error, cause, context, member]


def test_chain_holds_each_error_once() -> None:
    """Errors that stand behind each other in a circle, as tools that re-raise make them, end the walk."""
    first, second = KeyError("first"), KeyError("second")
    first.__context__, second.__cause__ = second, first
    assert chain_of(first) == [first, second]


def test_chain_tells_equal_errors_apart() -> None:
    """Two errors are one only when they are the same object."""

    class AlwaysEqual(Exception):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    first, second = AlwaysEqual(), AlwaysEqual()
    first.__cause__ = second
    assert len(chain_of(first)) == 2
