"""The policy: what it switches, and that it puts everything back exactly, whatever fails on the way."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gc_sidecar_agent import policy as policy_module
from gc_sidecar_agent.collection import (
    Collection,
    CollectionError,
    MainThreadCollector,
    collect_here,
)
from gc_sidecar_agent.collector import FREE_THREADED, GENERATIONAL, INCREMENTAL, is_heap_frozen
from gc_sidecar_agent.command import Command, Outcome
from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import NUMBER_INDEX
from gc_sidecar_agent.policy import DRIFT_GRACE_S, OFF, REMEMBERED_OUTCOMES, Policy
from gc_sidecar_agent.rules import HELD_OFF
from tests.unit.agent.garbage import (
    Cycle,
    collect_automatically,
    command,
    is_frozen,
    plant_cycle,
    plant_frozen_cycle,
    plant_old_cycle,
)
from tests.unit.agent.own_process import in_own_process
from tests.unit.agent.rings import full_pauses
from tests.unit.agent.waiting import wait_until


class Subject:
    """A policy with its meter, in an engine that is ready and whose heap may be frozen."""

    def __init__(self, collector: str = GENERATIONAL, frozen: bool = False) -> None:
        self.meter = PauseMeter()
        self.meter.attach()
        self.policy = Policy(self.meter, collector)
        self.collect = partial(collect_here, self.meter)
        self.generation = 0
        if frozen:
            gc.freeze()
        self.policy.note_ready()

    def do(self, kind: str, collect: Any = None, **fields: Any) -> Outcome:
        """A command of the next generation, carried out on this thread."""
        self.generation += 1
        asked = command(kind, fields.pop("generation", self.generation), **fields)
        return self.policy.run(asked, collect or self.collect)

    def does(self, kind: str, **fields: Any) -> Outcome:
        """The same, and it has to work."""
        outcome = self.do(kind, **fields)
        assert outcome.ok, outcome
        return outcome

    def poll(self, anonymous_bytes: int | None = None, collect: Any = None) -> None:
        self.policy.poll(anonymous_bytes, collect or self.collect)

    def number(self, name: str) -> int:
        return self.meter.words[NUMBER_INDEX[name]]

    def triggers(self) -> list[str]:
        return [pause.trigger for pause in full_pauses(self.meter)]


class Clock:
    """Time as the policy sees it; it passes only when told to."""

    def __init__(self) -> None:
        self.monotonic_s = 1_000.0
        self.wall_s = 1_700_000_000.0
        policy_module.time = SimpleNamespace(  # type: ignore[attr-defined]
            monotonic=lambda: self.monotonic_s, time=lambda: self.wall_s
        )

    def pass_s(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds


def pending(trigger: str, deadline: float) -> Collection:
    """What the agent's thread gets from a main thread that is blocked."""
    raise CollectionError("collect_pending", "the main thread did not come by")


def busy(trigger: str, deadline: float) -> Collection:
    raise CollectionError("collector_busy", "another collection is running")


def gc_state() -> tuple[bool, tuple[int, int, int], bool]:
    return gc.isenabled(), gc.get_threshold(), is_frozen()


def fail(*_: Any) -> Any:
    raise MemoryError("no luck")


# --- entering ---


@in_own_process
def test_entering_freeze_collects_first_holds_full_collections_off_and_freezes() -> None:
    gc.set_threshold(600, 7, 9)
    subject = Subject()
    cycle = plant_old_cycle()
    outcome = subject.does("freeze")
    assert cycle() is None
    assert gc_state() == (True, (600, 7, 1 << 30), True)
    assert subject.triggers()[-1] == "entry"
    assert outcome.generation == subject.policy.generation == 1
    assert outcome.pause_s is not None
    assert outcome.pause_s > 0
    assert outcome.collected_objects is not None
    assert outcome.collected_objects >= 1
    assert subject.policy.mode == "freeze"
    assert subject.number("freezes") == 1


@in_own_process
def test_entering_freezes_without_collecting_when_told_so() -> None:
    gc.disable()
    subject = Subject()
    cycle = plant_cycle()
    outcome = subject.does("freeze", collect_first=False)
    assert cycle() is not None
    assert (outcome.pause_s, outcome.collected_objects) == (None, None)
    assert subject.triggers() == []
    assert is_frozen()


@in_own_process
def test_under_freeze_cpython_runs_young_collections_and_no_full_one() -> None:
    gc.set_threshold(100, 1, 1)
    subject = Subject()
    subject.does("freeze")
    before = subject.number("gen2_count")
    keep = [[] for _ in range(300_000)]
    assert subject.number("gen2_count") == before
    assert subject.number("gen0_count") > 100
    assert subject.number("gen1_count") > 100, len(keep)


@in_own_process
def test_an_entry_that_cannot_collect_changes_nothing() -> None:
    subject = Subject()
    before = gc_state()
    outcome = subject.do("freeze", collect=busy)
    assert (outcome.ok, outcome.code) == (False, "collector_busy")
    assert gc_state() == before
    assert (subject.policy.mode, subject.policy.generation) == (OFF, 0)
    assert subject.policy.exits == {}


