"""Runs one command for somebody else: passes signals on, reaps orphans, ends it in time, as an init process must.

The main thread does nothing but wait for signals, so that none is late; whatever may take long (HTTP) runs on
another thread meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

# Passed on to the command; the first four end us where there is no command.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)
WAITED_FOR = {*PASSED_ON, signal.SIGCHLD}
# Python ignores these; a command must find them as any other would.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

# What a signal says of itself that a terminal sent: to the whole group, so that the command has it already.
SI_KERNEL = 0x80
FROM_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH)

# How often a thread that works, or a command's time, is looked after.
LOOK_S = 0.1

# As timeout(1), env(1) and the shell have them.
EXIT_TIMEOUT, EXIT_OURS, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_SIGNAL = 124, 125, 126, 127, 128

Result = TypeVar("Result")


class Interrupted(Exception):
    """A signal that ends us came while no command was running."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class ExecError(Exception):
    """The command could not be started; `exit_code` is 126 or 127."""

    def __init__(self, detail: str, exit_code: int) -> None:
        super().__init__(detail)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ending:
    """How a command ended: its exit status, or the signal that ended it, and what we had to do with that."""

    status: int | None
    signal: int | None
    timed_out: bool = False
    stopped_because: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code for it, as a shell gives it."""
        if self.signal is not None:
            return EXIT_SIGNAL + self.signal
        return self.status or 0


class Work(Generic[Result]):
    """A function on a thread of its own, from now on."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has returned or raised."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> Result:
        """What it returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]


class Supervisor:
    """The main thread's way to wait. Use it inside `signals_waited_for`."""

    def wait(self, work: Work[Result]) -> Result:
        """What the work returns, or raises; Interrupted as soon as a signal wants us to end.

        The work goes on then: wait for it again before anything that must not come before its end.
        """
        while not work.is_done:
            self._wait_for_signal(LOOK_S)
        return work.result()

    def sleep(self, seconds: float) -> None:
        """Wait. Raises Interrupted."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._wait_for_signal(left_s)

    def _wait_for_signal(self, seconds: float) -> None:
        info = signal.sigtimedwait(WAITED_FOR, seconds)
        reap()
        if info is not None and info.si_signo in ENDING:
            raise Interrupted(info.si_signo)

    def run(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        timeout_s: float | None,
        kill_after_s: float,
        why_stop: Callable[[], str | None],
    ) -> Ending:
        """Run `command` until it has ended. Raises ExecError.

        Away from a terminal it has a process group of its own, and what it has started is signalled with it.
        It is ended after `timeout_s`, and as soon as `why_stop` gives a reason: by SIGTERM, and `kill_after_s`
        later by SIGKILL.
        """
        has_group = not os.isatty(0)
        pid = spawn(command, environment, has_group)
        target = -pid if has_group else pid
        began_s = time.monotonic()
        killed_at_s: float | None = None
        timed_out, reason = False, None
        while True:
            status = reap(pid)
            if status is not None:
                if has_group and killed_at_s is not None:
                    _kill(
                        target, signal.SIGKILL
                    )  # what it has left behind would go on with its work
                code = os.waitstatus_to_exitcode(status)
                number = -code if code < 0 else None
                return Ending(None if number else code, number, timed_out, reason)
            now_s = time.monotonic()
            if killed_at_s is None:
                reason = why_stop()
                timed_out = timeout_s is not None and now_s - began_s >= timeout_s
                if reason or timed_out:
                    _kill(target, signal.SIGTERM)
                    # One that is stopped sees it only then.
                    _kill(target, signal.SIGCONT)
                    killed_at_s = now_s + kill_after_s
            elif now_s >= killed_at_s:
                _kill(target, signal.SIGKILL)
            left_s = LOOK_S
            if timeout_s is not None and killed_at_s is None:
                left_s = max(0.001, min(LOOK_S, began_s + timeout_s - now_s))
            info = signal.sigtimedwait(WAITED_FOR, left_s)
            if info is None or info.si_signo not in PASSED_ON:
                continue
            if has_group or not (info.si_code == SI_KERNEL and info.si_signo in FROM_A_TERMINAL):
                _kill(target, info.si_signo)


@contextmanager
def signals_waited_for() -> Iterator[Supervisor]:
    """Inside, signals do nothing by themselves: they wait until the supervisor looks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    # Who inherits it as ignored is never told what became of a child.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield Supervisor()
    finally:
        # One that came too late to be passed on must not end us either: everything is done.
        while signal.sigtimedwait(WAITED_FOR, 0) is not None:
            pass
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reap(awaited: int | None = None) -> int | None:
    """Take leave of every child that has ended: as process 1 we inherit orphans. The wait status of `awaited`
    if it was among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        if pid == awaited:
            found = status


def spawn(command: Sequence[str], environment: dict[str, str], has_group: bool) -> int:
    """Start `command` with our files and a signal mask like any other's; its pid. Raises ExecError."""
    options: dict[str, Any] = {"setsigmask": (), "setsigdef": IGNORED_BY_PYTHON}
    if has_group:
        options["setpgroup"] = 0
    try:
        return os.posix_spawnp(command[0], list(command), environment, **options)
    except (FileNotFoundError, NotADirectoryError):
        raise ExecError(f"{command[0]}: no such command", EXIT_NOT_FOUND) from None
    except (OSError, ValueError) as error:
        script = shutil.which(command[0])
        if isinstance(error, OSError) and error.errno == errno.ENOEXEC and script:
            # Without `#!`: a shell would run it, and so do we.
            words = ["/bin/sh", script, *command[1:]]
            return os.posix_spawn(words[0], words, environment, **options)
        raise ExecError(f"{command[0]}: {error}", EXIT_NOT_EXECUTABLE) from None


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # it has ended, or its group is not ours any more
        pass
