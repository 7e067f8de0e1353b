"""What the embedded engine is: fast to start, in lockstep, with vLLM's routes as far as they are used."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.engine import EmbeddedEngine
from tests.sidecar_process import wait_for
from tests.striking import strike

STALL_S = 0.25
# Longer than any token takes on a machine however busy: a bound of vLLM's histogram, and a stall beyond it.
LATE_S = 0.5
LATE_STALL_S = 0.75


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    flags = ("--workers=2", "--heap-objects=2000", "--dev-mode", "--max-num-seqs=2")
    log = tmp_path_factory.mktemp("engine") / "log"
    with EmbeddedEngine(*flags, log_path=log) as running:
        yield running


def stalled(engine: EmbeddedEngine, since: int = 0) -> list[bool]:
    """For each engine core whether one of its steps after number `since` took as long as a stall."""
    return [any(step[2] >= STALL_S * 1e9 for step in steps) for steps in engine.steps(since)]


def test_it_starts_in_two_seconds_or_as_many_imports_of_its_server_take(tmp_path: Path) -> None:
    # Other tests may be running, which hold up an import just as much; alone it takes half a second.
    took = []
    for number in range(3):
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import fastapi, uvicorn"], check=True)
        import_s = time.monotonic() - started
        with EmbeddedEngine("--workers=4", log_path=tmp_path / f"log{number}") as engine:
            took.append((engine.start_s, max(2.0, 4 * import_s)))
        if took[-1][0] < took[-1][1]:
            return
    raise AssertionError(took)


def test_its_processes_can_be_told_apart(engine: EmbeddedEngine) -> None:
    titles = sorted(process.title for process in engine.processes())
    assert titles == [
        "embedded api_server 0",
        "embedded engine_core dp0",
        "embedded launcher",
        "embedded worker dp0 r0",
        "embedded worker dp0 r1",
    ]


def test_a_pause_in_one_worker_holds_up_the_step_of_all(engine: EmbeddedEngine) -> None:
    engine.complete("warm", 4)
    last = engine.steps()[0][-1][0]
    engine.rpc("stall_next_step", [1, STALL_S])
    engine.complete("hello", 4)
    durations = [step[2] / 1e9 for step in engine.steps(last)[0]]
    assert len(durations) == 4
    assert durations[0] >= STALL_S
    assert max(durations[1:]) < STALL_S


@pytest.mark.parametrize("independent", [False, True])
def test_data_parallel_ranks_step_together_unless_they_are_independent(
    tmp_path: Path, independent: bool
) -> None:
    flags = ["--workers=2", "--data-parallel=2", "--heap-objects=2000", "--dev-mode"]
    flags += ["--independent-dp"] if independent else []
    with EmbeddedEngine(*flags, log_path=tmp_path / "log") as engine:
        # One request at a time goes to the first rank alone.
        engine.complete("hello", 8)
        engine.rpc("stall_next_step", [1, STALL_S])
        engine.complete("hello", 8)
        steps = engine.steps()
        assert len(steps[0]) == 16
        if independent:
            assert steps[1] == []
            return
        # The rank without requests makes every step as well, and ends each one with the other.
        assert len(steps[1]) == 16
        begins = [min(rank[n + 1][1] for rank in steps) for n in range(15)]
        ends = [max(rank[n][1] + rank[n][2] for rank in steps) for n in range(15)]
        assert all(began >= ended for began, ended in zip(begins, ends, strict=True))
        # It planted itself in both ranks, for the call reaches both.
        assert stalled(engine) == [True, True]


def test_a_pause_in_one_rank_holds_up_the_other(tmp_path: Path) -> None:
    flags = (
        "--workers=1",
        "--data-parallel=2",
        "--heap-objects=2000",
        "--dev-mode",
        "--free-running",
    )
    with EmbeddedEngine(*flags, log_path=tmp_path / "log") as engine:
        wait_for("both step", lambda: all(len(steps) > 10 for steps in engine.steps()))
        before = [steps[-1][0] for steps in engine.steps()]
        engine.rpc("stall_next_step", [0, STALL_S, 1])
        wait_for("the stall", lambda: stalled(engine, min(before))[1])
        numbers = [{step[0]: step for step in steps} for steps in engine.steps()]
        stalled_step = next(n for n, s in sorted(numbers[1].items()) if s[2] >= STALL_S * 1e9)
        # Both begin the next step only after it.
        ended = numbers[1][stalled_step][1] + numbers[1][stalled_step][2]
        wait_for("the next step", lambda: engine.steps(stalled_step)[0] != [])
        assert engine.steps(stalled_step)[0][0][1] >= ended
        assert numbers[0][stalled_step][2] < STALL_S * 1e9, "it was in the second rank alone"


def test_steps_come_from_requests_alone(engine: EmbeddedEngine) -> None:
    before = len(engine.steps()[0])
    assert engine.complete("hello", 5) == " 1 2 3 4 5"
    assert len(engine.steps()[0]) == before + 5


def test_concurrent_requests_share_steps_and_those_over_the_limit_wait(
    engine: EmbeddedEngine,
) -> None:
    before = len(engine.steps()[0])
    engine.stream_completions(4, max_tokens=30, concurrency=4)
    steps = len(engine.steps()[0]) - before
    # Two at a time: half of the 120 tokens' steps, give or take the moment at which each arrives.
    assert 60 <= steps < 100


def test_what_runs_and_waits_can_be_seen(engine: EmbeddedEngine) -> None:
    connections = [http.client.HTTPConnection("127.0.0.1", engine.port) for _ in range(3)]
    body = json.dumps({"prompt": "long", "max_tokens": 100_000, "stream": True})
    for connection in connections:
        connection.request("POST", "/v1/completions", body)
    running, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"
    wait_for("two run", lambda: engine.metric(running) == 2 and engine.metric(waiting) == 1)
    for connection in connections:
        connection.close()
    # A client that leaves ends its request.
    wait_for("none is left", lambda: engine.metric(running) + engine.metric(waiting) == 0)


def test_counts_are_down_when_the_last_token_has_come(engine: EmbeddedEngine) -> None:
    for _ in range(10):
        engine.complete("hello", 2)
        assert engine.metric("vllm:num_requests_running") == 0


def late_tokens(engine: EmbeddedEngine) -> list[tuple[int, int]]:
    """For each engine core how many tokens came LATE_S or more after the one before, of how many."""
    lines = engine.request("GET", "/metrics")[1].decode().splitlines()

    def count(of: str) -> int:
        (value,) = (line.split()[-1] for line in lines if line.startswith(of))
        return int(value)

    counts = []
    for index in range(len(engine.steps())):
        labels = f'{{engine="{index}",model_name="embedded"'
        name = "vllm:inter_token_latency_seconds"
        in_time = count(f'{name}_bucket{labels},le="{LATE_S}"}} ')
        all_tokens = count(f"{name}_count{labels}}} ")
        counts.append((all_tokens - in_time, all_tokens))
    return counts


def test_inter_token_latency_is_that_of_the_engine_core_which_made_the_token(
    tmp_path: Path,
) -> None:
    flags = ["--workers=1", "--data-parallel=2", "--independent-dp", "--heap-objects=2000"]
    with EmbeddedEngine(*flags, "--dev-mode", log_path=tmp_path / "log") as engine:
        assert late_tokens(engine) == [(0, 0), (0, 0)]
        connections = [http.client.HTTPConnection("127.0.0.1", engine.port) for _ in range(2)]
        body = json.dumps({"prompt": "long", "max_tokens": 100_000, "stream": True})
        for connection in connections:
            connection.request("POST", "/v1/completions", body)
        wait_for("both make tokens", lambda: min(n for _, n in late_tokens(engine)) > 10)
        before = late_tokens(engine)
        engine.rpc("stall_next_step", [0, LATE_STALL_S, 1])
        wait_for("a late token", lambda: late_tokens(engine)[1][0] > before[1][0])
        assert late_tokens(engine)[0][0] == before[0][0]

        # A pause of the API server is none of an engine core's: both go on meanwhile.
        before = late_tokens(engine)
        (server,) = engine.pids("api_server")
        strike(server, signal.SIGSTOP)
        time.sleep(LATE_STALL_S)
        os.kill(server, signal.SIGCONT)
        wait_for(
            "tokens of the pause",
            lambda: all(
                now[1] > then[1] + 20 for now, then in zip(late_tokens(engine), before, strict=True)
            ),
        )
        assert [late for late, _ in late_tokens(engine)] == [late for late, _ in before]
        for connection in connections:
            connection.close()


def test_the_routes_that_vllm_has(engine: EmbeddedEngine) -> None:
    assert engine.get_json("/v1/models")["data"][0]["id"] == "embedded"
    assert engine.get_json("/version")["version"].startswith("embedded ")
    config = engine.get_json("/server_info?config_format=json")["vllm_config"]
    assert config["parallel_config"]["world_size"] == 2
    assert engine.request("POST", "/v1/completions", {"max_tokens": 3})[0] == 400
    assert engine.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0})[0] == 400
    assert engine.request("POST", "/v1/completions", {"prompt": "x", "model": "y"})[0] == 404
    assert engine.request("POST", "/collective_rpc", [])[0] == 400
    assert engine.request("POST", "/collective_rpc", {})[0] == 400
    engine.complete("hello", 2)
    assert engine.metric("vllm:e2e_request_latency_seconds_count") > 0
    assert engine.metric("vllm:inter_token_latency_seconds_count") > 0


def test_without_dev_mode_there_is_no_rpc_route(tmp_path: Path) -> None:
    flags = ("--workers=1", "--heap-objects=100", "--no-endpoint")
    with EmbeddedEngine(*flags, log_path=tmp_path / "log") as engine:
        assert engine.request("POST", "/collective_rpc", {"method": "echo"})[0] == 404
        assert engine.request("GET", "/gc_sidecar/command")[0] == 404
        assert engine.request("GET", "/server_info")[0] == 404
