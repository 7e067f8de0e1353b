"""Freeze and restore: all processes or none, owners, retries, and what is told about each process."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.server.operations import Change, Ledger, Operation
from gc_sidecar_agent.board import read_board
from tests.unit.server.conftest import FAST, StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
TP2 = ("api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1")


def names(processes: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(f"{p['role']}-{p['dp_rank']}-{p['rank']}" for p in processes)


def modes(engine: StandInEngine, processes: tuple[str, ...] = TP2) -> set[str]:
    return {engine.process(name)["mode"] for name in processes}


async def test_freeze_reaches_every_process_and_the_answer_names_each(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    answer = await sidecar.client.post("/gc/freeze", json={"owner": "bench-1", "lease_s": 90})
    assert answer.status_code == 200
    operation = answer.json()["operation"]
    assert operation["state"] == "applied"
    assert operation["generation"] == 1
    assert names(operation["processes"]) == TP2
    assert all(process["ok"] for process in operation["processes"])
    assert {process["pause_s"] for process in operation["processes"]} == {0.01}
    assert {process["collected_objects"] for process in operation["processes"]} == {7}
    assert {process["resident_delta_bytes"] for process in operation["processes"]} == {-4096}
    lease = answer.json()["lease"]
    assert lease["renew"] == ("curl -X POST 'http://localhost:9470/gc/lease?owner=bench-1'")
    status = await sidecar.status()
    assert status["coverage"] == {"acknowledged": 4, "expected": 4}
    assert status["policy"]["mode"] == "freeze"
    assert status["policy"]["owner"] == "bench-1"
    assert status["policy"]["entered_at"].endswith("Z")
    assert {row["state"] for row in status["processes"]} == {"applied"}
    assert {row["gc"]["threshold"][2] for row in status["processes"]} == {1 << 30}
    row = status["processes"][0]
    assert row["memory"]["anonymous_bytes"] == 1 << 20
    assert row["memory"]["growth_bytes"] is None
    assert row["pauses"]["gen2"] == {"count": 3, "total_s": 0.9, "max_s": 0.4}
    assert len(engine.changes()) == 1, "one RPC, and no other one to look"


async def test_restore_puts_everything_back_and_may_be_repeated(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze")
    for generation in (2, 3):
        answer = await sidecar.client.post("/gc/restore")
        assert answer.status_code == 200
        assert answer.json()["operation"]["generation"] == generation
        assert "lease" not in answer.json()
        assert modes(engine) == {"off"}
    assert (await sidecar.status())["policy"]["mode"] == "off"


async def test_the_board_alone_is_enough(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar()
    await sidecar.until_seen("board", 4)
    for path, mode in (("freeze", "freeze"), ("maintain", "freeze"), ("restore", "off")):
        answer = await sidecar.client.post(f"/gc/{path}")
        assert answer.status_code == 200, answer.text
        operation = answer.json()["operation"]
        assert operation["transport"] == "board"
        assert all(process["ok"] for process in operation["processes"])
        assert modes(engine) == {mode}
    assert engine.calls() == []


async def test_dev_mode_proves_the_method_before_its_first_use(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("dev", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    methods = [call.get("method", call.get("kind")) for call in engine.calls()]
    assert methods[0] == "__dir__"
    assert methods[-1] == "freeze"
    assert all("timeout" not in call for call in engine.calls())


async def test_data_parallel_processes_are_the_union_of_what_all_know(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(dp=2, workers=1, api_servers=2)
    sidecar = await start_sidecar(engine)
    status = await sidecar.until_seen("plugin", 6)
    assert names(status["processes"]) == (
        "api_server-0-0", "api_server-0-1", "engine_core-0-0", "engine_core-1-0",
        "worker-0-0", "worker-1-0",
    )  # fmt: skip
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200


async def test_a_process_with_several_roles_is_one_row_and_runs_once(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(one_process=True, workers=1)
    sidecar = await start_sidecar(engine)
    status = await sidecar.until_seen("plugin", 1)
    assert status["processes"][0]["roles"] == ["api_server", "engine_core", "worker"]
    answer = await sidecar.client.post("/gc/maintain", json={"operation_id": "once"})
    assert answer.status_code == 200, "its two replies are one"
    assert len(answer.json()["operation"]["processes"]) == 1
    assert engine.process("api_server-0-0")["ran"] == ["once"]


@pytest.mark.parametrize("rpc", ["plugin", "none"])
async def test_a_process_that_refuses_has_all_others_rolled_back(
    start_engine: StartEngine, start_sidecar: StartSidecar, rpc: str
) -> None:
    refuse = {"code": "collector_unsupported", "detail": "incremental"}
    engine = start_engine(processes={"worker-0-1": {"refuse": refuse}}, behaviour={"rpc": rpc})
    sidecar = await start_sidecar(engine, timing=replace(FAST, unseen_grace_s=20.0))
    await sidecar.until_seen("plugin" if rpc == "plugin" else "board", 4)
    started = time.monotonic()
    problem = assert_problem(await sidecar.client.post("/gc/freeze"), 502, "collector_unsupported")
    assert time.monotonic() - started < 10, "who has spoken is not waited for"
    assert problem["rolled_back"] is True
    assert "worker dp0 rank 1: incremental" in problem["detail"]
    assert problem["detail"].endswith("; what had been changed was rolled back")
    lines = {n: p for n, p in zip(TP2, problem["operation"]["processes"], strict=True)}
    assert lines["worker-0-1"]["code"] == "collector_unsupported"
    assert lines["worker-0-0"]["ok"] is True
    assert problem["operation"]["state"] == "rolled_back"
    assert modes(engine) == {"off"}
    policy = (await sidecar.status())["policy"]
    assert (policy["mode"], policy["generation"]) == ("off", 2)


async def test_a_refusal_is_a_state_of_the_process(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    refuse = {"code": "collector_unsupported", "detail": "incremental"}
    engine = start_engine(processes={"worker-0-1": {"refuse": refuse}})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    answer = await sidecar.client.post("/gc/freeze?allow_partial=true")
    assert answer.status_code == 200
    assert answer.json()["operation"]["state"] == "partial"
    status = await sidecar.status()
    assert status["coverage"] == {"acknowledged": 3, "expected": 4}
    assert status["processes"][3]["state"] == "refused"
    assert status["processes"][3]["reason"] == "collector_unsupported: incremental"


async def test_a_failed_freeze_is_told_with_its_own_code(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    engine.set_process("worker-0-0", fail={"code": "freeze_failed", "detail": "made to fail"})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    problem = assert_problem(await sidecar.client.post("/gc/freeze"), 502, "freeze_failed")
    assert "made to fail" in problem["detail"]
    assert problem["rolled_back"] is True
    assert modes(engine) == {"off"}
    row = (await sidecar.status())["processes"][2]
    assert row["state"] == "applied", "the rollback brought it back in line"
    assert row["reason"].startswith("freeze_failed: "), "and it still tells why it failed"


async def test_rolling_back_brings_the_freeze_before_back(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze?interval_s=11")).status_code == 200
    engine.set_process("worker-0-0", fail={"code": "collector_busy", "kinds": ["freeze"]})
    engine.set_process("worker-0-0", fail=None, deaf=True)
    problem = assert_problem(
        await sidecar.client.post("/gc/freeze?interval_s=22&deadline_s=0.3"),
        504,
        "outcome_unknown",
    )
    assert problem["rolled_back"] == "unknown", "the deaf one cannot confirm it"
    assert "it is being rolled back" in problem["detail"]
    assert "POST /gc/restore" in problem["remedy"]
    status = await sidecar.status()
    assert status["policy"]["mode"] == "freeze"
    assert status["policy"]["interval_s"] == 11.0
    assert status["policy"]["generation"] == 3
    policy = read_board(str(run_dir)).policy
    assert policy is not None
    assert (policy.interval_s, policy.generation, policy.collect_first) == (11.0, 3, False)
    engine.set_process("worker-0-0", deaf=False)
    await sidecar.until(lambda s: s["coverage"] == {"acknowledged": 4, "expected": 4})


async def test_an_incomplete_restore_tells_of_no_rollback(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze")
    engine.set_process("worker-0-1", deaf=True)
    answer = await sidecar.client.post("/gc/restore?deadline_s=0.3")
    problem = assert_problem(answer, 504, "outcome_unknown")
    assert "rolled_back" not in problem
    assert problem["operation"].pop("rolled_back") is None
    assert "roll" not in json.dumps(problem), "a restore is never undone"
    assert "stays wanted" in problem["detail"]
    assert (await sidecar.status())["policy"]["mode"] == "off", "it stays wanted"


async def test_the_detail_of_an_incomplete_change_names_the_processes_and_no_more(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(workers=8)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 10)
    for rank in range(8):
        engine.set_process(f"worker-0-{rank}", deaf=True)
    answer = await sidecar.client.post("/gc/freeze?deadline_s=0.5")
    problem = assert_problem(answer, 504, "outcome_unknown")
    assert problem["detail"] == (
        "2 of 10 processes did it before the deadline; not worker dp0 rank 0 (no_answer),"
        " worker dp0 rank 1 (no_answer), worker dp0 rank 2 (no_answer), worker dp0 rank 3 (no_answer),"
        " worker dp0 rank 4 (no_answer) and 3 more; it is being rolled back, which not every process has shown yet"
    )
    assert all(p["detail"] for p in problem["operation"]["processes"][2:])


async def test_a_missing_rank_is_named_and_the_others_are_rolled_back(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(processes={"worker-0-1": {"page_error": "No space left on device"}})
    engine.set_process("worker-0-1", deaf=True)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    problem = assert_problem(await sidecar.client.post("/gc/freeze"), 502, "incomplete_coverage")
    assert "worker dp0 rank 1" in problem["detail"]
    assert problem["rolled_back"] is True
    assert problem["operation"]["processes"][3]["code"] == "no_agent"
    assert modes(engine, TP2[:3]) == {"off"}


async def test_laggards_get_it_from_the_board(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(dp=2, workers=1, behaviour={"answer": "workers_of_first"})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 5)
    answer = await sidecar.client.post("/gc/freeze")
    assert answer.status_code == 200, "the first engine's workers replied, the rest read the board"
    assert len(answer.json()["operation"]["processes"]) == 5


async def test_the_processes_without_a_page_are_proven_by_their_replies(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(processes={"worker-0-1": {"page_error": "No space left on device"}})
    sidecar = await start_sidecar(engine)
    status = await sidecar.until(lambda s: s["processes"][3:] and s["processes"][3]["pid"])
    assert [r["code"] for r in status["reasons"]] == ["page_error"]
    assert "No space left on device" in status["reasons"][0]["detail"]
    answer = await sidecar.client.post("/gc/freeze")
    assert answer.status_code == 200, answer.text
    assert (await sidecar.status())["coverage"] == {"acknowledged": 4, "expected": 4}


async def test_a_page_is_believed_rather_than_a_reply(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-0", still=True, deaf_to_board=True, lie=True)
    problem = assert_problem(
        await sidecar.client.post("/gc/freeze?deadline_s=0.3"), 504, "outcome_unknown"
    )
    assert problem["operation"]["processes"][2]["ok"] is False


async def test_a_remote_engine_is_controlled_by_replies_alone(
    start_engine: StartEngine, start_sidecar: StartSidecar, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("ab" * 32)
    engine = start_engine(run_dir=None, token_file=str(token))
    sidecar = await start_sidecar(engine, run_dir=None, engine_token_file=str(token))
    status = await sidecar.until_seen("plugin", 4)
    assert {row["state"] for row in status["processes"]} == {"applied"}
    assert [call["kind"] for call in engine.calls()] == ["observe"], "asked once, never polled"
    for path, mode in (("freeze", "freeze"), ("maintain", "freeze"), ("restore", "off")):
        answer = await sidecar.client.post(f"/gc/{path}")
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["operation"]["processes"]) == 4
        assert modes(engine) == {mode}
    engine.set_process("worker-0-1", silent=True)
    problem = assert_problem(await sidecar.client.post("/gc/freeze"), 502, "incomplete_coverage")
    assert problem["operation"]["processes"][3]["code"] == "no_reply"
    assert problem["rolled_back"] == "unknown"
    assert modes(engine) == {"off"}


async def test_several_engines_are_one(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    first = start_engine(workers=1, dp_ranks=[0])
    second = start_engine(workers=1, dp_ranks=[1], api_servers=0)
    sidecar = await start_sidecar(first, second)
    await sidecar.until_seen("plugin", 5)
    answer = await sidecar.client.post("/gc/freeze")
    assert answer.status_code == 200
    assert names(answer.json()["operation"]["processes"])[-1] == "worker-1-0"
    assert [len(engine.calls()) for engine in (first, second)] == [1, 1]


async def test_launches_behind_an_external_load_balancer_do_not_hide_each_other(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    launches = [start_engine(workers=1, dp_ranks=[rank], external=True) for rank in (0, 1)]
    sidecar = await start_sidecar(*launches)
    status = await sidecar.until_seen("plugin", 6)
    assert names(status["processes"]) == (
        "api_server-0-0", "api_server-1-0", "engine_core-0-0", "engine_core-1-0",
        "worker-0-0", "worker-1-0",
    )  # fmt: skip
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    launches[0].set_process("api_server-0-0", deaf=True)
    answer = await sidecar.client.post("/gc/restore?deadline_s=0.3")
    problem = assert_problem(answer, 504, "outcome_unknown")
    assert "api_server dp0 rank 0" in problem["detail"]


# --- owners ---


async def test_another_owner_ends_a_policy_only_with_force(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze?owner=bench-1")
    for path in ("freeze", "maintain", "restore", "lease"):
        problem = assert_problem(
            await sidecar.client.post(f"/gc/{path}?owner=bench-2"), 409, "owned_by_other"
        )
        assert problem["owner"] == "bench-1"
        assert "force=true" in problem["remedy"]
    assert_problem(await sidecar.client.post("/gc/restore"), 409, "owned_by_other")
    assert (await sidecar.status())["policy"]["generation"] == 1
    answer = await sidecar.client.post("/gc/freeze?owner=bench-2&force=true")
    assert answer.status_code == 200
    assert (await sidecar.status())["policy"]["owner"] == "bench-2"
    assert (await sidecar.client.post("/gc/restore?owner=bench-2")).status_code == 200


async def test_the_line_that_renews_a_lease_works_for_any_owner(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await start_sidecar(start_engine(workers=1))
    await sidecar.until_seen("plugin", 3)
    owner = "bench & co #1/2 'a'"
    answer = await sidecar.client.post("/gc/freeze", json={"owner": owner})
    *_, url = shlex.split(answer.json()["lease"]["renew"])
    renewed = await sidecar.client.post(url)
    assert renewed.status_code == 200, renewed.text
    assert renewed.json()["operation"]["owner"] == owner


async def test_freeze_again_by_the_same_owner_renews_the_lease_and_nothing_else(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    first = (await sidecar.client.post("/gc/freeze?lease_s=60")).json()
    again = await sidecar.client.post("/gc/freeze?lease_s=600")
    assert again.status_code == 200
    assert again.json()["operation"]["state"] == "applied"
    assert again.json()["operation"]["generation"] == first["operation"]["generation"]
    assert len(again.json()["operation"]["processes"]) == 4
    assert again.json()["lease"]["expires_at"] > first["lease"]["expires_at"]
    assert len(engine.changes()) == 1, "the board renews a lease"


async def test_freeze_again_where_a_process_lost_it_applies_it_anew(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze")
    engine.set_process("worker-0-0", leave="rss_growth")
    status = await sidecar.until(lambda s: s["coverage"]["acknowledged"] == 3)
    assert status["processes"][2]["state"] == "drifted"
    assert status["processes"][2]["reason"].startswith("rss_growth")
    again = await sidecar.client.post("/gc/freeze")
    assert again.status_code == 200
    assert again.json()["operation"]["generation"] == 2
    assert (await sidecar.status())["coverage"]["acknowledged"] == 4


# --- one at a time, retries ---


async def test_a_second_caller_gets_the_running_operation(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-0", slow_s=0.4)
    first = asyncio.create_task(sidecar.client.post("/gc/freeze?operation_id=first"))
    await sidecar.until(lambda status: status["operation"] is not None)
    status = await sidecar.status()
    assert status["operation"]["id"] == "first"
    assert status["operation"]["state"] == "running"
    for path in ("freeze", "maintain", "restore", "lease"):
        answer = await sidecar.client.post(f"/gc/{path}")
        problem = assert_problem(answer, 409, "operation_running")
        assert problem["operation_id"] == "first"
        assert answer.headers["location"] == "/gc/operations/first"
    assert (await first).status_code == 200
    assert (await sidecar.status())["operation"] is None


async def test_of_many_callers_at_once_exactly_one_gets_through(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    answers = await asyncio.gather(*(sidecar.client.post("/gc/freeze") for _ in range(50)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 49
    assert len(engine.changes()) == 1


async def test_a_retry_gets_the_recorded_operation(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    body = {"operation_id": "mine", "owner": "me"}
    first = await sidecar.client.post("/gc/freeze", json=body)
    again = await sidecar.client.post("/gc/freeze", json={**body, "deadline_s": 5})
    assert again.json()["operation"] == first.json()["operation"]
    assert len(engine.changes()) == 1
    for path, fields in (("freeze", {"interval_s": 5}), ("maintain", {})):
        problem = assert_problem(
            await sidecar.client.post(f"/gc/{path}", json={**body, **fields}),
            409,
            "operation_id_reused",
        )
        assert "mine" in problem["detail"]
    recorded = await sidecar.client.get("/gc/operations/mine")
    assert recorded.json()["operation"] == first.json()["operation"]


async def test_a_retry_while_it_runs_joins_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-0", slow_s=0.3)
    answers = await asyncio.gather(
        *(sidecar.client.post("/gc/freeze?operation_id=same") for _ in range(3))
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [call.get("kind") for call in engine.calls()].count("freeze") == 1


async def test_a_retry_of_a_failure_gets_the_same_failure(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(processes={"worker-0-1": {"refuse": {"code": "collector_unsupported"}}})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    first = await sidecar.client.post("/gc/freeze?operation_id=x")
    again = await sidecar.client.post("/gc/freeze?operation_id=x")
    assert first.status_code == again.status_code == 502
    assert first.json() == again.json()
    recorded = (await sidecar.client.get("/gc/operations/x")).json()["operation"]
    assert recorded["state"] == "rolled_back"
    assert recorded["code"] == "collector_unsupported"


async def test_an_operation_outlives_its_caller(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-0", slow_s=0.3)
    caller = asyncio.create_task(sidecar.client.post("/gc/freeze?operation_id=left"))
    await sidecar.until(lambda status: status["operation"] is not None)
    caller.cancel()
    await sidecar.until(lambda status: status["operation"] is None)
    recorded = (await sidecar.client.get("/gc/operations/left")).json()["operation"]
    assert recorded["state"] == "applied"


async def test_the_last_256_operations_are_kept_and_a_running_one_always() -> None:
    ledger = Ledger()
    ledger.put(Operation(Change("maintain", "running"), requested_at=0.0))
    for number in range(300):
        ledger.put(Operation(Change("restore", f"op-{number}"), 0.0, state="applied"))
    assert ledger.get("running") is not None
    assert ledger.get("op-44") is None
    assert ledger.get("op-45") is not None


# --- nobody there ---


async def test_without_any_engine_a_change_is_refused_at_once(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    for path in ("freeze", "maintain"):
        assert_problem(await sidecar.client.post(f"/gc/{path}"), 503, "engine_not_seen")
    assert (await sidecar.status())["policy"]["generation"] == 0


async def test_restore_with_nobody_there_still_goes_to_whoever_comes(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    sidecar = await start_sidecar()
    assert_problem(await sidecar.client.post("/gc/restore"), 503, "engine_not_seen")
    policy = read_board(str(run_dir)).policy
    assert policy is not None
    assert policy.kind == "restore"


async def test_restore_with_nobody_there_is_quick_and_changes_nothing_twice(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    sidecar = await start_sidecar(timing=replace(FAST, unseen_grace_s=30.0))
    for _ in range(3):
        started = time.monotonic()
        problem = assert_problem(await sidecar.client.post("/gc/restore"), 503, "engine_not_seen")
        assert time.monotonic() - started < 5
        assert "stays wanted" in problem["detail"]
        assert problem["operation"]["generation"] == 1
    assert (await sidecar.status())["policy"]["generation"] == 1
    policy = read_board(str(run_dir)).policy
    assert policy is not None
    assert policy.generation == 1
    engine = start_engine()
    await sidecar.until_seen("board", 4)
    assert (await sidecar.client.post("/gc/restore")).json()["operation"]["generation"] == 2
    for name in TP2:
        engine.set_process(name, dead=True)
    await sidecar.until(lambda s: {p["state"] for p in s["processes"]} == {"gone"})
    for _ in range(2):
        problem = assert_problem(
            await sidecar.client.post("/gc/restore"), 502, "incomplete_coverage"
        )
        assert {p["code"] for p in problem["operation"]["processes"]} == {"process_gone"}
        assert problem["operation"]["generation"] == 2
    assert (await sidecar.client.post("/gc/freeze")).status_code == 503


@pytest.mark.parametrize(("rpc", "deadline_s"), [("plugin", 0.1), ("none", 0.2)])
async def test_a_short_deadline_has_one_answer_that_tells_what_was_done(
    start_engine: StartEngine, start_sidecar: StartSidecar, rpc: str, deadline_s: float
) -> None:
    engine = start_engine(behaviour={"rpc": rpc})
    sidecar = await start_sidecar(engine, timing=replace(FAST, rollback_least_s=3.0))
    await sidecar.until_seen("plugin" if rpc == "plugin" else "board", 4)
    engine.set_process("worker-0-0", slow_s=0.4)
    answer = await sidecar.client.post(f"/gc/freeze?deadline_s={deadline_s}")
    problem = assert_problem(answer, 504, "outcome_unknown")
    assert problem["rolled_back"] is True
    assert problem["operation"]["state"] == "rolled_back"
    assert " of 4 processes did it before the deadline; not " in problem["detail"]
    assert problem["detail"].endswith("; what had been changed was rolled back")
    assert "deadline_s" in problem["remedy"]
    assert "may still" not in answer.text
    assert modes(engine) == {"off"}


async def test_a_refusal_is_told_rather_than_the_deadline(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(processes={"worker-0-1": {"refuse": {"code": "collector_unsupported"}}})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-0", deaf=True)
    answer = await sidecar.client.post("/gc/freeze?deadline_s=0.5")
    problem = assert_problem(answer, 502, "collector_unsupported")
    assert problem["rolled_back"] == "unknown"


async def test_an_engine_that_starts_is_waited_for(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"rpc": "none"})
    for name in TP2:
        engine.set_process(name, starting=True)
    sidecar = await start_sidecar(engine)
    await sidecar.until(lambda s: [row["ready"] for row in s["processes"]] == [False] * 4)
    ready = await sidecar.open_client.get("/readyz")
    assert "engine_starting" in {reason["code"] for reason in ready.json()["reasons"]}
    change = asyncio.create_task(sidecar.client.post("/gc/freeze"))
    await sidecar.until(lambda s: s["processes"][0]["state"] == "pending")
    for name in TP2:
        engine.set_process(name, starting=False)
    assert (await change).status_code == 200
