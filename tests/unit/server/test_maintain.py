"""Maintenance: per-process results, waiting for an idle engine, and going on after the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.board import Board, read_board, write_board
from gc_sidecar_agent.command import Command
from tests.unit.server.conftest import FAST, StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]


async def test_maintain_tells_what_every_process_reclaimed_and_changes_no_policy(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze")
    answer = await sidecar.client.post("/gc/maintain?operation_id=m&trim=true")
    assert answer.status_code == 200
    operation = answer.json()["operation"]
    assert operation["generation"] == 1
    for line in operation["processes"]:
        assert (line["pause_s"], line["collected_objects"]) == (0.01, 7)
        assert line["resident_delta_bytes"] == -4096
    assert engine.calls()[-1]["trim"] is True
    assert engine.process("worker-0-0")["ran"].count("m") == 1
    assert (await sidecar.status())["policy"]["mode"] == "freeze"
    board = read_board(str(run_dir))
    assert board.maintain is None, "a process that starts later must not find it"
    assert board.policy is not None


async def test_a_collection_that_did_not_happen_is_told_with_its_code(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-1", fail={"code": "collector_busy", "detail": "in a finalizer"})
    problem = assert_problem(await sidecar.client.post("/gc/maintain"), 502, "collector_busy")
    assert problem["operation"]["state"] == "failed"
    assert "rolled_back" not in problem
    partial = await sidecar.client.post("/gc/maintain?allow_partial=true")
    assert partial.json()["operation"]["state"] == "partial"


async def test_one_that_would_take_too_long_is_refused_unless_it_is_forced(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine, max_maintain_pause_s=1.0)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/maintain")).status_code == 200, "nothing is known yet"
    engine.set_process("worker-0-1", numbers={"anonymous_bytes": 1 << 30})
    await sidecar.until(lambda status: has_memory(status, 1 << 30))
    engine.collect("worker-0-1", 0.4, trigger="maintain")
    # It may have met a heap that was frozen, so it does not tell.
    engine.collect("worker-0-1", 0.001, trigger="explicit", start_s=0.5)
    await sidecar.until_recorded(2)
    assert (await sidecar.client.post("/gc/maintain?deadline_s=5")).status_code == 200
    engine.set_process("worker-0-1", numbers={"anonymous_bytes": 3 << 30})
    await sidecar.until(lambda status: has_memory(status, 3 << 30))
    before = engine.changes()
    problem = assert_problem(await sidecar.client.post("/gc/maintain"), 409, "pause_too_long")
    assert problem["detail"].startswith("worker dp0 rank 1 is expected to stand still for 1.2 s")
    assert problem["expected_pause_s"] == pytest.approx(1.2)
    assert engine.changes() == before
    assert (await sidecar.client.post("/gc/maintain?force=true")).status_code == 200


def has_memory(status: dict[str, Any], anonymous_bytes: int) -> bool:
    return any(p["memory"]["anonymous_bytes"] == anonymous_bytes for p in status["processes"])


async def test_it_waits_until_nothing_runs(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"running": 2, "waiting": 1})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    change = asyncio.create_task(sidecar.client.post("/gc/maintain?when=idle"))
    await sidecar.until(lambda status: status["operation"] is not None)
    engine.set(running=0)
    assert engine.calls() == []
    engine.set(waiting=0)
    assert (await change).status_code == 200
    assert [call["kind"] for call in engine.calls()] == ["maintain"]


async def test_an_engine_that_never_idles_is_left_alone(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"running": 2})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    answer = await sidecar.client.post("/gc/maintain?when=idle&deadline_s=0.3")
    problem = assert_problem(answer, 503, "not_idle")
    assert "2 requests" in problem["detail"]
    assert engine.calls() == []


async def test_without_metrics_idleness_is_not_guessed(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"running": None})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    answer = await sidecar.client.post("/gc/maintain?when=idle")
    assert_problem(answer, 503, "idle_unknown")
    board_only = await start_sidecar()
    await board_only.until_seen("board", 4)
    answer = await board_only.client.post("/gc/maintain?when=idle")
    assert_problem(answer, 503, "idle_unknown")


async def test_one_that_outlasts_its_deadline_is_answered_with_where_to_ask(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-0", slow_s=0.8)
    answer = await sidecar.client.post("/gc/maintain?deadline_s=0.2&operation_id=long")
    assert answer.status_code == 202
    assert answer.headers["location"] == "/gc/operations/long"
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["operation"]["state"] == "running"
    asked = await sidecar.client.get("/gc/operations/long")
    assert asked.status_code == 200
    assert asked.headers["retry-after"] == "1"
    assert asked.json()["operation"]["state"] == "running"
    assert_problem(await sidecar.client.post("/gc/restore"), 409, "operation_running")
    await sidecar.until(lambda status: status["operation"] is None)
    ended = (await sidecar.client.get("/gc/operations/long")).json()["operation"]
    assert ended["state"] == "applied"
    assert ended["duration_s"] >= 0.7


async def test_what_goes_on_is_given_up_at_a_bound(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    timing = replace(FAST, background_limit_s=0.6)
    sidecar = await start_sidecar(engine, timing=timing, run_dir=None)
    await sidecar.until_seen("dev", 4)
    engine.set(hang=60)
    answer = await sidecar.client.post("/gc/maintain?deadline_s=0.3&operation_id=long")
    assert answer.status_code == 202
    started = time.monotonic()
    await sidecar.until(lambda status: status["operation"] is None)
    assert time.monotonic() - started < 3
    ended = (await sidecar.client.get("/gc/operations/long")).json()["operation"]
    assert ended["state"] == "unknown"
    assert ended["code"] == "outcome_unknown"


async def test_over_the_board_alone_a_process_that_collects_is_waited_for_as_well(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar()
    await sidecar.until_seen("board", 4)
    engine.set_process("worker-0-0", slow_s=0.8)
    answer = await sidecar.client.post("/gc/maintain?deadline_s=0.3&operation_id=long")
    assert answer.status_code == 202
    assert answer.headers["location"] == "/gc/operations/long"
    await sidecar.until(lambda status: status["operation"] is None)
    ended = (await sidecar.client.get("/gc/operations/long")).json()["operation"]
    assert ended["state"] == "applied"
    assert ended["duration_s"] >= 0.7


async def test_one_that_never_ends_collecting_is_given_up_at_the_bound(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(timing=replace(FAST, background_limit_s=0.6))
    await sidecar.until_seen("board", 4)
    engine.set_process("worker-0-0", deaf=True, collecting_since_ns=5)
    answer = await sidecar.client.post("/gc/maintain?deadline_s=0.3&operation_id=long")
    assert answer.status_code == 202
    await sidecar.until(lambda status: status["operation"] is None)
    ended = (await sidecar.client.get("/gc/operations/long")).json()["operation"]
    assert (ended["state"], ended["code"]) == ("unknown", "outcome_unknown")
    assert 0.5 < ended["duration_s"] < 3


async def test_over_the_board_alone_the_deadline_ends_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar()
    await sidecar.until_seen("board", 4)
    engine.set_process("worker-0-1", deaf=True)
    answer = await sidecar.client.post("/gc/maintain?deadline_s=0.3")
    problem = assert_problem(answer, 504, "outcome_unknown")
    assert "worker dp0 rank 1" in problem["detail"]
    assert "roll" not in problem["detail"] + problem["remedy"], "nothing is undone"


async def test_a_forced_restore_does_not_wait_for_one_that_hangs(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    engine.set(hang=60)
    engine.set_process("worker-0-0", deaf=True)
    answer = await sidecar.client.post("/gc/maintain?deadline_s=0.3&operation_id=long")
    assert answer.status_code == 202
    engine.set_process("worker-0-0", deaf=False)
    problem = assert_problem(await sidecar.client.post("/gc/restore"), 409, "operation_running")
    assert "/gc/restore?force=true" in problem["remedy"]
    restored = await sidecar.client.post("/gc/restore?force=true&operation_id=now")
    assert restored.status_code == 200, restored.text
    ended = (await sidecar.client.get("/gc/operations/long")).json()["operation"]
    assert (ended["state"], ended["code"]) == ("unknown", "outcome_unknown")
    assert ended["detail"].startswith("now has ended it")
    status = await sidecar.status()
    assert {row["mode"] for row in status["processes"]} == {"off"}


async def test_who_is_ended_by_a_forced_restore_is_told(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set(hang=60)
    engine.set_process("worker-0-0", deaf=True)
    freeze = asyncio.create_task(sidecar.client.post("/gc/freeze?operation_id=ended"))
    await sidecar.until(lambda status: status["operation"] is not None)
    engine.set(hang=0)
    engine.set_process("worker-0-0", deaf=False)
    restore = "/gc/restore?force=true&operation_id=now"
    assert (await sidecar.client.post(restore)).status_code == 200
    problem = assert_problem(await freeze, 504, "outcome_unknown")
    assert problem["detail"].startswith("now has ended it")
    # The same again is the same answer, and ends nothing that came later.
    engine.set_process("worker-0-0", slow_s=0.3)
    later = asyncio.create_task(sidecar.client.post("/gc/freeze"))
    await sidecar.until(lambda status: status["operation"] is not None)
    assert (await sidecar.client.post(restore)).status_code == 200
    assert (await later).status_code == 200


async def test_whatever_comes_at_once_with_forced_restores_the_sidecar_goes_on(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    for _ in range(15):
        asked = ["lease", "freeze", "maintain"] + ["restore?force=true"] * 6
        answers = await asyncio.gather(*(sidecar.client.post(f"/gc/{path}") for path in asked))
        assert {answer.status_code for answer in answers} <= {200, 409, 504}
        assert any(answer.status_code == 200 for answer in answers[3:])
        assert (await sidecar.status())["operation"] is None
        assert (await sidecar.client.post("/gc/restore")).status_code == 200


async def test_only_one_of_many_forced_restores_ends_what_runs(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set(hang=60)
    engine.set_process("worker-0-0", deaf=True)
    assert (await sidecar.client.post("/gc/maintain?deadline_s=0.3")).status_code == 202
    engine.set_process("worker-0-0", deaf=False)
    restores = (sidecar.client.post("/gc/restore?force=true") for _ in range(20))
    answers = await asyncio.gather(*restores)
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 19


async def test_a_maintenance_that_a_dead_sidecar_left_is_not_run_again(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    write_board(str(run_dir), Board(maintain=Command("maintain", "orphan", 0)))
    sidecar = await start_sidecar()
    assert read_board(str(run_dir)).maintain is None
    recorded = (await sidecar.client.get("/gc/operations/orphan")).json()["operation"]
    assert recorded["state"] == "unknown"
