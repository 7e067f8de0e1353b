"""How long freeze, maintain and restore take to be acknowledged by 2, 8 and 64 workers, beside a bare RPC to them.

On the embedded engine, both interleaved in one run, for machines are noisy. What is left when the RPC's time is
taken away is ours: the command in each process, its page, and the sidecar's proof from the pages.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.progress import show_progress
from tests.embedded.engine import EmbeddedEngine, run_directory
from tests.sidecar_process import SidecarProcess

WORKERS = (2, 8, 64)
ROUNDS = 30
FLAGS = ("--heap-objects=2000", "--dev-mode")
NO_OP, FREEZE, COLLECTING = "bare RPC fan-out", "freeze", "freeze, collecting first"
MAINTAIN, RESTORE = "maintain", "restore"


def milliseconds(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def measure(workers: int, directory: Path) -> dict[str, list[float]]:
    """ROUNDS rounds of a no-op in every worker and of each operation."""
    kinds = (NO_OP, FREEZE, COLLECTING, MAINTAIN, RESTORE)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with (
        run_directory() as run_dir,
        EmbeddedEngine(
            *FLAGS, f"--workers={workers}", run_dir=run_dir, log_path=directory / "engine.log"
        ) as engine,
        SidecarProcess(
            engine_urls=[engine.url], run_dir=run_dir, log_path=directory / "sidecar.log"
        ) as sidecar,
    ):
        processes = workers + 2
        sidecar.wait_for_coverage(processes)

        def post(path: str, **fields: object) -> None:
            status, answer = sidecar.post(path, fields)
            assert status == 200, answer
            assert len(answer["operation"]["processes"]) == processes, answer

        for number in range(ROUNDS):
            times[NO_OP].append(milliseconds(lambda: engine.rpc("check_health")))
            times[FREEZE].append(milliseconds(lambda: post("/gc/freeze", collect_first=False)))
            post("/gc/restore")
            times[COLLECTING].append(milliseconds(lambda: post("/gc/freeze")))
            times[MAINTAIN].append(milliseconds(lambda: post("/gc/maintain")))
            times[RESTORE].append(milliseconds(lambda: post("/gc/restore")))
            show_progress(f"{workers} workers: round", number + 1, ROUNDS)
    return times


def main() -> int:
    """Print the medians."""
    print(f"idle embedded engine, {ROUNDS} interleaved rounds; milliseconds")
    print(f"{'workers':>7}  {'':26}{'median':>9}{'min':>9}{'max':>9}{'over the RPC':>15}")
    for workers in WORKERS:
        with tempfile.TemporaryDirectory() as directory:
            times = measure(workers, Path(directory))
        bare = statistics.median(times[NO_OP])
        for what, values in times.items():
            median = statistics.median(values)
            row = "".join(f"{value:9.1f}" for value in (median, min(values), max(values)))
            print(f"{workers:7}  {what:26}{row}{median - bare:15.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
