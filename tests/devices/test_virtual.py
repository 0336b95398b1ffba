"""The virtual device: what it counts, to the byte, and where it runs out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from autoaccum.devices.virtual import StorageTracker, VirtualDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.window import Progress, run_window

BLOCK = 512
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]


def rounded(num_bytes: int) -> int:
    """As the caching allocator rounds a request."""
    return (num_bytes + BLOCK - 1) // BLOCK * BLOCK


def floats(count: int) -> int:
    """What a storage of this many float32 counts for."""
    return rounded(4 * count)


@pytest.fixture
def tracker() -> Iterator[StorageTracker]:
    """A tracker without a capacity, in force."""
    made = StorageTracker()
    with made:
        yield made
    made.close()


# -- what is counted


@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000, 4096])
def test_size_is_rounded(tracker: StorageTracker, count: int) -> None:
    """A storage counts for its bytes rounded up to a block of 512."""
    kept = torch.empty(count)
    assert tracker.live_bytes == floats(count) == rounded(kept.untyped_storage().nbytes())


def test_nothing_for_an_empty_tensor(tracker: StorageTracker) -> None:
    """A tensor without elements counts for nothing."""
    kept = torch.empty(0, 7)
    assert kept.numel() == tracker.live_bytes == 0


def test_a_view_counts_once(tracker: StorageTracker) -> None:
    """Views, slices and transposes of one storage are one storage."""
    whole = torch.empty(64, 64)
    parts = [whole[3:], whole.t(), whole.view(-1), whole.detach(), whole.expand(9, 64, 64)]
    assert len(parts) == 5
    assert tracker.live_bytes == floats(64 * 64)


def test_a_view_keeps_the_whole(tracker: StorageTracker) -> None:
    """While a view of one row lives, the whole storage behind it counts."""
    row = torch.empty(64, 64)[0]
    assert row.numel() == 64
    assert tracker.live_bytes == floats(64 * 64)


def test_freed_is_forgotten(tracker: StorageTracker) -> None:
    """A storage counts until its last tensor is gone, and no longer."""
    first = torch.empty(1000)
    second = first.view(10, 100)
    del first
    assert tracker.live_bytes == floats(1000)
    del second
    assert tracker.live_bytes == 0


def test_storage_held_by_the_graph_counts(tracker: StorageTracker) -> None:
    """An activation that only the autograd graph still holds counts until the graph is gone."""
    weight = torch.empty(1000, requires_grad=True)
    loss = weight.exp().sum()  # exp keeps its result for the backward pass
    assert tracker.live_bytes == 2 * floats(1000) + floats(1)
    del loss
    assert tracker.live_bytes == floats(1000)


def test_peak_stays(tracker: StorageTracker) -> None:
    """The peak is the most that was alive at once, and does not sink."""
    first = torch.empty(1000)
    second = torch.empty(3000)
    assert tracker.peak_bytes == floats(1000) + floats(3000)
    del first, second
    assert tracker.peak_bytes == floats(1000) + floats(3000)
    assert tracker.live_bytes == 0


def test_resize_in_place(tracker: StorageTracker) -> None:
    """A tensor that is resized in place counts for its new size."""
    kept = torch.empty(1000)
    kept.resize_(5000)
    assert tracker.live_bytes == floats(5000)


def test_resize_of_an_empty_tensor(tracker: StorageTracker) -> None:
    """A tensor that is made empty and then filled by `out=` counts for what it became."""
    kept = torch.empty(0)
    torch.add(torch.ones(1000), 1, out=kept)
    assert tracker.live_bytes == floats(1000)


def test_set_to_another_storage(tracker: StorageTracker) -> None:
    """A tensor that is set to another one's storage lets go of its own."""
    kept, other = torch.ones(1000), torch.ones(300)
    kept.set_(other)
    assert tracker.live_bytes == floats(300)


def test_tensor_that_comes_from_outside(tracker: StorageTracker) -> None:
    """A tensor made where the tracker could not see it counts from its first use on."""
    with tracker.paused():
        outside = torch.ones(1000)
    assert tracker.live_bytes == 0
    outside.add_(1)
    assert tracker.live_bytes == floats(1000)


