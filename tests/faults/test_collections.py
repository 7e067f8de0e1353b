"""Freezes every few milliseconds against 200 maintenances, while other people's code runs in the collections.

Whatever a finalizer or a callback does there: what was planted is reclaimed each time, none of it is frozen back,
and in the end GC is as it was found.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from gc_sidecar_agent.collection import Collect, MainThreadCollector, collect_here
from gc_sidecar_agent.collector import collector_kind
from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import NUMBER_INDEX
from gc_sidecar_agent.policy import Policy
from tests.unit.agent.garbage import Cycle, command, is_frozen
from tests.unit.agent.own_process import in_own_process
from tests.unit.agent.waiting import wait_until

MAINTENANCES = 200
FREEZE_EVERY_S = 0.002
FOUND = (700, 10, 10)

# --- what runs in a collection ---

logger = logging.getLogger("tests.faults.finalizers")
scratch = tempfile.TemporaryFile()  # noqa: SIM115


class Logs(Cycle):
    """A finalizer takes the lock of a log, which other threads take all the time."""

    def __del__(self) -> None:
        logger.warning("one of %d", id(self))


class Sleeps(Cycle):
    """A finalizer lets other threads run in the middle of the collection."""

    def __del__(self) -> None:
        time.sleep(0.001)


class Writes(Cycle):
    """The same with a system call that waits for a disk."""

    def __del__(self) -> None:
        os.pwrite(scratch.fileno(), b"x" * 64, 0)
        os.fsync(scratch.fileno())


class Collects(Cycle):
    """A finalizer asks for a collection in the collection, which CPython passes over."""

    def __del__(self) -> None:
        gc.collect()


def allocate(phase: str, info: dict[str, Any]) -> None:
    """A second callback, which allocates what GC tracks, as prometheus_client's did."""
    kept.append([{"phase": phase, "info": dict(info)} for _ in range(50)])
    del kept[:-3]


kept: list[Any] = []

# --- the test ---


@pytest.mark.parametrize("thread", ["that asks", "main"])
@pytest.mark.parametrize("finalizer", ["Logs", "Sleeps", "Writes", "Collects"])
@in_own_process
def test_every_planted_cycle_is_reclaimed_and_none_is_frozen_back(
    finalizer: str, thread: str
) -> None:
    kind: type[Cycle] = globals()[finalizer]
    errors: list[Any] = []
    sys.unraisablehook = errors.append
    gc.callbacks.append(allocate)
    gc.set_threshold(*FOUND)
    meter = PauseMeter()
    policy = Policy(meter, collector_kind())
    policy.note_ready()
    here: Collect = partial(collect_here, meter)
    with asking_thread(meter, here, thread) as do:
        do(lambda collect: carry_out(policy, collect, "freeze", generation=1, interval_s=1.0))
        with others_at_work(policy, here, kind):
            for _ in range(MAINTENANCES):
                do(lambda collect: maintain_once(policy, collect, kind))
                seen = freezes(meter)
                wait_until(lambda: freezes(meter) > seen, what="the tick goes on")  # noqa: B023
        assert meter.words[NUMBER_INDEX["maintains"]] == MAINTENANCES
        do(lambda collect: carry_out(policy, collect, "restore", generation=2))
    gc.callbacks.remove(allocate)
    assert (gc.isenabled(), gc.get_threshold(), is_frozen()) == (True, FOUND, False)
    assert not policy.collect_pending
    assert [str(each.exc_value) for each in errors] == []


def freezes(meter: PauseMeter) -> int:
    return meter.words[NUMBER_INDEX["freezes"]]


def maintain_once(policy: Policy, collect: Collect, kind: type[Cycle]) -> None:
    """Garbage that a freeze has caught and garbage that none has, and a maintenance that reclaims both."""
    cycles = [kind(), kind()]
    gc.freeze()
    cycles += [kind(), kind()]
    planted = [weakref.ref(cycle) for cycle in cycles]
    cycles.clear()
    carry_out(policy, collect, "maintain", generation=1)
    assert [cycle() for cycle in planted] == [None] * 4
    assert is_frozen()


def carry_out(policy: Policy, collect: Collect, kind: str, **fields: Any) -> None:
    while True:
        outcome = policy.run(command(kind, **fields), collect)
        # The main thread does not wait for another thread's collection to end: whoever asks may ask again.
        if outcome.code != "collector_busy" or collect_is_here(collect):
            break
        assert is_frozen() == (policy.mode == "freeze")
    assert outcome.ok, outcome


def collect_is_here(collect: Collect) -> bool:
    return isinstance(collect, partial)


@contextmanager
def asking_thread(
    meter: PauseMeter, here: Collect, thread: str
) -> Iterator[Callable[[Callable[[Collect], None]], None]]:
    """Who asks: this thread, which collects itself, or another one, for which the main thread collects."""
    if thread == "that asks":
        yield lambda task: task(here)
        return
    collector = MainThreadCollector(meter)

    def do(task: Callable[[Collect], None]) -> None:
        problems: list[BaseException] = []

        def ask() -> None:
            try:
                task(collector.collect)
            except BaseException as error:
                problems.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive():
            time.sleep(0.0005)  # a main thread that runs bytecode now and then
        if problems:
            raise problems[0]

    yield do


@contextmanager
def others_at_work(policy: Policy, here: Collect, kind: type[Cycle]) -> Iterator[None]:
    """A tick every few milliseconds; a thread that logs; one with garbage of its own and young collections."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(FREEZE_EVERY_S):
            policy._next_tick = 0.0
            policy.poll(None, here)

    def log() -> None:
        while not stop.wait(0.0005):
            logger.warning("working")

    def collect_young() -> None:
        for generation in itertools.cycle((0, 1)):
            if stop.wait(0.003):
                return
            kind()
            gc.collect(generation)

    logger.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115
    logger.propagate = False
    threads = [threading.Thread(target=work) for work in (tick, log, collect_young)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in threads:
            each.join()
