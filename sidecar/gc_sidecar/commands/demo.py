"""`gc-sidecar demo`: the whole story on the terminal, on an engine that it starts and ends itself.

Every figure is what the sidecar's own API answers, and before each step stands the curl line that
does the same. A new kind of engine is a row in ENGINES: a function that starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gc_sidecar
from gc_sidecar.embedded.live import LiveView, Rung, Seen, Step, terminal_width
from gc_sidecar.install import install_agent
from gc_sidecar.server.verdicts import DEFAULT_MAX_STALL_SHARE
from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from gc_sidecar_agent.client import Answer, Client, ClientError, Unreachable
from gc_sidecar_agent.commands import output
from gc_sidecar_agent.commands.options import UsageError, add_option, warn
from gc_sidecar_agent.commands.window import show_window

# The embedded engine: heaps that are as large as a small model's, and grow fast enough to watch.
EMBEDDED_FLAGS = (
    "--workers=4",
    "--heap-objects=300000",
    "--retain-per-step=500",
    "--garbage-per-step=100",
    "--garbage-lifetime-steps=50",
    "--step-ms=5",
    "--free-running",
)
EMBEDDED_WORKERS = 4
RUNGS = 5
WATCH_DEADLINE_S = 30.0
# By CPython's rule a full collection comes when the heap has grown by a quarter: here, two would have.
GROWTH_WATCHED = 1.25**2

TENSOR_PARALLEL = 2
COMPLETIONS = 100
TOKENS = 16
CONCURRENCY = 4
STREAM = f"{COMPLETIONS} completions stream, {CONCURRENCY} at a time"
WINDOW = "frozen"
# Of the time, for what stays on under a freeze: the embedded engine does little else than make objects.
STALL_SHARE = 0.5
START_DEADLINE_S = 300.0
READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
POLL_S = 0.2
SETTLE_S = 0.3
# How often a line of progress is printed where there is no terminal to rewrite it on.
PROGRESS_S = 10.0
MEMORY_FILE_SYSTEM = Path("/dev/shm")

# What the caller's shell has set must not steer what we start.
FOREIGN_VARIABLES = ("VLLM_", "GC_SIDECAR_", "DYN_FPM_", "PYTHON")
VLLM_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM gives each worker a NUMA node of its own, and refuses two workers on a single node.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On few cores the threads of two workers wait for each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
VLLM_CPU_FLAGS = (
    "--load-format=dummy",
    # bfloat16 takes kernels that die on processors which only claim to have them.
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=256",
    "--max-num-seqs=8",
)
MODEL_NAME = "tiny"
MAKE_VLLM = (
    "in a clone, `make demo-vllm` does it all, or `make vllm` once and then"
    " --vllm-python .venv/vllm/bin/python"
)

DESCRIPTION = """\
Start an engine and the sidecar on this machine and show what they do together: how long full
collections last under normal GC; freeze, acknowledged by every process; no full collection while
the engine works; maintain, with what it reclaims; restore, every process as it was found.
Everything is stopped and removed at the end. It needs no GPU and no network.

The engine is the embedded one, unless you say otherwise: real processes in lockstep with real, growing
Python heaps, and no model. It shows pauses grow while you watch, in less than a minute.
"""

EPILOG = """\
examples:
  gc-sidecar demo
  gc-sidecar demo --engine vllm --vllm-python .venv/vllm/bin/python

exit codes:
  0  every step did what it says
  1  one did not; the logs are kept, and their ends printed
  2  wrong usage
  130  interrupted by Ctrl-C; engine and sidecar are stopped and removed all the same
