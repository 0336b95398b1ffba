"""What a model, an optimizer and a sample must be like to take a step together: checked once, at the door."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from autoaccum.batches.layout import shared_second_dim
from autoaccum.batches.structure import tensors_in
from autoaccum.errors import InvalidRequestError
from autoaccum.shards import split_again
from autoaccum.units import shown

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a DDP wrapper, with what a training step needs: parameters with shapes, one of them trainable.

    Raises:
        InvalidRequestError: When it lacks that, or is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidRequestError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
    # A DDP forward outside no_sync arms its reducer; the module inside needs the same memory but for the buckets.
    module = model.module if isinstance(model, (DistributedDataParallel, DataParallel)) else model
    if not isinstance(module, nn.Module):
        raise InvalidRequestError("the wrapped model holds no torch.nn.Module.")
    split_again(module)  # while its parameters are whole, they are not those that an optimizer has
    parameters = list(module.parameters())
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        raise InvalidRequestError("the model has lazy parameters without a shape; run one forward pass first.")
    if not any(parameter.requires_grad for parameter in parameters):
        raise InvalidRequestError(
            f"model {type(module).__name__} has no trainable parameter ({len(parameters)} frozen ones); "
            "expected at least one with requires_grad=True."
        )
    return module


def single_device(module: nn.Module, *, meta_allowed: bool = False) -> torch.device:
    """Where all of the module's tensors are.

    Raises:
        InvalidRequestError: When that is more than one place, or the meta device where that is not allowed.
    """
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise InvalidRequestError(
            f"the model's tensors are on several devices ({', '.join(sorted(map(str, devices)))}); expected one."
        )
    device = devices.pop()
    if device.type == "meta" and not meta_allowed:
        raise InvalidRequestError(
            "the model is on the meta device and holds no values; expected cpu or a GPU (only predict takes it as it is)."
        )
    return device


def check_sample_device(sample: Any, device: torch.device) -> None:
    """Refuse a sample that would have to be moved from one device to another.

    Host tensors go to the model's device micro-batch by micro-batch; anything else must be there already.

    Raises:
        InvalidRequestError: With the devices.
    """
    others = {tensor.device for tensor in tensors_in(sample)} - {device, torch.device("cpu")}
    if others:
        raise InvalidRequestError(
            f"the model is on {device} and the sample on {', '.join(sorted(map(str, others)))}; "
            "expected the sample on the model's device or on the cpu."
        )


def refuse_time_as_rows(sample: Any, module: nn.Module) -> None:
    """Where the model has layers that take time first, a sample whose tensors all share two dimensions is ambiguous.

    Raises:
        InvalidRequestError: With the layer and the remedy.
    """
    second = shared_second_dim(sample)
    time_first = [
        name or type(layer).__name__
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and not layer.batch_first
    ]
    if second is not None and time_first:
        raise InvalidRequestError(
            f"the sample's first dimension may be time: layer {shown(time_first[0])} has batch_first=False, and "
            f"every tensor has a second dimension of {second}. Say where the rows are: batch_dim=0 or batch_dim=1."
        )


def checked_optimizer(optimizer: Any, module: nn.Module) -> Optimizer | OptimizerFactory | None:
    """The optimizer or factory, if it is over the module's parameters and steps without a closure.

    Raises:
        InvalidRequestError: If not; of what a factory makes only `check_step` can tell.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise InvalidRequestError(
                f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer or a factory "
                "params -> Optimizer."
            )
        made: OptimizerFactory = optimizer
        return made
    own = {id(parameter) for parameter in module.parameters()}
    foreign = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) not in own]
    if foreign:
        raise InvalidRequestError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's (the first has shape "
            f"{tuple(foreign[0].shape)}); expected an optimizer over model.parameters(). "
            "Was the model replaced after it was made?"
        )
    check_step(optimizer)
    return optimizer


def refuse_other_model(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that trains nothing of this model. It may train other things beside it.

    Raises:
        InvalidRequestError: With the remedy.
    """
    own = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise InvalidRequestError(
            f"the optimizer holds no parameter of this {type(module).__name__}; expected one that trains it. Was the model "
            "replaced after the optimizer was made?"
        )


def check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step runs the model itself.

    Raises:
        InvalidRequestError: With its name.
    """
    parameters = inspect.signature(optimizer.step).parameters.values()
    if isinstance(optimizer, torch.optim.LBFGS) or any(p.name == "closure" and p.default is p.empty for p in parameters):
        raise InvalidRequestError(
            f"{type(optimizer).__name__} evaluates a closure several times per step, which accumulation cannot give it; "
            "use an optimizer whose step() takes no closure."
        )
