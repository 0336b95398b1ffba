"""CUDA: what can be said without a GPU, and, with one, what the driver sees of this process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoaccum.devices import cuda, nvml
from autoaccum.devices.base import Holder, Verdict
from autoaccum.devices.cuda import CUDA_ROWS, CudaDevice, allocator_in_words, toolkit

MIB = 2**20
RunChild = Callable[..., Any]
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no cuda device in this process")


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a CUDA device."""
    marked: Callable[..., None] = pytest.mark.gpu(no_gpu(test))
    return marked


# -- without a GPU


def test_default_allocator_in_words() -> None:
    """Without any setting the allocator is said to be the native one."""
    assert allocator_in_words({"PATH": "/bin"}) == "native, default settings"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "segments grow"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"}, "segments grow"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "the driver's own pool"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "no cache"),
    ],
)
def test_setting_in_words(environment: dict[str, str], words: str) -> None:
    """A setting that changes what fits is named as it is, with what it means."""
    text = allocator_in_words(environment)
    assert all(f"{name}={value}" in text for name, value in environment.items())
    assert words in text


def test_setting_without_a_note() -> None:
    """A setting that nothing is known about is named without a note."""
    assert allocator_in_words({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}) == "PYTORCH_ALLOC_CONF=max_split_size_mb:64"


def test_segments_that_do_not_grow() -> None:
    """Expandable segments that are switched off are not said to grow."""
    assert "segments grow" not in allocator_in_words({"PYTORCH_ALLOC_CONF": "expandable_segments:False"})


