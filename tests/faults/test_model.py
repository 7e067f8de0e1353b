"""Random operations, crashes, lease ends and restarts, against the model of the design: no disagreement.

CI runs 2,000 steps of two seeds of its own, so that what it finds is what has changed. With
`GC_SIDECAR_MODEL_STEPS=20000` it runs so many of new seeds; `python -m tests.faults.model` says which.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.faults import model

ASKED = os.environ.get("GC_SIDECAR_MODEL_STEPS")
STEPS = int(ASKED or 2000)
# Side by side, and none so long that it looks like one that hangs.
PARTS = 2
# Each has to have come, or the model has shown nothing about it. Rarer ones come in most runs.
KINDS = {
    *("freeze", "budget", "restore", "maintain", "lease", "two_ask_at_once", "time_passes"),
    *("kill", "start_engine", "kill_sidecar", "kill_sidecar_in_the_middle"),
}


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_in_whatever_order_sidecar_and_agents_do_what_the_design_says(
    part: int,
) -> None:
    seed, steps = random.randrange(1 << 32) if ASKED else part, -(-STEPS // PARTS)
    print(f"again: python -m tests.faults.model --steps {steps} --seed {seed}")
    world = model.run(steps, seed)
    print(f"part {part}: {world.total} steps with {world.engines} engines: {world.steps}")
    assert world.total >= steps
    assert world.steps.keys() >= KINDS
