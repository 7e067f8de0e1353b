"""Whether it is safe to measure: the answer is yes only where everything that is known says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from gc_sidecar.server.pauses import PauseLog, SeenPause
from gc_sidecar.server.reports import Identity
from gc_sidecar.server.safety import LEAST_S, MINUTE_S, LastMinute, _unclean
from gc_sidecar.server.sight import Snapshot
from tests.unit.server.conftest import Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
WORKER = [Identity(("worker",), 0, rank, f"worker{rank}", 1000 + rank) for rank in range(2)]


# --- the last minute ---


class Minute:
    """A last minute with a clock of its own."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.log = PauseLog(lambda: self.now)
        self.minute = LastMinute(self.log, lambda: self.now)

    def pause(
        self, duration_s: float, rank: int = 0, generation: int = 0, trigger: str = "auto"
    ) -> None:
        """One that ends now."""
        start_s = self.now - duration_s
        self.minute.add(SeenPause(WORKER[rank], start_s, duration_s, generation, trigger, 0))


@pytest.fixture
def minute() -> Iterator[Minute]:
    return Minute()


def test_it_adds_up_what_held_up_a_rank_and_counts_what_overlaps_once(minute: Minute) -> None:
    minute.now += 20
    minute.pause(0.5, rank=0)
    minute.pause(0.4, rank=1)
    minute.now += 2
    minute.pause(0.25, rank=1)
    span_s, longest, stall_s = minute.minute.since(0.0)
    assert span_s == 22
    assert longest is not None
    assert longest.duration_s == pytest.approx(0.5)
    assert stall_s == pytest.approx(0.75)


def test_it_forgets_after_a_minute_and_leaves_out_what_was_before(minute: Minute) -> None:
    minute.now += MINUTE_S
    minute.pause(0.5)
    minute.now += 30
    minute.pause(0.1)
    assert minute.minute.since(minute.now - 10)[2] == pytest.approx(0.1)
    assert minute.minute.since(0.0)[2] == pytest.approx(0.6)
    minute.now += 31
    span_s, longest, stall_s = minute.minute.since(0.0)
    assert (span_s, stall_s) == (MINUTE_S, pytest.approx(0.1))
    assert longest is not None
    assert longest.duration_s == pytest.approx(0.1)
    minute.now += MINUTE_S
    assert minute.minute.since(0.0) == (MINUTE_S, None, 0.0)


def test_single_pauses_of_before_the_sidecar_started_count_and_their_share_does_not(
    minute: Minute,
) -> None:
    minute.now -= 5
    minute.pause(0.6)
    minute.now += 15
    span_s, longest, stall_s = minute.minute.since(0.0)
    assert (span_s, stall_s) == (10, 0.0)
    assert longest is not None
    assert longest.duration_s == pytest.approx(0.6)


def test_lost_records_count_for_a_minute(minute: Minute) -> None:
    assert not minute.minute.has_lost(0)
    assert minute.minute.has_lost(3)
    minute.now += MINUTE_S - 1
    assert minute.minute.has_lost(3)
    minute.now += 2
    assert not minute.minute.has_lost(3)
    assert minute.minute.has_lost(4)


@pytest.mark.parametrize("trigger", ["maintain", "restore", "entry"])
def test_what_an_operation_asked_for_does_not_count(minute: Minute, trigger: str) -> None:
    minute.now += 20
    minute.pause(3.0, generation=2, trigger=trigger)
    assert minute.minute.since(0.0) == (20, None, 0.0)
    assert minute.minute.longest_full_s() is None


def test_the_longest_full_one_of_the_hour_is_known(minute: Minute) -> None:
    minute.pause(0.7, generation=2)
    minute.now += 600
    minute.pause(0.5, generation=2)
    minute.pause(2.0, generation=0)
    assert minute.minute.longest_full_s() == pytest.approx(0.7)
    minute.now += 3300
    assert minute.minute.longest_full_s() == pytest.approx(0.5)


def test_it_holds_no_more_than_a_minute_however_much_comes(minute: Minute) -> None:
    for _ in range(300):
        minute.now += 1
        minute.pause(0.001)
    assert len(minute.minute._seconds) <= MINUTE_S + 1


# --- the answer ---


def answer(status: dict[str, Any]) -> str:
    return str(status["safe_to_measure"]["answer"])


def why(status: dict[str, Any]) -> str:
    told = status["safe_to_measure"]
    return f"{told['word']} {told['why']}"


async def frozen(
    start_engine: StartEngine,
    start_sidecar: StartSidecar,
    query: str = "freeze?owner=me",
    **engine: Any,
) -> tuple[StandInEngine, Sidecar]:
    started = start_engine(**engine)
    sidecar = await start_sidecar(started)
    await sidecar.until_seen("plugin", 4)
    changed = await sidecar.client.post(f"/gc/{query}")
    assert changed.status_code == 200, changed.text
    return started, sidecar


async def test_nobody_there_is_no(start_sidecar: StartSidecar) -> None:
    assert answer(await (await start_sidecar()).status()) == "no"