@in_own_process
def test_an_entry_whose_main_thread_is_blocked_enters_without_collecting_and_says_so() -> None:
    subject = Subject()
    outcome = subject.does("freeze", collect=pending)
    assert gc.get_threshold()[2] == HELD_OFF
    assert outcome.detail is not None
    assert "without collecting first" in outcome.detail


@in_own_process
def test_freeze_under_freeze_renews_and_touches_nothing() -> None:
    clock = Clock()
    subject = Subject()
    subject.does("freeze", owner="a", lease_s=10, interval_s=5)
    calls: list[Any] = []
    gc.set_threshold = lambda *a: calls.append(a)
    gc.freeze = lambda: calls.append("freeze")
    clock.pass_s(4)
    collections = subject.number("full_starts")
    outcome = subject.does("freeze", owner="b", lease_s=100, interval_s=50)
    assert calls == []
    assert subject.number("full_starts") == collections
    assert outcome.pause_s is None
    assert subject.policy.lease_remaining_s() == 100
    assert subject.policy.generation == 2
    description = subject.policy.description()
    assert (description["owner"], description["interval_s"]) == ("b", 50)
    clock.pass_s(49)
    subject.poll()
    assert calls == []
    clock.pass_s(1)
    subject.poll()
    assert calls == ["freeze"]


@in_own_process
def test_thresholds_that_somebody_changed_under_freeze_are_held_off_again() -> None:
    gc.set_threshold(700, 10, 11)
    subject = Subject()
    subject.does("freeze")
    gc.set_threshold(500, 5, 5)
    subject.does("freeze")
    assert gc.get_threshold() == (500, 5, HELD_OFF)
    subject.does("restore")
    assert gc.get_threshold() == (700, 10, 11)


# --- restoring ---


@pytest.mark.parametrize("frozen", [False, True], ids=["loose", "frozen"])
@pytest.mark.parametrize("enabled", [False, True], ids=["disabled", "enabled"])
@pytest.mark.parametrize(
    "thresholds", [(700, 10, 10), (0, 0, 0), (50, 3, 7), (2000, 10, 0), (1, 1, 1), (0, 5, 9)]
)
@in_own_process
def test_restore_puts_back_exactly_what_was_there(
    thresholds: list[int], enabled: bool, frozen: bool
) -> None:
    gc.set_threshold(*thresholds)
    if not enabled:
        gc.disable()
    subject = Subject(frozen=frozen)
    found = gc_state()
    assert found == (enabled, tuple(thresholds), frozen)

    subject.does("freeze")
    assert gc_state() == (enabled, (thresholds[0], thresholds[1], HELD_OFF), True)
    cycle = plant_frozen_cycle()
    outcome = subject.does("restore")

    assert gc_state() == found
    assert cycle() is None, "a cycle that was frozen meanwhile"
    assert outcome.pause_s is not None
    assert subject.policy.mode == OFF
    assert subject.policy.generation == 2
    assert subject.triggers()[-1] == "restore"
    assert subject.policy.exits == {"restored": 1}
    assert not subject.policy.collect_pending


@in_own_process
def test_restore_enables_and_disables_as_found_whatever_happened_meanwhile() -> None:
    subject = Subject()
    subject.does("freeze")
    gc.disable()
    subject.does("restore")
    assert gc.isenabled()
    gc.disable()
    subject.does("freeze")
    gc.enable()
    subject.does("restore")
    assert not gc.isenabled()


@pytest.mark.parametrize("frozen", [False, True], ids=["loose", "frozen"])
@in_own_process
def test_restore_where_nothing_is_on_changes_nothing_and_collects_nothing(frozen: bool) -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject(frozen=frozen)
    before = gc_state()
    outcome = subject.does("restore")
    assert outcome.pause_s is None
    assert gc_state() == before
    assert subject.triggers() == []
    assert subject.policy.generation == 1


@in_own_process
def test_restore_twice_is_as_good_as_once() -> None:
    subject = Subject(frozen=True)
    before = gc_state()
    subject.does("freeze")
    subject.does("restore")
    subject.does("restore")
    assert gc_state() == before
    assert subject.triggers() == ["entry", "restore"]
    assert subject.policy.exits == {"restored": 1}


@in_own_process
def test_many_rounds_end_as_they_began() -> None:
    chance = random.Random(20)
    gc.set_threshold(321, 4, 5)
    subject = Subject(frozen=True)
    before = gc_state()
    for _ in range(100):
        subject.does(chance.choice(["freeze", "restore", "maintain"]))
        if chance.random() < 0.3:
            subject.policy.lease_deadline = 0.0
            subject.poll()
    subject.does("restore")
    assert gc_state() == before
    assert subject.policy.mode == OFF


# --- idempotence ---


@in_own_process
def test_the_same_operation_runs_once() -> None:
    subject = Subject()
    asked = command("maintain", operation_id="once")
    first = subject.policy.run(asked, subject.collect)
    again = subject.policy.run(asked, fail)
    assert again is first
    assert subject.triggers() == ["maintain"]
    assert subject.policy.outcome_of(asked) is first
    assert subject.policy.outcome_of(command("maintain", operation_id="never")) is None


