"""The rules of the policies on a real heap: what a budget bounds, what it reclaims, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gc_sidecar_agent.collection import Collection
from gc_sidecar_agent.meter import NEVER_NS
from gc_sidecar_agent.policy import DRIFT_GRACE_S, OFF
from gc_sidecar_agent.rules import BUDGET_THRESHOLD0, GEN1_SAMPLES, HELD_OFF, BudgetRule
from tests.unit.agent.garbage import Cycle, is_frozen, plant_frozen_cycle
from tests.unit.agent.own_process import in_own_process
from tests.unit.agent.rings import full_pauses
from tests.unit.agent.test_policy import Clock, Subject, busy, drifted, pending

BUDGET_MS = 2
HEAP: list[Any] = []


def grow(objects: int) -> None:
    """Objects that stay."""
    HEAP.extend([] for _ in range(objects))


def grow_until(condition: Callable[[], bool]) -> None:
    """Let CPython's own collections run until something is so."""
    for _ in range(2_000):
        if condition():
            return
        grow(1_000)
    raise AssertionError("not within 2 million objects")


def automatic_full_collections(subject: Subject) -> int:
    return subject.triggers().count("auto")


# --- thresholds ---


@pytest.mark.parametrize(
    ("found", "held"),
    [
        ((700, 10, 10), (700, 10, 0)),
        ((2_000, 10, 0), (BUDGET_THRESHOLD0, 10, 0)),
        ((50_000, 1_000, 1_000), (BUDGET_THRESHOLD0, 10, 0)),
        ((300, 3, 5), (300, 3, 0)),
        ((0, 10, 10), (0, 10, 0)),
    ],
)
@in_own_process
def test_a_budget_holds_thresholds_that_are_at_most_those_it_found(
    found: tuple[int, int, int], held: tuple[int, int, int]
) -> None:
    gc.set_threshold(*found)
    subject = Subject()
    subject.does("budget", pause_budget_ms=5)
    assert gc.get_threshold() == tuple(held)
    subject.does("restore")
    assert gc.get_threshold() == tuple(found)
    assert subject.meter.freeze_after_ns == subject.meter.budget_ns == NEVER_NS


@in_own_process
def test_gc_that_was_disabled_stays_so_under_a_budget() -> None:
    gc.disable()
    subject = Subject()
    subject.does("budget", pause_budget_ms=5)
    assert not gc.isenabled()
    assert drifted(subject) is None
    subject.does("restore")
    assert not gc.isenabled()


@in_own_process
def test_from_one_policy_to_the_other_and_back_everything_is_as_found() -> None:
    gc.set_threshold(900, 8, 6)
    subject = Subject()
    subject.does("budget", pause_budget_ms=5)
    assert gc.get_threshold() == (700, 8, 0)
    subject.does("freeze")
    assert gc.get_threshold() == (900, 8, HELD_OFF)
    assert subject.meter.freeze_after_ns == NEVER_NS
    subject.does("budget", pause_budget_ms=8)
    assert gc.get_threshold() == (700, 8, 0)
    subject.does("budget", pause_budget_ms=4)
    assert subject.meter.budget_ns == 4_000_000
    assert subject.policy.description()["pause_budget_ms"] == 4
    subject.does("restore")
    assert gc.get_threshold() == (900, 8, 6)
    assert subject.policy.mode == OFF


@in_own_process
def test_a_budget_without_its_pause_is_refused_and_changes_nothing() -> None:
    subject = Subject()
    before = gc.get_threshold()
    outcome = subject.do("budget")
    assert (outcome.ok, outcome.code) == (False, "bad_command")
    assert (subject.policy.mode, gc.get_threshold()) == (OFF, before)


# --- pauses ---


@in_own_process
def test_full_collections_go_on_and_those_that_are_long_are_followed_by_a_freeze() -> None:
    grow(400_000)
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    freezes = subject.number("freezes")
    assert is_frozen()
    grow_until(lambda: subject.number("freezes") >= freezes + 3)
    pauses = [pause for pause in full_pauses(subject.meter) if pause.trigger == "auto"]
    long = [pause for pause in pauses if pause.duration_ns > BUDGET_MS * 1e6 / 2]
    assert len(long) == subject.number("freezes") - freezes
    assert len(pauses) > len(long), "after a freeze the next ones are short"


@in_own_process
def test_the_first_full_collection_after_entry_does_not_wait_for_a_quarter_of_the_heap() -> None:
    grow(800_000)
    subject = Subject()
    subject.does("budget", pause_budget_ms=50)
    before = len(HEAP)
    grow_until(lambda: automatic_full_collections(subject) > 0)
    assert len(HEAP) - before < 50_000
    assert subject.triggers()[:3] == ["entry", "entry", "auto"]


