"""Limits of control groups, from files as the kernel writes them, and those of a process itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoaccum.budget import counting_device
from autoaccum.devices import CpuDevice, cpu
from autoaccum.devices.limits import ProcessLimit, cgroup_free_bytes, cgroup_limit_bytes, status_bytes

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="data limits and /proc are Linux's")
RunChild = Callable[..., Any]


# -- control groups, from files as the kernel writes them


@pytest.fixture
def groups(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write a tree of control groups: the lines of /proc/self/cgroup, and the files below /sys/fs/cgroup."""

    def write(lines: str, files: dict[str, object]) -> tuple[Path, Path]:
        (tmp_path / "proc").write_text(lines)
        for name, value in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        return tmp_path / "cgroup", tmp_path / "proc"

    return write


Groups = Callable[..., tuple[Path, Path]]


def test_limit_of_version_2(groups: Groups) -> None:
    """The limit of the unified hierarchy is read from memory.max of this process's group."""
    assert cgroup_limit_bytes(*groups("0::/user/app\n", {"user/app/memory.max": 5000})) == 5000


def test_limit_of_version_1(groups: Groups) -> None:
    """The limit of the memory controller is read from memory.limit_in_bytes."""
    files = {"memory/docker/abc/memory.limit_in_bytes": 7000}
    assert cgroup_limit_bytes(*groups("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n", files)) == 7000


def test_limit_above_counts(groups: Groups) -> None:
    """Of the groups from this one up to the root the smallest limit holds."""
    files = {"a/b/memory.max": 9000, "a/memory.max": 4000, "memory.max": "max"}
    assert cgroup_limit_bytes(*groups("0::/a/b\n", files)) == 4000


def test_limit_seen_from_inside_a_container(groups: Groups) -> None:
    """Where the group's own folder is not visible, the limit at the root of what is visible holds."""
    assert cgroup_limit_bytes(*groups("0::/../../docker/abc\n", {"memory.max": 6000})) == 6000


def test_smaller_of_both_versions(groups: Groups) -> None:
    """Where both versions are mounted, the smaller limit holds."""
    files = {"memory/job/memory.limit_in_bytes": 8000, "memory.max": 9000}
    assert cgroup_limit_bytes(*groups("9:name=systemd:/job\n4:memory:/job\n0::/\n", files)) == 8000


def test_controllers_mounted_together(groups: Groups) -> None:
    """The memory controller is found where it shares its line with others."""
    assert cgroup_limit_bytes(*groups("4:cpu,memory:/job\n", {"memory/job/memory.limit_in_bytes": 8000})) == 8000


def test_other_controllers_do_not_count(groups: Groups) -> None:
    """A folder that only another controller is in sets no limit."""
    assert cgroup_limit_bytes(*groups("4:pids:/job\n", {"memory/job/memory.limit_in_bytes": 8000})) is None


@pytest.mark.parametrize(
    ("lines", "name", "value"),
    [
        ("0::/job\n", "job/memory.max", "max"),
        ("4:memory:/job\n", "memory/job/memory.limit_in_bytes", 9223372036854771712),
    ],
    ids=["version-2", "version-1"],
)
def test_no_limit(groups: Groups, lines: str, name: str, value: object) -> None:
    """What each version writes where there is no limit is not taken for one."""
    assert cgroup_limit_bytes(*groups(lines, {name: value})) is None


def test_no_control_groups(tmp_path: Path) -> None:
    """Without control groups neither a limit nor free bytes are known."""
    assert cgroup_limit_bytes(tmp_path, tmp_path / "missing") is None
    assert cgroup_free_bytes(tmp_path, tmp_path / "missing") is None


def test_free_counts_cached_files(groups: Groups) -> None:
    """Free is the limit less what is used, with files that the kernel can drop counted as free."""
    files = {"job/memory.max": 9000, "job/memory.current": 5000, "job/memory.stat": "anon 4000\ninactive_file 700"}
    assert cgroup_free_bytes(*groups("0::/job\n", files)) == 9000 - 5000 + 700


def test_free_counts_cached_files_of_version_1_once(groups: Groups) -> None:
    """Version 1 tells cached files twice, with and without the groups below; they count once, as usage counts them."""
    files = {
        "memory/job/memory.limit_in_bytes": 9000,
        "memory/job/memory.usage_in_bytes": 5000,
        "memory/job/memory.stat": "inactive_file 500\ntotal_inactive_file 700",
    }
    assert cgroup_free_bytes(*groups("4:memory:/job\n", files)) == 9000 - 5000 + 700


def test_free_is_never_negative(groups: Groups) -> None:
    """A group above its limit has nothing free."""
    assert cgroup_free_bytes(*groups("0::/job\n", {"job/memory.max": 4000, "job/memory.current": 5000})) == 0


def test_free_of_the_tightest_group(groups: Groups) -> None:
    """A parent group that others fill up leaves less than the group itself would."""
    files = {"a/memory.max": 9000, "a/memory.current": 8500, "a/b/memory.max": 4000, "a/b/memory.current": 1000}
    assert cgroup_free_bytes(*groups("0::/a/b\n", files)) == 500


def test_free_needs_a_limit(groups: Groups) -> None:
    """A group without a limit says nothing of what is free."""
    assert cgroup_free_bytes(*groups("0::/job\n", {"job/memory.max": "max", "job/memory.current": 5000})) is None


# -- limits of the process


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(("kind", "counter"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_limit_of_the_process_is_read(kind: str, counter: str, run_child: RunChild) -> None:
    """A `ulimit` on data or on address space is found, with what it leaves, and is the total."""
    limit, free, total, read = run_child(
        f"""
        import resource
        from autoaccum.devices.cpu import CpuDevice
        from autoaccum.devices.limits import status_bytes
        limit = status_bytes("{counter}") + 2**28
        resource.setrlimit(resource.{kind}, (limit, resource.RLIM_INFINITY))
        device = CpuDevice().as_limited()
        answer([limit, device.free_bytes(), device.total_bytes(), device._limit.counter])
        """
    )
    assert (total, read) == (limit, counter)
    assert abs(free - 2**28) < 2**26  # the process goes on living between the reading and the limit


@on_linux
def test_unknown_counter() -> None:
    """A counter that the kernel does not have is an error, not a zero."""
    with pytest.raises(LookupError, match="VmNothing"):
        status_bytes("VmNothing")


@on_linux
@pytest.mark.parametrize(("asked", "is_limit"), [(None, True), ("100%", True), ("1GiB", False), (2**30, False)])
def test_what_a_budget_is_a_part_of(asked: object, is_limit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default and percentages are of the process's own limit; bytes are of the resident set, as everywhere."""
    monkeypatch.setattr(cpu, "process_limit", lambda: ProcessLimit(status_bytes("VmData") + 2**20, "VmData", "ulimit -d"))
    device = CpuDevice()
    assert (counting_device(asked, device) is not device) is is_limit


@on_linux
def test_a_budget_beyond_the_limit_is_said_to_be_so(run_child: RunChild) -> None:
    """Where a `ulimit` leaves less than the budget, the plan says so and names it."""
    said = run_child(
        """
        import resource, torch, autoaccum
        from autoaccum.devices.limits import status_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + 2**28, resource.RLIM_INFINITY))
        result = autoaccum.probe(torch.nn.Linear(4, 4), torch.ones(4, 4), budget="2GiB", max_micro_batch=4)
        answer(list(result.warnings))
        """
    )
    assert any("The budget is 2.00 GiB, but only" in text and "by ulimit -d" in text for text in said)
