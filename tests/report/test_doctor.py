"""What `doctor` says about this machine."""

from __future__ import annotations

import re

import psutil
import pytest
import torch

from autoaccum.devices.base import Holder
from autoaccum.devices.cpu import CpuDevice
from autoaccum.report import doctor
from autoaccum.units import format_bytes, parse_size


def test_versions_come_first() -> None:
    """The first line has the versions of autoaccum, torch and Python."""
    first = next(doctor.examine())
    assert re.fullmatch(r"autoaccum \d\S*, torch (\S+), Python 3\.\d+\.\S+", first)
    assert torch.__version__ in first


def test_memory_of_the_cpu_is_said() -> None:
    """The first line of memory is the CPU's: its total, and what this process holds, which is its resident set."""
    line = next(line for line in doctor.examine() if line.startswith("  memory: "))
    found = re.fullmatch(r"  memory: (.+) in all, (.+) free, (.+) held by this process", line)
    assert found is not None and found[1] == format_bytes(CpuDevice().total_bytes())
    held = parse_size(found[3])
    assert isinstance(held, int) and held == pytest.approx(psutil.Process().memory_info().rss, rel=0.25)


def test_control_group_limit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit is shown, and that there is none where there is none."""
    monkeypatch.setattr(doctor, "cgroup_limit_bytes", lambda: 3 * 2**30)
    assert "  control group limit: 3.00 GiB" in list(doctor.examine())
    monkeypatch.setattr(doctor, "cgroup_limit_bytes", lambda: None)
    assert "  control group limit: none" in list(doctor.examine())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("version", "said"), [("13.0", "torch is built for 13.0"), (None, "torch is built without CUDA")])
def test_no_gpu_is_said_with_the_build(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    """Where there is no GPU, the line says whether torch could use one."""
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.version, "hip", None)
    assert f"CUDA: no device ({said})" in list(doctor.examine())


def test_the_largest_holders_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes that hold the device's memory are named with their size, five at most."""
    holders = tuple(Holder(pid=pid, name=f"train{pid}.py", held_bytes=2**30) for pid in range(1, 8))
    monkeypatch.setattr(CpuDevice, "holders", lambda self: holders)
    found = [line for line in doctor.examine() if "also held" in line]
    assert found == [f"  also held: 1.00 GiB by train{pid}.py (pid {pid})" for pid in range(1, 6)]