"""

# Prose is no wider than this, and a table leaves these columns out, one after the other, until it fits.
PROSE_WIDTH = 78
TABLE_INDENT = "    "
SPARE_COLUMNS = ("PID", "DP", "MEMORY", "COLLECTED")


class DemoFailed(Exception):
    """A step did not do what it says; `str()` of it says what happened instead."""


@dataclass(frozen=True)
class Engine:
    """A running engine: where it answers completions, and how many processes are to be seen."""

    url: str
    model: str
    processes: int
    is_embedded: bool = False


@dataclass
class Stage:
    """What the demo runs in: its directories, and the processes to end when it is over."""

    directory: Path
    run_dir: Path
    python: Path | None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start `command` in a process group of its own, its output in a log."""
        log = self.directory / f"{name}.log"
        self.logs.append(log)
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                # Python's -m puts the current directory on the module path.
                cwd=self.directory,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def stop(self) -> None:
        """End everything, the last started first: politely, then for certain."""
        left_behind = _shared_memory_of_vllm(self.directory)
        try:
            for process in reversed(self.started):
                process.terminate()
                _wait_until_gone(process, STOP_DEADLINE_S)
        finally:  # an impatient second Ctrl-C comes here too
            for process in self.started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for path in left_behind:
                path.unlink(missing_ok=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `demo`."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        default="embedded",
        help="what to start: the embedded engine (default), or a real vLLM on the CPU",
    )
    add_option(
        parser,
        "--vllm-python",
        Path,
        metavar="PATH",
        help="with --engine vllm, the interpreter that has it (`make vllm` makes one)",
    )


