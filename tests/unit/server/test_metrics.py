"""/metrics: names, labels, first values, both formats; and nothing is sent to the engine for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.unit.server.conftest import StartSidecar
from tests.unit.server.stand_in import StandInEngine

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
PROCESS = {"role", "dp_rank", "rank"}
WORKER = {"role": "worker", "dp_rank": "0", "rank": "1"}
LABELS = {
    "gc_sidecar_pause_seconds": PROCESS | {"trigger"},
    "gc_sidecar_collections": PROCESS | {"generation"},
    "gc_sidecar_resident_memory_bytes": PROCESS | {"kind"},
    "gc_sidecar_resident_growth_bytes": PROCESS,
    "gc_sidecar_policy": {"mode"},
    "gc_sidecar_processes": {"state"},
    "gc_sidecar_coverage_ratio": set(),
    "gc_sidecar_desired_generation": set(),
    "gc_sidecar_observed_generation": PROCESS,
    "gc_sidecar_freezes": PROCESS,
    "gc_sidecar_policy_exits": PROCESS | {"reason"},
    "gc_sidecar_operations": {"operation", "result"},
    "gc_sidecar_operation_seconds": {"operation"},
    "gc_sidecar_rpc_desync": set(),
    "gc_sidecar_unreadable_pages": set(),
    "gc_sidecar_engine_up": set(),
    "gc_sidecar_lease_expires_timestamp_seconds": set(),
    "gc_sidecar_in_progress_seconds": PROCESS,
    "gc_sidecar_build_info": {"version"},
}


async def test_every_metric_has_the_labels_of_the_contract_and_no_pid(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    families = {family.name: family for family in parse_text(
        (await sidecar.open_client.get("/metrics")).text
    )}  # fmt: skip
    assert set(families) == set(LABELS)
    for name, family in families.items():
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == LABELS[name], name
    per_process = [
        sample
        for family in families.values()
        for sample in family.samples
        if WORKER.items() <= sample.labels.items()
    ]
    assert len(per_process) <= 60
    assert engine.calls() == []


async def test_values_come_from_the_pages(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    engine = start_engine()
    sidecar = await start_sidecar(engine)
    await sidecar.until_seen("plugin", 4)
    await sidecar.client.post("/gc/freeze?lease_s=500")
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse_text((await sidecar.open_client.get("/metrics")).text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        key = (f"gc_sidecar_{name}", *sorted(labels.items()))
        return float(values[key])

    assert value("collections_total", **WORKER, generation="2") == 3
    assert value("pause_seconds_count", **WORKER, trigger="auto") == 2
    assert value("pause_seconds_sum", **WORKER, trigger="auto") == pytest.approx(0.8)
    assert value("pause_seconds_bucket", **WORKER, trigger="auto", le="0.25") == 0
    assert value("pause_seconds_bucket", **WORKER, trigger="auto", le="0.5") == 2
    assert value("pause_seconds_count", **WORKER, trigger="requested") == 1
    assert value("resident_memory_bytes", **WORKER, kind="anonymous") == 1 << 20
    assert value("observed_generation", **WORKER) == value("desired_generation") == 1
    assert value("policy", mode="freeze") == 1
    assert value("policy", mode="off") == 0
    assert value("processes", state="applied") == 4
    assert value("processes", state="uncovered") == 0
    assert value("coverage_ratio") == 1
    assert value("engine_up") == 1
    assert value("lease_expires_timestamp_seconds") > 1e9
    assert value("operations_total", operation="freeze", result="applied") == 1
    assert value("operation_seconds_count", operation="freeze") == 1


async def test_everything_starts_at_zero_before_an_engine_is_seen(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in parse_text((await sidecar.open_client.get("/metrics")).text)
        for sample in family.samples
    }
    assert samples["gc_sidecar_operations_total", "applied", "freeze"] == 0
    assert samples["gc_sidecar_operations_total", "maintain", "unknown"] == 0
    assert samples["gc_sidecar_rpc_desync_total",] == 0
    assert samples["gc_sidecar_engine_up",] == 0
    assert samples["gc_sidecar_coverage_ratio",] == 0
    assert samples["gc_sidecar_lease_expires_timestamp_seconds",] == 0


async def test_openmetrics_is_spoken_to_those_who_ask_for_it(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    sidecar = await start_sidecar(start_engine())
    await sidecar.until_seen("plugin", 4)
    accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
    answer = await sidecar.client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    families = parse_open(answer.text)  # type: ignore[no-untyped-call]
    assert {family.name for family in families} == set(LABELS)
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
