"""The page told by a test, and no sidecar: for what no engine does when a test wants it."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import Any

from playwright.sync_api import Route

from tests.page.browser import Tab

ROW: dict[str, Any] = {
    "role": "worker", "roles": ["worker"], "dp_rank": 0, "rank": 0, "pid": 7, "state": "applied",
    "reason": None, "mode": "freeze", "collecting_for_s": None,
    "pauses": {"gen2": {"count": 1, "max_s": 0.5}},
    "memory": {"anonymous_bytes": 1 << 30, "growth_bytes": 0},
}  # fmt: skip
SAFE = {"answer": "yes", "word": "Yes.", "why": "No automatic full collection runs."}
PAGE = {
    "history": {"instance": "0" * 8, "is_new": True, "span_s": 3600},
    "places": [["worker", 0, 0]],
}


def ago(seconds: float) -> str:
    """A moment as the API tells it."""
    moment = datetime.fromtimestamp(time.time() - seconds, timezone.utc)
    return moment.isoformat().replace("+00:00", "Z")


def state(**changes: Any) -> dict[str, Any]:
    """All in order, but for what changes."""
    policy = {
        "mode": "freeze", "generation": 1, "owner": "bench-1", "entered_at": ago(60),
        "lease_expires_at": ago(-3600), "pause_budget_ms": None, "reason": None,
    }  # fmt: skip
    return {
        "safe_to_measure": SAFE, "policy": policy,
        "coverage": {"acknowledged": 1, "expected": 1}, "transport": "plugin", "operation": None,
        "processes": [ROW], "reasons": [], "ready": True, "time": time.time(),
        "version": "0", "may_act": True, "expected_pause_s": None, "without_page": [],
        **changes,
    }  # fmt: skip


def pause(ago_s: float, length_s: float, generation: int = 2, trigger: str = "auto") -> list[Any]:
    """One of the worker."""
    return [0, time.time() - ago_s, length_s, generation, trigger, 0, 7]


def operation(name: str, ago_s: float, length_s: float, told: str = "applied") -> dict[str, Any]:
    """A restore that took so long, and came to this."""
    return {
        "id": name, "kind": "restore", "state": told, "owner": "x", "requested_at": ago(ago_s),
        "duration_s": length_s, "detail": None, "done": 1, "asked": 1,
    }  # fmt: skip


def window(name: str, ago_s: float, length_s: float, clean: bool | None) -> dict[str, Any]:
    """A window, judged so; None: it is open."""
    return {
        "id": name, "name": None, "state": "open" if clean is None else "closed", "clean": clean,
        "opened_at": ago(ago_s), "duration_s": length_s, "reasons": [],
    }  # fmt: skip


def tell(
    opened: Tab,
    *,
    policy: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    **events: Any,
) -> Tab:
    """Open the page, and have it told these events and a state with these changes, and then nothing more."""
    told = state(**(changes or {}))
    told["policy"].update(policy or {})
    answered = []

    def answer(route: Route) -> None:
        if answered:
            return  # the next request waits
        answered.append(route)
        parts = [
            f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in (PAGE | events).items()
        ]
        body = "".join([*parts, f"id: 00000000-1\nevent: state\ndata: {json.dumps(told)}\n\n"])
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    opened.page.route("**/gc/events*", answer)
    return opened.open()
