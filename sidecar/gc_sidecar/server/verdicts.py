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
    Latencies,
    LatencyVerdict,
    latency_verdict,
    stalled_between,
)
from gc_sidecar.server.operations import Operation
from gc_sidecar.server.pauses import NANO, IntervalUnion, SeenPause, Stretches, hold_up
from gc_sidecar.server.reports import Identity, Key, Reason
from gc_sidecar.server.roster import Roster, Row
from gc_sidecar.server.sight import PageReading
from gc_sidecar_agent.agent import ROLES
from gc_sidecar_agent.command import POLICY_KINDS
from gc_sidecar_agent.commands.output import seconds, size

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
            limits.append((self.max_stall_ms, _limit(self.max_stall_ms)))
        if self.max_stall_share is not None:
            # One pause that is short enough is clean in however short a window.
            most_ms = max(self.max_pause_ms, 1000 * duration_s * self.max_stall_share)
            share = f"{100 * self.max_stall_share:.3g} % of the window"
            told = (
                f"{seconds(most_ms / 1000)} ({share})"
                if most_ms > self.max_pause_ms
                else f"{_limit(most_ms)} (that of a single pause: {share} is less)"
            )
            limits.append((most_ms, told))
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


class HeldUp:
    """How long pauses held up each lockstep group, `by_rank`, and in which stretches: those are held against late
    tokens."""

    def __init__(self) -> None:
        self.by_rank: dict[int, IntervalUnion] = {}
        self.stretches: dict[int, Stretches] = {}

    def copy(self) -> HeldUp:
        """Another one that has counted the same."""
        other = HeldUp()
        other.by_rank = {dp_rank: union.copy() for dp_rank, union in self.by_rank.items()}
        other.stretches = {dp_rank: each.copy() for dp_rank, each in self.stretches.items()}
        return other

    def add(self, pause: SeenPause, since_s: float, until_s: float) -> None:
        """Count the part of a pause between two moments; a token waits for all of it."""
        hold_up(self.by_rank, pause, since_s, until_s)
        if pause.who.is_in_lockstep:
            stretches = self.stretches.setdefault(pause.who.dp_rank, Stretches())
            stretches.add(pause.start_s, pause.end_s)


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
    # When somebody asked for it last, and for how long nobody may; None: for ever.
    asked_s: float = field(default_factory=time.monotonic)
    abandon_after_s: float | None = None
    # Of the processes whose records came, by token.
    sums: dict[str, tuple[Sums, ...]] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)
    held_up: HeldUp = field(default_factory=HeldUp)
    longest: list[tuple[float, int, SeenPause]] = field(default_factory=list)
    seen: int = 0

    @property
    def state(self) -> str:
        """open, closing or closed"""
        return "closed" if self.verdict else "open" if self.closed_s is None else "closing"

    @property
    def patience_s(self) -> float:
        """For how long nobody may ask for it before it is closed by itself."""
        return math.inf if self.abandon_after_s is None else self.abandon_after_s

    def duration_s(self) -> float:
        """How long it is, or has been so far."""
        return (time.monotonic() if self.closed_s is None else self.closed_s) - self.opened_s

    @property
    def until_s(self) -> float:
        """When it ends, so far."""
        return math.inf if self.closed_s is None else self.closed_s

    def add(self, pause: SeenPause) -> None:
        """Take in a pause that a page has told of."""
        assert pause.gc_generation is not None, "a record tells it"
        self.identities[pause.who.token] = pause.who
        sums = self.sums.setdefault(pause.who.token, no_sums())
        of_generation = sums[pause.gc_generation]
        if pause.end_s <= self.opened_s or pause.start_s >= self.until_s:
            of_generation.beside += 1
            of_generation.beside_s += pause.duration_s
            return
        of_generation.within += 1
        of_generation.within_s += pause.duration_s
        of_generation.longest_s = max(of_generation.longest_s, pause.duration_s)
        self.held_up.add(pause, self.opened_s, self.until_s)
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
        self.sums, self.identities, self.held_up, self.longest = {}, {}, HeldUp(), []
        self.pages, self.holders, self.latencies = {}, {}, {}
        self.known_operations = frozenset()


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
        if (pause := running_pause(page)) is not None and pause.start_s < window.until_s
    ]
    collecting = {pause.who.token for pause in running}
    unread = evidence.unread - collecting
    # What still runs is not counted for good, for it will come as a record.
    held_up = window.held_up.copy()
    for pause in running:
        held_up.add(pause, window.opened_s, window.until_s)
    identities = window.identities | {
        token: page.report.identity for token, page in {**window.pages, **ends}.items()
    }
    processes = tuple(
        _process_verdict(
            window,
            identities[token],
            window.pages.get(token),
            ends.get(token),
            unread | collecting,
        )
        for token in sorted(identities, key=lambda each: _place(identities[each]))
        if _has_part(window, token, ends)
    )
    stalls = {who.dp_rank: 0.0 for process in processes if (who := process.identity).is_in_lockstep}
    stalls |= {dp_rank: union.total_s for dp_rank, union in held_up.by_rank.items()}
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
        pauses = {dp_rank: each.counts() for dp_rank, each in held_up.stretches.items()}
        latency = latency_verdict(stalled, pauses, window.duration_s())
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


