"""`gc-sidecar demo`, from the first line to the last, with small heaps so that it is quick."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from gc_sidecar.__main__ import main
from gc_sidecar.commands import demo
from tests.vllm.real_vllm import processes_of_session


def test_the_whole_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--workers=2", "--heap-objects=100000", "--retain-per-step=2000", "--step-ms=2")
    monkeypatch.setattr(demo, "EMBEDDED_FLAGS", (*flags, "--free-running"))
    monkeypatch.setattr(demo, "EMBEDDED_WORKERS", 2)
    monkeypatch.setattr(demo, "RUNGS", 2)
    started: list[demo.Stage] = []

    class Remembered(demo.Stage):
        def stop(self) -> None:
            started.append(self)
            super().stop()

    monkeypatch.setattr(demo, "Stage", Remembered)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main(["demo"])
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert "embedded (not a vLLM)" in out
    assert len(re.findall(r"full collection \d: .* objects", out)) >= 2
    assert "Every process acknowledged: coverage 4 of 4" in out
    flat = " ".join(out.split())
    assert re.search(
        r"\d+ [mu]?s of [\d.]+ s were GC \([\d.]+ %\), and its longest pause took", flat
    )
    assert "No process ran a full collection meanwhile." in out
    assert re.search(r"[\d,]+ objects reclaimed", out)
    assert "Normal GC again, in every process." in out
    (stage,) = started
    assert [processes_of_session(process.pid) for process in stage.started] == [[], []]
    assert not Path(stage.directory).exists()
    assert not Path(stage.run_dir).exists()
