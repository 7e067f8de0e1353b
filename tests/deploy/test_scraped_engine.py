"""Metrics, windows, rules and dashboards on the embedded engine, scraped by a real Prometheus."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import observing
from tests.deploy.metrics import METRICS
from tests.embedded.engine import scene
from tests.prometheus import Prometheus, hurried, promtool
from tests.sidecar_process import SidecarProcess, wait_for
from tests.striking import strike
from tests.vllm.scene import Scene, pids_of

FLAGS = ("--workers=2", "--heap-objects=30000", "--step-ms=4", "--retain-per-step=100")


@dataclass
class Stage:
    scene: Scene
    sidecar: SidecarProcess
    prometheus: Prometheus


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("observing")
    rules = hurried(observing.RULES, directory)
    with (
        scene(directory, *FLAGS) as running,
        running.sidecar("observing") as sidecar,
        Prometheus(sidecar.url.removeprefix("http://"), directory, rules) as prometheus,
    ):
        sidecar.wait_for_coverage(4)
        wait_for("a scrape", prometheus.is_scraping)
        yield Stage(running, sidecar, prometheus)


@pytest.mark.xdist_group("observing")
def test_every_panel_and_every_rule_has_data_while_the_story_is_told(stage: Stage) -> None:
    observing.tell_the_story(stage.scene, stage.sidecar)
    observing.assert_agrees_with_pages(stage.prometheus, stage.sidecar)
    observing.assert_every_panel_has_data(stage.prometheus, stage.sidecar)
    observing.assert_every_rule_has_data(stage.prometheus)


@pytest.mark.xdist_group("observing")
def test_rules_and_dashboards_are_written_for_the_samples_that_there_are(stage: Stage) -> None:
    body = stage.sidecar.get("/metrics", parse=False)[1]
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    # No GPU here, and perhaps no memory limit.
    may_lack = {"gc_sidecar_device_memory_bytes", "gc_sidecar_memory_limit_bytes"}
    wanted = {name: set(labels) for name, labels in METRICS.items() if name != "up"}
    assert {**{name: wanted[name] for name in may_lack}, **found} == wanted


@pytest.mark.xdist_group("observing")
def test_promtool_finds_nothing_to_say_about_the_metrics(stage: Stage) -> None:
    body = stage.sidecar.get("/metrics", parse=False)[1]
    checked = promtool("check", "metrics", given=body)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.xdist_group("observing")
def test_an_alert_fires_while_a_process_stands_still_and_ends_with_it(stage: Stage) -> None:
    sidecar, prometheus = stage.sidecar, stage.prometheus
    assert sidecar.post("/gc/freeze")[0] == 200
    worker = pids_of(sidecar.status())["worker-0-1"]
    wait_for("quiet", lambda: "GcSidecarAgentStale" not in prometheus.firing())
    strike(worker, signal.SIGSTOP)
    try:
        wait_for("the alert", lambda: "GcSidecarAgentStale" in prometheus.firing(), 40)
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for("its end", lambda: "GcSidecarAgentStale" not in prometheus.firing(), 40)
    assert sidecar.post("/gc/restore")[0] == 200
