"""Runs tests, or the other half of a test, in processes of their own.

GC state, gc.callbacks, forks and signals belong to a whole process: what a test does to them must reach
neither pytest nor the next test. The child imports the test's own module with a stand-in for pytest in
place of the real one, so it starts in a tenth of a second and with a small heap.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

Test = TypeVar("Test", bound=Callable[..., None])


def in_own_process(test: Test) -> Test:
    """A test that runs in a fresh interpreter. Its arguments must be JSON; `tmp_path` arrives as a Path."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        __tracebackhide__ = True
        command = command_for(test, arguments)
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment()
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end after {DEADLINE_S:.0f} s:\n{error.stderr}") from None
        if result.returncode != 0:
            how = f"exit status {result.returncode}"
            raise AssertionError(f"{how}, in a process of its own:\n{result.stdout}{result.stderr}")

    run.in_child = test  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def command_for(function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """The command that calls `function`, which stands in a test module, in a fresh interpreter."""
    values = json.dumps(arguments, default=str)
    return [sys.executable, "-m", __name__, function.__module__, function.__name__, values]


def environment(**more: str) -> dict[str, str]:
    """Ours without gc-sidecar's own variables, with its source and these tests on PYTHONPATH."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("GC_SIDECAR_")}
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "sidecar")])
    return {**kept, "PYTHONPATH": path, **more}


class Child:
    """The other half of a test: a function of its module in a process that is talked to line by line.

    `with Child(function, run_dir=...) as child:` kills it at the end, whatever state it is in.
    """

    def __init__(self, function: Callable[..., None], **arguments: Any) -> None:
        self.process = subprocess.Popen(
            command_for(function, arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> Any:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with status {self.process.wait()} instead of answering"
        return json.loads(line)

    def tell(self, value: Any = None) -> None:
        """Something for its `hear`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def ask(self, value: Any) -> Any:
        """Tell, and hear the answer."""
        self.tell(value)
        return self.hear()


def say(value: Any) -> None:
    """In the child: one line for the parent's `hear`."""
    sys.__stdout__.write(json.dumps(value) + "\n")
    sys.__stdout__.flush()


def hear() -> Any:
    """In the child: what the parent tells; ends the process when the parent has gone."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return json.loads(line)


class _StandIn(ModuleType):
    """For `pytest` in the child: every mark and fixture leaves its function as it is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and isinstance(arguments[0], FunctionType) else self


def _main(module: str, name: str, values: str) -> None:
    sys.modules["pytest"] = _StandIn("pytest")
    function = getattr(importlib.import_module(module), name)
    arguments = json.loads(values)
    if "tmp_path" in arguments:
        arguments["tmp_path"] = Path(arguments["tmp_path"])
    getattr(function, "in_child", function)(**arguments)


if __name__ == "__main__":
    # The module that the tests import, not this copy of it under the name __main__.
    from tests.unit.agent import own_process

    try:
        own_process._main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    os._exit(status)  # threads of the agent, and of tests, need no farewell
