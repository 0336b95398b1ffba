"""How to put a tensor back in place: its values, its storage, its gradient and its hooks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum.preserve.restoring import Restore, refill
from autoaccum.preserve.vault import Vault
from autoaccum.shards import local_part

_TENSOR_HOOK_REGISTRIES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def keep_tensor(tensor: Tensor, vault: Vault) -> Restore:
    """How to put this tensor back as it is now; the vault keeps its values."""
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    gradient = tensor.grad if is_leaf else None
    hooks = {name: dict(getattr(tensor, name) or {}) for name in _TENSOR_HOOK_REGISTRIES}
    # Shares the storage, also after the user's step put another one in its place. Where there is no such thing as one
    # storage, the tensor itself is written.
    here = local_part(tensor)  # of a distributed tensor, this rank's own part
    values = here.detach() if _has_own_storage(here) else here
    slot = vault.put(without_repeats(values.detach()))

    def put_back() -> None:
        if here is tensor and values is not tensor and not tensor.is_set_to(values):
            tensor.data = values
        vault.take_into(slot, without_repeats(values))
        if is_leaf:
            if not tensor.is_leaf and not tensor._is_view():
                tensor.detach_()  # written to in place with a graph, which it would keep alive
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = gradient
        for name, before in hooks.items():
            if getattr(tensor, name) is not None:
                refill(getattr(tensor, name), before)

    return put_back


def _has_own_storage(tensor: Tensor) -> bool:
    """Whether one storage of its own holds the values: no sparse layout, no quantizer, no subclass around other tensors."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not is_traceable_wrapper_subclass(tensor)


def without_repeats(values: Tensor) -> Tensor:
    """The same memory without the dimensions that `expand` made, which cannot be written to."""
    if values.layout == torch.strided:
        for dim in reversed(range(values.ndim)):
            if values.stride(dim) == 0 and values.shape[dim] > 1:
                values = values.select(dim, 0)
    return values
