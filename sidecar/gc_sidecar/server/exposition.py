"""/metrics: what pages, last replies and the tally say, in Prometheus' formats. A scrape sends nothing.

No registry is asked, so that nothing of this process's own Python gets mixed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gc_sidecar import __version__
from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.pauses import NANO, PauseLog
from gc_sidecar.server.reports import Report
from gc_sidecar.server.roster import STATES, Roster, Row
from gc_sidecar.server.tally import LENGTH_BOUNDS, Tally
from gc_sidecar_agent.gate import POLICIES
from gc_sidecar_agent.page import BUCKET_COUNT, BUCKETS_NS

# Of an Accept header: how names with other letters are to be escaped. Ours have none.
ESCAPING = re.compile(r";\s*escaping=[^;,]*")
PROCESS = ("role", "dp_rank", "rank")
GENERATIONS = ("0", "1", "2")
MEMORY_KINDS = ("anonymous", "file", "shared")
DEVICE_KINDS = ("allocated", "reserved")
TRIGGER_LABELS = ("auto", "requested")
EXIT_REASONS = ("lease_expired", "rss_growth", "freeze_failed", "restored")
PAUSE_BOUNDS = (*(f"{bound * NANO:g}" for bound in BUCKETS_NS), "+Inf")
OPERATION_BOUNDS = (*(f"{bound:g}" for bound in LENGTH_BOUNDS), "+Inf")


def render(
    knowledge: Knowledge, open_windows: int, tally: Tally, accept: str | None
) -> tuple[bytes, str]:
    """The exposition in the format that `accept` asks for, and its content type."""
    try:
        encoder, content_type = choose_encoder(ESCAPING.sub("", accept or ""))
    except (TypeError, ValueError):  # a version that is none
        encoder, content_type = choose_encoder("")
    return encoder(_Exposition(knowledge, open_windows, tally)), content_type


class _Exposition(Collector):
    def __init__(self, knowledge: Knowledge, open_windows: int, tally: Tally) -> None:
        self._knowledge = knowledge
        self._open_windows = open_windows
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        """Everything, by the newest snapshot."""
        roster = self._knowledge.roster()
        # A process that is gone has no series any more: its successor's begin at 0 in their place.
        live = (row for row in roster.rows if row.report is not None and row.is_live)
        rows = list({row.key: row for row in live}.values())
        yield from _process_metrics(rows, self._knowledge.sight.log)
        yield from _engine_metrics(self._knowledge, roster, rows)
        yield from _own_metrics(self._tally, self._open_windows)


def _labels(row: Row) -> list[str]:
    return [row.key.role, str(row.key.dp_rank), str(row.key.rank)]


def _text(value: str) -> str:
    """A text of a process as a label's value: JSON can hold half characters, which no encoding can."""
    return value.encode("utf-8", "replace").decode()


# --- one process ---

_Family: TypeAlias = "type[CounterMetricFamily] | type[GaugeMetricFamily]"

# Metrics that have one further label: name, kind, help, that label, its values, and the number of the page that
# each value stands for, with the factor that makes it a base unit. What a process does not know has no series.
_LABELLED: tuple[tuple[str, _Family, str, str, tuple[str, ...], str, float], ...] = (
    (
        "collections", CounterMetricFamily, "Collections by GC generation; 2 are full ones.",
        "generation", GENERATIONS, "gen{}_count", 1,
    ),
    (
        "collection_seconds", CounterMetricFamily, "Time in collections by GC generation.",
        "generation", GENERATIONS, "gen{}_total_ns", NANO,
    ),
    (
        "collected_objects", CounterMetricFamily, "Objects that collections freed.",
        "generation", GENERATIONS, "gen{}_collected_objects", 1,
    ),
    (
        "uncollectable_objects", CounterMetricFamily, "Objects that collections could not free.",
        "generation", GENERATIONS, "gen{}_uncollectable_objects", 1,
    ),
    (
        "resident_memory_bytes", GaugeMetricFamily,
        "Resident memory: anonymous, file and shared; shared memory is counted in every process that maps it.",
        "kind", MEMORY_KINDS, "{}_bytes", 1,
    ),
    (
        "device_memory_bytes", GaugeMetricFamily,
        "Device memory allocated and reserved, by torch's count; only where torch has initialised a device.",
        "kind", DEVICE_KINDS, "device_{}_bytes", 1,
    ),
)  # fmt: skip
_SINGLE: tuple[tuple[str, _Family, str, Callable[[Row, Report, PauseLog], float]], ...] = (
    (
        "resident_growth_bytes", GaugeMetricFamily,
        "Growth of anonymous memory since the policy was entered.",
        lambda row, report, log: float(report.numbers.get("growth_bytes") or 0),
    ),
    (
        "observed_generation", GaugeMetricFamily,
        "The newest desired generation that the process applied.",
        lambda row, report, log: float(report.state.generation),
    ),
    (
        "in_progress_seconds", GaugeMetricFamily,
        "For how long the full collection that runs now has been seen; 0 where none runs.",
        lambda row, report, log: (row.page.collecting_s or 0.0) if row.page else 0.0,
    ),
    (
        "freezes", CounterMetricFamily, "Freezes of the heap.",
        lambda row, report, log: float(report.number("freezes")),
    ),
    (
        "pauses_over_budget", CounterMetricFamily,
        "Automatic collections that took longer than the pause budget in force.",
        lambda row, report, log: float(report.number("over_budget")),
    ),
    (
        "reclaimed_objects", CounterMetricFamily, "Objects that maintenance collected.",
        lambda row, report, log: float(report.number("reclaimed_objects")),
    ),
    (
        "lost_records", CounterMetricFamily,
        "Single pause records that were overwritten or damaged before they could be read.",
        lambda row, report, log: float(log.lost(row.token)),
    ),
)  # fmt: skip