@in_own_process
def test_an_id_that_comes_again_in_a_later_generation_is_another_operation() -> None:
    # A script's own fixed id, sent to a sidecar that was restarted since.
    subject = Subject()
    subject.does("freeze", operation_id="nightly-freeze")
    subject.does("restore", operation_id="nightly-restore")
    subject.does("freeze", operation_id="nightly-freeze")
    assert subject.policy.mode == "freeze"
    subject.does("restore", operation_id="nightly-restore")
    assert subject.policy.mode == OFF
    subject.does("maintain", operation_id="nightly-restore")
    assert subject.triggers()[-1] == "maintain"


@in_own_process
def test_an_older_generation_is_refused_and_changes_nothing() -> None:
    subject = Subject()
    subject.does("freeze", generation=7)
    state, triggers = gc_state(), subject.triggers()
    for kind in ("restore", "freeze"):
        outcome = subject.do(kind, generation=6)
        assert (outcome.ok, outcome.code) == (False, "stale_generation")
    assert (gc_state(), subject.triggers()) == (state, triggers)
    assert (subject.policy.mode, subject.policy.generation) == ("freeze", 7)
    subject.does("restore", generation=7)
    assert subject.policy.mode == OFF


@in_own_process
def test_maintain_is_of_no_generation() -> None:
    subject = Subject()
    subject.does("freeze", generation=7)
    outcome = subject.does("maintain", generation=0)
    assert outcome.generation == subject.policy.generation == 7


@in_own_process
def test_outcomes_are_remembered_but_not_for_ever() -> None:
    subject = Subject()
    asked = [
        command("restore", number, operation_id=f"op-{number}")
        for number in range(REMEMBERED_OUTCOMES + 10)
    ]
    for each in asked:
        assert subject.policy.run(each, subject.collect).ok
    assert subject.policy.outcome_of(asked[9]) is None
    assert subject.policy.outcome_of(asked[10]) is not None
    assert len(subject.policy._outcomes) == REMEMBERED_OUTCOMES


@in_own_process
def test_what_is_no_operation_is_refused() -> None:
    outcome = Subject().do("settle")
    assert (outcome.ok, outcome.code) == (False, "bad_command")


# --- maintaining ---


@in_own_process
def test_maintain_reclaims_what_was_frozen_and_freezes_again() -> None:
    subject = Subject()
    subject.does("freeze")
    cycles = [plant_cycle() for _ in range(100)]
    gc.freeze()
    gc.collect()
    assert all(cycle() for cycle in cycles)
    state = gc_state()
    outcome = subject.does("maintain")
    assert not any(cycle() for cycle in cycles)
    assert gc_state() == state
    assert outcome.collected_objects is not None
    assert outcome.collected_objects >= 100
    assert outcome.pause_s is not None
    assert subject.triggers()[-1] == "maintain"
    assert subject.number("reclaimed_objects") == outcome.collected_objects
    assert subject.number("maintain_total_ns") == int(outcome.pause_s * 1e9)
    assert subject.number("maintains") == 1
    assert subject.number("freezes_since_maintain") == 0


@pytest.mark.parametrize("frozen", [False, True], ids=["loose", "frozen"])
@in_own_process
def test_maintain_without_a_policy_leaves_the_heap_as_it_was(frozen: bool) -> None:
    gc.disable()
    gc.set_threshold(50, 3, 7)
    cycle = plant_cycle()
    subject = Subject(frozen=frozen)
    before = gc_state()
    subject.does("maintain")
    assert cycle() is None
    assert gc_state() == before == (False, (50, 3, 7), frozen)


@in_own_process
def test_maintain_freezes_again_although_it_could_not_collect() -> None:
    subject = Subject()
    subject.does("freeze")
    outcome = subject.do("maintain", collect=busy)
    assert (outcome.ok, outcome.code) == (False, "collector_busy")
    assert is_frozen()
    assert subject.policy.mode == "freeze"
    assert subject.number("maintains") == 0


@in_own_process
def test_a_collection_that_sits_in_a_finalizer_is_waited_for_and_then_an_error() -> None:
    subject = Subject()
    subject.does("freeze")
    inside, leave = threading.Event(), threading.Event()

    class Sleeping(Cycle):
        def __del__(self) -> None:
            inside.set()
            leave.wait(30)

    for deadline_s, code in ((0.1, "collector_busy"), (10, None)):
        inside.clear()
        leave.clear()
        gc.disable()
        Sleeping()
        other = threading.Thread(target=gc.collect)
        other.start()
        assert inside.wait(10)
        cycle = plant_frozen_cycle()
        if code is None:
            threading.Timer(0.3, leave.set).start()
        outcome = subject.do("maintain", deadline_s=deadline_s)
        leave.set()
        assert outcome.code == code, outcome
        assert (cycle() is None) == (code is None)
        assert is_frozen()
        other.join()
        gc.enable()


@in_own_process
def test_no_freeze_falls_between_unfreeze_and_collect() -> None:
    # A thread that ticks all the time, as fast as it can, while 200 maintains run.
    subject = Subject()
    subject.does("freeze", interval_s=1)
    stop = threading.Event()
    polls = 0

    def tick_all_the_time() -> None:
        nonlocal polls
        while not stop.is_set():
            subject.policy._next_tick = 0.0
            subject.poll()
            polls += 1
            time.sleep(0)

    def collect_slowly(trigger: str, deadline: float) -> Collection:
        assert not is_heap_frozen()
        seen = polls
        wait_until(lambda: polls >= seen + 2)
        assert not is_heap_frozen()
        return subject.collect(trigger, deadline)

    ticking = threading.Thread(target=tick_all_the_time)
    ticking.start()
    for _ in range(200):
        cycle = plant_cycle()
        subject.does("maintain", collect=collect_slowly)
        assert cycle() is None
        assert is_heap_frozen()
        freezes = subject.number("freezes")
        wait_until(partial(lambda seen: subject.number("freezes") > seen, freezes))
    stop.set()
    ticking.join()
    assert subject.number("freezes") > 400


