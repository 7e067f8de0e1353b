"""What is seen: the state of each process, and why something cannot be seen."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.server import sight as sight_module
from gc_sidecar.server.sight import FIRST_YOUNG, PageReading, Sight
from gc_sidecar_agent.page import PAGE_BYTES
from tests.unit.server.conftest import FAST, Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.vllm.real_vllm import free_port

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]


def row(status: dict[str, Any], name: str) -> dict[str, Any]:
    for process in status["processes"]:
        if f"{process['role']}-{process['dp_rank']}-{process['rank']}" == name:
            return dict(process)
    raise AssertionError(f"{name} has no row")


async def until_state(sidecar: Sidecar, name: str, state: str) -> dict[str, Any]:
    status = await sidecar.until(
        lambda s: (
            any(p["state"] == state for p in s["processes"]) and row(s, name)["state"] == state
        )
    )
    return row(status, name)


async def codes(sidecar: Sidecar) -> set[str]:
    return {reason["code"] for reason in (await sidecar.status())["reasons"]}


async def test_a_process_that_stands_still_is_stale_and_then_well_again(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-1", still=True)
    stale = await until_state(sidecar, "worker-0-1", "stale")
    assert stale["reason"].startswith("no_heartbeat")
    engine.set_process("worker-0-1", still=False)
    await until_state(sidecar, "worker-0-1", "applied")


async def test_a_process_in_a_long_collection_is_not_stale_and_shows_for_how_long(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine, timing=replace(FAST, stale_after_s=0.25))
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-1", collecting_since_ns=123)
    await sidecar.until(lambda s: row(s, "worker-0-1")["collecting_for_s"] is not None)
    engine.set_process("worker-0-1", still=True)
    status = await sidecar.until(
        lambda s: (row(s, "worker-0-1")["collecting_for_s"] or 0) > 2 * 0.25
    )
    assert row(status, "worker-0-1")["state"] == "applied"
    assert row(status, "worker-0-0")["collecting_for_s"] is None
    metrics = (await sidecar.open_client.get("/metrics")).text
    line = next(
        text
        for text in metrics.splitlines()
        if text.startswith('gc_sidecar_in_progress_seconds{dp_rank="0",rank="1",role="worker"}')
    )
    assert float(line.split()[1]) > 0.5


async def test_a_process_that_ended_is_gone_and_its_successor_takes_its_place(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(behaviour={"rpc": "none"})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("board", 4)
    await sidecar.client.post("/gc/freeze")
    engine.set_process("worker-0-1", collecting_since_ns=9)
    await sidecar.until(lambda s: row(s, "worker-0-1")["collecting_for_s"] is not None)
    engine.set_process("worker-0-1", dead=True)
    gone = await until_state(sidecar, "worker-0-1", "gone")
    assert gone["collecting_for_s"] is None, "it died in a collection"
    metrics = (await sidecar.open_client.get("/metrics")).text
    assert 'dp_rank="0",rank="0",role="worker"' in metrics
    assert 'dp_rank="0",rank="1",role="worker"' not in metrics, "gone, it has no series any more"
    assert 'gc_sidecar_processes{state="gone"} 1.0' in metrics
    assert gone["reason"].startswith("process_gone")
    assert (await sidecar.status())["coverage"] == {"acknowledged": 3, "expected": 4}
    engine.set_process("worker-0-1", starting=True, collecting_since_ns=0)
    engine.restart("worker-0-1")
    drifted = await until_state(sidecar, "worker-0-1", "drifted")
    assert drifted["reason"].startswith("restarted")
    engine.set_process("worker-0-1", starting=False)
    await until_state(sidecar, "worker-0-1", "applied")
    metrics = (await sidecar.open_client.get("/metrics")).text
    series = 'gc_sidecar_observed_generation{dp_rank="0",rank="1",role="worker"}'
    assert metrics.count(series) == 1, "a restart leaves no dead series"


async def test_thresholds_that_do_not_fit_are_drift(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-1", thresholds=[700, 10, 1 << 30])
    off = await until_state(sidecar, "worker-0-1", "drifted")
    assert off["reason"].startswith("thresholds_changed")
    assert off["gc"]["threshold"] == [700, 10, 1 << 30]
    await sidecar.client.post("/gc/freeze?allow_partial=true")
    await until_state(sidecar, "worker-0-1", "applied")
    engine.set_process("worker-0-1", thresholds=[700, 10, 10])
    await until_state(sidecar, "worker-0-1", "drifted")
    engine.set_process("worker-0-1", thresholds=None)
    await until_state(sidecar, "worker-0-1", "applied")
    engine.set_process("worker-0-1", thresholds=[1, 0, 0])
    await until_state(sidecar, "worker-0-1", "drifted")


async def test_thresholds_are_not_judged_in_the_middle_of_a_publication(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    # As where a policy is just ending: its thresholds are put back, and the description has yet to say so.
    engine.set_process("worker-0-1", torn=True, thresholds=[700, 10, 1 << 30])
    status = await sidecar.until(
        lambda status: row(status, "worker-0-1")["gc"]["threshold"] == [700, 10, 1 << 30]
    )
    assert row(status, "worker-0-1")["state"] == "applied"
    engine.set_process("worker-0-1", torn=False)
    await until_state(sidecar, "worker-0-1", "drifted")


async def test_a_process_that_says_what_somebody_did_to_its_gc_has_drifted_under_a_policy(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-1", drift={"code": "gc_disabled", "detail": "somebody did"})
    assert {row["state"] for row in (await sidecar.status())["processes"]} == {"applied"}
    await sidecar.client.post("/gc/freeze?allow_partial=true")
    drifted = await until_state(sidecar, "worker-0-1", "drifted")
    assert drifted["reason"] == "gc_disabled: somebody did"
    assert drifted["drifts"] == {"gc_disabled": 2}
    engine.set_process("worker-0-1", drift=None)
    await until_state(sidecar, "worker-0-1", "applied")


async def test_leftovers_of_an_earlier_larger_engine_are_not_expected(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    start_engine(workers=4).stop()
    engine = start_engine(workers=2)
    sidecar = await start_sidecar(engine)
    status = await sidecar.until_seen("plugin", 4)
    assert {process["state"] for process in status["processes"]} == {"applied"}


async def test_a_truncated_page_is_named_and_its_process_uncovered(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine(behaviour={"rpc": "none"})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("board", 4)
    engine.set_process("worker-0-1", still=True)
    page = next(run_dir.glob("worker-dp0-r1-*.page"))
    os.truncate(page, 100)
    lost = await until_state(sidecar, "worker-0-1", "uncovered")
    assert lost["reason"].startswith("page_truncated")
    assert "truncated: 100 of" in lost["reason"]
    assert "page_truncated" in await codes(sidecar)
    assert "gc_sidecar_unreadable_pages 1.0" in (await sidecar.open_client.get("/metrics")).text


async def test_a_page_of_a_newer_version_is_named(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    engine = start_engine(behaviour={"rpc": "none"})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("board", 4)
    page = next(run_dir.glob("worker-dp0-r1-*.page"))
    with open(page, "r+b") as file:
        file.seek(8)
        file.write(struct.pack("<q", 99))
    lost = await until_state(sidecar, "worker-0-1", "uncovered")
    assert lost["reason"].startswith("page_version")


async def test_whatever_lies_in_the_run_directory_stops_nothing(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"\0" * PAGE_BYTES)
    (run_dir / "worker-dp9-r1-1-00000001.page").symlink_to(outside)
    os.mkfifo(run_dir / "worker-dp9-r2-1-00000002.page")
    (run_dir / "worker-dp9-r3-1-00000003.page").mkdir()
    (run_dir / "worker-dp9-r4-1-00000004.page").write_bytes(os.urandom(PAGE_BYTES))
    (run_dir / f"worker-dp{'9' * 200}-r4-1-00000005.page").write_bytes(b"")
    (run_dir / "something else").write_text("x")
    sidecar = await start_sidecar(start_engine())
    await sidecar.until_seen("plugin", 4)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    assert len(sidecar.services.coordinator.knowledge.sight.snapshot.unreadable) == 5


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: None, "run_dir_missing"),
        (lambda path: path.write_text(""), "run_dir_not_a_directory"),
        (lambda path: path.mkdir(), "no_pages"),
    ],
)
async def test_why_nothing_is_seen_is_told(
    start_sidecar: StartSidecar, tmp_path: Path, make: Callable[[Path], None], code: str
) -> None:
    path = tmp_path / "elsewhere"
    make(path)
    sidecar = await start_sidecar(run_dir=str(path))
    assert code in await codes(sidecar)
    ready = await sidecar.open_client.get("/readyz")
    assert ready.status_code == 503
    assert code in {reason["code"] for reason in ready.json()["reasons"]}
    assert any(reason["blocking"] for reason in ready.json()["reasons"])
    if code == "no_pages":
        remedy = next(r["remedy"] for r in ready.json()["reasons"] if r["code"] == code)
        assert remedy.endswith("and VLLM_PLUGINS, if set, must name gc_sidecar")


async def test_the_wrong_port_of_an_engine_that_runs_is_told_as_that(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    def remedy(status: dict[str, Any]) -> str | None:
        found = {each["code"]: each["remedy"] for each in status["reasons"]}
        remedy: str | None = found.get("engine_unreachable")
        return remedy

    engine = start_engine()
    engine.set_process("api_server-0-0", starting=True)
    sidecar = await start_sidecar(engine_url=(f"http://127.0.0.1:{free_port()}",))
    await sidecar.until(lambda s: "may still be starting" in (remedy(s) or ""))
    engine.set_process("api_server-0-0", starting=False)
    await sidecar.until(lambda s: "this is not its port" in (remedy(s) or ""))


async def test_what_keeps_it_from_being_ready_is_told_first_and_the_rest_beside_it(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path
) -> None:
    (run_dir / "worker-dp9-r4-1-00000004.page").write_bytes(os.urandom(PAGE_BYTES))
    engine = start_engine()
    engine.set_process("worker-0-1", starting=True)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    ready = await sidecar.open_client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["detail"] == "worker dp0 rank 1 has not finished its start-up"
    blocking = {reason["code"]: reason["blocking"] for reason in ready.json()["reasons"]}
    assert blocking == {"page_damaged": False, "engine_starting": True}
    engine.set_process("worker-0-1", starting=False)
    await sidecar.until(lambda s: all(p["ready"] for p in s["processes"]))
    ready = await sidecar.open_client.get("/readyz")
    assert ready.status_code == 200
    assert [reason["code"] for reason in ready.json()["reasons"]] == ["page_damaged"]


async def test_a_policy_that_not_every_process_has_is_told_but_it_is_ready(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze")
    assert (await sidecar.open_client.get("/readyz")).json() == {"ready": True, "reasons": []}
    engine.set_process("worker-0-1", leave="rss_growth")
    await until_state(sidecar, "worker-0-1", "drifted")
    ready = await sidecar.open_client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["ready"] is True
    (reason,) = ready.json()["reasons"]
    assert (reason["code"], reason["blocking"]) == ("incomplete_coverage", False)
    assert reason["detail"] == (
        "3 of 4 processes have the freeze policy; not worker dp0 rank 1 (drifted)"
    )
    await sidecar.client.post("/gc/restore")
    assert (await sidecar.open_client.get("/readyz")).json()["reasons"] == []


async def test_an_unreadable_run_directory_is_told(
    start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gc_sidecar.server.sight.list_pages", refuse)
    sidecar = await start_sidecar()
    assert "run_dir_unreadable" in await codes(sidecar)


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"f_bavail": 0}, "run_dir_full"), ({"f_flag": os.ST_RDONLY}, "run_dir_read_only")],
)
async def test_a_full_or_read_only_run_directory_is_told(
    start_sidecar: StartSidecar,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, int],
    code: str,
) -> None:
    class Status:
        f_bavail, f_favail, f_files, f_flag = 1, 1, 1, 0

    for name, value in fields.items():
        setattr(Status, name, value)
    monkeypatch.setattr("gc_sidecar.server.sight.os.statvfs", lambda _: Status)
    sidecar = await start_sidecar()
    assert code in await codes(sidecar)


async def test_a_run_directory_that_comes_later_is_used(
    start_engine: StartEngine, start_sidecar: StartSidecar, tmp_path: Path
) -> None:
    path = tmp_path / "later"
    sidecar = await start_sidecar(run_dir=str(path))
    assert {"run_dir_missing", "run_dir_not_writable"} <= await codes(sidecar)
    path.mkdir()
    start_engine(run_dir=str(path), token_file=None)
    await sidecar.until_seen("board", 4)
    await sidecar.until(lambda s: s["reasons"] == [])
    assert (path / "endpoint.token").stat().st_mode & 0o777 == 0o640


async def test_with_a_broken_run_directory_rpc_still_controls(
    start_engine: StartEngine, start_sidecar: StartSidecar, tmp_path: Path
) -> None:
    missing = str(tmp_path / "nowhere")
    error = f"no page in {missing}: No such file or directory"
    names = ("api_server-0-0", "engine_core-0-0", "worker-0-0")
    engine = start_engine(
        run_dir=None,
        workers=1,
        behaviour={"rpc": "dev"},
        processes={name: {"page_error": error} for name in names},
    )
    sidecar = await start_sidecar(engine, run_dir=missing)
    await sidecar.until_seen("dev", 3)
    assert {"run_dir_missing", "page_error"} <= await codes(sidecar)
    for path in ("freeze", "maintain", "restore"):
        answer = await sidecar.client.post(f"/gc/{path}")
        assert answer.status_code == 200, answer.text
    shutil.rmtree(missing, ignore_errors=True)


def until_collecting(run_dir: Path, since_ns: int = 5) -> PageReading:
    """The page of the process that collects, read by somebody who sees it for the first time."""
    while True:
        for page in Sight(str(run_dir)).read().pages:
            if page.report.collecting_since == since_ns:
                return page


def collecting_under_another_clock(
    engine: StandInEngine, run_dir: Path, clock: Callable[[], float]
) -> Sight:
    """A sight that has just seen a process collect whose clock is not ours."""
    engine.set_process("worker-0-0", collecting_since_ns=5, clock_ahead_ns=1 << 40)
    until_collecting(run_dir)
    sight = Sight(str(run_dir), clock=clock)
    assert any(page.collecting_s == 0 for page in sight.read().pages)
    return sight


def test_a_collection_has_run_since_it_began_or_where_clocks_differ_since_it_was_seen(
    start_engine: StartEngine, run_dir: Path
) -> None:
    engine = start_engine(workers=1)
    now = 1000.0
    sight = collecting_under_another_clock(engine, run_dir, lambda: now)
    now += 7.0
    page = next(page for page in sight.read().pages if page.collecting_s is not None)
    assert page.collecting_s == 7.0

    started_ns = time.monotonic_ns() - 30_000_000_000
    engine.set_process("worker-0-0", collecting_since_ns=started_ns, clock_ahead_ns=0)
    page = until_collecting(run_dir, since_ns=started_ns)
    assert 30 <= (page.collecting_s or 0) < 90


def test_a_reading_that_fails_once_forgets_nothing(
    start_engine: StartEngine, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(workers=1)
    now = 1000.0
    sight = collecting_under_another_clock(engine, run_dir, lambda: now)

    def fail(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    for name in ("list_pages", "read_page"):
        with monkeypatch.context() as patch:
            patch.setattr(sight_module, name, fail)
            assert sight.read().pages == ()
    now += 7.0
    page = next(page for page in sight.read().pages if page.collecting_s is not None)
    assert page.collecting_s == 7.0


def test_of_those_that_were_there_the_newest_records_are_taken_over_and_of_new_ones_all(
    start_engine: StartEngine, run_dir: Path
) -> None:
    engine = start_engine(workers=1)
    count = 2 * FIRST_YOUNG

    def young(sight: Sight) -> int:
        """How many records of young collections of the worker that lives have come, in all."""
        seen = 0
        while True:
            snapshot = sight.read()
            living = {page.report.identity.token for page in snapshot.pages if page.alive}
            for each in snapshot.arrivals:
                if each.identity.roles[0] == "worker" and each.identity.token in living:
                    seen += len(each.rings[1].records)
                    if each.rings[1].following > count:
                        return seen

    engine.collect("worker-0-0", 1e-6, gc_generation=0, times=count)
    young(Sight(str(run_dir)))  # until all are on the page
    sight = Sight(str(run_dir))
    assert young(sight) == FIRST_YOUNG
    engine.restart("worker-0-0")
    engine.collect("worker-0-0", 1e-6, gc_generation=0, times=count)
    assert young(sight) == count
