"""`gc-sidecar sweep` as its users run it, on an engine whose pauses are seen: what it says, and how it ends."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.engine import scene
from tests.sidecar_process import SidecarProcess, wait_for
from tests.vllm.scene import Scene, pids_of

# Its heaps are large enough that a full collection is an outlier, and grow fast enough that one comes.
FLAGS = ("--workers=1", "--heap-objects=150000", "--retain-per-step=500", "--step-ms=2")
POINTS = (
    "--prompt-tokens=4",
    "--output-tokens=50",
    "--concurrency=1,2",
    "--requests=8",
    "--rounds=2",
)

pytestmark = pytest.mark.xdist_group("sweep")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, SidecarProcess]]:
    with (
        scene(tmp_path_factory.mktemp("engine"), *FLAGS) as engine,
        engine.sidecar("it") as sidecar,
    ):
        sidecar.wait_for_coverage(3)
        yield engine, sidecar


def command(running: tuple[Scene, SidecarProcess], out: Path, *flags: str) -> list[str]:
    engine, sidecar = running
    return [
        *(sys.executable, "-m", "gc_sidecar", "sweep", f"--out={out}", *POINTS, *flags),
        *(f"--url={sidecar.url}", f"--engine-url={engine.engine.url}"),
    ]


def sweep(
    running: tuple[Scene, SidecarProcess], out: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(running, out, *flags), capture_output=True, text=True, timeout=300, check=False
    )


def policies(out: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((out / "report.json").read_text())
    return {each["policy"]: each for each in report["policies"]}


def newest_window(sidecar: SidecarProcess) -> tuple[str, str]:
    newest = sidecar.get("/gc/windows")[1]["windows"][0]
    return newest["name"], newest["state"]


def test_it_measures_every_policy_and_leaves_the_engine_as_it_was(
    running: tuple[Scene, SidecarProcess], tmp_path: Path
) -> None:
    engine, sidecar = running
    pids = pids_of(sidecar.status())
    before = engine.gc_state(pids)
    done = sweep(running, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "block 6" in done.stderr
    assert "POLICY" in done.stdout
    found = policies(tmp_path / "out")
    assert list(found) == ["off", "freeze", "budget"]
    assert {each["measurements"] for each in found.values()} == {2 * 2 * 8 * 50}
    assert found["off"]["full_collections"] > 0
    assert found["freeze"]["full_collections"] == 0
    assert found["budget"]["full_collections"] > 0
    assert found["off"]["gc_outliers"] > 0
    with (tmp_path / "out" / "measurements.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * 2 * 2 * 8 * 50
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert sidecar.status()["policy"]["mode"] == "off"
    wait_for("all are as found", lambda: engine.gc_state(pids) == before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_one_that_is_stopped_goes_on_where_it_was_and_leaves_normal_gc(
    running: tuple[Scene, SidecarProcess], tmp_path: Path, number: signal.Signals
) -> None:
    _, sidecar = running
    flags = ("--policies=freeze,off", "--json")
    with subprocess.Popen(
        command(running, tmp_path / "out", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        journal = tmp_path / "out" / "sweep.jsonl"
        wait_for(
            "a block is done",
            lambda: journal.exists() and len(journal.read_text().splitlines()) > 2,
            60,
        )
        measured = ("block 4 (freeze)", "open")
        wait_for("it measures", lambda: newest_window(sidecar) == measured, 60)
        process.send_signal(number)
        process.wait(timeout=30)
    if number == signal.SIGKILL:
        # Nobody is there to restore; the lease is short, and whoever goes on ends it first.
        assert sidecar.status()["policy"]["mode"] == "freeze"
    else:
        assert process.returncode == 130
        wait_for("normal GC", lambda: sidecar.status()["policy"]["mode"] == "off")
        assert newest_window(sidecar) == ("block 4 (freeze)", "closed")
    done = sweep(running, tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    assert "goes on with" in done.stderr
    report = json.loads(done.stdout)
    assert {each["measurements"] for each in report["policies"]} == {2 * 2 * 8 * 50}


def test_it_does_not_measure_under_a_policy_of_somebody_else(
    running: tuple[Scene, SidecarProcess], tmp_path: Path
) -> None:
    _, sidecar = running
    assert sidecar.post("/gc/freeze", {"owner": "bench-1"})[0] == 200
    for policy in ("off", "budget"):
        done = sweep(running, tmp_path, f"--policies={policy}", "--fresh")
        assert done.returncode == 1
        assert "under the freeze policy of 'bench-1'" in done.stderr
    assert sidecar.status()["policy"]["owner"] == "bench-1"
    assert sidecar.post("/gc/restore", {"owner": "bench-1"})[0] == 200


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--policies=melt"], 2, "melt is no policy"),
        (["--points=/nonexistent.csv"], 2, "already says"),
        (["--concurrency=0"], 2, "must be at least 1"),
        (["--url=http://127.0.0.1:9"], 3, "no sidecar answers"),
        (["--engine-url=http://127.0.0.1:9"], 1, "no model is known"),
        (["--model=other"], 1, "the engine answered 404"),
        (["--pause-budget=1ms"], 2, "--pause-budget is 1ms"),
        (["--owner=a\nb"], 2, "must be printable"),
    ],
)
def test_what_cannot_be_done_says_why_and_leaves_normal_gc(
    running: tuple[Scene, SidecarProcess], tmp_path: Path, flags: list[str], code: int, told: str
) -> None:
    _, sidecar = running
    arguments = [*command(running, tmp_path, "--policies=budget"), *flags]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert sidecar.status()["policy"]["mode"] == "off"
    assert {*os.listdir(tmp_path)} <= {"sweep.jsonl", ".lock"}
