"""Windows: measured stretches of time, and the verdict on each: which pauses fell into it, whether it is clean.

Counts and sums come from the processes' own counters, read when it opens and when it closes, so they hold also
where single records were lost. Nothing is sent to a process; vLLM's metrics are read once at either end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gc_sidecar.server.desired import Desired
from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.latency import Latencies, Stalled, stalled_between
from gc_sidecar.server.operations import Ledger, Operation
from gc_sidecar.server.pauses import LOCKSTEP_ROLES, IntervalUnion, SeenPause
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.reports import Identity, Key, Reason
from gc_sidecar.server.roster import Row
from gc_sidecar.server.sight import PageReading
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.watch import Watch
from gc_sidecar_agent.command import POLICY_KINDS

DEFAULT_MAX_PAUSE_MS = 50.0
GENERATIONS = (0, 1, 2)
OPEN_AT_ONCE = 16
REMEMBERED = 256
# The longest of a window's pauses that are kept one by one.
LISTED = 500
# Below this share of the stalled time GC does not explain it, above that it does.
LITTLE, MOST = 0.2, 0.5
# Less stalled time than this share of the window, or than the histogram can tell, is none.
WORTH_TELLING = 0.001
WORTH_TELLING_S = 0.02


@dataclass(frozen=True)
class Limits:
    """What a clean window stays within; None is no limit."""

    max_pause_ms: float = DEFAULT_MAX_PAUSE_MS
    max_stall_ms: float | None = None
    max_growth_bytes: int | None = None


@dataclass(frozen=True)
class Mark:
    """One process as its page showed it at one end of a window."""

    identity: Identity
    numbers: Mapping[str, int | None]
    exits: Mapping[str, int]
    alive: bool

    def number(self, name: str) -> int:
        """A counter; 0 where the process does not know it."""
        return self.numbers.get(name) or 0


@dataclass
class Sums:
    """Pauses of one generation: those of which records came, `within` the window and `beside` it."""

    within: int = 0
    within_s: float = 0.0
    longest_s: float = 0.0
    beside: int = 0
    beside_s: float = 0.0


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
class LatencyVerdict:
    """What vLLM's own latency says of a window: `stalled_s` by anything, `gc_s` of GC, `explained` the share."""

    says: str
    stalled_s: float | None = None
    gc_s: float | None = None
    explained: float | None = None
    typical_s: float | None = None
    tokens: int | None = None


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


@dataclass
class Window:
    """One window. Times in seconds, `opened_s` and `closed_s` on our monotonic clock."""

    id: str
    name: str | None
    limits: Limits
    desired: Desired
    marks: Mapping[str, Mark]
    keys: Mapping[Key, str]
    latencies: Latencies
    known_operations: frozenset[str]
    opened_at: float = field(default_factory=time.time)
    opened_s: float = field(default_factory=time.monotonic)
    closed_s: float | None = None
    verdict: Verdict | None = None
    sums: dict[str, tuple[Sums, ...]] = field(default_factory=dict)
    stalls: dict[int, IntervalUnion] = field(default_factory=dict)
    pauses: list[SeenPause] = field(default_factory=list)
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
        sums = self.sums.setdefault(pause.who.token, (Sums(), Sums(), Sums()))
        of_generation = sums[pause.gc_generation]
        closed_s = math.inf if self.closed_s is None else self.closed_s
        if pause.end_s <= self.opened_s or pause.start_s >= closed_s:
            of_generation.beside += 1
            of_generation.beside_s += pause.duration_s
            return
        of_generation.within += 1
        of_generation.within_s += pause.duration_s
        of_generation.longest_s = max(of_generation.longest_s, pause.duration_s)
        self.hold_up(pause, min(pause.end_s, closed_s))
        self.seen += 1
        self.pauses.append(pause)
        if len(self.pauses) >= 2 * LISTED:
            self.pauses = longest_of(self.pauses)

    def hold_up(self, pause: SeenPause, end_s: float) -> None:
        """Count the part of a pause that held up its lockstep group within the window."""
        if pause.is_in_lockstep:
            union = self.stalls.setdefault(pause.who.dp_rank, IntervalUnion())
            union.add(max(pause.start_s, self.opened_s), end_s)

    def settle(self, verdict: Verdict) -> None:
        """It is judged: what was needed for that is let go of."""
        self.verdict = verdict
        self.sums, self.stalls, self.pauses = {}, {}, []
        self.marks, self.latencies = {}, {}


