"""Windows: what fell into them, exactly; whether they are clean, and why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gc_sidecar.server import verdicts
from gc_sidecar.server.desired import Desired
from gc_sidecar.server.pauses import SeenPause
from gc_sidecar.server.reports import Identity
from gc_sidecar.server.verdicts import Limits, Window
from gc_sidecar_agent.commands.window import show_window, show_windows
from gc_sidecar_agent.page import NUMBER_NAMES, RING_RECORDS
from tests.unit.server.conftest import FAST, Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_latency import exposition
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
# Patient with an engine that gets little of the CPU, but not with one that does not answer.
QUICK = replace(FAST, stale_after_s=2.0, window_close_s=1.0, engine_metrics_s=0.3)


# --- what falls into a window ---

WORKER = Identity(("worker",), 0, 0, "worker")
OTHER = Identity(("worker",), 0, 1, "other")
API = Identity(("api_server",), 0, 0, "api")


def window(opened_s: float = 100.0, closed_s: float | None = None) -> Window:
    return Window(
        "w", None, Limits(), Desired(), {}, {}, {}, frozenset(), opened_s=opened_s,
        closed_s=closed_s,
    )  # fmt: skip


def pause(start_s: float, end_s: float, who: Identity = WORKER, generation: int = 2) -> SeenPause:
    return SeenPause(who, start_s, end_s - start_s, generation, "auto", 0)


@pytest.mark.parametrize(
    ("start_s", "end_s", "within", "stall_s"),
    [
        (90, 99, False, 0),
        (90, 100, False, 0),
        (99, 101, True, 1),
        (101, 103, True, 2),
        (109, 112, True, 1),
        (95, 115, True, 10),
        (110, 111, False, 0),
        (111, 112, False, 0),
    ],
)
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_pause_that_reaches_into_a_window_counts_and_stalls_for_the_part_within(
    start_s: float, end_s: float, within: bool, stall_s: float, is_closed: bool
) -> None:
    measured = window(100, 110 if is_closed else None)
    measured.add(pause(start_s, end_s))
    sums = measured.sums["worker"][2]
    if not is_closed and end_s > 100:
        within, stall_s = True, end_s - max(start_s, 100)
    assert (sums.within, sums.beside) == (int(within), int(not within))
    assert sums.within_s + sums.beside_s == end_s - start_s
    assert sums.longest_s == (end_s - start_s if within else 0)
    assert sum(union.total_s for union in measured.held_up.by_rank.values()) == stall_s


def test_the_stall_of_a_group_is_no_sum_and_an_api_server_has_none() -> None:
    measured = window(100)
    for each in (pause(101, 103), pause(102, 104, OTHER), pause(101, 109, API)):
        measured.add(each)
    assert {rank: union.total_s for rank, union in measured.held_up.by_rank.items()} == {0: 3}


def test_of_very_many_pauses_the_longest_are_kept_one_by_one() -> None:
    measured = window(100)
    count = 5 * verdicts.LISTED
    for index in range(count):
        length_s = (index * 7919 % count + 1) / 1e5
        measured.add(pause(101 + index, 101 + index + length_s))
        assert len(measured.longest) <= verdicts.LISTED
    assert measured.seen == measured.sums["worker"][2].within == count
    assert len(measured.longest) == verdicts.LISTED
    assert min(measured.longest)[0] == pytest.approx((count - verdicts.LISTED + 1) / 1e5)


# --- over REST ---


async def start(
    start_engine: StartEngine, start_sidecar: StartSidecar, **config: Any
) -> tuple[StandInEngine, Sidecar]:
    engine = start_engine(**config)
    sidecar = await start_sidecar(engine, timing=QUICK)
    await sidecar.until(
        lambda status: (
            status["transport"] == "plugin"
            and {process["state"] for process in status["processes"]} == {"applied"}
        )
    )
    return engine, sidecar


async def opened(sidecar: Sidecar, window_id: str = "w", **fields: Any) -> dict[str, Any]:
    # These windows are short: any pause is a large share of one.
    fields.setdefault("max_stall_share", 1)
    answer = await sidecar.client.post("/gc/windows", json={"window_id": window_id, **fields})
    assert answer.status_code in (200, 201), answer.text
    return dict(answer.json()["window"])


async def seen(sidecar: Sidecar, window_id: str = "w") -> dict[str, Any]:
    answer = await sidecar.client.get(f"/gc/windows/{window_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["window"])


async def until_state(sidecar: Sidecar, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while (window_ := await seen(sidecar))["state"] != state:
        assert time.monotonic() < deadline, window_["state"]
        await asyncio.sleep(0.01)
    return window_


async def closed(sidecar: Sidecar, window_id: str = "w") -> dict[str, Any]:
    """The verdict."""
    answer = await sidecar.client.post(f"/gc/windows/{window_id}/close")
    assert answer.status_code == 200, answer.text
    assert answer.json()["window"]["state"] == "closed"
    return dict(answer.json()["window"]["verdict"])


def reason_codes(verdict: dict[str, Any]) -> list[str]:
    assert verdict["clean"] == (not verdict["reasons"])
    return sorted({reason["code"] for reason in verdict["reasons"]})


def details(verdict: dict[str, Any], code: str) -> list[str]:
    return [reason["detail"] for reason in verdict["reasons"] if reason["code"] == code]


def process(verdict: dict[str, Any], name: str) -> dict[str, Any]:
    for each in verdict["processes"]:
        if f"{each['role']}-{each['dp_rank']}-{each['rank']}" == name:
            return dict(each)
    raise AssertionError(f"{name} is not in the verdict")


async def until_memory(sidecar: Sidecar, size: int, processes: int = 1) -> None:
    await sidecar.until(
        lambda status: (
            sum(p["memory"]["anonymous_bytes"] == size for p in status["processes"]) >= processes
        )
    )


async def test_a_window_without_anything_is_clean_and_stays_as_it_was_judged(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    engine.collect("worker-0-1", 0.2, start_s=-0.3)
    window_ = await opened(sidecar, name="warm run")
    assert (window_["state"], window_["name"]) == ("open", "warm run")
    assert window_["verdict"]["clean"] is True
    engine.set_process("worker-0-0", leave="restored")  # which was off already
    await sidecar.until(lambda s: "restored" in str(s["processes"]))
    answer = await sidecar.client.post("/gc/windows/w/close")
    first = answer.json()["window"]
    assert first["verdict"]["reasons"] == []
    assert first["verdict"]["pauses"] == []
    assert first["verdict"]["longest_pause"] is None
    assert [p["pauses"]["gen2"]["count"] for p in first["verdict"]["processes"]] == [0, 0, 0, 0]
    assert all(p["read_to_the_end"] for p in first["verdict"]["processes"])
    assert first["verdict"]["latency"]["says"].startswith("unknown")
    assert "client" in first["verdict"]["not_seen"]
    engine.collect("worker-0-1", 0.2)
    await sidecar.until_recorded(2)
    again = (await sidecar.client.post("/gc/windows/w/close")).json()["window"]
    assert again == first == await seen(sidecar)
    assert first["closed_at"] > first["opened_at"]


async def test_pauses_are_told_per_process_exactly(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    # Before it is opened; recorded only after.
    engine.set_process("worker-0-1", still=True)
    engine.collect("worker-0-1", 0.2, start_s=-1.0)
    engine.collect("worker-0-1", 0.001, gc_generation=0, start_s=-0.5)
    await opened(sidecar, max_pause_ms=20)
    engine.set_process("worker-0-1", still=False)
    engine.collect("worker-0-1", 0.010, collected_objects=3)
    engine.collect("worker-0-1", 0.012, trigger="explicit", start_s=0.02)
    engine.collect("worker-0-1", 0.001, gc_generation=0, times=5)
    engine.collect("worker-0-0", 0.015, gc_generation=1)
    await asyncio.sleep(0.05)
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == []
    told = process(verdict, "worker-0-1")["pauses"]
    assert told["gen2"] == {
        "count": 2, "total_s": 0.022, "max_s": 0.012, "lost_records": 0, "lost_s": 0.0,
    }  # fmt: skip
    assert (told["gen0"]["count"], told["gen0"]["total_s"]) == (5, 0.005)
    assert process(verdict, "worker-0-0")["pauses"]["gen1"]["max_s"] == 0.015
    assert process(verdict, "engine_core-0-0")["pauses"]["gen2"]["count"] == 0
    assert len(verdict["pauses"]) == 8
    assert verdict["longest_pause"]["duration_s"] == 0.015
    starts = [each["started_at"] for each in verdict["pauses"]]
    assert starts == sorted(starts, reverse=True)
    # Those of one process follow each other, those of the other may fall together with them.
    (stall,) = verdict["stalls"]
    assert 0.022 <= stall["stall_s"] <= 0.042
    assert 0 < stall["share"] < 1


async def test_ten_thousand_pauses_are_counted_exactly_though_most_records_are_lost(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar, max_pause_ms=50)
    engine.collect("worker-0-1", 20e-6, times=10_000)
    await asyncio.sleep(0.25)
    verdict = await closed(sidecar)
    gen2 = process(verdict, "worker-0-1")["pauses"]["gen2"]
    missing = 10_000 - RING_RECORDS
    assert gen2 == {
        "count": 10_000, "total_s": 0.2, "max_s": 20e-6, "lost_records": missing,
        "lost_s": round(missing * 20e-6, 9),
    }  # fmt: skip
    assert verdict["lost_records"] == missing
    assert len(verdict["pauses"]) + verdict["pauses_not_listed"] == RING_RECORDS
    assert reason_codes(verdict) == ["lost_records"]
    assert details(verdict, "lost_records") == [
        "worker dp0 rank 1: the records of 8,976 full collections are lost, which took 180 ms together"
    ]


async def test_lost_records_that_cannot_matter_leave_it_clean_but_are_told(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar, "loose", max_pause_ms=50)
    await opened(sidecar, "strict", max_pause_ms=50, max_stall_ms=10)
    engine.collect("worker-0-1", 4e-6, times=RING_RECORDS + 1000)
    engine.collect("api_server-0-0", 20e-6, gc_generation=0, times=RING_RECORDS + 1000)
    await asyncio.sleep(0.1)
    loose = await closed(sidecar, "loose")
    assert loose["lost_records"] == 2000
    table = (await sidecar.client.get("/gc/windows/loose?format=table")).text
    assert "lost    of 2,000 pauses no record came" in table
    assert reason_codes(loose) == []
    strict = await closed(sidecar, "strict")
    assert reason_codes(strict) == [], "8.1 ms in the worker; an API server stalls nobody"
    await opened(sidecar, "narrow", max_pause_ms=50, max_stall_ms=7)
    engine.collect("worker-0-1", 4e-6, times=RING_RECORDS + 1000)
    await asyncio.sleep(0.1)
    narrow = await closed(sidecar, "narrow")
    assert reason_codes(narrow) == ["lost_records"], "4.1 ms are known, 4.0 ms are not"
    assert "up to 4.00 ms more" in details(narrow, "lost_records")[0]


async def test_damaged_records_are_lost_ones(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar, max_pause_ms=50)
    engine.set_process("worker-0-1", still=True)
    engine.collect("worker-0-1", 0.030)
    engine.collect("worker-0-1", 0.080)
    engine.set_process("worker-0-1", damage=[2], still=False)
    await asyncio.sleep(0.1)
    verdict = await closed(sidecar)
    gen2 = process(verdict, "worker-0-1")["pauses"]["gen2"]
    assert (gen2["count"], gen2["max_s"], gen2["lost_records"]) == (2, 0.030, 1)
    assert gen2["lost_s"] == pytest.approx(0.080)
    assert reason_codes(verdict) == ["lost_records"]


# --- not clean, and why ---


async def test_a_pause_over_the_limit_is_named(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    engine.collect("worker-0-1", 0.051)
    engine.collect("worker-0-0", 0.049)
    await asyncio.sleep(0.06)
    open_ = await seen(sidecar)
    assert (open_["state"], open_["clean"]) == ("open", None)
    assert open_["verdict"]["latency"]["says"] == "not known before it is closed"
    verdict = await closed(sidecar)
    assert open_["verdict"]["reasons"] == verdict["reasons"]
    assert reason_codes(verdict) == ["pause_over_limit"]
    assert details(verdict, "pause_over_limit") == [
        "worker dp0 rank 1: a full collection of 51.0 ms, the limit is 50 ms"
    ]


async def test_pauses_that_are_short_each_may_stall_for_too_long_together(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar, dp=2)
    await opened(sidecar, max_stall_ms=50)
    engine.collect("worker-1-1", 0.001, gc_generation=0, times=60)
    engine.collect("worker-0-1", 0.001, gc_generation=0, times=40)
    await asyncio.sleep(0.08)
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["stall_over_limit"]
    assert details(verdict, "stall_over_limit") == [
        "dp1: pauses held it up for 60.0 ms in all, the limit is 50 ms"
    ]
    assert {s["dp_rank"]: round(s["stall_s"], 6) for s in verdict["stalls"]} == {0: 0.04, 1: 0.06}


async def test_a_window_may_be_stalled_for_a_share_of_it_and_for_one_pause_that_is_short_enough(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    answer = await sidecar.client.post("/gc/windows?window_id=default")
    assert answer.json()["window"]["limits"]["max_stall_share"] == 0.05
    engine.collect("worker-0-1", 0.049)
    await asyncio.sleep(0.06)
    assert reason_codes(await closed(sidecar, "default")) == []

    await opened(sidecar, "many", max_stall_share=0.05)
    for _ in range(3):
        engine.collect("worker-0-1", 0.049)
        await asyncio.sleep(0.06)
    many = await closed(sidecar, "many")
    assert reason_codes(many) == ["stall_over_limit"]
    assert details(many, "stall_over_limit") == [
        "dp0: pauses held it up for 147 ms in all, the limit is 50 ms"
        " (that of a single pause: 5 % of the window is less)"
    ]


@pytest.mark.parametrize(
    ("limits", "duration_s", "told"),
    [
        (Limits(), 183.738, "9.19 s (5 % of the window)"),
        (Limits(max_stall_ms=1500), 183.738, "1.5 s"),
        (Limits(), 0.5, "50 ms (that of a single pause: 5 % of the window is less)"),
        (Limits(max_pause_ms=0.5), 0.02, "1.00 ms (5 % of the window)"),
        (Limits(max_stall_share=None), 60.0, "none"),
    ],
)
def test_the_limit_of_stalls_is_told_with_its_unit_and_where_it_comes_from(
    limits: Limits, duration_s: float, told: str
) -> None:
    assert limits.stall(duration_s)[1] == told


async def test_growth_over_the_limit_or_not_known_is_named(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    mib = 1 << 20
    engine, sidecar = await start(start_engine, start_sidecar)
    for name in ("worker-0-0", "worker-0-1"):
        numbers = {"anonymous_bytes": 100 * mib, "device_allocated_bytes": 7 * mib}
        engine.set_process(name, numbers=numbers)
    await until_memory(sidecar, 100 * mib, processes=2)
    await opened(sidecar, max_growth_bytes=10 * mib)
    engine.set_process("worker-0-0", numbers={"anonymous_bytes": 110 * mib})
    engine.set_process(
        "worker-0-1", numbers={"anonymous_bytes": 111 * mib, "device_allocated_bytes": 5 * mib}
    )
    engine.set_process("engine_core-0-0", numbers={"anonymous_bytes": None})
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["growth_over_limit", "growth_unknown"]
    assert details(verdict, "growth_over_limit") == [
        "worker dp0 rank 1: grew by 11.0 MiB, the limit is 10.0 MiB"
    ]
    assert details(verdict, "growth_unknown")[0].startswith("engine_core dp0 rank 0")
    growth = {
        name: (
            process(verdict, name)["growth_bytes"],
            process(verdict, name)["device_growth_bytes"],
        )
        for name in ("worker-0-0", "worker-0-1", "engine_core-0-0", "api_server-0-0")
    }
    assert growth == {
        "worker-0-0": (10 * mib, None),
        "worker-0-1": (11 * mib, -2 * mib),
        "engine_core-0-0": (None, None),
        "api_server-0-0": (0, None),
    }


async def test_a_process_that_restarted_in_it_is_named_and_its_successor_counts_from_zero(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    engine.collect("worker-0-1", 0.001, times=50)
    await sidecar.until_recorded(50)
    await opened(sidecar)
    engine.collect("worker-0-1", 0.002)
    await sidecar.until_recorded(51)
    engine.restart("worker-0-1")
    engine.collect("worker-0-1", 0.003)
    await sidecar.until_recorded(52)
    verdict = await closed(sidecar)
    # The stand-in is born with three collections of which no record tells.
    assert reason_codes(verdict) == ["lost_records", "process_restarted"]
    assert details(verdict, "process_restarted") == ["worker dp0 rank 1 is not the process it was"]
    both = [p for p in verdict["processes"] if (p["role"], p["rank"]) == ("worker", 1)]
    assert sorted(p["pauses"]["gen2"]["count"] for p in both) == [1, 4]
    assert [p["read_to_the_end"] for p in both] == [False, True]


async def test_a_change_that_had_not_reached_every_process_at_the_opening_is_named(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    engine.set_process("worker-0-1", slow_s=0.5)
    change = asyncio.create_task(sidecar.client.post("/gc/freeze?operation_id=late"))
    await sidecar.until(lambda status: status["operation"] is not None)
    await opened(sidecar)
    assert (await change).status_code == 200
    verdict = await closed(sidecar)
    assert verdict["policy"] == {"at_opening": "freeze", "at_closing": "freeze"}
    assert details(verdict, "policy_changed") == ["operation late by anonymous was a freeze"]


async def test_a_process_that_came_and_went_in_it_is_held_against_the_limits(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    engine.restart("worker-0-1")
    engine.collect("worker-0-1", 0.2)
    await sidecar.until_recorded(1)
    engine.restart("worker-0-1")
    await sidecar.until(lambda s: {p["state"] for p in s["processes"]} == {"applied"})
    await asyncio.sleep(0.2)
    verdict = await closed(sidecar)
    assert "worker dp0 rank 1: a full collection of 200 ms, the limit is 50 ms" in details(
        verdict, "pause_over_limit"
    )
    there = [p for p in verdict["processes"] if (p["role"], p["rank"]) == ("worker", 1)]
    assert len(there) == 3, "the one before, this one, and the one after it"


async def test_a_whole_engine_that_restarts_in_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    engine.restart()
    await sidecar.until(lambda s: {p["state"] for p in s["processes"]} == {"applied"})
    verdict = await closed(sidecar)
    assert set(reason_codes(verdict)) >= {"process_restarted"}
    assert len(details(verdict, "process_restarted")) == 4


async def test_a_process_that_ended_or_appeared_in_it_is_named(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar, "ending")
    engine.collect("worker-0-1", 0.004)
    await sidecar.until_recorded(1)
    engine.set_process("worker-0-1", dead=True)
    await sidecar.until(lambda s: any(p["state"] == "gone" for p in s["processes"]))
    verdict = await closed(sidecar, "ending")
    assert reason_codes(verdict) == ["process_gone"]
    assert details(verdict, "process_gone") == ["worker dp0 rank 1 has ended"]
    assert process(verdict, "worker-0-1")["pauses"]["gen2"]["count"] == 1
    assert process(verdict, "worker-0-1")["read_to_the_end"] is False
    await opened(sidecar, "appearing")
    engine.restart("worker-0-1")
    await sidecar.until(lambda s: {p["state"] for p in s["processes"]} == {"applied"})
    verdict = await closed(sidecar, "appearing")
    # The stand-in is born with three collections of which no record tells.
    assert reason_codes(verdict) == ["lost_records", "process_appeared"]
    assert details(verdict, "process_appeared") == [
        "worker dp0 rank 1 was not there at the opening"
    ]


async def test_processes_of_which_nothing_is_left_are_gone(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Any
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar, dp=2, behaviour={"rpc": "plugin"})
    await opened(sidecar)
    engine.stop()
    for page in run_dir.glob("*.page"):
        page.unlink()
    smaller = start_engine(dp=1)
    await sidecar.until(lambda s: len([p for p in s["processes"] if p["state"] == "applied"]) == 4)
    verdict = await closed(sidecar)
    assert "process_gone" in reason_codes(verdict)
    assert {"worker dp1 rank 1 is gone", "engine_core dp1 rank 0 is gone"} <= set(
        details(verdict, "process_gone")
    )
    smaller.stop()


async def test_a_process_without_a_page_is_not_seen_and_one_that_is_missing_neither(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await start(
        start_engine, start_sidecar, processes={"worker-0-1": {"page_error": "no space"}}
    )
    await opened(sidecar)
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["process_unseen"]
    assert details(verdict, "process_unseen") == [
        "worker dp0 rank 1 has no page, so its pauses are not seen"
    ]
    board_only = await start_sidecar(timing=QUICK)
    await board_only.until_seen("board", 4)
    await opened(board_only)
    verdict = await closed(board_only)
    assert reason_codes(verdict) == ["process_unseen"]
    assert "no_agent" not in details(verdict, "process_unseen")[0]
    assert "no page of it" in details(verdict, "process_unseen")[0]


async def test_a_process_that_stands_still_did_not_tell_its_last_moments(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    engine.set_process("worker-0-1", still=True)
    started = time.monotonic()
    verdict = await closed(sidecar)
    assert QUICK.window_close_s <= time.monotonic() - started < 5
    assert reason_codes(verdict) == ["process_silent"]
    assert process(verdict, "worker-0-1")["read_to_the_end"] is False
    assert process(verdict, "worker-0-0")["read_to_the_end"] is True


async def test_with_no_process_at_all_nothing_is_clean(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar(timing=QUICK)
    await opened(sidecar)
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["no_process"]
    assert verdict["processes"] == []


async def test_what_an_engine_left_that_was_gone_before_is_no_process(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    for name in ("api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1"):
        engine.set_process(name, dead=True)
    await sidecar.until(lambda s: {p["state"] for p in s["processes"]} == {"gone"})
    await opened(sidecar)
    assert reason_codes(await closed(sidecar)) == ["no_process"]


async def test_a_change_of_policy_or_a_maintenance_in_it_is_named(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar, "changed")
    await sidecar.client.post("/gc/freeze?operation_id=cold")
    verdict = await closed(sidecar, "changed")
    assert reason_codes(verdict) == ["policy_changed"]
    assert details(verdict, "policy_changed") == ["operation cold by anonymous was a freeze"]
    assert verdict["policy"] == {"at_opening": "off", "at_closing": "freeze"}
    assert [(o["id"], o["kind"], o["state"]) for o in verdict["operations"]] == [
        ("cold", "freeze", "applied")
    ]
    await opened(sidecar, "maintained")
    await sidecar.client.post("/gc/maintain?operation_id=between")
    verdict = await closed(sidecar, "maintained")
    assert reason_codes(verdict) == ["maintained"]
    assert details(verdict, "maintained") == ["operation between by anonymous collected in it"]
    await opened(sidecar, "there-and-back")
    await sidecar.client.post("/gc/restore")
    await sidecar.client.post("/gc/freeze")
    verdict = await closed(sidecar, "there-and-back")
    assert reason_codes(verdict) == ["policy_changed"]
    assert verdict["policy"] == {"at_opening": "freeze", "at_closing": "freeze"}


async def test_what_no_remembered_operation_tells_is_noticed_all_the_same(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await sidecar.client.post("/gc/freeze")
    await opened(sidecar)
    await sidecar.client.post("/gc/restore")
    await sidecar.client.post("/gc/freeze")
    for name in ("worker-0-0", "worker-0-1"):
        engine.set_process(name, numbers={"maintains": 1})
    # As after more than 256 renewals of the lease.
    ledger = sidecar.services.coordinator.ledger
    ledger._operations.clear()
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["maintained", "policy_changed"]
    assert details(verdict, "policy_changed") == [
        "it was freeze (policy generation 1) and is freeze (policy generation 3)"
    ]


async def test_renewing_and_reading_leave_it_clean(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await start(start_engine, start_sidecar)
    await sidecar.client.post("/gc/freeze?owner=me")
    await opened(sidecar)
    assert (await sidecar.client.post("/gc/freeze?owner=me")).status_code == 200
    assert (await sidecar.client.post("/gc/lease?owner=me")).status_code == 200
    assert (await sidecar.client.post("/gc/freeze?owner=other")).status_code == 409
    for path in ("/gc", "/metrics", "/gc/pauses"):
        assert (await sidecar.client.get(path)).status_code == 200
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == []
    assert verdict["operations"] == []


async def test_a_policy_that_ended_by_itself_is_named_with_who_left_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await sidecar.client.post("/gc/freeze?lease_s=1")
    await opened(sidecar)
    engine.set_process("worker-0-1", leave="rss_growth")
    await sidecar.until(lambda s: s["coverage"]["acknowledged"] == 3)
    open_ = (await seen(sidecar))["verdict"]
    assert reason_codes(open_) == ["incomplete_coverage", "policy_ended"]
    assert details(open_, "policy_ended") == ["worker dp0 rank 1 left the policy: rss_growth"]
    assert details(open_, "incomplete_coverage") == ["3 of 4 processes have the policy"]
    await sidecar.until(lambda s: s["policy"]["mode"] == "off")
    await sidecar.until(lambda s: {p["mode"] for p in s["processes"]} == {"off"})
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["policy_changed", "policy_ended"]
    assert set(details(verdict, "policy_ended")) == {
        "worker dp0 rank 1 left the policy: rss_growth",
        "worker dp0 rank 0 left the policy: lease_expired",
        "engine_core dp0 rank 0 left the policy: lease_expired",
        "api_server dp0 rank 0 left the policy: lease_expired",
    }


# --- a collection that runs at the closing ---


async def test_a_collection_that_still_runs_at_the_closing_counts_as_far_as_it_has_come(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar, max_stall_ms=1)
    engine.set_process("worker-0-1", collecting_since_ns=77)
    await sidecar.until(lambda s: any(p["collecting_for_s"] for p in s["processes"]))
    engine.set_process("worker-0-1", still=True)
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["pause_over_limit", "stall_over_limit"]
    assert process(verdict, "worker-0-1")["read_to_the_end"] is False
    (running,) = verdict["pauses"]
    assert (running["trigger"], running["rank"], running["gc_generation"]) == ("running", 1, 2)
    assert running == verdict["longest_pause"]
    assert running["duration_s"] >= QUICK.window_close_s
    # The stall ends with the window, while the collection goes on.
    assert verdict["stalls"][0]["stall_s"] < running["duration_s"]


async def test_the_stall_of_one_that_was_first_seen_by_the_closing_counts_from_where_it_began(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    # It looks so seldom that only the closing sees it.
    sidecar = await start_sidecar(engine, timing=replace(QUICK, sight_poll_s=30.0))
    await sidecar.until_seen("plugin", 4)
    await opened(sidecar, max_stall_ms=100)
    began_s = time.monotonic()
    engine.set_process("worker-0-1", collecting_since_ns=time.monotonic_ns())
    await asyncio.sleep(0.2)  # the collection itself
    engine.set_process("worker-0-1", still=True)
    closing_s = time.monotonic()
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == ["pause_over_limit", "stall_over_limit"]
    assert 0.2 <= verdict["stalls"][0]["stall_s"] <= time.monotonic() - began_s
    assert closing_s - began_s <= verdict["longest_pause"]["duration_s"]


async def test_one_that_ends_while_the_window_is_closed_counts_with_its_real_length(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    sidecar = await start_sidecar(engine, timing=replace(QUICK, window_close_s=10.0))
    await sidecar.until_seen("plugin", 4)
    await opened(sidecar)
    engine.set_process("worker-0-1", collecting_since_ns=77)
    await sidecar.until(lambda s: any(p["collecting_for_s"] for p in s["processes"]))
    engine.set_process("worker-0-1", still=True)
    closing = asyncio.create_task(closed(sidecar))
    await until_state(sidecar, "closing")
    engine.collect("worker-0-1", 1.5, start_s=-1.0)
    engine.set_process("worker-0-1", collecting_since_ns=0, still=False)
    verdict = await closing
    assert process(verdict, "worker-0-1")["read_to_the_end"] is True
    assert process(verdict, "worker-0-1")["pauses"]["gen2"]["max_s"] == 1.5
    assert [each["trigger"] for each in verdict["pauses"]] == ["auto"]


async def test_a_young_collection_that_still_runs_at_the_closing_counts_as_far_as_it_has_come(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    running_ns = time.monotonic_ns() - 300_000_000
    # On one publication only: it has ended since.
    engine.set_process("worker-0-0", numbers={"running_since_ns": running_ns}, still=True)
    await asyncio.sleep(0.1)
    engine.set_process("worker-0-0", numbers={"running_since_ns": 0}, still=False)
    engine.set_process("worker-0-1", numbers={"running_since_ns": running_ns})
    await asyncio.sleep(0.2)
    verdict = await closed(sidecar)
    (detail,) = details(verdict, "pause_over_limit")
    assert detail.startswith("worker dp0 rank 1: a young collection that still runs, of ")
    (pause,) = (p for p in verdict["pauses"] if p["trigger"] == "running")
    assert pause["gc_generation"] is None
    assert pause["duration_s"] > 0.3


async def test_one_that_began_after_the_closing_is_not_of_the_window(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    # Keeps the closing waiting.
    engine.set_process("worker-0-0", still=True)
    closing = asyncio.create_task(closed(sidecar))
    await until_state(sidecar, "closing")
    await seen(sidecar)  # each of these reads all pages
    await seen(sidecar)
    engine.set_process("worker-0-1", collecting_since_ns=time.monotonic_ns())
    engine.collect("engine_core-0-0", 0.3)
    verdict = await closing
    assert reason_codes(verdict) == ["process_silent"]
    assert verdict["pauses"] == []
    assert process(verdict, "engine_core-0-0")["pauses"]["gen2"]["count"] == 0


# --- opening and closing ---


async def test_closing_many_times_at_once_gives_one_verdict(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    engine.collect("worker-0-1", 0.06)
    await asyncio.sleep(0.08)
    answers = await asyncio.gather(*(sidecar.client.post("/gc/windows/w/close") for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert reason_codes(answers[0].json()["window"]["verdict"]) == ["pause_over_limit"]
    assert sidecar.services.coordinator.knowledge.sight.log.listeners == []


async def test_a_caller_that_leaves_closes_it_nevertheless(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    engine.set_process("worker-0-1", still=True)
    leaving = asyncio.create_task(sidecar.services.windows.close("w"))
    await until_state(sidecar, "closing")
    leaving.cancel()
    await asyncio.wait({leaving})
    assert leaving.cancelled()
    window_ = await until_state(sidecar, "closed")
    assert reason_codes(window_["verdict"]) == ["process_silent"]


async def test_one_who_asks_while_it_is_closed_gets_no_half_verdict(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    engine.collect("worker-0-1", 0.5, start_s=-1.0, times=3)
    await sidecar.until_recorded(3)
    await opened(sidecar)
    closing = asyncio.create_task(closed(sidecar))
    while not closing.done():
        for window_ in await asyncio.gather(*(seen(sidecar) for _ in range(5))):
            assert window_["verdict"]["reasons"] == []
    assert reason_codes(await closing) == []


async def test_a_closing_that_fails_can_be_tried_again_and_its_end_stays_where_it_was(
    start_engine: StartEngine, start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(verdicts, "_over_limits", fail)
    with pytest.raises(RuntimeError):
        await sidecar.services.windows.close("w")
    monkeypatch.undo()
    assert (await seen(sidecar))["state"] == "closing"
    engine.collect("worker-0-1", 0.06)  # after its end
    await sidecar.until_recorded(1)
    verdict = await closed(sidecar)
    assert reason_codes(verdict) == []
    assert process(verdict, "worker-0-1")["pauses"]["gen2"]["count"] == 0


async def test_the_same_id_again_is_the_same_window_and_with_other_fields_a_conflict(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await start(start_engine, start_sidecar)
    fields = {"window_id": "mine", "name": "run 1", "max_pause_ms": 10}
    answers = await asyncio.gather(
        *(sidecar.client.post("/gc/windows", json=fields) for _ in range(4))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert {answer.json()["window"]["opened_at"] for answer in answers} == {
        answers[0].json()["window"]["opened_at"]
    }
    (new,) = (answer for answer in answers if answer.status_code == 201)
    assert new.headers["location"] == "/gc/windows/mine"
    assert "location" not in next(a for a in answers if a.status_code == 200).headers
    assert sidecar.services.windows.open_count == 1
    for other in ({"max_pause_ms": 11}, {"name": "run 2"}, {"max_stall_ms": 5}):
        answer = await sidecar.client.post("/gc/windows", json={**fields, **other})
        assert_problem(answer, 409, "window_id_reused")
    await closed(sidecar, "mine")
    answer = await sidecar.client.post("/gc/windows", json=fields)
    problem = assert_problem(answer, 409, "window_id_reused")
    assert problem["detail"] == "window mine is closed"


async def test_a_window_that_nobody_opened_is_404(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar(timing=QUICK)
    assert_problem(await sidecar.client.get("/gc/windows/none"), 404, "window_not_found")
    assert_problem(await sidecar.client.post("/gc/windows/none/close"), 404, "window_not_found")
    assert (await sidecar.client.get("/gc/windows")).json() == {"windows": []}
    table = await sidecar.client.get("/gc/windows?format=table")
    assert table.text.startswith("no window has been opened: ")
    assert "(POST /gc/windows) opens one" in table.text


async def test_only_so_many_are_open_at_once_and_metrics_tell(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar(timing=QUICK)
    for index in range(16):
        await opened(sidecar, f"w{index}")
    problem = assert_problem(await sidecar.client.post("/gc/windows"), 409, "too_many_windows")
    assert "w0" in problem["detail"]
    assert "w15" in problem["detail"]
    assert "gc_sidecar_window_open 16.0" in (await sidecar.open_client.get("/metrics")).text
    await closed(sidecar, "w7")
    assert (await sidecar.client.post("/gc/windows")).status_code == 201
    listed = (await sidecar.client.get("/gc/windows")).json()["windows"]
    assert all("verdict" not in each for each in listed), "a list is short"
    assert {each["clean"] for each in listed} == {False, None}, "known of those that are closed"
    ids = [each["id"] for each in listed]
    assert ids[1:] == [f"w{index}" for index in reversed(range(16))]


async def test_the_oldest_closed_ones_are_forgotten_and_open_ones_never(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar(timing=QUICK)
    await opened(sidecar, "for-ever")
    for index in range(300):
        await sidecar.services.windows.open(f"w{index}", None, Limits())
        await sidecar.services.windows.close(f"w{index}")
    known = sidecar.services.windows.all()
    assert len(known) == 256
    assert known[-1].id == "for-ever"
    assert [known[0].id, known[-2].id] == ["w299", "w45"]
    assert_problem(await sidecar.client.get("/gc/windows/w44"), 404, "window_not_found")


async def test_what_is_judged_holds_nothing_more_than_its_verdict(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar)
    engine.collect("worker-0-1", 1e-6, times=900)
    await sidecar.until_recorded(900)
    verdict = await closed(sidecar)
    assert len(verdict["pauses"]) == verdicts.LISTED
    assert verdict["pauses_not_listed"] == 900 - verdicts.LISTED
    window_ = sidecar.services.windows.get("w")
    kept = (window_.longest, window_.sums, window_.identities, window_.pages, window_.holders)
    assert not any(kept)
    assert not window_.held_up.by_rank
    assert not window_.known_operations


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("/gc/windows", {"max_pause_ms": -1}, "invalid_field"),
        ("/gc/windows", {"max_pause_ms": "50"}, "invalid_field"),
        ("/gc/windows", {"max_pause_ms": None}, "invalid_field"),
        ("/gc/windows", {"max_growth_bytes": 1.5}, "invalid_field"),
        ("/gc/windows", {"window_id": "a b"}, "invalid_field"),
        ("/gc/windows", {"name": "a\nb"}, "invalid_field"),
        ("/gc/windows", {"owner": "me"}, "unknown_field"),
        ("/gc/windows/w/close", {"force": True}, "unknown_field"),
    ],
)
async def test_fields_that_make_no_sense_open_and_close_nothing(
    start_sidecar: StartSidecar, path: str, fields: dict[str, Any], code: str
) -> None:
    sidecar = await start_sidecar(timing=QUICK)
    await opened(sidecar)
    assert_problem(await sidecar.client.post(path, json=fields), 422, code)
    assert [(w.id, w.state) for w in sidecar.services.windows.all()] == [("w", "open")]


async def test_windows_are_shown_as_tables_too(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    fields = {"window_id": "w", "name": "run 1"}
    answer = await sidecar.client.post("/gc/windows?format=table", json=fields)
    assert answer.status_code == 201
    assert answer.text.startswith("window w (run 1) is open: clean so far, ")
    engine.collect("worker-0-1", 0.06)
    await asyncio.sleep(0.08)
    table = (await sidecar.client.post("/gc/windows/w/close?format=table")).text
    document = (await sidecar.client.get("/gc/windows/w")).json()
    assert table == show_window(document) + "\n"
    assert table.startswith("window w (run 1) is closed: NOT clean, ")
    assert "pause_over_limit: worker dp0 rank 1: a full collection of 60.0 ms" in table
    assert "stall   dp0 60.0 ms" in table
    assert "unseen  the GC of the client" in table
    listed = (await sidecar.client.get("/gc/windows?format=table")).text
    assert listed == show_windows((await sidecar.client.get("/gc/windows")).json()) + "\n"


# --- the engine's own latency ---


def tokens(gaps: list[float], steps: int) -> str:
    return exposition({0: gaps}, {0: steps})


async def test_the_verdict_tells_whether_gc_explains_the_stalls_of_the_engine(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    behaviour = {"metrics": tokens([0.02] * 100, 100)}
    engine, sidecar = await start(start_engine, start_sidecar, behaviour=behaviour)
    await opened(sidecar, "other")
    await opened(sidecar, "gc")
    engine.set(metrics=tokens([0.02] * 1100 + [0.9], 1101))
    other = (await closed(sidecar, "other"))["latency"]
    assert other["says"] == "not the server's GC"
    assert other["stalled_s"] == pytest.approx(0.88, rel=0.15)
    assert (other["gc_s"], other["explained"], other["tokens"]) == (0.0, 0.0, 1001)
    engine.collect("worker-0-1", 0.7)
    await asyncio.sleep(0.75)
    gc = (await closed(sidecar, "gc"))["latency"]
    assert gc["says"] == "mostly the server's GC"
    assert gc["gc_s"] == pytest.approx(0.7)
    assert gc["explained"] == pytest.approx(0.7 / 0.88, rel=0.15)


async def test_tokens_that_come_evenly_need_no_explanation(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(
        start_engine, start_sidecar, behaviour={"metrics": tokens([0.02] * 9, 9)}
    )
    await opened(sidecar)
    engine.set(metrics=tokens([0.02] * 1009, 1009))
    latency = (await closed(sidecar))["latency"]
    assert (latency["says"], latency["explained"]) == ("tokens came evenly", None)


ODD_METRICS = [
    {"metrics_hang_s": 3},
    {"metrics": "x" * (9 << 20)},
    {"metrics": "vllm:inter_token_latency_seconds_bucket{\x00"},
    {"metrics": 'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} NaN\n'},
    {"running": None},
    {"away": True},
]


@pytest.mark.parametrize("behaviour", ODD_METRICS, ids=lambda each: next(iter(each)))
async def test_an_engine_with_odd_metrics_holds_nothing_up(
    start_engine: StartEngine, start_sidecar: StartSidecar, behaviour: dict[str, Any]
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    engine.set(**behaviour)
    started = time.monotonic()
    await asyncio.gather(*(opened(sidecar, f"w{index}") for index in range(6)))
    verdicts = await asyncio.gather(*(closed(sidecar, f"w{index}") for index in range(6)))
    assert time.monotonic() - started < 3, "neither hangs, and no window waits for another"
    for verdict in verdicts:
        assert verdict["latency"]["says"].startswith("unknown")
        assert reason_codes(verdict) == []


async def test_one_engine_that_does_not_answer_takes_no_latency_from_the_others(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    first = start_engine(
        dp_ranks=[0], external=True, behaviour={"metrics": exposition({0: []}, {0: 0})}
    )
    second = start_engine(dp_ranks=[1], external=True, behaviour={"metrics_hang_s": 9})
    sidecar = await start_sidecar(first, second, timing=replace(QUICK, engine_metrics_s=1.5))
    await sidecar.until(lambda s: s["coverage"]["acknowledged"] == 8)
    await opened(sidecar)
    first.set(metrics=exposition({0: [0.02] * 100}, {0: 100}))
    assert (await closed(sidecar))["latency"]["says"] == "tokens came evenly"


# --- one whose owner was killed ---


async def test_a_window_is_closed_when_nobody_asked_for_it_for_as_long_as_its_owner_said(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine, timing=replace(QUICK, window_keep_s=0.02))
    await sidecar.until(lambda s: s["coverage"]["expected"] == 4)
    for window_id, patience in (("kept", None), ("asked-for", 30), ("abandoned", 30)):
        fields = {"window_id": window_id, "abandon_after_s": patience}
        assert (await sidecar.client.post("/gc/windows", json=fields)).status_code == 201
    windows = sidecar.services.windows
    for measured in windows.all():
        measured.asked_s -= 31
    assert (await sidecar.client.get("/gc/windows/asked-for")).status_code == 200
    deadline = time.monotonic() + 10
    while windows.open_count > 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    states = {each.id: each.state for each in windows.all()}
    assert states == {"kept": "open", "asked-for": "open", "abandoned": "closed"}


async def test_a_patience_that_is_none_is_refused(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.post("/gc/windows", json={"abandon_after_s": 1})
    assert_problem(answer, 422, "invalid_field")


# --- what a hostile page says ---

EXTREMES = [-(1 << 62), -1, 0, 1, 1 << 62, (1 << 63) - 1]


@pytest.mark.parametrize("extreme", EXTREMES)
async def test_whatever_numbers_a_page_holds_a_window_is_judged(
    start_engine: StartEngine, start_sidecar: StartSidecar, extreme: int
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    await opened(sidecar, max_growth_bytes=1, max_stall_ms=1)
    numbers = {name: extreme for name in NUMBER_NAMES if name != "heartbeat"}
    engine.collect("worker-0-1", 0.001, times=3)
    engine.set_process("worker-0-1", numbers=numbers)
    await until_memory(sidecar, extreme)
    for style in ("json", "table"):
        for path in ("/gc/windows/w", "/gc/pauses", "/gc"):
            answer = await sidecar.client.get(f"{path}?format={style}")
            assert answer.status_code == 200, answer.text
    verdict = await closed(sidecar)
    gen2 = process(verdict, "worker-0-1")["pauses"]["gen2"]
    assert gen2["count"] >= 0
    assert gen2["lost_records"] >= 0
    assert (await sidecar.client.get("/gc/windows/w?format=table")).status_code == 200