def test_tensors_in_lists_count(tracker: StorageTracker) -> None:
    """What an operation gives back as a list, and what it takes as one, is counted."""
    kept = torch._foreach_add([torch.ones(200), torch.ones(300)], 1.0)
    assert tracker.live_bytes == floats(200) + floats(300)
    assert len(kept) == 2
    assert tracker.peak_bytes == 2 * (floats(200) + floats(300))


def test_sparse_coo_counts_its_parts(tracker: StorageTracker) -> None:
    """A sparse tensor counts for its indices and values."""
    kept = torch.sparse_coo_tensor(torch.zeros(2, 1000, dtype=torch.int64), torch.ones(1000), (8, 8), check_invariants=False)
    gc.collect()
    assert kept.is_sparse
    assert tracker.live_bytes == rounded(2 * 1000 * 8) + floats(1000)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_sparse_counts_its_parts(layout: torch.layout) -> None:
    """A compressed sparse tensor counts for its two kinds of indices and its values."""
    starts, places, values = torch.arange(1001), torch.arange(1000), torch.ones(1000)
    matrix = torch.sparse_compressed_tensor(starts, places, values, layout=layout, check_invariants=True)
    tracker = StorageTracker()
    tracker.count([matrix])
    assert tracker.live_bytes == rounded(1001 * 8) + rounded(1000 * 8) + floats(1000)
    tracker.close()


def test_fake_tensors_count_as_real_ones() -> None:
    """The same steps on fake tensors give the same peak as on real ones."""

    def peak() -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        tracker = StorageTracker()
        with tracker:
            model(torch.ones(32, 64)).pow(2).mean().backward()
        tracker.close()
        return tracker.peak_bytes

    real = peak()
    with FakeTensorMode():
        assert peak() == real


def test_closed_tracker_is_let_go() -> None:
    """Storages that outlive a tracker hold nothing of it once it is closed."""
    weight = torch.ones(1000)
    tracker = StorageTracker()
    tracker.count([weight])
    gone = weakref.ref(tracker)
    tracker.close()
    del tracker
    gc.collect()
    assert gone() is None


def test_trials_leave_nothing_at_the_parameters() -> None:
    """Watching a model many times hangs nothing on the storages of its parameters."""
    layer, device = nn.Linear(8, 8), VirtualDevice("1MiB")
    for _ in range(3):
        device.held_bytes(list(layer.parameters()))
        with device.watched(list(layer.parameters())):
            pass
    assert weakref.getweakrefcount(layer.weight.untyped_storage()) == 0


# -- the device


@pytest.mark.parametrize(("capacity", "num_bytes"), [("2GiB", 2**31), ("512 MB", 512 * 10**6), (4096, 4096)])
def test_capacity_is_read(capacity: int | str, num_bytes: int) -> None:
    """A capacity is bytes or text with a unit, and is the total and what is free."""
    device = VirtualDevice(capacity)
    assert device.total_bytes() == device.free_bytes() == num_bytes


def test_name_holds_the_capacity() -> None:
    """The name says how large the device is."""
    assert VirtualDevice("8GiB").name == "virtual:8.00 GiB"


@pytest.mark.parametrize("capacity", ["80%", "much", "-1", 0])
def test_capacity_that_is_no_size(capacity: int | str) -> None:
    """A share, nonsense or nothing is refused, and the message names the parameter."""
    with pytest.raises(InvalidRequestError, match="capacity_bytes"):
        VirtualDevice(capacity)


def test_reserves_nothing() -> None:
    """All of a virtual device may be used."""
    assert VirtualDevice("1GiB").reserve_bytes() == 0


def test_held_counts_tied_weights_once() -> None:
    """What is held is the distinct storages of the model, a tied weight once, each rounded."""
    embedding, head = nn.Embedding(100, 30), nn.Linear(30, 100, bias=True)
    head.weight = embedding.weight
    resident = [*embedding.parameters(), *head.parameters()]
    assert len(resident) == 3
    assert VirtualDevice("1GiB").held_bytes(resident) == floats(100 * 30) + floats(100)


def test_residents_are_in_the_peak() -> None:
    """Parameters are in the peak of a watch in which nothing else happens."""
    layer = nn.Linear(100, 100)
    device = VirtualDevice("1GiB")
    with device.watched(list(layer.parameters())) as watch:
        pass
    assert watch.peak_bytes == watch.peak_allocated_bytes == floats(100 * 100) + floats(100)


