"""`gc-sidecar serve` as its users start it: a process with two listeners that leaves when it is told to."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.__main__ import main
from gc_sidecar.server import listeners
from gc_sidecar.server.listeners import MAXIMUM_CONNECTIONS, SILENCE_S
from tests.unit.server.stand_in import StandInEngine

StartEngine = Callable[..., StandInEngine]
# `python -m gc_sidecar` that waits for a silent connection no longer than a test may.
IN_A_HURRY = (
    "import sys; from gc_sidecar.__main__ import main;"
    " from gc_sidecar.server import listeners; listeners.SILENCE_S = {}"
)


class Serve:
    """The process, once it listens."""

    def __init__(self, *args: str, silence_s: float | None = None, **environment: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("GC_SIDECAR_")}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        start = ["-m", "gc_sidecar"]
        if silence_s is not None:
            start = ["-c", f"{IN_A_HURRY.format(silence_s)}; sys.exit(main())"]
        self.process = subprocess.Popen(
            [sys.executable, *start, "serve", "--port", "0", *args],
            env={**env, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line))
            if self.lines[-1].get("event") == "listening":
                break
        else:
            pytest.fail(f"it ended before it listened: {self.lines}")
        self.control, self.open = self.lines[-1]["control"], self.lines[-1]["open"]

    def post(self, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self.control + path, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.loads(answer.read()))

    def get(self, url: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit code and seconds until it had ended."""
        started = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(timeout=10)
        took = time.monotonic() - started
        assert self.process.stderr is not None
        self.lines += [json.loads(line) for line in self.process.stderr]
        self.process.stderr.close()
        return code, took


@pytest.fixture
def serve() -> Iterator[Callable[..., Serve]]:
    running: list[Serve] = []

    def start(*args: str, silence_s: float | None = None, **environment: str) -> Serve:
        running.append(Serve(*args, silence_s=silence_s, **environment))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        assert each.process.stderr is not None
        each.process.stderr.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_listeners_and_one_log_line_an_operation(
    serve: Callable[..., Serve], start_engine: StartEngine, run_dir: Path
) -> None:
    engine = start_engine()
    sidecar = serve(
        "--run-dir", str(run_dir), "--engine-url", engine.url, "--open-port", "0"
    )  # fmt: skip
    until(lambda: sidecar.get(f"{sidecar.open}/readyz")[0] == 200)
    assert sidecar.post("/gc/freeze?owner=me&operation_id=mine")["operation"]["state"] == "applied"
    assert sidecar.get(f"{sidecar.open}/gc")[0] == 404
    assert "gc_sidecar_coverage_ratio 1.0" in sidecar.get(f"{sidecar.open}/metrics")[1]
    code, took = sidecar.stop()
    assert code == 0
    assert took < 2
    lines = [line for line in sidecar.lines if line.get("event") == "operation"]
    assert len(lines) == 1
    assert lines[0]["id"] == "mine"
    assert lines[0]["kind"] == "freeze"
    assert lines[0]["state"] == "applied"
    assert lines[0]["coverage"] == "4/4"
    assert lines[0]["owner"] == "me"
    assert engine.process("worker-0-0")["mode"] == "freeze", "the lease ends it, not our end"


def test_it_leaves_within_two_seconds_while_an_operation_hangs(
    serve: Callable[..., Serve], start_engine: StartEngine
) -> None:
    engine = start_engine(run_dir=None, behaviour={"rpc": "dev"})
    sidecar = serve("--engine-url", engine.url)
    until(lambda: '"dev"' in sidecar.get(f"{sidecar.control}/gc")[1])
    engine.set(hang=60)
    answers: list[tuple[int, dict[str, Any]]] = []

    def freeze() -> None:
        try:
            sidecar.post("/gc/freeze")
        except urllib.error.HTTPError as error:
            answers.append((error.code, json.loads(error.read())))

    caller = threading.Thread(target=freeze)
    caller.start()
    until(lambda: '"running"' in sidecar.get(f"{sidecar.control}/gc")[1])
    code, took = sidecar.stop()
    caller.join()
    assert code == 0
    assert took < 2
    assert [(status, problem["code"]) for status, problem in answers] == [(504, "outcome_unknown")]
    (_, problem), *_ = answers
    assert "told to stop" in problem["detail"]
    events = [line["event"] for line in sidecar.lines]
    assert events[-2:] == ["operation", "stopped"], sidecar.lines[-1]


