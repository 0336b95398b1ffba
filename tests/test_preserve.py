"""Preservation: whatever a training step does to the user's things, they are as they were, bit for bit."""

from __future__ import annotations

import copy
import gc
import random
import signal
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from autoaccum.errors import AutoaccumError
from autoaccum.preserve import Snapshot, preserved

LostDevice = getattr(torch, "AcceleratorError", RuntimeError)  # not there in torch 2.6
CPU = torch.device("cpu")
RunChild = Callable[..., Any]
both_places = pytest.mark.parametrize("on_disk", [False, True], ids=["in-memory", "on-disk"])


def bits(tensor: Tensor) -> bytes:
    """The values as bytes, so that NaN and -0.0 are compared as well."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    dense = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def build_network() -> nn.Sequential:
    """Dropout and BatchNorm, one part of it in eval mode, one parameter frozen, one gradient present."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), inner, nn.Linear(6, 2))
    inner.eval()
    inner[0].bias.requires_grad_(False)
    return model


def trained_network() -> tuple[nn.Sequential, SGD]:
    """The network after two steps of SGD with momentum, with one gradient left in it."""
    model = build_network()
    optimizer = SGD(
        [{"params": [*model[:3].parameters()], "lr": 0.2}, {"params": [*model[3:].parameters()]}], 0.1, momentum=0.9
    )
    for _ in range(2):
        train(model, optimizer)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer) -> None:
    """One ordinary training step."""
    optimizer.zero_grad()
    model(torch.randn(8, 6)).pow(2).mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Everything that must be as it was, in a form that can be compared."""
    parameters = list(model.named_parameters())
    found: dict[str, Any] = {
        "values": {name: bits(value) for name, value in model.state_dict(keep_vars=True).items()},
        "identities": {name: (id(value), value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()},
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "requires_grad": {name: parameter.requires_grad for name, parameter in parameters},
        "gradients": {name: None if p.grad is None else (id(p.grad), bits(p.grad)) for name, p in parameters},
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": bits(torch.get_rng_state()),
    }
    if optimizer is not None:
        found["groups"] = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        found["members"] = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        found["optimizer"] = [
            (id(parameter), name, bits(value) if isinstance(value, Tensor) else value)
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
        ]
    return found


def disturb(model: nn.Module, optimizer: Optimizer) -> None:
    """A training step in other modes, with draws from every generator, and changes of everything else."""
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    train(model, optimizer)
    model(torch.randn(8, 6)).sum().backward()
    model.apply(lambda module: setattr(module, "training", not module.training))
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.param_groups[-1]["added"] = True
    random.random()
    np.random.rand()


# -- everything at once


@both_places
@pytest.mark.parametrize("error", [None, KeyError("lables"), KeyboardInterrupt()], ids=["success", "error", "interrupt"])
def test_everything_is_as_before(on_disk: bool, error: BaseException | None) -> None:
    """After a training step, an error or Ctrl-C the model, the optimizer and all generators are as before, bit for bit."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    try:
        with preserved(model, optimizer, device=CPU, on_disk=on_disk):
            disturb(model, optimizer)
            changed = state_of(model, optimizer)
            if error is not None:
                raise error
    except (KeyError, KeyboardInterrupt) as caught:
        assert caught is error
    unchanged = [name for name in before if changed[name] == before[name]]
    assert unchanged == ["identities", "members"]  # what was disturbed was seen to be
    assert state_of(model, optimizer) == before


