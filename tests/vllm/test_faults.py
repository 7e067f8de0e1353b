"""A real vLLM whose sidecar, workers or engine core die or stand still in the middle of an operation.

tests/faults has every victim at every stage, on the embedded engine; here vLLM decides what happens then.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stage import CORE, LAST_WORKER, Asking, Stage, outcome_of
from tests.sidecar_process import SidecarProcess, wait_for
from tests.striking import strike
from tests.vllm.scene import Scene, pids_of, rows_of, scene

DEADLINE_S = 4.0
LEASE_S = 6.0


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("faults"), tiny_model, tensor_parallel=2) as running:
        yield running


@pytest.fixture(scope="module")
def stage(tp2: Scene) -> Stage:
    with seeing_sidecar(tp2) as sidecar:
        return Stage(tp2, pids_of(sidecar.status()))


@contextlib.contextmanager
def seeing_sidecar(running: Scene) -> Iterator[SidecarProcess]:
    """One that sees all four processes."""
    with running.sidecar("faults") as sidecar:
        wait_for("all are seen", lambda: len(pids_of(sidecar.status())) == 4)
        yield sidecar


def ask(sidecar: SidecarProcess, operation: str, **fields: float) -> Asking:
    """Ask for an operation."""
    return Asking(sidecar, operation, DEADLINE_S, **fields)


def test_a_sidecar_killed_in_the_middle_of_a_maintenance(tp2: Scene, stage: Stage) -> None:
    with seeing_sidecar(tp2) as sidecar:
        assert ask(sidecar, "freeze", lease_s=LEASE_S).answer().code == 200
        with stage.gate():
            asking = ask(sidecar, "maintain")
            stage.wait_until_held(asking)
            strike(sidecar.pid, signal.SIGKILL)
        assert asking.answer().code is None
        stage.assert_serves()
        stage.assert_normal(stage.pids)
        stage.assert_files_are_whole()
        stage.assert_serves()


@pytest.mark.parametrize("victim", [LAST_WORKER, CORE])
def test_a_process_stopped_in_the_middle_of_a_freeze(tp2: Scene, stage: Stage, victim: str) -> None:
    with seeing_sidecar(tp2) as sidecar, contextlib.ExitStack() as stopped:
        with stage.gate():
            asking = ask(sidecar, "freeze", lease_s=LEASE_S)
            stage.wait_until_held(asking)
            strike(stage.pids[victim], signal.SIGSTOP)
            stopped.callback(os.kill, stage.pids[victim], signal.SIGCONT)
        answer = asking.answer()
        assert answer.code == 504, answer
        assert answer.body["rolled_back"] == "unknown"
        assert not rows_of(answer.operation)[victim]["ok"]
        wait_for(
            "it is told of",
            lambda: rows_of(sidecar.status())[victim]["collecting_for_s"] > 0,
        )
        others = [name for name in stage.pids if name != victim]
        stage.assert_normal(others, may_be_pending=True)
        stopped.close()
        stage.assert_normal(stage.pids)
        stage.assert_files_are_whole()
        stage.assert_serves()
        sidecar.wait_for_coverage(4)
        assert sidecar.status()["policy"]["mode"] == "off"


def test_a_worker_killed_in_the_middle_of_a_freeze(tp2: Scene, stage: Stage) -> None:
    """The last one on this engine, for vLLM does not survive it."""
    with seeing_sidecar(tp2) as sidecar:
        assert_its_end_is_told(stage, sidecar, LAST_WORKER, "freeze")


def test_an_engine_core_killed_in_the_middle_of_a_maintenance(
    tmp_path: Path, tiny_model: Path
) -> None:
    with (
        scene(tmp_path, tiny_model, tensor_parallel=2) as running,
        seeing_sidecar(running) as sidecar,
    ):
        stage = Stage(running, pids_of(sidecar.status()))
        assert ask(sidecar, "freeze", lease_s=LEASE_S).answer().code == 200
        assert_its_end_is_told(stage, sidecar, CORE, "maintain")


def assert_its_end_is_told(
    stage: Stage, sidecar: SidecarProcess, victim: str, operation: str
) -> None:
    """vLLM ends with its victim, leaves no process behind, and the sidecar says all of that."""
    with stage.gate():
        asking = ask(sidecar, operation)
        stage.wait_until_held(asking)
        strike(stage.pids[victim], signal.SIGKILL)
    asking.answer()
    ended = outcome_of(asking.operation_id, sidecar)
    assert ended["state"] in ("failed", "rolled_back", "unknown"), ended
    assert rows_of(ended)[victim]["code"] == "process_gone"
    assert rows_of(sidecar.status())[victim]["state"] == "gone"
    stage.assert_nothing_is_left()
    rows = rows_of(sidecar.status())
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(stage.pids, "gone")
    assert sidecar.get("/readyz")[0] == 503
    stage.assert_files_are_whole()