def longest_of(pauses: list[SeenPause]) -> list[SeenPause]:
    """The LISTED longest."""
    return sorted(pauses, key=lambda pause: pause.duration_s, reverse=True)[:LISTED]


class Windows:
    """All windows of this sidecar; they end with it."""

    def __init__(self, knowledge: Knowledge, watch: Watch, ledger: Ledger, timing: Timing) -> None:
        self._knowledge = knowledge
        self._watch = watch
        self._log = knowledge.sight.log
        self._ledger = ledger
        self._timing = timing
        self._windows: OrderedDict[str, Window] = OrderedDict()
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._opening = asyncio.Lock()

    @property
    def open_count(self) -> int:
        """How many are open."""
        return sum(window.verdict is None for window in self._windows.values())

    def all(self) -> list[Window]:
        """Every window that is remembered, newest first."""
        return list(reversed(self._windows.values()))

    def get(self, window_id: str) -> Window:
        """The window with this id. Raises Problem."""
        window = self._windows.get(window_id)
        if window is None:
            raise Problem("window_not_found", f"there is no window {window_id[:64]!r}")
        return window

    async def open(self, window_id: str, name: str | None, limits: Limits) -> tuple[Window, bool]:
        """Open a window; the same id again gives the same one. The second value says whether it is new.

        Raises Problem.
        """
        # Before the lock: a slow engine must not make everybody who opens a window wait for the others.
        latencies = {} if window_id in self._windows else await self._latencies()
        async with self._opening:
            known = self._windows.get(window_id)
            if known is not None:
                if (known.name, known.limits) != (name, limits):
                    raise Problem(
                        "window_id_reused",
                        f"window {window_id} was opened with another name or other limits",
                    )
                return known, False
            if self.open_count >= OPEN_AT_ONCE:
                raise Problem(
                    "too_many_windows",
                    f"{OPEN_AT_ONCE} windows are open: "
                    + ", ".join(each.id for each in self.all() if each.verdict is None),
                )
            window = await self._opened(window_id, name, limits, latencies)
            self._windows[window_id] = window
            self._forget_oldest()
            return window, True

    async def _opened(
        self, window_id: str, name: str | None, limits: Limits, latencies: Latencies
    ) -> Window:
        roster = await self._watch.look(0.0)
        window = Window(
            id=window_id,
            name=name,
            limits=limits,
            desired=self._knowledge.desired,
            marks=_marks(self._knowledge.sight.snapshot.pages),
            keys=_holders(roster.rows),
            latencies=latencies,
            known_operations=self._ledger.ended_ids(),
        )
        self._log.listeners.append(window.add)
        return window

    def _forget_oldest(self) -> None:
        while len(self._windows) > REMEMBERED:
            oldest = next(each.id for each in self._windows.values() if each.verdict is not None)
            del self._windows[oldest]

    async def close(self, window_id: str) -> Window:
        """Close a window and judge it; once closed it stays as it is. Raises Problem."""
        window = self.get(window_id)
        if window.verdict is None:
            task = self._closing.get(window_id)
            if task is None:
                task = self._closing[window_id] = asyncio.create_task(self._close(window))
            # It is closed also where the caller leaves, or a second one asks meanwhile.
            await asyncio.shield(task)
        return window

    async def _close(self, window: Window) -> None:
        window.closed_s = time.monotonic()
        try:
            latencies, ending = await asyncio.gather(self._latencies(), self._read_to_the_end())
            window.settle(await self._judge(window, latencies, ending))
        except BaseException:
            window.closed_s = None  # it stays open, and can be closed again
            raise
        finally:
            del self._closing[window.id]
        self._log.listeners.remove(window.add)

    async def judge_now(self, window: Window) -> Verdict:
        """The verdict as it would be if the window were closed now."""
        return window.verdict or await self._judge(window, None, None)

    async def _latencies(self) -> Latencies:
        return await self._knowledge.engines.latencies()

    async def _read_to_the_end(self) -> _Ending:
        """Read pages until each has been published anew from now on.

        One that is in the middle of a collection publishes nothing until it is through, and its page says so.
        """
        deadline = time.monotonic() + self._timing.window_close_s
        # A publication may have begun before now: the one after it has not.
        await self._watch.look(0.0)
        first = {
            token: page
            for token, page in _by_token(self._knowledge.sight.snapshot.pages).items()
            if page.alive
        }
        while True:
            pages = _by_token(self._knowledge.sight.snapshot.pages)
            unread = {
                token
                for token, page in first.items()
                if token in pages
                and pages[token].alive
                and _heartbeat(pages[token]) < _heartbeat(page) + 2
            }
            if not unread or time.monotonic() >= deadline:
                return _Ending(
                    frozenset(unread),
                    {token: page.report.collecting_since for token, page in first.items()},
                )
            await asyncio.sleep(self._timing.proof_poll_s)
            await self._watch.look(0.0)

    async def _judge(
        self, window: Window, latencies: Latencies | None, ending: _Ending | None
    ) -> Verdict:
        roster = await self._watch.look(0.0)
        if window.verdict is not None:
            return window.verdict  # it was closed meanwhile
        pages = self._knowledge.sight.snapshot.pages
        ends = _marks(pages)
        stalls = {dp_rank: union.total_s for dp_rank, union in window.stalls.items()}
        running = [
            pause
            for page in _by_token(pages).values()
            if (pause := _running(page)) is not None and (ending is None or ending.is_of(page))
        ]
        collecting = {pause.who.token for pause in running}
        unread = ending.unread - collecting if ending else frozenset()
        if running:
            stalls = _with_running(window, running)
        processes = tuple(
            _process_verdict(
                window, token, window.marks.get(token), ends.get(token), unread | collecting
            )
            for token in dict.fromkeys((*window.marks, *ends))
        )
        pauses = sorted([*longest_of(window.pauses), *running], key=lambda pause: pause.start_s)
        changes = tuple(
            operation
            for operation in self._ledger.all()
            if operation.id not in window.known_operations
            and _is_of_note(operation, window.desired)
        )
        reasons = [
            *_seen_enough(window, roster.rows, ends, unread),
            *_changed(window, self._knowledge.desired, changes, ends),
            *_over_limits(window.limits, processes, running, stalls),
        ]
        if self._knowledge.desired.is_on and not roster.is_covered:
            detail = f"{roster.acknowledged} of {roster.expected} processes have the policy"
            reasons.append(Reason("incomplete_coverage", detail))
        return Verdict(
            reasons=tuple(dict.fromkeys(reasons)),
            processes=processes,
            stalls=stalls,
            pauses=tuple(pauses),
            unlisted=window.seen - len(longest_of(window.pauses)),
            changes=changes,
            latency=(
                LatencyVerdict("not known before it is closed")
                if latencies is None
                else latency_verdict(
                    stalled_between(window.latencies, latencies), stalls, window.duration_s()
                )
            ),
            policy_at_opening=window.desired,
            policy_at_closing=self._knowledge.desired,
        )


