"""The samples of /metrics with their labels: what rules and dashboards may ask for.

test_scraped_engine holds them against a real scrape.
"""

from __future__ import annotations

from collections.abc import Mapping

# The metrics of /metrics: for each its labels, and for each label what it may hold (None: anything).
Labels = Mapping[str, tuple[str, ...] | None]
PROCESS: Labels = {
    "role": ("api_server", "engine_core", "worker"),
    "dp_rank": None,
    "rank": None,
}
TRIGGER = ("auto", "requested")
PAUSE_BOUNDS = (
    *("0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5"),
    *("1", "2.5", "5", "10", "30", "60", "+Inf"),
)
GENERATION = ("0", "1", "2")
OPERATION = ("freeze", "budget", "maintain", "restore", "lease")
OF_PROCESS: Mapping[str, Labels] = {
    "pause_seconds_count": {"trigger": TRIGGER},
    "pause_seconds_sum": {"trigger": TRIGGER},
    "pause_seconds_bucket": {"trigger": TRIGGER, "le": PAUSE_BOUNDS},
    "collections_total": {"generation": GENERATION},
    "collection_seconds_total": {"generation": GENERATION},
    "collected_objects_total": {"generation": GENERATION},
    "uncollectable_objects_total": {"generation": GENERATION},
    "in_progress_seconds": {},
    "freezes_total": {},
    "pauses_over_budget_total": {},
    "resident_memory_bytes": {"kind": ("anonymous", "file", "shared")},
    "resident_growth_bytes": {},
    "device_memory_bytes": {"kind": ("allocated", "reserved")},
    "observed_generation": {},
    "policy_exits_total": {"reason": None},
    "maintain_seconds_count": {},
    "maintain_seconds_sum": {},
    "reclaimed_objects_total": {},
    "lost_records_total": {},
    "agent_info": {"python": None, "engine": None, "collector": None},
}
OF_ENGINE: Mapping[str, Labels] = {
    "stall_seconds_total": {"dp_rank": None},
    "memory_limit_bytes": {},
    "memory_current_bytes": {},
    "policy": {"mode": ("off", "freeze", "budget")},
    "processes": {
        "state": ("applied", "pending", "drifted", "stale", "gone", "uncovered", "refused")
    },
    "desired_generation": {},
    "coverage_ratio": {},
    "engine_up": {},
    "lease_expires_timestamp_seconds": {},
    "rpc_desync_total": {},
    "unreadable_pages": {},
    "window_open": {},
    "operations_total": {
        "operation": OPERATION,
        "result": ("applied", "partial", "rolled_back", "failed", "unknown"),
    },
    "operation_seconds_count": {"operation": OPERATION},
    "operation_seconds_sum": {"operation": OPERATION},
    "operation_seconds_bucket": {"operation": OPERATION, "le": None},
    "build_info": {"version": None},
}
METRICS: Mapping[str, Labels] = {
    "up": {},
    **{f"gc_sidecar_{name}": {**PROCESS, **labels} for name, labels in OF_PROCESS.items()},
    **{f"gc_sidecar_{name}": labels for name, labels in OF_ENGINE.items()},
}
