"""A small network, what training does to it, and everything that must be as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

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