def test_residents_that_do_not_fit() -> None:
    """Parameters above the capacity run out before anything is run."""
    layer = nn.Linear(100, 100)
    with pytest.raises(torch.OutOfMemoryError), VirtualDevice(10_000).watched(list(layer.parameters())):
        raise AssertionError("was run")


def test_message_tells_sizes() -> None:
    """The error says what was asked for, what there is and what of it is in use."""
    with pytest.raises(torch.OutOfMemoryError) as caught, VirtualDevice("1MiB").watched(()):
        kept = torch.ones(2**16)
        torch.ones(2**18)
    assert kept.numel() == 2**16
    text = str(caught.value)
    assert "virtual device out of memory. Tried to allocate 1.00 MiB" in text
    assert "capacity of 1.00 MiB, of which 256 KiB is in use" in text


def test_exactly_full_is_not_too_full() -> None:
    """An allocation that takes the last byte succeeds, one of a byte more does not."""
    with VirtualDevice(4096).watched(()) as watch:
        torch.ones(1024)
    assert watch.peak_bytes == 4096
    with pytest.raises(torch.OutOfMemoryError), VirtualDevice(4096).watched(()):
        torch.ones(1025)


def test_refused_allocation_is_not_in_the_peak() -> None:
    """The peak holds what was there, not what was refused."""
    device = VirtualDevice("1MiB")
    with device.watched(()) as watch, pytest.raises(torch.OutOfMemoryError):
        torch.ones(2**20)
    assert watch.peak_bytes == 0


def test_limit_is_the_capacity_at_most() -> None:
    """A budget above the capacity does not make the device larger."""
    device = VirtualDevice(4096)
    with device.limited_to(10**9), pytest.raises(torch.OutOfMemoryError), device.watched(()):
        torch.ones(1025)


def test_limit_is_in_force_for_the_bytes_named() -> None:
    """A budget is enforced to the byte, and the old limit is back afterwards."""
    device = VirtualDevice("1MiB")
    with device.limited_to(4096):
        with device.watched(()):
            torch.ones(1024)
        with pytest.raises(torch.OutOfMemoryError), device.watched(()):
            torch.ones(1025)
    with device.watched(()) as watch:
        torch.ones(1025)
    assert watch.peak_bytes == 4096 + BLOCK


def test_placing_counts_the_copy_only() -> None:
    """Of a placed micro-batch the copy counts, and the batch it was cut from does not."""
    micro_batch = {"input": torch.ones(64, 1000)[:2]}
    device = VirtualDevice("1GiB")
    with device.watched(()) as watch:
        placed = device.place(micro_batch)
    assert placed["input"].shape == (2, 1000)
    assert watch.peak_bytes == floats(2 * 1000)


def test_placing_can_run_out() -> None:
    """A micro-batch that alone is above the capacity runs out when it is placed."""
    device = VirtualDevice("1MiB")
    with pytest.raises(torch.OutOfMemoryError), device.watched(()):
        device.place(torch.ones(2**19))


def test_placing_outside_of_a_watch() -> None:
    """Without a watch a placed batch is a copy of its own."""
    batch = torch.ones(4)
    placed = VirtualDevice("1MiB").place([batch])
    placed[0].zero_()
    assert batch.tolist() == [1, 1, 1, 1]


# -- training steps


def step(
    device: VirtualDevice,
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Tensor],
    progress: Progress | None = None,
    windows: int = 1,
) -> int:
    """The peak of training steps under the device's capacity."""
    resident = [*model.parameters(), *model.buffers()]
    with device.watched(resident) as watch:
        for _ in range(windows):
            run_window(
                micro_batches,
                [len(micro_batch) for micro_batch in micro_batches],
                loss=lambda placed: model(placed).mean(),
                optimizer=optimizer,
                place=device.place,
                progress=progress or Progress(),
            )
    return watch.peak_bytes


