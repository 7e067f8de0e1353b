"""Windows on the embedded engine: what real processes really did, and who is to blame for late tokens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.embedded.engine import scene
from tests.observing import PLANT_WITNESS, assert_as_witnessed, traffic
from tests.sidecar_process import SidecarProcess, wait_for
from tests.striking import strike
from tests.vllm.scene import Scene, pids_of

FLAGS = ("--workers=2", "--heap-objects=200000", "--step-ms=4")
STANDSTILL_S = 0.3
# Longer than a young collection lasts, however busy the machine.
LONG_MS = 2_000


@dataclass
class Stage:
    scene: Scene
    sidecar: SidecarProcess

    def open(self, name: str, **limits: float) -> None:
        assert self.sidecar.post("/gc/windows", {"window_id": name, **limits})[0] == 201

    def close(self, name: str) -> dict[str, Any]:
        status, answer = self.sidecar.post(f"/gc/windows/{name}/close")
        assert status == 200, answer
        verdict: dict[str, Any] = answer["window"]["verdict"]
        return verdict


def codes(verdict: Mapping[str, Any]) -> set[str]:
    return {reason["code"] for reason in verdict["reasons"]}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("windows")
    with scene(directory, *FLAGS) as running, running.sidecar("windows") as sidecar:
        sidecar.wait_for_coverage(4)
        yield Stage(running, sidecar)


pytestmark = pytest.mark.xdist_group("windows")


def test_a_frozen_engine_under_load_is_clean(stage: Stage) -> None:
    assert stage.sidecar.post("/gc/freeze")[0] == 200
    stage.open("frozen", max_pause_ms=LONG_MS)
    with traffic(stage.scene):
        wait_for("tokens", lambda: _tokens(stage) > 200)
    verdict = stage.close("frozen")
    assert verdict["clean"], verdict["reasons"]
    assert verdict["policy"] == {"at_opening": "freeze", "at_closing": "freeze"}
    assert all(process["pauses"]["gen2"]["count"] == 0 for process in verdict["processes"])
    assert stage.sidecar.post("/gc/restore")[0] == 200


def test_late_tokens_are_blamed_on_gc_where_it_was_gc(stage: Stage) -> None:
    worker = pids_of(stage.sidecar.status())["worker-0-0"]

    def in_worker(code: str) -> None:
        # In one rank alone: the other one waits for it.
        stage.scene.probe.run(stage.scene.probe.only(worker, code), {"it": worker})

    # Each one pause, and far longer than anything that a busy machine does: pieces of one might be told apart.
    in_worker("import gc, time\nbig = [[] for _ in range(3_000_000)]")
    with traffic(stage.scene):
        wait_for("it runs", lambda: _tokens(stage) > 0)
        stage.open("gc", max_pause_ms=1)
        for _ in range(4):
            in_worker("gc.collect()")
            seen = _tokens(stage)
            wait_for("it goes on", lambda seen=seen: _tokens(stage) > seen + 100)
        verdict = stage.close("gc")
    in_worker("big = None")
    assert "pause_over_limit" in codes(verdict)
    # On a machine that is busy, tokens are late for that as well.
    blamed = ("mostly the server's GC", "partly the server's GC")
    assert verdict["latency"]["says"] in blamed, verdict["latency"]
    assert verdict["longest_pause"]["pid"] == worker
    assert verdict["longest_pause"]["trigger"] == "explicit"


def test_late_tokens_are_not_blamed_on_gc_where_it_was_something_else(stage: Stage) -> None:
    assert stage.sidecar.post("/gc/freeze")[0] == 200
    worker = pids_of(stage.sidecar.status())["worker-0-0"]
    with traffic(stage.scene):
        wait_for("it runs", lambda: _tokens(stage) > 0)
        stage.open("else", max_pause_ms=LONG_MS)
        for _ in range(3):
            strike(worker, signal.SIGSTOP)
            time.sleep(STANDSTILL_S)  # the standstill itself
            os.kill(worker, signal.SIGCONT)
            seen = _tokens(stage)
            wait_for("it goes on", lambda seen=seen: _tokens(stage) > seen + 100)
        verdict = stage.close("else")
    assert verdict["latency"]["says"] == "not the server's GC", verdict["latency"]
    assert all(process["pauses"]["gen2"]["count"] == 0 for process in verdict["processes"])
    assert verdict["clean"], verdict["reasons"]
    assert stage.sidecar.post("/gc/restore")[0] == 200


def test_ten_thousand_full_collections_are_counted_and_what_no_record_tells_is_named(
    stage: Stage,
) -> None:
    worker = pids_of(stage.sidecar.status())["worker-0-1"]
    stage.open("flood", max_pause_ms=60_000)
    code = f"""{PLANT_WITNESS}
# What the collections walk is little, so that they come fast.
gc.freeze()
for _ in range(10_000):
    gc.collect()
gc.unfreeze()
gc.callbacks.remove(watch_first)
gc.callbacks.remove(watch_last)
result = dict(witness)
"""
    seen = stage.scene.probe.run(
        stage.scene.probe.only(worker, code), {"it": worker}, deadline_s=60
    )["it"]
    verdict = stage.close("flood")
    process = next(each for each in verdict["processes"] if each["pid"] == worker)
    full = process["pauses"]["gen2"]
    assert full["count"] == seen["count"] == 10_000
    nothing = dict.fromkeys(seen, 0)
    assert_as_witnessed(full, (nothing, seen), (nothing, seen))
    # The ring holds 1,024, and the sidecar reads it once a second.
    assert full["lost_records"] > 0
    listed = [
        pause
        for pause in verdict["pauses"]
        if (pause["pid"], pause["gc_generation"]) == (worker, 2)
    ]
    recorded = 10_000 - full["lost_records"]
    assert len(listed) + verdict["pauses_not_listed"] >= recorded > 0
    assert verdict["lost_records"] >= full["lost_records"]
    lost = stage.sidecar.get("/gc/pauses?role=worker&rank=1&limit=1")[1]["lost"]
    assert lost >= full["lost_records"]
    assert not codes(verdict), "what was lost took less than the limit together, so it is clean"


def _tokens(stage: Stage) -> float:
    return stage.scene.engine.metric("vllm:inter_token_latency_seconds_count")  # type: ignore[attr-defined,no-any-return]
