"""The whole path on a real vLLM with TP=2, plugin transport, no dev mode, beside a user's own extension."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from gc_sidecar.install import install_agent
from gc_sidecar_agent.page import list_pages, read_page
from tests import observing
from tests.page.browser import chromium, tab
from tests.page.story import a_pause_appears_soon, buttons_do_what_the_api_does
from tests.prometheus import Prometheus
from tests.sidecar_process import SidecarProcess, wait_for
from tests.striking import strike
from tests.vllm.real_vllm import MODEL_NAME
from tests.vllm.scene import HELD_OFF, Scene, gen2_counts, pids_of, rows_of, scene

SCHEMA = Path(__file__).parents[2] / "docs" / "report.v1.schema.json"
EVERYONE = {"api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1"}


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Scene]:
    with scene(
        tmp_path_factory.mktemp("tp2"),
        tiny_model,
        tensor_parallel=2,
        # A user's own extension with attributes that bear our names: vLLM must start, and ours must answer.
        worker_extension="test_probe.UserExtension",
    ) as running:
        yield running


@pytest.fixture
def sidecar(tp2: Scene) -> Iterator[SidecarProcess]:
    """One for each test: a run directory has one at a time."""
    with tp2.sidecar("tp2") as running:
        running.wait_for_coverage(4)
        yield running
        code, body = running.post("/gc/restore", {"force": True})
        assert code == 200, body
    tp2.assert_serves()
    tp2.assert_log_is_quiet()


def test_freeze_is_acknowledged_by_every_process(tp2: Scene, sidecar: SidecarProcess) -> None:
    code, body = sidecar.post("/gc/freeze", {"owner": "bench-1"})
    assert code == 200, body
    operation = body["operation"]
    assert operation["state"] == "applied"
    assert {
        f"{row['role']}-{row['dp_rank']}-{row['rank']}" for row in operation["processes"]
    } == EVERYONE
    assert all(row["ok"] for row in operation["processes"])

    status = sidecar.status()
    assert status["coverage"] == {"acknowledged": 4, "expected": 4}
    assert status["transport"] == "plugin"
    assert status["policy"]["owner"] == "bench-1"
    generation = status["policy"]["generation"]
    for row in status["processes"]:
        assert row["state"] == "applied"
        assert row["observed_generation"] == generation
        assert row["gc"]["threshold"][2] == HELD_OFF
    # The pages themselves, and an independent witness in each process.
    assert tp2.run_dir is not None
    for name in list_pages(str(tp2.run_dir)):
        page = read_page(str(tp2.run_dir), name)
        assert page.description["state"]["generation"] == generation
        assert page.numbers["threshold2"] == HELD_OFF
    for name, state in tp2.gc_state(pids_of(status)).items():
        assert state["threshold"][2] == HELD_OFF, name
        assert state["frozen"], name


def test_no_full_collection_happens_while_completions_stream(
    tp2: Scene, sidecar: SidecarProcess
) -> None:
    assert sidecar.post("/gc/freeze")[0] == 200
    before = gen2_counts(sidecar.status())
    assert set(before) == EVERYONE
    texts = tp2.engine.stream_completions(200, max_tokens=8)
    assert len(texts) == 200
    assert gen2_counts(sidecar.status()) == before


def test_maintain_reclaims_a_cycle_that_was_frozen(tp2: Scene, sidecar: SidecarProcess) -> None:
    code, body = sidecar.post("/gc/freeze", {"interval_s": 1})
    assert code == 200, body
    worker = {"worker-0-1": pids_of(sidecar.status())["worker-0-1"]}
    tp2.probe.run(
        "import weakref\n"
        "class Planted: pass\n"
        "planted = Planted()\n"
        "planted.itself = planted\n"
        "witness = weakref.ref(planted)\n",
        worker,
    )
    assert tp2.run_dir is not None
    page = next(n for n in list_pages(str(tp2.run_dir)) if n.startswith("worker-dp0-r1-"))

    def freezes() -> int:
        return read_page(str(tp2.run_dir), page).numbers["freezes"] or 0

    frozen_at_planting = freezes()
    # Two further ticks: the first may have begun before it was planted.
    wait_for("two ticks", lambda: freezes() >= frozen_at_planting + 2)
    alive = "import gc\nresult = witness() is not None"
    tp2.probe.run("del planted", worker)
    assert tp2.probe.run("import gc\ngc.collect()\n" + alive, worker) == {"worker-0-1": True}

    code, body = sidecar.post("/gc/maintain", {"when": "idle"})
    assert code == 200, body
    rows = rows_of(body["operation"])
    assert rows["worker-0-1"]["collected_objects"] >= 1
    assert all(row["pause_s"] > 0.01 for row in rows.values())
    assert tp2.probe.run(alive, worker) == {"worker-0-1": False}
    assert sidecar.status()["coverage"] == {"acknowledged": 4, "expected": 4}


def test_restore_puts_back_what_was_there(tp2: Scene, sidecar: SidecarProcess) -> None:
    pids = pids_of(sidecar.status())
    tp2.probe.run(
        tp2.probe.only(pids["worker-0-0"], "import gc\ngc.set_threshold(650, 9, 8)"), pids
    )
    before = tp2.gc_state(pids)
    assert before["engine_core-0-0"]["frozen"], "vLLM freezes its engine core's heap"
    assert not before["worker-0-0"]["frozen"]
    assert sidecar.post("/gc/freeze")[0] == 200
    assert tp2.gc_state(pids) != before
    code, body = sidecar.post("/gc/restore")
    assert code == 200, body
    assert tp2.gc_state(pids) == before
    assert sidecar.status()["policy"]["mode"] == "off"
    assert sidecar.post("/gc/restore")[0] == 200, "twice is safe"
    assert tp2.gc_state(pids) == before
    tp2.probe.run(
        tp2.probe.only(pids["worker-0-0"], "import gc\ngc.set_threshold(700, 10, 10)"), pids
    )


def test_a_budget_is_kept_by_every_process_until_it_is_restored(
    tp2: Scene, sidecar: SidecarProcess
) -> None:
    pids = pids_of(sidecar.wait_for_coverage(4))
    before = tp2.gc_state(pids)
    code, body = sidecar.put("/gc/policy", {"mode": "budget", "pause_budget_ms": 1000})
    assert code == 200, body
    assert all(state["threshold"][2] == 0 for state in tp2.gc_state(pids).values())
    tp2.engine.stream_completions(8)
    assert sidecar.post("/gc/maintain")[0] == 200
    rows = rows_of(sidecar.status())
    assert {(row["mode"], row["state"]) for row in rows.values()} == {("budget", "applied")}
    assert {row["freezes"]["since_maintain"] for row in rows.values()} == {0}
    assert sidecar.post("/gc/restore")[0] == 200
    wait_for("all are as found", lambda: tp2.gc_state(pids) == before)


def test_a_failing_worker_answers_with_a_code_and_later_calls_stay_in_step(
    tp2: Scene, sidecar: SidecarProcess
) -> None:
    pids = pids_of(sidecar.status())
    worker = pids["worker-0-1"]
    tp2.probe.run(
        tp2.probe.only(
            worker,
            "from gc_sidecar_agent import agent\n"
            "policy = agent.this_process().policy\n"
            "def broken(*args):\n"
            "    raise ZeroDivisionError('made to fail')\n"
            "policy._maintain = broken",
        ),
        pids,
    )
    code, body = sidecar.post("/gc/maintain")
    assert code == 502, body
    rows = rows_of(body["operation"])
    assert rows["worker-0-1"]["code"] == "agent_error"
    assert "made to fail" in rows["worker-0-1"]["detail"]
    assert rows["worker-0-0"]["ok"]
    tp2.probe.run(tp2.probe.only(worker, "del policy._maintain"), pids)
    for number in range(3):
        code, body = sidecar.post("/gc/maintain", {"operation_id": f"after-the-failure-{number}"})
        assert code == 200, body
        assert body["operation"]["id"] == f"after-the-failure-{number}"
        assert all(row["ok"] for row in body["operation"]["processes"])
    assert "gc_sidecar_rpc_desync_total 0.0" in sidecar.get("/metrics", parse=False)[1]


def test_a_freeze_that_fails_leaves_thresholds_as_found_and_says_why(
    tp2: Scene, sidecar: SidecarProcess
) -> None:
    pids = pids_of(sidecar.status())
    before = tp2.gc_state(pids)
    worker = pids["worker-0-1"]
    tp2.probe.run(
        tp2.probe.only(
            worker,
            "import gc\n"
            "real_freeze = gc.freeze\n"
            "def failing_freeze():\n"
            "    raise MemoryError('no freeze today')\n"
            "gc.freeze = failing_freeze",
        ),
        pids,
    )
    code, body = sidecar.post("/gc/freeze")
    assert code == 502, body
    assert body["code"] == "freeze_failed"
    # On the page and in the status, although everything was rolled back since.
    assert tp2.run_dir is not None
    name = next(n for n in list_pages(str(tp2.run_dir)) if n.startswith("worker-dp0-r1-"))
    reason = read_page(str(tp2.run_dir), name).description["state"]["reason"]
    assert reason["code"] == "freeze_failed"
    assert "no freeze today" in rows_of(sidecar.status())["worker-0-1"]["reason"]
    assert rows_of(body["operation"])["worker-0-1"]["code"] == "freeze_failed"
    assert "no freeze today" in rows_of(body["operation"])["worker-0-1"]["detail"]
    tp2.probe.run(tp2.probe.only(worker, "gc.freeze = real_freeze"), pids)

    assert tp2.gc_state(pids) == before, "all were rolled back"
    status = sidecar.status()
    assert status["policy"]["mode"] == "off"
    assert all(row["mode"] == "off" for row in status["processes"])
    exits = re.search(
        r'gc_sidecar_policy_exits_total\{[^}]*rank="1"[^}]*reason="freeze_failed"[^}]*\} 1\.0'
        r'|gc_sidecar_policy_exits_total\{[^}]*reason="freeze_failed"[^}]*rank="1"[^}]*\} 1\.0',
        sidecar.get("/metrics", parse=False)[1],
    )
    assert exits


def test_a_tick_that_fails_ends_the_policy_in_its_process(
    tp2: Scene, sidecar: SidecarProcess
) -> None:
    pids = pids_of(sidecar.status())
    before = tp2.gc_state(pids)
    worker = pids["worker-0-0"]
    assert sidecar.post("/gc/freeze", {"interval_s": 1})[0] == 200
    tp2.probe.run(
        tp2.probe.only(
            worker,
            "import gc\n"
            "real_freeze = gc.freeze\n"
            "def failing_freeze():\n"
            "    raise MemoryError('no freeze today')\n"
            "gc.freeze = failing_freeze",
        ),
        pids,
    )

    def row() -> dict[str, object]:
        return rows_of(sidecar.status())["worker-0-0"]

    wait_for("the tick fails", lambda: row()["mode"] == "off")
    assert row()["state"] in ("drifted", "refused")
    assert "no freeze today" in str(row())
    tp2.probe.run(tp2.probe.only(worker, "gc.freeze = real_freeze"), pids)
    assert tp2.gc_state({"worker-0-0": worker}) == {"worker-0-0": before["worker-0-0"]}


def test_the_board_alone_does_all_of_it(tp2: Scene) -> None:
    with tp2.sidecar("board", engine=False) as board:
        status = board.wait_for_coverage(4)
        pids = pids_of(status)
        before = tp2.gc_state(pids)
        assert status["transport"] == "board"
        code, body = board.post("/gc/freeze")
        assert code == 200, body
        assert len(body["operation"]["processes"]) == 4
        assert all(row["ok"] for row in body["operation"]["processes"])
        for state in tp2.gc_state(pids).values():
            assert state["threshold"][2] == HELD_OFF
        counts = gen2_counts(board.status())
        code, body = board.post("/gc/maintain")
        assert code == 200, body
        assert all(row["pause_s"] > 0.01 for row in body["operation"]["processes"])
        assert gen2_counts(board.status()) == {name: n + 1 for name, n in counts.items()}
        code, body = board.post("/gc/restore")
        assert code == 200, body
        wait_for(
            "no collection is pending",
            lambda: not any(row["collect_pending"] for row in board.status()["processes"]),
        )
        assert tp2.gc_state(pids) == before
    tp2.assert_serves()
    tp2.assert_log_is_quiet()


def test_a_lease_that_ends_restores_every_process_without_a_sidecar(
    tp2: Scene,
) -> None:
    with tp2.sidecar("short-lived") as short_lived:
        pids = pids_of(short_lived.wait_for_coverage(4))
        before = tp2.gc_state(pids)
        assert short_lived.post("/gc/freeze", {"lease_s": 3, "force": True})[0] == 200
    wait_for("all are as found", lambda: tp2.gc_state(pids) == before, deadline_s=10)
    tp2.assert_serves()


def test_the_callback_makes_no_system_call_in_a_worker(tp2: Scene, sidecar: SidecarProcess) -> None:
    pids = pids_of(sidecar.status())
    worker = pids["worker-0-0"]
    trace = tp2.directory / "strace.txt"
    with trace.open("wb") as out:
        strace = subprocess.Popen(
            ["strace", "-f", "-p", str(worker)], stdin=subprocess.DEVNULL, stderr=out
        )
    try:
        wait_for("strace is attached", lambda: b"attached" in trace.read_bytes())
        # On one thread, between two calls that are easy to find: young and full collections alike.
        code = (
            "import gc, os\n"
            "os.getppid()\n"
            "for _ in range(2000):\n"
            "    gc.collect(0)\n"
            "gc.collect()\n"
            "os.getppid()\n"
        )
        tp2.probe.run(tp2.probe.only(worker, code), {"worker-0-0": worker}, deadline_s=120)
        wait_for("it is all written", lambda: trace.read_bytes().count(b"getppid(") >= 2)
    finally:
        strace.terminate()
        strace.wait()
    lines = trace.read_text(errors="replace").splitlines()
    first, last = [number for number, line in enumerate(lines) if "getppid(" in line]
    thread = lines[first].split("]")[0] + "]"
    assert lines[last].startswith(thread)
    calls = [line for line in lines[first + 1 : last] if line.startswith(thread)]
    # Others run meanwhile and want the GIL: handing it over is CPython's own doing, not the callback's.
    not_its_own = re.compile(r"futex\(|futex resumed|getppid resumed")
    of_the_callback = [line for line in calls if not not_its_own.search(line)]
    assert of_the_callback == []


def test_pauses_are_those_that_a_witness_saw_and_every_panel_and_rule_has_data(
    tp2: Scene, sidecar: SidecarProcess, tmp_path: Path
) -> None:
    target = sidecar.url.removeprefix("http://")
    with Prometheus(target, tmp_path, observing.RULES) as prometheus:
        verdict = observing.tell_the_story(tp2, sidecar)
        assert verdict["latency"]["tokens"] > 0, verdict["latency"]
        observing.assert_agrees_with_pages(prometheus, sidecar)
        observing.assert_every_panel_has_data(prometheus, sidecar)
        observing.assert_every_rule_has_data(prometheus)


def test_vllms_own_benchmark_under_run_has_a_verdict_and_a_report(
    tp2: Scene, sidecar: SidecarProcess, tiny_model: Path, vllm_python: Path, tmp_path: Path
) -> None:
    pids = pids_of(sidecar.status())
    before = tp2.gc_state(pids)
    port = tp2.engine.url.rpartition(":")[2]
    bench = [
        *(str(vllm_python.parent / "vllm"), "bench", "serve", "--backend=vllm", f"--port={port}"),
        *(
            f"--model={MODEL_NAME}",
            f"--tokenizer={tiny_model}",
            "--dataset-name=random",
            "--num-prompts=16",
            "--seed=1",
        ),
        *("--random-input-len=8", "--random-output-len=32", "--ignore-eos", "--save-result"),
        *(f"--result-dir={tmp_path}", "--result-filename=bench.json"),
    ]
    program = install_agent(tmp_path / "tree").directory / "bin" / "gc-sidecar"
    run = [
        *(str(program), "run", "--require-clean", "--max-pause=100ms", "--observe-client"),
        *(f"--url={sidecar.url}", f"--report={tmp_path / 'r.json'}", "--", *bench),
    ]
    environment = {**os.environ, "GC_SIDECAR_PYTHON": str(vllm_python)}
    done = subprocess.run(
        run, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Successful requests:" in done.stdout
    assert "tokens: " in done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["failed"]) == (16, 0), done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert report["verdict"] == {**report["verdict"], "state": "clean", "reasons": []}
    assert report["client"]["count"] > 0, "the benchmark's own full collections are seen"
    (of_engine,) = report["sidecars"]
    assert of_engine["coverage"] == {"acknowledged": 4, "expected": 4}
    assert of_engine["window"]["latency"]["tokens"] > 100
    for process in of_engine["processes"]:
        assert process["gc"]["during"]["threshold"][2] == HELD_OFF
        assert process["gc"]["after"] == process["gc"]["before"]
        assert process["pauses"]["gen2"]["count"] == 0
    assert tp2.gc_state(pids) == before


def test_the_page_shows_it_and_its_buttons_do_it(tp2: Scene, sidecar: SidecarProcess) -> None:
    with chromium() as browser, tab(browser, sidecar.url) as shown:
        shown.open()
        a_pause_appears_soon(shown, tp2, sidecar)
        buttons_do_what_the_api_does(shown, tp2, sidecar)


def test_a_damaged_page_of_a_stopped_process_is_told(tp2: Scene, sidecar: SidecarProcess) -> None:
    assert tp2.run_dir is not None
    pid = pids_of(sidecar.status())["worker-0-1"]
    name = next(n for n in list_pages(str(tp2.run_dir)) if n.startswith("worker-dp0-r1-"))
    strike(pid, signal.SIGSTOP)  # it cannot make a new one meanwhile
    try:
        (tp2.run_dir / name).write_bytes(b"")

        def told() -> list[str]:
            return [reason["detail"] for reason in sidecar.status()["reasons"]]

        wait_for("it is told", lambda: any(name in d and "truncated" in d for d in told()))
    finally:
        os.kill(pid, signal.SIGCONT)
    sidecar.wait_for_coverage(4)


def test_a_page_truncated_while_it_is_in_use_harms_nobody(
    tp2: Scene, sidecar: SidecarProcess
) -> None:
    assert tp2.run_dir is not None
    pids = pids_of(sidecar.status())
    names = set(list_pages(str(tp2.run_dir)))
    for name in names:
        (tp2.run_dir / name).write_bytes(b"")
    wait_for(
        "new pages", lambda: len(set(list_pages(str(tp2.run_dir))) - names) == 4, deadline_s=15
    )
    tp2.probe.run("import gc\ngc.collect()", pids)
    sidecar.wait_for_coverage(4)
    assert pids_of(sidecar.status()) == pids, "no process was lost"
