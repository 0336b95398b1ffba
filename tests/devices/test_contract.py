"""What every device promises, held by one suite that runs over all devices this machine has."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import psutil
import pytest
import torch
from torch import Tensor, nn

from autoaccum.devices import ERROR_ROWS, CpuDevice, CudaDevice, MpsDevice, VirtualDevice, XpuDevice
from autoaccum.devices.base import AbstractDevice, Steadiness, Verdict, Watch, recognise
from autoaccum.devices.limits import ProcessLimit
from autoaccum.window import Progress, run_window

MIB = 2**20
KNOWN_BYTES = 128 * MIB
ROOM_BYTES = 256 * MIB
TOO_LARGE_BYTES = 2**31  # above the room and the loosest net over it; the CPU's pages are never touched


class Kind(NamedTuple):
    name: str
    make: Callable[[], AbstractDevice]
    is_here: Callable[[], bool]
    marks: tuple[pytest.MarkDecorator, ...] = ()


def limited_cpu() -> CpuDevice:
    """As under a `ulimit -d` that leaves much room; the contract asks what is counted, not who refuses it."""
    return CpuDevice(ProcessLimit(CpuDevice().held_bytes(()) + 2**36, "VmData", "ulimit -d"))


KINDS = (
    Kind("cpu", CpuDevice, lambda: True),
    Kind("cpu-limited", limited_cpu, lambda: sys.platform == "linux"),
    Kind("virtual", lambda: VirtualDevice("8GiB"), lambda: True),
    Kind("cuda", lambda: CudaDevice(0), torch.cuda.is_available, (pytest.mark.gpu,)),
    Kind("xpu", lambda: XpuDevice(0), torch.xpu.is_available),
    Kind("mps", MpsDevice, torch.backends.mps.is_available),
)


def as_parameter(kind: Kind) -> object:
    """The kind as a parameter of every test, skipped with its reason where it is not here."""
    missing = pytest.mark.skipif(not kind.is_here(), reason=f"torch finds no {kind.name} device in this process")
    return pytest.param(kind.make, id=kind.name, marks=(*kind.marks, missing))


@pytest.fixture(params=[as_parameter(kind) for kind in KINDS])
def device(request: pytest.FixtureRequest) -> AbstractDevice:
    """A device of each kind in turn."""
    made: AbstractDevice = request.param()
    return made


def filled(device: AbstractDevice, num_bytes: int) -> Tensor:
    """An allocation of this size whose every page is written to."""
    return torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)


@contextmanager
def limited(device: AbstractDevice, room_bytes: int = ROOM_BYTES) -> Iterator[Watch]:
    """Inside the device's limit, as a trial is: this much above what is held already."""
    with device.limited_to(device.held_bytes(()) + room_bytes), device.watched(()) as watch:
        yield watch


def is_refused(device: AbstractDevice, num_bytes: int = TOO_LARGE_BYTES) -> bool:
    """Whether an allocation fails with an error that is recognised as too large."""
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    except RuntimeError as error:
        row = recognise(error, ERROR_ROWS)
        return row is not None and row.verdict is Verdict.TOO_LARGE
    return False


