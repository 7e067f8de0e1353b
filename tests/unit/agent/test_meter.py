"""The pause meter: what it counts, what it records, and what it must never do in somebody's server."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from gc_sidecar_agent import meter as meter_module
from gc_sidecar_agent.collection import collect_here
from gc_sidecar_agent.meter import FORK_WAIT_S, RING_SLOTS, PauseMeter, Ring, outlast_callbacks
from gc_sidecar_agent.page import (
    BUCKET_COUNT,
    BUCKETS_NS,
    HEADER_COLLECTING_SINCE_NS,
    NONE,
    NUMBER_INDEX,
    RING_RECORDS,
    create_page,
    list_pages,
    page_name,
    read_page,
)
from tests.leaving_out import leave_out
from tests.unit.agent.garbage import Cycle, collect_automatically, plant_cycle
from tests.unit.agent.own_process import (
    Child,
    command_for,
    environment,
    hear,
    in_own_process,
    say,
)
from tests.unit.agent.rings import full_pauses, young_pauses
from tests.unit.agent.waiting import wait_until


class HandFed:
    """A meter that is not in gc.callbacks, with a clock of ours, so that every pause is as long as we say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000_000_000
        self.meter = PauseMeter()
        monkeypatch.setattr(meter_module, "monotonic_ns", lambda: self.now_ns)

    def collection(
        self, generation: int, duration_ns: int, collected: int = 0, **info: int
    ) -> None:
        told = {"generation": generation, "collected": 0, "uncollectable": 0}
        self.meter.callback("start", told)
        self.now_ns += duration_ns
        self.meter.callback("stop", {**told, "collected": collected, **info})
        self.now_ns += 1_000

    def number(self, name: str) -> int:
        return self.meter.words[NUMBER_INDEX[name]]

    def buckets(self, kind: str) -> list[int]:
        return [self.number(f"{kind}_bucket{i}") for i in range(BUCKET_COUNT)]


@pytest.fixture
def hand_fed(monkeypatch: pytest.MonkeyPatch) -> HandFed:
    # Every collection here is fed by hand; whether it looks automatic is not what these tests are about.
    monkeypatch.setattr(meter_module, "get_count", lambda: (701, 0, 11))
    monkeypatch.setattr(
        meter_module, "_is_automatic", lambda first, third: (first, third) == (701, 11)
    )
    return HandFed(monkeypatch)


# --- counting ---