def running_pause(page: PageReading) -> SeenPause | None:
    """The collection that runs in a process right now, as far as it has come."""
    now = time.monotonic()
    if page.collecting_start_s is not None:
        length_s = max(0.0, now - page.collecting_start_s)
        return SeenPause(page.report.identity, page.collecting_start_s, length_s, 2, "running", 0)
    if page.young_start_s is not None:
        # As of the last publication that was seen: it may have ended since.
        length_s = max(0.0, now - page.unchanged_s - page.young_start_s)
        return SeenPause(page.report.identity, page.young_start_s, length_s, None, "running", 0)
    return None


def _has_part(window: Window, token: str, ends: Mapping[str, PageReading]) -> bool:
    """Whether a process has part in a window: it was there at the opening, or is at the end, or its records say
    so. One that was dead before has none."""
    if token in window.pages or (token in ends and ends[token].alive):
        return True
    return any(each.within for each in window.sums.get(token, ()))


def _place(identity: Identity) -> tuple[int, int, int, float]:
    """In the order of the status: by role, ranks, and who was there first."""
    role = ROLES.index(identity.roles[0])
    return role, identity.dp_rank, identity.rank, identity.started_at


def _is_of_note(operation: Operation, window: Window) -> bool:
    """Whether an operation did something to what was measured; a renewal of the policy in force did not."""
    if operation.id in window.known_operations:
        return False
    if not (operation.lines or operation.is_running):
        return False
    kind = operation.change.kind
    if kind not in POLICY_KINDS:
        return kind == "maintain"
    generation = window.desired.generation
    if operation.generation != generation:
        return True
    # It ran at the opening: a change that had not reached every process yet, or a renewal, which changes none.
    return operation.requested_at < window.opened_at and any(
        page.report.state.generation < generation for page in window.pages.values()
    )


def _process_verdict(
    window: Window,
    identity: Identity,
    before: PageReading | None,
    after: PageReading | None,
    unread: frozenset[str],
) -> ProcessVerdict:
    # A process that was not there at first counts from 0, one that is gone as far as it was seen: where even its
    # page is gone, as far as its records came.
    last = after or before
    sums = window.sums.get(identity.token, no_sums())
    generations = []
    for generation in GENERATIONS:
        count, total_s = _counted(last, generation)
        if before is not None:
            count_before, total_before_s = _counted(before, generation)
            count, total_s = count - count_before, total_s - total_before_s
        each = sums[generation]
        count = max(count - each.beside, each.within)
        total_s = max(total_s - each.beside_s, each.within_s)
        lost = count - each.within
        lost_s = total_s - each.within_s if lost else 0.0
        generations.append(GenerationVerdict(count, total_s, each.longest_s, lost, lost_s))
    return ProcessVerdict(
        identity=identity,
        generations=tuple(generations),
        growth_bytes=_difference(before, after, "anonymous_bytes"),
        device_growth_bytes=_difference(before, after, "device_allocated_bytes"),
        is_read_to_the_end=after is not None and after.alive and identity.token not in unread,
    )