def peak_of_training(device: AbstractDevice, rows: int) -> int:
    """The peak of two optimizer steps of a small network, from the same start each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 16)).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(rows, 16)
    gc.collect()
    device.release()
    with device.watched(list(model.parameters())) as watch:
        for _ in range(2):
            run_window(
                [batch, batch],
                [rows, rows],
                loss=lambda placed: model(placed).pow(2).mean(),
                optimizer=optimizer,
                place=device.place,
                progress=Progress(),
            )
    return watch.peak_bytes


def test_what_is_free_is_part_of_the_total(device: AbstractDevice) -> None:
    """What is free is above zero and not above the total."""
    assert 0 < device.free_bytes() <= device.total_bytes()


def test_the_reserve_leaves_something(device: AbstractDevice) -> None:
    """What is left free for others is less than what is free."""
    assert 0 <= device.reserve_bytes() < device.free_bytes()


def test_has_a_name_and_words(device: AbstractDevice) -> None:
    """The name begins with the kind of device, and the hardware is described."""
    kinds = ("cpu", "virtual:", "cuda:", "xpu:", "mps")
    assert device.name.startswith(kinds)
    assert device.description().strip()


def test_others_that_hold_memory(device: AbstractDevice) -> None:
    """Other processes come the largest first, and this process is not among them."""
    holders = device.holders()
    sizes = [holder.held_bytes or 0 for holder in holders]
    assert sizes == sorted(sizes, reverse=True)
    assert psutil.Process().pid not in [holder.pid for holder in holders]


def test_a_tensor_is_held(device: AbstractDevice) -> None:
    """What is held grows by the size of a tensor that is made."""
    before = device.held_bytes(())
    tensor = filled(device, KNOWN_BYTES)
    grown = device.held_bytes([tensor]) - before
    assert 0.9 * KNOWN_BYTES <= grown <= 1.25 * KNOWN_BYTES


def test_released_memory_is_not_held(device: AbstractDevice) -> None:
    """After the tensor is gone and the device released, what is held is what was held before."""
    device.release()
    before = device.held_bytes(())
    tensor = filled(device, KNOWN_BYTES)
    del tensor
    device.release()
    device.synchronize()
    assert device.held_bytes(()) - before < 0.25 * KNOWN_BYTES


def test_the_peak_holds_an_allocation(device: AbstractDevice) -> None:
    """The peak has an allocation of known size in it, also when that is gone before the watch ends."""
    device.release()
    before = device.held_bytes(())
    with device.watched(()) as watch:
        tensor = filled(device, KNOWN_BYTES)
        del tensor
        torch.ones(8, device=device.torch_device)
    assert 0.9 * KNOWN_BYTES <= watch.peak_bytes - before <= 1.25 * KNOWN_BYTES


def test_the_peak_leaves_out_what_was_before(device: AbstractDevice) -> None:
    """What was allocated and freed before the watch began is not in its peak."""
    tensor = filled(device, 4 * KNOWN_BYTES)
    del tensor
    device.release()
    before = device.held_bytes(())
    with device.watched(()) as watch:
        torch.ones(8, device=device.torch_device)
    assert watch.peak_bytes - before < KNOWN_BYTES


def test_an_error_passes_through_the_watch(device: AbstractDevice) -> None:
    """An error inside a watch comes out as the same object, and the next watch measures as ever."""
    error = KeyError("lables")
    with pytest.raises(KeyError) as caught, device.watched(()):
        raise error
    assert caught.value is error
    with device.watched(()) as watch:
        filled(device, KNOWN_BYTES)
    assert watch.peak_bytes >= KNOWN_BYTES


def test_too_large_is_refused_inside_the_limit(device: AbstractDevice) -> None:
    """An allocation far above the budget raises inside the limit, and the error is recognised as too large."""
    with limited(device):
        assert is_refused(device)


def test_a_smaller_one_works_after_it(device: AbstractDevice) -> None:
    """After an allocation was refused, one that fits the budget works, still inside the limit."""
    with limited(device) as watch:
        assert is_refused(device)
        tensor = filled(device, KNOWN_BYTES)
        assert int(tensor[-1]) == 1
    assert watch.peak_bytes >= KNOWN_BYTES


def test_the_limit_ends_with_its_block(device: AbstractDevice) -> None:
    """What the limit refused is granted after its block has ended."""
    with limited(device):
        assert is_refused(device)
    with device.watched(()):
        assert not is_refused(device)


def test_the_limit_ends_with_an_error(device: AbstractDevice) -> None:
    """What the limit refused is granted after its block was left by an exception."""
    with pytest.raises(KeyError), limited(device):
        raise KeyError("lables")
    with device.watched(()):
        assert not is_refused(device)


def test_an_inner_limit_does_not_loosen_the_outer_one(device: AbstractDevice) -> None:
    """A larger limit inside a smaller one leaves the smaller one in force."""
    with ExitStack() as stack:
        stack.enter_context(device.limited_to(device.held_bytes(()) + ROOM_BYTES))
        stack.enter_context(device.limited_to(device.held_bytes(()) + 4 * TOO_LARGE_BYTES))
        stack.enter_context(device.watched(()))
        assert is_refused(device)


def test_placed_is_where_the_device_is(device: AbstractDevice) -> None:
    """A placed batch has the same structure and values, with every tensor on the device."""
    batch = {"input": torch.arange(6.0).reshape(2, 3), "more": [torch.tensor([True, False]), "text", 3]}
    placed = device.place(batch)
    assert placed.keys() == batch.keys()
    assert placed["input"].device == placed["more"][0].device == device.torch_device
    assert torch.equal(placed["input"].cpu(), torch.arange(6.0).reshape(2, 3))
    assert placed["more"][0].tolist() == [True, False]
    assert placed["more"][1:] == ["text", 3]


def test_placing_costs_nothing_only_on_the_host(device: AbstractDevice) -> None:
    """A placed tensor shares its memory with the loader's exactly where the host is the device."""
    tensor = torch.ones(4)
    placed = device.place(tensor)
    assert (placed.data_ptr() == tensor.data_ptr()) == device.is_host


def test_one_size_has_one_peak(device: AbstractDevice) -> None:
    """Of five peaks of the same training steps under steady settings, three at least lie within 1 %.

    Not all five: in processes that had run thousands of other tests the second was seen 7 and 8 MiB above the first, of 640,
    for a reason that is not known. Peaks that wander, as with the C library's usual settings, would fail.
    """
    with device.steadied() as steadiness:
        peak_of_training(device, 2048)  # libraries are loaded by the first
        peaks = sorted(peak_of_training(device, 2048) for _ in range(5))
        steadiness.settle(peak_bytes=peaks[0], held_bytes=0, budget_bytes=4 * peaks[0])
    assert min(peaks[third] / peaks[third - 2] for third in (2, 3, 4)) <= 1.01


def test_a_larger_size_has_a_larger_peak(device: AbstractDevice) -> None:
    """Four times the rows have a higher peak, by at least the hidden activations that the backward pass needs."""
    with device.steadied() as steadiness:
        peak_of_training(device, 1024)
        small, large = peak_of_training(device, 1024), peak_of_training(device, 4096)
        steadiness.settle(peak_bytes=large, held_bytes=0, budget_bytes=4 * large)
    assert large - small >= (4096 - 1024) * 1024 * 4


def test_steadiness_can_be_settled(device: AbstractDevice) -> None:
    """With ample room a device settles for its usual settings and has nothing to say."""
    with device.steadied() as steadiness:
        assert isinstance(steadiness, Steadiness)
        assert steadiness.settle(peak_bytes=100, held_bytes=10, budget_bytes=10**6) is None
