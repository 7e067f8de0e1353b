"""The comparison of bench/vllm_sweep.py on the embedded engine, with heaps of 1, 5 and 10 million objects in all.

Two workers in lockstep, each with half of the heap; every step retains objects and makes cyclic garbage that dies
young. Each size is a sweep of its own: the same points under off, freeze and budget, in blocks that alternate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.embedded.engine import EmbeddedEngine, run_directory
from tests.sidecar_process import SidecarProcess


@dataclass(frozen=True)
class Size:
    """Objects in all, how many each process retains at a step, rounds, and requests of a block."""

    objects: int
    retain: int
    rounds: int
    requests: int


# Under off at least one full collection comes in each block; on the smallest heap enough for a ladder. More than
# these would keep both cores busy all the time, and what is measured is how the machine shares them out.
SIZES = (
    Size(1_000_000, 1_000, 1, 20),
    Size(5_000_000, 625, 2, 25),
    Size(10_000_000, 1_250, 2, 25),
)
WORKERS = 2
FLAGS = ("--garbage-per-step=200", "--garbage-lifetime-steps=1", "--step-ms=5")
POLICIES = ("off", "freeze", "budget")
BUDGET_MS = 5.0
# What the machine may add to a pause.
TOLERANCE = 1.5


def measure(size: Size, out: Path) -> dict[str, dict[str, Any]]:
    """The report of a sweep by policy."""
    with tempfile.TemporaryDirectory() as name, run_directory() as run_dir:
        directory = Path(name)
        with (
            EmbeddedEngine(
                *FLAGS, f"--workers={WORKERS}", f"--heap-objects={size.objects // WORKERS}",
                f"--retain-per-step={size.retain}",
                run_dir=run_dir, log_path=directory / "engine.log",
            ) as engine,
            SidecarProcess(
                engine_urls=[engine.url], run_dir=run_dir, log_path=directory / "sidecar.log"
            ) as sidecar,
        ):  # fmt: skip
            sidecar.wait_for_coverage(WORKERS + 2)
            command = [
                *(sys.executable, "-m", "gc_sidecar", "sweep", f"--out={out}", "--fresh"),
                *(f"--url={sidecar.url}", f"--engine-url={engine.url}"),
                *("--prompt-tokens=8", "--output-tokens=50", "--concurrency=1", "--warm-up=0"),
                *(f"--requests={size.requests}", f"--rounds={size.rounds}"),
                f"--policies={','.join(POLICIES)}",
            ]
            subprocess.run(command, check=True)
    report = json.loads((out / "report.json").read_text())
    return {each["policy"]: each for each in report["policies"]}


def main() -> int:
    """Print the tables, and 1 where budget let a pause through."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench-embedded-sweep"))
    args = parser.parse_args()
    longest_ms: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    ladders = []
    for size in SIZES:
        print(f"\n{size.objects:,} objects in all", flush=True)
        found = measure(size, args.out / str(size.objects))
        ladder = found["off"]["ladder"]
        ladders += [ladder["ratio"]] if ladder else []
        for policy in POLICIES:
            longest_ms[policy].append(1000 * found[policy]["longest_automatic_pause_s"])
    print("\nlongest automatic pause of any GC generation, ms, by heap")
    for policy, values in longest_ms.items():
        print(f"{policy:8}" + "".join(f"{value:10.1f}" for value in values))
    is_kept = max(longest_ms["budget"]) <= TOLERANCE * BUDGET_MS
    grows = longest_ms["off"] == sorted(longest_ms["off"])
    print(f"budget at most {TOLERANCE * BUDGET_MS:g} ms: {'kept' if is_kept else 'NOT KEPT'}")
    print(f"off grows with the heap: {'yes' if grows else 'NO'}")
    print(
        f"the ladder under off: {', '.join(f'ratio {each:.2f}' for each in ladders) or 'NOT FOUND'}"
    )
    return 0 if is_kept and grows and ladders else 1


if __name__ == "__main__":
    sys.exit(main())