def _counted(page: PageReading | None, generation: int) -> tuple[int, float]:
    """Number and length in seconds of all collections of a GC generation, by the process's own counters."""
    if page is None:
        return 0, 0.0
    return (
        page.report.number(f"gen{generation}_count"),
        page.report.number(f"gen{generation}_total_ns") * NANO,
    )


def _difference(before: PageReading | None, after: PageReading | None, name: str) -> int | None:
    first = before.report.numbers.get(name) if before else None
    last = after.report.numbers.get(name) if after else None
    return None if first is None or last is None else last - first


def _seen_enough(window: Window, rows: tuple[Row, ...], unread: frozenset[str]) -> list[Reason]:
    """What keeps the sidecar from knowing what happened in every process of the engine."""
    reasons: list[Reason] = []
    if not window.holders and not any(row.is_live for row in rows):
        return [
            Reason(
                "no_process",
                "no process of an engine lived when it was opened, and none when it was closed",
            )
        ]
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
        if after is None:
            continue
        key = before.report.identity.keys[0]
        if "maintained" not in told and after.report.number("maintains") > before.report.number(
            "maintains"
        ):
            reasons.append(Reason("maintained", f"{key} collected for maintenance in it"))
        for name, count in after.report.state.exits.items():
            if name != "restored" and count > before.report.state.exits.get(name, 0):
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
        unfinished = [pause for pause in running if pause.who.token == process.identity.token]
        for pause in unfinished:
            if pause.gc_generation is None and 1000 * pause.duration_s > limits.max_pause_ms:
                detail = (
                    f"{key}: a young collection that still runs, of {seconds(pause.duration_s)} so far,"
                    f" the limit is {_limit(limits.max_pause_ms)}"
                )
                reasons.append(Reason("pause_over_limit", detail))
        for generation, each in zip(GENERATIONS, process.generations, strict=True):
            of_it = [pause.duration_s for pause in unfinished if pause.gc_generation == generation]
            longest_s = max([each.longest_s, *of_it])
            if 1000 * longest_s > limits.max_pause_ms:
                detail = (
                    f"{key}: a {_collections(generation)} of {seconds(longest_s)}, the limit is"
                    f" {_limit(limits.max_pause_ms)}"
                )
                reasons.append(Reason("pause_over_limit", detail))
            if 1000 * each.lost_s > limits.max_pause_ms:
                detail = (
                    f"{key}: the records of {each.lost:,} {_collections(generation, each.lost)} are"
                    f" lost, which took {seconds(each.lost_s)} together"
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
                        f"{key}: grew by {size(growth)}, the limit is {size(limits.max_growth_bytes)}",
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
                f"dp{dp_rank}: pauses held it up for {seconds(seen_ms / 1000)} in all,"
                f" the limit is {limit}"
            )
            reasons.append(Reason("stall_over_limit", detail))
        elif seen_ms + lost_ms > limit_ms:
            detail = (
                f"dp{dp_rank}: pauses held it up for {seconds(seen_ms / 1000)} in all, and those whose"
                f" records are lost for up to {seconds(lost_ms / 1000)} more"
            )
            reasons.append(Reason("lost_records", detail))
    return reasons


def _policy(desired: Desired) -> str:
    return f"{desired.mode} (policy generation {desired.generation})"


def _collections(generation: int, how_many: int = 1) -> str:
    """What collections of a GC generation are called."""
    noun = "collection" if how_many == 1 else "collections"
    return f"full {noun}" if generation == 2 else f"young {noun} (gen{generation})"


def _limit(milliseconds: float) -> str:
    """A limit as somebody gave it, in the unit that fits."""
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:g} s"
