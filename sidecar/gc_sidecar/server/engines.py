"""All the engine URLs as one logical engine: which transport each has, and one call to all of them.

A call goes to every engine at once and the replies are merged; calls and questions go one after the other.
An engine whose replies are out of step gets no further RPC until it has restarted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx

from gc_sidecar.server.engine_http import EngineFault, ask
from gc_sidecar.server.latency import EngineLatency, Latencies, read_latencies
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.reports import CheckedReplies, Reply, check_replies
from gc_sidecar.server.tally import Tally
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.transports import (
    NOBODY,
    Discovery,
    Processes,
    Secret,
    Transport,
    ask_contact,
    discover,
)
from gc_sidecar_agent.command import Command

# What an engine's address says while nobody is there; a slow answer is no sign of that.
DOWN_CODES = ("engine_unreachable", "engine_hung_up")
RUNNING_METRIC, WAITING_METRIC = "vllm:num_requests_running", "vllm:num_requests_waiting"


@dataclass(frozen=True)
class CallResult:
    """What came back of one command from all engines."""

    replies: tuple[Reply, ...] = ()
    faults: tuple[EngineFault, ...] = ()

    @property
    def sent(self) -> bool:
        """Whether some engine may have got it."""
        return bool(self.replies) or any(fault.sent for fault in self.faults)


@dataclass
class _Engine:
    """One URL and what is known of it."""

    url: str
    discovery: Discovery = field(default_factory=lambda: Discovery(None))
    last_fault: Obstacle | None = None
    ask_at: float = 0.0
    retry_s: float = 0.0
    cores: frozenset[str] = frozenset()  # that were there when it was asked
    desync: Obstacle | None = None
    desynced_cores: frozenset[str] = frozenset()
    was_down: bool = False

    @property
    def transport(self) -> Transport | None:
        return None if self.desync else self.discovery.transport


class Engines:
    """See the module."""

    def __init__(
        self,
        urls: Iterable[str],
        http: httpx.AsyncClient,
        secret: Secret,
        timing: Timing,
        tally: Tally,
        has_run_dir: bool,
    ) -> None:
        self._engines = [_Engine(url) for url in urls]
        self._http = http
        self._secret = secret
        self._timing = timing
        self._tally = tally
        self._has_run_dir = has_run_dir
        self._noticed = NOBODY
        # Held by whoever talks to the engines: a command, or the questions which transport they have.
        self._channel = asyncio.Lock()

    @property
    def transport(self) -> str:
        """The transport for the status: of all engines, joined by `+` where they differ."""
        without = "board" if self._has_run_dir else "none"
        if not self._has_run_dir and any(engine.desync for engine in self._engines):
            without = "unavailable"
        names = {engine.transport.name if engine.transport else without for engine in self._engines}
        return "+".join(sorted(names, reverse=True)) or without

    @property
    def has_rpc(self) -> bool:
        """Whether a call would reach an engine."""
        return any(engine.transport for engine in self._engines)

    @property
    def can_reach(self) -> bool:
        """Whether a command could be sent at all, be it over the board."""
        return self._has_run_dir or self.has_rpc

    @property
    def has_fault(self) -> bool:
        """Whether the last call to an engine failed that still seems to have its transport."""
        return any(engine.transport and engine.last_fault for engine in self._engines)

    @property
    def is_talking(self) -> bool:
        """Whether a call or a question is under way."""
        return self._channel.locked()

    @property
    def is_reachable(self) -> bool:
        """Whether some engine answered when it was last asked."""
        return any(engine.discovery.reachable and not engine.was_down for engine in self._engines)

    @property
    def versions(self) -> list[str]:
        """Which versions of vLLM the engines said that they are, each once. Another engine says its name, too, and
        so do its agents."""
        versions = {e.discovery.version for e in self._engines if e.discovery.version}
        return sorted(version for version in versions if " " not in version)

    def obstacles(self) -> list[Obstacle]:
        """Why there is no better transport, engine by engine."""
        found: list[Obstacle] = []
        for engine in self._engines:
            if engine.desync is not None:
                found.append(engine.desync)
            elif engine.transport is None:
                found.extend(engine.discovery.obstacles)
            if engine.last_fault is not None:
                found.append(engine.last_fault)
        return list(dict.fromkeys(found))

    # --- asking ---

    def is_due(self, processes: Processes, eagerly: bool = False) -> bool:
        """Whether an engine has to be asked (again) which transport it has."""
        return any(self._is_due(engine, processes, eagerly) for engine in self._engines)

    def _is_due(self, engine: _Engine, processes: Processes, eagerly: bool) -> bool:
        restarted = bool(processes.cores and engine.cores and not processes.cores & engine.cores)
        if restarted and engine.discovery.transport is not None:
            return True
        if engine.discovery.transport is not None and not engine.was_down:
            return False
        now = time.monotonic()
        # Somebody is waiting: ask now, unless it was asked a moment ago.
        return now >= engine.ask_at or (
            eagerly and now >= engine.ask_at - engine.retry_s + self._timing.first_retry_s
        )

    async def ask(self, processes: Processes, eagerly: bool = False) -> bool:
        """Ask every engine that is due. Whether one was found that may be another than before. Never raises."""
        async with self._channel:
            due = [e for e in self._engines if self._is_due(e, processes, eagerly)]
            return any(await asyncio.gather(*(self._ask_one(engine, processes) for engine in due)))

    async def _ask_one(self, engine: _Engine, processes: Processes) -> bool:
        was_down = engine.was_down
        engine.discovery = await discover(
            self._http, engine.url, self._secret, self._timing.question_s, processes
        )
        engine.cores = processes.cores
        if engine.discovery.reachable:
            if engine.was_down and not processes.cores:
                engine.desync = None  # it came back: another one
            engine.was_down = False
            engine.last_fault = None  # what was found now is newer
        elif engine.discovery.obstacles[0].code in DOWN_CODES:
            engine.was_down = True
        if engine.discovery.transport is None:
            doubled = max(self._timing.first_retry_s, engine.retry_s * 2)
            engine.retry_s = min(doubled, self._timing.last_retry_s)
            engine.ask_at = time.monotonic() + engine.retry_s
        else:
            engine.retry_s = 0.0
        found = engine.discovery
        return found.transport is not None or (found.reachable and was_down)

    async def keep_contact(self, processes: Processes) -> None:
        """Without pages only this tells that an engine went away. Never raises."""
        for engine in self._engines:
            if engine.discovery.transport is None and engine.desync is None:
                continue
            fault = await ask_contact(self._http, engine.url, self._timing.question_s)
            if fault is not None and fault.code in DOWN_CODES:
                engine.was_down = True
                engine.ask_at = 0.0

    def notice_processes(self, processes: Processes) -> None:
        """Ask at once where a process has come, for its API may come with it; and let go of a desync when none
        of the engine cores that had it is left."""
        has_come = processes.all - self._noticed.all or processes.cores != self._noticed.cores
        self._noticed = processes
        for engine in self._engines:
            if has_come:
                engine.ask_at = engine.retry_s = 0.0
            engine.cores = engine.cores or processes.cores
            if (
                engine.desync is not None
                and engine.desynced_cores
                and processes.cores
                and not processes.cores & engine.desynced_cores
            ):
                engine.desync = None
                engine.desynced_cores = frozenset()
                engine.ask_at = 0.0
                engine.discovery = Discovery(None)

    # --- calling ---

    async def call(self, command: Command, deadline: float, processes: Processes) -> CallResult:
        """Send `command` to every engine that has a transport. Never raises."""
        async with self._channel:
            outcomes = await asyncio.gather(
                *(
                    self._call_one(engine, engine.transport, command, deadline, processes)
                    for engine in self._engines
                    if engine.transport is not None
                )
            )
        return CallResult(
            tuple(reply for replies, _ in outcomes for reply in replies),
            tuple(fault for _, faults in outcomes for fault in faults),
        )

    async def _call_one(
        self,
        engine: _Engine,
        transport: Transport,
        command: Command,
        deadline: float,
        processes: Processes,
    ) -> tuple[tuple[Reply, ...], tuple[EngineFault, ...]]:
        try:
            left_s = max(0.01, deadline - time.monotonic())
            results = await transport.call(command, left_s, processes)
        except EngineFault as fault:
            self._note_fault(engine, fault)
            return (), (fault,)
        checked = check_replies(results, command.operation_id)
        faults = [
            EngineFault("reply_malformed", f"{engine.url}: {text}") for text in checked.malformed
        ]
        if checked.desynced:
            faults.append(self._note_desync(engine, checked, processes))
        engine.last_fault = faults[0].as_obstacle() if checked.malformed else None
        return checked.replies, tuple(faults)

    def _note_fault(self, engine: _Engine, fault: EngineFault) -> None:
        engine.last_fault = fault.as_obstacle()
        if fault.code in DOWN_CODES:
            engine.was_down = True
            engine.ask_at = 0.0
        elif not fault.sent and not fault.code.startswith("endpoint_"):
            # It has no such route any more: something else was started there.
            engine.discovery = Discovery(None, (engine.last_fault,), reachable=True)
            engine.ask_at = time.monotonic() + self._timing.first_retry_s
            engine.last_fault = None

    def _note_desync(
        self, engine: _Engine, checked: CheckedReplies, processes: Processes
    ) -> EngineFault:
        self._tally.count_desync(checked.desynced)
        own_cores = frozenset(
            reply.report.identity.token
            for reply in checked.replies
            if reply.report and "engine_core" in reply.report.identity.roles
        )
        engine.desynced_cores = own_cores or processes.cores
        ranks = ", ".join(checked.desynced)
        instead = (
            "the board is used meanwhile"
            if self._has_run_dir
            else "without a run directory nothing can be sent meanwhile"
        )
        engine.desync = Obstacle(
            "rpc_desync",
            f"{engine.url}: {ranks} answered another call than ours; no RPC goes there until the"
            f" engine has restarted",
            f"restart the engine; {instead}",
        )
        engine.was_down = False
        return EngineFault("rpc_desync", engine.desync.detail, engine.desync.remedy)

    # --- idleness ---

    async def latencies(self) -> Latencies:
        """How long tokens took so far, by the engines' own metrics, of those engines that tell."""
        found: dict[int, EngineLatency] = {}
        for each in await asyncio.gather(*(self._latencies(e.url) for e in self._engines)):
            found.update(each)
        return found

    async def _latencies(self, url: str) -> Latencies:
        try:
            answer = await ask(self._http, "GET", f"{url}/metrics", self._timing.engine_metrics_s)
            # Not on our loop: several megabytes of metrics take a while.
            return await asyncio.to_thread(read_latencies, answer.body.decode("utf-8", "replace"))
        except (EngineFault, ValueError):
            return {}

    async def busy_requests(self) -> float:
        """How many requests the engines run or hold waiting, by their own metrics. Raises EngineFault."""
        if not self._engines:
            raise EngineFault("idle_unknown", "no engine URL is known, so no metrics can be read")
        counts = await asyncio.gather(*(self._busy_requests(e.url) for e in self._engines))
        return sum(counts)

    async def _busy_requests(self, url: str) -> float:
        answer = await ask(self._http, "GET", f"{url}/metrics", self._timing.question_s)
        values: dict[str, float] = {}
        for line in answer.body.decode("utf-8", "replace").splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in (RUNNING_METRIC, WAITING_METRIC):
                try:
                    # A label's value may hold blanks, the sample's does not.
                    value = float(
                        line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1]
                    )
                except (ValueError, IndexError):
                    continue
                values[name] = values.get(name, 0.0) + value
        if answer.status != 200 or len(values) < 2:
            raise EngineFault(
                "idle_unknown",
                f"GET {url}/metrics tells no {RUNNING_METRIC} and {WAITING_METRIC}",
            )
        return sum(values.values())
