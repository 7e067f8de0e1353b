"""What the sidecar answers, step by step, for any engine: the embedded one and a real vLLM must give the same.

Scenarios are written once, against the engine's surface alone. tests/conformance.json holds what comes of them;
after a change that is meant, `PYTHONPATH=. python tests/embedded/test_conformance.py` records it anew.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sidecar_process import SidecarProcess, wait_for
from tests.vllm.scene import Scene, pids_of

RECORDING = Path(__file__).with_suffix(".json")

Step = dict[str, Any]


@dataclass
class Stage:
    """An engine with the probe in it, a sidecar beside it, and the record of what was answered."""

    scene: Scene
    sidecar: SidecarProcess
    record: list[Step] = field(default_factory=list)

    def ask(self, step: str, method: str, path: str, body: Any = None, **fields: Any) -> None:
        """Send one request to the sidecar and record its answer. `body` is sent as it is, `fields` as JSON."""
        headers = {}
        if fields:
            body = json.dumps(fields)
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", self.sidecar.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            status, answer = response.status, json.loads(response.read())
        operation = answer.get("operation") or {}
        self.record.append(
            {
                "step": step,
                "status": status,
                "code": answer.get("code"),
                "state": operation.get("state"),
                "processes": sorted(map(_said, operation.get("processes") or [])),
            }
        )

    def look(self, step: str) -> None:
        """Record what the sidecar says of the whole engine."""
        status = self.sidecar.status()
        self.record.append(
            {
                "step": step,
                "policy": status["policy"]["mode"],
                "owner": status["policy"]["owner"],
                "coverage": status["coverage"],
                "transport": status["transport"],
                "processes": sorted(
                    f"{_name(row)} {row['state']} {row['mode']} {row['gc']['threshold'] if row['gc'] else None}"
                    for row in status["processes"]
                ),
            }
        )

    def note(self, step: str, value: Any) -> None:
        """Record something else."""
        self.record.append({"step": step, "value": value})

    @contextlib.contextmanager
    def planted(self, worker: int, plant: str, remove: str) -> Iterator[None]:
        """Run `plant` in one process, and `remove` afterwards."""
        pids = {"it": worker}
        self.scene.probe.run(self.scene.probe.only(worker, plant), pids)
        try:
            yield
        finally:
            self.scene.probe.run(self.scene.probe.only(worker, remove), pids)


def changes(stage: Stage) -> None:
    """Every operation, with input good and bad, on an engine that all of it reaches."""
    scene, sidecar, ask, look = stage.scene, stage.sidecar, stage.ask, stage.look
    pids = pids_of(sidecar.status())
    before = scene.gc_state(pids)
    last_worker = pids[max(name for name in pids if name.startswith("worker"))]
    look("at first")

    ask("restore without a policy", "POST", "/gc/restore")
    ask("lease without a policy", "POST", "/gc/lease")
    ask("an unknown field", "POST", "/gc/freeze", intervall_s=1)
    ask("a wrong type", "POST", "/gc/freeze", interval_s="often")
    ask("out of range", "POST", "/gc/freeze", interval_s=0.5)
    ask("an unknown mode", "PUT", "/gc/policy", mode="melt")
    ask("a form", "POST", "/gc/freeze", "owner=me")
    ask("no JSON", "POST", "/gc/freeze", "{owner")
    ask("body and query", "POST", "/gc/freeze?owner=me", owner="me")
    ask("GET on an action", "GET", "/gc/freeze")
    ask("an unknown operation", "GET", "/gc/operations/nobody-asked")
    look("after all that")

    ask("a budget", "PUT", "/gc/policy", owner="one", mode="budget", pause_budget_ms=50)
    ask("maintain under it", "POST", "/gc/maintain", owner="one")
    ask("freeze", "POST", "/gc/freeze", owner="one", operation_id="first")
    look("frozen")
    ask("the same again", "POST", "/gc/freeze", owner="one", operation_id="first")
    ask("its id for something else", "POST", "/gc/maintain", operation_id="first")
    ask("freeze again", "POST", "/gc/freeze", owner="one", interval_s=30)
    ask("freeze by another owner", "POST", "/gc/freeze", owner="two")
    ask("restore by another owner", "POST", "/gc/restore", owner="two")
    ask("lease by another owner", "POST", "/gc/lease", owner="two")
    ask("lease", "POST", "/gc/lease", owner="one", lease_s=600)
    ask("maintain", "POST", "/gc/maintain", owner="one")
    ask("maintain when idle", "POST", "/gc/maintain", owner="one", when="idle")
    ask("freeze by force", "POST", "/gc/freeze", owner="two", force=True)
    look("it is the other's")
    ask("restore", "POST", "/gc/restore", owner="two")
    ask("restore again", "POST", "/gc/restore")
    look("restored")
    stage.note("as it was found", scene.gc_state(pids) == before)

    ask("maintain without a policy", "POST", "/gc/maintain")
    with stage.planted(last_worker, _BREAK_MAINTAIN, "del policy._maintain"):
        ask("maintain fails in a worker", "POST", "/gc/maintain")
    ask("and works again", "POST", "/gc/maintain")
    with stage.planted(last_worker, _BREAK_FREEZE, "gc.freeze = real_freeze"):
        ask("freeze fails in a worker", "POST", "/gc/freeze")
        look("all were rolled back")
        ask("and with what can be had", "POST", "/gc/freeze", allow_partial=True)
        look("the others are frozen")
    ask("restore after a failure", "POST", "/gc/restore")
    stage.note("as it was found after a failure", scene.gc_state(pids) == before)

    ask("freeze for three seconds", "POST", "/gc/freeze", lease_s=3)
    wait_for("the lease ends", lambda: sidecar.status()["policy"]["mode"] == "off")
    wait_for(
        "all show it", lambda: {row["mode"] for row in sidecar.status()["processes"]} == {"off"}
    )
    wait_for("all are as found", lambda: scene.gc_state(pids) == before)
    look("the lease has ended")
    scene.assert_serves()


def faults(stage: Stage) -> None:
    """The engine's own RPC falls out of step, then it dies. Comes last."""
    engine = stage.scene.engine

    def call(method: str) -> int:
        return engine.request("POST", "/collective_rpc", {"method": method})[0]

    stage.note("RPC before", [call("check_health"), call("check_health")])
    stage.note(
        "a missing method, and the calls after it", [call("nobody_has_this"), call("check_health")]
    )
    stage.ask("freeze after it", "POST", "/gc/freeze")
    stage.look("after it")
    stage.ask("restore after it", "POST", "/gc/restore")
    stage.look("and after that")
    stage.scene.assert_serves()

    pids = pids_of(stage.sidecar.status())
    stage.scene.probe.run(
        stage.scene.probe.only(pids["worker-0-0"], "import os, signal\nos.kill(os.getpid(), 9)"),
        {},
    )
    wait_for(
        "all are gone",
        lambda: (
            {row["state"] for row in stage.sidecar.status()["processes"]} <= {"gone", "uncovered"}
        ),
        deadline_s=30,
    )
    wait_for(
        "it is let go of", lambda: stage.sidecar.status()["transport"] == "board", deadline_s=30
    )
    stage.ask("freeze of a dead engine", "POST", "/gc/freeze")
    stage.ask("restore of a dead engine", "POST", "/gc/restore")


