"""Keeps the values of tensors where no budget misses them: in host memory, or in a file without a name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

import torch
from torch import Tensor, nn

from autoaccum.errors import AutoaccumError


@final
class Vault:
    """Keeps the values of tensors, in host memory or in a file without a name."""

    def __init__(self, on_disk: bool) -> None:
        with _naming_the_folder():
            self._file = tempfile.TemporaryFile(prefix="autoaccum-") if on_disk else None  # noqa: SIM115 - closed by close()

    def put(self, tensor: Tensor) -> Tensor | int:
        """Keep a copy of the values; gives the copy, or where in the file it is."""
        if self._file is None or not _is_plain(tensor):
            return tensor.to("cpu", copy=True)
        with _naming_the_folder():
            offset = self._file.seek(0, 2)
            self._file.write(_bytes_of(tensor.contiguous()))
        return offset

    def flush(self) -> None:
        """Everything is written, so that taking it back needs no room."""
        if self._file is not None:
            with _naming_the_folder():
                self._file.flush()

    def take_into(self, kept: Tensor | int, tensor: Tensor) -> None:
        """Write the kept values into the tensor."""
        if self._file is None or isinstance(kept, Tensor):
            tensor.copy_(torch.as_tensor(kept))
            return
        target = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._file.seek(kept)
        self._file.readinto(_bytes_of(target))
        if target is not tensor:
            tensor.copy_(target)

    def close(self) -> None:
        """Drop everything kept."""
        if self._file is not None:
            with suppress(OSError):  # what could not be written is not needed any more
                self._file.close()


@contextmanager
def _naming_the_folder() -> Iterator[None]:
    """A disk that is full or read-only is told with the remedy."""
    try:
        yield
    except OSError as error:
        raise AutoaccumError(
            "the model's weights and optimizer state could not be kept in a temporary file, for after the search: "
            f"{error.strerror or error}. Make room, or set TMPDIR to a folder on a disk with as many bytes as they take."
        ) from error


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of the storage are the values: no subclass, no sparse layout, no lazy conjugation."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The contiguous tensor's own memory, without a copy."""
    row = tensor.detach().as_strided((tensor.numel(),), (1,))  # a dimension of size 1 may have any stride
    return memoryview(row.view(torch.uint8).numpy())  # type: ignore[arg-type]