async def test_an_engine_that_has_ended_is_no_and_said_once(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await frozen(start_engine, start_sidecar)
    engine.stop()
    status = await sidecar.until(lambda status: "has ended" in why(status))
    assert why(status) == "No. Every process of the engine has ended, 4 in all."
    codes = [each["code"] for each in (await sidecar.client.get("/readyz")).json()["reasons"]]
    assert "process_gone" not in codes
    assert len(codes) == len(set(codes))


async def test_normal_gc_is_no_and_tells_how_long_it_paused(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    status = await sidecar.until_seen("plugin", 4)
    assert answer(status) == "no"
    assert "Freeze before you measure" in why(status)
    engine.collect("worker-0-0", 1.25, start_s=-2)
    status = await sidecar.until(lambda status: "1.25 s" in why(status))
    assert "in the last hour for up to 1.25 s" in why(status)


async def test_a_freeze_in_every_process_is_yes_until_somebody_loses_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await frozen(start_engine, start_sidecar)
    assert why(await sidecar.status()) == "Yes. No automatic full collection runs."
    engine.set_process("worker-0-1", thresholds=[700, 10, 10])
    status = await sidecar.until(lambda status: answer(status) == "no")
    assert "3 of 4 processes have the policy, not all" in why(status)


async def test_a_full_collection_that_runs_is_no_for_its_time(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await frozen(start_engine, start_sidecar)
    engine.set_process("worker-0-1", collecting_since_ns=123)
    status = await sidecar.until(lambda status: answer(status) == "no")
    assert why(status) == "Not at this moment. In 1 of 4 processes a full collection runs."


async def test_a_full_collection_counts_from_its_first_sight(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await frozen(start_engine, start_sidecar)
    sight = sidecar.services.coordinator.knowledge.sight
    read = sight.read

    def just_begun() -> Snapshot:
        snapshot = read()
        first, *others = snapshot.pages
        return replace(snapshot, pages=(replace(first, collecting_s=0.0), *others))

    sight.read = just_begun  # type: ignore[method-assign]
    status = await sidecar.until(lambda status: answer(status) == "no")
    assert "a full collection runs" in why(status)


async def test_a_young_collection_that_runs_for_long_is_no(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await frozen(start_engine, start_sidecar)
    sight = sidecar.services.coordinator.knowledge.sight
    read, began_s = sight.read, time.monotonic() - 1.0

    def in_it() -> Snapshot:
        snapshot = read()
        first, *others = snapshot.pages
        return replace(snapshot, pages=(replace(first, young_start_s=began_s), *others))

    sight.read = in_it  # type: ignore[method-assign]
    status = await sidecar.until(lambda status: answer(status) == "no")
    assert "A young collection runs" in why(status)


async def test_lost_records_are_not_known(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await frozen(start_engine, start_sidecar)
    log = sidecar.services.coordinator.knowledge.sight.log
    next(iter(log._told.values())).lost += 1
    assert answer(await sidecar.status()) == "unknown"


async def test_the_wall_clock_set_back_hides_no_pause(
    start_engine: StartEngine, start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sidecar = await frozen(start_engine, start_sidecar)
    earlier = time.time
    monkeypatch.setattr(time, "time", lambda: earlier() - 3600)

    def is_no(status: dict[str, Any]) -> bool:
        engine.collect("worker-0-0", 0.06, 1, start_s=-0.06)
        return answer(status) == "no"

    assert "a window would not be clean" in why(await sidecar.until(is_no))


async def test_a_lease_that_soon_ends_is_no(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await frozen(start_engine, start_sidecar, "freeze?owner=me&lease_s=30")
    status = await sidecar.status()
    assert answer(status) == "no"
    assert "Not for long. The policy ends in " in why(status)


async def test_a_process_without_a_page_is_not_known(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    without = {"worker-0-1": {"page_error": "No space left on device"}}
    _, sidecar = await frozen(start_engine, start_sidecar, processes=without)
    status = await sidecar.status()
    assert answer(status) == "unknown"
    assert "Of 1 of 4 processes the sidecar can read no page" in why(status)


@pytest.mark.parametrize(
    ("generation", "trigger", "words"),
    [(2, "explicit", "full collection, explicit"), (1, "auto", "young collection, auto")],
)
async def test_a_pause_that_no_clean_window_has_is_no(
    start_engine: StartEngine,
    start_sidecar: StartSidecar,
    generation: int,
    trigger: str,
    words: str,
) -> None:
    engine, sidecar = await frozen(start_engine, start_sidecar)

    def is_no(status: dict[str, Any]) -> bool:
        # Again and again, for what was in the second of the change itself may have been before it.
        engine.collect("worker-0-0", 0.06, generation, trigger, start_s=-0.06)
        return answer(status) == "no"

    status = await sidecar.until(is_no)
    assert "worker dp0 rank 0 stood still for 60.0 ms" in why(status)
    assert words in why(status)
    assert "a window would not be clean (over 50 ms)" in why(status)


async def test_a_budget_is_yes_with_its_pauses_named(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await frozen(start_engine, start_sidecar, "restore")
    changed = await sidecar.client.put("/gc/policy", json={"mode": "budget", "pause_budget_ms": 8})
    assert changed.status_code == 200, changed.text
    assert why(await sidecar.status()) == "Yes, if pauses of about 8.00 ms do not matter."

    def is_named(status: dict[str, Any]) -> bool:
        engine.collect("worker-0-0", 0.009, start_s=-0.009)
        return "the longest of late" in why(status)

    status = await sidecar.until(is_named)
    assert answer(status) == "yes"
    assert "(the longest of late: 9.00 ms)" in why(status)


@pytest.mark.parametrize(("span_s", "is_clean"), [(LEAST_S - 1, True), (LEAST_S + 1, False)])
def test_a_share_of_the_time_counts_when_there_was_some(span_s: float, is_clean: bool) -> None:
    said = _unclean(span_s, None, span_s * 0.12)
    assert (said is None) == is_clean
    assert said is None or "held the engine up for 12% of the last 11 s" in said
