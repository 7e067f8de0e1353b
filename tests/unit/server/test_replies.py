"""Replies are kept for processes without a page, and for no longer than these may live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.conftest import Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
NO_PAGE = {"page_error": "No space left on device"}


def places(status: dict[str, Any]) -> list[str]:
    return [f"{p['role']}-{p['dp_rank']}-{p['rank']} {p['state']}" for p in status["processes"]]


async def assert_works(sidecar: Sidecar, processes: int) -> None:
    """Every process is there, and operations reach them all."""
    status = await sidecar.until(
        lambda s: s["coverage"] == {"acknowledged": processes, "expected": processes}
    )
    assert len(status["processes"]) == processes
    for path in ("freeze", "maintain", "restore"):
        answer = await sidecar.client.post(f"/gc/{path}?deadline_s=2")
        assert answer.status_code == 200, answer.text
    assert (await sidecar.open_client.get("/readyz")).json()["ready"] is True


def remove_pages(run_dir: Path) -> None:
    """As the agents of an engine that starts do, each those of its own place."""
    for page in run_dir.glob("*.page"):
        page.unlink()


@pytest.mark.parametrize("pages_stay", [True, False])
@pytest.mark.parametrize("had_page", [True, False])
async def test_an_engine_that_comes_back_smaller_and_without_rpc_is_covered(
    start_engine: StartEngine,
    start_sidecar: StartSidecar,
    run_dir: Path,
    pages_stay: bool,
    had_page: bool,
) -> None:
    engine = start_engine(processes={} if had_page else {"worker-0-1": NO_PAGE})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    for path in ("freeze", "restore"):
        assert (await sidecar.client.post(f"/gc/{path}")).status_code == 200
    engine.stop()
    await sidecar.until(lambda s: s["coverage"]["acknowledged"] == 0)
    if not pages_stay:
        remove_pages(run_dir)
    start_engine(workers=1)
    if pages_stay:
        for role in ("api_server-dp0-r0", "engine_core-dp0-r0", "worker-dp0-r0"):
            min(run_dir.glob(f"{role}-*.page"), key=lambda page: page.stat().st_ctime_ns).unlink()
    await assert_works(sidecar, 3)


async def test_a_restart_that_is_faster_than_a_look_leaves_nothing_behind(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine(processes={"worker-0-1": NO_PAGE})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.stop()
    remove_pages(run_dir)
    start_engine(workers=1)
    await assert_works(sidecar, 3)


async def test_a_process_whose_page_is_gone_is_gone_until_a_reply_says_otherwise(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    asked = len(engine.calls())
    engine.set_process("worker-0-1", silent=True)
    next(run_dir.glob("worker-dp0-r1-*.page")).unlink()
    status = await sidecar.until(lambda s: "worker-0-1 uncovered" in places(s))
    assert status["coverage"] == {"acknowledged": 3, "expected": 4}
    engine.set_process("worker-0-1", silent=False)
    assert (await sidecar.client.post("/gc/maintain")).status_code == 200, "its reply proves it"
    assert (await sidecar.status())["coverage"] == {"acknowledged": 4, "expected": 4}
    assert {call["kind"] for call in engine.calls()[asked:]} <= {"observe", "maintain"}


async def test_a_page_that_vanishes_is_asked_after_once(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    next(run_dir.glob("worker-dp0-r1-*.page")).unlink()
    await sidecar.until(lambda s: len(engine.calls()) == 2)
    assert engine.calls()[1]["kind"] == "observe"
    await sidecar.until(lambda s: places(s)[3] == "worker-0-1 applied")


async def test_a_successor_with_a_page_replaces_a_reply_of_its_place(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(processes={"worker-0-1": NO_PAGE})
    sidecar = await start_sidecar(engine)
    await sidecar.until(lambda s: places(s)[3:] == ["worker-0-1 applied"])
    engine.set_process("worker-0-1", page_error=None)
    engine.restart("worker-0-1")
    await sidecar.until(lambda s: s["reasons"] == [])
    engine.set_process("worker-0-1", dead=True)
    await sidecar.until(lambda s: places(s)[3:] == ["worker-0-1 gone"])


async def test_without_pages_a_reply_of_another_engine_core_ends_all_before_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = await start_sidecar(engine, run_dir=None)
    await sidecar.until_seen("dev", 4)
    engine.set_process("worker-0-1", dead=True)
    engine.restart("engine_core-0-0")
    engine.restart("worker-0-0")
    await sidecar.client.post("/gc/freeze?allow_partial=true")
    status = await sidecar.status()
    assert places(status)[3] == "worker-0-1 uncovered"
