"""Runs tests, or the other half of a test, in processes of their own.

GC state, gc.callbacks, forks and signals belong to a whole process: what a test does to them must reach
neither pytest nor the next test. A nursery, one for each module of tests, is an interpreter that has imported
the module, with a stand-in for pytest in place of the real one, and has done nothing else: each test is forked
from it, so it starts at once and with a small heap.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, NoReturn, TypeVar

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

Test = TypeVar("Test", bound=Callable[..., None])


def in_own_process(test: Test) -> Test:
    """A test that runs in a fresh process. Its arguments must be JSON; `tmp_path` arrives as a Path."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        __tracebackhide__ = True
        how, output = _nursery(test.__module__).run(test.__name__, arguments)
        if how:
            raise AssertionError(f"{how}, in a process of its own:\n{output}")

    run.in_child = test  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


class Nursery:
    """An interpreter that has imported one module of tests, and forks a process for each that is to run."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", __name__, module]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def run(self, name: str, arguments: dict[str, Any]) -> tuple[str | None, str]:
        """How a test failed, if it did, and what it printed."""
        assert self.process.stdin is not None
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            order = {"test": name, "arguments": arguments, "output": output.name}
            with contextlib.suppress(BrokenPipeError):  # `_hear_from` says why
                self.process.stdin.write(json.dumps(order, default=str) + "\n")
                self.process.stdin.flush()
            pid = _hear_from(self.process)
            late = threading.Timer(DEADLINE_S, os.kill, (pid, signal.SIGKILL))
            late.start()
            status = _hear_from(self.process)
            ended = late.finished.is_set()
            late.cancel()
            printed = output.read()
        if status == 0:
            return None, printed
        return f"no end after {DEADLINE_S:.0f} s" if ended else f"exit status {status}", printed


@functools.cache
def _nursery(module: str) -> Nursery:
    nursery = Nursery(module)
    atexit.register(nursery.process.kill)
    return nursery


def _be_nursery(module: str) -> None:
    """In the nursery: fork for every line, and say the child's pid, then its exit status."""
    importlib.import_module(module)
    gc.collect()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(order["output"])
            _run(module, order["test"], order["arguments"])
        say(pid)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _become(output: str) -> None:
    """In the child: let go of the nursery's streams. What is printed goes into a file."""
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)


def _run(module: str, name: str, arguments: dict[str, Any]) -> NoReturn:
    """Call a function of a test module and end the process."""
    try:
        function = getattr(importlib.import_module(module), name)
        if "tmp_path" in arguments:
            arguments["tmp_path"] = Path(arguments["tmp_path"])
        getattr(function, "in_child", function)(**arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    os._exit(status)  # threads of the agent, and of tests, need no farewell


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
        return _hear_from(self.process)

    def tell(self, value: Any = None) -> None:
        """Something for its `hear`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def ask(self, value: Any) -> Any:
        """Tell, and hear the answer."""
        self.tell(value)
        return self.hear()


def _hear_from(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the child ended with status {process.wait()} instead of answering"
    return json.loads(line)


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


def _main(module: str, name: str | None = None, values: str = "{}") -> None:
    sys.modules["pytest"] = _StandIn("pytest")
    if name is None:
        _be_nursery(module)
    else:
        _run(module, name, json.loads(values))


if __name__ == "__main__":
    # The module that the tests import, not this copy of it under the name __main__.
    from tests.unit.agent import own_process

    own_process._main(*sys.argv[1:])
