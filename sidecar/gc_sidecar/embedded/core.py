"""An engine core of the embedded engine: its busy loop takes requests in, and steps while there is work.

An RPC runs on that same loop, so no step happens meanwhile. The classes have vLLM's names, so that the agent's
hooks for vLLM fit.
"""

from __future__ import annotations

import enum
import gc
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gc_sidecar.embedded import ENGINE_NAME as ENGINE_NAME
from gc_sidecar.embedded.channels import Channel, ChannelClosed
from gc_sidecar.embedded.executor import Executor
from gc_sidecar.embedded.heap import Heap, make_heap
from gc_sidecar.embedded.lockstep import Lockstep
from gc_sidecar.embedded.plugins import load_plugins
from gc_sidecar.embedded.scheduler import Request, Scheduler, Token
from gc_sidecar.embedded.settings import EngineConfig

ALL_CLIENTS = -1
REMEMBERED_STEPS = 65536
STATISTICS_S = 0.1


class EngineCoreRequestType(enum.Enum):
    """What the busy loop is given to do."""

    ADD = "add"
    ABORT = "abort"
    UTILITY = "utility"
    START_DP_WAVE = "start_dp_wave"
    EXECUTOR_FAILED = "executor_failed"
    WAKEUP = "wakeup"


@dataclass(frozen=True)
class Ready:
    """The engine core is about to enter its busy loop."""


@dataclass(frozen=True)
class Dead:
    """The engine core is about to end."""


@dataclass(frozen=True)
class Tokens:
    """What a step made for one client, and when, on the monotonic clock that all processes share."""

    tokens: list[Token]
    made_s: float


@dataclass(frozen=True)
class UtilityResult:
    """The answer to a utility call."""

    call_id: int
    result: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class Statistics:
    """Requests that run and wait, and steps since the start with the time that they took."""

    running: int
    waiting: int
    steps: int
    step_s: float