@dataclass(frozen=True)
class _Ending:
    """How far the pages told of a window's end: tokens of those that did not publish again in time, and which
    collection ran in each process at the closing (0 is none)."""

    unread: frozenset[str]
    collecting_since: Mapping[str, int]

    def is_of(self, page: PageReading) -> bool:
        """Whether the collection that runs there now ran at the closing already."""
        report = page.report
        return self.collecting_since.get(report.identity.token) == report.collecting_since


def _by_token(pages: tuple[PageReading, ...]) -> dict[str, PageReading]:
    """The page of each process; where one was given up and made anew, the one in use."""
    in_order = sorted(pages, key=lambda page: (page.alive, _heartbeat(page)))
    return {page.report.identity.token: page for page in in_order}


def _marks(pages: tuple[PageReading, ...]) -> dict[str, Mark]:
    return {
        token: Mark(page.report.identity, page.report.numbers, page.report.state.exits, page.alive)
        for token, page in _by_token(pages).items()
    }


def _is_of_note(operation: Operation, at_opening: Desired) -> bool:
    """Whether an operation did something to what was measured; a renewal of the policy in force did not."""
    if not (operation.lines or operation.is_running):
        return False
    kind = operation.change.kind
    if kind in POLICY_KINDS:
        return operation.generation != at_opening.generation
    return kind == "maintain"


