"""torch's FSDP2 as it is seen from outside: what is sharded, what of a tensor lies here, how a model comes to rest.

What is taken of FSDP's inside is here. Knows nothing of memory, trials, or what ranks say to each other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_NEEDED = ("reset_iter_state", "set_custom_all_gather", "set_custom_reduce_scatter")  # torch 2.13 has all of these


def sharded_parts(module: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to, outer ones first."""
    kind = _kind()
    return [part for part in module.modules() if isinstance(part, kind)]


def is_sharded(module: nn.Module) -> bool:
    """Whether any part of the model is."""
    kind = _kind()
    return any(isinstance(part, kind) for part in module.modules())


def _kind() -> Any:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded where it was never imported
    return getattr(fsdp, "FSDPModule", ())


def can_come_to_rest(part: Any) -> bool:
    """Whether this torch has what is needed to go on after a pass that was broken off."""
    return all(hasattr(part, name) for name in _NEEDED)


def _roots(parts: Sequence[Any]) -> list[Any]:
    """Those that lie in no other one."""
    inner = {id(below) for part in parts for below in part.modules() if below is not part}
    return [part for part in parts if id(part) not in inner]


def param_groups(part: Any) -> list[Any]:
    """Parameters of one module that are gathered together."""
    found: list[Any] = part._get_fsdp_state()._fsdp_param_groups
    return found


def local_part(tensor: Tensor) -> Tensor:
    """What of a distributed tensor lies on this rank, in its own memory; any other tensor is itself."""
    library = sys.modules.get("torch.distributed.tensor")
    if not isinstance(tensor, getattr(library, "DTensor", ())):
        return tensor
    with torch.no_grad():  # then it is the memory itself, without a graph
        found: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return found


def distributed_as(tensor: Tensor, part: Tensor) -> Tensor:
    """The part as what lies on this rank of a tensor that is distributed as another one is; nothing is exchanged."""
    if local_part(tensor) is tensor:
        return part
    made: Tensor = type(tensor.data).from_local(  # type: ignore[attr-defined]
        part,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
    )
    return made


def mesh_size(tensor: Tensor) -> int | None:
    """Over how many ranks a tensor is distributed, replicas included; None where it is not."""
    return None if local_part(tensor) is tensor else int(tensor.device_mesh.size())  # type: ignore[attr-defined]


def split_again(module: nn.Module) -> None:
    """Let the model hold its sharded parameters, which a forward pass without a backward pass leaves whole."""
    for part in sharded_parts(module):
        part.reshard()


def make_ready(module: nn.Module) -> None:
    """What the first forward pass would set up: afterwards hooks and parameters stay what they are."""
    parts = sharded_parts(module)
    for root in _roots(parts):
        root._get_fsdp_state()._lazy_init()
    split_again(module)


def bring_to_rest(module: nn.Module) -> None:
    """After a pass that may have been broken off: nothing is in flight, all is sharded, no gradient is left anywhere."""
    parts = sharded_parts(module)
    for parameter in module.parameters():
        parameter.grad = None  # of whole parameters as well: `reset_iter_state` leaves those (torch 2.13)
    for root in _roots(parts):
        root.reset_iter_state()
    for parameter in [parameter for part in parts for group in param_groups(part) for parameter in group.fsdp_params]:
        parameter.free_unsharded_param()  # what was got for a gathering that was broken off
        for name in ("_sharded_post_forward_param", "_sharded_post_forward_param_data"):
            if name in vars(parameter):
                setattr(parameter, name, None)
