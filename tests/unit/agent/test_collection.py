"""Collections that were asked for: that they really ran, on which thread, and what happens when they cannot."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gc_sidecar_agent import collection as collection_module
from gc_sidecar_agent.collection import (
    Collection,
    CollectionError,
    MainThreadCollector,
    collect_here,
)
from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import NUMBER_INDEX
from tests.unit.agent.garbage import Cycle, plant_cycle, plant_old_cycle
from tests.unit.agent.own_process import in_own_process
from tests.unit.agent.rings import full_pauses
from tests.unit.agent.waiting import wait_until


class OnThread:
    """Calls something on a thread of its own and keeps what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.took_s = 0.0

        def run() -> None:
            began = time.monotonic()
            try:
                self.result = call()
            except BaseException as error:
                self.error = error
            self.took_s = time.monotonic() - began

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def is_over(self) -> bool:
        return not self.thread.is_alive()


class SittingInAFinalizer:
    """Another thread's full collection that does not end before it is told."""

    def __init__(self) -> None:
        inside, self.leave = threading.Event(), threading.Event()

        class Sitting(Cycle):
            def __del__(_) -> None:
                inside.set()
                self.leave.wait(30)

        gc.disable()
        Sitting()
        self.other = OnThread(gc.collect)
        assert inside.wait(10)
        gc.enable()

    def end(self) -> None:
        self.leave.set()
        self.other.thread.join()


def triggers(meter: PauseMeter) -> list[str]:
    return [pause.trigger for pause in full_pauses(meter)]


# --- on the asking thread ---


@in_own_process
def test_a_collection_here_reclaims_and_tells_how_long_and_how_many() -> None:
    gc.disable()
    meter = PauseMeter()
    gc.collect()
    cycles = [plant_cycle() for _ in range(50)]
    began = time.monotonic()
    collection = collect_here(meter, "maintain", began)
    assert 0 < collection.pause_s <= time.monotonic() - began
    assert collection.collected_objects >= 50
    assert not any(cycle() for cycle in cycles)
    assert triggers(meter) == ["maintain"]


@in_own_process
def test_a_collection_here_runs_with_gc_disabled_and_leaves_it_so() -> None:
    gc.disable()
    cycle = plant_cycle()
    collect_here(PauseMeter(), "restore", time.monotonic())
    assert cycle() is None
    assert not gc.isenabled()


@in_own_process
def test_a_callback_that_somebody_removed_meanwhile_is_put_back() -> None:
    meter = PauseMeter()
    meter.attach()
    gc.callbacks.clear()
    assert isinstance(collect_here(meter, "entry", time.monotonic()), Collection)
    assert meter.callback in gc.callbacks


@in_own_process
def test_a_collection_that_did_not_run_is_tried_again_until_it_did() -> None:
    meter = PauseMeter()
    sitting = SittingInAFinalizer()
    cycle = plant_cycle()
    # What CPython says meanwhile: nothing collected, at once, and no word that nothing ran.
    assert gc.collect() == 0
    here = OnThread(lambda: collect_here(meter, "maintain", time.monotonic() + 30))
    here.thread.join(0.1)
    assert not here.is_over()
    assert cycle() is not None
    sitting.end()
    here.thread.join()
    assert here.error is None
    assert cycle() is None
    assert triggers(meter) == ["maintain"]


@in_own_process
def test_at_the_deadline_it_is_an_error_with_a_code() -> None:
    meter = PauseMeter()
    sitting = SittingInAFinalizer()
    here = OnThread(lambda: collect_here(meter, "maintain", time.monotonic() + 0.2))
    wait_until(here.is_over)
    assert isinstance(here.error, CollectionError)
    assert here.error.code == "collector_busy"
    assert 0.2 <= here.took_s < 2
    sitting.end()
    assert triggers(meter) == []


