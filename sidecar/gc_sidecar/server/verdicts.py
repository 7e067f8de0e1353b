"""The verdict on a window: which pauses fell into it, how long they held up the engine, and whether it is clean.

Counts and sums come from the processes' own counters at its opening and its closing, so they hold also where
single records were lost. What is here only judges; `windows` gathers.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gc_sidecar.server.desired import Desired
from gc_sidecar.server.latency import (
    LENGTHS_S,
    Latencies,
    LatencyVerdict,
    latency_verdict,
    stalled_between,
)
from gc_sidecar.server.operations import Operation
from gc_sidecar.server.pauses import NANO, IntervalUnion, SeenPause, hold_up
from gc_sidecar.server.reports import Identity, Key, Reason
from gc_sidecar.server.roster import Roster, Row
from gc_sidecar.server.sight import PageReading
from gc_sidecar_agent.agent import ROLES
from gc_sidecar_agent.command import POLICY_KINDS

DEFAULT_MAX_PAUSE_MS = 50.0
DEFAULT_MAX_STALL_SHARE = 0.05
GENERATIONS = (0, 1, 2)
# The longest of a window's pauses that are kept one by one.
LISTED = 100


@dataclass(frozen=True)
class Limits:
    """What a clean window stays within; None is no limit."""

    max_pause_ms: float = DEFAULT_MAX_PAUSE_MS
    max_stall_ms: float | None = None
    max_stall_share: float | None = DEFAULT_MAX_STALL_SHARE
    max_growth_bytes: int | None = None

    def stall(self, duration_s: float) -> tuple[float, str]:
        """The longest in ms that a lockstep group may be held up in a window so long, and a word on it."""
        limits = [(math.inf, "none")]
        if self.max_stall_ms is not None:
            limits.append((self.max_stall_ms, f"{self.max_stall_ms:g}"))
        if self.max_stall_share is not None:
            # One pause that is short enough is clean in however short a window.
            most_ms = max(self.max_pause_ms, 1000 * duration_s * self.max_stall_share)
            limits.append((most_ms, f"{most_ms:.1f} ({self.max_stall_share:.3g} of the window)"))
        return min(limits)


@dataclass
class Sums:
    """Pauses of one generation: those of which records came, `within` the window and `beside` it."""

    within: int = 0
    within_s: float = 0.0
    longest_s: float = 0.0
    beside: int = 0
    beside_s: float = 0.0


def no_sums() -> tuple[Sums, ...]:
    """Of each GC generation, nothing yet."""
    return tuple(Sums() for _ in GENERATIONS)


@dataclass(frozen=True)
class GenerationVerdict:
    """Pauses of one generation in one process: exact in `count` and `total_s`; `longest_s` among the records that
    came, and `lost` of which none came, `lost_s` long together."""

    count: int
    total_s: float
    longest_s: float
    lost: int
    lost_s: float


@dataclass(frozen=True)
class ProcessVerdict:
    """What one process did in a window. None is what is not known."""

    identity: Identity
    generations: tuple[GenerationVerdict, ...]
    growth_bytes: int | None
    device_growth_bytes: int | None
    is_read_to_the_end: bool


@dataclass(frozen=True)
class Verdict:
    """Everything that is told of a window. `stalls` is by dp_rank."""

    reasons: tuple[Reason, ...]
    processes: tuple[ProcessVerdict, ...]
    stalls: Mapping[int, float]
    pauses: tuple[SeenPause, ...]
    unlisted: int
    changes: tuple[Operation, ...]
    latency: LatencyVerdict
    policy_at_opening: Desired
    policy_at_closing: Desired

    @property
    def is_clean(self) -> bool:
        """Whether it stayed within its limits, and that is known."""
        return not self.reasons

    @property
    def longest(self) -> SeenPause | None:
        """The longest pause that was recorded."""
        return max(self.pauses, key=lambda pause: pause.duration_s, default=None)

    @property
    def lost(self) -> int:
        """Of how many pauses no record came."""
        return sum(each.lost for process in self.processes for each in process.generations)


def new_late_pauses() -> dict[float, IntervalUnion]:
    """For each length, nothing yet."""
    return {length_s: IntervalUnion() for length_s in LENGTHS_S}


def make_late(
    late_pauses: Mapping[float, IntervalUnion], pause: SeenPause, since_s: float, until_s: float
) -> None:
    """Count the part of a pause between two moments that may have made tokens late."""
    if pause.who.is_in_lockstep:
        for length_s, union in late_pauses.items():
            if pause.duration_s < length_s:
                break
            union.add(max(pause.start_s, since_s), min(pause.end_s, until_s))


@dataclass
class Window:
    """One window, and what has come of it so far. `opened_s` and `closed_s` are on our monotonic clock; `pages`
    are those at its opening by token, `holders` who (token) was in each place."""

    id: str
    name: str | None
    limits: Limits
    desired: Desired
    pages: Mapping[str, PageReading]
    holders: Mapping[Key, str]
    latencies: Latencies
    known_operations: frozenset[str]
    opened_at: float = field(default_factory=time.time)
    opened_s: float = field(default_factory=time.monotonic)
    closed_s: float | None = None
    verdict: Verdict | None = None
    sums: dict[str, tuple[Sums, ...]] = field(default_factory=dict)
    stalls: dict[int, IntervalUnion] = field(default_factory=dict)
    # Of pauses in any rank that are at least so long: what `latency` holds against late tokens.
    late_pauses: dict[float, IntervalUnion] = field(default_factory=new_late_pauses)
    longest: list[tuple[float, int, SeenPause]] = field(default_factory=list)
    seen: int = 0

    @property
    def state(self) -> str:
        """open, closing or closed"""
        return "closed" if self.verdict else "open" if self.closed_s is None else "closing"

    def duration_s(self) -> float:
        """How long it is, or has been so far."""
        return (time.monotonic() if self.closed_s is None else self.closed_s) - self.opened_s

    def add(self, pause: SeenPause) -> None:
        """Take in a pause that a page has told of."""
        sums = self.sums.setdefault(pause.who.token, no_sums())
        of_generation = sums[pause.gc_generation]
        closed_s = math.inf if self.closed_s is None else self.closed_s
        if pause.end_s <= self.opened_s or pause.start_s >= closed_s:
            of_generation.beside += 1
            of_generation.beside_s += pause.duration_s
            return
        of_generation.within += 1
        of_generation.within_s += pause.duration_s
        of_generation.longest_s = max(of_generation.longest_s, pause.duration_s)
        hold_up(self.stalls, pause, self.opened_s, closed_s)
        make_late(self.late_pauses, pause, self.opened_s, closed_s)
        self.seen += 1
        # A heap with the shortest first; `seen` so that no two pauses are ever compared.
        longest = (pause.duration_s, self.seen, pause)
        if len(self.longest) < LISTED:
            heapq.heappush(self.longest, longest)
        else:
            heapq.heappushpop(self.longest, longest)

    def settle(self, verdict: Verdict) -> None:
        """It is judged: what was needed for that is let go of."""
        self.verdict = verdict
        self.sums, self.stalls, self.late_pauses, self.longest = {}, {}, {}, []
        self.pages, self.latencies = {}, {}


@dataclass(frozen=True)
class Evidence:
    """What is known at the end of a window. `unread` are tokens of processes that did not publish their last
    moments in time; `latencies` is None where the window has not been closed."""

    roster: Roster
    pages: Mapping[str, PageReading]
    desired: Desired
    operations: Iterable[Operation]
    latencies: Latencies | None = None
    unread: frozenset[str] = frozenset()


def judge(window: Window, evidence: Evidence) -> Verdict:
    """The verdict on a window by this evidence."""
    ends, desired, roster = evidence.pages, evidence.desired, evidence.roster
    running = [
        pause
        for page in ends.values()
        if (pause := _running(page)) is not None
        and (window.closed_s is None or pause.start_s < window.closed_s)
    ]
    collecting = {pause.who.token for pause in running}
    unread = evidence.unread - collecting
    stalls, late_pauses = _held_up(window, running)
    processes = tuple(
        _process_verdict(
            window, token, window.pages.get(token), ends.get(token), unread | collecting
        )
        for token in sorted({*window.pages, *ends}, key=lambda each: _place(window, ends, each))
        # Whoever was dead before it began has no part in it.
        if token in window.pages or ends[token].alive
    )
    listed = [pause for _, _, pause in window.longest]
    changes = tuple(each for each in evidence.operations if _is_of_note(each, window))
    reasons = [
        *_seen_enough(window, roster.rows, unread),
        *_changed(window, desired, changes, ends),
        *_over_limits(window.limits, processes, running),
        *_stalls_over(window, processes, stalls),
    ]
    if desired.is_on and not roster.is_covered:
        detail = f"{roster.acknowledged} of {roster.expected} processes have the policy"
        reasons.append(Reason("incomplete_coverage", detail))
    if evidence.latencies is None:
        latency = LatencyVerdict("not known before it is closed")
    else:
        stalled = stalled_between(window.latencies, evidence.latencies)
        latency = latency_verdict(stalled, late_pauses, window.duration_s())
    return Verdict(
        reasons=tuple(dict.fromkeys(reasons)),
        processes=processes,
        stalls=stalls,
        pauses=tuple(sorted([*listed, *running], key=lambda each: each.start_s, reverse=True)),
        unlisted=window.seen - len(listed),
        changes=changes,
        latency=latency,
        policy_at_opening=window.desired,
        policy_at_closing=desired,
    )


def _running(page: PageReading) -> SeenPause | None:
    """The full collection that runs in a process right now, as far as it has come."""
    if page.collecting_start_s is None:
        return None
    length_s = max(0.0, time.monotonic() - page.collecting_start_s)
    return SeenPause(page.report.identity, page.collecting_start_s, length_s, 2, "running", 0)


def _held_up(
    window: Window, running: Iterable[SeenPause]
) -> tuple[dict[int, float], dict[float, float]]:
    """How long each lockstep group was held up, and by pauses of which length, with what still runs: that is not
    counted for good, for it will come as a record."""
    stalls = {dp_rank: union.copy() for dp_rank, union in window.stalls.items()}
    late_pauses = {length_s: union.copy() for length_s, union in window.late_pauses.items()}
    closed_s = math.inf if window.closed_s is None else window.closed_s
    for pause in running:
        hold_up(stalls, pause, window.opened_s, closed_s)
        make_late(late_pauses, pause, window.opened_s, closed_s)
    return (
        {dp_rank: union.total_s for dp_rank, union in stalls.items()},
        {length_s: union.total_s for length_s, union in late_pauses.items()},
    )


def _place(
    window: Window, ends: Mapping[str, PageReading], token: str
) -> tuple[int, int, int, float]:
    """In the order of the status: by role, ranks, and who was there first."""
    identity = (ends.get(token) or window.pages[token]).report.identity
    role = ROLES.index(identity.roles[0])
    return role, identity.dp_rank, identity.rank, identity.started_at


def _is_of_note(operation: Operation, window: Window) -> bool:
    """Whether an operation did something to what was measured; a renewal of the policy in force did not."""
    if operation.id in window.known_operations:
        return False
    if not (operation.lines or operation.is_running):
        return False
    kind = operation.change.kind
    if kind in POLICY_KINDS:
        return operation.generation != window.desired.generation
    return kind == "maintain"


def _process_verdict(
    window: Window,
    token: str,
    before: PageReading | None,
    after: PageReading | None,
    unread: frozenset[str],
) -> ProcessVerdict:
    # A process that was not there at first counts from 0, one that is gone as far as it was seen.
    last = after or before
    assert last is not None
    sums = window.sums.get(token, no_sums())
    generations = []
    for generation in GENERATIONS:
        count = last.report.number(f"gen{generation}_count")
        total_s = last.report.number(f"gen{generation}_total_ns") * NANO
        if before is not None:
            count -= before.report.number(f"gen{generation}_count")
            total_s -= before.report.number(f"gen{generation}_total_ns") * NANO
        each = sums[generation]
        count = max(count - each.beside, each.within)
        total_s = max(total_s - each.beside_s, each.within_s)
        lost = count - each.within
        lost_s = total_s - each.within_s if lost else 0.0
        generations.append(GenerationVerdict(count, total_s, each.longest_s, lost, lost_s))
    return ProcessVerdict(
        identity=last.report.identity,
        generations=tuple(generations),
        growth_bytes=_difference(before, after, "anonymous_bytes"),
        device_growth_bytes=_difference(before, after, "device_allocated_bytes"),
        is_read_to_the_end=after is not None and after.alive and token not in unread,
    )


def _difference(before: PageReading | None, after: PageReading | None, name: str) -> int | None:
    first = before.report.numbers.get(name) if before else None
    last = after.report.numbers.get(name) if after else None
    return None if first is None or last is None else last - first


def _seen_enough(window: Window, rows: tuple[Row, ...], unread: frozenset[str]) -> list[Reason]:
    """What keeps the sidecar from knowing what happened in every process of the engine."""
    reasons: list[Reason] = []
    if not window.holders and not any(row.is_live for row in rows):
        return [Reason("no_process", "no living process of an engine was seen")]
    for row in rows:
        before = window.holders.get(row.key)
        if before is None and row.is_live:
            reasons.append(Reason("process_appeared", f"{row.key} was not there at the opening"))
        elif row.is_live and row.token != before:
            reasons.append(Reason("process_restarted", f"{row.key} is not the process it was"))
        elif row.state == "gone":
            reasons.append(Reason("process_gone", f"{row.key} has ended"))
        elif not row.is_live:
            detail = row.reason.detail if row.reason else "it is not seen any more"
            reasons.append(Reason("process_unseen", f"{row.key}: {detail}"))
        elif row.page is None:
            detail = f"{row.key} has no page, so its pauses are not seen"
            reasons.append(Reason("process_unseen", detail))
        elif row.state == "stale" or row.token in unread:
            detail = f"{row.key} did not publish its last moments in time"
            reasons.append(Reason("process_silent", detail))
    shown = {row.key for row in rows}
    for key in window.holders:
        if key not in shown:
            reasons.append(Reason("process_gone", f"{key} is gone"))
    return reasons


def _changed(
    window: Window,
    desired: Desired,
    changes: tuple[Operation, ...],
    ends: Mapping[str, PageReading],
) -> list[Reason]:
    """What somebody did to the policy while it was measured."""
    reasons = []
    for operation in changes:
        if operation.change.kind == "maintain":
            detail = f"operation {operation.id} by {operation.change.owner} collected in it"
            reasons.append(Reason("maintained", detail))
        else:
            change = operation.change
            detail = f"operation {operation.id} by {change.owner} was a {change.kind}"
            reasons.append(Reason("policy_changed", detail))
    # What no operation tells that is remembered: the end of a lease, another sidecar's doing.
    told = {reason.code for reason in reasons}
    if "policy_changed" not in told and (desired.mode, desired.generation) != (
        window.desired.mode,
        window.desired.generation,
    ):
        detail = f"it was {_policy(window.desired)} and is {_policy(desired)}"
        reasons.append(Reason("policy_changed", detail))
    for token, before in window.pages.items():
        after = ends.get(token)
        if (
            "maintained" not in told
            and after
            and after.report.number("maintains") > before.report.number("maintains")
        ):
            detail = f"{before.report.identity.keys[0]} collected for maintenance in it"
            reasons.append(Reason("maintained", detail))
    for token, before in window.pages.items():
        after = ends.get(token)
        for name, count in (after.report.state.exits if after else {}).items():
            if name != "restored" and count > before.report.state.exits.get(name, 0):
                key = before.report.identity.keys[0]
                reasons.append(Reason("policy_ended", f"{key} left the policy: {name}"))
    return reasons


def _over_limits(
    limits: Limits,
    processes: tuple[ProcessVerdict, ...],
    running: list[SeenPause],
) -> list[Reason]:
    reasons = []
    for process in processes:
        key = process.identity.keys[0]
        unfinished_s = [p.duration_s for p in running if p.who.token == process.identity.token]
        for generation, each in zip(GENERATIONS, process.generations, strict=True):
            longest_ms = 1000 * max([each.longest_s, *(unfinished_s if generation == 2 else ())])
            if longest_ms > limits.max_pause_ms:
                detail = (
                    f"{key}: a gen{generation} collection of {longest_ms:.1f} ms, the limit is"
                    f" {limits.max_pause_ms:g}"
                )
                reasons.append(Reason("pause_over_limit", detail))
            if 1000 * each.lost_s > limits.max_pause_ms:
                detail = (
                    f"{key}: the records of {each.lost} gen{generation} collections are lost, which"
                    f" took {1000 * each.lost_s:.1f} ms together"
                )
                reasons.append(Reason("lost_records", detail))
        growth = process.growth_bytes
        if limits.max_growth_bytes is not None:
            if growth is None:
                reasons.append(Reason("growth_unknown", f"{key}: its memory is not known"))
            elif growth > limits.max_growth_bytes:
                reasons.append(
                    Reason(
                        "growth_over_limit",
                        f"{key}: grew by {growth} bytes, the limit is {limits.max_growth_bytes}",
                    )
                )
    return reasons


def _stalls_over(
    window: Window, processes: tuple[ProcessVerdict, ...], stalls: Mapping[int, float]
) -> list[Reason]:
    limit_ms, limit = window.limits.stall(window.duration_s())
    # Pauses without a record are in no union; at the worst none of them fell together with another.
    lost_s: dict[int, float] = {}
    for process in processes:
        who = process.identity
        if who.is_in_lockstep:
            lost_here_s = sum(each.lost_s for each in process.generations)
            lost_s[who.dp_rank] = lost_s.get(who.dp_rank, 0.0) + lost_here_s
    reasons = []
    for dp_rank in sorted({*stalls, *lost_s}):
        seen_ms, lost_ms = 1000 * stalls.get(dp_rank, 0.0), 1000 * lost_s.get(dp_rank, 0.0)
        if seen_ms > limit_ms:
            detail = (
                f"dp{dp_rank}: pauses held it up for {seen_ms:.1f} ms in all, the limit is {limit}"
            )
            reasons.append(Reason("stall_over_limit", detail))
        elif seen_ms + lost_ms > limit_ms:
            detail = (
                f"dp{dp_rank}: pauses held it up for {seen_ms:.1f} ms in all, and those whose"
                f" records are lost for up to {lost_ms:.1f} ms more"
            )
            reasons.append(Reason("lost_records", detail))
    return reasons


def _policy(desired: Desired) -> str:
    return f"{desired.mode} (generation {desired.generation})"
