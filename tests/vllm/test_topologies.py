"""The other shapes a real vLLM comes in: data parallel, one process, worker extension only, remote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.scene import (
    HELD_OFF,
    freeze_maintain_restore,
    pids_of,
    rows_of,
    scene,
)

DATA_PARALLEL = {
    *("api_server-0-0", "api_server-0-1", "engine_core-0-0", "engine_core-1-0"),
    *("worker-0-0", "worker-1-0"),
}


@pytest.mark.parametrize("transport", ["plugin", "dev"])
def test_data_parallel_with_two_api_servers(
    tmp_path: Path, tiny_model: Path, transport: str
) -> None:
    with (
        scene(
            tmp_path,
            tiny_model,
            endpoint=transport == "plugin",
            dev_mode=transport == "dev",
            data_parallel=2,
            api_servers=2,
            worker_extension="test_probe.UserExtension",
        ) as running,
        running.sidecar(transport) as sidecar,
    ):
        freeze_maintain_restore(running, sidecar, DATA_PARALLEL)
        assert sidecar.status()["transport"] == transport
        if transport == "dev":
            # vLLM's own route tells of the first engine only, and a user's extension goes on working.
            assert running.engine.rpc("user_method", []) == [{"rank": 0}]
            assert running.engine.rpc("handle", []) == [{"user": "handle"}]


def test_engine_core_and_worker_in_one_process_count_once(tmp_path: Path, tiny_model: Path) -> None:
    with (
        scene(tmp_path, tiny_model, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) as running,
        running.sidecar("one-process") as sidecar,
    ):
        status = sidecar.wait_for_coverage(2)
        row = rows_of(status)["engine_core-0-0"]
        assert row["roles"] == ["engine_core", "worker"]
        freeze_maintain_restore(running, sidecar, {"api_server-0-0", "engine_core-0-0"})


def test_a_worker_extension_alone_covers_the_workers_and_says_what_it_does_not(
    tmp_path: Path, tiny_model: Path
) -> None:
    with (
        scene(
            tmp_path,
            tiny_model,
            plugin=False,
            endpoint=False,
            dev_mode=True,
            tensor_parallel=2,
            worker_extension="gc_sidecar_agent.extension.GcWorkerExtension",
        ) as running,
        running.sidecar("extension") as sidecar,
    ):
        code, body = sidecar.post("/gc/freeze")
        assert code == 502, body
        assert body["code"] == "incomplete_coverage"
        status = sidecar.status()
        assert status["transport"] == "dev"
        assert status["policy"]["mode"] == "off"
        rows = rows_of(status)
        assert rows["engine_core-0-0"]["state"] == "uncovered"
        assert rows["api_server-0-0"]["state"] == "uncovered"
        assert rows["engine_core-0-0"]["reason"]
        workers = {name: pid for name, pid in pids_of(status).items() if name.startswith("worker")}
        assert set(workers) == {"worker-0-0", "worker-0-1"}
        before = running.gc_state(workers)
        assert all(state["threshold"][2] != HELD_OFF for state in before.values()), "rolled back"

        code, body = sidecar.post("/gc/freeze", {"allow_partial": True})
        assert code == 200, body
        assert body["operation"]["state"] == "partial"
        assert all(s["threshold"][2] == HELD_OFF for s in running.gc_state(workers).values())
        assert sidecar.status()["coverage"] == {"acknowledged": 2, "expected": 4}
        code, body = sidecar.post("/gc/maintain", {"allow_partial": True})
        assert code == 200, body
        assert sidecar.post("/gc/restore", {"allow_partial": True})[0] == 200
        assert running.gc_state(workers) == before
        running.assert_serves()
        running.assert_log_is_quiet()


@pytest.mark.parametrize("transport", ["plugin", "dev"])
def test_a_remote_engine_is_controlled_from_the_replies_alone(
    tmp_path: Path, tiny_model: Path, transport: str
) -> None:
    token = tmp_path / "token"
    token.write_text("a secret that both sides were given\n")
    with (
        scene(
            tmp_path,
            tiny_model,
            endpoint=transport == "plugin",
            dev_mode=transport == "dev",
            run_dir=None,
            env={"GC_SIDECAR_ENDPOINT_TOKEN_FILE": str(token)},
        ) as running,
        running.sidecar("remote", f"--engine-token-file={token}") as sidecar,
    ):
        freeze_maintain_restore(
            running, sidecar, {"api_server-0-0", "engine_core-0-0", "worker-0-0"}
        )
        assert sidecar.status()["transport"] == transport