@both_places
def test_restored_between_trials(on_disk: bool) -> None:
    """One snapshot restores any number of times, each time the same."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with preserved(model, optimizer, device=CPU, on_disk=on_disk) as snapshot:
        for _ in range(3):
            disturb(model, optimizer)
            snapshot.restore()
            assert state_of(model, optimizer) == before


def test_training_goes_on_as_if_nothing_was() -> None:
    """Five steps after a restored block end with the same parameters as five steps without it."""
    model, optimizer = trained_network()
    with preserved(model, optimizer, device=CPU):
        disturb(model, optimizer)
    for _ in range(5):
        train(model, optimizer)
    other, other_optimizer = trained_network()
    for _ in range(5):
        train(other, other_optimizer)
    assert [bits(value) for value in model.state_dict().values()] == [bits(value) for value in other.state_dict().values()]


@pytest.mark.parametrize("optimizer_class", [AdamW, SGD])
def test_optimizer_without_state(optimizer_class: type[Optimizer]) -> None:
    """An optimizer that had no state yet has none again."""
    model = build_network()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    with preserved(model, optimizer, device=CPU):
        train(model, optimizer)
    assert len(optimizer.state) == 0


def test_no_optimizer() -> None:
    """Without an optimizer the model is restored all the same."""
    model = build_network()
    before = state_of(model)
    with preserved(model, device=CPU):
        disturb(model, SGD(model.parameters(), lr=0.1))
    assert state_of(model) == before


# -- parameters, buffers, gradients


def noncontiguous() -> Tensor:
    """A transposed slice."""
    return torch.randn(4, 6).t()[::2]


KINDS: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: torch.randn(3, 2, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(5).bfloat16(),
    "float16": lambda: torch.randn(5).half(),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False, True]),
    "int64": lambda: torch.tensor([1, -2, 2**60]),
    "uint16": lambda: torch.tensor([1, 2], dtype=torch.uint16),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "noncontiguous": noncontiguous,
    "one-of-a-column": lambda: torch.randn(10)[::5][:1],
    "channels-last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "nan": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


def overwrite(tensor: Tensor) -> None:
    """Change every value in place."""
    if tensor.is_sparse:
        tensor._values().fill_(5)
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.numel() and tensor.stride()[:1] == (0,):
        tensor[0].add_(1)
    else:
        tensor.copy_(torch.full(tensor.shape, 9.0))


@both_places
@pytest.mark.parametrize("kind", KINDS)
def test_buffer_of_every_kind(kind: str, on_disk: bool) -> None:
    """A buffer of any type, layout and shape has its bits back, in the same tensor."""
    tensor = KINDS[kind]()
    module = nn.Module()
    module.register_buffer("kept", tensor)
    before, strides = bits(tensor), tensor.stride() if tensor.layout == torch.strided else None
    with preserved(module, device=CPU, on_disk=on_disk):
        overwrite(tensor)
        assert kind == "empty" or bits(tensor) != before
    assert bits(tensor) == before
    assert module.kept is tensor
    assert strides is None or tensor.stride() == strides


@both_places
def test_tied_weights_stay_tied(on_disk: bool) -> None:
    """A weight that two layers share is one tensor afterwards, with its values."""
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    before = bits(embedding.weight)
    with preserved(nn.ModuleList([embedding, head]), device=CPU, on_disk=on_disk):
        head.weight.data.zero_()
        head.weight = nn.Parameter(torch.zeros(10, 4))
    assert head.weight is embedding.weight
    assert bits(head.weight) == before


@both_places
@pytest.mark.parametrize("replacement", [lambda data: data * 2, lambda data: data.half(), lambda data: data[:1]])
def test_data_that_was_replaced(replacement: Callable[[Tensor], Tensor], on_disk: bool) -> None:
    """A parameter whose `.data` was replaced has its own storage, type and shape back, and views of it see its values."""
    layer = nn.Linear(4, 3)
    view, before = layer.weight.data[1], bits(layer.weight)
    with preserved(layer, device=CPU, on_disk=on_disk):
        view.zero_()
        layer.weight.data = replacement(layer.weight.data)
    assert bits(layer.weight) == before
    assert layer.weight.data_ptr() == view.data_ptr() - 4 * 4
    assert layer.weight.shape == (3, 4)


def test_buffer_that_was_resized() -> None:
    """A buffer that was resized in place has its shape and values back."""
    module = nn.Module()
    module.register_buffer("kept", torch.arange(4.0))
    with preserved(module, device=CPU):
        module.kept.resize_(8).zero_()
    assert module.kept.tolist() == [0, 1, 2, 3]


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


def test_buffer_written_to_with_a_graph() -> None:
    """A buffer that a step updated in place with a graph has none, and holds none of the step's activations."""
    layer = nn.Linear(2, 2)
    layer.register_buffer("mean", torch.zeros(2))
    with preserved(layer, device=CPU):
        hidden = layer(torch.ones(1, 2)).exp()
        gone = weakref.ref(hidden.untyped_storage())
        layer.mean.add_(hidden.mean(0))
        del hidden
        assert layer.mean.grad_fn is not None
    assert layer.mean.is_leaf
    assert layer.mean.tolist() == [0, 0]
    gc.collect()
    assert gone() is None


