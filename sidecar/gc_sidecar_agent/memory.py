"""The memory of this process as the kernel and torch count it, and how to give freed memory back.

Only `/proc/self/status` is read: `smaps` walks every mapping and has stalled a large process for seconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NamedTuple


class Memory(NamedTuple):
    """Resident memory in bytes, by kind; None where the kernel does not tell."""

    anonymous_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None


def read_memory() -> Memory:
    """This process's resident memory, from /proc/self/status. Never raises."""
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.read(fd, 16384)
        finally:
            os.close(fd)
    except OSError:
        return Memory(None, None, None)
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
