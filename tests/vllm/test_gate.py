"""The environment gate on a real vLLM, with no sidecar anywhere: who is policed, when, and who is left alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gc_sidecar_agent.page import PageError, list_pages, read_page
from tests.sidecar_process import wait_for
from tests.vllm.real_vllm import EngineFailedError
from tests.vllm.scene import HELD_OFF, Scene, scene

PROCESSES = ("api_server", "engine_core", "worker")


def descriptions(run_dir: Path) -> dict[str, dict[str, object]]:
    """The state of each process by its role, as the pages tell."""
    found: dict[str, dict[str, object]] = {}
    for name in list_pages(str(run_dir)):
        try:
            page = read_page(str(run_dir), name)
        except (PageError, OSError):
            continue
        identity = page.description["identity"]
        found[identity["roles"][0]] = page.description["state"]
    return found


def pids(running: Scene) -> dict[str, int]:
    """The processes by their role, told from vLLM's own titles: pages are not asked."""
    processes = running.engine.processes()
    everyone = {process.pid for process in processes}
    found = {}
    for process in processes:
        if "EngineCore" in process.title:
            found["engine_core"] = process.pid
        elif "Worker" in process.title:
            found["worker"] = process.pid
        elif process.parent not in everyone:
            found["api_server"] = process.pid
    assert set(found) == set(PROCESSES), processes
    return found


@pytest.mark.parametrize("variable", ["GC_SIDECAR_POLICY", "DYN_FPM_GC_POLICY"])
def test_freeze_polices_every_process_once_it_is_ready_and_none_before(
    tmp_path: Path, tiny_model: Path, variable: str
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    too_early: list[dict[str, object]] = []
    started = threading.Event()

    def watch() -> None:
        while not started.wait(0.05):
            too_early.extend(
                state
                for state in descriptions(run_dir).values()
                if state["mode"] != "off" and not state["ready"]
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with scene(
            tmp_path, tiny_model, endpoint=False, run_dir=run_dir, env={variable: "freeze"}
        ) as running:
            wait_for(
                "every process is policed",
                lambda: (
                    [descriptions(run_dir).get(r, {}).get("mode") for r in PROCESSES]
                    == ["freeze"] * 3
                ),
            )
            started.set()
            for state in running.gc_state(pids(running)).values():
                assert state["threshold"][2] == HELD_OFF
                assert state["frozen"]
            running.assert_serves()
            running.assert_log_is_quiet()
    finally:
        started.set()
        watcher.join()
    assert not too_early


def test_off_leaves_a_vllm_that_cannot_be_told_from_one_without_us(
    tmp_path: Path, tiny_model: Path
) -> None:
    dynamo = tmp_path / "site"
    (dynamo / "dynamo").mkdir(parents=True)
    (dynamo / "dynamo" / "__init__.py").write_text("")
    states = []
    # The published name is left alone beside dynamo, so this is `off` as well.
    with scene(
        tmp_path / "with",
        tiny_model,
        endpoint=False,
        env={"DYN_FPM_GC_POLICY": "freeze"},
        python_path=[dynamo],
    ) as running:
        processes = pids(running)
        # vLLM freezes its API server a moment after it has its client.
        wait_for(
            "the API server is frozen", lambda: running.gc_state(processes)["api_server"]["frozen"]
        )
        states.append(running.gc_state(processes))
        assert "left to dynamo" in running.engine.log_text()
    with scene(tmp_path / "without", tiny_model, plugin=False, endpoint=False) as running:
        states.append(running.gc_state(pids(running)))
    assert states[0] == states[1]


def test_a_policy_that_does_not_exist_stops_vllm_at_its_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    with (
        pytest.raises(EngineFailedError),
        scene(tmp_path, tiny_model, endpoint=False, env={"GC_SIDECAR_POLICY": "Freeze"}),
    ):
        pass
    log = (tmp_path / "vllm.log").read_text()
    assert "GC_SIDECAR_POLICY='Freeze' is not a policy: it may be off, freeze or budget" in log