def run(args: argparse.Namespace) -> int:
    """Play it, clean up, return the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    directory = Path(tempfile.mkdtemp(prefix="gc-sidecar-demo-"))
    in_memory = MEMORY_FILE_SYSTEM if os.access(MEMORY_FILE_SYSTEM, os.W_OK) else directory
    run_dir = Path(tempfile.mkdtemp(prefix="gc-sidecar-run-", dir=in_memory))
    stage = Stage(directory, run_dir, args.vllm_python)
    keep_logs = interrupted = False
    try:
        play(stage, ENGINES[args.engine])
    except UsageError as error:
        warn(f"demo: {error}")
        return EXIT_USAGE
    except Exception as error:  # whatever it is, the logs tell more
        keep_logs = True
        _report_failure(error, stage)
        return EXIT_FAILED
    except KeyboardInterrupt:
        interrupted = True
        print(flush=True)  # the live line has no end yet
    finally:
        stage.stop()
        shutil.rmtree(run_dir, ignore_errors=True)
        if keep_logs:
            _remove_all_but(stage.logs, directory)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if interrupted:
        warn("demo: interrupted; engine and sidecar are stopped")
        return EXIT_INTERRUPTED
    return EXIT_OK


def _remove_all_but(kept: Sequence[Path], directory: Path) -> None:
    for path in set(directory.iterdir()) - set(kept):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# --- the story ---


def play(stage: Stage, start_engine: Callable[[Stage], Engine]) -> None:
    """Every act in order; raises DemoFailed or ClientError where one does not hold."""
    engine = start_engine(stage)
    client = start_sidecar(stage, engine)
    before = _status(client)
    transport = output.word(before.get("transport"))
    _list("sidecar", f"{client.url}, transport {transport}, sees {engine.processes} processes")

    live = LiveView(client, engine.url) if engine.is_embedded else None
    if live is not None:
        _watch_normal_gc(live)
    else:
        _ask_for_a_collection(client)

    _act("2. Freeze: no automatic full collection from now on")
    freeze = _change(client, "freeze").operation
    frozen = _status(client)
    coverage = frozen.get("coverage") or {}
    _check(
        coverage.get("acknowledged") == engine.processes,
        f"{coverage.get('acknowledged')} of {engine.processes} processes acknowledged the freeze",
    )
    _check(
        all(_threshold(process)[-1:] == [output.NEVER] for process in output.rows_of(frozen)),
        "a process still has automatic full collections",
    )
    _say(
        f"Every process acknowledged: coverage {coverage['acknowledged']} of"
        f" {coverage['expected']}, after {output.seconds(freeze.get('duration_s'))}."
    )

    _act("3. The same work, frozen" if live is not None else f"3. {STREAM}")
    _open_window(client, engine)
    if live is not None:
        _watch_frozen(live)
    else:
        _stream_while_frozen(engine)
    _close_window(client)
    _command(f"curl {client.url}/gc")
    streamed = _status(client)
    _say("In short, how many full collections each process has had:")
    _compare(_full_collections, {"BEFORE": frozen, "AFTER": streamed})
    counts = _each(frozen, _full_collections)
    _check(len(counts) == engine.processes and None not in counts.values(), "a count is missing")
    _check(counts == _each(streamed, _full_collections), "a full collection ran while frozen")
    _say("No process ran a full collection meanwhile.")

    _act("4. Maintain: collect at a moment that nobody measures")
    maintained = _change(client, "maintain")
    rows = output.rows_of(maintained.operation)
    reclaimed = sum(row.get("collected_objects") or 0 for row in rows)
    memory = sum(row.get("resident_delta_bytes") or 0 for row in rows)
    _say(
        f"{reclaimed:,} objects reclaimed, memory {output.change(memory)}, longest pause"
        f" {_longest_pause(maintained)}; and frozen again. Objects freed are not bytes returned: the"
        " allocator keeps their pages for the next objects (`trim` gives them back)."
    )

    _act("5. Restore: every process as it was found")
    _change(client, "restore")
    _command(f"curl {client.url}/gc")
    after = _status(client)
    _say("In short, the GC thresholds of each process:")
    _compare(_thresholds, {"AS FOUND": before, "FROZEN": frozen, "NOW": after})
    _check(
        _each(before, _gc_settings) == _each(after, _gc_settings),
        "a process is not as it was found",
    )
    _say("Normal GC again, in every process.")


def _ask_for_a_collection(client: Client) -> None:
    _act("1. How long is a full collection here?")
    _say(
        "Left alone, CPython decides when one comes. We ask for one, in all processes side by side:"
    )
    collected = _change(client, "maintain")
    _say(
        f"The engine takes no step for {_longest_pause(collected)}."
        " In a benchmark, that is the outlier."
    )


def _open_window(client: Client, engine: Engine) -> None:
    _say("A window says at its end how much of what it covers was GC:")
    fields: dict[str, object] = {"window_id": WINDOW}
    if engine.is_embedded:
        fields["max_stall_share"] = STALL_SHARE
        _say(
            "Young collections stay on, and where objects are made all the time, as here, they may take up to"
            f" {STALL_SHARE:.0%} of it, instead of the usual {DEFAULT_MAX_STALL_SHARE:.0%}."
        )
    query = "&".join(f"{name}={value}" for name, value in fields.items())
    _command(f"curl -X POST '{client.url}/gc/windows?{query}&format=table'")
    client.request("POST", "/gc/windows", fields)


def _close_window(client: Client) -> None:
    _command(f"curl -X POST '{client.url}/gc/windows/{WINDOW}/close?format=table'")
    closed = client.request("POST", f"/gc/windows/{WINDOW}/close", {}).body
    _say(show_window(closed).partition("\nlimits")[0])
    window = closed.get("window") or {}
    verdict = window.get("verdict") or {}
    stalls = verdict.get("stalls") or [{}]
    stalled = max(stalls, key=lambda stall: stall.get("stall_s") or 0.0)
    longest = verdict.get("longest_pause") or {}
    _say(
        f"{output.seconds(stalled.get('stall_s'))} of {output.seconds(window.get('duration_s'))} were GC"
        f" ({100 * (stalled.get('share') or 0):.2f} %), and its longest pause took"
        f" {output.seconds(longest.get('duration_s'))}. Whatever took longer was something else: on few"
        " cores, processes wait for each other."
    )


def _stream_while_frozen(engine: Engine) -> None:
    _command(f"curl {engine.url}/v1/completions -d '{{...}}'   # {COMPLETIONS} times")
    started = time.monotonic()
    tokens = stream_completions(engine)
    _say(f"{tokens:,} tokens in {time.monotonic() - started:.1f} s.")


def _watch_normal_gc(live: LiveView) -> None:
    _act("1. Normal GC, while the heap grows")
    threshold0, threshold1, threshold2 = gc.get_threshold()  # as they are in the engine, too
    at_least = threshold0 * (threshold1 + 1) * (threshold2 + 1)
    _say(
        "Each step leaves objects behind. CPython collects fully whenever a quarter has been added, and"
        f" at least {at_least:,} objects: ever later, and each time for longer. All processes wait for"
        " the one that pauses, so it makes the step of all longer. A bar is the longest step of a fifth"
        " of a second.\n"
    )
    seen = live.watch(lambda _steps, rungs: len(rungs) >= RUNGS, WATCH_DEADLINE_S)
    _check(bool(seen.rungs), "no full collection came")
    _sum_up(seen)
    _say("A measurement that falls into one of them is an outlier, and nothing in it says why.")


def _watch_frozen(live: LiveView) -> None:
    at_first = live.newest().retained_objects
    _say(
        f"Until the heap has grown from {at_first:,} to {at_first * GROWTH_WATCHED:,.0f} objects;"
        " under normal GC two full collections would come meanwhile.\n"
    )

    def has_grown(steps: list[Step], _rungs: list[Rung]) -> bool:
        return bool(steps) and steps[-1].retained_objects >= at_first * GROWTH_WATCHED

    seen = live.watch(has_grown, WATCH_DEADLINE_S)
    _check(not seen.rungs, "a full collection ran while frozen")
    _sum_up(seen)


def _sum_up(seen: Seen) -> None:
    _say(
        f"{seen.steps:,} steps in {seen.seconds:.0f} s: most took"
        f" {output.seconds(seen.median_step_s)}, the longest {output.seconds(seen.longest.duration_s)}."
    )


def _change(client: Client, verb: str) -> Answer:
    """Do `verb` in every process, and show the curl line and what it prints."""
    _command(f"curl -X POST '{client.url}/gc/{verb}?format=table'")
    answer = client.wait_operation(getattr(client, verb)(), START_DEADLINE_S)
    _say(output.headline(answer.operation))
    _table(_fitting_table(answer.operation))
    _check(answer.operation.get("state") == "applied", f"{verb} was not applied")
    return answer


def _status(client: Client) -> dict[str, Any]:
    """What every process says, once it has had the time to say it: pages are written ten times a
    second."""
    time.sleep(SETTLE_S)
    return client.get_status().body


def _compare(read: Callable[[dict[str, Any]], Any], columns: Mapping[str, dict[str, Any]]) -> None:
    """A line per process: what `read` says of it in each of the statuses."""
    values = [_each(status, read) for status in columns.values()]
    rows = [
        [role, str(rank), *(str(column.get((role, dp_rank, rank), "-")) for column in values)]
        for role, dp_rank, rank in values[0]
    ]
    _table(output.table(("ROLE", "RANK", *columns), rows))


def _fitting_table(operation: dict[str, Any]) -> str:
    """What each process did, in as many columns as there is room for."""
    for number in range(len(SPARE_COLUMNS) + 1):
        text = output.operation_table(operation, without=SPARE_COLUMNS[:number])
        if max(map(len, text.splitlines()), default=0) + len(TABLE_INDENT) <= terminal_width():
            break
    return text


def _each(
    status: dict[str, Any], read: Callable[[dict[str, Any]], Any]
) -> dict[tuple[Any, ...], Any]:
    """What `read` says of every process, by its place in the engine."""
    return {
        (output.role(row), row.get("dp_rank"), row.get("rank")): read(row)
        for row in output.rows_of(status)
    }


def _threshold(process: dict[str, Any]) -> list[Any]:
    threshold = (process.get("gc") or {}).get("threshold")
    return threshold if isinstance(threshold, list) else []


def _thresholds(process: dict[str, Any]) -> str:
    return output.thresholds(_threshold(process))


def _gc_settings(process: dict[str, Any]) -> tuple[Any, ...]:
    return process.get("mode"), (process.get("gc") or {}).get("enabled"), _threshold(process)


def _full_collections(process: dict[str, Any]) -> Any:
    return ((process.get("pauses") or {}).get("gen2") or {}).get("count")


def _longest_pause(answer: Answer) -> str:
    """Of those that take the engine's steps: an API server only waits for them."""
    stepping = [row for row in output.rows_of(answer.operation) if row.get("role") != "api_server"]
    return output.seconds(max((row.get("pause_s") or 0.0 for row in stepping), default=None))


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoFailed(otherwise)


