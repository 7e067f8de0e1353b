"""A real vLLM under the scenarios of tests/conformance.py: it must answer as the embedded engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance import SCENARIOS, differences, expected, play
from tests.vllm.scene import scene

OPTIONS: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"tensor_parallel": 2},
    "data_parallel": {"data_parallel": 2},
    "workers_only": {
        "tensor_parallel": 2,
        "plugin": False,
        "endpoint": False,
        "worker_extension": "gc_sidecar_agent.extension.GcWorkerExtension",
    },
}
PROCESSES = {"tensor_parallel": 4, "data_parallel": 5, "workers_only": 2}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_answers_are_those_of_the_recording(tmp_path: Path, tiny_model: Path, name: str) -> None:
    with scene(tmp_path, tiny_model, dev_mode=True, **OPTIONS[name]) as running:
        found = differences(play(name, running, PROCESSES[name]), expected(name))
    assert not found, "\n".join(found)
