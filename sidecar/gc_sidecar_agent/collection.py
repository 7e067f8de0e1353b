"""Full collections that somebody asked for: on the asking thread, or on the process's main thread.

In a worker or an engine core no collection is started on a thread of ours: finalizers of device tensors on a
foreign thread are a known way to break such a process. The agent's thread asks the main thread instead.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gc_sidecar_agent.meter import PauseMeter

# How long a collection may stay asked for on the main thread. A main thread that is blocked in C does not see
# it; later it would meet a timed moment instead of the quiet one that was asked for.
MAIN_THREAD_WAIT_S = 1.0
# How long until it is asked again where another thread's collection ran.
BUSY_WAIT_S = 0.01


class CollectionError(Exception):
    """A full collection that was asked for and did not happen."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Collection:
    """A full collection that the meter saw start on the thread that ran it."""

    pause_s: float
    collected_objects: int


Collect = Callable[[str, float], Collection]
"""Runs one full collection: called with the trigger and a deadline on time.monotonic(), in seconds.
Raises CollectionError."""


def collect_here(meter: PauseMeter, trigger: str, deadline: float) -> Collection:
    """Collect on this thread, and prove it: gc.collect() returns 0 at once while another thread's collection
    sits in a finalizer. Raises CollectionError `collector_busy` when that lasts until `deadline`."""
    wait_s = 0.001
    while True:
        meter.attach()
        before = meter.requested_collections
        with meter.requested(trigger):
            collected = gc.collect()
        if meter.requested_collections > before:
            return Collection(meter.requested_ns / 1e9, collected)
        if time.monotonic() >= deadline:
            raise CollectionError(
                "collector_busy",
                "another collection of this process has been running (in a finalizer) all the time;"
                " retry when it has ended",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.1)


_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

# For the life of the process, a forked child's included: CPython may still hold the address.
_KEPT: list[ctypes._FuncPointer] = []


class MainThreadCollector:
    """Lets the main thread run full collections that another thread asks for.

    It uses CPython's own pending calls, which the main thread runs between two bytecodes, as it runs signal
    handlers. Low thresholds would do without ctypes, but CPython's 25 % rule blocks those after each full
    collection until the heap has grown. `wake` makes a main thread that waits for work run bytecode.
    """

    def __init__(self, meter: PauseMeter) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._meter = meter
        self._asked: _Asked | None = None
        self._function = _PENDING_CALL(self.run_pending)
        _KEPT.append(self._function)
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._add.argtypes = [_PENDING_CALL, ctypes.c_void_p]
        self._add.restype = ctypes.c_int

    def collect(self, trigger: str, deadline: float) -> Collection:
        """Have the main thread collect, and wait for it, at most MAIN_THREAD_WAIT_S for its start.

        Raises CollectionError: `collect_pending` when it did not start, `collector_busy` when other collections
        ran whenever it could have.
        """
        give_up = min(deadline, time.monotonic() + MAIN_THREAD_WAIT_S)
        busy: CollectionError | None = None
        while True:
            try:
                return self._collect_once(trigger, give_up)
            except CollectionError as error:
                if error.code == "collector_busy":
                    busy = error
                if time.monotonic() >= give_up or error is not busy:
                    raise busy or error from None
            # The main thread itself must not wait for a collection of another thread to end.
            time.sleep(BUSY_WAIT_S)

    def _collect_once(self, trigger: str, give_up: float) -> Collection:
        asked = self._asked = _Asked(trigger)
        if self._add(self._function, None) == 0:
            self.wake()
            while not asked.taken.locked() and time.monotonic() < give_up:
                time.sleep(0.005)
        # Either it is taken back here or the main thread has it, and then it ends.
        if not asked.taken.acquire(blocking=False):
            while not asked.done:
                time.sleep(0.005)
        self._asked = None
        if asked.result is not None:
            return asked.result
        raise asked.error or CollectionError(
            "collect_pending",
            "the main thread did not come by in time to collect; the next request over RPC,"
            " or CPython's own next full collection, does it",
        )

    def run_pending(self, _argument: int | None) -> int:
        """What CPython calls on the main thread."""
        asked = self._asked
        # Somebody who disabled GC for a moment (graph capture) must not get a collection now.
        if asked is None or not gc.isenabled() or not asked.taken.acquire(blocking=False):
            return 0
        try:
            asked.result = collect_here(self._meter, asked.trigger, time.monotonic())
        except CollectionError as error:
            asked.error = error
        finally:
            asked.done = True
        return 0


class _Asked:
    """One collection asked of the main thread."""

    def __init__(self, trigger: str) -> None:
        self.trigger = trigger
        self.taken = threading.Lock()  # never released: one side takes it
        self.done = False
        self.result: Collection | None = None
        self.error: CollectionError | None = None
