"""The memory of this process and of its cgroup as the kernel and torch count it; how to give freed memory back.

Of the process itself only `/proc/self/status` is read: `smaps` walks every mapping and has stalled a large
process for seconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple


class Memory(NamedTuple):
    """Resident memory in bytes, by kind; None where the kernel does not tell."""

    anonymous_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None


class CgroupMemory(NamedTuple):
    """What a cgroup may use and uses, in bytes; None where there is no limit or nobody tells."""

    limit_bytes: int | None
    current_bytes: int | None


def read_memory() -> Memory:
    """This process's resident memory, from /proc/self/status. Never raises."""
    status = _read("/proc/self/status")
    return Memory(
        _field_bytes(status, b"RssAnon:"),
        _field_bytes(status, b"RssFile:"),
        _field_bytes(status, b"RssShmem:"),
    )


def _field_bytes(status: bytes, name: bytes) -> int | None:
    # At the begin of a line: the process's own name stands in the first one.
    start = status.find(b"\n" + name)
    if start < 0:
        return None
    start += 1 + len(name)
    try:
        return int(status[start : status.find(b"kB", start)]) * 1024
    except ValueError:
        return None


class _CgroupVersion(NamedTuple):
    """Where a version of cgroups is mounted, and its names for what we read."""

    mount: str
    limit: str
    usage: str
    inactive_file: bytes  # in memory.stat, with what lies below


_V2 = _CgroupVersion("sys/fs/cgroup", "memory.max", "memory.current", b"inactive_file")
_V1 = _CgroupVersion(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    b"total_inactive_file",
)
# Version 1 has no word for "no limit": it is 2**63 - 1 in whole memory pages.
_NO_LIMIT = 1 << 62


def read_cgroup_memory(root: str = "/") -> CgroupMemory:
    """The tightest memory limit that this process's cgroup is under, and how much of it is in use. Never raises.

    In use is the working set, by which kubelet evicts: without file cache that nobody has touched lately. Where
    a group further up has a smaller limit, both are that group's. A few small files are read: not in a callback.
    """
    version, path = _own_cgroup(_read(os.path.join(root, "proc/self/cgroup")))
    mount = os.path.join(root, version.mount)
    limit: int | None = None
    tightest: str | None = None
    for directory in _upwards(mount, path):
        usage = os.path.join(directory, version.usage)
        # Inside a container the path may be the host's while the mount is the container's own: not all exist.
        if tightest is None and os.path.exists(usage):
            tightest = directory
        found = _whole(_read(os.path.join(directory, version.limit)))
        if found is not None and found < _NO_LIMIT and (limit is None or found < limit):
            limit, tightest = found, directory
    if tightest is None:
        return CgroupMemory(None, None)
    usage_bytes = _whole(_read(os.path.join(tightest, version.usage)))
    inactive_bytes = _stat_bytes(
        _read(os.path.join(tightest, "memory.stat")), version.inactive_file
    )
    if usage_bytes is None or inactive_bytes is None:
        return CgroupMemory(limit, None)
    return CgroupMemory(limit, max(0, usage_bytes - inactive_bytes))


def _own_cgroup(proc_self_cgroup: bytes) -> tuple[_CgroupVersion, str]:
    """The version that counts this process's memory, and its path there. Lines are ID:CONTROLLERS:PATH; where
    version 1 has the memory controller, version 2 is mounted without it."""
    v2_path = "/"
    for line in proc_self_cgroup.splitlines():
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if b"memory" in controllers.split(b","):
            return _V1, os.fsdecode(path)
        if (number, controllers) == (b"0", b""):
            v2_path = os.fsdecode(path)
    return _V2, v2_path


def _upwards(mount: str, path: str) -> Iterator[str]:
    """The directories of the cgroup and of all above it, the nearest first."""
    # A process outside of its cgroup namespace's root has a path that begins with "/..".
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        yield os.path.join(mount, *parts[:depth])


def _read(path: str) -> bytes:
    """The beginning of a small file of the kernel's; nothing where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 16384)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return b""


def _whole(text: bytes) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None  # "max", or nothing


def _stat_bytes(memory_stat: bytes, name: bytes) -> int | None:
    for line in memory_stat.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return _whole(value)
    return None


def read_device_memory() -> tuple[int | None, int | None]:
    """Device memory allocated and reserved by torch in bytes; None unless torch has initialised a device
    already. Never imports torch and never initialises a device. Never raises."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None, None
    try:
        if not torch.cuda.is_initialized():
            return None, None
        # Of all devices: on the agent's thread the current one is the first, whatever the worker's is.
        devices = range(torch.cuda.device_count())
        return (
            sum(int(torch.cuda.memory_allocated(device)) for device in devices),
            sum(int(torch.cuda.memory_reserved(device)) for device in devices),
        )
    except Exception:
        return None, None


def trim() -> None:
    """Give memory that the allocator keeps back to the kernel (glibc's malloc_trim). Never raises."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc
