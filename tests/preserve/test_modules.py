"""What modules hold is as it was: registries, hooks, and tensors kept beside them."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.preserve import preserved

from .networks import CPU, build_network


def test_parameter_that_was_registered_is_gone() -> None:
    """What a step registers in a module - parameter, buffer, submodule - is gone, and the rest in its order."""
    layer = nn.Linear(2, 2)
    with preserved(layer, device=CPU):
        layer.register_parameter("extra", nn.Parameter(torch.ones(2)))
        layer.register_buffer("table", torch.ones(2))
        layer.add_module("inner", nn.ReLU())
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.buffers()) == []
    assert list(layer.children()) == []


def test_parameter_that_was_removed_is_back() -> None:
    """What a step takes out of a module is back, the same object in the same place."""
    model = build_network()
    names, weight = [name for name, _ in model.named_parameters()], model[0].weight
    with preserved(model, device=CPU):
        del model[0].weight
        model[0].weight = torch.zeros(6, 6)
        del model[4]
    assert [name for name, _ in model.named_parameters()] == names
    assert model[0].weight is weight


def test_buffer_that_is_not_saved_stays_so() -> None:
    """A buffer that is not part of the state dict is not part of it after it was removed and restored."""
    module = nn.Module()
    module.register_buffer("kept", torch.ones(2), persistent=False)
    with preserved(module, device=CPU):
        del module.kept
    assert module.kept.tolist() == [1, 1]
    assert list(module.state_dict()) == []


def test_tensor_that_was_remembered_is_dropped() -> None:
    """An activation that a step stores as a plain attribute is let go."""
    layer = nn.Linear(2, 2)
    with preserved(layer, device=CPU):
        hidden = layer(torch.ones(1, 2))
        layer.attention = hidden
        layer.more = {"maps": [hidden]}
        gone = weakref.ref(hidden)
        del hidden
    assert not hasattr(layer, "attention")
    assert not hasattr(layer, "more")
    gc.collect()
    assert gone() is None


def test_tensor_that_was_there_is_back() -> None:
    """A plain attribute that held a tensor holds the same one, with its values, also where it was written to in place."""
    layer = nn.Linear(2, 2)
    layer.count = kept = torch.zeros(2)
    with preserved(layer, device=CPU):
        layer.count += 1
        layer.count = torch.ones(1)
    assert layer.count is kept
    assert kept.tolist() == [0, 0]


def test_attribute_that_becomes_a_tensor() -> None:
    """An attribute that is None until a step stores a tensor in it is None again, and still there."""
    layer = nn.Linear(2, 2)
    layer.cache = None
    with preserved(layer, device=CPU):
        layer.cache = layer(torch.ones(1, 2))
    assert layer.cache is None


def test_list_that_a_step_fills() -> None:
    """A list or dict into which a step puts activations is the same object, with what it held before."""
    layer = nn.Linear(2, 2)
    layer.maps, layer.by_name = [], {"inner": {}, "kept": [torch.ones(1)]}
    maps, inner = layer.maps, layer.by_name["inner"]
    with preserved(layer, device=CPU):
        hidden = layer(torch.ones(1, 2))
        layer.maps.append(hidden)
        layer.by_name["inner"]["first"] = hidden
        layer.by_name["kept"].append(hidden)
        layer.by_name["new"] = hidden
        gone = weakref.ref(hidden)
        del hidden
    assert layer.maps is maps and maps == []
    assert layer.by_name["inner"] is inner and inner == {}
    assert len(layer.by_name["kept"]) == 1
    assert list(layer.by_name) == ["inner", "kept"]
    gc.collect()
    assert gone() is None


def test_counters_and_flags_are_as_before() -> None:
    """What a step counts or notes in attributes is as it was: a flag "initialised" goes with the weights that it is of."""
    layer = nn.Linear(2, 2)
    layer.calls, layer.initialized, layer.mode, layer.last = 3, False, "warm", None
    with preserved(layer, device=CPU):
        layer.calls, layer.initialized, layer.mode, layer.last = 5, True, "cold", 0.5
        layer.seen = 7
    assert (layer.calls, layer.initialized, layer.mode, layer.last) == (3, False, "warm", None)
    assert not hasattr(layer, "seen")


def test_counters_go_on_between_trials() -> None:
    """They are put back on the way out alone, not by the restoring in between."""
    layer = nn.Linear(2, 2)
    layer.calls = 0
    with preserved(layer, device=CPU) as snapshot:
        layer.calls = 2
        snapshot.restore()
        assert layer.calls == 2
    assert layer.calls == 0


def test_a_flag_goes_with_the_hooks_it_is_of() -> None:
    """A hook that a first forward pass installs is gone between trials, and so is the flag that says that it is there."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.calls = 0
    with preserved(model, device=CPU) as snapshot:
        model[0].register_forward_hook(lambda module, inputs, output: output)
        model.installed, model.calls = True, 1
        snapshot.restore()
        assert not hasattr(model, "installed") and not model[0]._forward_hooks
        assert model.calls == 0


