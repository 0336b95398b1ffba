"""Kept values take no memory that a budget misses, and leave no file."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autoaccum.errors import AutoaccumError
from autoaccum.preserve import preserved

from .networks import CPU, RunChild


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


@pytest.mark.slow
def test_on_disk_takes_no_memory(resident: dict[str, int]) -> None:
    """Kept on disk, a model of 200 MiB raises the resident set by less than a tenth of itself, restoring included."""
    assert resident["on disk"] < 0.1 * resident["model"]


def test_in_memory_takes_a_copy(resident: dict[str, int]) -> None:
    """Kept in memory it raises the resident set by itself, so the measurement would have seen a copy."""
    assert resident["in memory"] > 0.75 * resident["model"]
