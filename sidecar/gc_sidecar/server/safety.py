"""Whether it is safe to measure right now: one answer for the page, `top` and `status`.

It is yes only where everything that is known says so and a window over the last minute would have been clean.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from gc_sidecar.server.coordinator import Coordinator
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.pauses import IntervalUnion, PauseLog, SeenPause, hold_up
from gc_sidecar.server.roster import Roster
from gc_sidecar.server.verdicts import DEFAULT_MAX_STALL_SHARE, Limits, running_pause
from gc_sidecar_agent.command import DEFAULT_BUDGET_MS
from gc_sidecar_agent.commands.output import seconds

# What is looked back on, in stretches of which each is kept as a whole.
MINUTE_S, HOUR_S = 60.0, 3600.0
# In less time than this a share says nothing.
LEAST_S = 10.0
# A policy that ends so soon is none to begin a measurement under.
SHORT_LEASE_S = 60.0
# Pauses that no operation asked for.
UNASKED = ("auto", "explicit")


@dataclass(frozen=True)
class Safety:
    """The answer: `yes`, `no` or `unknown`; in a word or two; and in a sentence."""

    answer: Literal["yes", "no", "unknown"]
    word: str
    why: str


@dataclass
class _Second:
    """The unasked pauses that ended in one second, and for how long they held up each rank."""

    at: int
    longest: SeenPause
    stalls: dict[int, float] = field(default_factory=dict)


class LastMinute:
    """What pauses that nobody asked for did in the last minute, and the longest full one of the hour."""

    def __init__(self, log: PauseLog, clock: Callable[[], float] = time.monotonic) -> None:
        self.since_s = log.since_s
        self._clock = clock
        self._seconds: deque[_Second] = deque()
        self._unions: dict[int, IntervalUnion] = {}
        # How many records were lost when that was last asked, and when it was that more were.
        self._lost, self._lost_s = 0, -math.inf
        # By minute: the longest full collection.
        self._full: dict[int, float] = {}
        log.keepers.append(self.add)

    def add(self, pause: SeenPause) -> None:
        """Take in a pause."""
        if pause.trigger not in UNASKED or pause.end_s < self._clock() - HOUR_S:
            return
        if pause.gc_generation == 2:
            minute = int(pause.end_s // MINUTE_S)
            if minute not in self._full:
                self._forget_full()
            self._full[minute] = max(pause.duration_s, self._full.get(minute, 0.0))
        rank = pause.who.dp_rank
        before_s = self._stall_s(rank)
        hold_up(self._unions, pause, self.since_s)
        second = self._second(int(pause.end_s), pause)
        second.longest = max(second.longest, pause, key=lambda each: each.duration_s)
        second.stalls[rank] = second.stalls.get(rank, 0.0) + self._stall_s(rank) - before_s

    def _stall_s(self, rank: int) -> float:
        return self._unions[rank].total_s if rank in self._unions else 0.0

    def _second(self, at: int, pause: SeenPause) -> _Second:
        """The one of `at`. They come nearly in their order."""
        for second in reversed(self._seconds):
            if second.at == at:
                return second
            if second.at < at:
                break
        made = _Second(at, pause)
        self._seconds.append(made)
        while self._seconds[0].at < self._clock() - MINUTE_S:
            self._seconds.popleft()
            if not self._seconds:
                break
        return made

    def since(self, since_s: float) -> tuple[float, SeenPause | None, float]:
        """From `since_s` on, but for a minute at most: how long that is, the longest pause, and for how long the
        rank was held up that was so for longest."""
        now = self._clock()
        begun_s = max(since_s, now - MINUTE_S)
        found = [second for second in self._seconds if second.at >= begun_s]
        stalls: dict[int, float] = {}
        for second in found:
            for rank, stall_s in second.stalls.items():
                stalls[rank] = stalls.get(rank, 0.0) + stall_s
        longest = max(
            (second.longest for second in found), key=lambda each: each.duration_s, default=None
        )
        # Single pauses of before we started are known, but not all of them.
        span_s = now - max(begun_s, self.since_s)
        return max(0.0, span_s), longest, max(stalls.values(), default=0.0)

    def has_lost(self, lost: int) -> bool:
        """Whether records were lost in the last minute, or since somebody asked last; `lost` are those of ever."""
        if lost > self._lost:
            self._lost, self._lost_s = lost, self._clock()
        return self._clock() - self._lost_s < MINUTE_S

    def longest_full_s(self) -> float | None:
        """The longest full collection of the last hour that nobody asked for."""
        self._forget_full()
        return max(self._full.values(), default=None)

    def _forget_full(self) -> None:
        first = (self._clock() - HOUR_S) // MINUTE_S
        self._full = {minute: longest for minute, longest in self._full.items() if minute >= first}


def judge(
    coordinator: Coordinator, roster: Roster, obstacles: Iterable[Obstacle], minute: LastMinute
) -> Safety:
    """The answer of now; `obstacles` are all that are known (`readiness`)."""
    desired = coordinator.knowledge.desired
    blocking = next((each for each in obstacles if each.blocking), None)
    if blocking is not None:
        return Safety("no", "No.", _sentence(blocking.detail))
    if coordinator.running is not None:
        kind = coordinator.running.change.kind
        return Safety("no", "Not at this moment.", f"An operation ({kind}) is running.")
    if not desired.is_on:
        return _without_policy(str(desired.reason) if desired.reason else None, minute)
    if not roster.is_covered:
        said = f"{roster.acknowledged} of {roster.expected} processes have the policy, not all."
        return Safety("no", "No.", said)
    is_budget = desired.mode == "budget"
    # Without a budget one that has only just been seen counts too, for 0 s.
    budget_ms = (desired.pause_budget_ms or DEFAULT_BUDGET_MS) if is_budget else -1.0
    collecting = sum(
        row.page is not None
        and row.page.collecting_s is not None
        and 1000 * row.page.collecting_s > budget_ms
        for row in roster.rows
    )
    if collecting:
        said = f"In {collecting} of {roster.expected} processes a full collection runs."
        return Safety("no", "Not at this moment.", said)
    unseen = sum(row.page is None for row in roster.rows)
    if unseen:
        return Safety(
            "unknown",
            "Not known.",
            f"Of {unseen} of {roster.expected} processes the sidecar can read no page, so whether a"
            " collection runs there is not seen.",
        )
    running = (running_pause(row.page) for row in roster.rows if row.page is not None)
    too_long_s = Limits().max_pause_ms / 1000
    if any(
        each and each.gc_generation is None and each.duration_s > too_long_s for each in running
    ):
        return Safety("no", "Not at this moment.", "A young collection runs, and has for long.")
    lease_s = desired.lease_remaining_s()
    if lease_s is not None and lease_s < SHORT_LEASE_S:
        said = f"The policy ends in {lease_s:.0f} s: renew it before you measure."
        return Safety("no", "Not for long.", said)
    # A policy that was taken over may be a moment old: then all of the minute counts.
    span_s, longest, stall_s = minute.since(desired.entered_s or 0.0)
    if unclean := _unclean(span_s, longest, stall_s):
        return Safety("no", "No.", unclean)
    if minute.has_lost(coordinator.knowledge.sight.log.lost_among(lambda _: True)):
        return Safety(
            "unknown",
            "Not known.",
            "Records of collections were lost of late, so how long these took is not known.",
        )
    if not is_budget:
        return Safety("yes", "Yes.", "No automatic full collection runs.")
    seen = f" (the longest of late: {seconds(longest.duration_s)})" if longest else ""
    said = f"if pauses of about {seconds(budget_ms / 1000)} do not matter{seen}."
    return Safety("yes", "Yes,", said)


def _without_policy(ended: str | None, minute: LastMinute) -> Safety:
    longest_s = minute.longest_full_s()
    so_far = f"; in the last hour for up to {seconds(longest_s)}" if longest_s else ""
    why = f" The last policy ended: {_sentence(ended)}" if ended else ""
    return Safety(
        "no",
        "No.",
        f"Python's garbage collector works as usual and may stop any process at any moment{so_far}.{why}"
        " Freeze before you measure.",
    )


def _unclean(span_s: float, longest: SeenPause | None, stall_s: float) -> str | None:
    """Why a window over this time would not have been clean, by the limits that one has unless told otherwise."""
    limits = Limits()
    if longest is not None and 1000 * longest.duration_s > limits.max_pause_ms:
        what = {2: "full", None: ""}.get(longest.gc_generation, "young")
        return (
            f"In spite of the policy {longest.who.keys[0]} stood still for {seconds(longest.duration_s)} in the"
            f" last minute ({what} collection, {longest.trigger}): a window would not be clean"
            f" (over {limits.max_pause_ms:g} ms)."
        )
    if span_s >= LEAST_S and 1000 * stall_s > limits.stall(span_s)[0]:
        return (
            f"Short collections, which the policy leaves on, held the engine up for {stall_s / span_s:.0%} of the"
            f" last {span_s:.0f} s: a window would not be clean (over {DEFAULT_MAX_STALL_SHARE:.0%})."
        )
    return None


def _sentence(text: str) -> str:
    """A sentence of it; a name with which it begins stays as it is written (`worker dp0 rank 1`)."""
    first = text.partition(" ")
    is_name = not first[0].isalpha() or first[2].startswith("dp")
    return (text if is_name else text[:1].upper() + text[1:]) + ("" if text.endswith(".") else ".")
