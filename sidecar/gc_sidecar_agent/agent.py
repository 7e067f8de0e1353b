"""The agent of this process: its identity, its thread, and the one way in for commands.

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
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from gc_sidecar_agent import __version__
from gc_sidecar_agent.board import Board, BoardError, read_board
from gc_sidecar_agent.collection import (
    Collect,
    Collection,
    CollectionError,
    MainThreadCollector,
    collect_here,
)
from gc_sidecar_agent.collector import collector_kind, is_heap_frozen
from gc_sidecar_agent.command import (
    OPERATION_KINDS,
    PROTOCOL_VERSION,
    Command,
    CommandError,
    Outcome,
    echoed_id,
    parse_command,
)
from gc_sidecar_agent.follower import BoardFollower
from gc_sidecar_agent.gate import Gate, beside_board, this_gate
from gc_sidecar_agent.memory import read_cgroup_memory, read_device_memory, read_memory
from gc_sidecar_agent.meter import PauseMeter, outlast_callbacks
from gc_sidecar_agent.page import (
    HEADER_COLLECTING_SINCE_NS,
    NONE,
    NUMBER_INDEX,
    NUMBER_NAMES,
    clock_offset_ns,
)
from gc_sidecar_agent.policy import Policy
from gc_sidecar_agent.publisher import Publisher
from gc_sidecar_agent.signals import LostExits

RUN_DIR_VARIABLE = "GC_SIDECAR_RUN_DIR"

POLL_S = 0.1
# Every so many polls: memory is read and the page looked after; device memory; the cgroup's memory; a page that
# could not be made. All are multiples of the first.
MEMORY_POLLS = 10
DEVICE_POLLS = 50
CGROUP_POLLS = 100
PAGE_RETRY_POLLS = 50
# For how many polls an engine core has its workers run what is pending, after its policy ended by itself or its
# own collection was done at last.
SETTLE_POLLS = 30
# How long workers and engine cores leave a command on the board to the engine core's busy loop.
BOARD_GRACE_S = 1.0
# For how many polls an API server waits for vLLM to freeze its heap before it passes the gate.
GATE_POLLS = 300

# Where several roles share a process, it is shown under the first of these.
ROLES = ("api_server", "engine_core", "worker")

# Under vLLM's own logger, so that the one line per process appears in its log and in its format.
logger = logging.getLogger("vllm.gc_sidecar_agent")


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
        self.roles: list[str] = []
        self.dp_rank = 0
        self.rank = 0
        self.topology: Topology | None = None
        self.engine = "unknown"
        self.ready = False
        self.last_error: str | None = None
        self.collector = collector_kind()
        self.meter = PauseMeter()
        self.policy = Policy(self.meter, self.collector)
        self.publisher = Publisher(
            run_dir, self.meter, self._read_numbers, self.description, lambda: self._all_changes
        )
        self.follower = BoardFollower(run_dir, self.policy, self._execute_from_thread)
        self.main_thread = MainThreadCollector(self.meter)
        self.lost_exits = LostExits(self.meter.callback, self.main_thread.run_pending)
        # Set by the engine core's hook: has its busy loop carry out a command in all its processes.
        # Not after the given time, if one is given (seconds since the epoch).
        self.busy_loop: Callable[[dict[str, Any], float | None], None] | None = None
        self._run_dir = run_dir
        self._token = os.urandom(4).hex()
        self._started_ns = time.time_ns()
        self._changes = 0  # rises with every change of ours that `description` shows
        self._polls = 0
        self._settle_polls = 0
        self._gate_command = (gate or Gate()).command(self._token)
        self._gate_polls = 0
        # When anonymous memory was read (time.monotonic()), and what it was: together, for several threads look.
        self._memory: tuple[float, int | None] = (0.0, None)
        self._thread: threading.Thread | None = None

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
        logger.info(
            "gc-sidecar agent %s: %s dp%d rank %d, %s collector, page: %s",
            __version__,
            role,
            dp_rank,
            rank,
            self.collector,
            self.publisher.name or self.publisher.error or "no run directory",
        )

    def set_ready(self) -> None:
        """The engine has finished its start-up: from now on policies may be applied."""
        if self.ready:
            return
        self.policy.note_ready()
        self._look_at_board_before_gate()
        self.ready = True
        self._changes += 1
        if not self._is_api_server_only:
            self._pass_gate(partial(collect_here, self.meter))

    def leave_behind(self) -> None:
        """In a forked child: nothing of the parent's is ours. The child gets an agent of its own when it has
        a role."""
        self.meter.detach()
        self.policy.leave_behind()
        self.publisher.leave_behind()

    @property
    def _is_api_server_only(self) -> bool:
        # Such a process has no device tensors: the agent's thread may collect in it.
        return self.roles == ["api_server"]

    @property
    def _all_changes(self) -> int:
        return self._changes + self.policy.changes

    def _open_page(self) -> None:
        self._changes += 1
        started_s = self._started_ns // 1_000_000_000
        self.publisher.open(self.roles[0], self.dp_rank, self.rank, started_s)

    # --- the environment gate ---

    def _look_at_board_before_gate(self) -> None:
        """What a sidecar before this engine left there. Every process looks when it is ready, so they agree; what
        a sidecar says from then on is newer than the gate's command."""
        wanted = self._gate_command
        if wanted is None or self._run_dir is None:
            return
        try:
            board = read_board(self._run_dir)
        except (
            BoardError,
            OSError,
        ):  # the follower tells, if it is more than a board that is not there yet
            board = Board()
        self._gate_command = beside_board(wanted, board)
        if self._gate_command is None and board.policy is not None:
            logger.warning(
                "gc-sidecar: policy %s by the environment: not entered; the board in the run directory has"
                " %s by %s, whose lease still runs",
                wanted.kind,
                board.policy.kind,
                board.policy.owner,
            )

    def _pass_gate(self, collect: Collect) -> None:
        """Enter the policy that the environment asks for, once."""
        command, self._gate_command = self._gate_command, None
        if command is None:
            return
        if self.policy.generation >= max(1, command.generation):
            # Only an API server is reached by anybody before it has passed.
            logger.warning(
                "gc-sidecar: policy %s by the environment: not entered; a sidecar has asked for generation %d"
                " meanwhile",
                command.kind,
                self.policy.generation,
            )
            return
        outcome = self.policy.run(command, collect)
        logger.log(
            logging.INFO if outcome.ok else logging.WARNING,
            "gc-sidecar: policy %s by the environment: %s",
            command.kind,
            f"in force for {command.lease_s:g} s" if outcome.ok else outcome.detail,
        )

    def _pass_gate_late(self) -> None:
        """An API server freezes its heap after it has its client, and that is part of what will be put back:
        wait for it, but not for ever, for not every server does."""
        if self._gate_command is None or not self.ready or not self._is_api_server_only:
            return
        self._gate_polls += 1
        if self._gate_polls % MEMORY_POLLS:
            return
        if is_heap_frozen() or self._gate_polls >= GATE_POLLS:
            self._pass_gate(partial(collect_here, self.meter))

    # --- commands ---

    def handle(self, request: Any) -> dict[str, Any]:
        """Carry out a command dict on this thread and reply. Never raises; the reply is JSON-safe.

        This is what collective_rpc calls, in a worker on its main thread, in an engine core on its busy loop.
        """
        operation_id = echoed_id(request)
        try:
            try:
                command = parse_command(request)
            except CommandError as error:
                return self._reply(_error("bad_command", str(error), operation_id))
            # A page that was truncated a moment ago is noticed before a collection stores into it.
            self.publisher.publish()
            outcome = self._execute(command, partial(collect_here, self.meter))
            # Who asked looks at the page next, to see it proven; the next poll would be late.
            self.publisher.publish()
            return self._reply(outcome)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            return reply_dict(_error("agent_error", detail, operation_id), None)

    def _execute(
        self, command: Command, collect: Collect, on_engine_thread: bool = True
    ) -> Outcome:
        # A call over RPC comes from the engine's busy loop: the engine has finished its start-up.
        self.set_ready()
        deadline = time.monotonic() + command.deadline_s
        if command.kind in OPERATION_KINDS:
            return self.policy.run(command, collect, on_engine_thread)
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

    def _reply(self, outcome: Outcome) -> dict[str, Any]:
        self._read_numbers()
        words = self.meter.words
        numbers = {
            name: None if words[index] == NONE else words[index]
            for index, name in enumerate(NUMBER_NAMES)
        }
        report = {
            "description": self.description(),
            "numbers": numbers,
            "collecting_since_ns": self.meter.collecting[HEADER_COLLECTING_SINCE_NS],
        }
        return reply_dict(outcome, report)

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
                "page_error": self.publisher.error,
                "agent_error": self.follower.error or self.last_error,
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
            self.publisher.publish,
        )
        while os.getpid() == pid:
            self._polls += 1
            for step in steps:
                try:
                    step()
                except Exception as error:
                    self._note_error(f"{type(error).__name__}: {error}")
            time.sleep(POLL_S)

    def _look_after(self) -> None:
        """Once a second: memory, the callback that somebody may have removed, the page that may have gone."""
        if self._polls % MEMORY_POLLS != 1:
            return
        self.meter.attach()
        self._read_memory()
        if self._polls % DEVICE_POLLS == 1:
            allocated, reserved = read_device_memory()
            self._set("device_allocated_bytes", allocated)
            self._set("device_reserved_bytes", reserved)
        if self._polls % CGROUP_POLLS == 1:
            cgroup = read_cgroup_memory()
            self._set("memory_limit_bytes", cgroup.limit_bytes)
            self._set("memory_current_bytes", cgroup.current_bytes)
        self.publisher.look_after()
        # At once where it was lost, and now and then where there was none.
        retry = self._polls % PAGE_RETRY_POLLS == 1
        if self.publisher.name is None and (self.publisher.lost or retry):
            self._open_page()

    def _keep_policy(self) -> None:
        mode = self.policy.mode
        read_at, anonymous_bytes = self._memory
        self.policy.poll(anonymous_bytes, self._collect_from_thread(), read_at)
        if mode != self.policy.mode:
            reason = self.policy.reason
            logger.info(
                "gc-sidecar: policy %s ended: %s",
                mode,
                reason.detail if reason else "no reason is known",
            )
            # It ended by itself, as in the workers: an idle one cannot collect before an RPC comes.
            self._settle_polls = SETTLE_POLLS

    def _settle(self) -> None:
        if self.policy.collect_pending:
            self._settle_polls = SETTLE_POLLS
        if self._settle_polls <= 0:
            return
        self._settle_polls -= 1
        if self.busy_loop is not None and self._polls % MEMORY_POLLS == 0:
            # Under one id: where the busy loop is held up, they do not pile up in its mail.
            # With no patience: it comes again, and the engine waits for it.
            self.busy_loop(Command("settle", "settle", 0, deadline_s=0.1).to_dict(), None)

    def _follow_board(self) -> None:
        if not self.ready:
            return
        before = self.follower.error
        if self._is_api_server_only:
            self.follower.look(grace_s=0.0, hand_over=None)
        else:
            busy_loop = self.busy_loop
            hand_over = (
                None if busy_loop is None else lambda c, until: busy_loop(c.to_dict(), until)
            )
            self.follower.look(BOARD_GRACE_S, hand_over)
        if self.follower.error != before:
            self._changes += 1

    def _execute_from_thread(self, command: Command) -> Outcome:
        return self._execute(command, self._collect_from_thread(), self._is_api_server_only)

    def _collect_from_thread(self) -> Collect:
        collect = self.main_thread.collect
        if self._is_api_server_only:
            collect = partial(collect_here, self.meter)

        def collect_with_a_sound_page(trigger: str, deadline: float) -> Collection:
            # As before a command over RPC: what was truncated a moment ago is not stored into.
            self.publisher.publish()
            return collect(trigger, deadline)

        return collect_with_a_sound_page

    def _note_error(self, error: str) -> None:
        if error != self.last_error:
            self.last_error = error
            self._changes += 1

    # --- the numbers that are not the meter's ---

    def _set(self, name: str, value: int | None) -> None:
        fits = value is not None and abs(value) < 1 << 63
        self.meter.words[NUMBER_INDEX[name]] = value if value is not None and fits else NONE

    def _read_memory(self) -> None:
        read_at = time.monotonic()
        memory = read_memory()
        self._memory = (read_at, memory.anonymous_bytes)
        self._set("anonymous_bytes", memory.anonymous_bytes)
        self._set("file_bytes", memory.file_bytes)
        self._set("shared_bytes", memory.shared_bytes)

    def _read_numbers(self) -> None:
        read_at, now = self._memory
        if now is None or read_at < self.policy.entry_measured_at:
            self._read_memory()
            now = self._memory[1]
        entry = self.policy.entry_anonymous_bytes
        self._set("growth_bytes", None if entry is None or now is None else now - entry)
        remaining_s = self.policy.lease_remaining_s()
        self._set("lease_remaining_ms", None if remaining_s is None else int(remaining_s * 1000))
        self._set("clock_offset_ns", clock_offset_ns())
        self._set("gc_enabled", int(gc.isenabled()))
        threshold0, threshold1, threshold2 = gc.get_threshold()
        self._set("threshold0", threshold0)
        self._set("threshold1", threshold1)
        self._set("threshold2", threshold2)