@in_own_process
def test_trim_runs_only_when_asked_for() -> None:
    trimmed: list[bool] = []
    policy_module.trim = lambda: trimmed.append(True)
    subject = Subject()
    subject.does("maintain")
    assert trimmed == []
    subject.does("maintain", trim=True)
    assert trimmed == [True]


# --- the tick ---


@in_own_process
def test_it_freezes_again_every_interval_and_no_oftener() -> None:
    clock = Clock()
    subject = Subject()
    subject.does("freeze", interval_s=60, lease_s=86_400)
    freezes = []
    for _ in range(6_000):
        clock.pass_s(0.1)
        subject.poll()
        freezes.append(subject.number("freezes"))
    assert freezes[-1] in (10, 11)  # the entry, and 9 or 10 ticks in 600 s
    assert freezes[590] == 1
    assert freezes[610] == 2
    assert subject.number("freezes_since_maintain") == freezes[-1]


@in_own_process
def test_without_a_policy_a_poll_freezes_nothing() -> None:
    subject = Subject()
    for _ in range(10):
        subject.poll(anonymous_bytes=1)
    assert not is_frozen()
    assert subject.number("freezes") == 0


@in_own_process
def test_a_poll_does_not_wait_for_an_operation_that_runs() -> None:
    subject = Subject()
    subject.does("freeze")
    subject.policy._next_tick = 0.0
    with subject.policy._lock:
        began = time.monotonic()
        subject.poll()
        assert time.monotonic() - began < 1
    assert subject.number("freezes") == 1
    subject.poll()
    assert subject.number("freezes") == 2


# --- what somebody else does to GC meanwhile ---


def drifted(subject: Subject) -> str | None:
    subject.poll()
    drift = subject.policy.description()["drift"]
    return drift["code"] if drift else None


@in_own_process
def test_thresholds_that_somebody_sets_are_named_held_off_again_and_left_to_them_at_the_end() -> (
    None
):
    clock = Clock()
    subject = Subject()
    subject.does("freeze")
    gc.set_threshold(50_000, 20, 10)
    assert drifted(subject) == "thresholds_changed"
    clock.pass_s(DRIFT_GRACE_S - 0.1)
    assert drifted(subject) == "thresholds_changed"
    assert gc.get_threshold() == (50_000, 20, 10), "it may be for a moment"
    clock.pass_s(0.1)
    subject.poll()
    assert gc.get_threshold() == (50_000, 20, HELD_OFF)
    assert drifted(subject) is None
    assert subject.policy.drifts == {"thresholds_changed": 1}
    subject.does("restore")
    assert gc.get_threshold() == (50_000, 20, 10)


@in_own_process
def test_thresholds_that_somebody_changes_for_a_while_are_as_found_at_the_end() -> None:
    clock = Clock()
    found = gc.get_threshold()
    subject = Subject()
    subject.does("freeze")
    saved = gc.get_threshold()
    gc.set_threshold(0, 50, 50)
    assert drifted(subject) == "thresholds_changed"
    clock.pass_s(DRIFT_GRACE_S)
    subject.poll()
    gc.set_threshold(*saved)
    assert drifted(subject) is None
    subject.does("restore")
    assert gc.get_threshold() == found


@in_own_process
def test_gc_that_somebody_disables_is_named_and_left_to_them() -> None:
    clock = Clock()
    subject = Subject()
    subject.does("freeze")
    gc.disable()
    assert drifted(subject) == "gc_disabled"
    clock.pass_s(10 * DRIFT_GRACE_S)
    assert drifted(subject) == "gc_disabled"
    assert not gc.isenabled()
    gc.enable()
    assert drifted(subject) is None


@pytest.mark.parametrize("how", ["lease", "board"])
@in_own_process
def test_gc_that_is_disabled_when_a_policy_ends_on_our_own_thread_stays_so(how: str) -> None:
    # A graph is captured, say: neither may GC come on, nor a collection run.
    clock = Clock()
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    subject.does("freeze", lease_s=30)
    before = subject.number("full_starts")
    collector = MainThreadCollector(subject.meter)
    gc.disable()
    clock.pass_s(31)

    def collect(trigger: str, _: float) -> Collection:
        return collector.collect(trigger, time.monotonic() + 0.2)

    def end() -> None:
        if how == "lease":
            subject.policy.poll(None, collect)
        else:
            subject.policy.run(command("restore", 2), collect, False)

    ended = threading.Thread(target=end)
    ended.start()
    while ended.is_alive():
        ended.join(0.01)
    assert subject.policy.mode == OFF
    assert gc_state() == (False, (50, 3, 7), False)
    assert subject.number("full_starts") == before
    assert subject.policy.collect_pending