@in_own_process
def test_numbers_equal_those_of_an_independent_callback_and_of_cpython() -> None:
    now_ns = [1]
    counted = [{"count": 0, "total": 0, "max": 0, "collected": 0} for _ in range(3)]
    started_ns = [0]

    def pass_time(phase: str, info: dict[str, int]) -> None:
        now_ns[0] += random.randrange(1, 1_000_000)

    def independent(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started_ns[0] = now_ns[0]
            return
        numbers = counted[info["generation"]]
        duration = now_ns[0] - started_ns[0]
        numbers["count"] += 1
        numbers["total"] += duration
        numbers["max"] = max(numbers["max"], duration)
        numbers["collected"] += info["collected"]

    meter_module.monotonic_ns = lambda: now_ns[0]
    meter = PauseMeter()
    gc.disable()  # so that none falls between what one and what the other counts
    stats_before = gc.get_stats()
    gc.callbacks.append(pass_time)
    meter.attach()
    gc.callbacks.append(independent)
    gc.enable()
    for round_ in range(300):
        for _ in range(round_ % 7):
            plant_cycle()
        gc.collect(round_ % 3)
    collect_automatically(3)
    gc.disable()
    gc.callbacks.clear()
    stats_after = gc.get_stats()

    for generation, numbers in enumerate(counted):
        word = {
            name: meter.words[NUMBER_INDEX[f"gen{generation}_{name}"]]
            for name in ("count", "total_ns", "max_ns", "collected_objects")
        }
        assert word == {
            "count": numbers["count"],
            "total_ns": numbers["total"],
            "max_ns": numbers["max"],
            "collected_objects": numbers["collected"],
        }, generation
        grown = {
            name: stats_after[generation][name] - stats_before[generation][name]
            for name in ("collections", "collected")
        }
        assert grown == {"collections": word["count"], "collected": word["collected_objects"]}
        assert word["count"] >= 100


@in_own_process
def test_a_pause_is_as_long_as_the_clock_says_round_the_whole_collection() -> None:
    gc.disable()
    keep = [[i] for i in range(300_000)]
    meter = PauseMeter()
    meter.attach()
    began_ns = time.monotonic_ns()
    gc.collect()
    took_ns = time.monotonic_ns() - began_ns
    (pause,) = full_pauses(meter)
    assert began_ns <= pause.start_ns <= pause.start_ns + pause.duration_ns <= began_ns + took_ns
    assert pause.duration_ns > 0.8 * took_ns, (pause.duration_ns, took_ns, len(keep))


def test_uncollectable_objects_are_counted(hand_fed: HandFed) -> None:
    hand_fed.collection(1, 1_000, collected=5, uncollectable=3)
    hand_fed.collection(1, 1_000, collected=2, uncollectable=1)
    assert hand_fed.number("gen1_uncollectable_objects") == 4
    assert hand_fed.number("gen1_collected_objects") == 7


def test_what_nobody_has_measured_is_unknown_and_not_zero() -> None:
    meter = PauseMeter()
    unknown = {name for name, index in NUMBER_INDEX.items() if meter.words[index] == NONE}
    assert {"anonymous_bytes", "device_allocated_bytes", "lease_remaining_ms"} <= unknown
    assert not any(name.startswith(("gen", "auto", "requested", "freezes")) for name in unknown)


# --- the histogram ---


@pytest.mark.parametrize("bucket", range(BUCKET_COUNT - 1))
def test_a_pause_at_a_bound_falls_under_it_and_one_longer_above_it(
    hand_fed: HandFed, bucket: int
) -> None:
    hand_fed.collection(2, BUCKETS_NS[bucket])
    hand_fed.collection(2, BUCKETS_NS[bucket] + 1)
    counts = hand_fed.buckets("auto")
    assert counts[bucket : bucket + 2] == [1, 1]
    assert sum(counts) == 2


def test_buckets_add_up_to_the_full_collections_and_totals_to_their_time(hand_fed: HandFed) -> None:
    durations = [random.randrange(0, 100_000_000_000) for _ in range(500)]
    for number, duration_ns in enumerate(durations):
        hand_fed.collection(number % 2, 10)
        if number % 5 == 0:
            with hand_fed.meter.requested("maintain"):
                hand_fed.collection(2, duration_ns)
        else:
            hand_fed.collection(2, duration_ns)
    requested = durations[::5]
    assert sum(hand_fed.buckets("requested")) == len(requested) == 100
    assert sum(hand_fed.buckets("auto")) == hand_fed.number("gen2_count") - 100 == 400
    assert hand_fed.number("requested_total_ns") == sum(requested)
    assert hand_fed.number("auto_total_ns") == sum(durations) - sum(requested)
    assert hand_fed.number("gen2_total_ns") == sum(durations)


# --- the rings ---


def test_10000_pauses_are_all_counted_and_the_last_1024_recorded_in_order(
    hand_fed: HandFed,
) -> None:
    for number in range(1, 10_001):
        hand_fed.collection(2, 1_000 + number, collected=number)
    assert hand_fed.number("gen2_count") == hand_fed.number("full_starts") == 10_000
    assert hand_fed.number("gen2_collected_objects") == sum(range(1, 10_001))
    assert hand_fed.number("full_ring_next") == 10_001
    kept = full_pauses(hand_fed.meter)
    expected = list(range(10_001 - RING_RECORDS, 10_001))
    assert [pause.sequence for pause in kept] == expected
    assert [pause.collected_objects for pause in kept] == expected
    assert [pause.duration_ns for pause in kept] == [1_000 + number for number in expected]
    assert all(a.start_ns < b.start_ns for a, b in itertools.pairwise(kept))


@pytest.mark.parametrize("count", [0, 1, 2, RING_RECORDS - 1, RING_RECORDS, RING_RECORDS + 1])
def test_a_ring_holds_what_came_until_it_is_full(hand_fed: HandFed, count: int) -> None:
    for number in range(count):
        hand_fed.collection(number % 2, 5)
    sequences = [pause.sequence for pause in young_pauses(hand_fed.meter)]
    assert sequences == list(range(1, count + 1))[-RING_RECORDS:]
    assert full_pauses(hand_fed.meter) == ()


def test_young_collections_do_not_push_a_full_one_out(hand_fed: HandFed) -> None:
    hand_fed.collection(2, 7_000, collected=11)
    for _ in range(3 * RING_RECORDS):
        hand_fed.collection(0, 5)
    (full,) = full_pauses(hand_fed.meter)
    assert (full.gc_generation, full.duration_ns, full.collected_objects) == (2, 7_000, 11)
    assert {pause.gc_generation for pause in young_pauses(hand_fed.meter)} == {0}


# --- what caused it ---


@in_own_process
def test_cpythons_own_full_collections_are_labelled_auto() -> None:
    meter = PauseMeter()
    meter.attach()
    collect_automatically(5)
    meter.detach()
    full = full_pauses(meter)
    assert [pause.trigger for pause in full] == ["auto"] * 5
    assert sum(meter.words[NUMBER_INDEX[f"auto_bucket{i}"]] for i in range(BUCKET_COUNT)) == 5


@in_own_process
def test_a_stray_collection_is_labelled_explicit() -> None:
    meter = PauseMeter()
    meter.attach()
    for _ in range(20):
        gc.collect()
    assert [pause.trigger for pause in full_pauses(meter)] == ["explicit"] * 20
    assert meter.requested_collections == 0


@pytest.mark.parametrize("nearly", ["first count", "third count"])
@in_own_process
def test_a_stray_collection_is_explicit_although_one_of_the_counts_looks_automatic(
    nearly: str,
) -> None:
    meter = PauseMeter()
    gc.set_threshold(1000, 1, 1)
    if nearly == "first count":
        gc.collect()
        keep = [[] for _ in range(950)]
        assert 900 < gc.get_count()[0] <= 1000, len(keep)
    else:
        while gc.get_count()[2] <= 1:
            gc.collect(1)
    meter.attach()
    gc.collect()
    assert [pause.trigger for pause in full_pauses(meter)] == ["explicit"]


@in_own_process
def test_a_collection_with_gc_disabled_is_explicit_however_far_the_counts_have_run() -> None:
    meter = PauseMeter()
    meter.attach()
    gc.set_threshold(50, 1, 1)
    while gc.get_count()[2] <= 1:  # the third count passes its threshold as it does in a large heap
        gc.collect(1)
    gc.disable()
    keep = [[] for _ in range(1000)]
    gc.collect()
    assert [pause.trigger for pause in full_pauses(meter)] == ["explicit"], len(keep)


@pytest.mark.parametrize("trigger", ["entry", "maintain", "restore"])
@in_own_process
def test_a_collection_of_ours_is_labelled_with_what_it_was_for(trigger: str) -> None:
    meter = PauseMeter()
    collection = collect_here(meter, trigger, time.monotonic())
    gc.collect()
    first, second = full_pauses(meter)
    assert (first.trigger, second.trigger) == (trigger, "explicit")
    assert collection.pause_s == first.duration_ns / 1e9


@in_own_process
def test_a_full_collection_on_another_thread_is_not_taken_for_the_requested_one() -> None:
    meter = PauseMeter()
    meter.attach()
    with meter.requested("maintain"):
        stranger = threading.Thread(target=gc.collect)
        stranger.start()
        stranger.join()
    assert [pause.trigger for pause in full_pauses(meter)] == ["explicit"]
    assert meter.requested_collections == 0


# --- a collection in progress ---


def collect_and_pause_in_a_finalizer(run_dir: str) -> None:
    meter = PauseMeter()
    page = create_page(run_dir, page_name("worker", 0, 0, 1))
    page.write_description({"child": True})
    meter.collecting = page.header
    meter.attach()

    class Pausing(Cycle):
        def __del__(self) -> None:
            say("in the finalizer")
            hear()

    for generation in (0, 2):
        gc.disable()
        Pausing()
        say("about to collect")
        hear()
        began_ns = time.monotonic_ns()
        gc.collect(generation)
        say({"began_ns": began_ns})
        hear()


def test_a_full_collection_is_visible_from_outside_while_it_runs(tmp_path: Path) -> None:
    with Child(collect_and_pause_in_a_finalizer, run_dir=tmp_path) as child:

        def collecting_since_ns() -> int:
            return read_page(str(tmp_path), list_pages(str(tmp_path))[0]).collecting_since_ns

        for full in (False, True):
            assert child.hear() == "about to collect"
            assert collecting_since_ns() == 0
            assert child.ask("go on") == "in the finalizer"
            seen_ns, now_ns = collecting_since_ns(), time.monotonic_ns()
            began_ns = child.ask("go on")["began_ns"]
            assert (began_ns <= seen_ns <= now_ns) if full else seen_ns == 0
            assert collecting_since_ns() == 0
            child.tell("go on")


@in_own_process
def test_a_callback_that_is_attached_in_the_middle_of_a_collection_counts_from_the_next_one() -> (
    None
):
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    meter = PauseMeter()

    class Attaching(Cycle):
        def __del__(self) -> None:
            meter.attach()

    gc.disable()
    Attaching()
    gc.collect()
    assert meter.callback in gc.callbacks
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 0
    assert full_pauses(meter) == ()
    gc.collect()
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 1
    assert ignored == []


@in_own_process
def test_a_callback_that_misses_the_end_of_a_collection_goes_on_with_the_next_one() -> None:
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    meter = PauseMeter()
    meter.attach()

    class Clearing(Cycle):
        def __del__(self) -> None:
            gc.callbacks.clear()

    gc.disable()
    Clearing()
    gc.collect()
    assert meter.collecting[HEADER_COLLECTING_SINCE_NS] != 0
    meter.attach()
    assert meter.collecting[HEADER_COLLECTING_SINCE_NS] == 0
    gc.collect()
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 1
    assert meter.collecting[HEADER_COLLECTING_SINCE_NS] == 0
    assert ignored == []


@in_own_process
def test_a_signal_handler_that_ends_the_callback_leaves_no_collection_in_progress() -> None:
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    gc.disable()
    meter = PauseMeter()
    heap = [[number] for number in range(600_000)]
    meter.attach()

    class Interruption(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interruption

    signal.signal(signal.SIGVTALRM, interrupt)
    # Within the collection, whose C code lets no handler run: the stop callback is the next that does.
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.005)
    gc.collect()
    assert [unraisable.exc_type for unraisable in ignored] == [Interruption]
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 0
    assert meter.collecting[HEADER_COLLECTING_SINCE_NS] != 0
    gc.collect(0)
    assert meter.collecting[HEADER_COLLECTING_SINCE_NS] == 0
    gc.collect()
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 1
    assert len(heap) == 600_000


def test_whatever_ends_the_stop_callback_no_collection_stays_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = PauseMeter()
    info = {"generation": 2, "collected": 0, "uncollectable": 0}
    meter.callback("start", info)
    assert meter.collecting[HEADER_COLLECTING_SINCE_NS] != 0

    def fail() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(meter_module, "monotonic_ns", fail)
    with pytest.raises(KeyboardInterrupt):
        meter.callback("stop", info)
    assert meter.collecting[HEADER_COLLECTING_SINCE_NS] == 0


@in_own_process
def test_attaching_twice_counts_once_and_detaching_ends_it() -> None:
    meter = PauseMeter()
    meter.attach()
    meter.attach()
    assert gc.callbacks.count(meter.callback) == 1
    gc.collect()
    gc.callbacks.clear()
    meter.attach()
    gc.collect()
    meter.detach()
    gc.collect()
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 2
    assert meter.callback not in gc.callbacks


# --- forks ---


@pytest.mark.parametrize("phase", ["start", "stop"])
def test_a_fork_waits_for_another_threads_callback_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    meter = PauseMeter()
    info = {"generation": 0, "collected": 0, "uncollectable": 0}
    inside, go_on = threading.Event(), threading.Event()

    def callback() -> None:
        if phase == "stop":
            meter.callback("start", info)
        monkeypatch.setattr(meter_module, "monotonic_ns", dwell)
        meter.callback(phase, info)

    def dwell() -> int:
        inside.set()
        go_on.wait()
        return 1

    thread = threading.Thread(target=callback)
    thread.start()
    inside.wait()
    monkeypatch.setattr(meter_module, "FORK_WAIT_S", 0.05)
    began = time.monotonic()
    outlast_callbacks()
    assert time.monotonic() - began >= 0.05
    monkeypatch.setattr(meter_module, "FORK_WAIT_S", 60.0)
    began = time.monotonic()
    threading.Timer(0.05, go_on.set).start()
    outlast_callbacks()
    assert 0.05 <= time.monotonic() - began < 30.0
    thread.join()


@in_own_process
def test_a_fork_in_a_finalizer_does_not_wait_for_the_collection_that_it_is_part_of() -> None:
    meter = PauseMeter()
    meter.attach()
    waited: list[float] = []

    class Forking(Cycle):
        def __del__(self) -> None:
            began = time.monotonic()
            outlast_callbacks()
            waited.append(time.monotonic() - began)

    gc.disable()
    Forking()
    gc.collect()
    assert len(waited) == 1
    assert waited[0] < FORK_WAIT_S / 2


# --- what it must never do ---


@in_own_process
def test_nothing_is_raised_while_threads_allocate_and_collect() -> None:
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    sys.setswitchinterval(1e-4)
    meter = PauseMeter()
    meter.attach()
    gc.set_threshold(20, 2, 2)
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            for _ in range(50):
                plant_cycle()
            gc.collect(random.randrange(3))

    threads = [threading.Thread(target=allocate) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: meter.words[NUMBER_INDEX["gen2_count"]] >= 40, 30)
    stop.set()
    for thread in threads:
        thread.join()
    words = meter.words
    assert ignored == []
    assert words[NUMBER_INDEX["gen2_count"]] == words[NUMBER_INDEX["full_starts"]] >= 40
    assert [pause.sequence for pause in full_pauses(meter)][-1] == words[NUMBER_INDEX["gen2_count"]]


def collect_between_markers(run_dir: str) -> None:
    meter = PauseMeter()
    meter.collecting = create_page(run_dir, page_name("worker", 0, 0, 1)).header
    meter.attach()
    collect = gc.collect
    gc.disable()
    # Once round the rings: from then on a record takes the place of an older one, and its memory.
    # Full collections walk the whole heap: what was loaded need not be walked a thousand times.
    gc.freeze()
    for _ in range(RING_SLOTS):
        collect(0)
        collect()
    gc.unfreeze()
    os.getppid()
    for _ in range(10_000):
        collect(0)
    os.getppid()
    for _ in range(20):
        collect()
    os.getppid()
    assert meter.words[NUMBER_INDEX["gen0_count"]] == RING_SLOTS + 10_000
    assert meter.words[NUMBER_INDEX["gen2_count"]] == RING_SLOTS + 20


def test_the_callback_makes_no_system_call(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        leave_out("strace is missing: apt-get install strace")
    trace = tmp_path / "trace"
    run = [strace, "-o", str(trace), "-e", "trace=all"]
    run += command_for(collect_between_markers, {"run_dir": tmp_path})
    result = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment())
    assert result.returncode == 0, result.stderr
    lines = trace.read_text().splitlines()
    first, second, third = (i for i, line in enumerate(lines) if line.startswith("getppid()"))
    assert lines[first + 1 : second] == [], "system calls in young collections"
    # A full collection itself may give memory back.
    memory = ("munmap", "madvise", "brk", "mmap")
    strange = [line for line in lines[second + 1 : third] if not line.startswith(memory)]
    assert strange == [], "system calls in full collections"


CALLBACK_NAMES = {
    # What the callback may look up: its own words, numbers, and C functions that only compute.
    *PauseMeter.__slots__,
    *("BUCKETS_NS", "HEADER_COLLECTING_SINCE_NS", "RING_SLOTS"),
    *("_AUTO", "_EXPLICIT", "_AUTO_BUCKETS", "_AUTO_TOTAL_NS", "_REQUESTED_BUCKETS"),
    *("_REQUESTED_TOTAL_NS", "_GENERATION_INDEX", "_FULL_RING_NEXT", "_YOUNG_RING_NEXT"),
    *("_FREEZES", "_FREEZES_SINCE_MAINTAIN", "_OVER_BUDGET", "freeze"),
    *("_FULL_STARTS", "_is_automatic", "bisect_left", "get_ident", "monotonic_ns"),
    *Ring.__slots__,
    *("get_count", "get_threshold", "isenabled"),
}


@pytest.mark.parametrize("function", [PauseMeter.callback, meter_module._is_automatic])
def test_the_callbacks_code_takes_no_lock_and_makes_no_container(
    function: Callable[..., Any],
) -> None:
    code = function.__code__
    assert set(code.co_names) <= CALLBACK_NAMES
    assert not any(isinstance(constant, CodeType) for constant in code.co_consts)
    making = {
        instruction.opname
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith(("BUILD_", "MAKE_", "SETUP_WITH", "BEFORE_WITH", "IMPORT"))
    }
    assert making <= {"BUILD_SLICE"}


@in_own_process
def test_the_callback_leaves_nothing_behind_that_gc_tracks() -> None:
    meter = PauseMeter()
    callback = meter.callback
    infos = [{"generation": g, "collected": 1, "uncollectable": 0} for g in range(3)]
    gc.collect()
    gc.disable()
    objects_before = len(gc.get_objects())
    count_before = gc.get_count()[0]
    for _ in range(3_000):
        for info in infos:
            callback("start", info)
            callback("stop", info)
    count = gc.get_count()[0]
    objects = len(gc.get_objects())
    assert count - count_before < 10
    assert objects - objects_before < 10
    assert meter.words[NUMBER_INDEX["gen2_count"]] == 3_000
