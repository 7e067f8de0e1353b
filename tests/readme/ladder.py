"""Reads the ladder of an embedded engine: at how many retained objects its worker collected, and for how long.

Two witnesses are brought together by the machine's monotonic clock: the worker's page and the engine core's steps.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from gc_sidecar_agent.page import list_pages, read_page
from tests.embedded.engine import EmbeddedEngine


@dataclass(frozen=True)
class Rung:
    """One full collection that CPython began by itself."""

    retained_objects: int
    pause_s: float
    step_s: float


def read_ladder(engine: EmbeddedEngine, run_dir: Path, rank: int = 0) -> list[Rung]:
    """The full collections of the worker `rank` of the first engine core."""
    name = next(n for n in list_pages(str(run_dir)) if n.startswith(f"worker-dp0-r{rank}-"))
    page = read_page(str(run_dir), name, after=(0, 0))
    pauses = [pause for pause in page.full_pauses if pause.trigger == "auto"]
    steps = engine.steps()[0]
    starts = [started_ns for _, started_ns, _, _ in steps]
    rungs = []
    for pause in pauses:
        index = bisect_right(starts, pause.start_ns) - 1
        if index >= 0 and pause.start_ns <= starts[-1]:
            _, _, duration_ns, retained = steps[index]
            rungs.append(Rung(retained, pause.duration_ns / 1e9, duration_ns / 1e9))
    return rungs
