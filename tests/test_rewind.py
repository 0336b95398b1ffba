"""Going back to the start of a window: random generators and buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoaccum.rewind import Rewinder

CPU = torch.device("cpu")
SMALL, LARGE = 16, 20_000  # float32 numbers: 64 bytes, and 80,000, above what is always copied


class Holder(nn.Module):
    """A module with one buffer."""

    state: Tensor

    def __init__(self, buffer: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("state", buffer)


def filled(size: int) -> Holder:
    """A module whose buffer holds zeros."""
    return Holder(torch.zeros(size))


def marked(module: nn.Module, windows: int = 1, change: Callable[[Any], None] = lambda module: None) -> Rewinder:
    """A rewinder at the start of a window; `change` is what each of the windows before it did."""
    rewinder = Rewinder(module, CPU)
    for window in range(windows):
        if window:
            change(module)
            rewinder.learn()
        rewinder.mark()
    return rewinder


def add_one(module: Holder) -> None:
    """Change the buffer in place."""
    module.state.add_(1)


def add_one_to_data(module: Holder) -> None:
    """Change the buffer in a way that its version does not show."""
    module.state.data.add_(1)


def copied_bytes(rewinder: Rewinder) -> int:
    """What the copies take."""
    return sum(kept.copy.nbytes for kept in rewinder._buffers if kept.copy is not None)


# -- generators


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(()))],
    ids=["python", "numpy", "torch"],
)
def test_generators_go_back(draw: Callable[[], float]) -> None:
    """After going back, the same random numbers come again."""
    rewinder = marked(nn.Linear(1, 1))
    before = [draw(), draw()]
    rewinder.rewind()
    assert [draw(), draw()] == before


def test_generator_of_the_modules_own_goes_back() -> None:
    """So does one that the module holds, as noise of its own has."""
    module = nn.Linear(1, 1)
    module.noise = torch.Generator().manual_seed(3)
    rewinder = marked(module)
    before = torch.rand(2, generator=module.noise)
    rewinder.rewind()
    assert torch.equal(torch.rand(2, generator=module.noise), before)


def test_each_mark_is_a_new_start() -> None:
    """Going back leads to the last mark, not to the first."""
    rewinder = marked(nn.Linear(1, 1))
    torch.rand(3)
    rewinder.mark()
    following = float(torch.rand(()))
    rewinder.rewind()
    assert float(torch.rand(())) == following


def test_going_back_twice() -> None:
    """A window that fails again goes back to the same start again."""
    module = filled(SMALL)
    rewinder, seen = marked(module), []
    for _ in range(3):
        seen.append((float(torch.rand(())), float(module.state[0])))
        add_one(module)
        assert rewinder.rewind() == []
    assert len(set(seen)) == 1


# -- buffers


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("change", [add_one, add_one_to_data], ids=["in place", "through data"])
def test_buffers_go_back_in_the_first_window(size: int, change: Callable[[Holder], None]) -> None:
    """In the first window every buffer goes back, however it was changed, in the tensor that it was in."""
    module = filled(size)
    buffer, rewinder = module.state, marked(module)
    change(module)
    assert rewinder.rewind() == []
    assert module.state is buffer and not buffer.any()


@pytest.mark.parametrize("change", [add_one, add_one_to_data], ids=["in place", "through data"])
def test_small_buffers_go_back_in_any_window(change: Callable[[Holder], None]) -> None:
    """Small buffers go back in later windows as well, also when they had not changed before."""
    module = filled(SMALL)
    rewinder = marked(module, windows=3)
    change(module)
    assert rewinder.rewind() == [] and not module.state.any()


@pytest.mark.parametrize("change", [add_one, add_one_to_data], ids=["in place", "through data"])
def test_large_buffers_that_change_go_back_in_any_window(change: Callable[[Holder], None]) -> None:
    """A large buffer that was seen to change in the first window goes back to the start of each later one."""
    module = filled(LARGE)
    rewinder = marked(module, windows=3, change=change)
    change(module)
    assert rewinder.rewind() == []
    assert bool((module.state == 2).all())


def test_large_buffer_that_first_changes_later_is_reported() -> None:
    """A large buffer of which no copy was kept is named as lost when it changes in a later window."""
    module = filled(LARGE)
    rewinder = marked(module, windows=2)
    add_one(module)
    assert rewinder.rewind() == ["state"]


def test_large_buffer_is_lost_once() -> None:
    """From the next window on, a buffer that changed once is copied and goes back."""
    module = filled(LARGE)
    rewinder = marked(module, windows=2)
    add_one(module)
    rewinder.learn()
    rewinder.mark()
    add_one(module)
    assert rewinder.rewind() == []
    assert bool((module.state == 1).all())


def test_large_buffers_that_never_change_are_not_copied() -> None:
    """After the first window no copy of a static large buffer is made, and nothing is reported lost."""
    module = filled(LARGE)
    rewinder = marked(module)
    assert copied_bytes(rewinder) == module.state.nbytes
    for _ in range(2):
        rewinder.learn()
        rewinder.mark()
        assert copied_bytes(rewinder) == 0
        assert rewinder.rewind() == []


def test_buffers_up_to_64_kib_are_always_copied() -> None:
    """The border between small and large is 64 KiB."""
    assert copied_bytes(marked(filled(16 * 1024), windows=2)) == 64 * 1024
    assert copied_bytes(marked(filled(16 * 1024 + 1), windows=2)) == 0


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("windows", [1, 2])
def test_replaced_buffers_go_back(size: int, windows: int) -> None:
    """Where the model puts another tensor in a buffer's place, the old one comes back, and is not lost."""
    module = filled(size)
    buffer, rewinder = module.state, marked(module, windows)
    module.state = module.state + 1
    assert rewinder.rewind() == []
    assert module.state is buffer and not buffer.any()


