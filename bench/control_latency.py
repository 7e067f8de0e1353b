"""How long `POST /gc/freeze` takes, against a bare collective_rpc of a no-op on the same idle vLLM.

Both are measured interleaved in one run, for machines are noisy: `make bench` prints the medians, the ratio
and whether the limit holds (at most twice the no-op plus 20 ms).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.progress import show_progress
from tests.sidecar_process import SidecarProcess
from tests.vllm.real_vllm import make_tiny_model
from tests.vllm.scene import Scene, scene

ROUNDS = 50
ALLOWANCE_MS = 20.0


def milliseconds(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def post(sidecar: SidecarProcess, path: str, body: dict[str, object]) -> None:
    """A request that must succeed."""
    status, answer = sidecar.post(path, body)
    assert status == 200, answer


def measure(running: Scene, sidecar: SidecarProcess) -> dict[str, list[float]]:
    """ROUNDS rounds of one no-op, one freeze and one freeze that only renews, on an idle engine."""
    freeze: dict[str, object] = {"collect_first": False}
    times: dict[str, list[float]] = {"no-op": [], "freeze": [], "renewal": []}
    for number in range(ROUNDS):
        # check_health does nothing in every worker: what is left is the way there and back.
        times["no-op"].append(milliseconds(lambda: running.engine.rpc("check_health", [])))
        times["freeze"].append(milliseconds(lambda: post(sidecar, "/gc/freeze", freeze)))
        times["renewal"].append(milliseconds(lambda: post(sidecar, "/gc/freeze", freeze)))
        post(sidecar, "/gc/restore", {})
        show_progress("round", number + 1, ROUNDS)
    return times


def main() -> int:
    """Print the medians; 1 where the limit is not kept."""
    print(
        "starting vLLM (TP=2, plugin transport, dev mode for the bare no-op) ...", file=sys.stderr
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with (
            scene(
                directory, make_tiny_model(directory / "model"), tensor_parallel=2, dev_mode=True
            ) as running,
            running.sidecar("bench") as sidecar,
        ):
            sidecar.wait_for_coverage(4)
            times = measure(running, sidecar)
            transport = sidecar.status()["transport"]
    medians = {what: statistics.median(values) for what, values in times.items()}
    limit = 2 * medians["no-op"] + ALLOWANCE_MS
    print(f"idle vLLM, TP=2, transport {transport}, {ROUNDS} interleaved rounds; milliseconds")
    print(f"{'':22}{'median':>9}{'min':>9}{'max':>9}")
    labels = {
        "no-op": "bare collective_rpc",
        "freeze": "POST /gc/freeze",
        "renewal": "the same, renewing",
    }
    for what, values in times.items():
        row = (medians[what], min(values), max(values))
        print(f"{labels[what]:22}" + "".join(f"{value:9.1f}" for value in row))
    kept = medians["freeze"] <= limit
    print(
        f"limit 2 x no-op + {ALLOWANCE_MS:.0f} ms = {limit:.1f} ms: {'kept' if kept else 'EXCEEDED'}"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