def test_it_leaves_within_two_seconds_while_a_client_dawdles(
    serve: Callable[..., Serve], run_dir: Path
) -> None:
    sidecar = serve("--run-dir", str(run_dir))
    port = int(sidecar.control.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"POST /gc/freeze HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        code, took = sidecar.stop()
    assert code == 0
    assert took < 2


def test_it_leaves_within_two_seconds_while_somebody_watches(
    serve: Callable[..., Serve], run_dir: Path
) -> None:
    sidecar = serve("--run-dir", str(run_dir))
    port = int(sidecar.control.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as viewer:
        viewer.sendall(b"GET /gc/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream = b""
        while b"event: state" not in stream:
            stream += viewer.recv(65536)
        code, took = sidecar.stop()
        while more := viewer.recv(65536):
            stream += more
    assert code == 0
    assert took < 2
    assert stream.endswith(b"0\r\n\r\n"), "the stream has its proper end"
    assert [line["event"] for line in sidecar.lines][-1] == "stopped"


def test_flags_come_from_the_environment_too(serve: Callable[..., Serve], run_dir: Path) -> None:
    sidecar = serve(
        GC_SIDECAR_RUN_DIR=str(run_dir), GC_SIDECAR_OPEN_PORT="0", GC_SIDECAR_HOST="localhost"
    )
    assert sidecar.lines[-1]["run_dir"] == str(run_dir)
    assert sidecar.get(f"{sidecar.open}/healthz") == (200, '{\n  "status": "ok"\n}\n')
    code, took = sidecar.stop(signal.SIGINT)
    assert code == 0
    assert took < 2


RunServe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Exit code, standard output and standard error of a `serve` that does not get as far as to listen."""
    for name in os.environ:
        if name.startswith("GC_SIDECAR_"):
            monkeypatch.delenv(name)
    # Logging is the whole process's, and the test's.
    monkeypatch.setattr("gc_sidecar.server.logs.configure_logs", lambda *_: None)

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = main(["serve", *args])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


def test_beyond_loopback_it_does_not_start_without_a_token(
    run_serve: RunServe, tmp_path: Path
) -> None:
    code, _, error = run_serve("--run-dir", "/tmp", "--host", "0.0.0.0")
    assert code == 2
    assert "--token-file" in error
    for content in (None, "", "two words"):
        path = tmp_path / "token"
        if content is not None:
            path.write_text(content)
        code, _, error = run_serve(
            "--run-dir", "/tmp", "--host", "0.0.0.0", "--token-file", str(path)
        )
        assert code == 2
        assert str(path) in error


def test_without_an_engine_it_does_not_start(run_serve: RunServe) -> None:
    code, _, error = run_serve("--port", "0")
    assert code == 2
    assert "--run-dir" in error
    assert "--engine-url" in error
    assert error.startswith("gc-sidecar: serve: ")


def test_a_file_of_the_engines_secret_that_is_not_there_is_said(
    run_serve: RunServe, tmp_path: Path
) -> None:
    path = str(tmp_path / "missing")
    code, _, error = run_serve("--engine-url", "http://a:1", "--engine-token-file", path)
    assert code == 2
    assert f"--engine-token-file {path}: No such file or directory" in error


def test_an_address_that_is_taken_is_said(run_serve: RunServe, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, error = run_serve("--run-dir", str(tmp_path), "--port", port)
    assert code == 1
    assert f"127.0.0.1:{port}" in error


def test_a_second_one_on_the_same_run_directory_refuses_until_the_first_has_ended(
    serve: Callable[..., Serve], run_serve: RunServe, run_dir: Path
) -> None:
    first = serve("--run-dir", str(run_dir))
    code, shown, error = run_serve("--run-dir", str(run_dir), "--port", "0")
    assert (code, shown) == (1, "")
    assert (
        f"gc-sidecar: serve: {run_dir} belongs to the sidecar with pid {first.process.pid} "
        in error
    )
    assert "stop it" in error
    first.process.kill()
    first.process.wait()
    assert serve("--run-dir", str(run_dir)).stop()[0] == 0


def test_the_help_teaches(run_serve: RunServe) -> None:
    code, shown, _ = run_serve("--help")
    assert code == 0
    for word in ("--engine-url", "--run-dir", "--token-file", "curl -X POST", "GC_SIDECAR_RUN_DIR"):
        assert word in shown


def test_a_run_directory_that_is_not_there_is_a_warning_and_the_last_line_tells_what_stays(
    serve: Callable[..., Serve], start_engine: StartEngine, tmp_path: Path
) -> None:
    path = tmp_path / "later"
    sidecar = serve("--run-dir", str(path))
    missing = [line for line in sidecar.lines if line["event"] == "run_dir_missing"]
    assert [(line["level"], line["run_dir"]) for line in missing] == [("warning", str(path))]
    path.mkdir()
    engine = start_engine(run_dir=str(path), workers=1)
    until(lambda: '"expected": 3' in sidecar.get(f"{sidecar.control}/gc")[1])
    sidecar.post("/gc/freeze?owner=me")
    engine.set_process("worker-0-0", leave="rss_growth")
    until(lambda: '"drifted"' in sidecar.get(f"{sidecar.control}/gc")[1])
    assert sidecar.get(f"{sidecar.control}/gc/operations/nobody")[0] == 404
    engine.stop()
    until(lambda: '"acknowledged": 0' in sidecar.get(f"{sidecar.control}/gc")[1])
    with pytest.raises(urllib.error.HTTPError):
        sidecar.post("/gc/maintain?owner=me")
    assert sidecar.stop()[0] == 0
    assert all(line["event"] for line in sidecar.lines), "every line has one"
    gone = [line["message"] for line in sidecar.lines if line["event"] == "process_gone"]
    assert sorted(gone) == [
        "api_server dp0 rank 0 has ended",
        "engine_core dp0 rank 0 has ended",
        "worker dp0 rank 0 has ended",
    ]
    drifts = [line for line in sidecar.lines if line["event"] == "process_drifted"]
    assert len(drifts) == 1, "once, not at every look"
    assert drifts[0]["level"] == "warning"
    assert (drifts[0]["role"], drifts[0]["rank"]) == ("worker", 0)
    assert drifts[0]["reason"].startswith("rss_growth: ")
    levels = {x["kind"]: x["level"] for x in sidecar.lines if x["event"] == "operation"}
    assert levels == {"freeze": "info", "maintain": "warning"}
    last = sidecar.lines[-1]
    assert last["event"] == "stopped"
    assert last["message"].startswith("stopped; the freeze policy of me stays until 20")
    assert last["message"].endswith(last["lease_expires_at"])


def test_silent_connections_to_the_open_listener_harm_nobody_else(
    serve: Callable[..., Serve], run_dir: Path
) -> None:
    sidecar = serve("--run-dir", str(run_dir), "--open-port", "0")
    host, port = sidecar.open.removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(MAXIMUM_CONNECTIONS + 50)]
    try:
        # Those beyond the limit are cut off at once, which is all that there can be to read.
        until(lambda: len(select.select(silent, [], [], 0)[0]) >= 50)
        assert sidecar.get(f"{sidecar.control}/healthz")[0] == 200
    finally:
        for connection in silent:
            connection.close()
    until(lambda: sidecar.get(f"{sidecar.open}/healthz")[0] == 200)


def test_a_connection_that_asks_for_nothing_is_closed(
    serve: Callable[..., Serve], run_dir: Path
) -> None:
    assert SILENCE_S <= 10
    sidecar = serve("--run-dir", str(run_dir), silence_s=0.2)
    host, port = sidecar.control.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /healthz HT")  # half a head, and then nothing
        connection.settimeout(SILENCE_S)
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with (
        listeners._bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
