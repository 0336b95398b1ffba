"""What the kernel lets this process hold: limits of its control groups, and limits of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ProcessLimit(NamedTuple):
    """A limit that the kernel sets this process.

    Attributes:
        counter: What is limited, as /proc/self/status calls it (proc(5)).
        shell_command: What sets it.
    """

    limit_bytes: int
    counter: str
    shell_command: str

    def free_bytes(self) -> int:
        """What is left of it."""
        return max(0, self.limit_bytes - status_bytes(self.counter))


def process_limit() -> ProcessLimit | None:
    """The limit of this process's data or address space that leaves the least, None where neither is limited."""
    if sys.platform != "linux":
        return None
    import resource

    kinds = ((resource.RLIMIT_DATA, "VmData", "ulimit -d"), (resource.RLIMIT_AS, "VmSize", "ulimit -v"))
    limits = [
        ProcessLimit(soft, counter, command)
        for kind, counter, command in kinds
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return min(limits, key=ProcessLimit.free_bytes, default=None)


def status_bytes(field: str) -> int:
    """One of the kernel's counters of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def cgroup_limit_bytes(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest memory limit of the control groups that this process is in, None where there is none.

    Both versions of the interface are read: `memory.max` and `memory.limit_in_bytes` (kernel documentation,
    admin-guide/cgroup-v2 and cgroup-v1/memory).
    """
    limits = [limit for folder in _cgroup_folders(root, proc) for limit in [_cgroup_number(folder, "max")] if limit]
    return min(limits, default=None)


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the control groups still allow, None where they set no limit. Cached files count as free."""
    free = []
    for folder in _cgroup_folders(root, proc):
        limit, used = _cgroup_number(folder, "max"), _cgroup_number(folder, "current")
        if limit is not None and used is not None:
            free.append(max(0, limit - used + _inactive_file_bytes(folder)))
    return min(free, default=None)


_CGROUP_FILES = {"max": ("memory.max", "memory.limit_in_bytes"), "current": ("memory.current", "memory.usage_in_bytes")}
_NO_LIMIT_BYTES = 2**60  # version 1 writes a huge number where there is no limit


def _cgroup_folders(root: Path, proc: Path) -> Iterator[Path]:
    """The group's folder and those above it, for both versions; inside a container the group is often the root."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _cgroup_number(folder: Path, what: str) -> int | None:
    for name in _CGROUP_FILES[what]:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            return int(text)
    return None


def _inactive_file_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counters = dict(line.split(maxsplit=1) for line in lines if " " in line)
    # Version 1 writes both: the second counts the groups below as well, as `memory.usage_in_bytes` does.
    return int(counters.get("total_inactive_file", counters.get("inactive_file", 0)))