# --- what is started ---


def start_embedded(stage: Stage) -> Engine:
    """An embedded engine, as one starts it by hand."""
    _title()
    port = _free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GC_SIDECAR_")
    }
    command = [
        *(sys.executable, "-m", "gc_sidecar.embedded", f"--port={port}"),
        *(f"--run-dir={stage.run_dir}", *EMBEDDED_FLAGS),
    ]
    process = stage.start("engine", command, environment)
    took = _wait_for("engine", process, stage.logs[-1], READY_DEADLINE_S, lambda: _is_up(port))
    _list(
        "engine",
        f"embedded (not a vLLM): {EMBEDDED_WORKERS} workers in lockstep; up after {took:.1f} s",
    )
    # The API server, the engine core, and the workers.
    return Engine(f"http://127.0.0.1:{port}", "embedded", 2 + EMBEDDED_WORKERS, is_embedded=True)


def start_vllm(stage: Stage) -> Engine:
    """A real vLLM on the CPU: tensor parallel, a tiny random model, our agent injected."""
    python = stage.python
    if python is None:
        raise UsageError(f"--vllm-python must say which interpreter has vLLM: {MAKE_VLLM}")
    # Not resolved: the link to the base interpreter is what makes it the environment's.
    python = python.absolute()
    has_vllm = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if (
        not python.exists()
        or subprocess.run([python, "-I", "-c", has_vllm], check=False).returncode
    ):
        raise UsageError(f"{python} has no vLLM: {MAKE_VLLM}")

    _title()
    _list("model", "a tiny Llama with random weights, made on the spot")
    model = stage.directory / "model"
    maker = Path(gc_sidecar.__file__).with_name("tiny_model.py")
    made = subprocess.run([python, "-I", maker, model], capture_output=True, text=True, check=False)
    _check(made.returncode == 0, f"the model could not be made:\n{made.stderr}")

    agent = install_agent(stage.directory / "agent", endpoint_plugin=True).directory
    _list("agent", "injected through PYTHONPATH; nothing is installed into vLLM")

    port = _free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)
    }
    environment |= VLLM_CPU_ENVIRONMENT
    environment |= {
        "TMPDIR": str(stage.directory),
        "GC_SIDECAR_RUN_DIR": str(stage.run_dir),
        "PYTHONPATH": str(agent),
        "VLLM_PLUGINS": "gc_sidecar",
    }
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--host=127.0.0.1", f"--port={port}", f"--tensor-parallel-size={TENSOR_PARALLEL}"),
        *VLLM_CPU_FLAGS,
    ]
    process = stage.start("vllm", command, environment)
    took = _wait_for("vLLM", process, stage.logs[-1], START_DEADLINE_S, lambda: _is_up(port))
    _list(
        "vLLM", f"tensor parallel over {TENSOR_PARALLEL} workers, on the CPU; up after {took:.0f} s"
    )
    # The API server, the engine core, and the workers.
    return Engine(f"http://127.0.0.1:{port}", MODEL_NAME, 2 + TENSOR_PARALLEL)


