"""GET /gc/events: what a viewer is told and when, that nothing comes twice, and what becomes of slow viewers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.server import live
from gc_sidecar.server.live import MAXIMUM_VIEWERS
from tests.unit.server.conftest import FAST, Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
QUICK = replace(FAST, live_s=0.05)


class Stream:
    """What came: `events` are name and data, `ids` the position after which each id came."""

    def __init__(self, text: str) -> None:
        self.events: list[tuple[str, Any]] = []
        self.ids: dict[int, str] = {}
        assert text.endswith("\n\n")
        for block in text.split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            self.events.append((fields["event"], json.loads(fields["data"])))
            if "id" in fields:
                self.ids[len(self.events) - 1] = fields["id"]

    def of(self, name: str) -> list[Any]:
        return [data for each, data in self.events if each == name]

    def pauses(self) -> list[list[Any]]:
        return [pause for part in self.of("pauses") for pause in part]

    @property
    def last_id(self) -> str:
        return list(self.ids.values())[-1]


async def watch(sidecar: Sidecar, for_s: float = 0.0, last_event_id: str = "") -> Stream:
    answer = await sidecar.client.get(
        f"/gc/events?for_s={for_s}", headers={"Last-Event-ID": last_event_id}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return Stream(answer.text)


async def start(
    start_engine: StartEngine, start_sidecar: StartSidecar, **settings: Any
) -> tuple[StandInEngine, Sidecar]:
    engine = start_engine()
    sidecar = await start_sidecar(engine, timing=QUICK, **settings)
    await sidecar.until_seen("plugin", 4)
    return engine, sidecar


async def test_first_comes_all_that_is_kept(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    for _ in range(3):
        engine.collect("worker-0-1", 0.25, trigger="maintain", collected_objects=5, start_s=-1)
    await sidecar.until_recorded(3)
    await sidecar.client.post("/gc/freeze?owner=me&operation_id=op-1")
    await sidecar.client.post("/gc/windows?window_id=w")
    await sidecar.client.post("/gc/windows/w/close")
    stream = await watch(sidecar)
    assert [name for name, _ in stream.events] == [
        "history", "places", "pauses", "memory", "operations", "windows", "state",
    ]  # fmt: skip
    assert list(stream.ids) == [6], "who has heard the last of it has heard it all"
    assert stream.of("history")[0]["is_new"] is True
    (places,) = stream.of("places")
    for place, _, length, generation, trigger, objects, pid in stream.pauses():
        assert places[place] == ["worker", 0, 1]
        assert (length, generation, trigger, objects, pid) == (0.25, 2, "maintain", 5, 1001)
    assert len(stream.pauses()) == 3
    ((operation,),) = stream.of("operations")
    assert (operation["id"], operation["state"], operation["owner"]) == ("op-1", "applied", "me")
    assert (operation["done"], operation["asked"]) == (4, 4)
    assert "processes" not in operation
    ((window,),) = stream.of("windows")
    assert (window["id"], window["state"]) == ("w", "closed")
    assert window["clean"] == (not window["reasons"])
    (state,) = stream.of("state")
    told = await sidecar.status()
    assert state.keys() >= told.keys()
    assert state["policy"] == told["policy"]
    assert (state["ready"], state["may_act"]) == (True, True)
    assert state["expected_pause_s"] == pytest.approx(0.25, rel=0.5)
    assert (await sidecar.client.get("/readyz")).json()["reasons"] == state["reasons"]


async def test_what_happens_comes_once_and_soon(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    watching = asyncio.create_task(watch(sidecar, 1.5))
    await asyncio.sleep(0.2)
    for index in range(10):
        engine.collect("worker-0-0", 0.001 * (index + 1), start_s=-0.1)
        await sidecar.status()  # others look meanwhile, and one more begins to watch
        if index % 3 == 0:
            await watch(sidecar)
    assert (await sidecar.client.post("/gc/freeze")).status_code == 200
    await sidecar.client.post("/gc/windows?window_id=w")
    stream = await watching
    lengths = [pause[2] for pause in stream.pauses()]
    assert sorted(lengths) == [round(0.001 * (index + 1), 3) for index in range(10)]
    states = [operation["state"] for part in stream.of("operations") for operation in part]
    assert states[-1] == "applied"
    assert [window["id"] for part in stream.of("windows") for window in part] == ["w"]
    assert len(stream.of("state")) >= 5
    assert stream.of("state")[-1]["policy"]["mode"] == "freeze"


async def test_who_comes_back_is_told_what_is_new(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    engine.collect("worker-0-0", 0.01, start_s=-1)
    await sidecar.until_recorded(1)
    first = await watch(sidecar)
    engine.collect("worker-0-0", 0.02, start_s=-1)
    await sidecar.until_recorded(2)
    again = await watch(sidecar, last_event_id=first.last_id)
    assert again.of("history")[0]["is_new"] is False
    assert [pause[2] for pause in again.pauses()] == [0.02]
    instance, _, sequence = first.last_id.partition("-")
    for other in ("", f"00000000-{sequence}", f"{instance}-999999", "x" * 500, f"{instance}-"):
        stream = await watch(sidecar, last_event_id=other)
        assert stream.of("history")[0]["is_new"] is True
        assert [pause[2] for pause in stream.pauses()] == [0.01, 0.02]


async def test_a_sidecar_after_this_one_is_another(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    first = await watch(sidecar)
    other = await start_sidecar(engine, timing=QUICK)
    again = await watch(other, last_event_id=first.last_id)
    assert again.of("history")[0]["is_new"] is True


async def test_an_hour_of_pauses_comes_in_parts(
    start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.page.replayed_hour import replay

    sidecar = await start_sidecar(timing=QUICK)
    replay(sidecar.services.live.history, processes=8, pauses=2500)
    stream = await watch(sidecar)
    assert [len(part) for part in stream.of("pauses")] == [1000, 1000, 500]
    assert all(len(part) <= 100 for part in stream.of("memory"))
    assert sum(map(len, stream.of("memory"))) > 700


async def test_memory_is_kept_also_where_nobody_looks_and_nothing_is_made(
    start_engine: StartEngine, start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MEMORY_EVERY_S", 0.1)
    _, sidecar = await start(start_engine, start_sidecar)
    made = sidecar.services.live._update
    asked: list[object] = []
    monkeypatch.setattr(sidecar.services.live, "_update", lambda r: asked.append(r) or made(r))
    await asyncio.sleep(0.5)
    assert len(sidecar.services.live.history.memory()) >= 2
    assert not asked
    await watch(sidecar, 0.3)
    assert asked


async def test_so_many_may_watch_and_no_more(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await start(start_engine, start_sidecar)
    watching = [asyncio.create_task(watch(sidecar, 1.0)) for _ in range(MAXIMUM_VIEWERS)]
    await asyncio.sleep(0.5)
    # Not for long where it is let in after all: a test that fails must not wait for an hour.
    refused = await sidecar.client.get("/gc/events?for_s=1")
    problem = assert_problem(refused, 503, "too_many_viewers")
    assert problem["remedy"]
    streams = await asyncio.gather(*watching)
    assert all(len(stream.of("state")) > 1 for stream in streams)
    await watch(sidecar)


async def test_who_takes_nothing_is_cut_off(
    start_engine: StartEngine, start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LAG_S", 0.2)
    _, sidecar = await start(start_engine, start_sidecar)
    services = sidecar.services
    stream = await services.live.watch("", 3600, lambda: True)
    deadline = time.monotonic() + 5
    while services.live._viewers:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    parts = [part async for part in stream.body_iterator]
    assert Stream(b"".join(bytes(part) for part in parts).decode()).of("state")


async def test_as_many_as_may_can_begin_at_once_and_nobody_is_cut_off(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await start(start_engine, start_sidecar)
    services = sidecar.services
    streams = [
        await services.live.watch("", 3600, lambda: True) for _ in range(live.MAXIMUM_VIEWERS)
    ]
    assert len(services.live._viewers) == len(streams)
    services.stop()


async def test_a_stream_ends_with_its_token(
    start_engine: StartEngine, start_sidecar: StartSidecar, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old-old-old-old-old")
    sidecar = await start_sidecar(start_engine(), timing=QUICK, token_file=str(token))
    sidecar.client.headers["Authorization"] = "Bearer old-old-old-old-old"
    watching = asyncio.create_task(watch(sidecar, 30))
    await asyncio.sleep(0.3)
    assert not watching.done()
    token.write_text("new-new-new-new-new-new")
    stream = await asyncio.wait_for(watching, 5)
    assert len(stream.of("state")) > 1
    assert (await sidecar.client.get("/gc/events?for_s=0")).status_code == 401


async def test_streams_end_with_the_sidecar(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    _, sidecar = await start(start_engine, start_sidecar)
    watching = asyncio.create_task(watch(sidecar, 3600))
    await asyncio.sleep(0.3)
    sidecar.services.stop()
    stream = await asyncio.wait_for(watching, 1)
    assert stream.of("state")
    assert_problem(await sidecar.client.get("/gc/events"), 503, "sidecar_stopping")


async def test_the_page_may_be_read_only(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar(timing=QUICK, read_only_page=True)
    (state,) = (await watch(sidecar)).of("state")
    assert (state["may_act"], state["ready"], state["processes"]) == (False, False, [])
    assert state["reasons"][0]["remedy"]


async def test_operations_are_listed_newest_first(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine, sidecar = await start(start_engine, start_sidecar)
    assert "no operation" in (await sidecar.client.get("/gc/operations?format=table")).text
    await sidecar.client.post("/gc/freeze?operation_id=one")
    engine.set_process("worker-0-0", fail={"code": "collector_busy", "kinds": ["maintain"]})
    await sidecar.client.post("/gc/maintain?operation_id=two&deadline_s=2")
    operations = (await sidecar.client.get("/gc/operations")).json()["operations"]
    assert [(each["id"], each["state"] == "applied", each["done"]) for each in operations] == [
        ("two", False, 3),
        ("one", True, 4),
    ]
    table = (await sidecar.client.get("/gc/operations?format=table")).text.splitlines()
    assert table[0].split()[0] == "ID"
    assert [line.split()[0] for line in table[1:]] == ["two", "one"]
    assert_problem(await sidecar.client.get("/gc/operations?limit=3"), 422, "unknown_field")