@in_own_process
def test_a_third_threshold_that_somebody_sets_is_left_to_them_too() -> None:
    clock = Clock()
    first, second, _ = gc.get_threshold()
    subject = Subject()
    subject.does("freeze")
    gc.set_threshold(first, second, 1000)
    assert drifted(subject) == "thresholds_changed"
    clock.pass_s(DRIFT_GRACE_S)
    subject.poll()
    assert drifted(subject) is None
    subject.does("restore")
    assert gc.get_threshold() == (first, second, 1000)


@in_own_process
def test_gc_that_was_disabled_before_is_no_drift() -> None:
    gc.disable()
    subject = Subject()
    subject.does("freeze")
    assert drifted(subject) is None


@in_own_process
def test_a_heap_that_a_graph_capture_unfroze_is_frozen_again_once_it_has_ended() -> None:
    clock = Clock()
    subject = Subject()
    subject.does("freeze")
    freezes = subject.number("freezes")
    gc.unfreeze()
    gc.collect()
    assert drifted(subject) == "foreign_collection"
    assert not is_frozen()
    clock.pass_s(DRIFT_GRACE_S)
    subject.poll()
    assert is_frozen()
    assert subject.number("freezes") == freezes + 1
    assert drifted(subject) is None


@pytest.mark.parametrize("asked", ["freeze", "maintain"])
@in_own_process
def test_who_freezes_a_heap_again_that_somebody_unfroze_sees_the_drift_end_at_once(
    asked: str,
) -> None:
    subject = Subject()
    subject.does("freeze")
    gc.unfreeze()
    gc.collect()
    assert drifted(subject) == "foreign_collection"
    assert subject.does(asked).ok
    assert is_frozen()
    assert subject.policy.description()["drift"] is None


@in_own_process
def test_a_freeze_that_is_asked_for_again_tells_what_somebody_did_that_is_left_to_them() -> None:
    subject = Subject()
    subject.does("freeze")
    gc.set_threshold(500, 7, 7)
    gc.disable()
    assert drifted(subject) == "thresholds_changed"
    subject.does("freeze")
    assert gc.get_threshold() == (500, 7, HELD_OFF)
    assert subject.policy.description()["drift"]["code"] == "gc_disabled"


@in_own_process
def test_what_a_maintenance_and_a_tick_do_is_no_drift() -> None:
    subject = Subject()
    subject.does("freeze")
    subject.does("maintain")
    assert drifted(subject) is None
    subject.policy._next_tick = 0.0
    assert drifted(subject) is None
    subject.does("restore")
    gc.collect()
    assert drifted(subject) is None
    assert subject.policy.drifts == {}


# --- guards ---


@in_own_process
def test_a_lease_that_ends_restores() -> None:
    clock = Clock()
    gc.set_threshold(50, 3, 7)
    subject = Subject(frozen=True)
    before = gc_state()
    subject.does("freeze", lease_s=30)
    cycle = plant_frozen_cycle()
    clock.pass_s(29.9)
    subject.poll()
    assert subject.policy.mode == "freeze"
    assert round(subject.policy.lease_remaining_s() or 0, 3) == 0.1
    clock.pass_s(0.1)
    subject.poll()
    assert gc_state() == before
    assert cycle() is None
    assert subject.policy.mode == OFF
    assert subject.policy.generation == 1
    assert subject.policy.lease_remaining_s() is None
    assert subject.policy.reason is not None
    assert subject.policy.reason.code == "lease_expired"
    assert subject.policy.exits == {"lease_expired": 1}
    subject.does("freeze")
    assert subject.policy.reason is None


@in_own_process
def test_a_renewed_lease_lasts_from_its_renewal() -> None:
    clock = Clock()
    subject = Subject()
    subject.does("freeze", lease_s=30)
    for _ in range(10):
        clock.pass_s(29)
        assert subject.policy.renew_lease(30, subject.policy.generation)
        subject.poll()
        assert subject.policy.mode == "freeze"
    clock.pass_s(30)
    subject.poll()
    assert subject.policy.mode == OFF


@in_own_process
def test_a_lease_cannot_be_renewed_after_its_end() -> None:
    clock = Clock()
    subject = Subject()
    subject.does("freeze", lease_s=0)
    subject.poll()
    assert subject.policy.mode == OFF
    assert not subject.policy.renew_lease(1000, subject.policy.generation)
    assert subject.policy.lease_remaining_s() is None
    clock.pass_s(1)
    subject.poll()
    assert (subject.policy.mode, gc.get_threshold()[2]) == (OFF, 10)


@in_own_process
def test_jumps_of_the_wall_clock_change_nothing() -> None:
    clock = Clock()
    subject = Subject()
    subject.does("freeze", lease_s=30, interval_s=10)
    for jump in (86_400 * 365, -86_400 * 365 * 20):
        clock.wall_s += jump
        clock.pass_s(5)
        subject.poll()
        assert subject.policy.mode == "freeze"
    assert subject.number("freezes") == 2
    assert subject.policy.lease_remaining_s() == 20
    clock.wall_s = 0
    clock.pass_s(20)
    subject.poll()
    assert subject.policy.mode == OFF