def test_batch_norm_goes_back() -> None:
    """The running statistics of BatchNorm, and its counter, are as at the start."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    rewinder = marked(module)
    module(torch.randn(8, 3))
    assert not torch.equal(before["1.running_mean"], module[1].running_mean)
    rewinder.rewind()
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_only_the_buffer_that_changed_is_lost() -> None:
    """Of several buffers only those are named that cannot be put back, and the others go back all the same."""
    module = nn.ModuleDict({"small": filled(SMALL), "moves": filled(LARGE), "stays": filled(LARGE)})
    rewinder = marked(module, windows=2)
    module["small"].state.add_(1)
    module["moves"].state.add_(1)
    assert rewinder.rewind() == ["state"]
    assert not module["small"].state.any()
    assert copied_bytes(rewinder) == 4 * SMALL


def test_buffer_that_is_none() -> None:
    """A buffer that is not there yet is no trouble."""
    assert marked(Holder(None)).rewind() == []


def test_sparse_buffer_goes_back() -> None:
    """A buffer of another layout goes back in any window."""
    module = Holder(torch.eye(3).to_sparse())
    rewinder = marked(module, windows=2)
    module.state.mul_(5)
    assert rewinder.rewind() == []
    assert torch.equal(module.state.to_dense(), torch.eye(3))


def test_buffer_with_a_hole_goes_back() -> None:
    """NaN in a buffer, which is not equal to itself, goes back like a number."""
    module = Holder(torch.full((LARGE,), float("nan")))
    rewinder = marked(module, windows=2)
    module.state.zero_()
    assert rewinder.rewind() == []
    assert bool(module.state.isnan().all())


def test_going_back_leaves_no_graph() -> None:
    """Buffers that go back while gradients are on take no part in any graph."""
    module = filled(SMALL)
    rewinder = marked(module)
    module.state.add_(torch.ones(SMALL, requires_grad=True).detach())
    rewinder.rewind()
    assert module.state.grad_fn is None and not module.state.requires_grad


def test_parameters_are_left_alone() -> None:
    """Parameters are not this module's business: a window changes them only in its last step."""
    module = nn.Linear(2, 2)
    rewinder = marked(module)
    with torch.no_grad():
        module.weight.fill_(7)
    rewinder.rewind()
    assert bool((module.weight == 7).all())


def test_buffer_that_two_undone_windows_change_goes_back() -> None:
    """Nothing is learned from a window that was undone, so the next one still keeps a copy of every buffer."""
    module = filled(LARGE)
    rewinder = Rewinder(module, CPU)
    for _ in range(2):
        rewinder.mark()
        add_one(module)
        assert rewinder.rewind() == []
    assert bool((module.state == 0).all())


def test_buffer_set_for_the_first_time() -> None:
    """A buffer that was None at the start of the window is None again."""
    module = nn.Module()
    module.register_buffer("scale", None)
    rewinder = marked(module)
    module.scale = torch.ones(3)
    assert rewinder.rewind() == []
    assert module.scale is None


def test_expanded_buffer() -> None:
    """A buffer whose elements share memory is no hindrance, and goes back."""
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(1, 1).expand(4, 4))
    rewinder = marked(module)
    module.mask[:, :1].data.fill_(0)
    module.mask.as_strided((1,), (1,)).fill_(2.0)
    assert rewinder.rewind() == []
    assert bool((module.mask == 0).all())


def test_buffer_made_in_inference_mode() -> None:
    """An inference tensor has no version and cannot be written to outside of that mode, and goes back all the same."""
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("state", torch.zeros(3))
    rewinder = marked(module)
    with torch.inference_mode():
        module.state.add_(1)
    assert rewinder.rewind() == []
    assert bool((module.state == 0).all())