def _shared_memory_of_vllm(directory: Path) -> list[Path]:
    """What vLLM's workers on the CPU leave behind in memory: 8 MB at each start, named after a file
    that lies in the engine's TMPDIR while it runs."""
    stores = [path.name for path in directory.glob("vllm_dist_*")]
    return [path for name in stores for path in MEMORY_FILE_SYSTEM.glob(f"{name}*")]


ENGINES: dict[str, Callable[[Stage], Engine]] = {"embedded": start_embedded, "vllm": start_vllm}


def start_sidecar(stage: Stage, engine: Engine) -> Client:
    """The sidecar of `engine`, when it sees all of its processes."""
    port = _free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GC_SIDECAR_")
    }
    command = [
        *(sys.executable, "-m", "gc_sidecar", "serve", "--engine-url", engine.url),
        *("--run-dir", str(stage.run_dir), "--host", "127.0.0.1", "--port", str(port)),
    ]
    process = stage.start("sidecar", command, environment)
    client = Client(f"http://127.0.0.1:{port}")

    def sees_all() -> bool:
        try:
            coverage = client.get_status().body.get("coverage") or {}
        except Unreachable:
            return False
        return bool(coverage.get("acknowledged") == coverage.get("expected") == engine.processes)

    _wait_for("sidecar", process, stage.logs[-1], READY_DEADLINE_S, sees_all)
    return client


