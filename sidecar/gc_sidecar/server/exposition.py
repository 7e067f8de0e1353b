"""/metrics: what pages, last replies and the tally say, in Prometheus' formats. A scrape sends nothing.

A collector with a registry of its own, so that nothing of this process's Python gets mixed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gc_sidecar import __version__
from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.reports import Report
from gc_sidecar.server.roster import STATES, Roster, Row
from gc_sidecar.server.tally import LENGTH_BOUNDS, Tally
from gc_sidecar_agent.gate import POLICIES
from gc_sidecar_agent.page import BUCKET_COUNT, BUCKETS_NS

PROCESS = ("role", "dp_rank", "rank")
NANO = 1e-9
MEMORY_KINDS = ("anonymous", "file", "shared")
TRIGGERS = ("auto", "requested")
EXIT_REASONS = ("lease_expired", "rss_growth", "freeze_failed", "restored")
LIVE_STATES = frozenset(STATES) - {"gone", "stale", "uncovered"}


def render(knowledge: Knowledge, tally: Tally, accept: str | None) -> tuple[bytes, str]:
    """The exposition in the format that `accept` asks for, and its content type."""
    registry = CollectorRegistry()
    registry.register(_Exposition(knowledge, tally))
    try:
        encoder, content_type = choose_encoder(accept or "")
    except (TypeError, ValueError):  # a version that is none
        encoder, content_type = choose_encoder("")
    return encoder(registry), content_type


class _Exposition(Collector):
    def __init__(self, knowledge: Knowledge, tally: Tally) -> None:
        self._knowledge = knowledge
        self._tally = tally

    def describe(self) -> Iterable[Metric]:
        """Nothing is collected at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Everything, by the newest snapshot."""
        roster = self._knowledge.roster()
        rows = [row for row in roster.rows if row.report is not None]
        yield from _process_metrics(rows)
        yield from _engine_metrics(self._knowledge, roster)
        yield from _own_metrics(self._tally)


def _labels(row: Row) -> list[str]:
    return [row.key.role, str(row.key.dp_rank), str(row.key.rank)]


def _number(report: Report, name: str) -> float:
    value = report.numbers.get(name)
    return math.nan if value is None else float(value)


def _count(report: Report, name: str) -> float:
    return float(report.numbers.get(name) or 0)


def _process_metrics(rows: list[Row]) -> Iterator[Metric]:
    pauses = HistogramMetricFamily(
        "gc_sidecar_pause_seconds",
        "Pauses of full (gen2) collections, CPython's own (auto) and those asked for (requested).",
        labels=[*PROCESS, "trigger"],
    )
    collections = CounterMetricFamily(
        "gc_sidecar_collections", "Collections.", labels=[*PROCESS, "generation"]
    )
    memory = GaugeMetricFamily(
        "gc_sidecar_resident_memory_bytes",
        "Resident memory by kind; shared memory is counted in every process that maps it.",
        labels=[*PROCESS, "kind"],
    )
    exits = CounterMetricFamily(
        "gc_sidecar_policy_exits", "Policies that ended, by reason.", labels=[*PROCESS, "reason"]
    )
    singles: list[tuple[Metric, Callable[[Row, Report], float]]] = [
        (
            GaugeMetricFamily(
                "gc_sidecar_resident_growth_bytes",
                "Growth of anonymous memory since the policy was entered.",
                labels=PROCESS,
            ),
            lambda _, report: _count(report, "growth_bytes"),
        ),
        (
            GaugeMetricFamily(
                "gc_sidecar_observed_generation",
                "The newest desired generation that the process applied.",
                labels=PROCESS,
            ),
            lambda _, report: float(report.state.generation),
        ),
        (
            CounterMetricFamily("gc_sidecar_freezes", "Freezes of the heap.", labels=PROCESS),
            lambda _, report: _count(report, "freezes"),
        ),
        (
            GaugeMetricFamily(
                "gc_sidecar_in_progress_seconds",
                "For how long the collection that runs now has been seen; 0 where none runs.",
                labels=PROCESS,
            ),
            lambda row, _: (row.page.collecting_s or 0.0) if row.page else 0.0,
        ),
    ]
    for row in rows:
        report = row.report
        assert report is not None
        labels = _labels(row)
        for trigger in TRIGGERS:
            pauses.add_metric(
                [*labels, trigger], _buckets(report, trigger), _total_s(report, trigger)
            )
        for generation in range(3):
            collections.add_metric(
                [*labels, str(generation)], _count(report, f"gen{generation}_count")
            )
        for kind in MEMORY_KINDS:
            memory.add_metric([*labels, kind], _number(report, f"{kind}_bytes"))
        for reason in dict.fromkeys((*EXIT_REASONS, *report.state.exits)):
            exits.add_metric([*labels, reason], report.state.exits.get(reason, 0))
        for family, value in singles:
            family.add_metric(labels, value(row, report))  # type: ignore[attr-defined]
    yield from (pauses, collections, memory, exits, *(family for family, _ in singles))


def _buckets(report: Report, trigger: str) -> list[tuple[str, float]]:
    bounds = [*(f"{bound * NANO:g}" for bound in BUCKETS_NS), "+Inf"]
    total = 0.0
    buckets = []
    for index in range(BUCKET_COUNT):
        total += _count(report, f"{trigger}_bucket{index}")
        buckets.append((bounds[index], total))
    return buckets


def _total_s(report: Report, trigger: str) -> float:
    return _count(report, f"{trigger}_total_ns") * NANO


def _engine_metrics(knowledge: Knowledge, roster: Roster) -> Iterator[Metric]:
    desired = knowledge.desired
    policy = GaugeMetricFamily(
        "gc_sidecar_policy", "The desired policy: 1 at the one that is wanted.", labels=["mode"]
    )
    for mode in POLICIES:
        policy.add_metric([mode], float(mode == desired.mode))
    processes = GaugeMetricFamily(
        "gc_sidecar_processes", "Processes of the engine by state.", labels=["state"]
    )
    for state in STATES:
        processes.add_metric([state], sum(row.state == state for row in roster.rows))
    yield policy
    yield processes
    coverage = roster.acknowledged / roster.expected if roster.expected else 0.0
    is_up = any(row.page is not None and row.state in LIVE_STATES for row in roster.rows)
    gauges = (
        ("coverage_ratio", "Processes that applied what is desired, of those expected.", coverage),
        ("desired_generation", "The generation of the desired policy.", desired.generation),
        (
            "engine_up",
            "Whether a living process of the engine is seen, or without pages its API answers.",
            float(is_up or knowledge.engines.is_reachable),
        ),
        (
            "lease_expires_timestamp_seconds",
            "When the policy's lease ends; 0 where there is none.",
            desired.lease_expires_at() or 0.0,
        ),
        (
            "unreadable_pages",
            "Files with a page's name that cannot be read as one.",
            len(knowledge.sight.snapshot.unreadable),
        ),
    )
    for name, help_text, value in gauges:
        yield GaugeMetricFamily(f"gc_sidecar_{name}", help_text, value=value)


def _own_metrics(tally: Tally) -> Iterator[Metric]:
    operations = CounterMetricFamily(
        "gc_sidecar_operations", "Operations by their result.", labels=["operation", "result"]
    )
    for (kind, result), count in tally.operations.items():
        operations.add_metric([kind, result], count)
    lengths = HistogramMetricFamily(
        "gc_sidecar_operation_seconds", "How long operations took.", labels=["operation"]
    )
    for kind, length in tally.lengths.items():
        total, buckets = 0, []
        bounds = [*(f"{bound:g}" for bound in LENGTH_BOUNDS), "+Inf"]
        for bound, count in zip(bounds, length.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        lengths.add_metric([kind], buckets, length.total_s)
    build = GaugeMetricFamily("gc_sidecar_build_info", "This sidecar.", labels=["version"])
    build.add_metric([__version__], 1)
    yield operations
    yield lengths
    yield CounterMetricFamily(
        "gc_sidecar_rpc_desync",
        "Replies that belonged to another call than the one they answered.",
        value=tally.desyncs,
    )
    yield build
