"""Kernels of torch's own operations, replaced for host tensors for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def kernels_replaced(key: str, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """These kernels for host tensors while inside."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call] # what the library's own finalizer does, but not some time later
