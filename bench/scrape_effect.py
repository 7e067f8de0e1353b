"""Steps of a loaded embedded engine with a scrape every second, against none: pairs of blocks, in turns.

Which of a pair comes first alternates, so that a drift of the machine hits both alike. What counts is the ratio
within a pair. "Not slower beyond noise" means that the 95 % interval of the mean log ratio does not lie above 1;
as a wide interval would hold 1 whatever a scrape cost, that of the median step must be narrow too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from bench.progress import show_progress
from tests.embedded.engine import EmbeddedEngine, run_directory
from tests.sidecar_process import SidecarProcess

FLAGS = ("--workers=2", "--heap-objects=50000", "--step-ms=4")
REQUESTS = 4
SCRAPE_S = 1.0
# An interval's upper end is less than this times its lower end, or it proves nothing.
LIMIT_WIDTH = 1.1
# Two-sided 95 % of Student's t, by degrees of freedom; what is not listed takes the next smaller one.
T_95 = {9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093, 29: 2.045}

NOT_SLOWER, SLOWER = "not slower beyond noise", "SLOWER"
PROVES_NOTHING = f"proves nothing: the interval is more than {LIMIT_WIDTH:g} wide"


def keep_busy(engine: EmbeddedEngine, stop: threading.Event) -> None:
    """Requests one after the other until told to stop."""
    while not stop.is_set():
        engine.complete("x", 200)


def block(
    engine: EmbeddedEngine, sidecar: SidecarProcess, length_s: float, scraped: bool
) -> list[int]:
    """The lengths in ns of the steps of one block."""
    since = engine.steps()[0][-1][0]
    ends = time.monotonic() + length_s
    while time.monotonic() < ends:
        if scraped:
            with urllib.request.urlopen(f"{sidecar.url}/metrics") as answer:
                answer.read()
        time.sleep(min(SCRAPE_S, max(0.0, ends - time.monotonic())))
    return [duration for number, _, duration, _ in engine.steps(since)[0] if number > since]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and the 95 % interval of it."""
    logs = [math.log(ratio) for ratio in ratios]
    freedom = max(known for known in T_95 if known <= len(logs) - 1)
    mean = statistics.mean(logs)
    half = T_95[freedom] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def verdict(low: float, high: float) -> str:
    """What the interval of a ratio says."""
    if low > 1.0:
        return SLOWER
    return NOT_SLOWER if high / low < LIMIT_WIDTH else PROVES_NOTHING


def main() -> int:
    """Print mean and interval for the median and the 99th percentile of the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks (default 15)")
    parser.add_argument(
        "--block-s", type=float, default=10.0, help="length of a block (default 10)"
    )
    args = parser.parse_args()
    if args.pairs < 10:
        parser.error("at least 10 pairs, or the interval says nothing")
    medians, tails, steps = [], [], 0
    with (
        tempfile.TemporaryDirectory() as name,
        run_directory() as run_dir,
        EmbeddedEngine(*FLAGS, run_dir=run_dir, log_path=Path(name, "engine.log")) as engine,
        SidecarProcess(
            engine_urls=[engine.url], run_dir=run_dir, log_path=Path(name, "sidecar.log")
        ) as sidecar,
    ):
        sidecar.wait_for_coverage(4)
        stop = threading.Event()
        clients = [threading.Thread(target=keep_busy, args=(engine, stop)) for _ in range(REQUESTS)]
        for client in clients:
            client.start()
        try:
            block(engine, sidecar, args.block_s, scraped=True)  # to warm up
            for pair in range(args.pairs):
                found = {}
                for scraped in (True, False) if pair % 2 else (False, True):
                    found[scraped] = sorted(block(engine, sidecar, args.block_s, scraped))
                    steps += len(found[scraped])
                medians.append(statistics.median(found[True]) / statistics.median(found[False]))
                tails.append(_p99(found[True]) / _p99(found[False]))
                show_progress("pair", pair + 1, args.pairs)
        finally:
            stop.set()
            for client in clients:
                client.join()
    print(
        f"{steps} steps in {args.pairs} pairs of blocks of {args.block_s:g} s, {REQUESTS} requests at a time"
    )
    said = []
    for what, ratios in (("median step", medians), ("99th percentile", tails)):
        mean, low, high = interval(ratios)
        said.append(verdict(low, high))
        print(
            f"{what:16} scraped / not scraped: {mean:.4f} (95 %: {low:.4f} to {high:.4f})  {said[-1]}"
        )
    of_median, of_tail = said
    # The tail of a block is a few steps: that its interval is wide is no fault of the run.
    return 0 if of_median == NOT_SLOWER and of_tail != SLOWER else 1


def _p99(values: list[int]) -> float:
    return float(values[int(len(values) * 0.99)])


if __name__ == "__main__":
    sys.exit(main())