@both_places
def test_gradient_that_was_there(on_disk: bool) -> None:
    """A gradient that was present is the same tensor with the same values, though the block accumulated into it."""
    layer = nn.Linear(2, 2)
    layer.weight.grad = kept = torch.full((2, 2), 3.0)
    with preserved(layer, device=CPU, on_disk=on_disk):
        layer(torch.ones(1, 2)).sum().backward()
        assert kept.tolist() == [[4, 4], [4, 4]]
    assert layer.weight.grad is kept
    assert kept.tolist() == [[3, 3], [3, 3]]


def test_gradient_that_was_not_there() -> None:
    """A gradient that was None is None, not zero."""
    layer = nn.Linear(2, 2)
    with preserved(layer, device=CPU):
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is None


def test_sparse_gradient_that_was_there() -> None:
    """A sparse gradient that was present has its values back."""
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert embedding.weight.grad is not None
    kept = embedding.weight.grad
    before = bits(kept)
    with preserved(embedding, device=CPU):
        embedding(torch.tensor([2, 3])).sum().backward()
        kept._values().zero_()
    assert embedding.weight.grad is kept
    assert bits(kept) == before


# -- what modules hold besides


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


def test_plain_numbers_are_the_users() -> None:
    """Attributes without tensors are left alone: what the user counts or notes there is the user's."""
    layer = nn.Linear(2, 2)
    layer.calls, layer.sizes = 0, [1]
    with preserved(layer, device=CPU):
        layer.calls = 2
        layer.sizes.append(8)
    assert layer.calls == 2
    assert layer.sizes == [1, 8]


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


# -- the optimizer


def test_parameter_group_that_was_added_is_gone() -> None:
    """A parameter group that a step adds is gone, and one that it takes out is back, each the same object."""
    model = build_network()
    optimizer = SGD([{"params": [model[0].weight], "lr": 1.0}, {"params": [model[0].bias], "lr": 2.0}])
    groups = list(optimizer.param_groups)
    with preserved(model, optimizer, device=CPU):
        optimizer.add_param_group({"params": [model[4].weight]})
        del optimizer.param_groups[0]
    assert [id(group) for group in optimizer.param_groups] == [id(group) for group in groups]
    assert [group["lr"] for group in groups] == [1.0, 2.0]
    assert groups[0]["params"][0] is model[0].weight


def test_learning_rate_that_is_a_tensor() -> None:
    """A learning rate that is a tensor has its value back in the same tensor."""
    model = build_network()
    rate = torch.tensor(0.1)
    optimizer = AdamW(model.parameters(), lr=rate)
    with preserved(model, optimizer, device=CPU):
        rate.mul_(3)
        optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_state_tensors_stay_the_same() -> None:
    """Moments that were there are the same tensors afterwards, so that what holds them, holds the right ones."""
    model = build_network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    before = bits(moment)
    with preserved(model, optimizer, device=CPU):
        train(model, optimizer)
        optimizer.state.clear()
        train(model, optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"] is moment
    assert bits(moment) == before


def test_state_dict_that_was_loaded() -> None:
    """Loading another state inside the block leaves no trace: groups, values and moments are as before."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with preserved(model, optimizer, device=CPU):
        other = copy.deepcopy(optimizer.state_dict())
        other["param_groups"][0]["lr"] = 9.0
        optimizer.load_state_dict(other)
        train(model, optimizer)
    assert state_of(model, optimizer) == before


def test_scheduler_made_inside_leaves_no_mark() -> None:
    """The initial rates that a scheduler writes into the optimizer are gone, and the rate is the one before."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with preserved(model, optimizer, device=CPU):
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
        assert "initial_lr" in optimizer.param_groups[0]
    assert state_of(model, optimizer) == before


# -- modes of the process


def flip(owner: object, name: str) -> Callable[[], None]:
    """Turn a boolean attribute over."""
    return lambda: setattr(owner, name, not getattr(owner, name))


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "default-dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "autocast-dtype": (lambda: torch.get_autocast_dtype("cpu"), lambda: torch.set_autocast_dtype("cpu", torch.float16)),
    "autocast-cache": (torch.is_autocast_cache_enabled, lambda: torch.set_autocast_cache_enabled(False)),
    "matmul-precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "deterministic": (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("error")),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "cudnn": (lambda: torch.backends.cudnn.enabled, flip(torch.backends.cudnn, "enabled")),
    "cudnn-benchmark": (lambda: torch.backends.cudnn.benchmark, flip(torch.backends.cudnn, "benchmark")),
    "cudnn-deterministic": (lambda: torch.backends.cudnn.deterministic, flip(torch.backends.cudnn, "deterministic")),
    "cudnn-tf32": (lambda: torch.backends.cudnn.allow_tf32, flip(torch.backends.cudnn, "allow_tf32")),
    "matmul-tf32": (lambda: torch.backends.cuda.matmul.allow_tf32, flip(torch.backends.cuda.matmul, "allow_tf32")),
}


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_as_before(mode: str) -> None:
    """A mode of the process or the thread that a step changes is what it was."""
    read, change = MODES[mode]
    before = read()
    with preserved(nn.Linear(2, 2), device=CPU):
        change()
        assert read() != before
    assert read() == before


