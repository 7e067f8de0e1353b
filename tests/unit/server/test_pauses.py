"""Pauses: each record is taken once, losses are counted exactly, and what stands still together is no sum."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gc_sidecar.server import pauses, sight
from gc_sidecar.server.pauses import (
    OPEN_INTERVALS,
    Arrival,
    IntervalUnion,
    PauseLog,
    RingNews,
    SeenPause,
)
from gc_sidecar.server.reports import Identity
from gc_sidecar.server.sight import Sight
from gc_sidecar_agent.commands.pauses import show_pauses
from gc_sidecar_agent.page import RING_RECORDS, Pause
from tests.unit.server.conftest import Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine

StartEngine = Callable[..., StandInEngine]
NANO = 1e-9
STARTED_S = 1000.0
NOW_S = STARTED_S + 1_000_000.0
CORE = Identity(("engine_core",), 0, 0, "core")
WORKERS = [Identity(("worker",), 0, rank, f"worker-{rank}") for rank in range(2)]
OTHER_GROUP = Identity(("worker",), 1, 0, "worker-of-1")
API = Identity(("api_server",), 0, 0, "api")
ALONE = Identity(("api_server", "engine_core", "worker"), 0, 0, "alone")


def record(sequence: int, start_s: float, duration_s: float = 0.1, gc_generation: int = 2) -> Pause:
    return Pause(sequence, round(start_s * 1e9), round(duration_s * 1e9), gc_generation, "auto", 5)


def arrival(
    who: Identity,
    full: Iterable[Pause] = (),
    full_next: int | None = None,
    young: Iterable[Pause] = (),
    young_next: int | None = None,
    shift_ns: int = 0,
) -> Arrival:
    full, young = tuple(full), tuple(young)

    def following(given: int | None, records: tuple[Pause, ...]) -> int:
        return given or (records[-1].sequence + 1 if records else 1)

    rings = (
        RingNews(following(full_next, full), full),
        RingNews(following(young_next, young), young),
    )
    return Arrival(who, shift_ns, rings)


def new_log() -> PauseLog:
    """One that started at STARTED_S, a long time ago."""
    times = itertools.chain([STARTED_S], itertools.repeat(NOW_S))
    return PauseLog(clock=lambda: next(times))


@pytest.fixture
def log() -> PauseLog:
    return new_log()


def everything(log: PauseLog) -> list[SeenPause]:
    return log.newest_first(lambda pause: True)


# --- what intervals cover together ---


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The same, plainly."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


whole = st.integers(0, 60).map(float)


@settings(deadline=None)
@given(st.lists(st.tuples(whole, whole), max_size=60))
def test_a_union_covers_what_its_intervals_cover_in_any_order_and_never_shrinks(
    intervals: list[tuple[float, float]],
) -> None:
    union = IntervalUnion()
    for count, (start, end) in enumerate(intervals, 1):
        before = union.total_s
        union.add(start, end)
        assert union.total_s == covered(i for i in intervals[:count] if i[0] < i[1])
        assert union.total_s >= before


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e6, 1e6 + 10), st.floats(0, 1)).map(lambda i: (i[0], i[0] + i[1])),
        max_size=40,
    )
)
def test_a_union_of_real_times_is_exact_to_a_microsecond(
    intervals: list[tuple[float, float]],
) -> None:
    union = IntervalUnion()
    totals = [0.0]
    for start, end in intervals:
        union.add(start, end)
        totals.append(union.total_s)
    assert totals == sorted(totals)
    assert union.total_s == pytest.approx(covered(intervals), abs=1e-6)


def test_a_copy_of_a_union_goes_its_own_way() -> None:
    union = IntervalUnion()
    union.add(0, 1)
    other = union.copy()
    other.add(2, 3)
    union.add(0.5, 1.5)
    assert (union.total_s, other.total_s) == (1.5, 2)


def test_a_union_of_very_many_intervals_is_exact_where_late_ones_are_not_too_late() -> None:
    chance = random.Random(3)
    count = 5 * OPEN_INTERVALS
    intervals = [(float(i), i + 0.5) for i in range(count)]
    # Each at most 500 places away from where it belongs, and every seventh bridges a gap.
    intervals += [(i + 0.25, i + 1.25) for i in range(0, count, 7)]
    intervals.sort(key=lambda interval: interval[0] + chance.uniform(0, 500))
    union = IntervalUnion()
    for start, end in intervals:
        union.add(start, end)
    assert union.total_s == covered(intervals)
    assert len(union._starts) == len(union._ends) <= OPEN_INTERVALS


# --- records ---


def test_each_record_is_taken_once_however_often_its_page_is_read(log: PauseLog) -> None:
    heard: list[SeenPause] = []
    log.listeners.append(heard.append)
    records = [record(n, STARTED_S + n) for n in range(1, 6)]
    log.absorb([arrival(CORE, records[:3])])
    log.absorb([arrival(CORE, records[:3])])
    log.absorb([arrival(CORE, records)])
    log.absorb([arrival(CORE, (), full_next=6)])
    assert [round(pause.start_s - STARTED_S) for pause in heard] == [1, 2, 3, 4, 5]
    assert everything(log) == heard[::-1]
    assert log.lost("core") == 0


def test_a_page_made_anew_by_the_same_process_tells_nothing_twice(log: PauseLog) -> None:
    records = [record(n, STARTED_S + n) for n in range(1, 5)]
    old = arrival(CORE, records[:2])
    log.absorb([old])
    # Both are in the directory for a moment, in any order.
    log.absorb([arrival(CORE, records), old])
    log.absorb([old, arrival(CORE, records)])
    assert len(everything(log)) == 4
    assert log.lost("core") == 0


def test_what_happened_before_a_process_was_first_seen_is_not_lost(log: PauseLog) -> None:
    log.absorb([arrival(CORE, [record(n, 5.0 + n) for n in range(4000, 4010)])])
    assert len(everything(log)) == 10
    assert log.lost("core") == 0
    log.absorb([arrival(CORE, [record(4012, STARTED_S)])])
    assert log.lost("core") == 2


def test_overwritten_and_damaged_records_are_counted_exactly_in_each_ring(log: PauseLog) -> None:
    log.absorb([arrival(CORE, [record(1, STARTED_S)], young=[record(1, STARTED_S, 0.001, 0)])])
    full = [record(n, STARTED_S + n) for n in range(11, 21) if n != 15]
    young = [record(n, STARTED_S + n, 0.001, n % 2) for n in range(3, 6)]
    log.absorb([arrival(CORE, full, young=young)])
    assert log.lost("core") == (20 - 1 - len(full)) + (5 - 1 - len(young)) == 11
    assert log.lost_among(lambda who: True) == 11
    assert log.lost_among(lambda who: who.roles == ("worker",)) == 0
    assert log.lost(None) == log.lost("nobody") == 0


def test_pauses_of_one_reading_are_counted_together_however_many_and_on_however_many_pages(
    log: PauseLog,
) -> None:
    # One long pause that all share, and before it more short ones than can be kept apart.
    together = [
        arrival(
            Identity(("worker",), 0, rank, f"worker-{rank}"),
            [record(1, STARTED_S + 100, 2.0)],
            young=[
                record(n, STARTED_S + n * 0.008 + rank * 0.001, 5e-5, 0) for n in range(1, 1001)
            ],
        )
        for rank in range(8)
    ]
    log.absorb(together)
    assert log.stall_s(0) == pytest.approx(2.0 + 8 * 1000 * 5e-5)


def test_a_record_of_what_is_still_to_come_is_forged_and_counts_as_lost(log: PauseLog) -> None:
    log.absorb([arrival(WORKERS[0], [record(1, NOW_S), record(2, NOW_S + 86_400)])])
    assert [pause.start_s for pause in everything(log)] == [pytest.approx(NOW_S)]
    assert log.lost(WORKERS[0].token) == 1
    assert log.stall_s(0) == pytest.approx(0.1)


@pytest.mark.parametrize("following", [0, -5, 1 << 62, -(1 << 62), (1 << 63) - 1])
def test_absurd_sequences_crash_nothing_and_cost_little(log: PauseLog, following: int) -> None:
    log.absorb([arrival(CORE, [record(1, STARTED_S)])])
    odd = [record(n, STARTED_S) for n in (0, -1, 1 << 62, (1 << 62) - 1)]
    started = time.perf_counter()
    for _ in range(100):
        log.absorb([arrival(CORE, odd, full_next=following)])
        log.absorb([arrival(CORE, odd[:1], full_next=2)])
    assert time.perf_counter() - started < 1
    assert len(everything(log)) <= 1 + len(odd)
    assert log.lost("core") >= 0


def test_only_so_much_is_kept_and_it_says_since_when_it_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pauses, "KEPT", 10)
    log = new_log()
    assert log.complete_since_s() == STARTED_S
    for n in range(1, 26):
        log.absorb([arrival(CORE, [record(n, STARTED_S + n)])])
    young = [record(n, STARTED_S + n, 0.001, 0) for n in range(1, 4)]
    log.absorb([arrival(CORE, young=young, full_next=26)])
    kept = everything(log)
    assert len([pause for pause in kept if pause.gc_generation == 2]) == 10
    assert len(kept) == 13, "young ones push out no full one"
    assert log.complete_since_s() == pytest.approx(STARTED_S + 16.1)


def test_processes_that_come_and_go_are_forgotten_before_those_that_stay(
    log: PauseLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "REMEMBERED", 4)
    log.absorb([arrival(CORE, [record(1, STARTED_S)])])
    for n in range(20):
        passing = Identity(("worker",), 0, 0, f"passing-{n}")
        log.absorb([arrival(passing, [record(1, STARTED_S)]), arrival(CORE, full_next=2 + n)])
    assert log.lost("core") == 19
    assert len(log._told) == 4


def test_a_role_that_a_process_takes_on_later_counts_from_then_on(log: PauseLog) -> None:
    log.absorb([arrival(Identity(("api_server",), 0, 0, "alone"), [record(1, STARTED_S, 1.0)])])
    assert log.stall_s(0) == 0
    log.absorb([arrival(ALONE, [record(2, STARTED_S + 5, 1.0)])])
    assert log.stall_s(0) == 1.0


def test_what_is_missing_of_one_that_was_watched_from_its_beginning_is_lost(log: PauseLog) -> None:
    news = arrival(CORE, [record(3, STARTED_S)], young_next=11)
    log.absorb([replace(news, is_from_the_beginning=True)])
    assert log.lost("core") == 2 + 10
    log.absorb([arrival(WORKERS[0], [record(3, STARTED_S)])])
    assert log.lost(WORKERS[0].token) == 0, "it was there before"


# --- stalls ---


def test_ranks_that_stand_still_together_hold_up_their_group_once(log: PauseLog) -> None:
    log.absorb(
        [
            arrival(CORE, [record(1, STARTED_S + 1.0, 0.4)]),
            arrival(WORKERS[0], [record(1, STARTED_S + 1.1, 0.5)]),
            arrival(WORKERS[1], young=[record(1, STARTED_S + 1.2, 0.1, 0)]),
            arrival(OTHER_GROUP, [record(1, STARTED_S + 1.0, 0.3)]),
            arrival(API, [record(1, STARTED_S + 3.0, 2.0)]),
        ]
    )
    assert log.stall_s(0) == pytest.approx(0.6)
    assert log.stall_s(1) == pytest.approx(0.3)
    assert log.stall_s(2) == 0
    log.absorb([arrival(WORKERS[1], [record(1, STARTED_S + 0.9, 0.2)], young_next=2)])
    assert log.stall_s(0) == pytest.approx(0.7), "one that comes late and began before"


def test_pauses_from_before_the_sidecar_are_shown_but_hold_up_nothing(log: PauseLog) -> None:
    log.absorb([arrival(CORE, [record(1, STARTED_S - 5), record(2, STARTED_S + 1)])])
    assert len(everything(log)) == 2
    assert log.stall_s(0) == pytest.approx(0.1)


def test_pauses_that_follow_closely_on_one_another_are_one_stretch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stretches = pauses.Stretches()
    for n in random.Random(3).sample(range(100), 100):
        stretches.add(50 + n * 0.004, 50 + n * 0.004 + 0.003)
    stretches.add(60.0, 60.2)
    stretches.add(60.1, 60.3)
    stretches.add(70.0, 70.0)
    # Many, but each is short and alone.
    for n in range(100):
        stretches.add(80 + n * 0.004, 80 + n * 0.004 + 0.001)

    def assert_as_it_should_be(of: pauses.Stretches, count: int) -> None:
        long = sorted(
            (s.length_s, s.paused_s, s.longest_s) for s in of.counts() if s.length_s > 0.01
        )
        assert long[0] == pytest.approx((0.3, 0.3, 0.2), rel=0.03)
        assert long[1] == pytest.approx((0.399, 0.3, 0.003), rel=0.03)
        assert len(long) == 2
        assert of.counts().total() == count

    assert_as_it_should_be(stretches, 102)
    # Of very many, lengths alone are kept.
    monkeypatch.setattr(pauses, "OPEN_INTERVALS", 10)
    for n in range(1000):
        stretches.add(90.0 + n, 90.001 + n)
    assert_as_it_should_be(stretches, 1102)
    other = stretches.copy()
    stretches.add(5000, 5001)
    assert_as_it_should_be(other, 1102)


# --- clocks ---


def read_pauses(sight_: Sight) -> list[SeenPause]:
    sight_.log.absorb(sight_.read().arrivals)
    return everything(sight_.log)


def read_until(sight_: Sight, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(found := read_pauses(sight_)) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} came"


@pytest.mark.parametrize("ahead_s", [-86_400.0, 3.0, 500_000.0])
def test_a_process_with_another_monotonic_clock_is_brought_to_ours(
    start_engine: StartEngine, run_dir: Path, ahead_s: float
) -> None:
    engine = start_engine(
        workers=1, processes={"worker-0-0": {"clock_ahead_ns": int(ahead_s * 1e9)}}
    )
    sight_ = Sight(str(run_dir))
    before_s = time.monotonic()
    engine.collect("worker-0-0", duration_s=0.25)
    after_s = time.monotonic()
    read_until(sight_, 1)
    (pause,) = everything(sight_.log)
    assert before_s - 0.01 <= pause.start_s <= after_s + 0.01
    assert pause.duration_s == 0.25
    assert sight_.log.stall_s(0) == pytest.approx(0.25)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_jump_of_the_wall_clock_moves_no_pause_of_a_process_that_shares_our_clock(
    start_engine: StartEngine, run_dir: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    engine = start_engine(workers=1)
    sight_ = Sight(str(run_dir))
    read_pauses(sight_)
    real = sight.clock_offset_ns
    # We see the jump, the page was written before it.
    monkeypatch.setattr(sight, "clock_offset_ns", lambda: real() + int(jump_s * 1e9))
    before_s = time.monotonic()
    engine.collect("worker-0-0", duration_s=0.25)
    after_s = time.monotonic()
    read_until(sight_, 1)
    (pause,) = everything(sight_.log)
    assert before_s <= pause.start_s <= after_s


# --- reading ---


@pytest.mark.anyio
async def test_a_reading_whose_caller_left_still_delivers_its_records_once(
    start_engine: StartEngine, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(workers=1)
    sight_ = Sight(str(run_dir))
    await sight_.look()
    engine.collect("worker-0-0", times=3)
    may_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = sight_.read

    def read_slowly() -> Any:
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(10)
        return real()

    monkeypatch.setattr(sight_, "read", read_slowly)
    callers = [asyncio.create_task(sight_.look()) for _ in range(3)]
    await asyncio.sleep(0)
    reading = sight_._reading
    assert reading is not None
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    assert all(caller.cancelled() for caller in callers)
    assert not everything(sight_.log)
    may_end.set()
    snapshot = await reading
    assert sight_.snapshot is snapshot, "counters and records are of the same reading"
    monkeypatch.undo()
    for _ in range(100):
        await sight_.look()
        if len(everything(sight_.log)) == 3:
            break
        await asyncio.sleep(0.01)
    assert len(everything(sight_.log)) == 3
    await sight_.look()
    assert len(everything(sight_.log)) == 3
    assert sight_.log.lost_among(lambda who: True) == 0


def test_overflow_and_damage_of_a_real_ring_are_lost_exactly_and_a_new_page_loses_nothing(
    start_engine: StartEngine, run_dir: Path
) -> None:
    engine = start_engine(workers=1)
    sight_ = Sight(str(run_dir))
    read_pauses(sight_)
    engine.collect("worker-0-0", times=RING_RECORDS + 500, duration_s=1e-5)
    read_until(sight_, RING_RECORDS)
    token = engine.process("worker-0-0")["token"]
    assert sight_.log.lost(token) == 500
    engine.set_process("worker-0-0", still=True)
    engine.collect("worker-0-0", times=10, duration_s=1e-5)
    last = RING_RECORDS + 510
    engine.set_process("worker-0-0", damage=[last, last - 4], still=False)
    read_until(sight_, RING_RECORDS + 8)
    assert sight_.log.lost(token) == 502
    engine.set_process("worker-0-0", new_page=True)
    engine.collect("worker-0-0", gc_generation=0, times=3, duration_s=1e-5)
    read_until(sight_, RING_RECORDS + 11)
    read_pauses(sight_)
    assert len(everything(sight_.log)) == RING_RECORDS + 11
    assert sight_.log.lost(token) == 502


# --- GET /gc/pauses ---

KINDS = [
    # name, generation, trigger, seconds
    ("api_server-0-0", 2, "auto", 0.300),
    ("engine_core-0-0", 0, "auto", 0.001),
    ("engine_core-0-0", 2, "restore", 0.200),
    ("worker-0-0", 1, "auto", 0.004),
    ("worker-0-1", 2, "maintain", 0.150),
    ("worker-0-1", 2, "explicit", 0.060),
    ("worker-1-0", 2, "entry", 0.050),
    ("worker-1-1", 2, "auto", 0.010),
]


async def recorded(start_engine: StartEngine, start_sidecar: StartSidecar) -> Sidecar:
    """A sidecar that has seen all KINDS, one second apart, the first the oldest."""
    engine = start_engine(dp=2)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 7)
    for index, (name, gc_generation, trigger, duration_s) in enumerate(KINDS):
        engine.collect(name, duration_s, gc_generation, trigger, 7, start_s=index - len(KINDS) - 1)
    await sidecar.until_recorded(len(KINDS))
    return sidecar


async def asked(sidecar: Sidecar, **query: Any) -> dict[str, Any]:
    answer = await sidecar.client.get("/gc/pauses", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def durations(answer: dict[str, Any]) -> list[float]:
    return [pause["duration_s"] for pause in answer["pauses"]]


FILTERS: list[tuple[dict[str, Any], Callable[[str, int, str, float], bool]]] = [
    ({"role": "worker"}, lambda name, *_: name.startswith("worker")),
    ({"role": "api_server"}, lambda name, *_: name.startswith("api")),
    ({"dp_rank": 1}, lambda name, *_: "-1-" in name),
    ({"rank": 1}, lambda name, *_: name.endswith("-1")),
    ({"gc_generation": 2}, lambda _, generation, *__: generation == 2),
    ({"gc_generation": 0}, lambda _, generation, *__: generation == 0),
    ({"min_duration_s": 0.05}, lambda *all_: all_[3] >= 0.05),
    *(
        ({"trigger": trigger}, lambda *all_, trigger=trigger: all_[2] == trigger)
        for trigger in ("auto", "maintain", "restore", "entry", "explicit")
    ),
]


@pytest.mark.anyio
async def test_filters_choose_alone_and_together(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await recorded(start_engine, start_sidecar)
    everything_ = await asked(sidecar)
    assert durations(everything_) == [kind[3] for kind in reversed(KINDS)], "newest first"
    assert everything_["lost"] == 0
    newest = everything_["pauses"][0]
    assert newest.pop("started_at")
    assert newest == {
        "duration_s": 0.01, "role": "worker", "roles": ["worker"], "dp_rank": 1, "rank": 1,
        "pid": 1001, "gc_generation": 2, "trigger": "auto", "collected_objects": 7,
    }  # fmt: skip
    for first, second in itertools.combinations_with_replacement(FILTERS, 2):
        query = {**first[0], **second[0]}
        if len(query) < len(first[0]) + len(second[0]) and first is not second:
            continue  # the same parameter twice
        found = await asked(sidecar, **query)
        wanted = [kind[3] for kind in reversed(KINDS) if first[1](*kind) and second[1](*kind)]
        assert durations(found) == wanted, query
        assert found["matching"] == len(wanted)


@pytest.mark.anyio
async def test_only_the_newest_come_where_more_match_than_are_asked_for(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await recorded(start_engine, start_sidecar)
    found = await asked(sidecar, limit=2, gc_generation=2)
    assert durations(found) == [0.01, 0.05]
    assert found["matching"] == 6
    table = (await sidecar.client.get("/gc/pauses?limit=2&gc_generation=2&format=table")).text
    assert table.endswith("\n")
    assert table == show_pauses(found) + "\n"
    assert "4 more match" in table
    assert table.splitlines()[0].split()[:3] == ["STARTED", "ROLE", "TRIGGER"]
    nothing = (await sidecar.client.get("/gc/pauses?min_duration_s=99&format=table")).text
    assert nothing.startswith("no such pause has been recorded\n\ncomplete since 20")


@pytest.mark.anyio
async def test_since_takes_any_zone_and_means_the_end_of_a_pause(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await recorded(start_engine, start_sidecar)
    third = (await asked(sidecar))["pauses"][2]
    moment = datetime.fromisoformat(third["started_at"].replace("Z", "+00:00"))
    into_it = moment + timedelta(seconds=third["duration_s"] / 2)
    after_it = moment + timedelta(seconds=third["duration_s"] + 0.02)
    elsewhere = timezone(timedelta(hours=5, minutes=30))
    for zone in (timezone.utc, elsewhere, timezone(timedelta(hours=-8))):
        found = await asked(sidecar, since=into_it.astimezone(zone).isoformat())
        assert len(found["pauses"]) == 3
        found = await asked(sidecar, since=after_it.astimezone(zone).isoformat())
        assert len(found["pauses"]) == 2
    # As people write it: a plus that is not escaped arrives as a blank.
    raw = into_it.astimezone(elsewhere).isoformat()
    answer = await sidecar.client.get(f"/gc/pauses?since={raw}")
    assert len(answer.json()["pauses"]) == 3
    zulu = into_it.isoformat().replace("+00:00", "Z")
    assert len((await asked(sidecar, since=zulu))["pauses"]) == 3
    assert (await asked(sidecar, since="9999-12-31T23:59:59-23:59"))["pauses"] == []
    assert (await asked(sidecar, since="0001-01-01T00:00:00+23:59"))["matching"] == len(KINDS)


@pytest.mark.anyio
async def test_lost_ones_are_told_for_the_processes_that_are_asked_about(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.collect("worker-0-1", 1e-6, times=RING_RECORDS + 7)
    await sidecar.until_recorded(RING_RECORDS + 7)
    answer = await asked(sidecar, limit=1)
    assert (answer["lost"], answer["matching"]) == (7, RING_RECORDS)
    assert (await asked(sidecar, rank=1, gc_generation=0))["lost"] == 7
    assert (await asked(sidecar, rank=0))["lost"] == 0
    table = (await sidecar.client.get("/gc/pauses?limit=1&format=table")).text
    assert "of 7 others no record came" in table
