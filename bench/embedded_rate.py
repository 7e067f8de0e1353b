"""What freeze and budget cost the embedded engine's steps, beside gc.disable() in all its processes.

The engine steps all the time. Rounds of a few seconds under each alternate, and the mean steps of a round are
compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.progress import show_progress
from tests.embedded.engine import EmbeddedEngine, scene
from tests.sidecar_process import SidecarProcess
from tests.vllm.scene import Scene, pids_of

FLAGS = ("--workers=2", "--heap-objects=500000", "--free-running")
ROUNDS, ROUND_S = 12, 4.0
LIMIT = 1.02
DISABLED, FREEZE, BUDGET = "gc.disable()", "freeze", "budget"


def mean_step_ms(engine: EmbeddedEngine) -> float:
    """Of the steps of the next ROUND_S seconds, those of the beginning left out."""
    before = engine.steps()[0][-1][0]
    time.sleep(ROUND_S)
    steps = engine.steps(before)[0][10:]
    # From step to step, for what happens between two of them counts as well.
    return (steps[-1][1] - steps[0][1]) / (len(steps) - 1) / 1e6


def measure(running: Scene, sidecar: SidecarProcess) -> dict[str, list[float]]:
    """Mean steps by policy and round, in milliseconds."""
    engine = running.engine
    assert isinstance(engine, EmbeddedEngine)
    pids = pids_of(sidecar.wait_for_coverage(4))

    def policy(mode: str) -> None:
        fields = {"mode": mode} | ({"pause_budget_ms": 5} if mode == BUDGET else {})
        status, answer = sidecar.put("/gc/policy", fields)
        assert status == 200, answer

    def disabled() -> float:
        running.probe.run("import gc; gc.disable()", pids)
        mean = mean_step_ms(engine)
        running.probe.run("import gc; gc.enable()", pids)
        return mean

    def under(mode: str) -> float:
        policy(mode)
        mean = mean_step_ms(engine)
        policy("off")
        return mean

    kinds: dict[str, Callable[[], float]] = {
        DISABLED: disabled,
        FREEZE: lambda: under(FREEZE),
        BUDGET: lambda: under(BUDGET),
    }
    means: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS):
        names = [*kinds][number % 3 :] + [*kinds][: number % 3]
        for name in names:
            means[name].append(kinds[name]())
        show_progress("round", number + 1, ROUNDS)
    return means


def main() -> int:
    """Print the mean steps, and 1 where a policy costs more than it may."""
    with (
        tempfile.TemporaryDirectory() as directory,
        scene(Path(directory), *FLAGS) as running,
        running.sidecar("bench") as sidecar,
    ):
        means = measure(running, sidecar)
    print(f"embedded engine, {' '.join(FLAGS)}; {ROUNDS} rounds of {ROUND_S:g} s; mean step")
    kept = True
    for name, values in means.items():
        ratio = statistics.median(v / d for v, d in zip(values, means[DISABLED], strict=True))
        print(f"{name:14}{statistics.median(values):8.3f} ms   {ratio:.4f} of {DISABLED}'s")
        kept = kept and ratio <= LIMIT
    print(f"at most {LIMIT} of {DISABLED}'s: {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
