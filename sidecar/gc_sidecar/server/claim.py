"""A sidecar's claim on its run directory: a lock on a file there, which it holds for as long as it lives.

Two sidecars that wrote the same board would undo each other's policies without either of them knowing. The kernel
lets go of the lock however a process ends, and keeps it across containers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from datetime import datetime, timezone

CLAIM_NAME = "sidecar.lock"
MAXIMUM_CLAIM_BYTES = 1024
# How often the lock is tried: whoever only looks who has it holds it for a moment.
ATTEMPTS = 10
ATTEMPT_S = 0.02


class ClaimedError(Exception):
    """Another sidecar has the run directory; `str()` of it says which."""


class Claim:
    """The claim on `run_dir`; `address` is where people reach its holder."""

    def __init__(self, run_dir: str, address: str) -> None:
        self._path = os.path.join(run_dir, CLAIM_NAME)
        self._address = address
        self._fd: int | None = None
        self._taking = threading.Lock()

    def take(self) -> bool:
        """Have it, also where somebody has removed the file since. Whether it was had anew.

        Raises ClaimedError, OSError.
        """
        with self._taking:
            if self._fd is not None and _is_at(self._path, self._fd):
                return False
            self._close()
            for attempt in range(ATTEMPTS):
                if attempt:
                    time.sleep(ATTEMPT_S)
                fd = self._take_once(is_last=attempt == ATTEMPTS - 1)
                if fd is not None:
                    self._fd = fd
                    return True
            raise OSError(errno.EAGAIN, f"{CLAIM_NAME} is replaced all the time")

    def release(self) -> None:
        """Leave it to another one."""
        with self._taking:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take_once(self, is_last: bool) -> int | None:
        """The locked file; None where another attempt may do better."""
        with contextlib.ExitStack() as unless_taken:
            fd = _open(self._path)
            unless_taken.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_last:
                    raise ClaimedError(_holder(fd)) from None
                return None
            if not _is_at(self._path, fd):
                return None  # replaced since it was opened
            if not self._tell(fd):
                # It belongs to another user: while we hold it nobody else does, so it can go.
                os.unlink(self._path)
                return None
            unless_taken.pop_all()
            return fd

    def _tell(self, fd: int) -> bool:
        """Write who has it, for people. False where the file cannot be written."""
        told = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": self._address,
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(told).encode()[:MAXIMUM_CLAIM_BYTES], 0)
        except OSError as error:
            # Opened for reading only. On a full disk it is held all the same, without saying so.
            return error.errno not in (errno.EBADF, errno.EINVAL)
        return True


def claimant(run_dir: str) -> str | None:
    """Who has claimed `run_dir`; None where nobody has, or it cannot be told."""
    try:
        fd = os.open(
            os.path.join(run_dir, CLAIM_NAME),
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        )
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(fd)
    except OSError:
        pass  # no locks there
    finally:
        os.close(fd)
    return None


def _open(path: str) -> int:
    """The file of the lock, made if need be; for reading only where it is another user's. Raises OSError."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        fd = os.open(path, flags | os.O_RDONLY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        # Whatever our umask: another user's sidecar must be able to see whether it is locked.
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o644)
    except BaseException:
        os.close(fd)
        raise
    return fd


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another sidecar"
    text = f"the sidecar with pid {pid} on {host}, at {address} since {since}"
    return text if text.isprintable() else "another sidecar"
