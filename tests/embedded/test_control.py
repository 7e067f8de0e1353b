"""The whole path of a change on the embedded engine: every transport, every shape, many workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.board import Board, write_board
from gc_sidecar_agent.command import Command
from tests.embedded.engine import EmbeddedEngine, run_directory, scene
from tests.forked_sidecar import ForkedSidecar
from tests.sidecar_process import wait_for
from tests.vllm.real_vllm import EngineFailedError
from tests.vllm.scene import (
    HELD_OFF,
    Scene,
    freeze_maintain_restore,
    gen2_counts,
    pids_of,
    rows_of,
)

DATA_PARALLEL = {
    *("api_server-0-0", "api_server-0-1", "engine_core-0-0", "engine_core-1-0"),
    *("worker-0-0", "worker-0-1", "worker-1-0", "worker-1-1"),
}
WORKERS = {name for name in DATA_PARALLEL if name.startswith("worker")}
SMALL = ("--workers=2", "--heap-objects=20000")
LARGE = (*SMALL, "--data-parallel=2", "--api-servers=2")

# In one process, which has what sidecars are forked from.
pytestmark = pytest.mark.xdist_group("control")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """An engine that every test leaves as it found it."""
    with scene(tmp_path_factory.mktemp("large"), *LARGE) as running:
        yield running


@pytest.mark.parametrize("transport", ["plugin", "board"])
def test_data_parallel_with_two_api_servers(large: Scene, transport: str) -> None:
    with large.sidecar(transport, engine=transport != "board") as sidecar:
        freeze_maintain_restore(large, sidecar, DATA_PARALLEL)
        assert sidecar.status()["transport"] == transport


@pytest.mark.parametrize(
    ("transport", "flags"),
    [("plugin", ["--independent-dp"]), ("dev", ["--no-endpoint", "--dev-mode"])],
)
def test_data_parallel_of_another_kind(tmp_path: Path, transport: str, flags: list[str]) -> None:
    with scene(tmp_path, *LARGE, *flags) as running, running.sidecar(transport) as sidecar:
        freeze_maintain_restore(running, sidecar, DATA_PARALLEL)
        assert sidecar.status()["transport"] == transport


def test_a_remote_engine_without_a_run_directory(tmp_path: Path) -> None:
    with (
        scene(tmp_path, *SMALL, "--no-endpoint", "--dev-mode", run_dir=False) as running,
        running.sidecar("remote") as sidecar,
    ):
        names = {"api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1"}
        freeze_maintain_restore(running, sidecar, names)


def test_a_worker_without_an_agent_is_named_and_the_others_are_rolled_back(tmp_path: Path) -> None:
    flags = (*SMALL, "--worker-without-agent=1")
    with scene(tmp_path, *flags) as running, running.sidecar("one-without") as sidecar:
        code, body = sidecar.post("/gc/freeze")
        assert code == 502, body
        assert rows_of(sidecar.status())["worker-0-1"]["state"] == "uncovered"
        assert all(row["mode"] != "freeze" for row in sidecar.status()["processes"])
        running.assert_serves()


def test_sixty_four_workers_acknowledge_a_freeze(tmp_path: Path) -> None:
    with (
        scene(tmp_path, "--workers=64", "--heap-objects=2000", probe=False) as running,
        running.sidecar("many") as sidecar,
    ):
        sidecar.wait_for_coverage(66)
        code, body = sidecar.post("/gc/freeze")
        assert code == 200, body
        assert sum(row["role"] == "worker" for row in body["operation"]["processes"]) == 64
        assert sidecar.status()["coverage"] == {"acknowledged": 66, "expected": 66}
        running.assert_serves()
        assert sidecar.post("/gc/restore")[0] == 200


def test_a_lease_that_ends_restores_every_process_without_a_sidecar(large: Scene) -> None:
    with large.sidecar("short-lived") as sidecar:
        pids = pids_of(sidecar.wait_for_coverage(8))
        before = large.gc_state(pids)
        assert sidecar.post("/gc/freeze", {"lease_s": 1})[0] == 200
    wait_for("all are as found", lambda: large.gc_state(pids) == before)


@pytest.mark.parametrize(
    ("does", "code", "is_mended"),
    [
        ("gc.set_threshold(700, 10, 10)", "thresholds_changed", True),
        ("gc.unfreeze(); gc.collect()", "foreign_collection", True),
        ("gc.disable()", "gc_disabled", False),
    ],
)
def test_what_somebody_does_to_gc_under_a_policy_is_named_and_mended_where_it_is_ours(
    large: Scene, does: str, code: str, is_mended: bool
) -> None:
    name = "worker-1-0"
    with large.sidecar("drifting") as sidecar:
        pids = pids_of(sidecar.wait_for_coverage(8))
        before = large.gc_state(pids)
        assert sidecar.post("/gc/freeze")[0] == 200
        under_policy = large.gc_state(pids)
        worker = {name: pids[name]}
        large.probe.run(large.probe.only(pids[name], f"import gc; {does}"), worker)
        wait_for(
            "it has drifted",
            lambda: (rows_of(sidecar.status())[name]["reason"] or "").startswith(code),
        )
        assert rows_of(sidecar.status())[name]["drifts"][code] == 1
        if is_mended:
            wait_for(
                "it has it again", lambda: rows_of(sidecar.status())[name]["state"] == "applied"
            )
            assert large.gc_state(pids) == under_policy
        else:
            enable = large.probe.only(pids[name], "import gc; gc.enable()")
            large.probe.run(enable, worker)
        assert sidecar.post("/gc/restore")[0] == 200
        assert large.gc_state(pids) == before


@pytest.mark.parametrize(("policy", "third"), [("freeze", HELD_OFF), ("budget", 0)])
def test_the_environment_alone_polices_every_process(
    tmp_path: Path, policy: str, third: int
) -> None:
    with scene(tmp_path, *SMALL, env={"GC_SIDECAR_POLICY": policy}) as running:
        names = {"api_server 0", "engine_core dp0", "worker dp0 r0", "worker dp0 r1"}
        pids = {name: running.engine.pids(name)[0] for name in names}  # type: ignore[attr-defined]

        def have_it() -> bool:
            return all(s["threshold"][2] == third for s in running.gc_state(pids).values())

        wait_for("all have it", have_it)


def test_a_restore_that_an_earlier_sidecar_left_does_not_cancel_the_environments_policy(
    tmp_path: Path,
) -> None:
    with run_directory() as run_dir:
        write_board(str(run_dir), Board(Command("restore", "of-yesterday", 7)))
        with (
            EmbeddedEngine(
                *SMALL,
                run_dir=run_dir,
                extra_env={"GC_SIDECAR_POLICY": "freeze"},
                log_path=tmp_path / "engine.log",
            ) as engine,
            ForkedSidecar(
                engine_urls=[engine.url], run_dir=run_dir, log_path=tmp_path / "sidecar.log"
            ) as sidecar,
        ):
            wait_for("all are frozen", lambda: are_all_frozen(sidecar.status()))
            # A sidecar that has just started adopts what the pages show, whatever its board says.
            policy = sidecar.wait_for_coverage(4)["policy"]
            assert (policy["mode"], policy["generation"]) == ("freeze", 8)
            assert policy["owner"] == "environment"
            assert sidecar.post("/gc/restore", {"owner": "environment"})[0] == 200
            assert sidecar.status()["policy"]["generation"] == 9


def are_all_frozen(status: dict[str, Any]) -> bool:
    """Whether the policy that is wanted is freeze, and every process has it."""
    modes = [row["mode"] for row in status["processes"]]
    return [status["policy"]["mode"], *modes] == ["freeze"] * 5


def test_an_environment_that_asks_for_nonsense_keeps_it_from_starting(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFailedError, match="GC_SIDECAR_POLICY"),
        scene(tmp_path, *SMALL, env={"GC_SIDECAR_POLICY": "frozen"}),
    ):
        pass


@pytest.mark.parametrize("transport", ["plugin", "board"])
def test_a_budget_is_kept_by_every_process_until_it_is_restored(
    large: Scene, transport: str
) -> None:
    with large.sidecar(f"budget-{transport}", engine=transport != "board") as sidecar:
        pids = pids_of(sidecar.wait_for_coverage(8))
        before = large.gc_state(pids)
        code, body = sidecar.put("/gc/policy", {"mode": "budget", "pause_budget_ms": 1000})
        assert code == 200, body
        assert all(state["threshold"][2] == 0 for state in large.gc_state(pids).values())
        seen = gen2_counts(sidecar.status())
        deadline = time.monotonic() + 30
        while not all(gen2_counts(sidecar.status())[name] > seen[name] for name in WORKERS):
            assert time.monotonic() < deadline, "full collections do not go on"
            large.engine.stream_completions(4, max_tokens=32)
        code, body = sidecar.post("/gc/maintain")
        assert code == 200, body
        row = rows_of(sidecar.status())["worker-0-0"]
        assert (row["mode"], row["freezes"]["since_maintain"]) == ("budget", 0)
        assert sidecar.post("/gc/restore")[0] == 200
        wait_for("all are as found", lambda: large.gc_state(pids) == before)
