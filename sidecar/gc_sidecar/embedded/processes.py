"""Processes of the embedded engine: forked, named, and never left behind.

A child dies with the process that made it, however that one ends: the kernel sees to it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46  # of the fields of /proc/self/stat that follow the command's name


def fork(title: str, main: Callable[[], None]) -> int:
    """Run `main` in a child called `title` and return its pid. The child ends when `main` returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _die_with(parent)
        # Ctrl-C in a terminal reaches the whole group: the launcher alone decides what follows.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        set_title(title)
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    raise AssertionError("unreachable")


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def set_title(title: str) -> None:
    """Show `title` in ps and top. The command line is overwritten in place, as far as there is room."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_NAME, title.replace("embedded ", "").encode()[:15])
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
        # Only if the place is surely the one that the kernel shows.
        if start and end - start == len(shown) and ctypes.string_at(start, end - start) == shown:
            ctypes.memmove(
                start, title.encode()[: len(shown) - 1].ljust(len(shown), b"\0"), len(shown)
            )
    except (OSError, ValueError, IndexError, AttributeError):
        pass  # a title is a convenience


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a child of ours that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