def reply_dict(outcome: Outcome, report: dict[str, Any] | None) -> dict[str, Any]:
    """The reply to a command: what was done, and what the page shows, for those who see no page."""
    return {
        "version": PROTOCOL_VERSION,
        "operation_id": outcome.operation_id,
        "outcome": outcome.to_dict(),
        "report": report,
    }


def _error(code: str, detail: str, operation_id: str) -> Outcome:
    return Outcome(operation_id, "unknown", 0, ok=False, code=code, detail=detail)


_agent: Agent | None = None
_agent_lock = threading.Lock()
_fork_is_watched = False


def this_process() -> Agent:
    """The agent of this process, made on first use; it does nothing before its `start`.

    Raises GateError; the plugin has seen to it before vLLM starts anything.
    """
    global _agent, _fork_is_watched
    with _agent_lock:
        if _agent is None:
            _agent = Agent(os.environ.get(RUN_DIR_VARIABLE) or None, this_gate())
        if not _fork_is_watched:
            _fork_is_watched = True
            os.register_at_fork(
                before=_wait_before_fork,
                after_in_parent=_go_on_after_fork,
                after_in_child=_leave_behind_after_fork,
            )
        return _agent


def _wait_before_fork() -> None:
    try:
        if _agent is not None:
            # Where several threads allocate, one of them is in a callback nearly all the time: no new one begins.
            _agent.meter.suspend()
        outlast_callbacks()
    except Exception:  # nothing of ours may disturb a fork
        pass


def _go_on_after_fork() -> None:
    try:
        if _agent is not None:
            _agent.meter.resume()
    except Exception:  # nothing of ours may disturb a fork
        pass


def _leave_behind_after_fork() -> None:
    global _agent, _agent_lock
    _agent_lock = threading.Lock()
    agent, _agent = _agent, None
    if agent is not None:
        try:
            agent.leave_behind()
        except Exception:  # nothing of ours may keep a child from starting
            pass
