"""The heap of one process: objects that stay, and objects in cycles that only a collection frees.

Both are plain containers that CPython's collector tracks, so its own rules decide when it runs and for how long.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

from gc_sidecar.embedded.settings import Settings

# References lead all over the heap, so that a collection's walk misses the caches as that of a real one does.
_SPREAD = 2654435761


class Heap:
    """`fill` at the start, `step` at every step."""

    def __init__(self, retain: int, garbage: int, lifetime: int) -> None:
        self._retain = retain
        self._garbage = garbage
        self._lifetime = lifetime
        self._retained: list[list[Any]] = []
        self._in_use: deque[list[Any]] = deque()

    @property
    def retained_objects(self) -> int:
        """How many objects stay."""
        return len(self._retained)

    def fill(self, count: int) -> None:
        """Make `count` objects and let one full collection see them, as an engine's start-up does."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._grow(count)
        finally:
            if was_enabled:
                gc.enable()
        gc.collect()

    def step(self) -> None:
        """Keep some objects for good, make some cycles, and let go of those that are old enough."""
        self._grow(self._retain)
        if self._garbage:
            cycles = [_cycle() for _ in range(self._garbage // 2)]
            if self._lifetime:
                self._in_use.append(cycles)
                if len(self._in_use) > self._lifetime:
                    self._in_use.popleft()

    def _grow(self, count: int) -> None:
        retained = self._retained
        keep = retained.append
        size = len(retained)
        for index in range(size, size + count):
            other = (index * _SPREAD & 0xFFFFFFFF) * index >> 32  # any of those before it
            keep([retained[other], retained[other // 2], retained[other // 3]] if index else [])


def make_heap(settings: Settings) -> Heap:
    """The heap that `settings` asks for, still empty."""
    return Heap(
        settings.retain_per_step, settings.garbage_per_step, settings.garbage_lifetime_steps
    )


def _cycle() -> list[Any]:
    """Two objects that hold each other: reference counting alone never frees them."""
    first: list[Any] = [None]
    first[0] = [first]
    return first