@in_own_process
def test_the_collection_of_another_thread_is_no_proof() -> None:
    meter = PauseMeter()
    # gc.collect() that does nothing on this thread while another thread collects all the time.
    real = gc.collect

    def collect() -> int:
        if threading.current_thread() is threading.main_thread():
            OnThread(real).thread.join()
            return 0
        return real()

    gc.collect = collect
    try:
        collect_here(meter, "maintain", time.monotonic() + 0.05)
    except CollectionError as error:
        code = error.code
    assert code == "collector_busy"
    assert meter.words[NUMBER_INDEX["gen2_count"]] >= 1


# --- on the main thread ---


def ask_main_thread(
    collector: MainThreadCollector, trigger: str = "maintain", deadline_s: float = 10
) -> OnThread:
    return OnThread(lambda: collector.collect(trigger, time.monotonic() + deadline_s))


def ask_while_main_thread_is_blocked(
    collector: MainThreadCollector, deadline_s: float = 10
) -> OnThread:
    """On the main thread: blocks it in C, where it runs no bytecode, until the asking thread has its answer."""
    may_ask, answered = threading.Lock(), threading.Lock()
    may_ask.acquire()
    answered.acquire()

    def ask() -> Collection:
        with may_ask:
            try:
                return collector.collect("maintain", time.monotonic() + deadline_s)
            finally:
                answered.release()

    asking = OnThread(ask)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that the main thread is not interrupted between these two lines
    may_ask.release()
    answered.acquire()
    sys.setswitchinterval(interval_s)
    asking.thread.join()
    return asking


@in_own_process
def test_it_runs_on_the_main_thread_and_not_on_the_asking_one() -> None:
    meter = PauseMeter()
    collector = MainThreadCollector(meter)
    gc.set_threshold(0)
    ran_on: list[int] = []
    gc.callbacks.append(lambda phase, info: ran_on.append(threading.get_ident()))
    cycle = plant_old_cycle()
    del ran_on[:]
    asking = ask_main_thread(collector)
    wait_until(asking.is_over)
    assert asking.error is None
    assert cycle() is None
    assert set(ran_on) == {threading.main_thread().ident}
    assert asking.result.collected_objects >= 1
    assert asking.result.pause_s > 0
    assert triggers(meter) == ["maintain"]


@in_own_process
def test_finalizers_run_on_the_main_thread_too() -> None:
    collector = MainThreadCollector(PauseMeter())
    finalized_on: list[str] = []

    class Tensor(Cycle):
        def __del__(self) -> None:
            finalized_on.append(threading.current_thread().name)

    gc.set_threshold(0)
    Tensor()
    wait_until(ask_main_thread(collector).is_over)
    assert finalized_on == ["MainThread"]


@in_own_process
def test_a_blocked_main_thread_is_left_alone_and_nothing_runs_later() -> None:
    meter = PauseMeter()
    collector = MainThreadCollector(meter)
    gc.set_threshold(0)
    asking = ask_while_main_thread_is_blocked(collector)
    assert isinstance(asking.error, CollectionError)
    assert asking.error.code == "collect_pending"
    assert 0.9 <= asking.took_s < 3
    # The main thread runs bytecode again, and meets nothing that was left over.
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    assert triggers(meter) == []
    # The next one finds its way.
    asking = ask_main_thread(collector, "restore")
    wait_until(asking.is_over)
    assert asking.error is None
    assert triggers(meter) == ["restore"]


@in_own_process
def test_a_deadline_in_the_past_asks_for_nothing() -> None:
    collector = MainThreadCollector(PauseMeter())
    asking = ask_while_main_thread_is_blocked(collector, deadline_s=-1)
    assert isinstance(asking.error, CollectionError)
    assert asking.took_s < 0.9


@in_own_process
def test_somebody_who_disabled_gc_gets_no_collection() -> None:
    meter = PauseMeter()
    collector = MainThreadCollector(meter)
    gc.disable()
    cycle = plant_cycle()
    asking = ask_main_thread(collector, deadline_s=0.3)
    wait_until(asking.is_over)
    assert isinstance(asking.error, CollectionError)
    assert asking.error.code == "collect_pending"
    assert cycle() is not None
    assert triggers(meter) == []


