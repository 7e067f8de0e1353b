"""The whole `gc-sidecar` command: its verbs, its help, and that what is heavy is loaded late."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar import __version__
from gc_sidecar.__main__ import VERBS, main
from gc_sidecar.commands import demo
from gc_sidecar_agent.cli import PACKAGE_VERBS
from gc_sidecar_agent.cli import VERBS as CLIENT_VERBS
from gc_sidecar_agent.client import Client
from tests.unit.agent.test_client import Reply, StandInSidecar

SOURCE = Path(__file__).resolve().parents[2] / "sidecar"
HEAVY = ("fastapi", "uvicorn", "httpx", "pydantic", "prometheus_client")


def test_no_verb_shows_all_of_them_and_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    err = capsys.readouterr().err
    assert all(f"    {verb}" in err for verb in VERBS)


def test_help_is_exit_code_0_and_explains_the_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Python GC control for vLLM" in out
    assert "exit codes:" in out


def test_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gc-sidecar {__version__}\n"


def test_an_unknown_verb_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["thaw"]) == 2
    assert "thaw" in capsys.readouterr().err


def test_every_verb_that_the_thin_client_lacks_is_told_there() -> None:
    assert set(PACKAGE_VERBS) == set(VERBS) - set(CLIENT_VERBS)


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"usage: gc-sidecar {verb}" in capsys.readouterr().out


def test_a_verb_gets_its_arguments_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    module = types.ModuleType("gc_sidecar.commands.serve")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--port", type=int)

    def run(args: argparse.Namespace) -> int:
        seen.append(args)
        return 7

    module.__dict__.update(add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, "gc_sidecar.commands.serve", module)
    assert main(["serve", "--port", "9470"]) == 7
    assert seen[0].port == 9470


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("gc_sidecar.commands.serve")

    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    module.__dict__.update(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "gc_sidecar.commands.serve", module)
    assert main(["serve"]) == 130


@pytest.mark.parametrize("arguments", [["status", "--url", "http://127.0.0.1:1"], ["--help"]])
def test_what_the_server_needs_is_not_loaded_for_the_others(arguments: list[str]) -> None:
    code = (
        "import sys; from gc_sidecar.__main__ import main;"
        f"main({arguments!r}); print('LOADED', *sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = result.stdout.rpartition("LOADED")[2].split()
    assert "gc_sidecar_agent.cli" in loaded
    assert not set(HEAVY) & set(loaded)


def test_it_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "gc_sidecar", "--version"],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"gc-sidecar {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], [], ["a", "b"]], ids=str)
def test_the_maker_of_the_model_takes_no_flag_for_a_directory(
    arguments: list[str], tmp_path: Path
) -> None:
    maker = Path(demo.__file__).parents[1] / "tiny_model.py"
    command = [sys.executable, str(maker), *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "usage: tiny_model.py DIRECTORY\n"
    assert list(tmp_path.iterdir()) == []


def test_help_tells_what_an_interruption_ends_with(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("demo", "freeze", "status"):
        assert main([verb, "--help"]) == 0
        assert "\n  130  interrupted by Ctrl-C" in capsys.readouterr().out


# --- the demo, with a stand-in for each of the two that it starts ---

PLACES = [("api_server", 0), ("engine_core", 0), ("worker", 0), ("worker", 1)]
CHANGE = "-X POST 'http://sidecar/gc/{}?format=table'"
CURLS = [
    CHANGE.format("maintain"),
    CHANGE.format("freeze"),
    "-X POST 'http://sidecar/gc/windows?window_id=frozen&format=table'",
    "http://engine/v1/completions -d '{...}'   # 100 times",
    "-X POST 'http://sidecar/gc/windows/frozen/close?format=table'",
    "http://sidecar/gc",
    CHANGE.format("maintain"),
    CHANGE.format("restore"),
    "http://sidecar/gc",
]


def status(
    mode: str = "off", third: int = 10, full: int | None = 3, acknowledged: int = 4
) -> Reply:
    """What the sidecar says of four processes that all look alike."""
    rows = [
        {
            "role": role,
            "dp_rank": 0,
            "rank": rank,
            "mode": mode,
            "gc": {"enabled": True, "threshold": [700, 10, third]},
            "pauses": {"gen2": {"count": full}},
        }
        for role, rank in PLACES
    ]
    coverage = {"acknowledged": acknowledged, "expected": 4}
    return Reply(body={"coverage": coverage, "transport": "plugin", "processes": rows})


def operation(kind: str, **rest: Any) -> Reply:
    """An operation that four processes did."""
    rows = [
        {"role": role, "dp_rank": 0, "rank": rank, "ok": True, "pause_s": 0.3 + rank / 100}
        | {"collected_objects": 250, "resident_delta_bytes": -1024}
        for role, rank in PLACES
    ]
    done = {"id": "op", "kind": kind, "state": "applied", "duration_s": 0.4, "processes": rows}
    return Reply(body={"operation": done | rest})


WINDOW = {
    "id": "frozen",
    "state": "closed",
    "duration_s": 2.0,
    "verdict": {
        "clean": True,
        "stalls": [{"dp_rank": 0, "stall_s": 0.004, "share": 0.002}],
        "longest_pause": {"duration_s": 0.0012},
    },
}

STORY = [
    status(),
    operation("maintain"),
    operation("freeze"),
    status("freeze", 1 << 30, full=4),
    Reply(201, {"window": {"id": "frozen"}}),
    Reply(body={"window": WINDOW}),
    status("freeze", 1 << 30, full=4),
    operation("maintain"),
    operation("restore"),
    status(full=6),
]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that is dead and not reaped does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return fields[0] not in "ZX"


def play(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *changes: tuple[int, Reply]
) -> tuple[int, list[Path]]:
    """Run the demo with some replies of the story changed: its exit code, and what it left behind."""
    replies = list(STORY)
    for position, reply in changes:
        replies[position] = reply
    monkeypatch.setattr(demo, "MEMORY_FILE_SYSTEM", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "stream_completions", lambda engine: 1600)
    monkeypatch.setattr(demo, "SETTLE_S", 0.0)
    with StandInSidecar(*replies) as sidecar:

        def start_engine(stage: demo.Stage) -> demo.Engine:
            stage.start("engine", ["sh", "-c", "echo the engine says; exec sleep 600"], os.environ)
            (stage.directory / "model").mkdir()
            (stage.directory / "socket").touch()
            time.sleep(0.2)
            return demo.Engine("http://engine", "tiny", len(PLACES))

        monkeypatch.setitem(demo.ENGINES, "vllm", start_engine)
        monkeypatch.setattr(demo, "start_sidecar", lambda stage, engine: Client(sidecar.url))
        before = signal.getsignal(signal.SIGTERM)
        try:
            code = main(["demo", "--engine", "vllm"])
        finally:
            signal.signal(signal.SIGTERM, before)
    return code, list(tmp_path.iterdir())


def test_the_demo_tells_the_story_with_curl_lines_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, tmp_path) == (0, [])
    out = capsys.readouterr().out
    curls = [line for line in out.splitlines() if line.startswith("  $ curl")]
    assert [re.sub(r"127\.0\.0\.1:\d+", "sidecar", line) for line in curls] == [
        f"  $ curl {curl}" for curl in CURLS
    ]
    # What ?format=table prints, and what is no answer of the sidecar's.
    assert "freeze applied by 4 of 4 processes in 400 ms" in out
    assert "In short, the GC thresholds of each process:" in out
    assert "The engine takes no step for 310 ms" in out
    assert "coverage 4 of 4, after 400 ms" in out
    said = " ".join(out.split())
    assert "window frozen is closed: clean, 2.00 s" in said
    assert "4.00 ms of 2.00 s were GC (0.20 %), and its longest pause took 1.20 ms" in said
    assert "1,000 objects reclaimed, memory -4.00 KiB, longest pause 310 ms" in said
    assert "Objects freed are not bytes returned" in said
    assert re.search(r"worker +1 +700,10,10 +700,10,1<<30 +700,10,10\n", out)


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_demo_keeps_within_the_terminals_width(
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert play(monkeypatch, tmp_path) == (0, [])
    lines = capsys.readouterr().out.splitlines()
    # A command is to be copied as it is.
    prose = [line for line in lines if not line.startswith("  $ ")]
    thresholds = [line for line in prose if "1<<30" in line or "AS FOUND" in line]
    assert max(len(line) for line in prose if line not in thresholds) <= min(columns, 79)
    assert max(map(len, thresholds)) <= max(columns, 60)
    assert any(("COLLECTED" in line) == (columns >= 60) for line in lines if "RESULT" in line)


@pytest.mark.parametrize(
    ("position", "reply", "said"),
    [
        (1, operation("maintain", state="failed", detail="no answer"), "no answer"),
        (2, operation("freeze", state="partial"), "freeze was not applied"),
        (2, Reply(502, {"code": "incomplete_coverage", "detail": "3 of 4"}), "3 of 4"),
        (3, status("freeze", 1 << 30, 4, acknowledged=3), "3 of 4 processes acknowledged"),
        (3, status("freeze", 10, 4), "still has automatic full collections"),
        (4, Reply(409, {"code": "too_many_windows", "detail": "16 are open"}), "16 are open"),
        (6, status("freeze", 1 << 30, full=5), "a full collection ran while frozen"),
        (3, status("freeze", 1 << 30, full=None), "a count is missing"),
        (3, Reply(body="nonsense"), "does not answer like a gc-sidecar"),
        (9, status(third=1 << 30), "not as it was found"),
        (9, status("freeze"), "not as it was found"),
    ],
)
def test_the_demo_fails_where_a_step_does_not_hold_and_keeps_the_logs(
    position: int,
    reply: Reply,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, (left,) = play(monkeypatch, tmp_path, (position, reply))
    assert code == 1
    assert [path.name for path in left.iterdir()] == ["engine.log"]
    assert (left / "engine.log").read_text() == "the engine says\n"
    err = capsys.readouterr().err
    assert said in err
    assert "the engine says" in err
    assert str(left) in err


def test_the_demo_ends_what_it_started_and_what_that_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "STOP_DEADLINE_S", 0.1)
    stage = demo.Stage(tmp_path, tmp_path, None)
    deaf = "trap '' TERM; sleep 600 & echo $! >child; sleep 600"
    parent = stage.start("deaf", ["sh", "-c", deaf], os.environ)
    child = tmp_path / "child"
    wait_until(lambda: child.exists() and child.read_text().strip() != "")
    stage.stop()
    assert parent.returncode == -signal.SIGKILL
    wait_until(lambda: not is_alive(int(child.read_text())))


def test_the_demo_stops_everything_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(client: Client, verb: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_change", interrupt)
    assert play(monkeypatch, tmp_path) == (130, [])
    captured = capsys.readouterr()
    assert captured.out.endswith("\n\n")  # the live line is ended
    assert captured.err == "gc-sidecar: demo: interrupted; engine and sidecar are stopped\n"


@pytest.mark.parametrize("arguments", [[], ["--vllm-python", "/no/such/python"]], ids=str)
def test_the_demo_without_a_vllm_is_wrong_usage(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("GC_SIDECAR_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", "--engine", "vllm", *arguments]) == 2
    captured = capsys.readouterr()
    assert "make vllm" in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []
