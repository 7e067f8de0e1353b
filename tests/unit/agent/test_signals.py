"""A server that is told to stop in the middle of a collection stops, although our callback was running."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.agent.own_process import environment

SERVER = """
import gc, os, signal, sys, time
from gc_sidecar_agent.agent import this_process

this_process().start("worker", 0, 0, None, "stand-in")

def stop(signum, frame):
    print("told to stop in", frame.f_code.co_name, flush=True)
    raise SystemExit(7)

signal.signal(signal.SIGALRM, stop)
gc.disable()  # to make the heap takes half as long
heap = [[i] for i in range(1_000_000)]
gc.enable()

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
    command = [sys.executable, "-c", SERVER]
    run = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
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
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert "in a finalizer" in run.stderr