def test_several_settings_in_words() -> None:
    """Several settings are all named."""
    text = allocator_in_words({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert "PYTORCH_ALLOC_CONF=a:1 PYTORCH_NO_CUDA_MEMORY_CACHING=1" in text


def test_toolkit_names_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's version is named, and that there is none where there is none."""
    monkeypatch.setattr(nvml, "driver_version", lambda: "570.86.15")
    assert toolkit().startswith("driver 570.86.15, torch built for CUDA")
    monkeypatch.setattr(nvml, "driver_version", lambda: None)
    assert toolkit().startswith("driver not found, ")


@pytest.mark.parametrize("verdict", [Verdict.DEAD, Verdict.TOO_LARGE, Verdict.UNCLEAR, Verdict.CEILING])
def test_table_has_rows_of(verdict: Verdict) -> None:
    """The table knows lost contexts, certain and unclear memory errors, and launch limits."""
    assert any(row.verdict is verdict for row in CUDA_ROWS)


def test_every_row_needs_a_text() -> None:
    """No row of the table takes every RuntimeError for its own."""
    assert all(row.texts for row in CUDA_ROWS)


# -- the context's size, on figures of a stubbed driver


class Driver:
    """The figures that a device answers from, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.total, self.reserved, self.allocated = 700, 1000, 100, 60
        self.is_integrated = False
        self.holders: tuple[Holder, ...] = ()
        properties = type("Properties", (), {"uuid": "0a1b", "name": "stub", "major": 9, "minor": 0})()
        properties.total_memory = self.total

        def properties_now(device: object) -> object:
            properties.is_integrated = self.is_integrated
            return properties

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties_now)
        monkeypatch.setattr(nvml, "holders", lambda uuid: self.holders)
        self.device = CudaDevice.__new__(CudaDevice)  # its __init__ makes a context
        self.device.name, self.device.torch_device = "cuda:0", torch.device("cuda", 0)

    def own(self, held_bytes: int | None) -> Holder:
        """This process, as the driver lists it."""
        return Holder(cuda.psutil.Process().pid, "python", held_bytes)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A device whose driver says what a test wants it to."""
    return Driver(monkeypatch)


def test_context_by_the_driver(driver: Driver) -> None:
    """Where the driver tells what this process holds, the context is that less what the allocator reserved."""
    driver.holders = (driver.own(150), Holder(1, "other", 50))
    assert driver.device.context_bytes() == 50
    assert driver.device.held_bytes(()) == 150


def test_context_where_the_driver_does_not_tell(driver: Driver) -> None:
    """Where it does not, the context is what is used, less the allocator's and the other processes' bytes."""
    driver.holders = (Holder(1, "other", 50),)
    assert driver.device.context_bytes() == 1000 - 700 - 100 - 50


def test_context_is_never_negative(driver: Driver) -> None:
    """Figures that were read at different moments never make a negative context."""
    driver.holders = (driver.own(80),)
    assert driver.device.context_bytes() == 0


def test_others_do_not_include_this_process(driver: Driver) -> None:
    """This process is not one of those that hold memory besides it."""
    driver.holders = (driver.own(150), Holder(1, "other", 50))
    assert [holder.pid for holder in driver.device.holders()] == [1]


def test_cached_memory_is_free(driver: Driver) -> None:
    """What the allocator keeps without a tensor in it is free to this process."""
    assert driver.device.free_bytes() == 700 + 100 - 60


def test_shared_memory_has_no_context(driver: Driver) -> None:
    """Where GPU and host share their memory and the driver tells nothing, what others use is not taken for a context."""
    driver.is_integrated = True
    assert driver.device.context_bytes() == 0


def test_shared_memory_counts_what_the_kernel_gives_back(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where GPU and host share their memory, what the kernel can give back is free."""
    driver.is_integrated = True
    monkeypatch.setattr(cuda.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 900})())
    assert driver.device.free_bytes() == 900 + 100 - 60


@pytest.mark.parametrize("before", [1.0, 0.5, 0.05])
def test_fraction_comes_back(driver: Driver, monkeypatch: pytest.MonkeyPatch, before: float) -> None:
    """The cap is the budget less the context, as a fraction of the device, never above the one before, which comes back."""
    fractions = [before]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fractions[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda value, device: fractions.append(value))
    driver.holders = (driver.own(150),)
    with pytest.raises(KeyError), driver.device.limited_to(250):
        assert fractions[-1] == min(before, (250 - 50) / 1000)
        raise KeyError("lables")
    assert fractions[-1] == before


# -- with a GPU


@on_gpu
def test_context_is_measured() -> None:
    """The context of a fresh device is some tens of MiB up to 2 GiB, and does not grow with tensors."""
    device = CudaDevice(0)
    before = device.context_bytes()
    tensor = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda:0")
    assert 16 * MIB <= before <= 2048 * MIB
    assert abs(device.context_bytes() - before) <= 64 * MIB
    assert tensor.is_cuda


@on_gpu
@pytest.mark.parametrize("error", [None, KeyError("lables")], ids=["none", "error"])
def test_memory_fraction_comes_back(error: Exception | None) -> None:
    """The memory fraction that the user had set is in force again after success and after an error."""
    device = CudaDevice(0)
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    try:
        with device.limited_to(device.held_bytes(()) + 256 * MIB):
            assert cuda._memory_fraction(device.torch_device) < 0.5
            if error is not None:
                raise error
    except KeyError as caught:
        assert caught is error
    finally:
        after = cuda._memory_fraction(device.torch_device)
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert after == pytest.approx(0.5)


@on_gpu
def test_allocated_is_back_after_five_failures() -> None:
    """After five allocations that ran out the allocated bytes are, to the byte, what they were."""
    device = CudaDevice(0)
    before = torch.cuda.memory_allocated(0)
    with device.limited_to(device.held_bytes(()) + 256 * MIB):
        for _ in range(5):
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda:0")
    gc.collect()
    assert torch.cuda.memory_allocated(0) == before


@on_gpu
def test_retries_are_counted() -> None:
    """A step that fits only because the allocator flushed its cache is seen to have done so."""
    device = CudaDevice(0)
    gc.collect()
    device.release()
    with device.limited_to(device.held_bytes(()) + 300 * MIB), device.watched(()) as watch:
        first = torch.ones(200 * MIB, dtype=torch.uint8, device="cuda:0")
        del first  # its segment stays with the allocator and is too small for the next
        second = torch.ones(250 * MIB, dtype=torch.uint8, device="cuda:0")
        del second
    device.release()
    assert watch.allocator_retries >= 1


@on_gpu
def test_no_retries_where_there_is_room() -> None:
    """With room for all of it no retry is counted, and the peak holds the reserve and the context."""
    device = CudaDevice(0)
    device.release()
    with device.watched(()) as watch:
        torch.ones(64 * MIB, dtype=torch.uint8, device="cuda:0")
    assert watch.allocator_retries == 0
    assert watch.peak_allocated_bytes is not None and watch.peak_reserved_bytes is not None
    assert watch.peak_allocated_bytes <= watch.peak_reserved_bytes <= watch.peak_bytes


@on_gpu
def test_peak_holds_what_the_driver_sees(run_child: RunChild) -> None:
    """In a fresh process what is held is what the driver's free memory fell by, within 64 MiB."""
    held, fallen = run_child(
        """
        import pynvml, torch
        from autoaccum.devices import CudaDevice

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(0).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        before = pynvml.nvmlDeviceGetMemoryInfo(handle).free
        device = CudaDevice(0)
        tensor = torch.ones(2**28, dtype=torch.uint8, device="cuda:0")
        answer([device.held_bytes(()), before - pynvml.nvmlDeviceGetMemoryInfo(handle).free])
        """
    )
    assert held == pytest.approx(fallen, abs=64 * MIB)


@on_gpu
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_real_failure_is_recognised(phase: str) -> None:
    """Running out in forward, in backward and in the optimizer is each recognised, and a small step works afterwards."""
    from autoaccum.devices import ERROR_ROWS
    from autoaccum.devices.base import recognise
    from autoaccum.window import Progress, run_window

    width, hidden, rows = (4096, 16384, 1) if phase == "optimizer" else (8, 4096, 16384)
    room = {"forward": 128 * MIB, "backward": 660 * MIB, "optimizer": 700 * MIB}[phase]
    layers = [torch.nn.Linear(width, hidden, bias=False), torch.nn.ReLU(), torch.nn.Linear(hidden, 1, bias=False)]
    device, model = CudaDevice(0), torch.nn.Sequential(*layers).to("cuda:0")
    optimizer, progress = torch.optim.AdamW(model.parameters(), foreach=False), Progress()

    def step(count: int) -> None:
        run_window(
            [torch.ones(count, width)],
            [count],
            loss=lambda placed: model(placed).mean(),
            optimizer=optimizer,
            place=device.place,
            progress=progress,
        )

    gc.collect()
    device.release()
    with device.limited_to(device.held_bytes(()) + room):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(rows)
        row = recognise(caught.value, ERROR_ROWS)
        reached = progress.phase
    assert row is not None and row.verdict is Verdict.TOO_LARGE
    assert reached == phase
    del caught
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    gc.collect()
    device.release()
    step(1)