@in_own_process
def test_what_got_old_and_died_before_a_freeze_is_reclaimed_without_maintenance() -> None:
    grow(300_000)
    subject = Subject()
    subject.does("budget", pause_budget_ms=1_000)
    cycles = [Cycle() for _ in range(100)]
    gc.collect(1)
    watched = [weakref.ref(cycle) for cycle in cycles]
    del cycles
    gc.collect(1)
    assert all(cycle() for cycle in watched), "they are in the oldest generation"
    before = automatic_full_collections(subject)
    grow_until(lambda: automatic_full_collections(subject) > before)
    assert not any(cycle() for cycle in watched)


@in_own_process
def test_automatic_collections_over_the_budget_are_counted_and_no_others() -> None:
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    for generation, duration_ms, trigger, counts in (
        (0, 3.0, None, 1),
        (1, 3.0, None, 1),
        (2, 3.0, "maintain", 0),
        (1, 1.9, None, 0),
    ):
        before = subject.number("over_budget")
        lengthened(subject, generation, duration_ms, trigger)
        assert subject.number("over_budget") == before + counts
    subject.does("restore")
    before = subject.number("over_budget")
    lengthened(subject, 1, 3.0, None)
    assert subject.number("over_budget") == before


def lengthened(subject: Subject, generation: int, duration_ms: float, trigger: str | None) -> None:
    """A collection as the callback sees it that took so long."""
    gc.disable()
    info = {"generation": generation, "collected": 0, "uncollectable": 0}
    subject.meter.callback("start", info)
    if trigger is not None:
        with subject.meter.requested(trigger):
            subject.meter.callback("start", info)
    subject.meter._start_ns -= round(duration_ms * 1e6)
    subject.meter.callback("stop", info)
    gc.enable()


# --- what survives a freeze ---


@in_own_process
def test_maintenance_reclaims_what_a_freeze_caught_and_the_budget_goes_on() -> None:
    grow(300_000)
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    cycle = plant_frozen_cycle()
    outcome = subject.does("maintain")
    assert cycle() is None
    assert outcome.pause_s is not None
    assert outcome.pause_s > 0.001, "that of the heap, not of nothing"
    assert subject.triggers()[-2:] == ["maintain", "maintain"]
    assert is_frozen()
    assert subject.number("freezes_since_maintain") == 0
    freezes = subject.number("freezes")
    grow_until(lambda: subject.number("freezes") > freezes)


@in_own_process
def test_in_a_maintenance_no_full_collection_comes_by_itself_and_none_is_followed_by_a_freeze() -> (
    None
):
    grow(300_000)
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    cycle = plant_frozen_cycle()
    held: list[int] = []

    def collect_while_others_work(trigger: str, deadline: float) -> Collection:
        held.append(gc.get_threshold()[2])
        before = automatic_full_collections(subject)
        grow(100_000)
        if trigger == "maintain" and len(held) == 1:
            assert automatic_full_collections(subject) == before
            gc.set_debug(
                gc.DEBUG_SAVEALL
            )  # what this finds is not freed, so it could be frozen again
            gc.collect()
            gc.set_debug(0)
            gc.garbage.clear()
            assert not is_frozen()
        return subject.collect(trigger, deadline)

    subject.does("maintain", collect=collect_while_others_work)
    assert cycle() is None
    assert held == [HELD_OFF, 0]
    assert gc.get_threshold()[2] == 0


@in_own_process
def test_a_maintenance_that_fails_leaves_the_budget_in_force() -> None:
    grow(300_000)
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    since = subject.number("freezes_since_maintain")
    assert subject.do("maintain", collect=busy).code == "collector_busy"
    assert gc.get_threshold()[2] == 0
    assert is_frozen()
    assert subject.number("freezes_since_maintain") == since + 1
    freezes = subject.number("freezes")
    grow_until(lambda: subject.number("freezes") > freezes)


@in_own_process
def test_without_a_policy_a_maintenance_leaves_the_thresholds_of_the_last_one_alone() -> None:
    gc.set_threshold(700, 10, 10)
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    subject.does("restore")
    subject.does("maintain")
    assert gc.get_threshold() == (700, 10, 10)
    assert subject.meter.freeze_after_ns == NEVER_NS


@in_own_process
def test_a_heap_that_somebody_unfroze_is_frozen_after_their_collection_and_counted_anew() -> None:
    clock = Clock()
    grow(600_000)
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    gc.unfreeze()
    gc.collect()
    assert is_frozen()
    assert drifted(subject) is None
    clock.pass_s(10)
    subject.poll()
    assert subject.triggers()[-2:] == ["explicit", "entry"]
    subject.poll()
    assert subject.triggers()[-2:] == ["explicit", "entry"], "once is enough"


