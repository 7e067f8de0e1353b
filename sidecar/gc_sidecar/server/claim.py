"""A sidecar's claim on its run directory: a record lock that it holds for as long as its process lives.

Two sidecars that wrote the same board would undo each other's policies without either of them knowing. The kernel
lets go of the lock however a process ends, and keeps it apart across containers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
from datetime import datetime, timezone

from gc_sidecar_agent.board import CLAIM_NAME
from gc_sidecar_agent.page import is_locked

MAXIMUM_CLAIM_BYTES = 1024


class ClaimedError(Exception):
    """Another sidecar has the run directory; `str()` of it says which."""


class Claim:
    """The claim on `run_dir`. A process must have one for each directory: to close a lock's file anywhere in a
    process gives it up."""

    def __init__(self, run_dir: str, address: str) -> None:
        self._path = os.path.join(run_dir, CLAIM_NAME)
        self._address = address
        self._fd: int | None = None

    def take(self) -> None:
        """Have it, from now on, also where somebody has removed the file since. Raises ClaimedError, OSError."""
        if self._fd is not None and _is_at(self._path, self._fd):
            return
        fd = os.open(
            self._path,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o660,
        )
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise ClaimedError(_holder(fd)) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._told(), 0)
        except BaseException:
            os.close(fd)
            raise
        before, self._fd = self._fd, fd
        if before is not None:
            os.close(before)

    def _told(self) -> bytes:
        told = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": self._address,
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        return json.dumps(told).encode()[:MAXIMUM_CLAIM_BYTES]


def claimant(run_dir: str) -> str | None:
    """Who has claimed `run_dir`; None where nobody has, or it cannot be told. Not for a process with a claim of
    its own, which it would give up."""
    try:
        fd = os.open(
            os.path.join(run_dir, CLAIM_NAME),
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        )
    except OSError:
        return None
    try:
        return _holder(fd) if is_locked(fd) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _is_at(path: str, fd: int) -> bool:
    with contextlib.suppress(OSError):
        status, ours = os.lstat(path), os.fstat(fd)
        return (status.st_dev, status.st_ino) == (ours.st_dev, ours.st_ino)
    return False


def _holder(fd: int) -> str:
    """Who has it, by their own word."""
    try:
        told = json.loads(os.pread(fd, MAXIMUM_CLAIM_BYTES, 0))
        host, pid, address, since = (
            str(told[name])[:64] for name in ("host", "pid", "address", "since")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another sidecar"
    text = f"the sidecar with pid {pid} on {host}, at {address} since {since}"
    return text if text.isprintable() else "another sidecar"