def workers_only(stage: Stage) -> None:
    """An engine of which only the workers have an agent, through the worker extension."""
    ask, look = stage.ask, stage.look
    ask("freeze", "POST", "/gc/freeze", deadline_s=5)
    look("rolled back")
    ask("freeze what can be had", "POST", "/gc/freeze", allow_partial=True, deadline_s=5)
    look("frozen")
    ask("maintain what can be had", "POST", "/gc/maintain", allow_partial=True, deadline_s=5)
    ask("restore", "POST", "/gc/restore", deadline_s=5)
    ask("restore what can be had", "POST", "/gc/restore", allow_partial=True, deadline_s=5)
    look("restored")


def whole_engine(stage: Stage) -> None:
    """All that can be done to an engine with an agent in every process."""
    changes(stage)
    faults(stage)


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "tensor_parallel": whole_engine,
    "data_parallel": whole_engine,
    "workers_only": workers_only,
}


def play(name: str, scene: Scene, processes: int) -> list[Step]:
    """Run a scenario on an engine that has so many processes with an agent; what was answered."""
    with scene.sidecar(name) as sidecar:
        wait_for(
            "every agent is seen",
            lambda: sidecar.status()["coverage"]["acknowledged"] == processes,
        )
        wait_for("a transport", lambda: sidecar.status()["transport"] in ("plugin", "dev"))
        stage = Stage(scene, sidecar)
        SCENARIOS[name](stage)
    return stage.record


def expected(name: str) -> list[Step]:
    """The recording of a scenario."""
    steps: list[Step] = json.loads(RECORDING.read_text())[name]
    return steps


def differences(recorded: list[Step], wanted: list[Step]) -> list[str]:
    """Where a record differs from what is wanted, for people."""
    found = [
        f"{was['step']}:\n  was    {json.dumps(was)}\n  wanted {json.dumps(should)}"
        for was, should in zip(recorded, wanted, strict=False)
        if was != should
    ]
    if len(recorded) != len(wanted):
        found.append(f"{len(recorded)} steps instead of {len(wanted)}")
    return found


def _name(row: dict[str, Any]) -> str:
    return f"{row['role']}-{row['dp_rank']}-{row['rank']}"


def _said(row: dict[str, Any]) -> str:
    return f"{_name(row)} {'ok' if row['ok'] else row['code']}"


_BREAK_MAINTAIN = """
from gc_sidecar_agent import agent
policy = agent.this_process().policy
def broken(*args):
    raise ZeroDivisionError("made to fail")
policy._maintain = broken
"""

_BREAK_FREEZE = """
import gc
real_freeze = gc.freeze
def failing_freeze():
    raise MemoryError("no freeze today")
gc.freeze = failing_freeze
"""
