"""Keeps this process's page current: makes it, publishes on it, gives it up when it was damaged, makes it anew.

The page's format is in `page`; what stands on it comes from the meter's words and from the agent's description.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gc_sidecar_agent.meter import RING_SLOTS, PauseMeter, Ring, private_header
from gc_sidecar_agent.page import (
    FULL_RING_OFFSET,
    NUMBER_INDEX,
    NUMBERS,
    RECORD,
    RING_BYTES,
    RING_RECORDS,
    YOUNG_RING_OFFSET,
    PageError,
    PageWriter,
    create_page,
    page_name,
    remove_dead_pages,
)

_FULL_RING_NEXT = NUMBER_INDEX["full_ring_next"]
_YOUNG_RING_NEXT = NUMBER_INDEX["young_ring_next"]
_HEARTBEAT = NUMBER_INDEX["heartbeat"]
_RUNNING_SINCE = NUMBER_INDEX["running_since_ns"]
_CHANGES = NUMBER_INDEX["changes"]
_GEN0_COUNT, _GEN1_COUNT, _GEN2_COUNT = (NUMBER_INDEX[f"gen{g}_count"] for g in range(3))

# How often, and after how long, numbers are copied again that a callback was in the middle of changing.
WHOLE_TRIES = 3
WHOLE_WAIT_S = 0.0001


class Publisher:
    """The page of one process. `error` says why there is none; `lost` that there was one.

    `refresh` brings the meter's words up to date, `describe` gives the JSON part, `changes` a number that
    differs whenever that part does.
    """

    def __init__(
        self,
        run_dir: str | None,
        meter: PauseMeter,
        refresh: Callable[[], None],
        describe: Callable[[], dict[str, Any]],
        changes: Callable[[], int],
    ) -> None:
        self.run_dir = run_dir
        self.error: str | None = None
        self.lost = False
        self._meter = meter
        self._refresh = refresh
        self._describe = describe
        self._changes = changes
        self._page: PageWriter | None = None
        self._published_changes = -1
        self._rings = (
            _PublishedRing(meter.full_ring, _FULL_RING_NEXT, FULL_RING_OFFSET),
            _PublishedRing(meter.young_ring, _YOUNG_RING_NEXT, YOUNG_RING_OFFSET),
        )
        # The agent's thread and one that carries out a command both publish; no callback takes this.
        self._lock = threading.Lock()

    @property
    def name(self) -> str | None:
        """The page's file name, None where there is no page."""
        page = self._page
        return page.name if page is not None else None

    def open(self, role: str, dp_rank: int, rank: int, started_s: int) -> None:
        """Make the page, in place of those that dead processes of this rank left. Never raises OSError."""
        self.lost = False
        if not self.run_dir:
            return
        remove_dead_pages(self.run_dir, role, dp_rank, rank)
        with self._lock:
            self._published_changes = -1
            for ring in self._rings:
                ring.published = 0
            try:
                page = create_page(
                    self.run_dir, page_name(role, dp_rank, rank, started_s), self._write_on
                )
            except (OSError, PageError) as error:
                self.error = f"no page in {self.run_dir}: {error}"
                return
            self._page = page
            self._meter.collecting = page.header

    def publish(self) -> None:
        """Bring the page up to date, or give it up where it was damaged. Never raises OSError."""
        with self._lock:
            page = self._page
            if page is None:
                return
            try:
                if page.is_intact():
                    self._write_on(page)
                else:
                    self._give_up("the page was truncated or overwritten by another process")
            except (OSError, PageError) as error:
                self._give_up(f"the page cannot be written: {error}")

    def look_after(self) -> None:
        """Give the page up where somebody removed it: nobody would find what is published on it."""
        with self._lock:
            if self._page is not None and not self._page.is_listed():
                self._give_up("the page was removed from the run directory")

    def leave_behind(self) -> None:
        """In a forked child: the page is the parent's. Nothing is written or unlinked."""
        page, self._page = self._page, None
        self._meter.collecting = private_header()
        if page is not None:
            page.close()

    def _give_up(self, why: str) -> None:
        page = self._page
        # First of all: a callback that stores into a truncated map would kill the process.
        self._meter.collecting = private_header()
        self._page = None
        self.lost = True
        self.error = why
        if page is not None:
            page.discard()

    def _write_on(self, page: PageWriter) -> None:
        self.error = None  # there is room for a page; until then why there was none stays told
        changes = self._changes()
        # Made first and written last: whoever reads of an operation finds in the numbers what it did.
        description = None
        if changes != self._published_changes:
            description = {**self._describe(), "changes": changes}
        self._refresh()
        words = self._meter.words
        words[_HEARTBEAT] += 1
        words[_RUNNING_SINCE] = self._meter.running_since_ns
        words[_CHANGES] = changes
        # A copy, made before the rings are written and written after them: the numbers tell of no record that
        # is not on the page yet. One that comes in between is published the next time.
        numbers = tuple(words)
        for _ in range(WHOLE_TRIES):
            if _is_whole(numbers):
                break
            time.sleep(WHOLE_WAIT_S)
            numbers = tuple(words)
        for ring in self._rings:
            following = numbers[ring.next_index]
            if following != ring.published:
                ring.encode(words, following)
                page.write_ring(ring.offset, ring.encoded)
                ring.published = following
        page.write_numbers(NUMBERS.pack(*numbers))
        if description is not None:
            page.write_description(description)
            self._published_changes = changes


def _is_whole(numbers: tuple[int, ...]) -> bool:
    """Whether counts and records tell of the same collections: a callback on another thread may be in between."""
    young, full = numbers[_GEN0_COUNT] + numbers[_GEN1_COUNT], numbers[_GEN2_COUNT]
    return (young, full) == (numbers[_YOUNG_RING_NEXT] - 1, numbers[_FULL_RING_NEXT] - 1)


class _PublishedRing:
    """A ring of the meter's in the page's form, up to the record before `published`."""

    def __init__(self, ring: Ring, next_index: int, offset: int) -> None:
        self.next_index = next_index
        self.offset = offset
        self.encoded = memoryview(bytearray(RING_BYTES))
        self.published = 0
        self._ring = ring

    def encode(self, words: list[int], following: int) -> None:
        """Bring in what came since, before sequence `following`. `words` are the meter's, as they change."""
        starts, lengths, objects = self._ring.starts, self._ring.lengths, self._ring.objects
        first = max(self.published, 1, following - RING_RECORDS)
        for sequence in range(first, following):
            slot = sequence % RING_SLOTS
            start, length, count = starts[slot], lengths[slot], objects[slot]
            check = sequence ^ start ^ length ^ count
            RECORD.pack_into(
                self.encoded, _place_of(sequence), sequence, start, length, count, check
            )
        # Collections that ran meanwhile may have overwritten the oldest of these, one of them half.
        overwritten = words[self.next_index] - RING_SLOTS + 1
        for sequence in range(first, min(following, overwritten)):
            place = _place_of(sequence)
            self.encoded[place : place + RECORD.size] = bytes(RECORD.size)


def _place_of(sequence: int) -> int:
    return sequence % RING_RECORDS * RECORD.size
