"""One story under a real Prometheus, for the embedded engine and for a real vLLM: freeze, maintain, restore.

What it proves: full collections on the pages are those that a witness in each process saw, and every panel and
every rule of ours has data.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.dashboard_queries import MAY_BE_EMPTY, expressions
from tests.prometheus import Prometheus
from tests.sidecar_process import SidecarProcess, wait_for
from tests.vllm.scene import Scene, pids_of, rows_of

REPOSITORY = Path(__file__).resolve().parents[1]
RULES = REPOSITORY / "deploy" / "prometheus" / "gc-sidecar.rules.yaml"
GRAFANA = REPOSITORY / "deploy" / "grafana"
DASHBOARDS = sorted(GRAFANA.glob("*.json"))
# A panel that shows a rate needs two scrapes of the same thing.
DATA_DEADLINE_S = 60.0


# Two plain callbacks that know nothing of ours: one is called before ours, the other after it, at the start and
# at the stop. So a collection is at least as long as `inner` and at most as long as `outer` says, whatever ran
# between two callbacks: the witness needs no tolerance on a busy machine.
PLANT_WITNESS = """
import gc, time
witness = {"count": 0, "inner_ns": 0, "outer_ns": 0}
first_ns = last_ns = stopped_ns = 0
def watch_first(phase, info):
    global first_ns, stopped_ns
    if info["generation"] == 2:
        if phase == "start":
            first_ns = time.monotonic_ns()
        else:
            stopped_ns = time.monotonic_ns()
def watch_last(phase, info):
    global last_ns
    if info["generation"] == 2:
        if phase == "start":
            last_ns = time.monotonic_ns()
        elif first_ns and last_ns:
            witness["count"] += 1
            witness["inner_ns"] += stopped_ns - last_ns
            witness["outer_ns"] += time.monotonic_ns() - first_ns
gc.callbacks.insert(0, watch_first)
gc.callbacks.append(watch_last)
"""
ASK_WITNESS = "result = dict(witness)"


# A total in seconds is told with nine decimals.
ROUNDING_S = 1e-9
Testimony = Mapping[str, int]


def assert_as_witnessed(
    full: Mapping[str, Any], least: tuple[Testimony, Testimony], most: tuple[Testimony, Testimony]
) -> None:
    """Number and total of full collections lie between what the witness saw at `least` and at `most`: each is
    what it said first and what it said last."""
    count, total_s = full["count"], full["total_s"]
    assert least[1]["count"] - least[0]["count"] <= count <= most[1]["count"] - most[0]["count"]
    inner_s = (least[1]["inner_ns"] - least[0]["inner_ns"]) * 1e-9
    outer_s = (most[1]["outer_ns"] - most[0]["outer_ns"]) * 1e-9
    assert inner_s - ROUNDING_S <= total_s <= outer_s + ROUNDING_S, (inner_s, total_s, outer_s)


@contextmanager
def traffic(scene: Scene) -> Iterator[list[str]]:
    """Completions one after the other, as they come."""
    stop = threading.Event()
    completions: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            completions.append(scene.engine.complete("hello", 16))

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield completions
    finally:
        stop.set()
        client.join()


def full_collections(status: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    """Number and total length in seconds of each process's full collections, by its page."""
    return {
        name: (row["pauses"]["gen2"]["count"], row["pauses"]["gen2"]["total_s"])
        for name, row in rows_of(status).items()
    }


