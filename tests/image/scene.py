"""What the tests of played pods see of an engine, through the sidecar's container."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.image.pod import PlayedPod
from tests.sidecar_process import wait_for

# The engine that stands for vLLM, and what it is told.
PROGRAMS = {"vllm": Path(__file__).with_name("stand_in_vllm.py")}
ENGINE = {"GC_SIDECAR_WORKERS": "2", "GC_SIDECAR_HEAP_OBJECTS": "20000"}
PROCESSES = 4  # API server, engine core, two workers


def status(pod: PlayedPod) -> dict[str, Any]:
    text = pod.execute("gc-sidecar", "gc-sidecar", "status", "--json", check=False)
    found: dict[str, Any] = json.loads(text)
    return found


def thresholds(pod: PlayedPod) -> dict[str, list[int]]:
    """Of each process of the engine that is alive."""
    return {
        f"{row['role']} {row['rank']}": row["gc"]["threshold"]
        for row in status(pod)["processes"]
        if row["gc"] is not None and row["state"] != "gone"
    }


def has_policy(pod: PlayedPod, mode: str) -> bool:
    """Whether every process of the engine has it, and no other."""
    found = status(pod)
    modes = [row["mode"] for row in found["processes"] if row["state"] != "gone"]
    return found["policy"]["mode"] == mode and modes == [mode] * PROCESSES


def wait_for_engine(pod: PlayedPod) -> None:
    wait_for("the engine is under normal GC", lambda: has_policy(pod, "off"), 60.0)
