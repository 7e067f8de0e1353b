"""The embedded engine under the scenarios of tests/conformance.py. Run as a program, it records them anew."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance import RECORDING, SCENARIOS, Step, differences, expected, play
from tests.embedded.engine import scene

SMALL = ("--heap-objects=5000", "--step-ms=4", "--dev-mode")
FLAGS = {
    "tensor_parallel": (*SMALL, "--workers=2"),
    # The model that a real vLLM runs here is dense: its ranks step each by itself.
    "data_parallel": (*SMALL, "--workers=1", "--data-parallel=2", "--independent-dp"),
    "workers_only": (
        *(*SMALL, "--workers=2", "--no-endpoint", "--without-agent"),
        "--worker-extension-cls=gc_sidecar_agent.extension.GcWorkerExtension",
    ),
}
PROCESSES = {"tensor_parallel": 4, "data_parallel": 5, "workers_only": 2}


def record(name: str, directory: Path) -> list[Step]:
    """What comes of a scenario."""
    with scene(directory, *FLAGS[name]) as running:
        return play(name, running, PROCESSES[name])


def record_all() -> dict[str, list[Step]]:
    """What comes of all scenarios, side by side: they mostly wait."""
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor() as pool:
        directories = {name: Path(parent, name) for name in SCENARIOS}
        for directory in directories.values():
            directory.mkdir()
        return dict(zip(SCENARIOS, pool.map(record, SCENARIOS, directories.values()), strict=True))


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_answers_are_those_of_the_recording(name: str, tmp_path: Path) -> None:
    found = differences(record(name, tmp_path), expected(name))
    assert not found, "\n".join(found)


def main() -> None:
    """Record all scenarios anew."""
    recordings = record_all()
    lines = ",\n".join(
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(step)}" for step in steps) + "\n ]"
        for name, steps in recordings.items()
    )
    RECORDING.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