def tell_the_story(scene: Scene, sidecar: SidecarProcess) -> dict[str, Any]:
    """The story. Returns the verdict of a window round it, after proving it by the witness."""
    pids = pids_of(sidecar.status())
    scene.probe.run(PLANT_WITNESS, pids)
    # Asked on either side of the opening, and of the closing: CPython may collect in between.
    before = scene.probe.run(ASK_WITNESS, pids)
    status, opened = sidecar.post("/gc/windows", {"window_id": "story", "max_pause_ms": 0})
    assert status == 201, opened
    first = scene.probe.run(ASK_WITNESS, pids)
    reported: Counter[str] = Counter()
    with traffic(scene) as completions:
        for path in ("/gc/freeze", "/gc/maintain", "/gc/restore", "/gc/maintain"):
            status, answer = sidecar.post(path)
            assert status == 200, answer
            reported.update(
                f"{each['role']}-{each['dp_rank']}-{each['rank']}"
                for each in answer["operation"]["processes"]
                if each["pause_s"] is not None
            )
        # Tokens that come evenly, so that late ones can be told from them.
        enough = len(completions) + 10
        wait_for("tokens", lambda: len(completions) >= enough, deadline_s=60)
    last = scene.probe.run(ASK_WITNESS, pids)
    status, closed = sidecar.post("/gc/windows/story/close")
    assert status == 200, closed
    after = scene.probe.run(ASK_WITNESS, pids)
    verdict: dict[str, Any] = closed["window"]["verdict"]
    for process in verdict["processes"]:
        name = f"{process['role']}-{process['dp_rank']}-{process['rank']}"
        full = process["pauses"]["gen2"]
        assert_as_witnessed(full, (first[name], last[name]), (before[name], after[name]))
        # Every collection that an operation reported, and those of both maintenances are always among them.
        assert full["count"] >= reported[name] >= 2, (name, full, reported)
        listed = [
            pause["duration_s"]
            for pause in verdict["pauses"]
            if (pause["pid"], pause["gc_generation"]) == (process["pid"], 2)
        ]
        assert len(listed) == full["count"]
        assert sum(listed) == pytest.approx(full["total_s"], rel=1e-6)
    stalls = {stall["dp_rank"]: stall["stall_s"] for stall in verdict["stalls"]}
    assert stalls.keys() == {
        process["dp_rank"] for process in verdict["processes"] if process["role"] != "api_server"
    }
    for dp_rank, stall_s in stalls.items():
        totals = [
            sum(each["total_s"] for each in process["pauses"].values())
            for process in verdict["processes"]
            if process["dp_rank"] == dp_rank and process["role"] != "api_server"
        ]
        # A union: at least its longest part, and no more than their sum.
        assert max(totals) <= stall_s * 1.001
        assert stall_s <= sum(totals) * 1.001
    assert {reason["code"] for reason in verdict["reasons"]} >= {
        "pause_over_limit",
        "policy_changed",
        "maintained",
    }
    return verdict


def assert_every_panel_has_data(prometheus: Prometheus, sidecar: SidecarProcess) -> None:
    """Every query of every dashboard gives something, but those that cannot where we are."""
    # Some panels show only what happened within the last minute, and a lease ends only while there is one.
    for change in ("/gc/freeze", "/gc/restore", "/gc/freeze"):
        assert sidecar.post(change)[0] == 200
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        empty = {
            each
            for each in expressions(dashboard)
            if (dashboard["uid"], each.panel, each.ref_id) not in MAY_BE_EMPTY
        }
        assert empty, f"{path.name} has no panels"
        _until_filled(empty, lambda each: bool(prometheus.query(each.expr)))
        for each in expressions(dashboard):
            prometheus.query(each.expr)  # those that may be empty must be right all the same
    assert sidecar.post("/gc/restore")[0] == 200


def assert_every_rule_has_data(prometheus: Prometheus) -> None:
    """Every recorded series is there, and no rule failed; one about a memory limit needs a limit."""
    has_limit = bool(prometheus.query("gc_sidecar_memory_limit_bytes"))
    names = {
        rule["name"]
        for rule in prometheus.rules()
        if rule["type"] == "recording" and (has_limit or "per_limit" not in rule["name"])
    }
    assert names
    _until_filled(names, lambda name: bool(prometheus.query(name)))
    assert prometheus.unhealthy_rules() == {}


def _until_filled(wanted: set[Any], has_data: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + DATA_DEADLINE_S
    while wanted := {each for each in wanted if not has_data(each)}:
        assert time.monotonic() < deadline, f"no data: {sorted(map(str, wanted))}"
        time.sleep(0.5)


def assert_agrees_with_pages(prometheus: Prometheus, sidecar: SidecarProcess) -> None:
    """Prometheus tells of the same full collections as the pages."""
    for name, (count, total_s) in full_collections(sidecar.status()).items():
        role, dp_rank, rank = name.split("-")
        labels = f'role="{role}",dp_rank="{dp_rank}",rank="{rank}"'

        def sum_of(metric: str, labels: str = labels) -> float:
            return prometheus.value(f"sum({metric}{{{labels}}})") or 0.0

        wait_for(
            f"the pauses of {name}",
            lambda count=count: sum_of("gc_sidecar_pause_seconds_count") == count,
        )
        assert sum_of("gc_sidecar_pause_seconds_sum") == pytest.approx(total_s, rel=1e-6)
