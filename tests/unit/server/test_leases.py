"""Leases: they are renewed, they end, and a sidecar that restarts takes them over from the board."""

from __future__ import annotations

import asyncio
import contextvars
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from gc_sidecar.server.proof import judge_lines
from gc_sidecar.server.reports import parse_report
from gc_sidecar.server.roster import Row
from gc_sidecar.server.sight import PageReading
from gc_sidecar_agent.board import Board, Lease, read_board, write_board
from gc_sidecar_agent.command import Command
from tests.unit.server.conftest import FAST, Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_reports import description
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]


async def test_a_renewal_reaches_every_process_over_the_board(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze?lease_s=50")
    sequence = read_board(str(run_dir)).lease
    answer = await sidecar.client.post("/gc/lease?lease_s=500")
    assert answer.status_code == 200
    assert all(process["ok"] for process in answer.json()["operation"]["processes"])
    assert answer.json()["operation"]["generation"] == 1
    renewed = read_board(str(run_dir)).lease
    assert renewed is not None
    assert sequence is not None
    assert renewed.sequence > sequence.sequence
    assert 498 < renewed.expires_at - time.time() <= 500
    assert len(engine.changes()) == 1, "no RPC was needed"


async def test_without_a_run_directory_a_renewal_goes_over_rpc(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    await sidecar.client.post("/gc/freeze?lease_s=50")
    assert (await sidecar.client.post("/gc/lease?lease_s=500")).status_code == 200
    last = engine.calls()[-1]
    assert last["kind"] == "lease"
    assert 498 < last["lease_s"] <= 500


async def expires_in_s(sidecar: Sidecar) -> float:
    expires_at = (await sidecar.status())["policy"]["lease_expires_at"]
    return datetime.fromisoformat(expires_at.replace("Z", "+00:00")).timestamp() - time.time()


@pytest.mark.parametrize("path", ["/gc/lease", "/gc/freeze", "/gc/policy"])
async def test_a_renewal_that_says_no_length_takes_that_of_the_policy(
    start_engine: StartEngine, start_sidecar: StartSidecar, path: str
) -> None:
    engine = start_engine(workers=1)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 3)
    method, fields = ("PUT", {"mode": "freeze"}) if path == "/gc/policy" else ("POST", {})

    async def renew(lease_s: float | None = None) -> httpx.Response:
        given = {} if lease_s is None else {"lease_s": lease_s}
        answer = await sidecar.client.request(method, path, params={**fields, **given})
        assert answer.status_code == 200
        assert answer.json()["operation"]["generation"] == 1
        return answer

    entered = await sidecar.client.post("/gc/freeze?lease_s=7200")
    await renew()
    assert 7195 < await expires_in_s(sidecar) <= 7200
    *_, url = shlex.split(entered.json()["lease"]["renew"])
    assert (await sidecar.client.post(url)).status_code == 200
    assert 7195 < await expires_in_s(sidecar) <= 7200, "as the answer says how to renew it"
    await renew(100)
    assert 95 < await expires_in_s(sidecar) <= 100
    await renew()
    assert 95 < await expires_in_s(sidecar) <= 100, "it was last renewed for that"
    successor = await start_sidecar(engine)
    assert (await successor.client.post("/gc/lease")).status_code == 200
    assert 95 < await expires_in_s(successor) <= 100, "and the board tells it"


async def test_another_policy_has_a_lease_of_its_own(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await start_sidecar(start_engine(workers=1))
    await sidecar.until_seen("plugin", 3)
    await sidecar.client.post("/gc/freeze?lease_s=50")
    await sidecar.client.post("/gc/freeze?interval_s=5")
    assert 3595 < await expires_in_s(sidecar) <= 3600
    await sidecar.client.post("/gc/freeze?lease_s=50&interval_s=5")
    await sidecar.client.post("/gc/restore")
    await sidecar.client.post("/gc/freeze?interval_s=5")
    assert 3595 < await expires_in_s(sidecar) <= 3600


async def test_whoever_renews_by_force_is_told_a_line_that_works(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await start_sidecar(start_engine(workers=1))
    await sidecar.until_seen("plugin", 3)
    await sidecar.client.post("/gc/freeze?owner=bench-1")
    answer = await sidecar.client.post("/gc/lease?owner=admin&force=true")
    *_, url = shlex.split(answer.json()["lease"]["renew"])
    assert (await sidecar.client.post(url)).status_code == 200


async def test_without_a_policy_there_is_nothing_to_renew(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await start_sidecar(start_engine())
    await sidecar.until_seen("plugin", 4)
    assert_problem(await sidecar.client.post("/gc/lease"), 409, "no_policy")


async def test_a_process_that_left_the_policy_is_named_at_a_renewal(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze")
    engine.set_process("worker-0-1", leave="rss_growth")
    await sidecar.until(lambda s: s["coverage"]["acknowledged"] == 3)
    problem = assert_problem(await sidecar.client.post("/gc/lease"), 502, "not_in_policy")
    assert problem["operation"]["processes"][3]["code"] == "not_in_policy"
    assert "rss_growth" in problem["operation"]["processes"][3]["detail"]
    assert "worker dp0 rank 1" in problem["detail"]
    assert problem["detail"].endswith("the lease of the others was renewed")


async def test_a_process_without_a_page_that_left_the_policy_answers_so(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    await sidecar.client.post("/gc/freeze")
    engine.set_process("worker-0-1", leave="rss_growth")
    assert (await sidecar.status())["coverage"]["acknowledged"] == 4, "nothing could tell"
    problem = assert_problem(await sidecar.client.post("/gc/lease"), 502, "not_in_policy")
    assert [p["ok"] for p in problem["operation"]["processes"]] == [True, True, True, False]
    status = await sidecar.status()
    assert status["processes"][3]["state"] == "drifted"
    assert status["processes"][3]["reason"].startswith("rss_growth")


async def test_freeze_again_enters_it_anew_where_only_the_renewal_told_that_a_process_left(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    await sidecar.client.post("/gc/freeze")
    engine.set_process("worker-0-1", leave="rss_growth")
    answer = await sidecar.client.post("/gc/freeze")
    assert answer.status_code == 200, answer.text
    assert answer.json()["operation"]["generation"] == 2
    assert engine.process("worker-0-1")["mode"] == "freeze"


async def test_a_renewal_that_could_not_be_sent_leaves_the_lease_as_it_was(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    before = (await sidecar.client.post("/gc/freeze?lease_s=50")).json()["lease"]["expires_at"]
    engine.set(answer="500")
    assert_problem(await sidecar.client.post("/gc/lease?lease_s=500"), 502, "engine_http_500")
    after = (await sidecar.status())["policy"]
    assert after["mode"] == "freeze"
    assert after["lease_expires_at"][:18] == before[:18]


async def test_a_renewal_that_nobody_took_is_taken_back_on_the_board_too(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    before = (await sidecar.client.post("/gc/freeze?lease_s=50")).json()["lease"]["expires_at"]
    first = read_board(str(run_dir)).lease
    for name in ("api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1"):
        engine.set_process(name, deaf=True)
    answer = await sidecar.client.post("/gc/lease?lease_s=500&deadline_s=0.3")
    problem = assert_problem(answer, 504, "outcome_unknown")
    assert problem["detail"].endswith("; the lease stays as it was")
    assert (await sidecar.status())["policy"]["lease_expires_at"][:18] == before[:18]
    last = read_board(str(run_dir)).lease
    assert first is not None
    assert last is not None
    assert last.sequence > first.sequence, "or an agent would not read it"
    assert abs(last.expires_at - first.expires_at) < 1


async def test_without_pages_the_end_of_a_lease_is_seen_by_asking_once(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    timing = replace(FAST, first_retry_s=0.2, last_retry_s=1.0, observe_retry_s=0.3)
    sidecar = await start_sidecar(engine, run_dir=None, timing=timing)
    await sidecar.until_seen("dev", 4)
    await sidecar.client.post("/gc/freeze?lease_s=1")
    status = await sidecar.until(lambda s: s["policy"]["mode"] == "off")
    assert {row["state"] for row in status["processes"]} == {"pending"}
    await sidecar.until(lambda s: s["coverage"] == {"acknowledged": 4, "expected": 4})
    await asyncio.sleep(0.4)
    kinds = [call.get("kind") for call in engine.calls()]
    assert kinds[kinds.index("freeze") + 1 :].count("observe") == 1


async def test_a_lease_that_ends_ends_the_desired_policy_too(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze?lease_s=1")
    status = await sidecar.until(lambda s: s["policy"]["mode"] == "off")
    assert status["policy"]["reason"].startswith("lease_expired")
    assert status["policy"]["lease_expires_at"] is None
    assert status["policy"]["generation"] == 1
    table = (await sidecar.client.get("/gc?format=table")).text
    assert f"ended      {status['policy']['reason']}" in table
    status = await sidecar.until(lambda s: s["coverage"]["acknowledged"] == 4)
    assert {row["mode"] for row in status["processes"]} == {"off"}
    await sidecar.until(lambda _: read_board(str(run_dir)).policy is None)
    metrics = (await sidecar.open_client.get("/metrics")).text
    assert (
        'gc_sidecar_policy_exits_total{dp_rank="0",rank="1",reason="lease_expired",role="worker"} 1'
        in metrics
    )
    assert_problem(await sidecar.client.post("/gc/lease"), 409, "no_policy")
    again = await sidecar.client.post("/gc/freeze?owner=other")
    assert again.status_code == 200, "an ended policy belongs to nobody"
    assert again.json()["operation"]["generation"] == 2


async def test_a_sidecar_that_restarts_takes_over_policy_owner_and_lease(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    first = await start_sidecar(engine)
    await first.until_seen("plugin", 4)
    await first.client.post("/gc/freeze?owner=bench-1&lease_s=500&interval_s=9")
    before = (await first.status())["policy"]
    second = await start_sidecar(engine)
    after = (await second.status())["policy"]
    for name in ("mode", "generation", "owner", "interval_s"):
        assert after[name] == before[name]
    assert after["lease_expires_at"][:18] == before["lease_expires_at"][:18]
    assert after["entered_at"] is not None
    assert (await second.status())["coverage"] == {"acknowledged": 4, "expected": 4}
    assert_problem(await second.client.post("/gc/restore"), 409, "owned_by_other")
    renewed = await second.client.post("/gc/lease?owner=bench-1&lease_s=900")
    assert renewed.status_code == 200


async def test_a_sidecar_that_died_between_its_rpc_and_the_board_leaves_its_policy_to_the_next(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    first = await start_sidecar(engine)
    await first.until_seen("plugin", 4)
    await first.client.post("/gc/restore")
    board = (run_dir / "board.json").read_bytes()
    await first.client.post("/gc/freeze?owner=alice&lease_s=500")
    (run_dir / "board.json").write_bytes(board)  # as if it had been killed before it wrote it
    second = await start_sidecar(engine)
    status = await second.until(lambda s: s["coverage"] == {"acknowledged": 4, "expected": 4})
    assert (status["policy"]["mode"], status["policy"]["owner"]) == ("freeze", "alice")
    assert_problem(await second.client.post("/gc/freeze?owner=bob"), 409, "owned_by_other")
    assert (await second.client.post("/gc/lease?owner=alice")).status_code == 200


async def test_while_the_board_cannot_be_written_rpc_does_it_and_the_board_catches_up(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    board = run_dir / "board.json"
    board.unlink()
    board.mkdir()
    assert (await sidecar.client.post("/gc/lease?lease_s=900")).status_code == 200
    assert (await sidecar.client.post("/gc/restore")).status_code == 200
    codes = [reason["code"] for reason in (await sidecar.status())["reasons"]]
    assert "board_not_written" in codes
    board.rmdir()
    await sidecar.until(lambda status: not status["reasons"])
    policy = read_board(str(run_dir)).policy
    assert policy is not None
    assert (policy.kind, policy.generation) == ("restore", 2)


async def test_what_catches_up_with_the_board_writes_what_is_wanted_by_then(
    start_engine: StartEngine,
    start_sidecar: StartSidecar,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    watch, its_run_dir = (
        sidecar.services.coordinator.watch,
        sidecar.services.coordinator.knowledge.run_dir,
    )
    catch_up, claim = watch._catch_up_board, its_run_dir.claim
    catches_up = contextvars.ContextVar("catches_up", default=False)
    is_held, may_go_on, is_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def catch_up_late() -> None:
        if its_run_dir.is_board_behind:
            catches_up.set(True)
            await catch_up()
            catches_up.set(False)
            is_done.set()

    async def claim_late() -> bool:
        if catches_up.get():
            is_held.set()
            await may_go_on.wait()
        return await claim()

    monkeypatch.setattr(watch, "_catch_up_board", catch_up_late)
    monkeypatch.setattr(its_run_dir, "claim", claim_late)
    board = run_dir / "board.json"
    board.unlink()
    board.mkdir()
    assert (await sidecar.client.post("/gc/lease?lease_s=900")).status_code == 200
    await asyncio.wait_for(is_held.wait(), 10)
    board.rmdir()
    assert (await sidecar.client.post("/gc/restore")).status_code == 200
    may_go_on.set()
    await asyncio.wait_for(is_done.wait(), 10)
    policy = read_board(str(run_dir)).policy
    assert policy is not None
    assert (policy.kind, policy.generation) == ("restore", 2)


async def test_a_lease_that_ended_while_no_sidecar_ran_is_over(
    start_sidecar: StartSidecar, run_dir: Path
) -> None:
    command = Command("freeze", "before", 5, owner="bench-1", lease_s=60)
    write_board(str(run_dir), Board(policy=command, lease=Lease(3, 60.0, time.time() - 5)))
    sidecar = await start_sidecar()
    policy = (await sidecar.status())["policy"]
    assert (policy["mode"], policy["generation"], policy["owner"]) == ("off", 5, None)
    assert policy["reason"].startswith("lease_expired")


async def test_a_damaged_board_is_told_and_written_anew(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    (run_dir / "board.json").write_text("{")
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    status = await sidecar.status()
    assert "board_unreadable" in {reason["code"] for reason in status["reasons"]}
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    assert read_board(str(run_dir)).policy is not None
    assert (await sidecar.status())["reasons"] == []


async def test_without_a_board_what_processes_have_is_taken_over(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    first = await start_sidecar(engine, run_dir=None)
    await first.until_seen("dev", 4)
    await first.client.post("/gc/freeze?owner=bench-1&lease_s=500")
    second = await start_sidecar(engine, run_dir=None)
    status = await second.until_seen("dev", 4)
    assert status["policy"]["mode"] == "freeze"
    assert status["policy"]["owner"] == "bench-1"
    assert status["coverage"] == {"acknowledged": 4, "expected": 4}
    answer = await second.client.post("/gc/restore?owner=bench-1")
    assert answer.json()["operation"]["generation"] == 2


async def test_generations_go_on_above_whatever_was_seen(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    write_board(str(run_dir), Board(policy=Command("restore", "before", 41)))
    sidecar = await start_sidecar(start_engine())
    await sidecar.until_seen("plugin", 4)
    answer = await sidecar.client.post("/gc/freeze")
    assert answer.json()["operation"]["generation"] == 42


@pytest.mark.parametrize(
    ("remaining_s", "age_s", "renewed"),
    [
        (60.0, 0.0, True),
        (59.0, 0.5, True),
        (50.5, 10.0, True),  # others are waited for, and it runs meanwhile
        (59.9, 10.0, True),  # it saw the renewal late
        (47.0, 10.0, False),
        (90.0, 0.0, False),
        (50.0, 0.0, False),
    ],
)
def test_a_lease_is_known_by_how_long_it_still_lasts(
    remaining_s: float, age_s: float, renewed: bool
) -> None:
    state = {"ready": True, "mode": "freeze", "generation": 3}
    numbers = {"lease_remaining_ms": int(remaining_s * 1000)}
    report = parse_report(description(state=state), numbers, 0)
    page = PageReading("x", report, True, 0.0, None, None, is_whole=True)
    row = Row(report.identity.keys[0], ("worker",), "applied", None, report, page)
    (line,) = judge_lines(Command("lease", "op", 3, lease_s=60.0), (row,), (), False, age_s)
    assert line.ok is renewed
