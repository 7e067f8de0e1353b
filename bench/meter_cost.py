"""What the pause meter costs a process per collection, beside other callbacks that could have done its work.

All are measured interleaved in one run, for machines are noisy: what a callback costs is the median of its
differences to collections without any, round by round. `make bench` prints it, and whether the limits hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Histogram

from bench.progress import show_progress
from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import BUCKETS_NS, create_page, page_name

Callback = Callable[[str, dict[str, int]], None]

MAXIMUM_NS = 3_000
MAXIMUM_RATIO = 3.5
HEAP_OBJECTS = 700_000

NONE, EMPTY, METER = "no callback", "empty callback", "our meter"
HISTOGRAM, GC_DEBUG = "prometheus histogram", "as VLLM_GC_DEBUG does"


@dataclass(frozen=True)
class Kind:
    """Collections that are measured: how many in a row and how often. Those of `nothing` have limits to keep."""

    name: str
    gc_generation: int
    in_a_row: int
    rounds: int
    callbacks: tuple[str, ...]


YOUNG = Kind("young, of nothing", 0, 1_000, 150, (NONE, EMPTY, METER, HISTOGRAM))
# One right after another: CPython's third count is 0 then, and the meter asks for no thresholds, which would take
# 0.2 us more.
FULL = Kind("full, of nothing", 2, 100, 150, (NONE, EMPTY, METER, HISTOGRAM))
FULL_HEAP = Kind(f"full, of {HEAP_OBJECTS:,} objects", 2, 1, 15, (NONE, EMPTY, METER, GC_DEBUG))
LIMITED = (YOUNG, FULL)


@dataclass(frozen=True)
class Cost:
    """A callback's cost: the median of a collection with it, and by how much it lengthens one."""

    collection: str
    callback: str
    median_ns: float
    added_ns: float
    of_empty: float | None
    """How many times what an empty callback adds; None where that drowns in the collection itself."""


@dataclass(frozen=True)
class Verdict:
    """Whether our meter keeps its limits on one kind of collection."""

    collection: str
    added_ns: float
    of_empty: float
    kept: bool


# --- the callbacks ---


def empty(phase: str, info: dict[str, int]) -> None:
    """The least that any callback in Python costs."""


