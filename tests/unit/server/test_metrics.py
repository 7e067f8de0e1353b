"""/metrics: names, labels, first values, both formats; and nothing is sent to the engine for it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gc_sidecar.server.exposition import render
from gc_sidecar_agent.page import (
    FULL_RING_OFFSET,
    NUMBER_NAMES,
    NUMBERS_OFFSET,
    RING_BYTES,
    RING_RECORDS,
    PageWriter,
    create_page,
    page_name,
)
from tests.unit.server.conftest import FAST, Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
PROCESS = {"role", "dp_rank", "rank"}
WORKER = {"role": "worker", "dp_rank": "0", "rank": "1"}
CORE = {"role": "engine_core", "dp_rank": "0", "rank": "0"}
# The contract: what Prometheus calls the kind, and the labels.
METRICS: dict[str, tuple[str, set[str]]] = {
    # of a process
    "gc_sidecar_pause_seconds": ("histogram", PROCESS | {"trigger"}),
    "gc_sidecar_collections": ("counter", PROCESS | {"generation"}),
    "gc_sidecar_collection_seconds": ("counter", PROCESS | {"generation"}),
    "gc_sidecar_collected_objects": ("counter", PROCESS | {"generation"}),
    "gc_sidecar_uncollectable_objects": ("counter", PROCESS | {"generation"}),
    "gc_sidecar_in_progress_seconds": ("gauge", PROCESS),
    "gc_sidecar_freezes": ("counter", PROCESS),
    "gc_sidecar_pauses_over_budget": ("counter", PROCESS),
    "gc_sidecar_resident_memory_bytes": ("gauge", PROCESS | {"kind"}),
    "gc_sidecar_resident_growth_bytes": ("gauge", PROCESS),
    "gc_sidecar_device_memory_bytes": ("gauge", PROCESS | {"kind"}),
    "gc_sidecar_observed_generation": ("gauge", PROCESS),
    "gc_sidecar_policy_exits": ("counter", PROCESS | {"reason"}),
    "gc_sidecar_maintain_seconds": ("summary", PROCESS),
    "gc_sidecar_reclaimed_objects": ("counter", PROCESS),
    "gc_sidecar_lost_records": ("counter", PROCESS),
    "gc_sidecar_agent_info": ("gauge", PROCESS | {"python", "engine", "collector"}),
    # of the engine
    "gc_sidecar_stall_seconds": ("counter", {"dp_rank"}),
    "gc_sidecar_memory_limit_bytes": ("gauge", set()),
    "gc_sidecar_memory_current_bytes": ("gauge", set()),
    "gc_sidecar_policy": ("gauge", {"mode"}),
    "gc_sidecar_processes": ("gauge", {"state"}),
    "gc_sidecar_desired_generation": ("gauge", set()),
    "gc_sidecar_coverage_ratio": ("gauge", set()),
    "gc_sidecar_engine_up": ("gauge", set()),
    "gc_sidecar_lease_expires_timestamp_seconds": ("gauge", set()),
    # of the sidecar
    "gc_sidecar_rpc_desync": ("counter", set()),
    "gc_sidecar_unreadable_pages": ("gauge", set()),
    "gc_sidecar_window_open": ("gauge", set()),
    "gc_sidecar_operations": ("counter", {"operation", "result"}),
    "gc_sidecar_operation_seconds": ("histogram", {"operation"}),
    "gc_sidecar_build_info": ("gauge", {"version"}),
}
BOUNDS = [
    "0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1",
    "2.5", "5", "10", "30", "60", "+Inf",
]  # fmt: skip
MOST_SERIES = 70
OPEN_METRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}

Series = dict[tuple[str, ...], float]


def series_of(text: str) -> Series:
    """Every sample by name and labels; none may come twice."""
    found: Series = {}
    for family in parse_text(text):
        for sample in family.samples:
            key = (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    return series[(f"gc_sidecar_{name}", *(f"{k}={v}" for k, v in sorted(labels.items())))]


async def scrape(sidecar: Sidecar) -> Series:
    answer = await sidecar.open_client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return series_of(answer.text)


def of_process(series: Series, labels: dict[str, str]) -> Series:
    wanted = {f"{name}={text}" for name, text in labels.items()}
    return {key: number for key, number in series.items() if wanted <= set(key)}


async def test_every_metric_has_the_kind_and_labels_of_the_contract_and_no_pid(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    everything = {"device_allocated_bytes": 5, "device_reserved_bytes": 6}
    engine = start_engine(processes={"worker-0-1": {"numbers": everything}})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    text = (await sidecar.open_client.get("/metrics")).text
    families = {family.name: family for family in parse_text(text)}
    assert {
        name: (family.type, set().union(*(sample.labels for sample in family.samples)) - {"le"})
        for name, family in families.items()
    } == METRICS
    for name, family in families.items():
        assert family.documentation.endswith((".", "runs.")), name
        names = [set(sample.labels) - {"le"} for sample in family.samples]
        assert all(each == names[0] for each in names), name
    assert 60 < len(of_process(series_of(text), WORKER)) <= MOST_SERIES


async def test_a_scrape_sends_nothing_to_the_engine(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    before = engine.requests()
    for _ in range(10):
        await scrape(sidecar)
    assert engine.requests() == before
    assert engine.calls() == []


async def test_values_come_from_the_pages_exactly(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    chance = random.Random(2)
    numbers = {
        name: chance.randrange(1, 1000) * 1_000_000
        for name in NUMBER_NAMES
        if name.startswith(("gen", "auto_", "requested_", "device_", "memory_"))
        or name.endswith("_bytes")
        or name in ("freezes", "maintains", "maintain_total_ns", "reclaimed_objects")
    }
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.set_process("worker-0-1", numbers=numbers)
    await sidecar.until(
        lambda status: any(
            p["memory"]["anonymous_bytes"] == numbers["anonymous_bytes"]
            for p in status["processes"]
        )
    )
    await sidecar.client.post("/gc/freeze?lease_s=500")
    series = await scrape(sidecar)
    for generation in range(3):
        told = {**WORKER, "generation": str(generation)}
        number = f"gen{generation}_"
        assert value(series, "collections_total", **told) == numbers[f"{number}count"]
        assert value(series, "collection_seconds_total", **told) == pytest.approx(
            numbers[f"{number}total_ns"] / 1e9
        )
        for name in ("collected_objects", "uncollectable_objects"):
            assert value(series, f"{name}_total", **told) == numbers[f"{number}{name}"]
    for trigger in ("auto", "requested"):
        told = {**WORKER, "trigger": trigger}
        below = 0
        for index, bound in enumerate(BOUNDS):
            below += numbers[f"{trigger}_bucket{index}"]
            # The parser has the bounds as the exposition writes them.
            assert value(series, "pause_seconds_bucket", **told, le=bound) == below
        assert value(series, "pause_seconds_count", **told) == below
        assert value(series, "pause_seconds_sum", **told) == pytest.approx(
            numbers[f"{trigger}_total_ns"] / 1e9
        )
    for kind in ("anonymous", "file", "shared"):
        told = {**WORKER, "kind": kind}
        assert value(series, "resident_memory_bytes", **told) == numbers[f"{kind}_bytes"]
    for kind in ("allocated", "reserved"):
        told = {**WORKER, "kind": kind}
        assert value(series, "device_memory_bytes", **told) == numbers[f"device_{kind}_bytes"]
    assert value(series, "resident_growth_bytes", **WORKER) == numbers["growth_bytes"]
    assert value(series, "freezes_total", **WORKER) == numbers["freezes"]
    assert value(series, "maintain_seconds_count", **WORKER) == numbers["maintains"]
    assert value(series, "maintain_seconds_sum", **WORKER) == pytest.approx(
        numbers["maintain_total_ns"] / 1e9
    )
    assert value(series, "reclaimed_objects_total", **WORKER) == numbers["reclaimed_objects"]
    assert value(series, "memory_limit_bytes") == numbers["memory_limit_bytes"]
    assert value(series, "memory_current_bytes") == numbers["memory_current_bytes"]
    about = {"python": "3.11.7", "engine": "vllm 0.32.0", "collector": "generational"}
    assert value(series, "agent_info", **WORKER, **about) == 1
    # The others have their own.
    assert value(series, "collections_total", **CORE, generation="2") == 3
    assert value(series, "pause_seconds_sum", **CORE, trigger="auto") == pytest.approx(0.8)
    # And of the engine:
    assert value(series, "observed_generation", **WORKER) == 1
    assert value(series, "desired_generation") == 1
    assert value(series, "policy", mode="freeze") == 1
    assert value(series, "policy", mode="off") == value(series, "policy", mode="budget") == 0
    assert value(series, "processes", state="applied") == 4
    for state in ("pending", "drifted", "stale", "gone", "uncovered", "refused"):
        assert value(series, "processes", state=state) == 0
    assert value(series, "coverage_ratio") == 1
    assert value(series, "engine_up") == 1
    assert value(series, "lease_expires_timestamp_seconds") > 1e9
    assert value(series, "operations_total", operation="freeze", result="applied") == 1
    assert value(series, "operation_seconds_count", operation="freeze") == 1


async def test_everything_starts_at_zero_before_an_engine_is_seen(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    series = await scrape(sidecar)
    for operation in ("freeze", "budget", "maintain", "restore", "lease"):
        for result in ("applied", "partial", "rolled_back", "failed", "unknown"):
            labels = {"operation": operation, "result": result}
            assert value(series, "operations_total", **labels) == 0
        assert value(series, "operation_seconds_count", operation=operation) == 0
    for name in (
        "rpc_desync_total", "engine_up", "coverage_ratio", "desired_generation", "window_open",
        "lease_expires_timestamp_seconds", "unreadable_pages",
    ):  # fmt: skip
        assert value(series, name) == 0
    assert not [key for key in series if "role=" in " ".join(key)]


async def test_the_series_of_a_process_start_at_zero(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await start_sidecar(start_engine())
    await sidecar.until_seen("plugin", 4)
    series = await scrape(sidecar)
    for reason in ("lease_expired", "rss_growth", "freeze_failed", "restored"):
        assert value(series, "policy_exits_total", **WORKER, reason=reason) == 0
    for name in (
        "in_progress_seconds", "resident_growth_bytes", "maintain_seconds_count",
        "maintain_seconds_sum", "reclaimed_objects_total", "lost_records_total",
    ):  # fmt: skip
        assert value(series, name, **WORKER) == 0
    assert value(series, "stall_seconds_total", dp_rank="0") == 0


async def test_what_is_not_known_has_no_series(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    nothing = {"memory_limit_bytes": None, "memory_current_bytes": None, "file_bytes": None}
    names = ("api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1")
    engine = start_engine(processes={name: {"numbers": nothing} for name in names})
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    series = await scrape(sidecar)
    assert not [key for key in series if key[0].startswith("gc_sidecar_memory_")]
    kinds = {
        (key[0], label)
        for key in series
        for label in key[1:]
        if label.startswith("kind=") and "rank=1" in key
    }
    assert kinds == {
        ("gc_sidecar_resident_memory_bytes", "kind=anonymous"),
        ("gc_sidecar_resident_memory_bytes", "kind=shared"),
        ("gc_sidecar_device_memory_bytes", "kind=reserved"),  # the stand-in's 0
    }
    engine.set_process("worker-0-0", numbers={**nothing, "memory_current_bytes": 77})
    await sidecar.until(lambda _: "\ngc_sidecar_memory_current_bytes 77.0" in _text_of(sidecar))
    assert "\ngc_sidecar_memory_limit_bytes " not in _text_of(sidecar)


def _text_of(sidecar: Sidecar) -> str:
    """By the last snapshot, without a request."""
    services = sidecar.services
    return render(services.coordinator.knowledge, 0, services.tally, None)[0].decode()


async def test_policies_that_ended_are_counted_by_reason_also_by_one_that_is_new(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    for reason in ("lease_expired", "lease_expired", 'of a "later" agent\n'):
        engine.set_process("worker-0-1", leave=reason)
    await sidecar.until(lambda _: "later" in _text_of(sidecar))
    series = await scrape(sidecar)
    assert value(series, "policy_exits_total", **WORKER, reason="lease_expired") == 2
    assert value(series, "policy_exits_total", **WORKER, reason='of a "later" agent\n') == 1
    assert value(series, "policy_exits_total", **WORKER, reason="rss_growth") == 0


async def test_stalls_and_lost_records_are_told(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(dp=2)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 7)
    engine.collect("worker-0-0", 0.5)
    engine.collect("worker-0-1", 0.5)
    engine.collect("api_server-0-0", 60.0)
    engine.collect("worker-1-1", 1e-6, times=RING_RECORDS + 5)
    await sidecar.until_recorded(3 + RING_RECORDS + 5)
    series = await scrape(sidecar)
    other = {"role": "worker", "dp_rank": "1", "rank": "1"}
    assert value(series, "lost_records_total", **other) == 5
    assert value(series, "lost_records_total", **WORKER) == 0
    # The second worker's began a moment later.
    assert 0.5 < value(series, "stall_seconds_total", dp_rank="0") < 0.9
    assert value(series, "stall_seconds_total", dp_rank="1") == pytest.approx(RING_RECORDS * 1e-6)


async def test_the_stall_of_an_engine_in_one_process_is_told(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(one_process=True, workers=1)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 1)
    assert value(await scrape(sidecar), "stall_seconds_total", dp_rank="0") == 0
    engine.collect("api_server-0-0", 0.25)
    await sidecar.until_recorded(1)
    assert value(await scrape(sidecar), "stall_seconds_total", dp_rank="0") == pytest.approx(0.25)


async def test_a_restarted_engine_has_its_own_series_at_the_next_scrape_and_no_old_ones(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine(dp=2)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 7)
    for name in ("worker-0-1", "worker-1-1"):
        engine.collect(name, 0.001, times=40)
    other = {**WORKER, "dp_rank": "1"}
    await sidecar.until_recorded(80)
    series = await scrape(sidecar)
    for labels in (WORKER, other):
        assert value(series, "collections_total", **labels, generation="2") == 43
    old = set(series)
    engine.restart()
    await asyncio.sleep(FAST.sight_fresh_s)  # as old a reading may be shown
    series = await scrape(sidecar)
    assert value(series, "collections_total", **WORKER, generation="2") == 3
    assert set(series) == old
    engine.set_process("worker-1-1", dead=True)
    await sidecar.until(lambda s: any(p["state"] == "gone" for p in s["processes"]))
    series = await scrape(sidecar)
    assert of_process(series, other) == {}
    assert value(series, "collections_total", **WORKER, generation="2") == 3
    assert value(series, "stall_seconds_total", dp_rank="1") > 0, "the group is still there"


async def test_pages_of_an_engine_that_is_gone_have_no_series(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    engine.stop()
    await sidecar.until(lambda s: {p["state"] for p in s["processes"]} == {"gone"})
    series = await scrape(sidecar)
    assert not [key for key in series if "role=worker" in key]
    assert value(series, "processes", state="gone") == 4
    assert value(series, "coverage_ratio") == 0


async def test_openmetrics_is_spoken_to_those_who_ask_for_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await start_sidecar(start_engine())
    await sidecar.until_seen("plugin", 4)
    answer = await sidecar.client.get("/metrics", headers=OPEN_METRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    families = list(parse_open(answer.text))  # type: ignore[no-untyped-call]
    assert {family.name: family.type for family in families} == {
        name: kind for name, (kind, _) in METRICS.items()
    }
    plain = await sidecar.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=abc", "text/plain;version=1.."]
)
async def test_a_version_that_is_none_gets_the_metrics_nevertheless(
    start_sidecar: StartSidecar, accept: str
) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert "gc_sidecar_build_info" in answer.text


# --- hostile pages ---

ODD_TEXTS = ["\ud800", "a\x00b", 'a"b\\c\nd\r', "\u2028\U0001f600" * 20, "", "{}=,#"]


def hostile_page(run_dir: Path, chance: random.Random, number: int) -> PageWriter:
    """A page that no agent would write, but a reader takes for one."""
    page = create_page(str(run_dir), page_name("worker", number, 0, number))
    text = ODD_TEXTS[number % len(ODD_TEXTS)]
    page.write_description(
        {
            "identity": {
                "roles": chance.sample(["worker", "engine_core", "api_server"], k=2),
                "dp_rank": chance.choice([0, 0, number]), "rank": 0, "token": text or "x",
                "pid": chance.choice([-(1 << 63), None, 5]), "host": text, "started_at": 1e300,
                "python": text, "collector": text, "engine": text, "agent": text,
                "page_error": text, "agent_error": text,
            },
            "topology": {"dp_ranks": [0, 1, number], "workers": 1, "api_servers": 1},
            "state": {
                "mode": "freeze", "generation": chance.choice([0, 1, (1 << 53) - 1]),
                "ready": True, "entered_at": 1e300, "owner": text, "interval_s": -1e299,
                "exits": {text or "x": (1 << 63) - 1, "restored": 1 << 62, "\ud801": 3, "?": 4},
                "reason": {"code": text, "detail": text},
            },
        }
    )  # fmt: skip
    extremes = [-(1 << 63), -(1 << 62), -1, 0, 1, 1 << 62, (1 << 63) - 1]
    words = b"".join(
        chance.choice([chance.choice(extremes), chance.getrandbits(62) - (1 << 61)]).to_bytes(
            8, "little", signed=True
        )
        for _ in NUMBER_NAMES
    )
    os.pwrite(page.fd, words, NUMBERS_OFFSET)
    os.pwrite(page.fd, chance.randbytes(2 * RING_BYTES), FULL_RING_OFFSET)
    page.header[2] = chance.choice(extremes)
    return page


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_stands_on_a_page_everything_is_answered(
    start_engine: StartEngine, start_sidecar: StartSidecar, run_dir: Path, seed: int
) -> None:
    chance = random.Random(seed)
    engine = start_engine(workers=1)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 3)
    await sidecar.client.post("/gc/windows?window_id=w&max_growth_bytes=1&max_stall_ms=1")
    pages = [hostile_page(run_dir, chance, number) for number in range(1, 13)]
    # Their writer is this process, which holds no lock against itself.
    monkey = pytest.MonkeyPatch()
    monkey.setattr("gc_sidecar_agent.page._is_locked", lambda fd: True)
    try:
        for _ in range(2):
            series = await scrape(sidecar)
            assert len(of_process(series, {"role": "worker"})) > 60
            paths: list[tuple[str, dict[str, Any]]] = [
                ("/metrics", OPEN_METRICS), ("/gc", {}), ("/gc?format=table", {}),
                ("/gc/pauses", {}), ("/gc/pauses?format=table", {}), ("/gc/windows/w", {}),
                ("/gc/windows/w?format=table", {}), ("/gc/windows", {}), ("/version", {}),
            ]  # fmt: skip
            for path, headers in paths:
                answer = await sidecar.client.get(path, headers=headers)
                assert answer.status_code == 200, (path, answer.text)
            for page in pages:
                os.pwrite(page.fd, chance.randbytes(8 * len(NUMBER_NAMES)), NUMBERS_OFFSET)
        answer = await sidecar.client.post("/gc/windows/w/close")
        assert answer.status_code == 200
        assert answer.json()["window"]["verdict"]["clean"] is False
        answer = await sidecar.client.get("/gc/windows/w?format=table")
        assert answer.status_code == 200
    finally:
        monkey.undo()
        for page in pages:
            page.discard()


async def test_two_processes_that_claim_one_place_have_no_series_twice(
    start_engine: StartEngine,
    start_sidecar: StartSidecar,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = start_engine(workers=1)
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 3)
    monkeypatch.setattr("gc_sidecar_agent.page._is_locked", lambda fd: True)
    page = create_page(str(run_dir), page_name("engine_core", 0, 0, 1))
    identity = {
        "roles": ["engine_core", "worker"], "dp_rank": 0, "rank": 0, "token": "both",
        "started_at": time.time(),
    }  # fmt: skip
    page.write_description({"identity": identity, "state": {"mode": "off", "generation": 0}})
    engine.restart("engine_core-0-0")  # later than that, the worker earlier
    status = await sidecar.until(
        lambda s: [p["role"] for p in s["processes"]].count("engine_core") == 2
    )
    assert status["coverage"]["expected"] == 3
    series = await scrape(sidecar)  # which takes no sample twice
    assert value(series, "freezes_total", **CORE) in (0, 1)
    page.discard()
