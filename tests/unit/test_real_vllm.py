"""The helper that starts real vLLMs must leave no process behind, whatever happens.

Tried on a stand-in that has the shape which matters: a server, and a child that ignores SIGTERM.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.vllm import real_vllm
from tests.vllm.real_vllm import EngineFailedError, RealVllm, processes_of_session

STAND_IN = """
import http.server, os, subprocess, sys, time

behaviour = os.environ["STAND_IN"]
if behaviour == "dies":
    sys.exit("no such flag")
stubborn = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(flush=True); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
if behaviour == "hangs":
    time.sleep(600)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


port = next(int(a.removeprefix("--port=")) for a in sys.argv if a.startswith("--port="))
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print("Application startup complete.", flush=True)
server.serve_forever()
"""


class StandIn(RealVllm):
    """Remembers its session, to look for it when the engine has forgotten it."""

    def __init__(self, directory: Path, behaviour: str, **options: object) -> None:
        python = directory / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        (directory / "stand_in.py").write_text(STAND_IN)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {directory}/stand_in.py "$@"\n')
        python.chmod(0o755)
        super().__init__(
            python=python,
            model=directory,
            log_path=directory / "log",
            extra_env={"STAND_IN": behaviour, "PYTHONPATH": "/image"},
            **options,  # type: ignore[arg-type]
        )
        self.session = 0

    def stop(self) -> None:
        self.session = self._process.pid if self._process else self.session
        super().stop()


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_vllm, "STOP_DEADLINE_S", 1.0)


def test_a_child_that_ignores_sigterm_is_killed_and_named(tmp_path: Path) -> None:
    engine = StandIn(tmp_path, "serves")
    with engine:
        server, child = engine.processes()
        assert child.parent == server.pid
        assert "SIG_IGN" in child.title
    assert [survivor.pid for survivor in engine.survivors] == [child.pid]
    assert processes_of_session(engine.session) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    engine = StandIn(tmp_path, "serves")
    with pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
    assert engine.session
    assert processes_of_session(engine.session) == []


def test_an_engine_that_dies_tells_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match=r"status 1(.|\n)*no such flag"):
        StandIn(tmp_path, "dies").__enter__()


def test_an_engine_that_never_answers_is_ended(tmp_path: Path) -> None:
    engine = StandIn(tmp_path, "hangs", start_deadline_s=1.0)
    with pytest.raises(EngineFailedError, match="did not answer within 1 s"):
        engine.__enter__()
    assert engine.session
    assert processes_of_session(engine.session) == []


def test_the_engine_sees_only_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GC_SIDECAR_RUN_DIR", "GC_SIDECAR_POLICY", "VLLM_PLUGINS", "PYTHONPATH"):
        monkeypatch.setenv(name, "/outer")
    assert not [v for v in StandIn(tmp_path, "serves").environment.values() if v == "/outer"]

    engine = StandIn(
        tmp_path, "serves", run_dir=Path("/run-dir"), inject_dir=Path("/inject"), plugins="ours"
    )
    assert engine.environment["GC_SIDECAR_RUN_DIR"] == "/run-dir"
    assert engine.environment["VLLM_PLUGINS"] == "ours"
    assert engine.environment["PYTHONPATH"] == os.pathsep.join(["/inject", "/image"])
