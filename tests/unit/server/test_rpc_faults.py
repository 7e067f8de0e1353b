"""Faults of the RPC: each has a name, none is believed, and what can still be done is done over the board."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gc_sidecar.server.timing import Timing
from gc_sidecar.server.transports import is_too_old
from tests.unit.server.conftest import FAST, Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
TP2 = ("api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1")


async def reason_codes(sidecar: Sidecar) -> list[str]:
    return [reason["code"] for reason in (await sidecar.status())["reasons"]]


async def test_a_reply_of_another_call_is_a_desync_and_ends_all_rpc_until_a_restart(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set(answer="wrong_id")
    answer = await sidecar.client.post("/gc/freeze")
    assert answer.status_code == 200, "the pages prove it all the same"
    status = await sidecar.status()
    assert status["transport"] == "board"
    assert status["reasons"][0]["code"] == "rpc_desync"
    assert "worker dp0 rank 1" in status["reasons"][0]["detail"]
    assert "restart" in status["reasons"][0]["remedy"]
    assert "gc_sidecar_rpc_desync_total 1.0" in (await sidecar.open_client.get("/metrics")).text
    ready = (await sidecar.open_client.get("/readyz")).json()
    assert ready["ready"] is True, "the board still works"
    assert "rpc_desync" in {reason["code"] for reason in ready["reasons"]}
    engine.set(answer="ok")
    sent = len(engine.calls())
    assert (await sidecar.client.post("/gc/restore")).status_code == 200
    assert len(engine.calls()) == sent
    engine.restart()
    await sidecar.until_seen("plugin", 4)
    assert "rpc_desync" not in await reason_codes(sidecar)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    assert len(engine.calls()) > sent


async def test_a_desync_without_a_run_directory_leaves_no_way_until_the_engine_was_away(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    engine.set(answer="wrong_id")
    problem = assert_problem(await sidecar.client.post("/gc/freeze"), 502, "rpc_desync")
    assert problem["rolled_back"] == "unknown"
    assert (await sidecar.status())["transport"] == "unavailable"
    ready = await sidecar.open_client.get("/readyz")
    assert_problem(ready, 503, "not_ready")
    sent = len(engine.calls())
    assert_problem(await sidecar.client.post("/gc/restore"), 502, "rpc_desync")
    assert len(engine.calls()) == sent
    engine.set(away=True, answer="ok")
    await sidecar.until(lambda s: {p["state"] for p in s["processes"]} == {"stale"})
    engine.restart()
    engine.set(away=False)
    status = await sidecar.until_seen("dev", 4)
    assert status["reasons"] == []
    assert (await sidecar.client.post("/gc/restore")).status_code == 200


@pytest.mark.parametrize("answer", ["404", "500", "501", "503", "hang_up", "huge", "redirect"])
async def test_an_rpc_that_fails_leaves_it_to_the_board(
    start_engine: StartEngine, start_sidecar: StartSidecar, answer: str
) -> None:
    engine = start_engine()
    # Time enough for the whole of an answer, however long, to come before the board is tried beside it.
    sidecar = await start_sidecar(engine, timing=replace(FAST, board_after_s=5.0))
    await sidecar.until_seen("plugin", 4)
    engine.set(answer=answer)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    reasons = (await sidecar.status())["reasons"]
    assert any(reason["detail"] for reason in reasons)
    assert (await sidecar.status())["coverage"] == {"acknowledged": 4, "expected": 4}


@pytest.mark.parametrize("answer", ["500", "hang_up", "malformed"])
async def test_a_failed_rpc_is_told_until_the_engine_is_well_again(
    start_engine: StartEngine, start_sidecar: StartSidecar, answer: str
) -> None:
    engine = start_engine()
    timing = replace(FAST, observe_retry_s=0.2)
    sidecar = await start_sidecar(engine, timing=timing)
    await sidecar.until_seen("plugin", 4)
    engine.set(answer=answer)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    if answer != "hang_up":  # it answers all other questions: nothing to complain of any more
        assert await reason_codes(sidecar) != []
    engine.set(answer="ok")
    await sidecar.until(lambda s: s["reasons"] == [])
    assert {call["kind"] for call in engine.calls()} <= {"freeze", "observe"}
    asked = len(engine.calls())
    await asyncio.sleep(0.4)
    assert len(engine.calls()) == asked, "and then it is left alone"


async def test_an_engine_whose_rpc_keeps_failing_is_tried_less_and_less_often(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"answer": "500"})
    sidecar = await start_sidecar(engine, timing=replace(FAST, observe_retry_s=0.05))
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200, "over the board"
    await asyncio.sleep(0.9)  # at 0.05, 0.1, 0.2, 0.4 and 0.8 s, and not yet at 1.6 s
    assert 2 <= [call["kind"] for call in engine.calls()].count("observe") <= 5
    assert "engine_http_500" in await reason_codes(sidecar)


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ("404", 502, "engine_http_404"),
        ("500", 502, "engine_http_500"),
        ("501", 502, "engine_http_501"),
        ("hang_up", 502, "engine_hung_up"),
        ("huge", 502, "engine_answer_too_large"),
        ("redirect", 502, "engine_http_307"),
        ("malformed", 502, "reply_malformed"),
    ],
)
async def test_without_a_board_the_fault_is_the_answer(
    start_engine: StartEngine, start_sidecar: StartSidecar, answer: str, status: int, code: str
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    engine.set(answer=answer)
    problem = assert_problem(await sidecar.client.post("/gc/freeze?deadline_s=3"), status, code)
    assert problem["operation"]["state"] in ("failed", "unknown")


async def test_an_rpc_that_hangs_is_overtaken_by_the_board(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set(hang=60)
    started = time.monotonic()
    assert (await sidecar.client.post("/gc/freeze?deadline_s=10")).status_code == 200
    assert time.monotonic() - started < 3


async def test_an_rpc_that_hangs_without_a_board_is_unknown_at_the_deadline(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    engine.set(hang=60)
    started = time.monotonic()
    problem = assert_problem(
        await sidecar.client.post("/gc/freeze?deadline_s=0.5"), 504, "outcome_unknown"
    )
    assert time.monotonic() - started < 3
    assert problem["operation"]["state"] == "unknown"
    assert problem["rolled_back"] == "unknown"
    assert "/gc/restore" in problem["remedy"]


async def test_a_method_that_is_missing_is_never_called(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev", "names": ["execute_method"]})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until(lambda s: "agent_not_loaded" in {r["code"] for r in s["reasons"]})
    assert (await sidecar.status())["transport"] == "none"
    problem = assert_problem(await sidecar.client.post("/gc/freeze"), 503, "engine_not_seen")
    assert "no agent" in problem["detail"]
    assert {call.get("method") for call in engine.calls()} == {"__dir__"}


async def test_the_method_is_proven_again_when_other_processes_may_be_there(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    engine.set(names=["execute_method"])  # another engine was started there
    problem = assert_problem(await sidecar.client.post("/gc/freeze"), 502, "agent_not_loaded")
    assert problem["rolled_back"] is True, "nothing had been sent"
    assert [call.get("kind") for call in engine.calls()].count("freeze") == 0


async def test_with_pages_that_show_the_same_processes_it_is_proven_once(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("dev", 4)
    for path in ("freeze", "maintain", "restore"):
        assert (await sidecar.client.post(f"/gc/{path}")).status_code == 200
    proofs = [call for call in engine.calls() if call.get("method") == "__dir__"]
    assert len(proofs) <= 2


async def test_the_secret_is_needed_and_read_anew(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other-token"
    other.write_text("cd" * 32)
    engine = start_engine(token_file=str(other))
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200, "over the board"
    assert "endpoint_token_wrong" in await reason_codes(sidecar)
    assert engine.calls() == []
    engine.set(token_file=str(run_dir / "endpoint.token"))
    assert (await sidecar.client.post("/gc/restore")).status_code == 200
    assert [call["kind"] for call in engine.calls()][-1] == "restore"
    assert await reason_codes(sidecar) == []


async def test_a_plugin_without_a_secret_is_told(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None)
    sidecar = await start_sidecar(engine, run_dir=None)
    status = await sidecar.until(lambda s: len(s["reasons"]) >= 2)
    assert "endpoint_token_missing" in {reason["code"] for reason in status["reasons"]}
    remedies = {reason["code"]: reason["remedy"] for reason in status["reasons"]}
    assert "--engine-token-file" in remedies["endpoint_token_missing"]


async def test_a_secret_that_cannot_be_read_is_told_with_its_file(
    start_engine: StartEngine, start_sidecar: StartSidecar, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_text("")
    engine = start_engine(run_dir=None)
    sidecar = await start_sidecar(engine, run_dir=None, engine_token_file=str(path))
    status = await sidecar.until(
        lambda s: "endpoint_token_missing" in {r["code"] for r in s["reasons"]}
    )
    details = {reason["code"]: reason["detail"] for reason in status["reasons"]}
    assert f"--engine-token-file {path}" in details["endpoint_token_missing"]


@pytest.mark.parametrize(
    ("rpc", "codes"),
    [
        ("none", {"plugin_not_loaded", "dev_mode_off"}),
        ("500", {"plugin_not_loaded", "engine_http_500"}),
        ("501", {"plugin_not_loaded", "engine_http_501"}),
    ],
)
async def test_why_there_is_no_rpc_is_told_with_a_remedy(
    start_engine: StartEngine, start_sidecar: StartSidecar, rpc: str, codes: set[str]
) -> None:
    engine = start_engine(behaviour={"rpc": rpc})
    sidecar = await start_sidecar(engine)
    status = await sidecar.until(lambda s: len(s["reasons"]) >= 2)
    assert {reason["code"] for reason in status["reasons"]} == codes
    assert status["transport"] == "board"
    ready = (await sidecar.open_client.get("/readyz")).json()
    assert {reason["code"] for reason in ready["reasons"]} == codes


async def test_an_engine_below_the_floor_gets_no_rpc(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(version="0.24.9")
    sidecar = await start_sidecar(engine)
    await sidecar.until(lambda s: [r["code"] for r in s["reasons"]] == ["engine_too_old"])
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200, "over the board"
    assert engine.calls() == []


@pytest.mark.parametrize(
    ("version", "too_old"),
    [
        ("0.24.0", True), ("0.9.1", True), ("0.25.0", False), ("0.32.0+cpu", False), ("1.0", False),
        ("0.24.0rc1", True), ("0.24.1.post1", True),
        ("0.1.dev10000+g0abcdef", False), ("dev", False), ("", False), ("nightly", False),
    ],
)  # fmt: skip
def test_development_builds_count_as_new(version: str, too_old: bool) -> None:
    assert is_too_old(version) is too_old


async def test_an_engine_that_comes_later_is_found_without_a_storm(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        timing = replace(FAST, first_retry_s=0.2, last_retry_s=0.4)
        sidecar = await start_sidecar(timing=timing, engine_url=(url,))
        await sidecar.until(lambda s: "engine_unreachable" in {r["code"] for r in s["reasons"]})
    started = time.monotonic()
    ready = await sidecar.open_client.get("/readyz")
    assert_problem(ready, 503, "not_ready")
    assert time.monotonic() - started < 1


async def test_an_engine_is_asked_at_once_where_its_processes_come(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"away": True})
    for name in TP2:
        engine.set_process(name, dead=True)
    timing = replace(FAST, first_retry_s=30.0, last_retry_s=30.0)
    sidecar = await start_sidecar(engine, timing=timing)
    await sidecar.until(lambda s: "engine_hung_up" in {r["code"] for r in s["reasons"]})
    engine.set(away=False)
    engine.restart()
    await sidecar.until_seen("plugin", 4)


def test_an_engine_that_is_not_there_is_asked_every_few_seconds() -> None:
    assert Timing().last_retry_s == 5.0


async def test_while_an_operation_runs_the_engine_is_asked_nothing(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"rpc": "none"})
    # Time enough for the question that comes before the operation to be answered.
    sidecar = await start_sidecar(engine, timing=replace(FAST, board_after_s=1.0))
    await sidecar.until_seen("board", 4)
    engine.set_process("worker-0-0", deaf=True)
    change = asyncio.create_task(sidecar.client.post("/gc/freeze?deadline_s=2"))
    await sidecar.until(lambda s: s["operation"] and s["operation"]["generation"] is not None)
    engine.set(rpc="dev")
    while (await sidecar.status())["operation"] is not None:
        asked = engine.calls()
        if (await sidecar.status())["operation"] is not None:
            assert asked == []
    assert (await change).status_code == 504
    await sidecar.until_seen("dev", 4)
