"""What stands in the way of controlling the engine, whole: for `/readyz` and for the page."""

from __future__ import annotations

from gc_sidecar.server.attempt import NAMED
from gc_sidecar.server.coordinator import Coordinator
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.roster import Roster


def obstacles(coordinator: Coordinator, roster: Roster) -> list[Obstacle]:
    """All of it. The sidecar is ready where none of these is blocking."""
    missing = [
        Obstacle(
            row.reason.code,
            f"{row.key}: {row.reason.detail}",
            "see the engine's log, and start it again" if row.state == "gone" else None,
        )
        for row in roster.rows
        # Where nobody is left that is said once, and not of each.
        if roster.reports and row.reason is not None and row.state in ("uncovered", "gone", "stale")
    ]
    starting = [
        Obstacle(
            "engine_starting", f"{row.key} has not finished its start-up", "wait", blocking=True
        )
        for row in roster.rows
        if row.report is not None and not row.report.state.ready
    ]
    return [
        *coordinator.knowledge.obstacles(roster),
        *missing,
        *starting,
        *_lacking(coordinator, roster),
    ]


def _lacking(coordinator: Coordinator, roster: Roster) -> list[Obstacle]:
    """That not every process has the policy that is on. The sidecar works all the same, so it is ready."""
    desired = coordinator.knowledge.desired
    lacking = [row for row in roster.rows if row.state != "applied"]
    if not desired.is_on or not lacking:
        return []
    named = [f"{row.key} ({row.state})" for row in lacking[:NAMED]]
    if len(lacking) > NAMED:
        named.append(f"{len(lacking) - NAMED} more")
    detail = (
        f"{roster.acknowledged} of {roster.expected} processes have the {desired.mode} policy; not"
        f" {', '.join(named)}"
    )
    remedy = "GET /gc says why; who starts takes the policy by itself, anybody else when you ask for it again"
    return [Obstacle("incomplete_coverage", detail, remedy)]