@pytest.mark.parametrize("held", ["buffer", "attribute", "dict"])
def test_a_number_goes_with_the_tensors_it_is_of(held: str) -> None:
    """A table that grows with the longest sequence is as before between trials, and so is the length it has."""
    layer, other = nn.Linear(2, 2), nn.ReLU()
    layer.register_buffer("table", torch.zeros(0), persistent=False)
    layer.own, layer.by_name, layer.length, other.calls = torch.zeros(0), {}, 0, 0
    with preserved(nn.Sequential(layer, other), device=CPU) as snapshot:
        if held == "dict":
            layer.by_name["table"] = torch.ones(7)
        else:
            setattr(layer, "table" if held == "buffer" else "own", torch.ones(7))
        layer.length, other.calls = 7, 1
        snapshot.restore()
        assert (len(layer.table), len(layer.own), layer.by_name, layer.length) == (0, 0, {}, 0)
        assert other.calls == 1  # which has no tensors


def test_logs_are_the_users() -> None:
    """A list of numbers, such as the sizes that were seen, and an object of the user's own keep what was put into them."""
    layer = nn.Linear(2, 2)
    layer.sizes, layer.config = [1], SimpleNamespace(rate=1)
    with preserved(layer, device=CPU):
        layer.sizes.append(8)
        layer.config.rate = 2
    assert (layer.sizes, layer.config.rate) == ([1, 8], 2)


def test_torchs_wrapper_keeps_its_own_marks() -> None:
    """What DataParallel and its like note of themselves is theirs; the model inside is as it was."""
    inner = nn.Linear(2, 2)
    inner.calls = 0
    wrapped = nn.DataParallel(inner)
    with preserved(wrapped, device=CPU):
        inner.calls, wrapped.dim = 2, 1
    assert (inner.calls, wrapped.dim) == (0, 1)


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator().manual_seed(1), lambda generator: float(torch.rand(1, generator=generator))),
        (np.random.default_rng(1), lambda generator: generator.random()),
        (np.random.RandomState(1), lambda generator: generator.rand()),
        (random.Random(1), lambda generator: generator.random()),
    ],
    ids=["torch", "numpy", "numpy's old", "python"],
)
def test_generator_of_the_modules_own(generator: Any, draw: Callable[[Any], float]) -> None:
    """A generator that a module holds draws the same after every restoring, and afterwards, what it would have drawn."""
    layer = nn.Linear(2, 2)
    layer.generators = {"noise": [generator]}
    with preserved(layer, device=CPU) as snapshot:
        first = draw(generator)
        snapshot.restore()
        assert draw(generator) == first
    assert draw(generator) == first


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(note),
    "forward-kwargs": lambda module: module.register_forward_hook(note, with_kwargs=True, always_call=True),
    "forward-pre": lambda module: module.register_forward_pre_hook(note),
    "backward": lambda module: module.register_full_backward_hook(note),
    "backward-pre": lambda module: module.register_full_backward_pre_hook(note),
    "state-dict": lambda module: module.register_state_dict_post_hook(note),
    "state-dict-pre": lambda module: module.register_state_dict_pre_hook(note),
    "load-pre": lambda module: module.register_load_state_dict_pre_hook(note),
    "load-post": lambda module: module.register_load_state_dict_post_hook(note),
}


def note(*args: Any) -> None:
    """A hook that does nothing."""


def hooks_of(module: nn.Module) -> dict[str, list[int]]:
    """The ids of all hooks in all of a module's registries."""
    return {name: list(hooks) for name, hooks in vars(module).items() if "hooks" in name and isinstance(hooks, OrderedDict)}


@pytest.mark.parametrize("kind", HOOKS)
def test_hook_that_was_added_is_gone(kind: str) -> None:
    """A hook that a step registers on a module is gone, and one that was there before is not."""
    layer = nn.Linear(2, 2)
    HOOKS[kind](layer)
    before = hooks_of(layer)
    assert any(before.values())
    with preserved(layer, device=CPU):
        HOOKS[kind](layer)
        assert hooks_of(layer) != before
    assert hooks_of(layer) == before


@pytest.mark.parametrize("kind", HOOKS)
def test_hook_that_was_removed_is_back(kind: str) -> None:
    """A hook that a step removes from a module is there again, and its handle still removes it."""
    layer = nn.Linear(2, 2)
    handle = HOOKS[kind](layer)
    before = hooks_of(layer)
    with preserved(layer, device=CPU):
        handle.remove()
    assert hooks_of(layer) == before
    handle.remove()
    assert not any(hooks_of(layer).values())


def test_kind_of_backward_hook_is_free_again() -> None:
    """After a full backward hook is gone again, the user may register one of the other kind."""
    layer = nn.Linear(2, 2)
    with preserved(layer, device=CPU):
        layer.register_full_backward_hook(note)
    layer.register_backward_hook(note)
    assert len(layer._backward_hooks) == 1


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_tensors(register: str) -> None:
    """A hook that a step registers on a parameter is not called any more, one from before is."""
    layer = nn.Linear(2, 2)
    calls: list[str] = []
    getattr(layer.weight, register)(lambda tensor: calls.append("before"))
    with preserved(layer, device=CPU):
        getattr(layer.weight, register)(lambda tensor: calls.append("inside"))
        getattr(layer.bias, register)(lambda tensor: calls.append("inside"))
    layer(torch.ones(1, 2)).sum().backward()
    assert calls == ["before"]
