"""The last hour for people who look: pauses and memory, in bounded memory and ready to be sent.

Every entry is written as JSON once, when it comes. Operations and windows are not copied: their own keepers have
them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, NamedTuple

from gc_sidecar.server.pauses import SeenPause
from gc_sidecar.server.reports import Key
from gc_sidecar.server.sight import PageReading, by_token

SPAN_S = 3600.0
# Full collections and young ones each, so that many of these push out none of those.
KEPT_PAUSES = 10_000
MEMORY_EVERY_S = 5.0
KEPT_MEMORY = round(SPAN_S / MEMORY_EVERY_S)
# Shorter pauses of young collections are many, and nobody sees them.
SHORTEST_S = 0.001
MAXIMUM_PLACES = 4096
MEBI = 1 << 20


class Entry(NamedTuple):
    """Something that happened, as JSON. `sequence` numbers everything that was ever kept."""

    sequence: int
    at: float
    text: str


class History:
    """See the module.

    A pause is `[place, start, seconds, gc_generation, trigger, collected_objects, pid]`, a point of memory
    `[time, [MiB, ...]]` by place, times are seconds since 1970, and a place stands for its index in `places`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        own_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Sequences of another sidecar, or of this one before it restarted, mean nothing here.
        self.instance = secrets.token_hex(4)
        self.sequence = 0
        self.places: dict[Key, int] = {}
        self._full: deque[Entry] = deque(maxlen=KEPT_PAUSES)
        self._young: deque[Entry] = deque(maxlen=KEPT_PAUSES)
        self._memory: deque[Entry] = deque(maxlen=KEPT_MEMORY)
        self._clock = clock
        self._own_clock = own_clock

    def add_pause(self, pause: SeenPause) -> None:
        """Keep a pause, if it is one that people look for."""
        if pause.gc_generation != 2 and pause.duration_s < SHORTEST_S:
            return
        who = pause.who
        place = self._place(who.keys[0])
        started_at = pause.start_s - self._own_clock() + self._clock()
        if place is None or started_at < self._clock() - SPAN_S:
            return
        self._keep(
            self._full if pause.gc_generation == 2 else self._young,
            started_at,
            [
                place,
                round(started_at, 3),
                round(pause.duration_s, 6),
                pause.gc_generation,
                pause.trigger,
                pause.collected_objects,
                who.pid,
            ],
        )

    def add_memory(self, pages: Iterable[PageReading]) -> None:
        """Keep how much anonymous memory each living process has."""
        now = self._clock()
        known: dict[int, float] = {}
        for page in by_token(pages).values():
            place = self._place(page.report.identity.keys[0]) if page.alive else None
            size = page.report.numbers.get("anonymous_bytes")
            if place is not None and size is not None:
                known[place] = round(size / MEBI, 1)
        if known:
            sizes = [known.get(place) for place in range(max(known) + 1)]
            self._keep(self._memory, now, [round(now, 1), sizes])

    def pauses(self, after: int = 0) -> list[str]:
        """The pauses of the last hour that were kept after an entry, in the order in which they came."""
        entries = [*self._since(self._full, after), *self._since(self._young, after)]
        return [entry.text for entry in sorted(entries)]

    def memory(self, after: int = 0) -> list[str]:
        """The same of the points of memory."""
        return [entry.text for entry in self._since(self._memory, after)]

    def _place(self, key: Key) -> int | None:
        if key not in self.places and len(self.places) >= MAXIMUM_PLACES:
            return None
        return self.places.setdefault(key, len(self.places))

    def _keep(self, kept: deque[Entry], at: float, value: Any) -> None:
        self.sequence += 1
        kept.append(Entry(self.sequence, at, to_line(value)))

    def _since(self, kept: deque[Entry], after: int) -> list[Entry]:
        # They come nearly in their order; one that is late is let go of a little later.
        while kept and kept[0].at < self._clock() - SPAN_S:
            kept.popleft()
        return [*takewhile(lambda entry: entry.sequence > after, reversed(kept))][::-1]


def to_line(value: Any) -> str:
    """JSON in one line, as short as can be."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