def network(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers without biases, so that all sizes are known."""
    return nn.Sequential(nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 1, bias=False))


SCALARS = 16 * BLOCK  # losses, weights of them and their gradients


def test_peak_of_two_micro_batches_by_hand() -> None:
    """The peak of accumulation in a small network is the sum that can be worked out on paper."""
    width, hidden, rows = 256, 2048, 64
    batch = torch.ones(rows, width)
    model = network(width, hidden)
    peak = step(VirtualDevice("1GiB"), model, SGD(model.parameters(), lr=0.1, foreach=False), [batch, batch])
    weights = floats(width * hidden) + floats(hidden)
    gradients = weights  # of the first micro-batch
    # The second micro-batch ends with the gradient of the first layer's weight: its factors, the placed batch and the
    # gradient of the hidden values, are there, and so is the result, which is then added to the gradient that exists.
    expected = weights + gradients + floats(rows * width) + floats(rows * hidden) + floats(width * hidden)
    assert expected <= peak <= expected + SCALARS


def test_peak_of_wide_activations_by_hand() -> None:
    """Where activations are the larger part, the peak is three of them: kept, its gradient, the gradient before it."""
    width, hidden, rows = 8, 4096, 512
    model = network(width, hidden)
    batch = torch.ones(rows, width)
    peak = step(VirtualDevice("1GiB"), model, SGD(model.parameters(), lr=0.1, foreach=False), [batch])
    weights = floats(width * hidden) + floats(hidden)
    expected = weights + floats(hidden) + floats(rows * width) + 3 * floats(rows * hidden)
    assert expected <= peak <= expected + SCALARS


def allocator_peak(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch's own CPU allocator had given out at once, from its profiler's log."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: AdamW(parameters, foreach=False),
        lambda parameters: AdamW(parameters, foreach=True),
    ],
    ids=["momentum", "adamw", "adamw-foreach"],
)
def test_peak_is_the_allocators(make: MakeOptimizer, rows: int) -> None:
    """Beyond the parameters the peak is what PyTorch's allocator itself logged for the same steps, within 2 %."""
    device, batch = VirtualDevice("1GiB"), torch.ones(rows, 128)

    def build() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 128))
        return model, make(model.parameters())

    model, optimizer = build()
    counted = step(device, model, optimizer, [batch, batch], windows=2) - device.held_bytes(list(model.parameters()))
    model, optimizer = build()

    def plain() -> None:
        for _ in range(2):
            for _ in range(2):
                (model(batch.clone()).mean() * 0.5).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    assert counted == pytest.approx(allocator_peak(plain), rel=0.02)


def test_peak_is_affine_in_the_batch() -> None:
    """Peaks of sizes in which activations are the larger part lie on one line, to the byte."""

    def peak(rows: int) -> int:
        model = network(128, 1024)
        return step(VirtualDevice("1GiB"), model, SGD(model.parameters(), lr=0.1), [torch.ones(rows, 128)] * 2)

    first, second, third = peak(512), peak(1024), peak(1536)
    assert third - second == second - first > 0


