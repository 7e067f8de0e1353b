"""The report of `gc-sidecar run`: one JSON document that says whether a measurement was free of GC, and why.

Its form is `gc-sidecar.report/v1` (docs/report.v1.schema.json); what is not known is null.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from gc_sidecar_agent import __version__
from gc_sidecar_agent.fleet import Fleet, Member
from gc_sidecar_agent.observe import LISTED, ClientPauses
from gc_sidecar_agent.supervise import Ending

FORMAT = "gc-sidecar.report/v1"
CLEAN, NOT_CLEAN, UNKNOWN = "clean", "not_clean", "unknown"

# What the pod knows of itself, as the chart hands it over.
ENVIRONMENT = ("image", "node", "pod", "namespace", "gpu", "engine_args")
# The name of a flag or a variable that holds a secret, and what follows it.
_NAMES = (
    r"(?:api[-_]?key|access[-_]?key|token|secret|passw(?:or)?d|credentials?|authorization|bearer)"
)
SECRET_NAME = re.compile(rf"(?i){_NAMES}$")
SECRET = re.compile(rf"""(?i)({_NAMES}["']?\s*[:=\s]\s*(?:["']|(?:bearer|basic)\s+)*)[^\s"',}}]+""")
SECRET_IN_URL = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


@dataclass(frozen=True)
class Reason:
    """Something that speaks against a measurement, and at which sidecar."""

    code: str
    detail: str
    sidecar: str | None = None


@dataclass(frozen=True)
class Verdict:
    """`state` is clean, not_clean, or unknown where that could not be found out."""

    state: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Run:
    """What was asked for, and what came of it. Dates in seconds since the epoch."""

    command: Sequence[str]
    policy: str
    pause_budget_ms: float | None
    limits: dict[str, Any]
    window_id: str
    began_s: float
    started_s: float | None
    ended_s: float
    ending: Ending | None
    # Why it was not as it should be, where that was our doing.
    failure: str | None
    exit_code: int


def judge(fleet: Fleet, run: Run) -> Verdict:
    """The verdict on all windows together: clean where each of them is."""
    reasons: list[Reason] = []
    is_unknown = False
    if run.failure is not None:
        reasons.append(Reason("run_failed", run.failure))
    for member in fleet.members:
        if not member.window:
            why = member.window_error or "no window was opened"
            reasons.append(Reason("window_lost", why, member.url))
            is_unknown = True
        for each in (member.window.get("verdict") or {}).get("reasons") or []:
            reasons.append(Reason(str(each["code"]), str(each["detail"]), member.url))
        if member.restore_error is not None:
            # The measurement stands; what comes after it is not what it should be.
            reasons.append(Reason("not_restored", member.restore_error, member.url))
    if not fleet.members:
        is_unknown = True
    judged = [reason for reason in reasons if reason.code != "not_restored"]
    state = UNKNOWN if is_unknown else NOT_CLEAN if judged else CLEAN
    return Verdict(state, tuple(reasons))


def verdict_line(verdict: Verdict, run: Run) -> str:
    """The verdict in a line."""
    words = {CLEAN: "clean", NOT_CLEAN: "NOT clean", UNKNOWN: "NOT KNOWN whether clean"}
    parts = [f"{words[verdict.state]} under {run.policy}, exit code {run.exit_code}"]
    if verdict.reasons:
        first = verdict.reasons[0]
        more = f" (and {len(verdict.reasons) - 1} more)" if len(verdict.reasons) > 1 else ""
        parts.append(f"{first.code}: {first.detail}{more}")
    return ": ".join(parts)


def document(
    fleet: Fleet, run: Run, verdict: Verdict, client: ClientPauses | None
) -> dict[str, Any]:
    """The report."""
    ending = run.ending
    return {
        "format": FORMAT,
        "verdict": {
            "state": verdict.state,
            "reasons": [vars(reason) for reason in verdict.reasons],
            "limits": run.limits,
        },
        "policy": {
            "mode": run.policy,
            "owner": fleet.owner,
            "lease_s": fleet.lease_s,
            "pause_budget_ms": run.pause_budget_ms,
        },
        "command": {
            "argv": words_without_secrets(run.command),
            "started_at": _date(run.started_s),
            "duration_s": None if run.started_s is None else round(run.ended_s - run.started_s, 6),
            "exit_status": ending.status if ending else None,
            "signal": ending.signal if ending else None,
            "timed_out": bool(ending and ending.timed_out),
            "stopped_because": ending.stopped_because if ending else None,
        },
        "began_at": _date(run.began_s),
        "ended_at": _date(run.ended_s),
        "exit_code": run.exit_code,
        "window_id": run.window_id,
        "sidecars": [_member(member) for member in fleet.members],
        "client": None if client is None else _client(client),
        "environment": {
            "gc_sidecar": __version__,
            "python": platform.python_version(),
            "host": socket.gethostname(),
            **{name: _environment(name) for name in ENVIRONMENT},
        },
    }


def _member(member: Member) -> dict[str, Any]:
    window = member.window
    verdict = window.get("verdict") or {}
    reasons = verdict.get("reasons") or []
    during = member.status_during or member.status_before
    return {
        "url": member.url,
        "versions": member.version or None,
        "transport": during.get("transport"),
        "coverage": during.get("coverage"),
        "restarts": sum(each.get("code") == "process_restarted" for each in reasons),
        "restore_error": member.restore_error,
        "window": {
            "state": window.get("state"),
            "opened_at": window.get("opened_at"),
            "closed_at": window.get("closed_at"),
            "duration_s": window.get("duration_s"),
            "longest_pause": verdict.get("longest_pause"),
            "pauses": verdict.get("pauses") or [],
            "pauses_not_listed": verdict.get("pauses_not_listed") or 0,
            "lost_records": verdict.get("lost_records") or 0,
            "stalls": verdict.get("stalls") or [],
            "latency": verdict.get("latency"),
        }
        if window
        else None,
        "processes": _processes(member, verdict),
    }


def _processes(member: Member, verdict: dict[str, Any]) -> list[dict[str, Any]]:
    """The processes of the window, each with its GC before, during and after."""
    found = {_key(row): row for row in verdict.get("processes") or []}
    states = {
        "before": member.status_before,
        "during": member.status_during,
        "after": member.status_after,
    }
    by_time = {
        when: {_key(row): row for row in state.get("processes") or []}
        for when, state in states.items()
    }
    rows = list(by_time.values())
    keys = list(dict.fromkeys([*found, *(key for each in rows for key in each)]))
    return [
        {
            "role": key[0],
            "dp_rank": key[1],
            "rank": key[2],
            "pid": key[3],
            "host": next((each[key].get("host") for each in rows if key in each), None),
            "python": next((_gc(each, key, "python") for each in rows if key in each), None),
            "collector": next((_gc(each, key, "collector") for each in rows if key in each), None),
            "gc": {
                name: {
                    "enabled": _gc(each, key, "enabled"),
                    "threshold": _gc(each, key, "threshold"),
                }
                for name, each in by_time.items()
            },
            "pauses": found.get(key, {}).get("pauses"),
            "growth_bytes": found.get(key, {}).get("growth_bytes"),
        }
        for key in keys
    ]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("role"), row.get("dp_rank"), row.get("rank"), row.get("pid")


def _gc(rows: dict[tuple[Any, ...], dict[str, Any]], key: tuple[Any, ...], name: str) -> Any:
    return ((rows.get(key) or {}).get("gc") or {}).get(name)


def _client(client: ClientPauses) -> dict[str, Any]:
    longest = sorted(client.pauses, key=lambda pause: pause.duration_s, reverse=True)
    return {
        "processes": client.processes,
        "count": len(client.pauses),
        "total_s": round(sum(pause.duration_s for pause in client.pauses), 6),
        "max_s": longest[0].duration_s if longest else None,
        "longest": [
            {
                "pid": pause.pid,
                "started_at": _date(pause.started_s),
                "duration_s": pause.duration_s,
                "gc_generation": pause.gc_generation,
            }
            for pause in longest[:LISTED]
        ],
    }


def _environment(name: str) -> str | None:
    value = os.environ.get(f"GC_SIDECAR_{name.upper()}")
    return _without_secrets(value) if value else None


def words_without_secrets(words: Sequence[str]) -> list[str]:
    """A command line in which what looks like a secret is ***."""
    told: list[str] = []
    before = ""
    for word in words:
        is_secret = before.startswith("-") and SECRET_NAME.search(before)
        told.append("***" if is_secret else _without_secrets(word))
        before = word
    return told


def _without_secrets(text: str) -> str:
    return SECRET_IN_URL.sub(r"\1***@", SECRET.sub(r"\1***", text))


def _date(time_s: float | None) -> str | None:
    if time_s is None:
        return None
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat().replace("+00:00", "Z")
