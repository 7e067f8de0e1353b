"""The pause meter: a GC callback that counts every collection of this process and records when it ran.

It runs inside every collection of somebody else's server, so it makes no system call, takes no lock, logs
nothing and allocates nothing that GC tracks but, once per full collection, two short-lived tuples of numbers.
"""

from __future__ import annotations

import gc
from _thread import get_ident
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns  # read from the vDSO: not a system call

from gc_sidecar_agent.page import (
    BUCKETS_NS,
    HEADER_BYTES,
    HEADER_COLLECTING_SINCE_NS,
    NONE,
    NUMBER_INDEX,
    NUMBERS_BYTES,
    RECORD_WORDS,
    RING_BYTES,
    RING_RECORDS,
    TRIGGERS,
)

TRIGGER_CODES = {name: code for code, name in enumerate(TRIGGERS)}
_AUTO = TRIGGER_CODES["auto"]
_EXPLICIT = TRIGGER_CODES["explicit"]

_GENERATION_INDEX = tuple(NUMBER_INDEX[f"gen{generation}_count"] for generation in range(3))
_AUTO_BUCKETS = NUMBER_INDEX["auto_bucket0"]
_AUTO_TOTAL_NS = NUMBER_INDEX["auto_total_ns"]
_REQUESTED_BUCKETS = NUMBER_INDEX["requested_bucket0"]
_REQUESTED_TOTAL_NS = NUMBER_INDEX["requested_total_ns"]
_FULL_RING_NEXT = NUMBER_INDEX["full_ring_next"]
_YOUNG_RING_NEXT = NUMBER_INDEX["young_ring_next"]
_FULL_STARTS = NUMBER_INDEX["full_starts"]

# Numbers that nobody has measured yet.
_UNKNOWN_AT_FIRST = (
    "lease_remaining_ms",
    "anonymous_bytes",
    "file_bytes",
    "shared_bytes",
    "growth_bytes",
    "device_allocated_bytes",
    "device_reserved_bytes",
)


class PauseMeter:
    """Counts collections into private words, which the agent publishes on the page.

    `collecting` is the one thing that is shared while a collection runs: word HEADER_COLLECTING_SINCE_NS of
    the page's header (or of a private stand-in), so that a pause of seconds is visible while it lasts.
    """

    __slots__ = (
        "_requested_thread",
        "_requested_trigger",
        "_start_ns",
        "_trigger",
        "collecting",
        "full_ring",
        "requested_collections",
        "requested_ns",
        "words",
        "young_ring",
    )

    def __init__(self) -> None:
        self.words = memoryview(bytearray(NUMBERS_BYTES)).cast("q")
        self.full_ring = memoryview(bytearray(RING_BYTES)).cast("q")
        self.young_ring = memoryview(bytearray(RING_BYTES)).cast("q")
        self.collecting = private_header()
        # Full collections that started on the thread which asked for one, and the last one's length.
        self.requested_collections = 0
        self.requested_ns = 0
        self._requested_thread = 0
        self._requested_trigger = _EXPLICIT
        self._start_ns = 0
        self._trigger = _AUTO
        self.words[_FULL_RING_NEXT] = 1
        self.words[_YOUNG_RING_NEXT] = 1
        for name in _UNKNOWN_AT_FIRST:
            self.words[NUMBER_INDEX[name]] = NONE

    def attach(self) -> None:
        """Be called at every collection from now on; also after somebody cleared gc.callbacks."""
        if self.callback not in gc.callbacks:
            gc.callbacks.append(self.callback)

    def detach(self) -> None:
        """Not be called any more."""
        while self.callback in gc.callbacks:
            gc.callbacks.remove(self.callback)

    @contextmanager
    def requested(self, trigger: str) -> Iterator[None]:
        """Full collections that start on this thread inside the block count as asked for by `trigger`."""
        self._requested_trigger = TRIGGER_CODES[trigger]
        self._requested_thread = get_ident()
        try:
            yield
        finally:
            self._requested_thread = 0

    def callback(self, phase: str, info: dict[str, int]) -> None:
        """What gc.callbacks calls at the start and the stop of every collection."""
        if phase == "start":
            self._start_ns = now = monotonic_ns()
            if info["generation"] == 2:
                self.collecting[HEADER_COLLECTING_SINCE_NS] = now
                self.words[_FULL_STARTS] += 1
                if self._requested_thread and self._requested_thread == get_ident():
                    self._trigger = self._requested_trigger
                    self.requested_collections += 1
                else:
                    self._trigger = _AUTO if _is_automatic() else _EXPLICIT
            return
        start_ns = self._start_ns
        if not start_ns:
            return  # attached in the middle of a collection
        self._start_ns = 0
        duration_ns = monotonic_ns() - start_ns
        generation = info["generation"]
        collected = info["collected"]
        words = self.words
        index = _GENERATION_INDEX[generation]
        words[index] += 1
        words[index + 1] += duration_ns
        if duration_ns > words[index + 2]:
            words[index + 2] = duration_ns
        words[index + 3] += collected
        words[index + 4] += info["uncollectable"]
        if generation == 2:
            trigger = self._trigger
            # Only CPython's own collections are the engine's fate; the rest somebody asked for.
            if trigger == _AUTO:
                words[_AUTO_BUCKETS + bisect_left(BUCKETS_NS, duration_ns)] += 1
                words[_AUTO_TOTAL_NS] += duration_ns
            else:
                words[_REQUESTED_BUCKETS + bisect_left(BUCKETS_NS, duration_ns)] += 1
                words[_REQUESTED_TOTAL_NS] += duration_ns
                self.requested_ns = duration_ns
            ring, next_index = self.full_ring, _FULL_RING_NEXT
            self.collecting[HEADER_COLLECTING_SINCE_NS] = 0
        else:
            trigger = _AUTO
            ring, next_index = self.young_ring, _YOUNG_RING_NEXT
        sequence = words[next_index]
        length = duration_ns << 8 | generation << 4 | trigger
        slot = sequence % RING_RECORDS * RECORD_WORDS
        ring[slot] = sequence
        ring[slot + 1] = start_ns
        ring[slot + 2] = length
        ring[slot + 3] = collected
        ring[slot + 4] = sequence ^ start_ns ^ length ^ collected
        words[next_index] = sequence + 1


def private_header() -> memoryview:
    """Words to store `collecting since` into where there is no page."""
    return memoryview(bytearray(HEADER_BYTES)).cast("q")


def _is_automatic() -> bool:
    """Whether the full collection that starts now is CPython's own, judged by its own rule: the first count
    has just passed its threshold (3.12 and later run the collection a few deallocations later, hence not
    exactly) and the third count has passed its. An explicit gc.collect() seldom meets both."""
    if not gc.isenabled():
        return False  # nobody's but an explicit one; the counts have grown without bound meanwhile
    count = gc.get_count()
    threshold = gc.get_threshold()
    return count[0] * 8 >= threshold[0] * 7 > 0 and count[2] > threshold[2]