def test_foreach_needs_a_copy_of_the_parameters() -> None:
    """An AdamW that works on all parameters at once holds temporaries as large as they are; one by one it does not."""

    def peak(foreach: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
        return step(
            VirtualDevice("1GiB"), model, AdamW(model.parameters(), foreach=foreach), [torch.ones(1, 256)], windows=2
        )

    one = floats(256 * 256)
    held = 4 * 8 * one  # parameters, gradients and two moments
    assert held + 8 * one <= peak(True) <= held + 8 * one + 8 * SCALARS
    assert peak(False) <= held + 3 * one + 8 * SCALARS


def test_state_is_in_the_peak_of_the_second_step() -> None:
    """The second step has the optimizer's state from its first micro-batch on, the first step has not."""

    def peak(windows: int) -> int:
        model = network(64, 512)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return step(VirtualDevice("1GiB"), model, optimizer, [torch.ones(256, 64)] * 2, windows=windows)

    assert peak(2) - peak(1) == floats(64 * 512) + floats(512)


def test_frozen_weights_have_no_gradient_and_no_state() -> None:
    """With a frozen first layer the peak of a step with wide weights is lower by its gradient and both moments."""

    def peak(frozen: bool) -> int:
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        model[0].requires_grad_(not frozen)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return step(VirtualDevice("1GiB"), model, AdamW(trained, foreach=False), [torch.ones(1, 512)], windows=2)

    assert peak(False) - peak(True) >= 3 * floats(512 * 512)


def test_sparse_gradient_is_small() -> None:
    """The gradient of a sparse embedding counts for the rows looked up, not for the table."""
    table = floats(20_000 * 64)

    def peak(sparse: bool) -> int:
        model = nn.Embedding(20_000, 64, sparse=sparse)
        return step(VirtualDevice("1GiB"), model, SGD(model.parameters(), lr=0.1), [torch.arange(8)])

    assert peak(False) >= 2 * table
    assert table < peak(True) <= table + 20 * BLOCK + 4 * floats(8 * 64)


# -- running out


def run_out(device: VirtualDevice, model: nn.Module, optimizer: Optimizer, rows: int, width: int) -> str:
    """The phase in which a step runs out."""
    progress = Progress()
    with pytest.raises(torch.OutOfMemoryError):
        step(device, model, optimizer, [torch.ones(rows, width)], progress)
    return progress.phase


def test_runs_out_in_forward() -> None:
    """A capacity below the hidden values runs out in the forward pass, as a real torch.OutOfMemoryError."""
    model = network(8, 4096)
    capacity = floats(8 * 4096) + floats(4096) + floats(512 * 8) + floats(512 * 4096) // 2
    assert run_out(VirtualDevice(capacity), model, SGD(model.parameters()), 512, 8) == "forward"


def test_runs_out_in_backward() -> None:
    """A capacity for two activations holds the forward pass and runs out in the backward pass, which needs three."""
    model = network(8, 4096)
    capacity = 2 * floats(8 * 4096) + 2 * floats(4096) + floats(512 * 8) + int(2.5 * floats(512 * 4096))
    assert run_out(VirtualDevice(capacity), model, SGD(model.parameters()), 512, 8) == "backward"


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: AdamW(parameters, foreach=False),
        lambda parameters: AdamW(parameters, foreach=True),
    ],
    ids=["momentum", "adamw", "adamw-foreach"],
)
def test_runs_out_in_the_optimizer(make: MakeOptimizer) -> None:
    """A capacity for weights and gradients runs out where the optimizer makes its state."""
    model = network(512, 512)
    capacity = int(2.5 * floats(512 * 512))
    assert run_out(VirtualDevice(capacity), model, make(model.parameters()), 1, 512) == "optimizer"


def test_runs_out_with_the_data() -> None:
    """A capacity that holds the model but not the micro-batch runs out before the forward pass."""
    model = network(512, 8)
    capacity = floats(512 * 8) + floats(8) + floats(64 * 512) // 2
    assert run_out(VirtualDevice(capacity), model, SGD(model.parameters()), 64, 512) == "data"


def test_goes_on_after_running_out() -> None:
    """After a step that ran out, a smaller one fits the same device, and nothing of the first counts any more."""
    model = network(8, 4096)
    device = VirtualDevice(floats(512 * 4096) * 2)
    assert run_out(device, model, SGD(model.parameters(), lr=0.1), 512, 8) in ("forward", "backward")
    fresh = network(8, 4096)
    small = step(VirtualDevice("1GiB"), fresh, SGD(fresh.parameters(), lr=0.1), [torch.ones(64, 8)])
    model.zero_grad(set_to_none=True)
    assert step(device, model, SGD(model.parameters(), lr=0.1), [torch.ones(64, 8)]) == small


def test_capacity_decides_to_the_block() -> None:
    """A step fits a capacity equal to its peak and does not fit one block less."""

    def attempt(capacity: int) -> int:
        model = network(64, 512)
        return step(VirtualDevice(capacity), model, AdamW(model.parameters()), [torch.ones(100, 64)] * 2, windows=2)

    peak = attempt(2**30)
    assert attempt(peak) == peak
    with pytest.raises(torch.OutOfMemoryError):
        attempt(peak - BLOCK)


def test_storage_that_fsdp_empties_in_place_is_not_counted() -> None:
    """No operation tells that whole weights are freed, so it is looked for before a new peak is believed."""
    import torch.distributed.fsdp

    gathered, weights = torch.ones(4096), torch.empty(4096)
    with StorageTracker() as tracker:
        torch.ops.fsdp.split_with_sizes_copy(gathered, [4096], dim=0, out=[weights])
        assert tracker.live_bytes == 2 * 16384
        weights.untyped_storage().resize_(0)
        kept = torch.ones(8192)
        assert tracker.live_bytes == tracker.peak_bytes == 16384 + kept.nbytes
        weights.untyped_storage().resize_(16384)
        torch.ops.fsdp.split_with_sizes_copy(gathered, [4096], dim=0, out=[weights])
        assert tracker.live_bytes == tracker.peak_bytes == 2 * 16384 + kept.nbytes
    tracker.close()
