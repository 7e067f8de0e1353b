"""What the routes answer, as plain JSON-safe dicts: the one place that knows the shapes of the API.

Times are RFC 3339 in UTC; a value that is not known is null, never 0.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable
from urllib.parse import quote

from gc_sidecar.server import answers
from gc_sidecar.server.coordinator import Coordinator
from gc_sidecar.server.desired import Desired
from gc_sidecar.server.latency import LatencyVerdict
from gc_sidecar.server.logs import rfc3339
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.operations import Line, Operation
from gc_sidecar.server.pauses import NANO, PauseLog, SeenPause
from gc_sidecar.server.reports import LAST_TIME, Identity, Report
from gc_sidecar.server.requests import PauseFilter
from gc_sidecar.server.roster import Roster, Row
from gc_sidecar.server.safety import Safety
from gc_sidecar.server.verdicts import GenerationVerdict, ProcessVerdict, Verdict, Window


def status_view(
    coordinator: Coordinator, roster: Roster, obstacles: Iterable[Obstacle], safety: Safety
) -> answers.Status:
    """GET /gc"""
    knowledge, running = coordinator.knowledge, coordinator.running
    return {
        "safe_to_measure": {"answer": safety.answer, "word": safety.word, "why": safety.why},
        "policy": policy_view(knowledge.desired, roster),
        "coverage": {"acknowledged": roster.acknowledged, "expected": roster.expected},
        "transport": knowledge.engines.transport,
        "operation": operation_view(running) if running else None,
        "reasons": [obstacle_view(each) for each in obstacles],
        "processes": [row_view(row) for row in roster.rows],
    }


def policy_view(desired: Desired, roster: Roster) -> answers.Policy:
    """The desired policy."""
    entered_at = desired.entered_at
    if entered_at is None and desired.is_on:  # taken over: the processes know since when
        known = [
            report.state.entered_at
            for report in roster.reports
            if report.state.generation == desired.generation and report.state.entered_at is not None
        ]
        entered_at = max(known, default=None)
    return {
        "mode": desired.mode,
        "generation": desired.generation,
        "owner": desired.owner,
        "entered_at": time_view(entered_at),
        "lease_expires_at": time_view(desired.lease_expires_at()),
        "interval_s": desired.interval_s if desired.is_on else None,
        "pause_budget_ms": desired.pause_budget_ms,
        "max_rss_growth_bytes": desired.max_rss_growth_bytes,
        "reason": str(desired.reason) if desired.reason else None,
    }


def row_view(row: Row) -> answers.ProcessRow:
    """One process, or one place without any."""
    report = row.report
    identity = report.identity if report else None
    state = report.state if report else None
    numbers = report.numbers if report else {}
    enabled = numbers.get("gc_enabled")
    thresholds = report.thresholds if report else (None, None, None)
    collecting_s = row.page.collecting_s if row.page else None
    # Why a policy ended stays to be told when the process has been brought in line again.
    reason = row.reason or (state.reason if state else None)
    return {
        "role": row.key.role,
        "roles": list(row.roles),
        "dp_rank": row.key.dp_rank,
        "rank": row.key.rank,
        "pid": identity.pid if identity else None,
        "host": identity.host if identity else None,
        "state": row.state,
        "reason": str(reason) if reason else None,
        "mode": state.mode if state else None,
        "observed_generation": state.generation if state else None,
        "ready": state.ready if state else None,
        "collect_pending": state.collect_pending if state else None,
        "drifts": dict(state.drifts) if state else None,
        "gc": {
            "enabled": None if enabled is None else bool(enabled),
            "threshold": None if None in thresholds else list(thresholds),
            "collector": identity.collector if identity else None,
            "python": identity.python if identity else None,
        },
        "pauses": {
            "gen0": _pause_view(report, 0),
            "gen1": _pause_view(report, 1),
            "gen2": _pause_view(report, 2),
        },
        "pauses_over_budget": numbers.get("over_budget"),
        "freezes": {
            "count": numbers.get("freezes"),
            "since_maintain": numbers.get("freezes_since_maintain"),
        },
        "collecting_for_s": None if collecting_s is None else round(collecting_s, 3),
        "memory": {
            "anonymous_bytes": numbers.get("anonymous_bytes"),
            "file_bytes": numbers.get("file_bytes"),
            "shared_bytes": numbers.get("shared_bytes"),
            "growth_bytes": numbers.get("growth_bytes"),
            "device_allocated_bytes": numbers.get("device_allocated_bytes"),
            "device_reserved_bytes": numbers.get("device_reserved_bytes"),
        },
    }


def _pause_view(report: Report | None, generation: int) -> answers.PauseTotals:
    numbers = report.numbers if report else {}
    total_ns = numbers.get(f"gen{generation}_total_ns")
    max_ns = numbers.get(f"gen{generation}_max_ns")
    return {
        "count": numbers.get(f"gen{generation}_count"),
        "total_s": None if total_ns is None else round(total_ns * NANO, 9),
        "max_s": None if max_ns is None else round(max_ns * NANO, 9),
    }


def obstacle_view(obstacle: Obstacle) -> answers.Reason:
    """Something that stands in the way."""
    return {
        "code": obstacle.code,
        "detail": obstacle.detail,
        "remedy": obstacle.remedy,
        "blocking": obstacle.blocking,
    }


def operation_view(operation: Operation) -> answers.Operation:
    """One operation and what it did in each process."""
    return {
        **_operation_head(operation),
        "processes": [line_view(line) for line in operation.lines],
    }


def operation_line(operation: Operation) -> answers.OperationLine:
    """An operation among others: of its processes no more than how many did it."""
    return {
        **_operation_head(operation),
        "done": sum(line.ok for line in operation.lines),
        "asked": len(operation.lines),
    }


def _operation_head(operation: Operation) -> answers.OperationHead:
    problem = operation.problem
    return {
        "id": operation.id,
        "kind": operation.change.kind,
        "state": operation.state,
        "generation": operation.generation,
        "owner": operation.change.owner,
        "transport": operation.transport,
        "requested_at": time_view(operation.requested_at),
        "duration_s": None if operation.duration_s is None else round(operation.duration_s, 6),
        "rolled_back": operation.rolled_back,
        "code": problem.code if problem else None,
        "detail": problem.detail if problem else None,
    }


def line_view(line: Line) -> answers.ProcessOutcome:
    """What one process did."""
    outcome = line.outcome
    return {
        "role": line.key.role,
        "roles": list(line.roles),
        "dp_rank": line.key.dp_rank,
        "rank": line.key.rank,
        "pid": line.pid,
        "ok": line.ok,
        "code": line.code,
        "detail": line.detail,
        "pause_s": outcome.pause_s if outcome else None,
        "collected_objects": outcome.collected_objects if outcome else None,
        "resident_delta_bytes": outcome.resident_delta_bytes if outcome else None,
        "device_delta_bytes": outcome.device_delta_bytes if outcome else None,
    }


def pauses_view(log: PauseLog, wanted: PauseFilter) -> answers.Pauses:
    """GET /gc/pauses"""
    since_s = -math.inf if wanted.since is None else own_time(wanted.since.timestamp())
    found = log.newest_first(lambda pause: wanted.wants(pause, since_s))
    return {
        "pauses": [pause_view(pause) for pause in found[: wanted.limit]],
        "lost": log.lost_among(wanted.wants_process),
        "matching": len(found),
        "complete_since": own_time_view(log.complete_since_s(wanted.gc_generation)),
    }


def pause_view(pause: SeenPause) -> answers.Pause:
    """One collection."""
    return {
        "started_at": own_time_view(pause.start_s),
        "duration_s": round(pause.duration_s, 9),
        **_process_view(pause.who),
        "gc_generation": pause.gc_generation,
        "trigger": pause.trigger,
        "collected_objects": pause.collected_objects,
    }


def _process_view(who: Identity) -> answers.Process:
    return {
        "role": who.roles[0],
        "roles": list(who.roles),
        "dp_rank": who.dp_rank,
        "rank": who.rank,
        "pid": who.pid,
    }


def window_line(window: Window) -> answers.WindowLine:
    """A window among others: no more than whether it is clean, which is null before it is closed."""
    closed_s = window.closed_s
    return {
        "id": window.id,
        "name": window.name,
        "state": window.state,
        "opened_at": time_view(window.opened_at),
        # Its length is by the clock that nobody sets, and so is its end.
        "closed_at": (
            None if closed_s is None else time_view(window.opened_at + closed_s - window.opened_s)
        ),
        "duration_s": round(window.duration_s(), 6),
        "limits": {
            "max_pause_ms": window.limits.max_pause_ms,
            "max_stall_ms": window.limits.max_stall_ms,
            "max_stall_share": window.limits.max_stall_share,
            "max_growth_bytes": window.limits.max_growth_bytes,
        },
        "clean": window.verdict.is_clean if window.verdict else None,
    }


def window_view(window: Window, verdict: Verdict) -> answers.Window:
    """A window with its verdict; of one that is open, as if it were closed now."""
    return {
        **window_line(window),
        "verdict": verdict_view(verdict, window.duration_s()),
    }


def verdict_view(verdict: Verdict, duration_s: float) -> answers.Verdict:
    """What is told of a window."""
    return {
        "clean": verdict.is_clean,
        "reasons": [{"code": reason.code, "detail": reason.detail} for reason in verdict.reasons],
        "longest_pause": None if verdict.longest is None else pause_view(verdict.longest),
        "stalls": [
            {
                "dp_rank": dp_rank,
                "stall_s": round(stall_s, 9),
                "share": round(stall_s / duration_s, 9) if duration_s > 0 else 0.0,
            }
            for dp_rank, stall_s in sorted(verdict.stalls.items())
        ],
        "policy": {
            "at_opening": verdict.policy_at_opening.mode,
            "at_closing": verdict.policy_at_closing.mode,
        },
        "operations": [
            {
                "id": operation.id,
                "kind": operation.change.kind,
                "state": operation.state,
                "owner": operation.change.owner,
                "requested_at": time_view(operation.requested_at),
            }
            for operation in verdict.changes
        ],
        "latency": _latency_view(verdict.latency),
        "lost_records": verdict.lost,
        "processes": [_process_verdict_view(process) for process in verdict.processes],
        "pauses": [pause_view(pause) for pause in verdict.pauses],
        "pauses_not_listed": verdict.unlisted,
        "not_seen": "the GC of the client that measures: meter it there",
    }


def _latency_view(latency: LatencyVerdict) -> answers.Latency:
    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, 6)

    return {
        "says": latency.says,
        "stalled_s": rounded(latency.stalled_s),
        "gc_s": rounded(latency.gc_s),
        "explained": rounded(latency.explained),
        "typical_s": rounded(latency.typical_s),
        "tokens": latency.tokens,
    }


def _process_verdict_view(process: ProcessVerdict) -> answers.WindowProcess:
    gen0, gen1, gen2 = map(_generation_verdict_view, process.generations)
    return {
        **_process_view(process.identity),
        "host": process.identity.host,
        "read_to_the_end": process.is_read_to_the_end,
        "pauses": {"gen0": gen0, "gen1": gen1, "gen2": gen2},
        "growth_bytes": process.growth_bytes,
        "device_growth_bytes": process.device_growth_bytes,
    }


def _generation_verdict_view(each: GenerationVerdict) -> answers.WindowPauseTotals:
    return {
        "count": each.count,
        "total_s": round(each.total_s, 9),
        # Of a process that told no single one of them, none is known to be the longest.
        "max_s": None if each.lost and each.lost == each.count else round(each.longest_s, 9),
        "lost_records": each.lost,
        "lost_s": round(each.lost_s, 9),
    }


def change_view(operation: Operation, base_url: str) -> answers.ChangeAnswer:
    """The answer to a change: the operation, and where a policy is on now, its lease."""
    answer: answers.ChangeAnswer = {"operation": operation_view(operation)}
    expires_at = operation.lease_expires_at
    if expires_at is not None and operation.change.kind in ("freeze", "budget", "lease"):
        # The policy's owner: whoever renewed it with force cannot do so without.
        owner = quote(operation.lease_owner or operation.change.owner, safe="")
        url = f"{base_url}/gc/lease?owner={owner}"
        answer["lease"] = {
            "expires_at": time_view(expires_at),
            "renew": f"curl -X POST {shlex.quote(url)}",
        }
    return answer


def own_time(seconds: float) -> float:
    """A date on our monotonic clock, by the wall clock as it is now."""
    return seconds - time.time() + time.monotonic()


def own_time_view(own_s: float) -> str | None:
    """A moment of our monotonic clock as a date."""
    return time_view(own_s - time.monotonic() + time.time())


def time_view(seconds: float | None) -> str | None:
    """A date, or null; also where a page tells a time that none can be."""
    return rfc3339(seconds) if seconds is not None and 0 <= seconds <= LAST_TIME else None
