"""Blocks of a sweep made by hand: tokens that come evenly, but where a pause holds them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gc_sidecar.sweep.driver import Sample
from gc_sidecar.sweep.journal import BlockRecord, Memory, Pause, Reason
from gc_sidecar.sweep.plan import Point

POINT = Point(16, 100, 1)
STEP_S = 0.005
OFFSET_S = 1_700_000_000.0
MEBIBYTE = 1 << 20


def sample(started_s: float, stalls: dict[int, float] | None = None, tokens: int = 100) -> Sample:
    """A request whose tokens come each STEP_S, those in `stalls` so much later."""
    times, now_s = [], started_s
    for number in range(tokens):
        now_s += STEP_S + (stalls or {}).get(number, 0.0)
        times.append(now_s)
    return Sample(started_s, tuple(times))


def pause(
    started_s: float, duration_s: float, process: str = "worker dp0 rank 1", **more: Any
) -> Pause:
    """A full collection at a moment of the client's monotonic clock."""
    return Pause(
        started_s + OFFSET_S,
        duration_s,
        more.pop("gc_generation", 2),
        more.pop("trigger", "auto"),
        process,
    )


def block(
    samples: Sequence[Sample],
    pauses: Sequence[Pause] = (),
    client_pauses: Sequence[Pause] = (),
    *,
    policy: str = "off",
    number: int = 0,
    growth_bytes: int = MEBIBYTE,
    lost: int = 0,
    disturbances: Sequence[Reason] = (),
    doubts: Sequence[Reason] = (),
) -> BlockRecord:
    """A block of these."""
    return BlockRecord(
        number=number,
        policy=policy,
        clock_offset_s=OFFSET_S,
        points=((POINT, tuple(samples)),),
        pauses=tuple(pauses),
        client_pauses=tuple(client_pauses),
        lost_pauses=lost,
        memory=(Memory(0.0, MEBIBYTE), Memory(1.0, MEBIBYTE + growth_bytes)),
        pause_count=len(pauses),
        disturbances=tuple(disturbances),
        doubts=tuple(doubts),
    )
