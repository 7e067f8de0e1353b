"""The processes of the engine as one list: who is expected, who is there, and in which state each is.

Expected is the union of what all processes know of their engine's topology. A place that nobody fills is
a row too, `uncovered`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gc_sidecar.server.desired import Desired
from gc_sidecar.server.reports import MAXIMUM_PROCESSES, Key, Reason, Report
from gc_sidecar.server.sight import PageReading, Snapshot, UnreadablePage
from gc_sidecar_agent.agent import ROLES
from gc_sidecar_agent.rules import HELD_OFF

STATES = ("applied", "pending", "drifted", "stale", "gone", "uncovered", "refused")


@dataclass(frozen=True)
class Row:
    """One process, or one place without any. `page` is None where all that is known came by a reply."""

    key: Key
    roles: tuple[str, ...]
    state: str
    reason: Reason | None = None
    report: Report | None = None
    page: PageReading | None = None

    @property
    def token(self) -> str | None:
        """Which process it is."""
        return self.report.identity.token if self.report else None

    @property
    def is_live(self) -> bool:
        """Whether there is a process that could do something."""
        return self.report is not None and self.state != "gone"


@dataclass(frozen=True)
class Roster:
    """All rows, in the order of their places."""

    rows: tuple[Row, ...] = ()

    @property
    def acknowledged(self) -> int:
        """How many processes have what is desired."""
        return sum(row.state == "applied" for row in self.rows)

    @property
    def expected(self) -> int:
        """How many processes there should be."""
        return len(self.rows)

    @property
    def is_covered(self) -> bool:
        """Whether there are processes, and every one of them has what is desired."""
        return 0 < self.expected == self.acknowledged

    @property
    def reports(self) -> list[Report]:
        """What the living processes say."""
        return [row.report for row in self.rows if row.report is not None and row.is_live]


@dataclass(frozen=True)
class _Candidate:
    report: Report
    page: PageReading | None

    @property
    def is_live(self) -> bool:
        return self.page is None or self.page.alive

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Living before dead, pages before replies, newest last."""
        return self.is_live, self.page is not None, self.report.identity.started_at


def take_roll(
    snapshot: Snapshot,
    replies: Iterable[Report],
    desired: Desired,
    applied: Mapping[Key, str],
    stale_after_s: float,
    contact_lost: bool = False,
) -> Roster:
    """The roster. `replies` are the last reports that came by RPC, `applied` tells which process (token)
    had the desired generation in each place."""
    paged = {page.report.identity.token for page in snapshot.pages}
    candidates = [
        *(_Candidate(page.report, page) for page in snapshot.pages),
        *(_Candidate(r, None) for r in replies if r.identity.token not in paged),
    ]
    best: dict[Key, _Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.order):
        for key in candidate.report.identity.keys:
            best[key] = candidate
    witnesses = [c.report for c in candidates if c.is_live] or [c.report for c in candidates]
    expected = {key for report in witnesses for key in report.identity.keys}
    # Hundreds of processes tell the same of their engine: once is enough.
    for topology, api_dp_rank in {(r.topology, r.api_dp_rank) for r in witnesses}:
        if len(expected) <= MAXIMUM_PROCESSES:  # beyond, somebody invents them
            expected |= topology.keys(api_dp_rank)
    unreadable = {page.key: page for page in snapshot.unreadable}
    rows: list[Row] = []
    shown: set[str] = set()
    for key in sorted(expected, key=lambda k: (ROLES.index(k.role), k.dp_rank, k.rank)):
        found = best.get(key)
        if found is None:
            reason = _why_uncovered(unreadable.get(key), snapshot)
            rows.append(Row(key, (key.role,), "uncovered", reason))
            continue
        identity = found.report.identity
        if identity.token in shown:
            continue  # a process with several roles is one row
        shown.add(identity.token)
        state, state_reason = _judge(
            found, identity.keys[0], desired, applied, stale_after_s, contact_lost
        )
        rows.append(
            Row(identity.keys[0], identity.roles, state, state_reason, found.report, found.page)
        )
    return Roster(tuple(rows))


def _why_uncovered(page: UnreadablePage | None, snapshot: Snapshot) -> Reason:
    if page is not None:
        return Reason(page.code, f"its page {page.name} cannot be read: {page.detail}")
    if snapshot.taken_at == 0.0:
        return Reason("no_run_dir", "it cannot be seen without a run directory, nor by RPC")
    return Reason("no_agent", "no page of it: the agent is not loaded there, or it has not started")


def _judge(
    candidate: _Candidate,
    key: Key,
    desired: Desired,
    applied: Mapping[Key, str],
    stale_after_s: float,
    contact_lost: bool,
) -> tuple[str, Reason | None]:
    """The state of one process, and why where it is not `applied`."""
    report, page = candidate.report, candidate.page
    state = report.state
    if page is not None and not page.alive:
        return "gone", Reason("process_gone", "the process has ended; its page is what it left")
    if page is not None and page.unchanged_s >= stale_after_s and page.collecting_s is None:
        detail = f"no heartbeat for {page.unchanged_s:.0f} s: stopped, or wedged"
        return "stale", Reason("no_heartbeat", detail)
    if page is None and contact_lost:
        return "stale", Reason("engine_unreachable", "the engine does not answer; last known state")
    if state.refused is not None and state.refused.generation == desired.generation > 0:
        return "refused", state.refused
    if state.generation < desired.generation:
        if state.mode == desired.mode == "off":
            return "applied", None  # it started later, and has what is wanted
        known = applied.get(key)
        if known is not None and known != report.identity.token:
            detail = "the process restarted and has not the policy that the one before it had"
            return "drifted", Reason("restarted", detail)
        if not state.ready:
            return "pending", Reason("not_ready", "the engine has not finished its start-up")
        return "pending", None
    if state.generation > desired.generation:
        if state.mode == desired.mode == "off":
            return "applied", None  # somebody else's policy has come and gone
        detail = f"it shows generation {state.generation}, which this sidecar did not ask for"
        return "drifted", Reason("foreign_generation", detail)
    if state.mode != desired.mode:
        if desired.reason is not None and not desired.is_on:
            return "pending", desired.reason  # the lease ended a moment ago
        detail = f"it is in mode {state.mode}, not {desired.mode}"
        return "drifted", state.reason or Reason("other_mode", detail)
    if desired.is_on and state.drift is not None:
        return "drifted", state.drift
    drift = _threshold_drift(report, page, desired)
    return ("drifted", drift) if drift else ("applied", None)


def _threshold_drift(report: Report, page: PageReading | None, desired: Desired) -> Reason | None:
    thresholds = report.thresholds
    unsure = thresholds[2] is None or (page and not page.is_whole)
    if unsure or desired.mode not in ("freeze", "off"):
        return None
    if (thresholds[2] == HELD_OFF) == (desired.mode == "freeze"):
        return None
    detail = f"its thresholds are {thresholds}, which does not fit mode {desired.mode}"
    return Reason("thresholds_changed", detail)
