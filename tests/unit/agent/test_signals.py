"""A server that is told to stop in the middle of a collection stops, although our callback was running."""

from __future__ import annotations

import subprocess
import sys

SERVER = """
import gc, os, signal, sys, threading, time
from gc_sidecar_agent.agent import this_process

this_process().start("worker", 0, 0, None, "stand-in")

def stop(signum, frame):
    print("told to stop in", frame.f_code.co_name, flush=True)
    raise SystemExit(7)

signal.signal(signal.SIGTERM, stop)

def collect_with_a_signal():
    # It arrives in one of these collections: the handler then runs at the callback's first bytecode.
    heap = [[i] for i in range(400_000)]
    threading.Thread(target=lambda: (time.sleep(0.002), os.kill(os.getpid(), signal.SIGTERM))).start()
    for _ in range(3):
        gc.collect()

def serve():
    collect_with_a_signal()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        time.sleep(0.01)
    print("still there", flush=True)
    os._exit(1)

serve()
"""


def test_a_sigterm_during_a_collection_ends_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=30, check=False
    )
    assert "still there" not in run.stdout, run.stderr
    assert "told to stop in" in run.stdout
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
