"""Garbage that only a collection reclaims, and commands, for the agent's tests."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from gc_sidecar_agent.command import Command


class Cycle:
    """An object that keeps itself alive."""

    def __init__(self) -> None:
        self.me = self


def plant_cycle() -> weakref.ref[Cycle]:
    """Cyclic garbage; the reference is dead as soon as it was reclaimed."""
    return weakref.ref(Cycle())


def plant_frozen_cycle() -> weakref.ref[Cycle]:
    """Cyclic garbage that a freeze has caught, as that of a request does which was alive then."""
    cycle = Cycle()
    gc.freeze()
    return weakref.ref(cycle)


def plant_old_cycle() -> weakref.ref[Cycle]:
    """Cyclic garbage in the oldest generation: only a full collection reclaims it."""
    cycle = Cycle()
    gc.collect()
    return weakref.ref(cycle)


_LOOSE_UNLESS_FROZEN: list[Any] = []


def is_frozen() -> bool:
    """Whether the heap is frozen, told by an object that has always been there: CPython's own count of frozen
    objects is never 0 on 3.12."""
    return not any(found is _LOOSE_UNLESS_FROZEN for found in gc.get_objects())


def collect_automatically(full_collections: int = 1) -> None:
    """Allocate until CPython has run so many full collections by itself; thresholds are put back."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    before = gc.get_stats()[2]["collections"]
    keep: list[Any] = []
    try:
        # CPython's 25 % rule: the heap has to have grown by a quarter since the last one.
        while gc.get_stats()[2]["collections"] < before + full_collections:
            keep.extend([] for _ in range(1000))
            assert len(keep) < 5_000_000, "CPython runs no full collection"
    finally:
        gc.set_threshold(*thresholds)


def command(kind: str, generation: int = 1, operation_id: str = "", **fields: Any) -> Command:
    """A command with an operation id of its own unless one is given."""
    command.count += 1  # type: ignore[attr-defined]
    name = operation_id or f"{kind}-{command.count}"  # type: ignore[attr-defined]
    return Command(kind, name, generation, **fields)


command.count = 0  # type: ignore[attr-defined]