def histogram_callback() -> Callback:
    """A histogram of prometheus_client for each GC generation, with our buckets, observed at every stop."""
    histogram = Histogram(
        "pause_seconds", "As one would write it.", ["generation"],
        buckets=[bound / 1e9 for bound in BUCKETS_NS], registry=CollectorRegistry(),
    )  # fmt: skip
    of_generation = [histogram.labels(str(generation)) for generation in range(3)]
    started = 0.0

    def observe(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = time.perf_counter()
        else:
            of_generation[info["generation"]].observe(time.perf_counter() - started)

    return observe


def gc_debug_callback(log: logging.Logger) -> Callback:
    """What vLLM's VLLM_GC_DEBUG=1 does, written anew: it lists every object of the generation at the start, and
    logs their number and the time at the stop."""
    started_ns = objects = 0

    def debug(phase: str, info: dict[str, int]) -> None:
        nonlocal started_ns, objects
        if phase == "start":
            started_ns = time.monotonic_ns()
            objects = len(gc.get_objects(info["generation"]))
        else:
            took_ms = (time.monotonic_ns() - started_ns) / 1e6
            collected, generation = info["collected"], info["generation"]
            log.info("%.3f ms, %d of %d in %d", took_ms, collected, objects, generation)

    return debug


# --- measuring ---


def measure(kind: Kind, callbacks: dict[str, Callback | None]) -> dict[str, list[float]]:
    """Nanoseconds per collection in each round, for each callback of `kind`; their order changes by chance."""
    times: dict[str, list[float]] = {name: [] for name in kind.callbacks}
    collect, generation = gc.collect, kind.gc_generation
    for number in range(kind.rounds):
        for name in random.sample(kind.callbacks, len(kind.callbacks)):
            callback = callbacks[name]
            gc.callbacks[:] = [] if callback is None else [callback]
            collect(generation)
            # This thread's own time: another process that had the core meanwhile is no cost of ours.
            started = time.thread_time_ns()
            for _ in range(kind.in_a_row):
                collect(generation)
            times[name].append((time.thread_time_ns() - started) / kind.in_a_row)
        gc.callbacks.clear()
        show_progress(f"{kind.name}: round", number + 1, kind.rounds)
    return times


def costs_of(kind: Kind, times: dict[str, list[float]]) -> list[Cost]:
    """The rows of `kind`."""
    added = {
        name: statistics.median(
            with_it - without for with_it, without in zip(values, times[NONE], strict=True)
        )
        for name, values in times.items()
    }
    return [
        Cost(
            collection=kind.name,
            callback=name,
            median_ns=statistics.median(values),
            added_ns=added[name],
            of_empty=added[name] / added[EMPTY] if kind in LIMITED else None,
        )
        for name, values in times.items()
    ]


def judge(costs: list[Cost]) -> list[Verdict]:
    """One verdict for each kind of collection that has limits."""
    return [
        Verdict(
            collection=cost.collection,
            added_ns=cost.added_ns,
            of_empty=cost.of_empty,
            kept=cost.added_ns <= MAXIMUM_NS and cost.of_empty <= MAXIMUM_RATIO,
        )
        for cost in costs
        if cost.callback == METER and cost.of_empty is not None
    ]


def heap() -> list[dict[str, object]]:
    """HEAP_OBJECTS objects that GC tracks, as requests are: dictionaries that hold lists and each other."""
    requests: list[dict[str, object]] = []
    for number in range(HEAP_OBJECTS // 2):
        before = requests[-1] if requests else None
        requests.append({"id": number, "tokens": [number], "before": before})
    return requests


def measure_all(run_dir: str) -> list[Cost]:
    """Every row, in this process, whose GC is kept quiet otherwise."""
    page = create_page(run_dir, page_name("worker", 0, 0, time.time_ns() // 1_000_000_000))
    meter = PauseMeter()
    meter.collecting = page.header
    log = logging.getLogger("gc_debug")
    log.setLevel(logging.INFO)
    log.propagate = False
    with open(os.devnull, "w") as nowhere:
        log.addHandler(logging.StreamHandler(nowhere))
        callbacks = {
            NONE: None,
            EMPTY: empty,
            METER: meter.callback,
            HISTOGRAM: histogram_callback(),
            GC_DEBUG: gc_debug_callback(log),
        }
        # No collection but ours, and yet enabled: the meter asks for the counts only where it is.
        gc.set_threshold(1 << 30, 10, 10)
        gc.collect()
        gc.freeze()
        costs = [cost for kind in LIMITED for cost in costs_of(kind, measure(kind, callbacks))]
        kept = heap()
        costs += costs_of(FULL_HEAP, measure(FULL_HEAP, callbacks))
        assert len(kept) == HEAP_OBJECTS // 2
    page.discard()
    return costs


# --- telling ---


def print_table(costs: list[Cost], verdicts: list[Verdict]) -> None:
    """The rows and the verdicts, for eyes."""
    print(f"CPython {platform.python_version()}, medians of interleaved rounds; microseconds")
    print(f"{'collection':26}{'callback':24}{'median':>12}{'added':>12}{'of an empty one':>18}")
    for cost in costs:
        ratio = "" if cost.of_empty is None else f"{cost.of_empty:.2f}x"
        print(
            f"{cost.collection:26}{cost.callback:24}"
            f"{cost.median_ns / 1e3:12.2f}{cost.added_ns / 1e3:12.2f}{ratio:>18}"
        )
    limits = f"limits {MAXIMUM_NS / 1e3:.0f} us and {MAXIMUM_RATIO}x an empty callback"
    for verdict in verdicts:
        print(
            f"{verdict.collection}: our meter adds {verdict.added_ns / 1e3:.2f} us, "
            f"{verdict.of_empty:.2f}x; {limits}: {'kept' if verdict.kept else 'EXCEEDED'}"
        )


def main() -> int:
    """Print the costs; 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(description="What the pause meter costs per collection.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory() as run_dir:
        costs = measure_all(run_dir)
    verdicts = judge(costs)
    if as_json:
        told = {
            "python": platform.python_version(),
            "maximum_ns": MAXIMUM_NS,
            "maximum_ratio": MAXIMUM_RATIO,
            "costs": [asdict(cost) for cost in costs],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(told, indent=2))
    else:
        print_table(costs, verdicts)
    return 0 if all(verdict.kept for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
