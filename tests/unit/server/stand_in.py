"""A stand-in for an engine: no vLLM, no garbage collection, but real pages, a real board and real HTTP.

One helper process plays all processes of the engine, for a page's lock is only seen from another
process. It follows commands like an agent does, and misbehaves as it is told to. It is forked from a
nursery, which has imported everything that it needs: starting Python anew would take longer than most tests.
"""

from __future__ import annotations

import array
import atexit
import bisect
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gc_sidecar_agent.board import BoardError, read_board
from gc_sidecar_agent.command import METHOD, Command, Outcome, parse_command
from gc_sidecar_agent.page import (
    BUCKETS_NS,
    FULL_RING_OFFSET,
    NONE,
    NUMBER_NAMES,
    RECORD_WORDS,
    RING_RECORDS,
    TRIGGERS,
    YOUNG_RING_OFFSET,
    PageWriter,
    create_page,
    page_name,
)
from gc_sidecar_agent.rules import HELD_OFF

POLL_S = 0.02
MODES = {"freeze": "freeze", "budget": "budget", "restore": "off"}


class Nursery:
    """The process that helper processes are forked from. Orders and answers are lines of JSON."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            text=True,
        )
        atexit.register(self._process.communicate)  # it ends with its input

    def order(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@functools.lru_cache
def nursery() -> Nursery:
    return Nursery()


class StandInEngine:
    """The test's handle on the helper process."""

    def __init__(self, **config: Any) -> None:
        self.port = nursery().order({"start": config})
        self.url = f"http://127.0.0.1:{self.port}"

    def set(self, **behaviour: Any) -> None:
        """How the engine as a whole behaves from now on; see Engine.behaviour."""
        self._post({"engine": behaviour})

    def set_process(self, name: str, **behaviour: Any) -> None:
        """How one process behaves from now on: `worker-0-1` is the worker with dp rank 0 and rank 1."""
        self._post({"process": name, "behaviour": behaviour})

    def collect(
        self,
        name: str,
        duration_s: float = 0.001,
        gc_generation: int = 2,
        trigger: str = "auto",
        collected_objects: int = 0,
        start_s: float = 0.0,
        times: int = 1,
    ) -> None:
        """Let a process record a collection, or several that follow each other, beginning `start_s` from now."""
        collection = [gc_generation, trigger, start_s, duration_s, collected_objects, times]
        self.set_process(name, collect=collection)

    def restart(self, name: str = "") -> None:
        """End one process, or all of them, and start anew under another token."""
        self._post({"restart": name})

    def calls(self) -> list[dict[str, Any]]:
        """The commands that came over HTTP, and questions for `__dir__`, in their order."""
        return list(self._get()["calls"])

    def requests(self) -> list[str]:
        """Every request that came over HTTP, as `GET /metrics`."""
        return list(self._get()["requests"])

    def changes(self) -> list[dict[str, Any]]:
        """The calls that were no look round; whether one of those came first depends on the machine's load."""
        return [call for call in self.calls() if call.get("kind") != "observe"]

    def process(self, name: str) -> dict[str, Any]:
        """What one process did so far: its state and the ids that it carried out."""
        return dict(self._get()["processes"][name])

    def stop(self) -> None:
        """End everything."""
        nursery().order({"stop": self.port})

    def _post(self, order: dict[str, Any]) -> None:
        request = urllib.request.Request(f"{self.url}/stand_in", json.dumps(order).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()

    def _get(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stand_in", timeout=10) as answer:
            return dict(json.loads(answer.read()))


# --- the helper process ---


def identity(command: Command) -> tuple[str, str, int]:
    """By what an agent knows that it has carried a command out already."""
    return command.operation_id, command.kind, command.generation


class Process:
    """One process of the engine, as far as its agent shows."""

    def __init__(self, roles: list[str], dp_rank: int, rank: int, engine: Engine) -> None:
        self.name = f"{roles[0]}-{dp_rank}-{rank}"
        self.roles, self.dp_rank, self.rank = roles, dp_rank, rank
        self.engine = engine
        # fail, refuse: {"code", "detail", "kinds"}; deaf: ignores all; deaf_to_rpc, deaf_to_board;
        # still: no heartbeat; slow_s: collects for so long; page_error: has none; starting; thresholds; torn;
        # drift; dead; leave: a reason; silent: acts, but does not reply; lie: replies, its page does not show it;
        # numbers: some of the page's, as they shall be; clock_ahead_ns: of its monotonic clock. At once: collect
        # (see record), damage: sequences of full records, new_page: under another name
        self.behaviour: dict[str, Any] = dict(engine.at_birth.get(self.name, {}))
        self.lock = threading.RLock()
        self.born()

    def born(self) -> None:
        self.token = os.urandom(4).hex()
        self.started_at = time.time()
        self.mode, self.generation = "off", 0
        self.command: Command | None = None
        self.reason: dict[str, Any] | None = None
        self.refused: dict[str, Any] | None = None
        self.exits: dict[str, int] = {}
        self.outcomes: dict[tuple[str, str, int], Outcome] = {}
        self.ran: list[str] = []
        self.last: Outcome | None = None
        self.lease_deadline: float | None = None
        self.lease_sequence = 0
        self.heartbeat = 0
        self.collecting_since_ns = 0
        self.counted: dict[str, int] = {"full_ring_next": 1, "young_ring_next": 1}
        self.rings = {
            offset: array.array("q", bytes(8 * RECORD_WORDS * RING_RECORDS))
            for offset in (FULL_RING_OFFSET, YOUNG_RING_OFFSET)
        }
        self.page: Any = None
        self.make_page()

    def make_page(self) -> None:
        self.has_news = True
        run_dir = self.engine.run_dir
        if run_dir and not self.behaviour.get("page_error"):
            name = page_name(self.roles[0], self.dp_rank, self.rank, time.time_ns())
            create_page(run_dir, name, self.fill)

    def fill(self, page: PageWriter) -> None:
        self.page = page
        self.described: dict[str, Any] = {}
        self.changes = 0
        self.publish()

    def record(
        self,
        gc_generation: int,
        trigger: str,
        start_s: float,
        duration_s: float,
        collected_objects: int,
        times: int,
    ) -> None:
        duration_ns = int(duration_s * 1e9)
        start_ns = time.monotonic_ns() + int(start_s * 1e9)
        start_ns += self.behaviour.get("clock_ahead_ns", 0)
        self.has_news = True
        is_full = gc_generation == 2
        ring = self.rings[FULL_RING_OFFSET if is_full else YOUNG_RING_OFFSET]
        following = f"{'full' if is_full else 'young'}_ring_next"
        length = duration_ns << 8 | gc_generation << 4 | TRIGGERS.index(trigger)
        for _ in range(times):
            sequence = self.counted[following]
            check = sequence ^ start_ns ^ length ^ collected_objects
            slot = sequence % RING_RECORDS * RECORD_WORDS
            ring[slot : slot + RECORD_WORDS] = array.array(
                "q", [sequence, start_ns, length, collected_objects, check]
            )
            self.counted[following] += 1
            start_ns += duration_ns
        self.count(f"gen{gc_generation}_count", times)
        self.count(f"gen{gc_generation}_total_ns", times * duration_ns)
        self.count(f"gen{gc_generation}_collected_objects", times * collected_objects)
        if is_full:
            kind = "auto" if trigger == "auto" else "requested"
            self.count(f"{kind}_bucket{bisect.bisect_left(BUCKETS_NS, duration_ns)}", times)
            self.count(f"{kind}_total_ns", times * duration_ns)

    def count(self, name: str, number: int) -> None:
        self.counted[name] = self.counted.get(name, 0) + number

    def damage(self, sequences: list[int]) -> None:
        self.has_news = True
        for sequence in sequences:
            self.rings[FULL_RING_OFFSET][sequence % RING_RECORDS * RECORD_WORDS + 1] ^= 1 << 20

    def die(self) -> None:
        if self.page is not None:
            os.close(self.page.fd)
            self.page = None

    def carry_out(self, command: Command) -> Outcome:
        if self.behaviour.get("slow_s"):
            self.collecting_since_ns = 1
            self.publish()
            time.sleep(self.behaviour["slow_s"])
            self.collecting_since_ns = 0
        with self.lock:
            outcome = self.outcomes.get(identity(command))
            if outcome is None:
                outcome = self._carry_out(command)
                if command.kind not in ("observe", "lease"):
                    self.outcomes[identity(command)] = self.last = outcome
                    self.ran.append(command.operation_id)
            if not self.behaviour.get("lie"):
                self.publish()
            return outcome

    def _carry_out(self, command: Command) -> Outcome:
        outcome = Outcome(
            command.operation_id, command.kind, command.generation, ok=True, pause_s=0.01,
            collected_objects=7, resident_delta_bytes=-4096,
        )  # fmt: skip
        if command.kind == "observe":
            return outcome
        if command.kind == "lease":
            if self.mode == "off" or self.generation != command.generation:
                return Outcome(
                    command.operation_id, "unknown", 0, False, "not_in_policy", "no such policy"
                )
            self.lease_deadline = time.monotonic() + command.lease_s
            return outcome
        for key in ("fail", "refuse"):
            refusal = self.behaviour.get(key)
            if refusal and command.kind in refusal.get("kinds", ("freeze", "budget", "maintain")):
                code, detail = refusal["code"], refusal.get("detail", "told to")
                if code == "freeze_failed":
                    self.leave(code)
                if key == "refuse":
                    self.refused = {
                        "generation": command.generation, "code": code, "detail": detail
                    }  # fmt: skip
                return Outcome(
                    command.operation_id, command.kind, command.generation, False, code, detail
                )
        if command.kind == "maintain":
            return outcome
        if command.generation < self.generation:
            return Outcome(
                command.operation_id, command.kind, self.generation, False, "stale_generation"
            )
        if not self.mode == MODES[command.kind] == "off":
            self.reason = None
        self.mode, self.generation = MODES[command.kind], command.generation
        self.command = None if self.mode == "off" else command
        self.refused = None
        self.lease_deadline = None if self.mode == "off" else time.monotonic() + command.lease_s
        return outcome

    def poll_for_ever(self) -> None:
        while True:
            if not self.behaviour.get("dead"):
                self.poll()
            time.sleep(POLL_S)

    def poll(self) -> None:
        with self.lock:
            if self.lease_deadline is not None and time.monotonic() >= self.lease_deadline:
                self.leave("lease_expired")
            if not self.behaviour.get("deaf") and not self.behaviour.get("deaf_to_board"):
                self.follow_board()
            if not self.behaviour.get("still"):
                self.heartbeat += 1
                self.publish()

    def leave(self, code: str) -> None:
        self.mode, self.command, self.lease_deadline = "off", None, None
        self.reason = {"code": code, "detail": f"{code} in the stand-in"}
        self.exits[code] = self.exits.get(code, 0) + 1

    def follow_board(self) -> None:
        if self.engine.run_dir is None or self.behaviour.get("starting"):
            return
        try:
            board = read_board(self.engine.run_dir)
        except (OSError, BoardError):
            return
        for wanted in (board.policy, board.maintain):
            if wanted is None or identity(wanted) in self.outcomes:
                continue
            if wanted.kind == "maintain" or wanted.generation > self.generation:
                self.carry_out(wanted)
        lease = board.lease
        if lease is not None and board.policy is not None:
            is_ours = board.policy.generation == self.generation and self.mode != "off"
            if is_ours and lease.sequence > self.lease_sequence:
                self.lease_sequence = lease.sequence
                self.lease_deadline = time.monotonic() + lease.remaining_s

    def publish(self) -> None:
        if self.page is None:
            return
        report = self.report()
        # Like an agent, on change. These polls are most of what the tests of the server cost.
        is_new = report["description"] != self.described
        if is_new:
            self.described = report["description"]
            self.changes += 1
        report["numbers"]["changes"] = self.changes + bool(self.behaviour.get("torn"))
        if self.has_news:
            for offset, ring in self.rings.items():
                self.page.write_ring(offset, memoryview(ring))
            self.has_news = False
        words = [report["numbers"][name] for name in NUMBER_NAMES]
        packed = array.array("q", [NONE if word is None else word for word in words])
        self.page.write_numbers(memoryview(packed))
        if is_new:
            self.page.write_description({**report["description"], "changes": self.changes})
        self.page.header[2] = report["collecting_since_ns"]

    def report(self) -> dict[str, Any]:
        command = self.command
        third = HELD_OFF if self.mode == "freeze" else 10
        numbers: dict[str, int | None] = dict.fromkeys(NUMBER_NAMES, 0)
        thresholds = self.behaviour.get("thresholds") or (700, 10, third)
        numbers.update(
            heartbeat=self.heartbeat,
            gc_enabled=1,
            threshold0=thresholds[0],
            threshold1=thresholds[1],
            threshold2=thresholds[2],
            lease_remaining_ms=(
                None
                if self.lease_deadline is None
                else max(0, int((self.lease_deadline - time.monotonic()) * 1000))
            ),
            gen2_count=3, gen2_total_ns=900_000_000, gen2_max_ns=400_000_000,
            auto_bucket9=2, auto_total_ns=800_000_000, requested_bucket0=1,
            requested_total_ns=100_000, anonymous_bytes=1 << 20, growth_bytes=None,
            device_allocated_bytes=None, freezes=1,
            clock_offset_ns=(
                time.time_ns() - time.monotonic_ns() - self.behaviour.get("clock_ahead_ns", 0)
            ),
        )  # fmt: skip
        for name, number in self.counted.items():
            numbers[name] = (numbers[name] or 0) + number
        numbers.update(self.behaviour.get("numbers", {}))
        engine = self.engine
        return {
            "description": {
                "identity": {
                    "roles": self.roles, "dp_rank": self.dp_rank, "rank": self.rank,
                    "pid": 1000 + self.rank, "host": "stand-in", "token": self.token,
                    "started_at": self.started_at, "python": "3.11.7",
                    "collector": "generational", "engine": f"vllm {engine.version}",
                    "agent": "0.1.0", "page_error": self.behaviour.get("page_error"),
                    "agent_error": None,
                },
                "topology": engine.topology(self),
                "state": {
                    "ready": not self.behaviour.get("starting"),
                    "mode": self.mode, "generation": self.generation,
                    "owner": command.owner if command else None,
                    "entered_at": self.started_at if command else None,
                    "interval_s": command.interval_s if command else None,
                    "pause_budget_ms": None,
                    "max_rss_growth_bytes": command.max_rss_growth_bytes if command else None,
                    "reason": self.reason, "refused": self.refused, "collect_pending": False,
                    "drift": self.behaviour.get("drift"), "drifts": {"gc_disabled": 2},
                    "exits": dict(self.exits),
                    "operation": self.last.to_dict() if self.last else None,
                },
            },
            "numbers": numbers,
            "collecting_since_ns": (
                self.behaviour.get("collecting_since_ns", 0) or self.collecting_since_ns
            ),
        }  # fmt: skip

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        outcome = self.carry_out(parse_command(request))
        return {
            "version": 1,
            "operation_id": outcome.operation_id,
            "outcome": outcome.to_dict(),
            "report": self.report(),
        }


class Engine:
    """All processes, and the HTTP surface of the API server."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.run_dir = config.get("run_dir")
        self.version = config.get("version", "0.32.0")
        self.dp_ranks = config.get("dp_ranks", list(range(config.get("dp", 1))))
        self.workers = config.get("workers", 2)
        self.api_servers = config.get("api_servers", 1)
        # An external load balancer: this is one launch of several, with its own part of the ranks.
        self.external = config.get("external", False)
        # rpc: plugin, dev or none; token: where the plugin's secret lies; answer: how a call is answered;
        # running and waiting: vLLM's metrics; names: what `__dir__` tells; hang: seconds before an
        # answer; away: hangs up at once, as an engine that is being restarted does; metrics: further text of
        # /metrics; metrics_hang_s
        self.behaviour: dict[str, Any] = {
            "rpc": "plugin", "answer": "ok", "running": 0, "waiting": 0, "version_status": 200,
            "names": [METHOD, "execute_method"], "token_file": config.get("token_file"),
            **config.get("behaviour", {}),
        }  # fmt: skip
        self.calls: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.at_birth = config.get("processes", {})
        one_process = config.get("one_process", False)
        self.processes: list[Process] = []
        if one_process:
            roles = ["api_server", "engine_core", "worker"]
            self.processes.append(Process(roles, 0, 0, self))
        else:
            for rank in range(self.api_servers):
                dp_rank = self.dp_ranks[0] if self.external else 0
                self.processes.append(Process(["api_server"], dp_rank, rank, self))
            for dp_rank in self.dp_ranks:
                self.processes.append(Process(["engine_core"], dp_rank, 0, self))
                for rank in range(self.workers):
                    self.processes.append(Process(["worker"], dp_rank, rank, self))
        self.answers_twice = one_process

    def find(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def topology(self, process: Process) -> dict[str, Any]:
        # An engine core of a dense model knows itself alone, an API server knows all.
        knows_all = "api_server" in process.roles
        return {
            "dp_ranks": self.dp_ranks if knows_all else [process.dp_rank],
            "workers": self.workers,
            "api_servers": None if self.external and not knows_all else self.api_servers,
        }

    def command(self, request: dict[str, Any]) -> list[Any]:
        self.calls.append(request)
        if self.behaviour.get("hang"):
            time.sleep(self.behaviour["hang"])
        heard = [
            process
            for process in self.processes
            if not process.behaviour.get("dead")
            and not process.behaviour.get("deaf")
            and not process.behaviour.get("deaf_to_rpc")
        ]
        if self.behaviour["answer"] == "workers_of_first":
            heard = [p for p in heard if "worker" in p.roles and p.dp_rank == 0]
        replies: list[Any] = []
        threads = []
        for process in heard:
            slot: list[Any] = []
            replies.append((process, slot))
            thread = threading.Thread(target=lambda p=process, s=slot: s.append(p.reply(request)))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        results = [slot[0] for process, slot in replies if not process.behaviour.get("silent")]
        if self.answers_twice:
            results = [*results, *results]
        answer = self.behaviour["answer"]
        if answer == "wrong_id":
            results[-1]["operation_id"] = "of-another-call"
        elif answer == "malformed":
            results[-1] = "None"
        return results

    def start_polls(self) -> None:
        for process in self.processes:
            threading.Thread(target=process.poll_for_ever, daemon=True).start()

    def order(self, order: dict[str, Any]) -> None:
        if "engine" in order:
            self.behaviour.update(order["engine"])
        elif "process" in order:
            process = self.find(order["process"])
            with process.lock:
                process.behaviour.update(order["behaviour"])
                if order["behaviour"].get("dead"):
                    process.die()
                if order["behaviour"].get("leave"):
                    process.leave(order["behaviour"]["leave"])
                if order["behaviour"].get("collect"):
                    process.record(*order["behaviour"]["collect"])
                if order["behaviour"].get("damage"):
                    process.damage(order["behaviour"]["damage"])
                if order["behaviour"].get("new_page"):
                    process.page.discard()
                    process.make_page()
        else:
            for process in self.processes:
                if order["restart"] in ("", process.name):
                    with process.lock:
                        process.die()
                        process.behaviour.pop("dead", None)
                        process.born()


class Handler(BaseHTTPRequestHandler):
    """vLLM's routes, our plugin's route, and the test's own."""

    engine: Engine
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        behaviour = self.engine.behaviour
        self.note_request()
        if behaviour.get("away") and self.path != "/stand_in":
            self.connection.close()
        elif self.path == "/stand_in":
            processes = {
                p.name: {"mode": p.mode, "generation": p.generation, "ran": p.ran, "token": p.token}
                for p in self.engine.processes
            }
            told = {"calls": self.engine.calls, "requests": self.engine.requests}
            self.answer(200, {**told, "processes": processes})
        elif self.path == "/version":
            self.answer(behaviour["version_status"], {"version": self.engine.version})
        elif self.path == "/gc_sidecar/command" and behaviour["rpc"] == "plugin":
            self.answer(200, {"agent": "0.1.0", "method": METHOD})
        elif self.path == "/metrics" and behaviour["running"] is not None:
            text = (
                "# HELP vllm:num_requests_running x\n"
                f'vllm:num_requests_running{{engine="0",model_name="a b"}} {behaviour["running"]}\n'
                f'vllm:num_requests_waiting{{engine="0",model_name="a b"}} {behaviour["waiting"]}\n'
            )
            time.sleep(behaviour.get("metrics_hang_s", 0))
            self.answer(200, text + behaviour.get("metrics", ""))
        else:
            self.answer(404, {"detail": "Not Found"})

    def note_request(self) -> None:
        if self.path != "/stand_in":
            self.engine.requests.append(f"{self.command} {self.path}")

    def do_POST(self) -> None:
        self.note_request()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null")
        behaviour = self.engine.behaviour
        if self.path == "/stand_in":
            self.engine.order(body)
            self.answer(200, {})
        elif behaviour.get("away"):
            self.connection.close()
        elif self.path == "/gc_sidecar/command" and behaviour["rpc"] == "plugin":
            expected = Path(behaviour["token_file"]).read_text() if behaviour["token_file"] else ""
            if self.headers.get("Authorization") != f"Bearer {expected}":
                self.answer(401, {"code": "endpoint_token_wrong", "detail": "not the engine's"})
            else:
                self.answer_command(body)
        elif self.path == "/collective_rpc" and behaviour["rpc"] == "dev":
            if body["method"] == "__dir__":
                self.engine.calls.append(body)
                self.answer(200, {"results": [behaviour["names"]] * self.engine.workers})
            else:
                assert body["method"] == METHOD
                assert set(body) == {"method", "args"}
                self.answer_command(body["args"][0])
        elif behaviour["rpc"].isdigit():
            self.answer(int(behaviour["rpc"]), "")
        else:
            self.answer(404, {"detail": "Not Found"})

    def answer_command(self, request: dict[str, Any]) -> None:
        kind = self.engine.behaviour["answer"]
        if kind.isdigit():
            self.engine.calls.append(request)
            self.answer(int(kind), "")
        elif kind == "hang_up":
            self.engine.command(request)
            self.connection.close()
        elif kind == "huge":
            self.answer(200, "x" * (9 << 20))
        elif kind == "redirect":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
        else:
            self.answer(200, {"results": self.engine.command(request)})

    def answer(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the caller did not wait


def serve(config: dict[str, Any], listener: socket.socket, ready: int) -> None:
    """The helper process. It closes `ready` when its pages are there."""
    engine = Engine(config)
    Handler.engine = engine
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    for process in engine.processes:
        process.publish()
    engine.start_polls()
    os.close(ready)
    server.serve_forever()


def main() -> None:
    """The nursery. It has no thread, so that it may fork."""
    children: dict[int, int] = {}
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if "start" in order:
                listener = socket.create_server(("127.0.0.1", 0))
                port = listener.getsockname()[1]
                reader, writer = os.pipe()
                children[port] = os.fork()
                if children[port] == 0:
                    children.clear()
                    os.close(0)
                    os.close(reader)
                    serve(order["start"], listener, writer)
                listener.close()
                os.close(writer)
                os.read(reader, 1)
                os.close(reader)
            else:
                port = order["stop"]
                if port in children:
                    end(children.pop(port))
            print(port, flush=True)
    finally:
        for pid in children.values():
            end(pid)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
