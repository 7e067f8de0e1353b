"""A real sidecar, forked from a process that has imported everything which it needs.

Python takes most of a second to import it all; where the start itself is not the point, once for many is enough.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from typing import NoReturn

from tests.sidecar_process import SidecarProcess
from tests.vllm.real_vllm import wait_until

_PR_SET_PDEATHSIG = 1
# Scenes may be played side by side, in threads.
_one_at_a_time = threading.Lock()


class ForkedSidecar(SidecarProcess):
    """A SidecarProcess in all but how it starts."""

    def __enter__(self) -> ForkedSidecar:
        self.log_path.write_bytes(b"")
        arguments = self._command[self._command.index("serve") :]
        with _one_at_a_time:
            forked = _nursery().fork(arguments, str(self.log_path))
        self._process = forked  # type: ignore[assignment]
        if not wait_until(self._answers, 30.0):
            self.__exit__(None, None, None)
            raise AssertionError(f"the sidecar did not start:\n{self.log_text()}")
        return self


class _Forked:
    """As much of a Popen as a SidecarProcess uses. The process is the nursery's child, not ours."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and the nursery does not wait for it
            self._fd = None

    def poll(self) -> int | None:
        return 0 if self._ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired("gc-sidecar serve", timeout)
        return 0

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> bool:
        if self._fd is not None and select.select([self._fd], [], [], timeout)[0]:
            os.close(self._fd)
            self._fd = None
        return self._fd is None

    def _send(self, number: int) -> None:
        if self._fd is not None:
            signal.pidfd_send_signal(self._fd, number)


class _Nursery:
    """The process that sidecars are forked from, one for each process that runs tests."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("GC_SIDECAR_")}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_sidecar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        atexit.register(self._process.communicate)  # it ends with its input

    def fork(self, arguments: list[str], log_path: str) -> _Forked:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, log_path]) + "\n")
        self._process.stdin.flush()
        return _Forked(int(self._process.stdout.readline()))


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


def _be_nursery() -> None:
    from gc_sidecar.commands import serve  # noqa: F401
    from gc_sidecar.server import app, listeners  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child
    for line in sys.stdin:
        arguments, log_path = json.loads(line)
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            _be_sidecar(arguments, log_path, parent)
        print(pid, flush=True)


def _be_sidecar(arguments: list[str], log_path: str, parent: int) -> NoReturn:
    from gc_sidecar.__main__ import main

    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, target)
        if os.getppid() == parent:
            status = main(arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _be_nursery()
