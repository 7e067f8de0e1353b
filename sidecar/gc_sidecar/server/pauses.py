"""Every collection that pages have told of, on the sidecar's own clock, and how long lockstep groups stood still.

Records come once, when a page is read; nothing here reads anything. What is kept is bounded.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gc_sidecar.server.reports import Identity
from gc_sidecar_agent.page import Pause

# How many pauses are kept, full collections and young ones each.
KEPT = 20_000
# How far two clocks of one machine may be read apart.
FUTURE_S = 1.0
# How many processes are remembered that may be no more.
REMEMBERED = 8192
# How many separate intervals of a union can still grow together with one that comes late.
OPEN_INTERVALS = 4096
# A pause that follows on another within so long, and within this share of its length, follows closely.
CLOSELY_S, CLOSELY = 0.005, 0.5
# In how many steps to a doubling lengths are told apart.
LENGTH_STEPS = 16
# What surely walks the whole heap: any other collection may have found most of it frozen.
WHOLE_HEAP_TRIGGERS = ("maintain", "restore")
NANO = 1e-9


@dataclass(frozen=True)
class RingNews:
    """New records of one ring. `following` is the sequence that the next one will have."""

    following: int
    records: tuple[Pause, ...] = ()


@dataclass(frozen=True)
class Arrival:
    """What one reading of a page told of new, of full and of young collections. `shift_ns` brings its process's
    monotonic clock to ours. `is_from_the_beginning`: it is the first one of a page that came while we looked."""

    identity: Identity
    shift_ns: int
    rings: tuple[RingNews, RingNews]
    is_from_the_beginning: bool = False


@dataclass(frozen=True, slots=True)
class SeenPause:
    """One collection. `start_s` is on our monotonic clock; `gc_generation` None: a young one that still runs."""

    who: Identity
    start_s: float
    duration_s: float
    gc_generation: int | None
    trigger: str
    collected_objects: int

    @property
    def end_s(self) -> float:
        """When it ended, on our monotonic clock."""
        return self.start_s + self.duration_s


class IntervalUnion:
    """The time that intervals cover together, which may overlap and come in any order."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._starts: list[float] = []
        self._ends: list[float] = []

    def copy(self) -> IntervalUnion:
        """Another one that covers the same."""
        other = IntervalUnion()
        other.total_s = self.total_s
        other._starts, other._ends = self._starts[:], self._ends[:]
        return other

    def add(self, start_s: float, end_s: float) -> None:
        """Cover one interval more; an empty one changes nothing."""
        if end_s <= start_s:
            return
        first = bisect_left(self._ends, start_s)
        last = bisect_right(self._starts, end_s)
        if first < last:
            start_s = min(start_s, self._starts[first])
            end_s = max(end_s, self._ends[last - 1])
        covered = sum(
            end - start
            for start, end in zip(self._starts[first:last], self._ends[first:last], strict=True)
        )
        # Never less than before, by however little: a counter that falls looks like a restart.
        self.total_s += max(0.0, end_s - start_s - covered)
        self._starts[first:last] = [start_s]
        self._ends[first:last] = [end_s]
        if len(self._starts) > OPEN_INTERVALS:
            del self._starts[: OPEN_INTERVALS // 2]
            del self._ends[: OPEN_INTERVALS // 2]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time in which pauses followed closely on one another, in seconds: all of it, the pauses in it,
    and the longest of them.

    It holds up an engine like a single pause, but a step may come in between.
    """

    length_s: float
    paused_s: float
    longest_s: float


class Stretches:
    """How many stretches there were. Pauses may overlap and come in any order."""

    def __init__(self) -> None:
        # In parallel: where each begins and ends, up to when another pause still belongs to it, and its figures.
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._open_until: list[float] = []
        self._paused: list[float] = []
        self._longest: list[float] = []
        self._settled: Counter[Stretch] = Counter()

    @property
    def _columns(self) -> tuple[list[float], ...]:
        return self._starts, self._ends, self._open_until, self._paused, self._longest

    def copy(self) -> Stretches:
        """Another one that has seen the same."""
        other = Stretches()
        for ours, theirs in zip(self._columns, other._columns, strict=True):
            theirs[:] = ours
        other._settled = self._settled.copy()
        return other

    def add(self, start_s: float, end_s: float) -> None:
        """A pause more; an empty one changes nothing."""
        longest_s = paused_s = end_s - start_s
        if longest_s <= 0:
            return
        open_until = end_s + min(CLOSELY_S, longest_s * CLOSELY)
        first = bisect_left(self._open_until, start_s)
        last = bisect_right(self._starts, open_until)
        for index in range(first, last):
            overlap_s = min(end_s, self._ends[index]) - max(start_s, self._starts[index])
            paused_s += self._paused[index] - max(0.0, overlap_s)
        if first < last:
            start_s = min(start_s, self._starts[first])
            end_s = max(end_s, self._ends[last - 1])
            open_until = max(open_until, self._open_until[last - 1])
            longest_s = max(longest_s, *self._longest[first:last])
        merged = (start_s, end_s, open_until, paused_s, longest_s)
        for column, value in zip(self._columns, merged, strict=True):
            column[first:last] = [value]
        if len(self._starts) > OPEN_INTERVALS:
            oldest = OPEN_INTERVALS // 2
            for stretch in self._open(oldest):
                lengths = (stretch.length_s, stretch.paused_s, stretch.longest_s)
                self._settled[Stretch(*map(_rounded, lengths))] += 1
            for column in self._columns:
                del column[:oldest]

    def counts(self) -> Counter[Stretch]:
        """How often there was each; those of long ago are rounded to 2 %."""
        found = self._settled.copy()
        found.update(self._open(len(self._starts)))
        return found

    def _open(self, count: int) -> Iterator[Stretch]:
        for index in range(count):
            length_s = self._ends[index] - self._starts[index]
            yield Stretch(length_s, self._paused[index], self._longest[index])


def _rounded(length_s: float) -> float:
    return float(2.0 ** (round(math.log2(max(length_s, NANO)) * LENGTH_STEPS) / LENGTH_STEPS))


def hold_up(
    stalls: dict[int, IntervalUnion], pause: SeenPause, since_s: float, until_s: float = math.inf
) -> None:
    """Count the part of a pause between two moments into the stall of its lockstep group, if it is in one."""
    if pause.who.is_in_lockstep:
        union = stalls.setdefault(pause.who.dp_rank, IntervalUnion())
        union.add(max(pause.start_s, since_s), min(pause.end_s, until_s))


@dataclass
class _Told:
    """How far one process's records have come: the last sequence of each ring that is settled."""

    identity: Identity
    last: list[int]
    lost: int = 0


class PauseLog:
    """The pauses of all processes that were seen since the sidecar started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.since_s = clock()
        self._clock = clock
        self._full: deque[SeenPause] = deque(maxlen=KEPT)
        self._young: deque[SeenPause] = deque(maxlen=KEPT)
        self._told: dict[str, _Told] = {}
        self._whole: dict[str, SeenPause] = {}
        self._stalls: dict[int, IntervalUnion] = {}
        # Called with each new pause: the windows that are open. While there are any, pages are read more often.
        self.listeners: list[Callable[[SeenPause], None]] = []
        # The same, for whoever takes them as they come.
        self.keepers: list[Callable[[SeenPause], None]] = []

    def absorb(self, arrivals: Iterable[Arrival]) -> None:
        """Take in what a reading of all pages told."""
        news = [pause for arrival in arrivals for pause in self._news(arrival)]
        # In their order, so that what overlaps comes together, however many there are.
        for pause in sorted(news, key=lambda pause: pause.start_s):
            (self._full if pause.gc_generation == 2 else self._young).append(pause)
            if pause.gc_generation == 2 and pause.trigger in WHOLE_HEAP_TRIGGERS:
                self._whole[pause.who.token] = pause
            # What was before is another sidecar's to have counted: a restart must not look like a stall.
            hold_up(self._stalls, pause, self.since_s)
            for listener in (*self.listeners, *self.keepers):
                listener(pause)

    def _news(self, arrival: Arrival) -> Iterator[SeenPause]:
        token = arrival.identity.token
        told = self._told.pop(token, None)
        is_from_before = told is None and not arrival.is_from_the_beginning
        if told is None:
            told = _Told(arrival.identity, [0] * len(arrival.rings))
        # A process may take on a role later; and whoever was told of last is forgotten last.
        told.identity = arrival.identity
        self._told[token] = told
        while len(self._told) > REMEMBERED:
            forgotten = next(iter(self._told))
            del self._told[forgotten]
            self._whole.pop(forgotten, None)
        for index, ring in enumerate(arrival.rings):
            last = told.last[index]
            news = [each for each in ring.records if last < each.sequence < ring.following]
            if ring.following > last:
                # What a process did before we first looked is not lost: nobody was there to be told.
                told.lost += 0 if is_from_before else ring.following - 1 - last - len(news)
                told.last[index] = ring.following - 1
            latest_s = self._clock() + FUTURE_S
            for record in news:
                pause = SeenPause(
                    told.identity,
                    (record.start_ns + arrival.shift_ns) * NANO,
                    record.duration_ns * NANO,
                    record.gc_generation,
                    record.trigger,
                    record.collected_objects,
                )
                if pause.end_s <= latest_s:
                    yield pause
                else:
                    told.lost += 1  # nobody has recorded what is still to come

    def lost(self, token: str | None) -> int:
        """How many records of this process were gone before they could be read."""
        told = self._told.get(token) if token else None
        return told.lost if told else 0

    def stall_s(self, dp_rank: int) -> float:
        """For how long a pause of at least one of its engine core and workers has held up this rank."""
        union = self._stalls.get(dp_rank)
        return union.total_s if union else 0.0

    def last_whole(self, token: str) -> SeenPause | None:
        """The last collection of a process that surely walked its whole heap."""
        return self._whole.get(token)

    def newest_first(self, is_wanted: Callable[[SeenPause], bool]) -> list[SeenPause]:
        """The kept pauses that are wanted."""
        found = [pause for kept in (self._full, self._young) for pause in kept if is_wanted(pause)]
        return sorted(found, key=lambda pause: pause.start_s, reverse=True)

    def lost_among(self, is_wanted: Callable[[Identity], bool]) -> int:
        """How many records of the processes that are wanted were lost."""
        return sum(told.lost for told in self._told.values() if is_wanted(told.identity))

    def complete_since_s(self, gc_generation: int | None = None) -> float:
        """From when on all that was recorded (of this generation) is kept, on our monotonic clock."""
        asked = {None: (self._full, self._young), 2: (self._full,)}
        kept = asked.get(gc_generation, (self._young,))
        return max([self.since_s, *(each[0].end_s for each in kept if len(each) == KEPT)])
