"""CPython's 25 % rule on the embedded engine: full collections at growing distances, with growing pauses."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

from tests.embedded.engine import EmbeddedEngine, run_directory
from tests.embedded.ladder import read_ladder
from tests.sidecar_process import SidecarProcess, wait_for

# Where a quarter of the heap is more than what the thresholds alone keep between two full collections.
THRESHOLD0, THRESHOLD1, THRESHOLD2 = gc.get_threshold()
OBJECTS = int(1.2 * 4 * THRESHOLD0 * (THRESHOLD1 + 1) * (THRESHOLD2 + 1))
FLAGS = ("--workers=1", f"--heap-objects={OBJECTS}", "--free-running")
RUNGS = 5


def test_full_collections_come_at_the_ladder_s_ratio_and_none_after_a_freeze(
    tmp_path: Path,
) -> None:
    with (
        run_directory() as run_dir,
        EmbeddedEngine(
            *FLAGS,
            "--retain-per-step=4000",
            "--step-ms=1",
            run_dir=run_dir,
            log_path=tmp_path / "log",
        ) as engine,
        SidecarProcess(
            engine_urls=[engine.url], run_dir=run_dir, log_path=tmp_path / "sidecar"
        ) as sidecar,
    ):
        wait_for("the rungs", lambda: len(read_ladder(engine, run_dir)) >= RUNGS, deadline_s=60)
        sidecar.wait_for_coverage(3)
        assert sidecar.post("/gc/freeze")[0] == 200
        rungs = read_ladder(engine, run_dir)
        frozen_at = engine.steps()[0][-1]
        # As many objects more as would be a rung under normal GC, and somewhat more.
        wait_for(
            "the heap grows",
            lambda: (
                engine.steps(frozen_at[0])[0][-1:] > [[0, 0, 0, 0]]
                and engine.steps(frozen_at[0])[0][-1][3] > 1.4 * frozen_at[3]
            ),
            deadline_s=60,
        )
        assert read_ladder(engine, run_dir) == rungs

    ratios = [later.retained_objects / rung.retained_objects for rung, later in pairwise(rungs)]
    assert all(1.15 <= ratio <= 1.35 for ratio in ratios), ratios
    # Others run beside it and may lengthen any one pause, but hardly both of the first two.
    pauses_s = [rung.pause_s for rung in rungs]
    assert min(pauses_s[-2:]) > min(pauses_s[:2]), "pauses grow with the heap"
    assert all(rung.step_s >= rung.pause_s for rung in rungs), "a pause holds up its step"