def _holders(rows: tuple[Row, ...]) -> dict[Key, str]:
    """Which process (token) is in each place."""
    return {row.key: row.token for row in rows if row.token and row.is_live}


def _heartbeat(page: PageReading) -> int:
    return page.report.numbers.get("heartbeat") or 0


def _running(page: PageReading) -> SeenPause | None:
    """The full collection that runs in a process right now, as far as it has come."""
    if page.collecting_s is None:
        return None
    return SeenPause(
        page.report.identity,
        time.monotonic() - page.collecting_s,
        page.collecting_s,
        2,
        "running",
        0,
    )


def _with_running(window: Window, running: list[SeenPause]) -> dict[int, float]:
    """The stalls with what is still running, which must not be counted for good: it will come as a record."""
    unions = {dp_rank: union.copy() for dp_rank, union in window.stalls.items()}
    for pause in running:
        if pause.is_in_lockstep:
            end_s = pause.end_s if window.closed_s is None else window.closed_s
            union = unions.setdefault(pause.who.dp_rank, IntervalUnion())
            union.add(max(pause.start_s, window.opened_s), end_s)
    return {dp_rank: union.total_s for dp_rank, union in unions.items()}


def _process_verdict(
    window: Window, token: str, before: Mark | None, after: Mark | None, unread: frozenset[str]
) -> ProcessVerdict:
    # A process that was not there at first counts from 0, one that is gone as far as it was seen.
    last = after or before
    assert last is not None
    sums = window.sums.get(token, (Sums(), Sums(), Sums()))
    generations = []
    for generation in GENERATIONS:
        count = last.number(f"gen{generation}_count")
        total_s = last.number(f"gen{generation}_total_ns") * 1e-9
        if before is not None:
            count -= before.number(f"gen{generation}_count")
            total_s -= before.number(f"gen{generation}_total_ns") * 1e-9
        each = sums[generation]
        count = max(count - each.beside, each.within)
        total_s = max(total_s - each.beside_s, each.within_s)
        lost = count - each.within
        lost_s = total_s - each.within_s if lost else 0.0
        generations.append(GenerationVerdict(count, total_s, each.longest_s, lost, lost_s))
    return ProcessVerdict(
        identity=last.identity,
        generations=tuple(generations),
        growth_bytes=_difference(before, after, "anonymous_bytes"),
        device_growth_bytes=_difference(before, after, "device_allocated_bytes"),
        is_read_to_the_end=after is not None and after.alive and token not in unread,
    )


def _difference(before: Mark | None, after: Mark | None, name: str) -> int | None:
    first = before.numbers.get(name) if before else None
    last = after.numbers.get(name) if after else None
    return None if first is None or last is None else last - first


def _seen_enough(
    window: Window, rows: tuple[Row, ...], ends: Mapping[str, Mark], unread: frozenset[str]
) -> list[Reason]:
    """What keeps the sidecar from knowing what happened in every process of the engine."""
    reasons = []
    if not rows:
        reasons.append(Reason("no_process", "no process of an engine is seen"))
    for row in rows:
        before = window.keys.get(row.key)
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
    for key in window.keys:
        if key not in shown:
            reasons.append(Reason("process_gone", f"{key} is gone"))
    return reasons


