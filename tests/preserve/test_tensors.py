"""Parameters, buffers and gradients are as they were, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoaccum.preserve import preserved

from .networks import CPU, bits, both_places


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