class EngineCore:
    """What RPC calls are looked up on."""

    def __init__(self, config: EngineConfig, model_executor: Executor, heap: Heap) -> None:
        settings = config.settings
        self.vllm_config = config
        self.model_executor = model_executor
        self.scheduler = Scheduler(settings.max_num_seqs)
        self.heap = heap
        self.steps: deque[tuple[int, int, int, int]] = deque(maxlen=REMEMBERED_STEPS)
        self.step_count = 0
        self.step_ns = 0

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` in every worker of this engine core."""
        results: list[Any] = self.model_executor.collective_rpc(method, timeout, args, kwargs)
        return results

    def recent_steps(self, since: int) -> list[tuple[int, int, int, int]]:
        """Steps after number `since`: number, start and length in nanoseconds of the monotonic clock, and
        how many objects a worker retained at its end."""
        return [step for step in self.steps if step[0] > since]

    def step(self) -> dict[int, list[Token]]:
        """One step: schedule, let all workers do their share, and hand out tokens."""
        started_ns = time.monotonic_ns()
        self.scheduler.schedule()
        self.heap.step()
        self.step_count += 1
        retained = self.model_executor.execute_model(self.step_count)
        tokens = self.scheduler.update()
        duration_ns = time.monotonic_ns() - started_ns
        self.step_ns += duration_ns
        self.steps.append((self.step_count, started_ns, duration_ns, retained))
        return tokens


class EngineCoreProc(EngineCore):
    """An engine core with its queues and its busy loop."""

    def __init__(
        self,
        config: EngineConfig,
        model_executor: Executor,
        heap: Heap,
        clients: Sequence[Channel],
    ) -> None:
        super().__init__(config, model_executor, heap)
        self.input_queue: queue.SimpleQueue[tuple[EngineCoreRequestType, Any]] = queue.SimpleQueue()
        self._output_queue: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._clients = clients
        self._counts_told = (-1, -1)
        self._told_at = 0.0
        for index, client in enumerate(clients):
            _start_thread("input", self._take_in, index, client)
        self._output = _start_thread("output", self._hand_out)
        model_executor.watch(
            lambda: self.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, None))
        )

    def run_busy_loop(self) -> None:
        """Take requests in and step, for ever. Raises when a worker is lost."""
        while True:
            self._process_input_queue(wait=not self.has_work())
            if self.has_work():
                self._process_engine_step()

    def has_work(self) -> bool:
        """Whether a step is to be made."""
        return self.vllm_config.settings.free_running or self.scheduler.has_unfinished_requests()

    def _process_input_queue(self, wait: bool) -> None:
        while wait or not self.input_queue.empty():
            if wait:
                self._tell_statistics(at_once=True)
            self._handle_client_request(*self.input_queue.get())
            wait = wait and not self.has_work()

    def _process_engine_step(self) -> None:
        tokens = self.step()
        made_s = time.monotonic()
        # First the counts: who has got the last token may look at them.
        self._tell_statistics(at_once=False)
        for client_index, of_client in tokens.items():
            self._output_queue.put((client_index, Tokens(of_client, made_s)))

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type is EngineCoreRequestType.ADD:
            self.scheduler.add(Request(*request))
            self._tell_statistics(at_once=False)
        elif request_type is EngineCoreRequestType.ABORT:
            self.scheduler.abort(request)
            self._tell_statistics(at_once=False)
        elif request_type is EngineCoreRequestType.UTILITY:
            client_index, call_id, method, args = request
            self._output_queue.put((client_index, self._call_utility(call_id, method, args)))
        elif request_type is EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError("Executor failed.")

    def _call_utility(self, call_id: int, method: str, args: tuple[Any, ...]) -> UtilityResult:
        try:
            return UtilityResult(call_id, getattr(self, method)(*args))
        except Exception as error:
            print(f"engine core: {method} failed: {error}", file=sys.stderr, flush=True)
            return UtilityResult(call_id, failure=f"Call to {method} method failed: {error}")

    def _tell_statistics(self, at_once: bool) -> None:
        counts = self.scheduler.counts
        now = time.monotonic()
        if counts != self._counts_told or now - self._told_at >= STATISTICS_S or at_once:
            self._counts_told = counts
            self._told_at = now
            told = Statistics(*counts, self.step_count, self.step_ns / 1e9)
            self._output_queue.put((ALL_CLIENTS, told))

    # --- threads, so that a client in a pause of its own holds up no step ---

    def _take_in(self, index: int, client: Channel) -> None:
        try:
            while True:
                self.input_queue.put(client.receive())
        except ChannelClosed:
            return

    def _hand_out(self) -> None:
        while True:
            client_index, message = self._output_queue.get()
            for index, client in enumerate(self._clients):
                if client_index in (index, ALL_CLIENTS):
                    try:
                        client.send(message)
                    except ChannelClosed:
                        continue
            if isinstance(message, Dead):
                return

    def tell_ready(self) -> None:
        """Let the API servers begin."""
        self._output_queue.put((ALL_CLIENTS, Ready()))

    def tell_dead(self) -> None:
        """Let the API servers know, and wait until they do."""
        self._output_queue.put((ALL_CLIENTS, Dead()))
        self._output.join(timeout=1.0)


class DPEngineCoreProc(EngineCoreProc):
    """One of several ranks that step in lockstep: while one has work, all step."""

    def __init__(
        self,
        config: EngineConfig,
        model_executor: Executor,
        heap: Heap,
        clients: Sequence[Channel],
        peers: Sequence[Channel],
    ) -> None:
        super().__init__(config, model_executor, heap, clients)
        self._running = False
        self._lockstep = Lockstep(
            peers,
            on_start=lambda: self.input_queue.put((EngineCoreRequestType.START_DP_WAVE, None)),
        )

    def run_busy_loop(self) -> None:
        """Step while any rank has work: those without requests of their own step, too."""
        while True:
            self._process_input_queue(wait=not self.has_work())
            if not self.has_work():
                continue
            self._lockstep.start()
            self._process_engine_step()
            self._running = self._lockstep.finish(super().has_work())

    def has_work(self) -> bool:
        """Whether this rank, or another, has a step to make."""
        return self._running or super().has_work() or self._lockstep.is_started()


def run_engine_core(
    config: EngineConfig,
    client_sockets: Sequence[socket.socket],
    peer_sockets: Sequence[socket.socket],
) -> None:
    """The whole life of an engine core process."""
    settings = config.settings
    signal.signal(signal.SIGTERM, _exit)
    # Workers first: they are forked, so nothing of this process's own may have begun.
    executor = Executor(config, [*client_sockets, *peer_sockets])
    try:
        load_plugins(settings.plugin)
        if not settings.without_agent:
            from gc_sidecar_agent.plugin import hook_engine_core

            hook_engine_core(sys.modules[__name__])
        heap = make_heap(settings)
        heap.fill(settings.heap_objects)
        executor.wait_until_ready()
        clients = [Channel(end) for end in client_sockets]
        if peer_sockets:
            peers = [Channel(end) for end in peer_sockets]
            core: EngineCoreProc = DPEngineCoreProc(config, executor, heap, clients, peers)
        else:
            core = EngineCoreProc(config, executor, heap, clients)
        if settings.start_frozen != "none":
            gc.freeze()
        try:
            core.tell_ready()
            core.run_busy_loop()
        except Exception:
            core.tell_dead()
            raise
    finally:
        executor.shutdown()


def _exit(_signal: int, _frame: object) -> None:
    # A second one must not break what the first one set going.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def _start_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=f"engine-core-{name}", daemon=True)
    thread.start()
    return thread