@in_own_process
def test_what_a_blocked_main_thread_did_not_count_anew_is_tried_again() -> None:
    clock = Clock()
    grow(300_000)
    subject = Subject()
    assert subject.do("budget", collect=pending, pause_budget_ms=BUDGET_MS).ok
    assert subject.triggers() == []
    subject.poll()
    assert subject.triggers() == [], "not at every poll"
    clock.pass_s(10)
    subject.poll()
    assert subject.triggers() == ["entry"]


# --- adapting ---


def take_gen1_collections(subject: Subject, duration_ms: float, count: int = GEN1_SAMPLES) -> None:
    for _ in range(count):
        lengthened(subject, 1, duration_ms, None)


@in_own_process
def test_the_second_threshold_follows_what_gen1_collections_take() -> None:
    gc.set_threshold(700, 10, 10)
    subject = Subject()
    subject.does("budget", pause_budget_ms=4)
    take_gen1_collections(subject, 0.8)
    subject.poll()
    assert gc.get_threshold() == (700, 10, 0), "a quarter of the budget is what it may take"
    take_gen1_collections(subject, 1.95)
    subject.poll()
    assert gc.get_threshold() == (700, 5, 0)
    take_gen1_collections(subject, 30.0)
    subject.poll()
    assert gc.get_threshold() == (700, 1, 0)
    for threshold1 in (2, 4, 8, 10, 10):
        take_gen1_collections(subject, 0.1)
        subject.poll()
        assert gc.get_threshold() == (700, threshold1, 0)
    assert drifted(subject) is None


@in_own_process
def test_one_gen1_collection_that_met_a_busy_machine_changes_nothing() -> None:
    gc.set_threshold(700, 10, 10)
    subject = Subject()
    subject.does("budget", pause_budget_ms=4)
    take_gen1_collections(subject, 0.3)
    take_gen1_collections(subject, 50.0, count=1)
    subject.poll()
    assert gc.get_threshold() == (700, 10, 0)


@in_own_process
def test_the_first_gen1_collection_alone_changes_nothing_and_neither_do_those_before_the_budget() -> (
    None
):
    gc.set_threshold(700, 10, 10)
    subject = Subject()
    take_gen1_collections(subject, 50.0)
    subject.does("budget", pause_budget_ms=4)
    subject.poll()
    take_gen1_collections(subject, 50.0, count=1)
    subject.poll()
    assert gc.get_threshold() == (700, 10, 0)


@in_own_process
def test_where_gc_is_disabled_nothing_is_counted_anew() -> None:
    clock = Clock()
    gc.disable()
    subject = Subject()
    subject.does("budget", pause_budget_ms=4)
    clock.pass_s(10)
    subject.poll()
    assert subject.triggers() == ["entry"]


@in_own_process
def test_thresholds_that_somebody_sets_under_a_budget_are_drift_and_put_right() -> None:
    clock = Clock()
    gc.set_threshold(700, 10, 10)
    subject = Subject()
    subject.does("budget", pause_budget_ms=5)
    freezes = subject.number("freezes")
    gc.set_threshold(50_000, 20, 20)
    assert drifted(subject) == "thresholds_changed"
    clock.pass_s(DRIFT_GRACE_S)
    subject.poll()
    assert drifted(subject) is None
    assert gc.get_threshold() == (700, 10, 0)
    assert subject.number("freezes") == freezes, "there is nothing to freeze"
    subject.does("restore")
    assert gc.get_threshold() == (700, 10, 10)


# --- forks ---


@in_own_process
def test_a_forked_child_keeps_nothing_of_a_budget() -> None:
    gc.set_threshold(800, 9, 9)
    subject = Subject()
    subject.does("budget", pause_budget_ms=BUDGET_MS)
    pid = os.fork()
    if not pid:
        subject.meter.detach()
        subject.policy.leave_behind()
        is_normal = gc.get_threshold() == (800, 9, 9) and not is_frozen()
        os._exit(0 if is_normal and subject.meter.freeze_after_ns == NEVER_NS else 1)
    assert os.waitpid(pid, 0)[1] == 0


@in_own_process
def test_a_rule_that_cannot_be_held_ends_the_policy() -> None:
    subject = Subject()
    BudgetRule.is_held = lambda _: False  # type: ignore[method-assign]
    outcome = subject.do("budget", pause_budget_ms=BUDGET_MS)
    assert outcome.code == "freeze_failed"
    assert subject.policy.mode == OFF
    assert not is_frozen()
