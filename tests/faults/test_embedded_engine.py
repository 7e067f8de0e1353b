"""Processes that die, and the engine that must not outlive them nor leave anything behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gc_sidecar.embedded.launcher import main
from tests.embedded.engine import EmbeddedEngine, gone
from tests.sidecar_process import wait_for

FLAGS = ("--workers=2", "--heap-objects=1000", "--dev-mode")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedEngine]:
    flags = (*FLAGS, "--data-parallel=2", "--api-servers=2")
    with EmbeddedEngine(*flags, log_path=tmp_path / "log") as running:
        yield running


def everyone(engine: EmbeddedEngine) -> list[int]:
    pids = [process.pid for process in engine.processes()]
    assert len(pids) == 1 + 2 + 2 + 4
    return pids


@pytest.mark.parametrize("victim", ["launcher", "engine_core dp1", "worker dp1 r1", "api_server 1"])
def test_when_one_is_killed_none_is_left(engine: EmbeddedEngine, victim: str) -> None:
    pids = everyone(engine)
    (pid,) = engine.pids(victim)
    os.kill(pid, signal.SIGKILL)
    assert gone(pids), engine.processes()
    if victim != "launcher":
        assert engine.launcher.wait() == 1


def test_sigterm_ends_everything_also_in_the_middle_of_a_stream(engine: EmbeddedEngine) -> None:
    pids = everyone(engine)
    with engine_stream(engine):
        engine.launcher.terminate()
        assert gone(pids), engine.processes()
    assert engine.launcher.wait() == 0
    assert "Traceback" not in engine.log_text()


def test_sigterm_while_it_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    engine = EmbeddedEngine("--workers=4", "--heap-objects=3000000", log_path=log)
    engine._is_ready = lambda: bool(engine.pids("worker"))  # type: ignore[method-assign]
    with engine:
        pids = [process.pid for process in engine.processes()]
        engine.launcher.terminate()
        assert gone(pids)
        assert engine.launcher.wait() == 0


def test_an_api_server_says_why_before_it_ends(tmp_path: Path) -> None:
    with (
        EmbeddedEngine(*FLAGS, log_path=tmp_path / "log") as engine,
        engine_stream(engine) as ended,
    ):
        (core,) = engine.pids("engine_core")
        os.kill(core, signal.SIGKILL)
        wait_for("it is unhealthy", lambda: engine.request("GET", "/health")[0] == 503)
        assert engine.request("POST", "/v1/completions", {"prompt": "x"})[0] == 500
        assert engine.request("POST", "/collective_rpc", {"method": "check_health"})[0] == 500
        assert ended.wait(5.0), "the stream ends, too"


def test_an_extension_whose_names_clash_keeps_it_from_starting(tmp_path: Path) -> None:
    (tmp_path / "clashing.py").write_text("class Extension:\n    def gc_state(self): pass\n")
    command = [sys.executable, "-m", "gc_sidecar.embedded", "--port=0", "--workers=1"]
    command.append("--worker-extension-cls=clashing.Extension")
    result = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 1
    assert "already has an attribute gc_state" in result.stderr


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "gc_sidecar.embedded", f"--port={port}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in result.stderr


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        (["--workers=0"], {}, "--workers"),
        (["--heap-objects=many"], {}, "--heap-objects"),
        (["--step-ms=nan"], {}, "--step-ms"),
        (["--run-dir=/nowhere"], {}, "/nowhere"),
        (["--start-frozen=some"], {}, "none, core, all"),
        ([], {"GC_SIDECAR_WORKERS": "none"}, "GC_SIDECAR_WORKERS"),
        ([], {"GC_SIDECAR_EMBEDDED_PORT": "http"}, "GC_SIDECAR_EMBEDDED_PORT"),
        ([], {"GC_SIDECAR_DEV_MODE": "maybe"}, "GC_SIDECAR_DEV_MODE"),
    ],
)
def test_wrong_usage_names_the_flag_or_variable(
    flags: list[str],
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


class engine_stream:
    """A long stream that somebody reads; the event is set when it has ended."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> threading.Event:
        self._thread.start()
        wait_for("it runs", lambda: self._engine.metric("vllm:num_requests_running") == 1)
        return self._ended

    def __exit__(self, *_: object) -> None:
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        try:
            self._engine.stream_completions(1, max_tokens=1_000_000, concurrency=1)
        except (RuntimeError, OSError):
            pass
        self._ended.set()