@in_own_process
def test_memory_that_was_read_before_the_entry_is_no_growth() -> None:
    subject = Subject()
    measured_at = time.monotonic()
    subject.does("freeze", max_rss_growth_bytes=1000)
    entry = subject.policy.entry_anonymous_bytes
    assert entry is not None
    subject.policy.poll(entry + 1001, subject.collect, measured_at)
    assert subject.policy.mode == "freeze"
    subject.policy.poll(entry + 1001, subject.collect, time.monotonic())
    assert subject.policy.mode == OFF


@in_own_process
def test_growth_beyond_the_limit_restores() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    before = gc_state()
    subject.does("freeze", max_rss_growth_bytes=1000)
    entry = subject.policy.entry_anonymous_bytes
    assert entry is not None
    for harmless in (entry + 1000, entry - 5000, None):
        subject.poll(anonymous_bytes=harmless)
        assert subject.policy.mode == "freeze"
    subject.poll(anonymous_bytes=entry + 1001)
    assert gc_state() == before
    assert subject.policy.exits == {"rss_growth": 1}
    assert subject.policy.reason is not None
    assert "grew by 1001 bytes" in subject.policy.reason.detail


@in_own_process
def test_without_a_limit_growth_is_no_reason() -> None:
    subject = Subject()
    subject.does("freeze")
    subject.poll(anonymous_bytes=1 << 60)
    assert subject.policy.mode == "freeze"


# --- what fails ---


@in_own_process
def test_a_freeze_that_fails_at_entry_leaves_everything_as_found() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    before = gc_state()
    gc.freeze = fail
    outcome = subject.do("freeze")
    assert (outcome.ok, outcome.code) == (False, "freeze_failed")
    assert gc_state() == before
    assert (subject.policy.mode, subject.policy.generation) == (OFF, 0)
    assert subject.policy.exits == {"freeze_failed": 1}
    assert subject.policy.reason is not None
    assert subject.policy.reason.code == "freeze_failed"
    assert "no luck" in subject.policy.reason.detail


@in_own_process
def test_a_freeze_that_fails_at_a_tick_ends_the_policy() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    before = gc_state()
    subject.does("freeze")
    cycle = plant_frozen_cycle()
    gc.freeze = fail
    subject.policy._next_tick = 0.0
    subject.poll()
    assert gc_state() == before
    assert cycle() is None
    assert subject.policy.mode == OFF
    assert subject.policy.exits == {"freeze_failed": 1}


@in_own_process
def test_a_freeze_that_fails_in_maintain_ends_the_policy() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    before = gc_state()
    subject.does("freeze")
    gc.freeze = fail
    outcome = subject.do("maintain")
    assert (outcome.ok, outcome.code) == (False, "freeze_failed")
    assert gc_state() == before
    assert subject.policy.mode == OFF
    assert subject.policy.exits == {"freeze_failed": 1}


@in_own_process
def test_a_freeze_that_fails_in_restore_is_told() -> None:
    subject = Subject(frozen=True)
    subject.does("freeze")
    gc.freeze = fail
    subject.do("restore")
    assert subject.policy.mode == OFF
    assert subject.policy.reason is not None
    assert subject.policy.reason.code == "freeze_failed"


@in_own_process
def test_thresholds_that_cannot_be_set_at_entry_leave_everything_as_found() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject(frozen=True)
    before = gc_state()
    gc.set_threshold = fail
    outcome = subject.do("freeze")
    assert (outcome.ok, outcome.code) == (False, "freeze_failed")
    assert gc_state() == before
    assert subject.policy.mode == OFF
    assert subject.policy.exits == {"freeze_failed": 1}


@in_own_process
def test_a_third_threshold_that_is_ignored_ends_the_entry() -> None:
    subject = Subject()
    before = gc_state()
    real = gc.set_threshold
    gc.set_threshold = lambda a, b, c: real(a, b, min(c, 10))
    outcome = subject.do("freeze")
    assert (outcome.ok, outcome.code) == (False, "freeze_failed")
    assert "third threshold" in (outcome.detail or "")
    assert gc_state() == before


@in_own_process
def test_thresholds_that_cannot_be_put_back_keep_the_policy_on_until_they_can() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    before = gc_state()
    subject.does("freeze")
    real, gc.set_threshold = gc.set_threshold, fail
    assert not subject.do("restore").ok
    # Full collections are off, so somebody has to go on freezing.
    assert subject.policy.mode == "freeze"
    subject.policy._next_tick = 0.0
    freezes = subject.number("freezes")
    subject.poll()
    assert subject.number("freezes") == freezes + 1
    gc.set_threshold = real
    subject.does("restore")
    assert gc_state() == before


@in_own_process
def test_a_signal_that_raises_in_the_middle_of_an_entry_leaves_a_policy_that_ends() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    before = gc_state()
    real = gc.freeze

    def interrupted() -> None:
        raise SystemExit

    gc.freeze = interrupted
    try:
        subject.do("freeze", lease_s=0)
    except SystemExit:
        gc.freeze = real
    assert subject.policy.mode == "freeze"
    subject.poll()
    assert gc_state() == before
    assert subject.policy.exits == {"lease_expired": 1}
    subject.does("freeze")


