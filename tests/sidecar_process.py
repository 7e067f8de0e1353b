"""A real sidecar in a process of its own, started as its users start it, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.vllm.real_vllm import free_port, wait_until


class SidecarProcess:
    """`with SidecarProcess(engine_urls=[...], run_dir=...) as sidecar:` is one that answers /healthz."""

    def __init__(
        self,
        *,
        engine_urls: Sequence[str] = (),
        run_dir: Path | None = None,
        extra_args: Sequence[str] = (),
        log_path: Path,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._command = [sys.executable, "-m", "gc_sidecar", "serve", f"--port={self.port}"]
        self._command += [f"--engine-url={url}" for url in engine_urls]
        if run_dir is not None:
            self._command.append(f"--run-dir={run_dir}")
        self._command += extra_args
        self._process: subprocess.Popen[bytes] | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> SidecarProcess:
        log = self._cleanup.enter_context(self.log_path.open("wb"))
        env = {k: v for k, v in os.environ.items() if not k.startswith("GC_SIDECAR_")}
        self._process = subprocess.Popen(
            self._command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        if not wait_until(self._answers, 30.0):
            self.__exit__(None, None, None)
            raise AssertionError(f"the sidecar did not start:\n{self.log_text()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._cleanup.close()

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"the sidecar ended at once:\n{self.log_text()}")
        try:
            return self.get("/healthz", parse=False)[0] == 200
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """The sidecar's process."""
        assert self._process is not None
        return self._process.pid

    def log_text(self) -> str:
        """Everything the sidecar logged."""
        return self.log_path.read_text(errors="replace")

    def get(self, path: str, parse: bool = True) -> tuple[int, Any]:
        """Status and body (parsed as JSON unless `parse` is false)."""
        return self._request("GET", path, None, parse)

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and parsed body."""
        return self._request("POST", path, body, True)

    def put(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and parsed body."""
        return self._request("PUT", path, body, True)

    def status(self) -> dict[str, Any]:
        """GET /gc."""
        code, body = self.get("/gc")
        assert code == 200, body
        assert isinstance(body, dict)
        return body

    def wait_for_coverage(self, expected: int, deadline_s: float = 20.0) -> dict[str, Any]:
        """The status once `expected` processes are expected and all have acknowledged."""
        wanted = {"acknowledged": expected, "expected": expected}
        if not wait_until(lambda: self.status()["coverage"] == wanted, deadline_s):
            raise AssertionError(f"coverage is not {wanted}: {json.dumps(self.status(), indent=1)}")
        return self.status()

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, parse: bool
    ) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, method=method)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as response:
                code, data = response.status, response.read()
        except urllib.error.HTTPError as error:
            code, data = error.code, error.read()
        return code, json.loads(data) if parse else data.decode()


def wait_for(what: str, condition: Any, deadline_s: float = 20.0) -> None:
    """Wait for a condition; an AssertionError that says `what` did not come true."""
    started = time.monotonic()
    if not wait_until(condition, deadline_s):
        raise AssertionError(f"not within {time.monotonic() - started:.0f} s: {what}")