def test_grad_mode_off_stays_off() -> None:
    """A caller that has gradients switched off finds them off, though the block switched them on."""
    with torch.no_grad():
        with preserved(nn.Linear(2, 2), device=CPU):
            torch.set_grad_enabled(True)
        assert not torch.is_grad_enabled()


def test_caller_in_inference_mode() -> None:
    """A caller in inference mode gets everything back, and the model can be trained afterwards."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with torch.inference_mode(), preserved(model, optimizer, device=CPU), torch.inference_mode(False), torch.enable_grad():
        disturb(model, optimizer)
    assert state_of(model, optimizer) == before
    train(model, optimizer)


needs_new_names = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has no fp32_precision settings, which came with 2.9"
)


@pytest.fixture(scope="module")
def precisions(run_child: RunChild) -> dict[str, Any]:
    """Precisions around two blocks: one that uses the new names, and one that finds them in use. They do not mix back."""
    answer: dict[str, Any] = run_child(
        """
        import torch
        from autoaccum.preserve import preserved
        backends = torch.backends
        layer, device = torch.nn.Linear(2, 2), torch.device("cpu")

        def read():
            return [torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32,
                    backends.fp32_precision, backends.cudnn.conv.fp32_precision, backends.mkldnn.matmul.fp32_precision,
                    backends.cuda.matmul.fp32_precision]

        seen = {"old names": read()}
        with preserved(layer, device=device):
            backends.fp32_precision = "tf32"
            backends.cuda.matmul.fp32_precision = "tf32"
            backends.cudnn.conv.fp32_precision = "ieee"
            backends.mkldnn.matmul.fp32_precision = "bf16"
        seen["old names again"] = read()
        backends.cuda.matmul.fp32_precision = "tf32"
        with preserved(layer, device=device):
            backends.cuda.matmul.fp32_precision = "ieee"
            seen["new name inside"] = backends.cuda.matmul.fp32_precision
        seen["new name after"] = backends.cuda.matmul.fp32_precision
        answer(seen)
        """
    )
    return answer


@needs_new_names
def test_precision_that_the_block_set_by_its_new_name(precisions: dict[str, Any]) -> None:
    """After a block that used the new names all settings are as before, and the old names can be read again."""
    assert precisions["old names again"] == precisions["old names"]


@needs_new_names
def test_precision_by_its_new_name(precisions: dict[str, Any]) -> None:
    """A precision that the user set by its new name, which makes the old one unreadable, is kept and restored."""
    assert precisions["new name inside"] == "ieee"
    assert precisions["new name after"] == "tf32"


# -- when things go wrong


def interrupted(snapshot: Snapshot) -> None:
    """Let Ctrl-C arrive as the first thing that a restore does."""
    snapshot._restores.insert(0, lambda: signal.raise_signal(signal.SIGINT))


@both_places
def test_interrupt_during_restore_comes_after_it(on_disk: bool) -> None:
    """Ctrl-C that arrives while things are put back is raised once all of them are."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with pytest.raises(KeyboardInterrupt), preserved(model, optimizer, device=CPU, on_disk=on_disk) as snapshot:
        disturb(model, optimizer)
        interrupted(snapshot)
    assert state_of(model, optimizer) == before


def test_users_handler_gets_the_interrupt() -> None:
    """A handler that the user set for Ctrl-C is the one that is called, once, after the restore, and it stays set."""
    layer = nn.Linear(2, 2)
    calls: list[list[float]] = []

    def handler(number: int, frame: object) -> None:
        calls.append(layer.bias.tolist())

    nn.init.zeros_(layer.bias)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with preserved(layer, device=CPU) as snapshot:
            nn.init.ones_(layer.bias)
            interrupted(snapshot)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [[0, 0]]


