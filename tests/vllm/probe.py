"""A witness inside every process of a real vLLM, independent of the agent: it runs small pieces of Python there.

Tests use it to read GC's true state, to plant garbage and to make things fail. It is a vLLM plugin of its own,
as a user's would be, and knows nothing of gc-sidecar.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLUGIN_NAME = "test_probe"
DIRECTORY_VARIABLE = "TEST_PROBE_DIR"

_PLUGIN = '''
"""Runs in vLLM's processes: executes what the test leaves in TEST_PROBE_DIR, in a thread, once per process."""
import json, os, sys, threading, time, traceback

_names = {}
_started = []

def _serve(directory):
    done = set()
    while True:
        for name in sorted(os.listdir(directory)):
            if not name.endswith(".py") or name in done:
                continue
            done.add(name)
            scope = _names
            try:
                with open(os.path.join(directory, name)) as source:
                    exec(source.read(), scope)
                answer = {"result": scope.get("result")}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            path = os.path.join(directory, f"{name[:-3]}.{os.getpid()}.json")
            with open(path + ".tmp", "w") as out:
                json.dump(answer, out, default=repr)
            os.rename(path + ".tmp", path)
        time.sleep(0.05)

def register():
    if not _started:
        _started.append(True)
        directory = os.environ["TEST_PROBE_DIR"]
        threading.Thread(target=_serve, args=(directory,), daemon=True, name="test-probe").start()

class UserExtension:
    """A user's own worker extension; its names are those that ours must not care about."""

    def gc_sidecar_command(self, *args):
        return {"this is": "the user's own"}

    def handle(self):
        return {"user": "handle"}

    def user_method(self):
        return {"rank": self.rank}
'''


def install_probe(directory: Path) -> None:
    """Write the plugin and its dist-info into `directory`, to be put on vLLM's PYTHONPATH."""
    info = directory / "test_probe-1.dist-info"
    info.mkdir(parents=True)
    (directory / "test_probe.py").write_text(_PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN_NAME} = test_probe:register\n"
    )


class Probe:
    """The test's end: `run` a piece of code in the processes with these pids and get each one's `result`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0

    def run(self, code: str, pids: Mapping[str, int], deadline_s: float = 30.0) -> dict[str, Any]:
        """`code` sets `result` (JSON-safe). It runs in every vLLM process; the named ones are waited for."""
        self._count += 1
        name = f"{self._count:04d}"
        source = self.directory / f"{name}.py"
        source.with_suffix(".tmp").write_text("result = None\n" + code)
        source.with_suffix(".tmp").rename(source)
        answers: dict[str, Any] = {}
        give_up = time.monotonic() + deadline_s
        while len(answers) < len(pids):
            for key, pid in pids.items():
                path = self.directory / f"{name}.{pid}.json"
                if key not in answers and path.exists():
                    answer = json.loads(path.read_text())
                    if "error" in answer:
                        raise AssertionError(f"the probe failed in {key}:\n{answer['error']}")
                    answers[key] = answer["result"]
            if time.monotonic() > give_up:
                raise AssertionError(f"no answer from {sorted(set(pids) - set(answers))}")
            time.sleep(0.02)
        return answers

    def only(self, pid: int, code: str) -> str:
        """`code` that acts in the process `pid` and nowhere else."""
        indented = "\n".join("    " + line for line in code.splitlines())
        return f"import os\nif os.getpid() == {pid}:\n{indented}\n"


def probe_environment(directory: Path) -> dict[str, str]:
    """What vLLM's environment needs for the probe to work in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    return {DIRECTORY_VARIABLE: os.fspath(directory)}
