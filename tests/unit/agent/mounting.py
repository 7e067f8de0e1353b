"""File systems that are full or read-only, seen by the mounting process alone."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path


@functools.cache
def may_mount() -> bool:
    """Whether this user may, which root in a container often may not."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which(probe[0]) is None:
        return False
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def mount_for_this_process(target: Path, *options: str) -> None:
    """A tmpfs that no other process sees and that goes with this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns = 0x00020000
    if libc.unshare(clone_newns) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(target)], check=True)