def stream_completions(engine: Engine) -> int:
    """Stream the completions, a few at a time; returns how many tokens came."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return sum(pool.map(lambda number: _stream(engine, number), range(COMPLETIONS)))


def _stream(engine: Engine, number: int) -> int:
    body = {
        "model": engine.model,
        "prompt": f"Completion {number}",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parts = urlsplit(engine.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        _check(response.status == 200, f"a completion was answered with {response.status}")
        tokens = 0
        for event in _events(response):
            if event == "[DONE]":
                return tokens
            usage = json.loads(event).get("usage") or {}
            tokens = usage.get("completion_tokens", tokens)
    raise DemoFailed("a completion broke off before its end")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").decode().strip()


def _is_up(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# --- the terminal ---


def _wait_for(
    what: str,
    process: subprocess.Popen[bytes],
    log: Path,
    deadline_s: float,
    is_ready: Callable[[], bool],
) -> float:
    """Wait and show that something happens; returns the seconds that it took."""
    started = time.monotonic()
    shown = 0.0
    terminal = sys.stdout.isatty()
    while not is_ready():
        elapsed = time.monotonic() - started
        status = process.poll()
        _check(status is None, f"{what} ended with status {status} while it started")
        _check(elapsed < deadline_s, f"{what} was not ready after {deadline_s:.0f} s")
        line = f"  {what:<9} {elapsed:3.0f} s  {_last_record(log)}"
        if terminal:
            print(f"\r\x1b[K{line[: terminal_width()]}", end="", flush=True)
        elif elapsed - shown >= PROGRESS_S:
            shown = elapsed
            print(line, flush=True)
        time.sleep(POLL_S)
    if terminal:
        print("\r\x1b[K", end="", flush=True)
    return time.monotonic() - started


def _last_record(log: Path) -> str:
    """What the log says last, without colours, time and place."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        text = re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace"))
    records = re.findall(r"\[\w[\w./]*:\d+\] +(\S.*)", text)
    return records[-1][:76] if records else ""


def _wait_until_gone(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Wait for `process` and all that it started; they clean up after themselves if they may."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and (process.poll() is None or _lives(process.pid)):
        time.sleep(POLL_S / 4)


def _lives(group: int) -> bool:
    """Whether a process of the group runs. Dead ones that nobody reaps, as in a container without
    an init process, do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone while we looked
            # The name stands in parentheses and may hold anything.
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _report_failure(error: Exception, stage: Stage) -> None:
    print(flush=True)
    for log in stage.logs:
        tail = log.read_text(errors="replace").splitlines()[-25:]
        print(f"--- the end of {log}", *tail, sep="\n", file=sys.stderr)
    if isinstance(error, ClientError):
        output.print_error("demo", error, as_json=False)
    else:
        expected = isinstance(error, DemoFailed)
        warn(f"demo: {error}" if expected else f"demo: {type(error).__name__}: {error}")


def _title() -> None:
    print(_wrapped("gc-sidecar demo: garbage collection of a running engine, under control"))
    print(flush=True)


def _act(title: str) -> None:
    print(f"\n\n{_wrapped(title)}", flush=True)


def _say(text: str) -> None:
    end = "\n" if text.endswith("\n") else ""
    print(f"\n{_wrapped(text, '  ', '  ')}{end}", flush=True)


def _list(what: str, text: str) -> None:
    print(_wrapped(text, f"  {what:<9} ", " " * 12), flush=True)


def _wrapped(text: str, first: str = "", others: str = "") -> str:
    width = min(PROSE_WIDTH, terminal_width())
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _command(text: str) -> None:
    print(f"\n  $ {text}", flush=True)


def _table(text: str) -> None:
    print("", *(f"{TABLE_INDENT}{line}" for line in text.splitlines()), sep="\n", flush=True)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
