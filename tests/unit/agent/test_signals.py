"""A server that is told to stop in the middle of a collection stops, although our callback was running."""

from __future__ import annotations

import subprocess
import sys

SERVER = """
import gc, os, signal, sys, time
from gc_sidecar_agent.agent import this_process

this_process().start("worker", 0, 0, None, "stand-in")

def stop(signum, frame):
    print("told to stop in", frame.f_code.co_name, flush=True)
    raise SystemExit(7)

signal.signal(signal.SIGALRM, stop)
heap = [[i] for i in range(3_000_000)]

def serve():
    # The signal arrives in the middle of the collection; Python's handler runs at the next bytecode,
    # which is our callback's.
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    gc.collect()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.01)
    print("still there", flush=True)
    os._exit(1)

serve()
"""


def test_a_stop_signal_during_a_collection_ends_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=30, check=False
    )
    assert "told to stop in callback" in run.stdout, run.stdout + run.stderr
    assert "still there" not in run.stdout, run.stderr
    assert run.returncode != 1, run.stderr


def test_other_ignored_exceptions_are_reported_as_before() -> None:
    code = (
        "from gc_sidecar_agent.agent import this_process\n"
        "this_process().start('worker', 0, 0, None, 'stand-in')\n"
        "class Bad:\n"
        "    def __del__(self): raise ValueError('in a finalizer')\n"
        "Bad()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert "in a finalizer" in run.stderr
