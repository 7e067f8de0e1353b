"""The agent of this process: its identity, its thread, its page and the one way in for commands.

There is one per process, started by a hook when the process's role is known. Nothing here raises into the
engine: a fault of ours becomes a coded reply or a line on the page.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gc_sidecar_agent import __version__
from gc_sidecar_agent.board import Board, BoardError, Lease, board_stamp, read_board
from gc_sidecar_agent.collection import Collect, CollectionError, MainThreadCollector, collect_here
from gc_sidecar_agent.collector import collector_kind, is_heap_frozen
from gc_sidecar_agent.command import (
    OPERATION_KINDS,
    PROTOCOL_VERSION,
    Command,
    CommandError,
    Outcome,
    parse_command,
)
from gc_sidecar_agent.gate import Gate, this_gate
from gc_sidecar_agent.memory import read_device_memory, read_memory
from gc_sidecar_agent.meter import PauseMeter, private_header
from gc_sidecar_agent.page import (
    FULL_RING_OFFSET,
    HEADER_COLLECTING_SINCE_NS,
    NONE,
    NUMBER_INDEX,
    NUMBER_NAMES,
    YOUNG_RING_OFFSET,
    PageError,
    PageWriter,
    clock_offset_ns,
    create_page,
    page_name,
    remove_dead_pages,
)
from gc_sidecar_agent.policy import Policy
from gc_sidecar_agent.signals import LostExits

RUN_DIR_VARIABLE = "GC_SIDECAR_RUN_DIR"

POLL_S = 0.1
MEMORY_POLLS = 10  # memory is read and the page looked after every so many polls
DEVICE_POLLS = 50
PAGE_RETRY_POLLS = 50
SETTLE_POLLS = 30
GATE_POLLS = 300
# How long workers and engine cores leave a command on the board to the engine core, which carries it out over
# RPC in all of them side by side, before each does it by itself.
BOARD_GRACE_S = 1.0

# Where several roles share a process, it is shown under the first of these.
ROLES = ("api_server", "engine_core", "worker")

# Under vLLM's own logger, so that the one line per process appears in its log and in its format.
logger = logging.getLogger("vllm.gc_sidecar_agent")

_INDEX = NUMBER_INDEX


@dataclass(frozen=True)
class Topology:
    """The processes that this one knows its engine to have: an engine core and `workers` workers for each of
    `dp_ranks`, and `api_servers` (None: not known)."""

    dp_ranks: tuple[int, ...]
    workers: int
    api_servers: int | None


class Agent:
    """See the module. `start` may be called again when the process turns out to have a second role."""

    def __init__(self, run_dir: str | None, gate: Gate | None = None) -> None:
        self.run_dir = run_dir
        self._gate = gate or Gate()
        self.roles: list[str] = []
        self.dp_rank = 0
        self.rank = 0
        self.topology: Topology | None = None
        self.engine = "unknown"
        self.ready = False
        self.collector = collector_kind()
        self.meter = PauseMeter()
        self.policy = Policy(self.meter, self.collector)
        self.main_thread = MainThreadCollector(self.meter)
        self.lost_exits = LostExits(self.meter.callback, self.main_thread.run_pending)
        # Set by the engine core's hook: has its busy loop carry out a command in all its processes.
        self.busy_loop: Callable[[dict[str, Any]], None] | None = None
        self._born()

    def _born(self) -> None:
        """What is new in every process, a forked one included."""
        self._token = os.urandom(4).hex()
        self._started_ns = time.time_ns()
        self._page: PageWriter | None = None
        self._page_error: str | None = None
        self._page_lost = False
        # The agent's thread and a thread that carries out a command both publish; never taken in a callback.
        self._publishing = threading.Lock()
        self._changes = 0  # rises with every change of ours that `description` shows
        self._published_changes = (-1, -1)
        self._published_rings = (0, 0)
        self._polls = 0
        self._settle_polls = 0
        self._gate_command = self._gate.command(self._token)
        self._gate_polls = 0
        self._anonymous_bytes: int | None = None
        self._board = Board()
        self._board_stamp: tuple[int, int] | None = None
        self._board_seen_at: dict[str, float] = {}
        self._lease_sequence = 0
        self._thread: threading.Thread | None = None
        self.last_error: str | None = None

    # --- life ---

    def start(
        self, role: str, dp_rank: int, rank: int, topology: Topology | None, engine: str
    ) -> None:
        """Take on a role: meter, page and thread begin with the first one."""
        if role in self.roles:
            return
        self.roles = sorted([*self.roles, role], key=ROLES.index)
        if topology is not None:
            self.topology = topology
        self.engine = engine
        self._changes += 1
        if self._thread is not None:
            return
        self.dp_rank = dp_rank
        self.rank = rank
        self.meter.attach()
        self.lost_exits.watch()
        self._open_page()
        self._thread = threading.Thread(target=self._loop, name="gc-sidecar-agent", daemon=True)
        self._thread.start()
        sight = self._page.name if self._page else self._page_error or "no run directory"
        logger.info(
            "gc-sidecar agent %s: %s dp%d rank %d, %s collector, page: %s",
            __version__, role, dp_rank, rank, self.collector, sight,
        )  # fmt: skip

    def set_ready(self) -> None:
        """The engine has finished its start-up: from now on policies may be applied."""
        if self.ready:
            return
        self.policy.note_ready()
        self.ready = True
        self._changes += 1
        if self.roles != ["api_server"]:
            self._pass_gate(partial(collect_here, self.meter))

    def _pass_gate(self, collect: Collect) -> None:
        """Enter the policy that the environment asks for, once."""
        command, self._gate_command = self._gate_command, None
        if command is None:
            return
        outcome = self.policy.run(command, collect)
        logger.info(
            "gc-sidecar: policy %s by the environment: %s",
            command.kind,
            f"in force for {command.lease_s:g} s" if outcome.ok else outcome.detail,
        )

    def _pass_gate_late(self) -> None:
        """An API server freezes its heap after it has its client, and that is part of what will be put back:
        wait for it, but not for ever, for not every server does."""
        if self._gate_command is None or not self.ready or self.roles != ["api_server"]:
            return
        self._gate_polls += 1
        if self._gate_polls % MEMORY_POLLS:
            return
        if is_heap_frozen() or self._gate_polls >= GATE_POLLS:
            self._pass_gate(partial(collect_here, self.meter))

    def reset_after_fork(self) -> None:
        """In a forked child: nothing of the parent's is ours. The child starts anew when it has a role."""
        self.meter.detach()
        self.policy.reset_after_fork()
        page = self._page
        if page is not None:
            os.close(page.fd)
        self.meter.__init__()  # type: ignore[misc]
        self.main_thread = MainThreadCollector(self.meter)
        self.busy_loop = None
        self.roles = []
        self.ready = False
        self._born()

    # --- commands ---

    def handle(self, request: Any) -> dict[str, Any]:
        """Carry out a command dict on this thread and reply. Never raises; the reply is JSON-safe.

        This is what collective_rpc calls, in a worker on its main thread, in an engine core on its busy loop.
        """
        operation_id = request.get("operation_id") if isinstance(request, dict) else None
        operation_id = operation_id if isinstance(operation_id, str) else ""
        try:
            try:
                command = parse_command(request)
            except CommandError as error:
                return self._reply(operation_id, _error("bad_command", str(error), operation_id))
            outcome = self._execute(command, partial(collect_here, self.meter))
            # Who asked looks at the page next, to see it proven; the next poll would be late.
            self._publish()
            return self._reply(command.operation_id, outcome)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            return {
                "version": PROTOCOL_VERSION,
                "operation_id": operation_id,
                "outcome": _error("agent_error", detail, operation_id).to_dict(),
                "report": None,
            }

    def _execute(self, command: Command, collect: Collect) -> Outcome:
        # A call over RPC comes from the engine's busy loop: the engine has finished its start-up.
        self.set_ready()
        deadline = time.monotonic() + command.deadline_s
        if command.kind in OPERATION_KINDS:
            return self.policy.run(command, collect)
        if command.kind == "lease":
            if not self.policy.renew_lease(command.lease_s, command.generation):
                detail = f"no policy of generation {command.generation} is in force here"
                return _error("not_in_policy", detail, command.operation_id)
        elif command.kind == "settle":
            try:
                self.policy.settle(collect, deadline)
            except CollectionError as error:
                return _error(error.code, error.detail, command.operation_id)
        return Outcome(command.operation_id, command.kind, self.policy.generation, ok=True)

    def _reply(self, operation_id: str, outcome: Outcome) -> dict[str, Any]:
        self._read_numbers()
        return {
            "version": PROTOCOL_VERSION,
            "operation_id": operation_id,
            "outcome": outcome.to_dict(),
            "report": self.report(),
        }

    def report(self) -> dict[str, Any]:
        """What the page shows, as one JSON-safe dict, for those who have no page."""
        words = self.meter.words
        return {
            "description": self.description(),
            "numbers": {
                name: None if words[index] == NONE else words[index]
                for index, name in enumerate(NUMBER_NAMES)
            },
            "collecting_since_ns": self.meter.collecting[HEADER_COLLECTING_SINCE_NS],
        }

    def description(self) -> dict[str, Any]:
        """The JSON part of the page."""
        return {
            "identity": {
                "roles": list(self.roles),
                "dp_rank": self.dp_rank,
                "rank": self.rank,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "token": self._token,
                "started_at": self._started_ns / 1e9,
                "python": platform.python_version(),
                "collector": self.collector,
                "engine": self.engine,
                "agent": __version__,
                "page_error": self._page_error,
                "agent_error": self.last_error,
            },
            "topology": asdict(self.topology) if self.topology else None,
            "state": {"ready": self.ready, **self.policy.description()},
        }

    # --- the thread ---

    def _loop(self) -> None:
        pid = os.getpid()
        # Each for itself: one that fails must not keep the others from being done.
        steps = (
            self.lost_exits.deliver,
            self._look_after,
            self._pass_gate_late,
            self._keep_policy,
            self._follow_board,
            self._settle,
            self._publish,
        )
        while os.getpid() == pid:
            self._polls += 1
            for step in steps:
                try:
                    step()
                except Exception as error:
                    self._note_error(f"{type(error).__name__}: {error}")
            time.sleep(POLL_S)

    def _keep_policy(self) -> None:
        mode = self.policy.mode
        self.policy.poll(self._anonymous_bytes, self._collect_from_thread())
        if mode != self.policy.mode:
            # It ended by itself, as in the workers: an idle one cannot collect before an RPC comes.
            self._settle_polls = SETTLE_POLLS

    def _settle(self) -> None:
        if self._settle_polls <= 0:
            return
        self._settle_polls -= 1
        if self.busy_loop is not None and self._settle_polls % MEMORY_POLLS == 0:
            self.busy_loop(Command("settle", f"settle-{self._polls}", 0).to_dict())

    def _note_error(self, error: str) -> None:
        if error != self.last_error:
            self.last_error = error
            self._changes += 1

    def _look_after(self) -> None:
        """Once a second: memory, the callback that somebody may have removed, the page that may have gone."""
        if self._polls % MEMORY_POLLS != 1:
            return
        self.meter.attach()
        self._read_memory()
        if self._polls % DEVICE_POLLS == 1:
            words = self.meter.words
            allocated, reserved = read_device_memory()
            words[_INDEX["device_allocated_bytes"]] = _or_none(allocated)
            words[_INDEX["device_reserved_bytes"]] = _or_none(reserved)
        with self._publishing:
            if self._page is not None and not self._page.is_listed():
                self._abandon_page("the page was removed from the run directory")
        # At once where it was lost, and now and then where there was none.
        if self._page is None and (self._page_lost or self._polls % PAGE_RETRY_POLLS == 1):
            self._open_page()

    def _collect_from_thread(self) -> Collect:
        """How this thread gets a collection: itself only in a process that has neither core nor worker."""
        if self.roles == ["api_server"]:
            return partial(collect_here, self.meter)
        return self.main_thread.collect

    def _follow_board(self) -> None:
        if self.run_dir is None or not self.ready:
            return
        stamp = board_stamp(self.run_dir)
        if stamp != self._board_stamp:
            self._board_stamp = stamp
            try:
                self._board = read_board(self.run_dir)
            except FileNotFoundError:
                self._board = Board()
            except (BoardError, OSError) as error:
                self._note_error(f"the board cannot be read: {error}")
                self._board = Board()
            self._board_seen_at.clear()
        board = self._board
        lease = board.lease
        if board.policy is not None and board.policy.generation > self.policy.generation:
            wanted = _still_wanted(board.policy, lease)
            if wanted is not None:
                self._follow(wanted)
        if board.maintain is not None:
            self._follow(board.maintain)
        if lease is not None and lease.sequence > self._lease_sequence:
            wanted = board.policy
            if wanted is not None and wanted.generation == self.policy.generation:
                self._lease_sequence = lease.sequence
                remaining_s = _remaining_s(lease)
                if remaining_s > 0:
                    self.policy.renew_lease(remaining_s, wanted.generation)

    def _follow(self, command: Command) -> None:
        if self.policy.outcome_of(command.operation_id) is not None:
            self._board_seen_at.pop(command.operation_id, None)
            return
        if self.roles == ["api_server"]:
            self._execute(command, partial(collect_here, self.meter))
            return
        now = time.monotonic()
        seen_at = self._board_seen_at.get(command.operation_id)
        if seen_at is None:
            self._board_seen_at[command.operation_id] = now
            if self.busy_loop is not None:
                self.busy_loop(command.to_dict())
        elif now - seen_at >= BOARD_GRACE_S:
            self._execute(command, self.main_thread.collect)

    # --- the page ---

    def _open_page(self) -> None:
        self._page_lost = False
        if not self.run_dir:
            return
        role = self.roles[0]
        remove_dead_pages(self.run_dir, role, self.dp_rank, self.rank)
        name = page_name(role, self.dp_rank, self.rank, self._started_ns // 1_000_000_000)
        with self._publishing:
            self._page_error = None
            self._changes += 1
            self._published_changes = (-1, -1)
            self._published_rings = (0, 0)
            try:
                page = create_page(self.run_dir, name, self._write_on)
            except (OSError, PageError) as error:
                self._page_error = f"no page in {self.run_dir}: {error}"
                return
            self._page = page
            self.meter.collecting = page.header

    def _abandon_page(self, why: str) -> None:
        page = self._page
        # First of all: a callback that stores into a truncated map would kill the process.
        self.meter.collecting = private_header()
        self._page = None
        self._page_lost = True
        self._page_error = why
        self._changes += 1
        if page is not None:
            page.discard()

    def _publish(self) -> None:
        with self._publishing:
            page = self._page
            if page is not None:
                self._publish_on(page)

    def _publish_on(self, page: PageWriter) -> None:
        try:
            if page.is_intact():
                self._write_on(page)
            else:
                self._abandon_page("the page was truncated or overwritten by another process")
        except (OSError, PageError) as error:
            self._abandon_page(f"the page cannot be written: {error}")

    def _write_on(self, page: PageWriter) -> None:
        self._read_numbers()
        words = self.meter.words
        changes = (self._changes, self.policy.changes)
        if changes != self._published_changes:
            page.write_description(self.description())
            self._published_changes = changes
        rings = (words[_INDEX["full_ring_next"]], words[_INDEX["young_ring_next"]])
        if rings[0] != self._published_rings[0]:
            page.write_ring(FULL_RING_OFFSET, self.meter.full_ring)
        if rings[1] != self._published_rings[1]:
            page.write_ring(YOUNG_RING_OFFSET, self.meter.young_ring)
        self._published_rings = rings
        words[_INDEX["heartbeat"]] += 1
        page.write_numbers(words)

    def _read_memory(self) -> None:
        words = self.meter.words
        memory = read_memory()
        self._anonymous_bytes = memory.anonymous_bytes
        words[_INDEX["anonymous_bytes"]] = _or_none(memory.anonymous_bytes)
        words[_INDEX["file_bytes"]] = _or_none(memory.file_bytes)
        words[_INDEX["shared_bytes"]] = _or_none(memory.shared_bytes)
        entry = self.policy.entry_anonymous_bytes
        growth = None
        if entry is not None and memory.anonymous_bytes is not None:
            growth = memory.anonymous_bytes - entry
        words[_INDEX["growth_bytes"]] = _or_none(growth)

    def _read_numbers(self) -> None:
        words = self.meter.words
        if words[_INDEX["anonymous_bytes"]] == NONE:
            self._read_memory()
        words[_INDEX["clock_offset_ns"]] = clock_offset_ns()
        remaining_s = self.policy.lease_remaining_s()
        words[_INDEX["lease_remaining_ms"]] = (
            NONE if remaining_s is None else int(remaining_s * 1000)
        )
        words[_INDEX["gc_enabled"]] = int(gc.isenabled())
        threshold0, threshold1, threshold2 = gc.get_threshold()
        words[_INDEX["threshold0"]] = threshold0
        words[_INDEX["threshold1"]] = threshold1
        words[_INDEX["threshold2"]] = threshold2


def _remaining_s(lease: Lease) -> float:
    """What is left of the lease. The wall clock may only shorten it: a late reader of an old board must not
    begin it anew."""
    return min(lease.remaining_s, lease.expires_at - time.time())


def _still_wanted(policy: Command, lease: Lease | None) -> Command | None:
    """`policy` with what is left of its lease; None where that has ended: an old board switches nothing on."""
    if policy.kind == "restore" or lease is None:
        return policy
    remaining_s = min(policy.lease_s, _remaining_s(lease))
    return replace(policy, lease_s=remaining_s) if remaining_s > 0 else None


def _or_none(value: int | None) -> int:
    return NONE if value is None else value


def _error(code: str, detail: str, operation_id: str) -> Outcome:
    return Outcome(operation_id, "unknown", 0, ok=False, code=code, detail=detail)


_agent: Agent | None = None
_agent_lock = threading.Lock()


def this_process() -> Agent:
    """The agent of this process, made on first use; it does nothing before its `start`.

    Raises GateError; the plugin has seen to it before vLLM starts anything.
    """
    global _agent
    with _agent_lock:
        if _agent is None:
            _agent = Agent(os.environ.get(RUN_DIR_VARIABLE) or None, this_gate())
            os.register_at_fork(after_in_child=_reset_after_fork)
        return _agent


def _reset_after_fork() -> None:
    global _agent_lock
    _agent_lock = threading.Lock()
    if _agent is not None:
        try:
            _agent.reset_after_fork()
        except Exception:  # nothing of ours may keep a child from starting
            pass
