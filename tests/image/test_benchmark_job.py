"""The benchmark Job's pod, played through with the image: as the plain manifest has it, and as the chart renders.

The embedded engine stands for vLLM. The benchmark's image is the bare base: it holds nothing of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.chart import rendering
from tests.image.containers import REPOSITORY, STAND_IN_BASE
from tests.image.pod import PlayedPod
from tests.image.scene import (
    ENGINE,
    PROCESSES,
    PROGRAMS,
    has_policy,
    status,
    thresholds,
    wait_for_engine,
)
from tests.sidecar_process import wait_for

MANIFEST = REPOSITORY / "deploy" / "manifests" / "benchmark-job.yaml"
REPORT_SCHEMA = json.loads((REPOSITORY / "docs" / "report.v1.schema.json").read_text())
# A lease that a test can wait for: the shortest that there is.
LEASE, ENGINE_TIMEOUT = "10s", "60s"
ENVIRONMENT = {
    "vllm": ENGINE,
    # Two busy cores are no place to measure: what is played here is not how long a pause is.
    "benchmark": {"GC_SIDECAR_MAX_PAUSE": "10s", "GC_SIDECAR_MAX_STALL_SHARE": "1"},
}


def of_manifest() -> dict[str, Any]:
    """The pod of the plain manifest, but for two durations."""
    job = yaml.safe_load(MANIFEST.read_text())
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    changed = {
        "--lease=2m": f"--lease={LEASE}",
        "--engine-timeout=45m": f"--engine-timeout={ENGINE_TIMEOUT}",
    }
    main = spec["containers"][0]
    main["args"] = [changed.get(argument, argument) for argument in main["args"]]
    assert set(changed.values()) <= set(main["args"])
    return spec


def of_chart() -> dict[str, Any]:
    """The pod that the chart renders."""
    results = {"report": "file"}
    values = {
        "lease": LEASE,
        "engineTimeout": ENGINE_TIMEOUT,
        "requireClean": True,
        "results": results,
    }
    return rendering.pod(rendering.render({"benchmark": values}))


def play(spec: dict[str, Any], image: str) -> PlayedPod:
    names = [container["name"] for container in spec["initContainers"]]
    images = {"benchmark": STAND_IN_BASE, **dict.fromkeys(names, image)}
    return PlayedPod(spec, images, PROGRAMS, ENVIRONMENT)


@pytest.fixture(scope="module")
def pod(image: str) -> Iterator[PlayedPod]:
    """The manifest's pod, with the engine ready. The tests start one benchmark after the other in it."""
    with play(of_manifest(), image) as pod:
        wait_for_engine(pod)
        yield pod


@pytest.fixture
def as_found(pod: PlayedPod) -> dict[str, list[int]]:
    """The thresholds of every process before anything was done to them."""
    return thresholds(pod)


def start_measuring(pod: PlayedPod, ends: str) -> None:
    pod.start("benchmark", STAND_IN_ENDS=ends)
    wait_for(
        "the benchmark measures", lambda: "measured 20 requests" in pod.logs("benchmark"), 60.0
    )


@pytest.mark.parametrize("spec_of", [of_manifest, of_chart])
def test_a_job_is_played_from_its_start_to_its_end(
    spec_of: Callable[[], dict[str, Any]], image: str
) -> None:
    with play(spec_of(), image) as pod:
        # The benchmark does not wait for the engine to be ready: `run` does.
        pod.start("benchmark")
        code = pod.wait("benchmark")
        log = pod.logs("benchmark")
        assert code == 0, log
        # The command's own output, and ours beside it.
        assert "measured 20 requests" in log
        verdict = pod.termination_message("benchmark").strip()
        assert verdict.startswith("clean under freeze")
        assert verdict in log
        assert has_policy(pod, "off")
        # Its results lie where the command and the report were told to write.
        results = pod.volume("results")
        assert json.loads((results / "result.json").read_text()) == {"completed": 20}
        report = json.loads((results / "report.json").read_text())
        jsonschema.validate(report, REPORT_SCHEMA)
        assert report["exit_code"] == 0
        # Then the sidecars go, vLLM before ours, and ours does not use up the grace period.
        ended = pod.end()
        assert [each.name for each in ended] == ["vllm", "gc-sidecar"]
        assert ended[1].exit_code == 0
        assert ended[1].took_s < 5.0


def test_the_containers_share_the_run_directory_under_different_users(pod: PlayedPod) -> None:
    pod.execute("gc-sidecar", "gc-sidecar", "freeze")
    pod.execute("gc-sidecar", "gc-sidecar", "restore")
    entries = list(pod.volume("run-dir").iterdir())
    owners = {entry.name: entry.stat().st_uid for entry in entries}
    pages = [name for name in owners if name.endswith(".page")]
    assert len(pages) == PROCESSES
    assert {owners[name] for name in pages} == {2000}
    assert owners["board.json"] == owners["endpoint.token"] == 65532
    assert {entry.stat().st_gid for entry in entries} == {65532}
    # The engine reads the secret through the group, so the sidecar reaches it over its own port.
    wait_for("the transport is plugin", lambda: status(pod)["transport"] == "plugin")


def test_the_benchmark_sees_neither_the_run_directory_nor_anything_of_ours_in_its_image(
    pod: PlayedPod,
) -> None:
    start_measuring(pod, "never")
    look = (
        "import importlib.util, os; "
        "print(importlib.util.find_spec('gc_sidecar'), os.path.exists('/run/gc-sidecar'))"
    )
    assert pod.execute("benchmark", "python3", "-c", look) == "None False\n"
    pod.signal("benchmark", "TERM")
    pod.wait("benchmark")


def test_a_failing_command_gives_the_pod_its_exit_code(
    pod: PlayedPod, as_found: dict[str, list[int]]
) -> None:
    pod.start("benchmark", STAND_IN_ENDS="7")
    assert pod.wait("benchmark") == 7, pod.logs("benchmark")
    assert has_policy(pod, "off")
    assert thresholds(pod) == as_found


def test_a_deleted_pod_restores_before_its_benchmark_is_gone(
    pod: PlayedPod, as_found: dict[str, list[int]]
) -> None:
    start_measuring(pod, "never")
    assert has_policy(pod, "freeze")
    pod.signal("benchmark", "TERM")
    assert pod.wait("benchmark") == 143, pod.logs("benchmark")
    assert has_policy(pod, "off")
    assert thresholds(pod) == as_found


def test_the_lease_restores_after_a_benchmark_that_was_killed(
    pod: PlayedPod, as_found: dict[str, list[int]]
) -> None:
    start_measuring(pod, "never")
    pod.signal("benchmark", "KILL")
    assert pod.wait("benchmark") == 137
    # Nobody is left to restore, and every process still has the policy.
    assert has_policy(pod, "freeze")
    wait_for("the lease has ended the policy", lambda: has_policy(pod, "off"), 30.0)
    wait_for("every process is as it was found", lambda: thresholds(pod) == as_found)


def test_a_lost_engine_ends_the_benchmark_and_comes_back_to_normal_gc(
    pod: PlayedPod, as_found: dict[str, list[int]]
) -> None:
    start_measuring(pod, "never")
    pod.signal("vllm", "KILL")
    assert pod.wait("vllm") == 137
    assert pod.wait("benchmark") == 125, pod.logs("benchmark")
    assert pod.termination_message("benchmark").strip() != ""
    # The kubelet starts a native sidecar again.
    pod.start("vllm")
    wait_for("the new engine is under normal GC", lambda: has_policy(pod, "off"), 60.0)
    assert thresholds(pod) == as_found