def test_restored_in_a_thread() -> None:
    """In another thread than the main one, where no handler can be set, everything is restored all the same."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)

    def work() -> None:
        with preserved(model, optimizer, device=CPU):
            disturb(model, optimizer)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert state_of(model, optimizer) == before


def lost() -> None:
    """What a device whose context is lost says to everything."""
    raise LostDevice("CUDA error: device-side assert triggered")


def test_lost_device_does_not_hide_the_users_error() -> None:
    """Where restoring fails after an error, the user's error comes out, with a note on what could not be put back."""
    error = KeyError("lables")
    with pytest.raises(KeyError) as caught, preserved(nn.Linear(2, 2), device=CPU) as snapshot:
        snapshot._tensors.append(lost)
        raise error
    assert caught.value is error
    assert error.__notes__ == ["autoaccum could not put the model back: CUDA error: device-side assert triggered"]


def test_lost_device_after_success_is_an_error() -> None:
    """Where restoring fails after success, that error comes out."""
    with pytest.raises(LostDevice), preserved(nn.Linear(2, 2), device=CPU) as snapshot:
        snapshot._tensors.append(lost)


@pytest.mark.parametrize("where", ["_restores", "_tensors", "_ambient"])
def test_lost_device_does_not_stop_the_rest(where: str) -> None:
    """What can be put back is, though another part refuses."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with pytest.raises(KeyError), preserved(model, optimizer, device=CPU) as snapshot:
        disturb(model, optimizer)
        getattr(snapshot, where).insert(0, lost)
        raise KeyError("lables")
    assert state_of(model, optimizer) == before


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


@pytest.mark.parametrize("error", [None, KeyError("lables")], ids=["success", "error"])
def test_no_file_is_ever_seen(temporary: Path, error: Exception | None) -> None:
    """The file has no name while it is in use, so nothing is left even by `kill -9`, and it is closed afterwards."""
    try:
        with preserved(nn.Linear(64, 64), device=CPU, on_disk=True) as snapshot:
            assert list(temporary.iterdir()) == []
            if error is not None:
                raise error
    except KeyError as caught:
        assert caught is error
    assert list(temporary.iterdir()) == []
    assert snapshot._vault._file is not None and snapshot._vault._file.closed


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("buffering", [0, 2**20], ids=["unbuffered", "buffered"])
def test_full_disk(buffering: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full that is told before anything is run, with a remedy, and the file is closed."""
    files: list[Any] = []

    def full(prefix: str) -> Any:
        files.append(Path("/dev/full").open("r+b", buffering=buffering))  # noqa: SIM115 - closed by the vault
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(AutoaccumError) as caught, preserved(nn.Linear(64, 64), device=CPU, on_disk=True):
        raise AssertionError("was run")
    assert "No space left on device. Make room, or set TMPDIR" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert files[0].closed


@pytest.fixture(scope="module")
def resident(run_child: RunChild) -> dict[str, int]:
    """By how much the peak of the resident set rises while a model of 200 MiB is kept and restored."""
    answer: dict[str, int] = run_child(
        """
        import torch
        from torch import nn
        from autoaccum.devices.cpu import CpuDevice
        from autoaccum.preserve import preserved

        device = CpuDevice()
        model = nn.Sequential(*[nn.Linear(2560, 2560, bias=False) for _ in range(8)])
        rises = {}
        for name, on_disk in (("warm", True), ("on disk", True), ("in memory", False)):
            before = device.held_bytes(())
            with device.watched(()) as watch:
                with preserved(model, device=device.torch_device, on_disk=on_disk):
                    model[0].weight.data.zero_()
            rises[name] = watch.peak_bytes - before
        answer({**rises, "model": sum(p.numel() * 4 for p in model.parameters())})
        """
    )
    return answer


def test_on_disk_takes_no_memory(resident: dict[str, int]) -> None:
    """Kept on disk, a model of 200 MiB raises the resident set by less than a tenth of itself, restoring included."""
    assert resident["on disk"] < 0.1 * resident["model"]


def test_in_memory_takes_a_copy(resident: dict[str, int]) -> None:
    """Kept in memory it raises the resident set by itself, so the measurement would have seen a copy."""
    assert resident["in memory"] > 0.9 * resident["model"]