@in_own_process
def test_a_main_thread_that_waits_for_work_is_woken() -> None:
    collector = MainThreadCollector(PauseMeter())
    work = threading.Semaphore(0)
    collector.wake = work.release
    asking = ask_main_thread(collector)
    assert work.acquire(timeout=20)  # like the busy loop's queue: waits in C
    wait_until(asking.is_over)
    assert asking.error is None
    assert asking.took_s < 0.9


@in_own_process
def test_a_collection_that_takes_long_is_waited_for() -> None:
    collector = MainThreadCollector(PauseMeter())
    collection_module.MAIN_THREAD_WAIT_S = 0.05

    class Slow(Cycle):
        def __del__(self) -> None:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                pass

    gc.set_threshold(0)
    Slow()
    asking = ask_main_thread(collector)
    wait_until(asking.is_over)
    assert asking.error is None
    assert asking.result.pause_s >= 0.3


@in_own_process
def test_where_another_threads_collection_is_under_way_it_is_an_error_with_a_code() -> None:
    meter = PauseMeter()
    collector = MainThreadCollector(meter)
    sitting = SittingInAFinalizer()
    asking = ask_main_thread(collector)
    wait_until(asking.is_over)
    sitting.end()
    assert isinstance(asking.error, CollectionError)
    assert asking.error.code == "collector_busy"
    assert triggers(meter) == []


@pytest.mark.parametrize("give_up_after_s", [0.0, 0.0005, 0.002])
@in_own_process
def test_either_it_ran_and_its_result_is_known_or_it_never_runs(give_up_after_s: float) -> None:
    # A main thread that runs bytecode just when the asking thread gives up.
    sys.setswitchinterval(1e-5)
    meter = PauseMeter()
    collector = MainThreadCollector(meter)
    gc.set_threshold(0)
    gc.freeze()
    outcomes: list[bool] = []

    def ask_often() -> None:
        for _ in range(150):
            before = meter.words[NUMBER_INDEX["full_starts"]]
            try:
                collector.collect("maintain", time.monotonic() + give_up_after_s)
                outcomes.append(True)
            except CollectionError:
                outcomes.append(False)
            ran = meter.words[NUMBER_INDEX["full_starts"]] - before
            assert ran == outcomes[-1]

    asking = OnThread(ask_often)
    while not asking.is_over():
        pass
    assert asking.error is None
    assert meter.words[NUMBER_INDEX["gen2_count"]] == sum(outcomes)
    assert len(outcomes) == 150


@in_own_process
def test_calls_on_the_main_thread_meanwhile_meet_no_deadlock() -> None:
    # As the policy does it: whoever collects holds a lock, and RPC calls on the main thread want it too.
    meter = PauseMeter()
    collector = MainThreadCollector(meter)
    gc.set_threshold(0)
    gc.freeze()
    lock = threading.Lock()

    def ask_often() -> None:
        for _ in range(100):
            with lock:
                collector.collect("maintain", time.monotonic() + 5)

    asking = OnThread(ask_often)
    calls = 0
    while not asking.is_over():
        while not lock.acquire(timeout=0.01):
            pass
        collect_here(meter, "restore", time.monotonic() + 5)
        lock.release()
        calls += 1
    assert asking.error is None
    # Each of them ran, and none ran twice. (The ring may have forgotten the first ones.)
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 100 + calls
    assert set(triggers(meter)) == {"maintain", "restore"}


@in_own_process
def test_what_a_collector_of_a_forked_child_left_behind_may_still_be_called() -> None:
    meter = PauseMeter()
    collector = MainThreadCollector(meter)
    function = collector._function
    address = id(function)
    pid = os.fork()
    if pid == 0:
        collector = MainThreadCollector(meter)  # the parent's is garbage now
        del function
        gc.collect()
        from gc_sidecar_agent.collection import _KEPT

        os._exit(0 if any(id(kept) == address for kept in _KEPT) else 1)
    assert os.waitpid(pid, 0)[1] == 0
