"""Start a real vLLM on the CPU for a test, a benchmark or a look, and leave no process behind.

Standard library only. It knows what vLLM needs on a machine without a GPU, and nothing of what
gc-sidecar does there: what is to be injected comes in as a directory, and requests go to `url`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_NAME = "tiny"
MODEL_MAKER = REPOSITORY / "sidecar" / "gc_sidecar" / "tiny_model.py"

START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 15.0
REQUEST_TIMEOUT_S = 120.0
POLL_S = 0.1

# What the caller's shell or test runner has set must not steer the engine.
FOREIGN_VARIABLES = ("VLLM_", "GC_SIDECAR_", "DYN_FPM_", "PYTHON")
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM gives each worker a NUMA node of its own, and refuses two workers on a single node.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On few cores the threads of two workers wait for each other: 69.5 ms a step instead of 4.1 ms.
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_FLAGS = (
    "--load-format=dummy",
    # bfloat16 takes AMX kernels, which die with SIGILL on processors that only claim to have them.
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=256",
    "--max-num-seqs=8",
)


class VllmMissingError(RuntimeError):
    """There is no vLLM to start."""


class EngineFailedError(RuntimeError):
    """The engine did not come up, or died; the message ends with the tail of its log."""


@dataclass(frozen=True)
class EngineProcess:
    """One process of a running engine, as /proc shows it."""

    pid: int
    parent: int
    title: str
    """The command line, or what the process wrote over it (`VLLM::Worker_TP0`)."""


def find_vllm_python() -> Path:
    """The interpreter that has vLLM: GC_SIDECAR_VLLM_PYTHON, or what `make vllm` installed."""
    named = os.environ.get("GC_SIDECAR_VLLM_PYTHON")
    # Not resolved: the link to the base interpreter is what makes it the environment's.
    python = Path(named).absolute() if named else REPOSITORY / ".venv" / "vllm" / "bin" / "python"
    if not python.exists():
        raise VllmMissingError(
            f"no vLLM at {python}: run `make vllm`, "
            "or set GC_SIDECAR_VLLM_PYTHON to the interpreter of yours"
        )
    return python


def make_tiny_model(directory: Path, python: Path | None = None) -> Path:
    """Make the model with the engine's interpreter, which has `tokenizers`."""
    command = [str(python or find_vllm_python()), "-I", str(MODEL_MAKER), str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return directory


def wait_until(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def processes_of_session(session: int) -> list[EngineProcess]:
    """The living processes of a session by pid; dead ones that nobody has reaped do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command's name stands in parentheses and may hold anything, parentheses too.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command_line = (entry / "cmdline").read_bytes()
        except OSError:  # gone while we looked
            continue
        state, parent, its_session = fields[0], int(fields[1]), int(fields[3])
        if its_session == session and state not in "ZX":
            title = command_line.replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(EngineProcess(int(entry.name), parent, title))
    return sorted(found, key=lambda process: process.pid)


class RealVllm:
    """`with RealVllm(tensor_parallel=2) as engine:` is a vLLM that answers, and none afterwards.

    Nothing of gc-sidecar is in it unless `inject_dir`, `plugins` or `worker_extension` say so. The
    directories need not exist: that it starts in spite of a missing one is something to test.
    """

    def __init__(
        self,
        *,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        api_servers: int = 1,
        run_dir: Path | None = None,
        inject_dir: Path | None = None,
        plugins: str | None = None,
        dev_mode: bool = False,
        worker_extension: str | None = None,
        extra_args: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        model: Path | None = None,
        python: Path | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self.python = python or find_vllm_python()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = (
            log_path or REPOSITORY / "build" / "vllm-logs" / f"{os.getpid()}-{self.port}.log"
        )
        self.start_s = 0.0
        """How long the engine took until it answered."""
        self.survivors: list[EngineProcess] = []
        """Processes that outlived SIGTERM at the end and had to be killed."""

        self._api_servers = api_servers
        self._model = model
        self._start_deadline_s = start_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._cleanup = contextlib.ExitStack()

        self._args = [
            f"--tensor-parallel-size={tensor_parallel}",
            f"--data-parallel-size={data_parallel}",
            f"--api-server-count={api_servers}",
        ]
        if worker_extension is not None:
            self._args.append(f"--worker-extension-cls={worker_extension}")
        self._args += extra_args

        env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_VARIABLES)}
        env |= CPU_ENVIRONMENT
        # What vLLM finds out about a model is kept for the next start, beside vLLM and not in HOME.
        prefix = self.python.parent.parent
        if os.access(prefix, os.W_OK):
            env["VLLM_CACHE_ROOT"] = str(prefix / "cache")
        if plugins is not None:
            env["VLLM_PLUGINS"] = plugins
        if dev_mode:
            env["VLLM_SERVER_DEV_MODE"] = "1"
        if run_dir is not None:
            env["GC_SIDECAR_RUN_DIR"] = str(run_dir)
        env |= extra_env or {}
        if inject_dir is not None:
            env["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(inject_dir), env.get("PYTHONPATH")])
            )
        self.environment = env

    # Start and stop

    def __enter__(self) -> RealVllm:
        try:
            self._start()
        except BaseException:  # an interrupt while it starts leaves no engine behind either
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        work_dir = Path(
            self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="real-vllm-"))
        )
        model = self._model or make_tiny_model(work_dir / "model", self.python)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = self._cleanup.enter_context(self.log_path.open("wb"))
        command = [
            str(self.python),
            # The `vllm` command: `vllm.entrypoints.openai.api_server` ignores --api-server-count.
            *("-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", MODEL_NAME, "--host=127.0.0.1", f"--port={self.port}"),
            *CPU_FLAGS,
            *self._args,
        ]
        started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            # Python's -m puts the current directory on the module path: it holds nothing of ours.
            cwd=work_dir,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if not wait_until(self._is_ready, self._start_deadline_s):
            raise self._failure(f"did not answer within {self._start_deadline_s:.0f} s")
        self.start_s = time.monotonic() - started

    def _is_ready(self) -> bool:
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise self._failure(f"ended with status {status} while it started")
        # The API servers share one port, so an answer on it speaks for one of them only.
        if self.log_text().count("Application startup complete") < self._api_servers:
            return False
        try:
            return self.request("GET", "/health", timeout_s=5.0)[0] == 200
        except OSError:
            return False

    def _failure(self, what: str) -> EngineFailedError:
        tail = "\n".join(self.log_text().splitlines()[-40:])
        return EngineFailedError(f"vLLM {what}; the tail of {self.log_path}:\n{tail}")

    def stop(self) -> None:
        """End every process: SIGTERM to the first, as in a container, then SIGKILL to the rest."""
        process, self._process = self._process, None
        try:
            if process is not None:
                self._end(process)
        finally:
            self._cleanup.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        def all_gone() -> bool:
            process.poll()  # reaps it
            return not processes_of_session(process.pid)

        try:
            # Not after it was reaped: its pid may be somebody else's by now.
            if process.poll() is None:
                process.terminate()
            if not wait_until(all_gone, STOP_DEADLINE_S):
                self.survivors = processes_of_session(process.pid)
        finally:  # an impatient second interrupt kills at once
            for survivor in processes_of_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(survivor.pid, signal.SIGKILL)
        if not wait_until(all_gone, STOP_DEADLINE_S):
            raise RuntimeError(f"these survived SIGKILL: {processes_of_session(process.pid)}")

    # What a caller looks at

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def processes(self) -> list[EngineProcess]:
        """Every living process of the engine, the one that we started included."""
        return processes_of_session(self._process.pid) if self._process is not None else []

    # What a caller asks

    def request(
        self, method: str, path: str, body: object = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Status and body of one request, whatever the status is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            response = self._send(connection, method, path, body)
            return response.status, response.read()

    def complete(self, prompt: str, max_tokens: int = 16) -> str:
        """The text that follows `prompt`: nonsense (random weights), always the same nonsense."""
        answer = self._json("POST", "/v1/completions", self._completion(prompt, max_tokens))
        text: str = answer["choices"][0]["text"]
        return text

    def stream_completions(self, n: int, max_tokens: int = 16, concurrency: int = 4) -> list[str]:
        """Stream `n` completions, a few at a time; each must run to its last token."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda i: self._stream(f"Completion {i}", max_tokens), range(n)))

    def rpc(
        self, method: str, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> list[Any]:
        """vLLM's own /collective_rpc (`dev_mode`): one result per worker of the first engine."""
        body = {"method": method, "args": list(args), "kwargs": dict(kwargs or {})}
        results: list[Any] = self._json("POST", "/collective_rpc", body)["results"]
        return results

    def _json(self, method: str, path: str, body: object) -> Any:
        status, answer = self.request(method, path, body)
        if status != 200:
            raise RuntimeError(
                f"{method} {path} answered {status}: {answer[:2000].decode(errors='replace')}"
            )
        return json.loads(answer)

    def _stream(self, prompt: str, max_tokens: int) -> str:
        body = self._completion(prompt, max_tokens) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S)
        text, tokens = "", 0
        with contextlib.closing(connection):
            response = self._send(connection, "POST", "/v1/completions", body)
            if response.status != 200:
                raise RuntimeError(
                    f"a stream was answered with {response.status}: {response.read()[:2000]!r}"
                )
            for event in _server_sent_events(response):
                if event == "[DONE]":
                    break
                chunk = json.loads(event)
                if "error" in chunk:
                    raise RuntimeError(f"a stream ended with an error: {event}")
                text += "".join(choice["text"] for choice in chunk["choices"])
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            else:
                raise RuntimeError("a stream broke off before [DONE]")
        if tokens != max_tokens:
            raise RuntimeError(f"a stream gave {tokens} tokens instead of {max_tokens}")
        return text

    @staticmethod
    def _send(
        connection: http.client.HTTPConnection, method: str, path: str, body: object
    ) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        return connection.getresponse()

    @staticmethod
    def _completion(prompt: str, max_tokens: int) -> dict[str, object]:
        return {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def _server_sent_events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").decode().strip()


def main() -> None:
    """Start an engine (arguments: TP, DP, API servers), look at it, ask it something, end it."""
    tensor_parallel, data_parallel, api_servers = map(int, sys.argv[1:4] or (2, 1, 1))
    engine = RealVllm(
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        api_servers=api_servers,
        dev_mode=True,
    )
    with engine:
        print(f"{engine.url} answered after {engine.start_s:.1f} s; log: {engine.log_path}")
        for process in engine.processes():
            print(f"  {process.pid:8} {process.parent:8}  {process.title[:90]}")
        started = time.monotonic()
        text = engine.complete("The quick brown", 8)
        print(f"  {text!r} in {time.monotonic() - started:.1f} s")
        started = time.monotonic()
        texts = engine.stream_completions(40)
        print(f"  {len(texts)} streams in {time.monotonic() - started:.1f} s")
        print(f"  /is_paused answers {engine.request('GET', '/is_paused')}")
        started = time.monotonic()
    print(f"ended in {time.monotonic() - started:.1f} s, killed: {engine.survivors}")


if __name__ == "__main__":
    main()
