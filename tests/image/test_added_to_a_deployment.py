"""The sidecar beside a vLLM that serves: the pod of the kustomize example, and that of the manifest, played."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.deploy.kustomize import DEPLOY, EXAMPLE, build, documents, pod_of
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

SERVING = DEPLOY / "manifests" / "serving.yaml"
PODS = {
    "kustomize": lambda: pod_of(build(EXAMPLE)),
    "manifest": lambda: pod_of(documents(SERVING.read_text())),
}


@pytest.fixture(scope="module", params=PODS)
def pod(image: str, request: pytest.FixtureRequest) -> Iterator[PlayedPod]:
    spec = PODS[request.param]()
    names = [container["name"] for container in [*spec["initContainers"], *spec["containers"]]]
    with PlayedPod(spec, dict.fromkeys(names, image), PROGRAMS, {"vllm": ENGINE}) as pod:
        pod.start("vllm")
        wait_for_engine(pod)
        yield pod


def test_its_engine_is_controlled_from_the_sidecar_s_container(pod: PlayedPod) -> None:
    as_found = thresholds(pod)
    wait_for("the transport is plugin", lambda: status(pod)["transport"] == "plugin")
    pod.execute("gc-sidecar", "gc-sidecar", "freeze")
    assert has_policy(pod, "freeze")
    pod.execute("gc-sidecar", "gc-sidecar", "restore")
    assert has_policy(pod, "off")
    assert thresholds(pod) == as_found


def test_prometheus_and_the_kubelet_see_it_on_the_open_port_and_nobody_controls_it_there(
    pod: PlayedPod,
) -> None:
    ask = (
        "import sys, urllib.request, urllib.error\n"
        "try: print(urllib.request.urlopen('http://127.0.0.1:9471' + sys.argv[1]).read().decode())\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    metrics = pod.execute("vllm", "python3", "-c", ask, "/metrics")
    assert f'gc_sidecar_processes{{state="applied"}} {PROCESSES}.0' in metrics
    assert pod.execute("vllm", "python3", "-c", ask, "/gc").strip() == "404"


def test_doctor_finds_nothing_wrong_in_either_container(pod: PlayedPod) -> None:
    for container, program in (
        ("vllm", "/opt/gc-sidecar/bin/gc-sidecar"),
        ("gc-sidecar", "gc-sidecar"),
    ):
        findings = json.loads(pod.execute(container, program, "doctor", "--json", check=False))
        wrong = [f for f in findings["findings"] if f["level"] != "ok"]
        assert wrong == [], container


def test_it_ends_after_vllm_and_at_once(pod: PlayedPod) -> None:
    pod.signal("vllm", "TERM")
    pod.wait("vllm")
    (ended,) = pod.end()
    assert (ended.name, ended.exit_code) == ("gc-sidecar", 0)
    assert ended.took_s < 5.0