def _changed(
    window: Window, desired: Desired, changes: tuple[Operation, ...], ends: Mapping[str, Mark]
) -> list[Reason]:
    """What somebody did to the policy while it was measured."""
    reasons = []
    for operation in changes:
        if operation.change.kind == "maintain":
            reasons.append(Reason("maintained", f"operation {operation.id} collected in it"))
        else:
            detail = f"operation {operation.id} was a {operation.change.kind}"
            reasons.append(Reason("policy_changed", detail))
    # What no operation tells that is remembered: the end of a lease, another sidecar's doing.
    told = {reason.code for reason in reasons}
    if "policy_changed" not in told and (desired.mode, desired.generation) != (
        window.desired.mode,
        window.desired.generation,
    ):
        detail = f"it was {_policy(window.desired)} and is {_policy(desired)}"
        reasons.append(Reason("policy_changed", detail))
    for token, before in window.marks.items():
        after = ends.get(token)
        if (
            "maintained" not in told
            and after
            and after.number("maintains") > before.number("maintains")
        ):
            detail = f"{before.identity.keys[0]} collected for maintenance in it"
            reasons.append(Reason("maintained", detail))
    for token, before in window.marks.items():
        after = ends.get(token)
        for name, count in (after.exits if after else {}).items():
            if name != "restored" and count > before.exits.get(name, 0):
                key = before.identity.keys[0]
                reasons.append(Reason("policy_ended", f"{key} left the policy: {name}"))
    return reasons


def _over_limits(
    limits: Limits,
    processes: tuple[ProcessVerdict, ...],
    running: list[SeenPause],
    stalls: Mapping[int, float],
) -> list[Reason]:
    reasons = []
    for process in processes:
        key = process.identity.keys[0]
        unfinished_s = [p.duration_s for p in running if p.who.token == process.identity.token]
        for generation, each in zip(GENERATIONS, process.generations, strict=True):
            longest_ms = 1000 * max([each.longest_s, *(unfinished_s if generation == 2 else ())])
            if longest_ms > limits.max_pause_ms:
                detail = f"{key}: a gen{generation} collection of {longest_ms:.1f} ms"
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
                reasons.append(Reason("growth_over_limit", f"{key}: grew by {growth} bytes"))
    if limits.max_stall_ms is not None:
        reasons += _stalls_over(limits.max_stall_ms, processes, stalls)
    return reasons


def _stalls_over(
    max_stall_ms: float, processes: tuple[ProcessVerdict, ...], stalls: Mapping[int, float]
) -> list[Reason]:
    # Pauses without a record are in no union; at the worst none of them fell together with another.
    lost_s: dict[int, float] = {}
    for process in processes:
        who = process.identity
        if not LOCKSTEP_ROLES.isdisjoint(who.roles):
            lost_here_s = sum(each.lost_s for each in process.generations)
            lost_s[who.dp_rank] = lost_s.get(who.dp_rank, 0.0) + lost_here_s
    reasons = []
    for dp_rank in sorted({*stalls, *lost_s}):
        seen_ms, lost_ms = 1000 * stalls.get(dp_rank, 0.0), 1000 * lost_s.get(dp_rank, 0.0)
        if seen_ms > max_stall_ms:
            detail = f"dp{dp_rank}: pauses held it up for {seen_ms:.1f} ms in all"
            reasons.append(Reason("stall_over_limit", detail))
        elif seen_ms + lost_ms > max_stall_ms:
            detail = (
                f"dp{dp_rank}: pauses held it up for {seen_ms:.1f} ms in all, and those whose"
                f" records are lost for up to {lost_ms:.1f} ms more"
            )
            reasons.append(Reason("lost_records", detail))
    return reasons


def _policy(desired: Desired) -> str:
    return f"{desired.mode} (generation {desired.generation})"


def latency_verdict(
    stalled: Mapping[int, Stalled], stalls: Mapping[int, float], duration_s: float
) -> LatencyVerdict:
    """What is said of it; `stalled` and `stalls` (by GC) are by data-parallel rank."""
    if not stalled:
        return LatencyVerdict("unknown: the engine's metrics tell too little of its latency")
    stalled_s = sum(each.stalled_s for each in stalled.values())
    gc_s = sum(stalls.get(dp_rank, 0.0) for dp_rank in stalled)
    typical_s = max(each.typical_s for each in stalled.values())
    tokens = sum(each.tokens for each in stalled.values())
    if stalled_s < max(WORTH_TELLING_S, WORTH_TELLING * duration_s):
        return LatencyVerdict("tokens came evenly", stalled_s, gc_s, None, typical_s, tokens)
    explained = min(1.0, gc_s / stalled_s)
    says = (
        "not the server's GC"
        if explained < LITTLE
        else "mostly the server's GC"
        if explained >= MOST
        else "partly the server's GC"
    )
    return LatencyVerdict(says, stalled_s, gc_s, explained, typical_s, tokens)
