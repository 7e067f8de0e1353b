"""An embedded engine in a process of its own, started as its users start it, for tests and benchmarks.

`scene` gives it the same witnesses as tests/vllm/scene.py gives a real vLLM, so one test can run on both.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forked_sidecar import ForkedSidecar
from tests.vllm.probe import Probe, install_probe, probe_environment
from tests.vllm.real_vllm import (
    FOREIGN_VARIABLES,
    EngineFailedError,
    RealVllm,
    free_port,
    wait_until,
)
from tests.vllm.scene import Scene

START_DEADLINE_S = 30.0
PROBE_POLL_S = 0.02


class EmbeddedEngine(RealVllm):
    """`with EmbeddedEngine("--workers=2") as engine:` is one that answers, and none afterwards.

    Only what it asks of the engine over HTTP and how it ends it are RealVllm's.
    """

    def __init__(
        self,
        *args: str,
        run_dir: Path | None = None,
        extra_env: Mapping[str, str] | None = None,
        log_path: Path,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self.start_s = 0.0
        self.survivors = []
        self._process: subprocess.Popen[bytes] | None = None
        self._cleanup = contextlib.ExitStack()
        self._args = list(args)
        env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_VARIABLES)}
        if run_dir is not None:
            env["GC_SIDECAR_RUN_DIR"] = str(run_dir)
        self.environment = env | dict(extra_env or {})

    def __enter__(self) -> EmbeddedEngine:
        super().__enter__()
        return self

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """The engine's first process."""
        assert self._process is not None
        return self._process

    def _start(self) -> None:
        log = self._cleanup.enter_context(self.log_path.open("wb"))
        started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gc_sidecar.embedded", f"--port={self.port}", *self._args],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while not self._is_ready():
            if time.monotonic() - started > START_DEADLINE_S:
                raise self._failure(f"did not answer within {START_DEADLINE_S:.0f} s")
            time.sleep(PROBE_POLL_S)
        self.start_s = time.monotonic() - started

    def _is_ready(self) -> bool:
        status = self.launcher.poll()
        if status is not None:
            raise self._failure(f"ended with status {status} while it started")
        try:
            return self.request("GET", "/health", timeout_s=5.0)[0] == 200
        except OSError:
            return False

    def _failure(self, what: str) -> EngineFailedError:
        return EngineFailedError(f"the embedded engine {what}; its log:\n{self.log_text()}")

    @staticmethod
    def _completion(prompt: str, max_tokens: int) -> dict[str, object]:
        return {"prompt": prompt, "max_tokens": max_tokens}

    def get_json(self, path: str) -> Any:
        """The answer to a GET that must succeed."""
        return self._json("GET", path, None)

    def steps(self, since: int = 0) -> list[list[list[int]]]:
        """For each engine core its steps after number `since`: number, start, length, retained objects."""
        engines: list[list[list[int]]] = self.get_json(f"/steps?since={since}")["engines"]
        return engines

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(name + "{")]
        assert values, f"there is no metric {name}"
        return sum(values)

    def pids(self, title: str) -> list[int]:
        """The living processes whose title begins with `embedded` and `title`."""
        return [p.pid for p in self.processes() if p.title.startswith(f"embedded {title}")]


class EmbeddedScene(Scene):
    """A Scene whose sidecars start at once: tests of the embedded engine start many."""

    @contextlib.contextmanager
    def sidecar(
        self, name: str, *args: str, engine: bool = True, run_dir: bool = True
    ) -> Iterator[ForkedSidecar]:
        with ForkedSidecar(
            engine_urls=[self.engine.url] if engine else [],
            run_dir=self.run_dir if run_dir else None,
            extra_args=args,
            log_path=self.directory / f"sidecar-{name}.log",
        ) as sidecar:
            yield sidecar


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A run directory in shared memory, as a pod's memory volume would be."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


@contextlib.contextmanager
def scene(
    directory: Path,
    *args: str,
    run_dir: bool = True,
    probe: bool = True,
    env: Mapping[str, str] | None = None,
) -> Iterator[Scene]:
    """An embedded engine, with the probe in each of its processes."""
    witness = Probe(directory / "probe")
    variables = dict(env or {})
    flags: Sequence[str] = args
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(run_directory()) if run_dir else None
        if probe:
            tree = directory / "probe-tree"
            install_probe(tree)
            variables |= probe_environment(witness.directory)
            variables["PYTHONPATH"] = str(tree)
            flags = (*args, "--plugin=test_probe:register")
        engine = stack.enter_context(
            EmbeddedEngine(
                *flags, run_dir=shared, extra_env=variables, log_path=directory / "engine.log"
            )
        )
        yield EmbeddedScene(engine, witness, shared, directory)


def gone(pids: Sequence[int], deadline_s: float = 10.0) -> bool:
    """Whether all of these processes end in time; one that nobody has reaped counts as ended."""

    def lives(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    return wait_until(lambda: not any(map(lives, pids)), deadline_s)
