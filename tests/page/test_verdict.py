"""Whether it is safe to measure: the page says yes only where everything that is known says so."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from playwright.sync_api import Route

from tests.page.browser import Browser, Tab, tab
from tests.sidecar_process import SidecarProcess

pytestmark = pytest.mark.xdist_group("page")

ROW: dict[str, Any] = {
    "role": "worker", "roles": ["worker"], "dp_rank": 0, "rank": 0, "pid": 7, "state": "applied",
    "reason": None, "mode": "freeze", "collecting_for_s": None,
    "pauses": {"gen2": {"count": 1, "max_s": 0.5}},
    "memory": {"anonymous_bytes": 1 << 30, "growth_bytes": 0},
}  # fmt: skip
OPERATION = {"kind": "maintain", "state": "running"}
BLOCKING = {"code": "x", "detail": "no process is seen", "remedy": None, "blocking": True}


def at(seconds_from_now: float) -> str:
    moment = datetime.fromtimestamp(time.time() + seconds_from_now, timezone.utc)
    return moment.isoformat().replace("+00:00", "Z")


def state(
    lease_s: float = 3600.0, row: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """All in order, but for what changes."""
    policy = {
        "mode": "freeze", "generation": 1, "owner": "bench-1", "entered_at": at(-60),
        "lease_expires_at": at(lease_s), "pause_budget_ms": None, "reason": None,
    }  # fmt: skip
    return {
        "policy": {**policy, **changes.pop("policy", {})},
        "coverage": {"acknowledged": 1, "expected": 1}, "transport": "plugin", "operation": None,
        "processes": [{**ROW, **(row or {})}], "reasons": [], "ready": True, "time": time.time(),
        "version": "0", "may_act": True, "expected_pause_s": None, "without_page": [],
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """For the page's files alone."""
    directory = tmp_path_factory.mktemp("verdict")
    with SidecarProcess(run_dir=directory, log_path=directory / "log") as started:
        yield started


def shown(opened: Tab, told: dict[str, Any]) -> str:
    """The mark of the page's answer and its words, where the sidecar tells this, and then nothing more."""
    answered = []

    def answer(route: Route) -> None:
        if answered:
            return  # the next request waits
        answered.append(route)
        events = [("history", {"instance": "0" * 8, "is_new": True, "span_s": 3600})]
        events += [("places", [["worker", 0, 0]])]
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
        body += f"id: 00000000-1\nevent: state\ndata: {json.dumps(told)}\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    opened.page.route("**/gc/events*", answer)
    opened.page.goto(f"{opened.url}/")
    opened.page.wait_for_function("document.getElementById('fact-coverage').textContent !== ''")
    return f"{opened.page.title()[0]} {opened.text('answer')} {opened.text('why')}"


@pytest.mark.parametrize(
    ("told", "mark", "words"),
    [
        ({}, "✓", "No automatic full collection runs"),
        ({"policy": {"mode": "budget", "pause_budget_ms": 5.0}}, "✓", "if pauses of about 5.00 ms"),
        ({"policy": {"mode": "off"}}, "✗", "Freeze before you measure"),
        ({"coverage": {"acknowledged": 3, "expected": 4}}, "✗", "Not every process has the policy"),
        ({"operation": OPERATION}, "✗", "A maintain is running"),
        ({"row": {"collecting_for_s": 2.0}}, "✗", "stands still for a collection"),
        ({"ready": False, "reasons": [BLOCKING]}, "✗", "No process is seen"),
        ({"lease_s": 20.0}, "✗", "Not for long"),
        ({"lease_s": -5.0}, "✗", "The policy ends now"),
        ({"without_page": ["worker-0-0"]}, "?", "whether a collection runs there is not seen"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_yes_only_where_nothing_speaks_against_it(
    browser: Browser, sidecar: SidecarProcess, told: dict[str, Any], mark: str, words: str
) -> None:
    with tab(browser, sidecar.url) as opened:
        said = shown(opened, state(**told))
        assert said.startswith(mark), said
        assert words in said


def test_yes_ends_with_the_lease_and_with_the_connection(
    browser: Browser, sidecar: SidecarProcess
) -> None:
    with tab(browser, sidecar.url) as opened:
        assert shown(opened, state(lease_s=62.0)).startswith("✓")
        opened.until("answer", "Not for long.")
        opened.until("answer", "Not known.")
        assert opened.rows("processes")[0][2] == "\u2013", "whether it collects now is not known"
