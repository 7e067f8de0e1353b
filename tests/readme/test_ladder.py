"""CPython's 25 % rule on the embedded engine: full collections at growing distances, with growing pauses."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

from tests.embedded.engine import EmbeddedEngine, scene
from tests.readme.ladder import read_ladder
from tests.sidecar_process import wait_for

# Where a quarter of the heap is more than what the thresholds alone keep between two full collections.
THRESHOLD0, THRESHOLD1, THRESHOLD2 = gc.get_threshold()
OBJECTS = int(1.2 * 4 * THRESHOLD0 * (THRESHOLD1 + 1) * (THRESHOLD2 + 1))
FLAGS = ("--workers=1", f"--heap-objects={OBJECTS}", "--free-running")
RUNGS = 5

# A pause is as long as others let it: how much work a collection is, the worker's own clock tells.
PLANT_CLOCK = """
import gc, time
work_ns = []
began_ns = 0
def measure(phase, info):
    global began_ns
    if info["generation"] == 2:
        if phase == "start":
            began_ns = time.thread_time_ns()
        elif began_ns:
            work_ns.append(time.thread_time_ns() - began_ns)
gc.callbacks.append(measure)
"""


def test_full_collections_come_at_the_ladder_s_ratio_and_none_after_a_freeze(
    tmp_path: Path,
) -> None:
    with (
        scene(tmp_path, *FLAGS, "--retain-per-step=4000", "--step-ms=1") as running,
        running.sidecar("ladder") as sidecar,
    ):
        engine, run_dir = running.engine, running.run_dir
        assert isinstance(engine, EmbeddedEngine)
        assert run_dir is not None
        worker = {"worker": engine.pids("worker")[0]}
        running.probe.run(PLANT_CLOCK, worker)

        def work_ns() -> list[int]:
            found: list[int] = running.probe.run("result = list(work_ns)", worker)["worker"]
            return found

        # Some of them may have come before the clock.
        wait_for(
            "the rungs",
            lambda: len(read_ladder(engine, run_dir)) >= RUNGS and len(work_ns()) >= RUNGS - 1,
            deadline_s=60,
        )
        sidecar.wait_for_coverage(3)
        assert sidecar.post("/gc/freeze")[0] == 200
        rungs = read_ladder(engine, run_dir)
        work = work_ns()
        frozen_at = engine.steps()[0][-1]
        # As many objects more as would be two rungs under normal GC.
        wait_for(
            "the heap grows",
            lambda: (
                engine.steps(frozen_at[0])[0][-1:] > [[0, 0, 0, 0]]
                and engine.steps(frozen_at[0])[0][-1][3] > 1.6 * frozen_at[3]
            ),
            deadline_s=60,
        )
        assert read_ladder(engine, run_dir) == rungs

    ratios = [later.retained_objects / rung.retained_objects for rung, later in pairwise(rungs)]
    assert all(1.15 <= ratio <= 1.35 for ratio in ratios), ratios
    # The last one was the freeze's own, of a heap that is at least as large as at the last rung.
    assert work[-1] > 1.3 * work[0], "pauses grow with the heap"
    assert all(rung.step_s >= rung.pause_s for rung in rungs), "a pause holds up its step"
