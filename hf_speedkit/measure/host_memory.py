"""How much memory of the host this process may still take, as the kernel and the container count it."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# Version 2 of the kernel's control groups, then version 1: limit and use, both in bytes, and what the use is made of.
_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
# Files that were read, which the kernel drops for whoever needs memory; version 1 has sums over groups below as well.
_CACHED = (("active_file", "inactive_file"), ("total_active_file", "total_inactive_file"))


def available_host_bytes(*, cgroups: Path = _CGROUPS, meminfo: Path = _MEMINFO) -> int:
    """Bytes that can be taken before this host swaps or this container is killed; 0 where nobody says.

    A container sees the host's /proc/meminfo whatever its own limit is; a pod that pins more is killed. Cached files
    count as a container's use: after 54 GB of weights were read that would be memory nobody has.

    Args:
        cgroups: where the control group of this process is mounted.
        meminfo: the kernel's figures of the host.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, "memory.max"; Documentation/filesystems/proc.rst.
    """
    found = [_of_host(meminfo), *(_of_container(*(cgroups / name for name in names)) for names in _FILES)]
    return max(0, min((size for size in found if size is not None), default=0))


def _of_host(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(limit: Path, use: Path, stat: Path) -> int | None:
    try:
        free = int(limit.read_text(encoding="ascii")) - int(use.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
    except OSError:
        return free
    sizes = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}
    return free + max(sum(sizes.get(name, 0) for name in names) for names in _CACHED)
