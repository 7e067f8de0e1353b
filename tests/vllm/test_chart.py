"""vLLM's own parsers know every flag of the chart's presets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.chart.rendering import PRESETS, container, render

PARSER = Path(__file__).parents[1] / "chart" / "vllm_flags.py"


def test_the_presets_command_lines_are_vllms(vllm_python: Path) -> None:
    commands = []
    for preset in ("", *PRESETS):
        documents = render(preset=preset)
        words = container(documents, "benchmark")["args"]
        commands.append(
            {
                "engine": container(documents, "vllm")["args"],
                "benchmark": words[words.index("--") + 1 :],
            }
        )
    done = subprocess.run(
        [str(vllm_python), str(PARSER)],
        input=json.dumps(commands), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