@pytest.mark.parametrize("collector", [INCREMENTAL, FREE_THREADED])
@pytest.mark.parametrize("kind", ["freeze", "budget"])
@in_own_process
def test_a_collector_that_cannot_be_held_off_is_refused_with_a_reason(
    collector: str, kind: str
) -> None:
    subject = Subject(collector)
    before = gc_state()
    outcome = subject.do(kind)
    assert (outcome.ok, outcome.code) == (False, "collector_unsupported")
    assert outcome.detail
    assert subject.policy.refused == {
        "generation": 1,
        "code": "collector_unsupported",
        "detail": outcome.detail,
    }
    assert gc_state() == before
    assert subject.triggers() == []
    assert subject.policy.generation == 0
    subject.does("maintain")
    subject.does("restore")
    assert subject.policy.refused is None


@in_own_process
def test_an_operation_that_waits_too_long_for_another_is_busy_and_may_be_tried_again() -> None:
    subject = Subject()
    asked = command("freeze", deadline_s=0.05)
    with subject.policy._lock:
        began = time.monotonic()
        outcome = subject.policy.run(asked, subject.collect)
        assert 0.05 <= time.monotonic() - began < 2
    assert (outcome.ok, outcome.code) == (False, "policy_busy")
    assert subject.policy.run(asked, subject.collect).ok


@in_own_process
def test_an_unexpected_error_is_an_outcome_with_a_code() -> None:
    subject = Subject()
    outcome = subject.do("maintain", collect=fail)
    assert (outcome.ok, outcome.code) == (False, "agent_error")
    assert outcome.detail == "MemoryError: no luck"


# --- restored, but not collected yet ---


def leave_pending(frozen: bool) -> tuple[Subject, Any, Any]:
    gc.set_threshold(50, 3, 7)
    subject = Subject(frozen=frozen)
    before = gc_state()
    subject.does("freeze")
    cycle = plant_frozen_cycle()
    subject.policy.lease_deadline = 0.0
    subject.poll(collect=pending)
    assert subject.policy.mode == OFF
    assert subject.policy.collect_pending
    assert gc_state() == (before[0], before[1], False)  # restored; the collection is missing
    return subject, before, cycle


@pytest.mark.parametrize("frozen", [False, True], ids=["loose", "frozen"])
@in_own_process
def test_cpythons_own_next_full_collection_does_what_is_pending(frozen: bool) -> None:
    subject, before, cycle = leave_pending(frozen)
    subject.poll()
    assert subject.policy.collect_pending
    collect_automatically()
    assert cycle() is None
    subject.poll()
    assert not subject.policy.collect_pending
    assert gc_state() == before


@pytest.mark.parametrize("frozen", [False, True], ids=["loose", "frozen"])
@pytest.mark.parametrize("how", ["settle", "restore", "maintain"])
@in_own_process
def test_the_next_request_does_what_is_pending(how: str, frozen: bool) -> None:
    subject, before, cycle = leave_pending(frozen)
    if how == "settle":
        subject.policy.settle(subject.collect, time.monotonic() + 5)
    else:
        subject.does(how)
    assert cycle() is None
    assert not subject.policy.collect_pending
    assert gc_state() == before
    collections = subject.number("full_starts")
    subject.policy.settle(subject.collect, time.monotonic() + 5)
    assert subject.number("full_starts") == collections


@pytest.mark.parametrize("frozen", [False, True], ids=["loose", "frozen"])
@in_own_process
def test_entering_again_ends_what_is_pending_and_remembers_what_was_found_at_first(
    frozen: bool,
) -> None:
    subject, before, cycle = leave_pending(frozen)
    subject.does("freeze")
    assert cycle() is None
    assert not subject.policy.collect_pending
    subject.does("restore")
    assert gc_state() == before


@in_own_process
def test_a_restore_that_finds_the_collection_still_pending_is_observed_all_the_same() -> None:
    subject, before, _ = leave_pending(True)
    outcome = subject.do("restore", generation=9, collect=pending)
    assert outcome.ok
    assert subject.policy.generation == outcome.generation == 9
    assert subject.policy.collect_pending
    assert "still pending" in (outcome.detail or "")
    subject.does("restore", generation=10)
    assert gc_state() == before


@in_own_process
def test_a_maintain_that_fails_while_a_collection_is_pending_freezes_nothing() -> None:
    subject, before, cycle = leave_pending(True)
    assert not subject.do("maintain", collect=busy).ok
    assert not is_frozen(), "the garbage would be frozen again"
    assert subject.policy.collect_pending
    subject.does("maintain")
    assert cycle() is None
    assert gc_state() == before


@in_own_process
def test_a_child_forked_while_a_collection_is_pending_has_its_heap_frozen_as_found() -> None:
    subject, before, _ = leave_pending(True)
    pid = os.fork()
    if pid == 0:
        subject.policy.leave_behind()
        os._exit(0 if gc_state() == before else 1)
    assert os.waitpid(pid, 0)[1] == 0


@in_own_process
def test_a_heap_that_the_engine_unfroze_meanwhile_is_not_frozen_by_maintain() -> None:
    # Sleep mode and graph capture unfreeze.
    subject = Subject(frozen=True)
    gc.unfreeze()
    subject.does("maintain")
    assert not is_frozen()
    gc.freeze()
    subject.does("maintain")
    assert is_frozen()


