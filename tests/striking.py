"""Signals that stop or kill a process of the tests, and have done so when the call returns."""

from __future__ import annotations

import os
import signal
from collections.abc import Set
from pathlib import Path

from tests.vllm.real_vllm import wait_until

DEADLINE_S = 10.0
# The states of proc_pid_stat(5) that a thread is in afterwards; one that is not there any more has none.
_STATES = {signal.SIGSTOP: "TtZX", signal.SIGKILL: "ZX"}


def strike(pid: int, number: signal.Signals) -> None:
    """Send SIGSTOP or SIGKILL, and wait until every thread of the process stands still or has ended.

    One thread takes the signal and passes it on to the others. On a busy machine these run on for
    milliseconds meanwhile, and do what a test believes that they cannot do any more.
    """
    os.kill(pid, number)
    ends = set(_STATES[number])
    assert wait_until(lambda: thread_states(pid) <= ends, DEADLINE_S), (pid, thread_states(pid))


def thread_states(pid: int) -> Set[str]:
    """The states that the threads of a process are in; none where it has gone."""
    states = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.add(thread.read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return states
