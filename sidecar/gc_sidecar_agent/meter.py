"""The pause meter: a GC callback that counts every collection of this process and records when it ran.

It runs inside every collection of somebody else's server, so it makes no system call, takes no lock, logs
nothing and allocates nothing that GC tracks but, once per full collection, two short-lived tuples of numbers.
"""

from __future__ import annotations

import gc
import sys
import time
from _thread import get_ident
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from gc import freeze, get_count, get_threshold, isenabled
from time import monotonic_ns  # read from the vDSO: not a system call
from types import CodeType, FrameType

from gc_sidecar_agent.page import (
    BUCKETS_NS,
    HEADER_BYTES,
    HEADER_COLLECTING_SINCE_NS,
    NONE,
    NUMBER_INDEX,
    NUMBER_NAMES,
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
_FREEZES = NUMBER_INDEX["freezes"]
_FREEZES_SINCE_MAINTAIN = NUMBER_INDEX["freezes_since_maintain"]
_OVER_BUDGET = NUMBER_INDEX["over_budget"]

# Longer than any collection.
NEVER_NS = 1 << 62

# More than a page has, so that all of a page's records stay whole while they are brought there.
RING_SLOTS = RING_RECORDS + 64

# For how long a fork waits at most for a callback of ours to end, and how often it looks.
FORK_WAIT_S = 1.0
FORK_POLL_S = 0.0005

# Numbers that nobody has measured yet.
_UNKNOWN_AT_FIRST = (
    "lease_remaining_ms",
    "anonymous_bytes",
    "file_bytes",
    "shared_bytes",
    "growth_bytes",
    "device_allocated_bytes",
    "device_reserved_bytes",
    "memory_limit_bytes",
    "memory_current_bytes",
)


class Ring:
    """The last RING_SLOTS records as the callback leaves them: three lists, in which a record's place is its
    sequence modulo RING_SLOTS. The publisher brings them into the page's form, outside of any collection."""

    __slots__ = ("lengths", "objects", "starts")

    def __init__(self) -> None:
        self.starts = [0] * RING_SLOTS
        self.lengths = [0] * RING_SLOTS
        self.objects = [0] * RING_SLOTS

    def durations_ns(self, gc_generation: int, first: int, following: int) -> list[int]:
        """How long those of one GC generation took among the records `first` to `following`, as far as they are
        still there."""
        lengths = self.lengths
        sequences = range(max(first, following - RING_RECORDS), following)
        found = (lengths[sequence % RING_SLOTS] for sequence in sequences)
        return [length >> 8 for length in found if (length >> 4) & 0xF == gc_generation]


class PauseMeter:
    """Counts collections into private words, which the agent publishes on the page. Words and rings are lists
    of numbers: to add to one takes a third of the time that it takes in a memoryview.

    `collecting` is the one thing that is shared while a collection runs: word HEADER_COLLECTING_SINCE_NS of
    the page's header (or of a private stand-in), so that a pause of seconds is visible while it lasts.

    Automatic collections longer than `budget_ns` are counted. After a full one that took longer than
    `freeze_after_ns` the callback freezes; `frozen_after_ns` is the longest such.
    """

    __slots__ = (
        "_is_suspended",
        "_requested_thread",
        "_requested_trigger",
        "_start_ns",
        "_trigger",
        "budget_ns",
        "collecting",
        "freeze_after_ns",
        "frozen_after_ns",
        "full_ring",
        "requested_collections",
        "requested_ns",
        "words",
        "young_ring",
    )

    def __init__(self) -> None:
        self.words = [0] * len(NUMBER_NAMES)
        self.full_ring = Ring()
        self.young_ring = Ring()
        self.collecting = private_header()
        # Full collections that started on the thread which asked for one, and the last one's length.
        self.requested_collections = 0
        self.requested_ns = 0
        self.budget_ns = self.freeze_after_ns = NEVER_NS
        self.frozen_after_ns = 0
        self._is_suspended = False
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
        if self.callback not in gc.callbacks and not self._is_suspended:
            # Whoever removed it in the middle of a collection kept the stop from us.
            if self._start_ns:
                self._start_ns = 0
                self.collecting[HEADER_COLLECTING_SINCE_NS] = 0
            gc.callbacks.append(self.callback)

    def detach(self) -> None:
        """Not be called any more."""
        while self.callback in gc.callbacks:
            gc.callbacks.remove(self.callback)

    def suspend(self) -> None:
        """Not be called until `resume`, whoever attaches meanwhile."""
        self._is_suspended = True
        self.detach()

    def resume(self) -> None:
        """Be called again."""
        self._is_suspended = False
        self.attach()

    @contextmanager
    def requested(self, trigger: str) -> Iterator[None]:
        """Full collections that start on this thread inside the block count as asked for by `trigger`."""
        self._requested_trigger = TRIGGER_CODES[trigger]
        self._requested_thread = get_ident()
        try:
            yield
        finally:
            self._requested_thread = 0

    @property
    def running_since_ns(self) -> int:
        """When the collection began that runs right now, in another thread or around a finalizer; 0: none does."""
        return self._start_ns

    def callback(self, phase: str, info: dict[str, int]) -> None:
        """What gc.callbacks calls at the start and the stop of every collection."""
        if phase == "start":
            stop_is_missing = self._start_ns
            self._start_ns = now = monotonic_ns()
            if info["generation"] == 2:
                self.collecting[HEADER_COLLECTING_SINCE_NS] = now
                self.words[_FULL_STARTS] += 1
                if self._requested_thread and self._requested_thread == get_ident():
                    self._trigger = self._requested_trigger
                    self.requested_collections += 1
                else:
                    first, _, third = get_count()
                    # Without a gen1 collection since the last full one it is nobody's but an explicit one.
                    self._trigger = _AUTO if third and _is_automatic(first, third) else _EXPLICIT
            elif stop_is_missing:
                # An exception out of a signal handler ended that callback before its first line.
                self.collecting[HEADER_COLLECTING_SINCE_NS] = 0
            return
        generation = info["generation"]
        if generation == 2:
            # First of all: a signal handler may end this callback at any later line.
            self.collecting[HEADER_COLLECTING_SINCE_NS] = 0
        start_ns = self._start_ns
        if not start_ns:
            return  # attached in the middle of a collection
        self._start_ns = 0
        duration_ns = monotonic_ns() - start_ns
        collected = info["collected"]
        words = self.words
        index = _GENERATION_INDEX[generation]
        words[index] += 1
        words[index + 1] += duration_ns
        if duration_ns > words[index + 2]:
            words[index + 2] = duration_ns
        if collected:
            words[index + 3] += collected
        if info["uncollectable"]:
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
                if trigger != _EXPLICIT:
                    self.requested_ns = duration_ns
            if duration_ns > self.freeze_after_ns:
                freeze()
                words[_FREEZES] += 1
                words[_FREEZES_SINCE_MAINTAIN] += 1
                if duration_ns > self.frozen_after_ns:
                    self.frozen_after_ns = duration_ns
            ring, next_index = self.full_ring, _FULL_RING_NEXT
        else:
            trigger = _AUTO
            ring, next_index = self.young_ring, _YOUNG_RING_NEXT
        if duration_ns > self.budget_ns and trigger == _AUTO:
            words[_OVER_BUDGET] += 1
        sequence = words[next_index]
        slot = sequence % RING_SLOTS
        ring.starts[slot] = start_ns
        # Shifted and or-ed, as the page's form wants it; CPython multiplies and adds faster.
        ring.lengths[slot] = duration_ns * 256 + generation * 16 + trigger
        ring.objects[slot] = collected
        # Last of all: what is told of is there.
        words[next_index] = sequence + 1


def outlast_callbacks() -> None:
    """Before a fork: wait until no other thread is inside a meter's callback, for FORK_WAIT_S at most.

    CPython's flag that a collection runs is set there, and only because the callback is Python can another
    thread run meanwhile, and fork: its child would keep the flag, and never collect again.
    """
    deadline = time.monotonic() + FORK_WAIT_S
    while _is_in_a_callback() and time.monotonic() < deadline:
        time.sleep(FORK_POLL_S)


def _is_in_a_callback() -> bool:
    code = PauseMeter.callback.__code__
    # This thread may fork in a signal handler on top of the callback: to wait for itself helps nobody.
    own = get_ident()
    return any(_runs(code, frame) for ident, frame in sys._current_frames().items() if ident != own)


def _runs(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def private_header() -> memoryview:
    """Words to store `collecting since` into where there is no page."""
    return memoryview(bytearray(HEADER_BYTES)).cast("q")


def _is_automatic(first: int, third: int) -> bool:
    """Whether the full collection that starts now is CPython's own, judged by its own rule: the first count
    has just passed its threshold (3.12 and later run the collection a few deallocations later, hence not
    exactly) and the third count has passed its. An explicit gc.collect() seldom meets both."""
    if not isenabled():
        return False  # nobody's but an explicit one; the counts have grown without bound meanwhile
    threshold = get_threshold()
    return first * 8 >= threshold[0] * 7 > 0 and third > threshold[2]