def _process_metrics(rows: list[Row], log: PauseLog) -> Iterator[Metric]:
    pauses = HistogramMetricFamily(
        "gc_sidecar_pause_seconds",
        "Pauses of full (gen2) collections, CPython's own (auto) and those asked for (requested).",
        labels=[*PROCESS, "trigger"],
    )
    maintains = SummaryMetricFamily(
        "gc_sidecar_maintain_seconds", "How long maintenance took.", labels=PROCESS
    )
    exits = CounterMetricFamily(
        "gc_sidecar_policy_exits", "Policies that ended, by reason.", labels=[*PROCESS, "reason"]
    )
    agents = GaugeMetricFamily(
        "gc_sidecar_agent_info",
        "What runs in the process: CPython, the engine, the kind of its garbage collector.",
        labels=[*PROCESS, "python", "engine", "collector"],
    )
    known = [(row, row.report, _labels(row)) for row in rows if row.report is not None]
    for _, report, labels in known:
        for trigger in TRIGGER_LABELS:
            counts = [report.number(f"{trigger}_bucket{index}") for index in range(BUCKET_COUNT)]
            pauses.add_metric(
                [*labels, trigger],
                _cumulative(PAUSE_BOUNDS, counts),
                report.number(f"{trigger}_total_ns") * NANO,
            )
        maintains.add_metric(
            labels, report.number("maintains"), report.number("maintain_total_ns") * NANO
        )
        ended = {_text(reason): count for reason, count in report.state.exits.items()}
        for reason in dict.fromkeys((*EXIT_REASONS, *ended)):
            exits.add_metric([*labels, reason], ended.get(reason, 0))
        identity = report.identity
        about = (identity.python, identity.engine, identity.collector)
        agents.add_metric([*labels, *(_text(each or "") for each in about)], 1)
    yield from (pauses, maintains, exits, agents)
    for name, kind, text, label, values, number, factor in _LABELLED:
        family = kind(f"gc_sidecar_{name}", text, labels=[*PROCESS, label])
        numbers = [(value, number.format(value)) for value in values]
        for _, report, labels in known:
            for value, key in numbers:
                found = report.numbers.get(key)
                if found is not None and found >= 0:
                    family.add_metric([*labels, value], found * factor)
        yield family
    for name, kind, text, tell in _SINGLE:
        family = kind(f"gc_sidecar_{name}", text, labels=PROCESS)
        for row, report, labels in known:
            family.add_metric(labels, tell(row, report, log))
        yield family


def _cumulative(bounds: Sequence[str], counts: Iterable[int]) -> list[tuple[str, float]]:
    return [(b, float(c)) for b, c in zip(bounds, accumulate(counts), strict=True)]


# --- the engine ---


def _engine_metrics(knowledge: Knowledge, roster: Roster, live: list[Row]) -> Iterator[Metric]:
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
    is_up = any(row.page is not None and row.state != "stale" for row in live)
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
    stalls = CounterMetricFamily(
        "gc_sidecar_stall_seconds",
        "Time that pauses held up a lockstep group since the sidecar started: the union over its processes.",
        labels=["dp_rank"],
    )
    lockstep = [row.report.identity for row in live if row.report is not None]
    for dp_rank in sorted({each.dp_rank for each in lockstep if each.is_in_lockstep}):
        stalls.add_metric([str(dp_rank)], knowledge.sight.log.stall_s(dp_rank))
    yield stalls
    for name, help_text in (
        ("memory_limit_bytes", "The memory limit of the engine's cgroup, where it has one."),
        ("memory_current_bytes", "Memory in use in that cgroup, inactive file cache aside."),
    ):
        # The processes of an engine share a cgroup; one that is in another has less to tell.
        known = [row.report.numbers.get(name) for row in live if row.report is not None]
        values = [value for value in known if value is not None]
        family = GaugeMetricFamily(f"gc_sidecar_{name}", help_text)
        if values:
            family.add_metric([], max(values))
        yield family


# --- the sidecar ---


def _own_metrics(tally: Tally, open_windows: int) -> Iterator[Metric]:
    operations = CounterMetricFamily(
        "gc_sidecar_operations", "Operations by their result.", labels=["operation", "result"]
    )
    for (kind, result), count in tally.operations.items():
        operations.add_metric([kind, result], count)
    lengths = HistogramMetricFamily(
        "gc_sidecar_operation_seconds", "How long operations took.", labels=["operation"]
    )
    for kind, length in tally.lengths.items():
        lengths.add_metric([kind], _cumulative(OPERATION_BOUNDS, length.counts), length.total_s)
    build = GaugeMetricFamily(
        "gc_sidecar_build_info", "Version of the sidecar.", labels=["version"]
    )
    build.add_metric([__version__], 1)
    yield operations
    yield lengths
    yield GaugeMetricFamily(
        "gc_sidecar_window_open", "Measured windows that are open.", value=open_windows
    )
    yield CounterMetricFamily(
        "gc_sidecar_rpc_desync",
        "Replies that belonged to another call than the one they answered.",
        value=tally.desyncs,
    )
    yield build
