"""An engine of real agents in real, tiny processes, without vLLM: four forks of a nursery.

What a process does is in `tiny_process`; for what vLLM's API server does, one HTTP transport stands in, in the
test's own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gc_sidecar_agent.command import METHOD
from gc_sidecar_agent.endpoint import PATH as ENDPOINT_PATH
from gc_sidecar_agent.endpoint import TOKEN_NAME
from tests.faults.controlled_time import ControlledTime
from tests.striking import strike
from tests.unit.agent.own_process import environment


@dataclass(frozen=True)
class Place:
    """Where a process stands in the engine."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role}-{self.rank}"


PLACES = (Place("api_server", 0), Place("engine_core", 0), Place("worker", 0), Place("worker", 1))
API_SERVER = PLACES[0]


@dataclass(frozen=True)
class Found:
    """What the GC of a process is like before anybody touches it."""

    thresholds: tuple[int, int, int] = (700, 10, 10)
    frozen: bool = False


class Nursery:
    """The process that engines' processes are forked from. It and they end with the one that made it."""

    def __init__(self) -> None:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="gc-sidecar-", dir=in_memory))
        self.time = ControlledTime(self.directory / "time")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.tiny_process", str(self.directory / "time")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def order(self, **order: Any) -> int:
        """`start` a process or `end` one, which is gone with its locks when this returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End everything."""
        self._process.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery for as long as this lasts."""
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


class TinyProcess:
    """One process of the engine, seen from the test's event loop."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._asked = 0

    async def ask(self, question: str, value: Any = None) -> Any:
        """What its main thread answers. Raises ConnectionError where it has died."""
        async with self._turn:
            self._asked += 1
            number = self._asked
            line = json.dumps({"number": number, "question": question, "value": value})
            self._writer.write(line.encode() + b"\n")
            while True:
                answer = await self._reader.readline()
                if not answer:
                    raise ConnectionError("the process has died")
                told = json.loads(answer)
                if told["number"] == number:  # else one that nobody waited for any more
                    return told["answer"]

    def close(self) -> None:
        """Forget it."""
        self._writer.close()


class TinyEngine(httpx.AsyncBaseTransport):
    """The processes that live, and vLLM's HTTP routes as far as the sidecar uses them."""

    def __init__(
        self,
        nursery: Nursery,
        run_dir: Path,
        found: Found,
        has_rpc: bool,
        user: int | None = None,
        group: int | None = None,
    ) -> None:
        self.processes: dict[Place, TinyProcess] = {}
        self.run_dir = run_dir
        self.found = found
        self.has_rpc = has_rpc
        self._nursery = nursery
        self._owner = None if user is None else [user, group]

    async def start(self, place: Place) -> None:
        """Start the process of `place`; it has its page, and its engine is ready."""
        path = str(self._nursery.directory / secrets.token_hex(4))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            pid = self._nursery.order(
                start=path,
                role=place.role,
                rank=place.rank,
                run_dir=str(self.run_dir),
                thresholds=self.found.thresholds,
                frozen=self.found.frozen,
                owner=self._owner,
            )
            listener.setblocking(False)
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        os.unlink(path)
        process = TinyProcess(pid, *await asyncio.open_unix_connection(sock=connection))
        await process.ask("truth")
        self.processes[place] = process

    def kill(self, place: Place) -> None:
        """SIGKILL; it is gone when this returns."""
        process = self.processes.pop(place)
        self._nursery.order(end=process.pid)
        process.close()

    def stop(self, place: Place) -> None:
        """SIGSTOP; it stands still when this returns."""
        strike(self.processes[place].pid, signal.SIGSTOP)

    def go_on(self, place: Place) -> None:
        """SIGCONT."""
        os.kill(self.processes[place].pid, signal.SIGCONT)

    async def truth(self) -> dict[Place, dict[str, Any]]:
        """What the GC of each living process really is like."""
        return {place: await process.ask("truth") for place, process in self.processes.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """What the API server answers."""
        if API_SERVER not in self.processes or not self.has_rpc:
            raise httpx.ConnectError("nobody listens", request=request)
        path = request.url.path
        if path == "/version":
            return _answer({"version": "0.32.0"})
        if path != ENDPOINT_PATH:
            return _answer({}, 404)
        if request.method == "GET":
            return _answer({"agent": "0.1.0", "method": METHOD})
        secret = (self.run_dir / TOKEN_NAME).read_text()
        if request.headers["Authorization"] != f"Bearer {secret}":
            return _answer({"code": "endpoint_token_wrong"}, 401)
        command = json.loads(await request.aread())
        replies = await asyncio.gather(
            *(each.ask("handle", command) for each in self.processes.values()),
            return_exceptions=True,
        )
        results = [reply for reply in replies if not isinstance(reply, BaseException)]
        return _answer({"results": results})


def _answer(body: dict[str, Any], status: int = 200) -> httpx.Response:
    return httpx.Response(status, stream=httpx.ByteStream(json.dumps(body).encode()))