@in_own_process
def test_a_lease_of_another_generation_is_not_renewed() -> None:
    Clock()
    subject = Subject()
    subject.does("freeze", generation=5, lease_s=30)
    for generation in (4, 6):
        assert not subject.policy.renew_lease(1000, generation)
    assert subject.policy.lease_remaining_s() == 30
    assert subject.policy.renew_lease(1000, 5)
    assert subject.policy.lease_remaining_s() == 1000


@in_own_process
def test_a_collection_that_ran_already_is_not_the_one_that_is_pending() -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject(frozen=True)
    before = gc_state()
    subject.does("freeze")
    inside, leave = threading.Event(), threading.Event()

    class Sitting(Cycle):
        def __del__(self) -> None:
            inside.set()
            leave.wait(30)

    gc.disable()
    Sitting()
    other = threading.Thread(target=gc.collect)
    other.start()
    assert inside.wait(10)
    # The policy ends while a collection sits in a finalizer: it has passed what was frozen by.
    cycle = plant_frozen_cycle()
    gc.enable()
    subject.policy.lease_deadline = 0.0
    subject.poll(collect=busy)
    assert subject.policy.collect_pending
    leave.set()
    other.join()
    subject.poll()
    assert subject.policy.collect_pending, "taken for done, and the garbage frozen again"
    assert cycle() is not None
    gc.collect()
    subject.poll()
    assert cycle() is None
    assert not subject.policy.collect_pending
    assert gc_state() == before


# --- forks ---


@pytest.mark.parametrize("frozen", [False, True], ids=["loose", "frozen"])
@in_own_process
def test_a_forked_child_has_gc_as_its_parent_found_it(frozen: bool) -> None:
    gc.set_threshold(50, 3, 7)
    gc.disable()
    subject = Subject(frozen=frozen)
    before = gc_state()
    subject.does("freeze")
    during = gc_state()
    with subject.policy._lock:  # held by another thread at that moment
        pid = os.fork()
        if pid == 0:
            subject.meter.detach()
            subject.policy.leave_behind()
            as_found = gc_state() == before
            own = Subject()
            works = own.do("freeze").ok and own.do("restore").ok
            os._exit(0 if as_found and works and gc_state() == before else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert gc_state() == during
    subject.does("restore")
    assert gc_state() == before


@pytest.mark.parametrize("where", ["set_threshold", "freeze"])
@in_own_process
def test_a_child_forked_in_the_middle_of_an_entry_has_gc_as_found(where: str) -> None:
    gc.set_threshold(50, 3, 7)
    subject = Subject()
    before = gc_state()
    real: Callable[..., Any] = getattr(gc, where)
    statuses: list[int] = []

    def forking(*arguments: Any) -> None:
        real(*arguments)
        setattr(gc, where, real)
        pid = os.fork()
        if pid == 0:
            subject.policy.leave_behind()
            os._exit(0 if gc_state() == before else 1)
        statuses.append(os.waitpid(pid, 0)[1])

    setattr(gc, where, forking)
    subject.does("freeze")
    assert statuses == [0]


# --- what others see ---


@in_own_process
def test_what_it_says_of_itself_is_json_in_every_state() -> None:
    subject = Subject()
    shown = [subject.policy.description()]
    for kind, fields in (
        ("budget", {"pause_budget_ms": 5}),
        ("freeze", {"owner": "bench", "max_rss_growth_bytes": 5}),
        ("maintain", {}),
        ("restore", {}),
    ):
        changes = subject.policy.changes
        subject.do(kind, **fields)
        assert subject.policy.changes > changes
        shown.append(subject.policy.description())
    subject.does("freeze")
    subject.policy.lease_deadline = 0.0
    changes = subject.policy.changes
    subject.poll(collect=pending)
    assert subject.policy.changes > changes
    shown.append(subject.policy.description())
    assert json.loads(json.dumps(shown)) == shown
    assert [state["mode"] for state in shown] == ["off", "budget", "freeze", "freeze", "off", "off"]
    assert shown[2]["owner"] == "bench"
    assert shown[-1]["reason"]["code"] == "lease_expired"
    assert shown[-1]["exits"] == {"restored": 1, "lease_expired": 1}
    assert shown[3]["operation"]["kind"] == "maintain"
    assert isinstance(shown[2]["entered_at"], float)


@in_own_process
def test_memory_is_told_as_a_difference() -> None:
    gc.disable()
    subject = Subject()
    ballast = Cycle()
    ballast.heavy = [bytes([n % 256]) * 4096 for n in range(20_000)]  # type: ignore[attr-defined]
    del ballast
    outcome = subject.does("maintain", trim=True)
    assert outcome.resident_delta_bytes is not None
    assert outcome.resident_delta_bytes < -50 << 20
    assert outcome.device_delta_bytes is None


@in_own_process
def test_two_threads_with_operations_take_turns() -> None:
    subject = Subject()
    before = gc_state()
    failures: list[Outcome] = []

    def work(name: str) -> None:
        for number in range(60):
            kind = ("freeze", "maintain", "restore")[number % 3]
            asked = Command(kind, f"{name}-{number}", 1)
            outcome = subject.policy.run(asked, subject.collect)
            if not outcome.ok:
                failures.append(outcome)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), 50)
    assert failures == []
    subject.does("restore")
    assert gc_state() == before
