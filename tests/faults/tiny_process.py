"""One process of a tiny engine: the whole agent, and a main thread that answers questions and commands.

Forked from a nursery, which imports nothing but the standard library and the agent: a full collection takes a
millisecond here. `tiny_engine` talks to both.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from gc_sidecar_agent import agent as agent_module
from gc_sidecar_agent import policy as policy_module
from gc_sidecar_agent.agent import Agent, Topology
from gc_sidecar_agent.page import NUMBER_INDEX
from tests.faults.controlled_time import AGENT_MODULES, ControlledTime
from tests.unit.agent.garbage import plant_cycle, plant_frozen_cycle

POLL_S = 0.02
MEMORY_POLLS = 3
BOARD_GRACE_S = 0.01
# How long an agent puts up with what somebody else did to GC: in controlled time, so that it may be long.
DRIFT_GRACE_S = 60.0
TOPOLOGY = Topology(dp_ranks=(0,), workers=2, api_servers=1)
# More are frozen than CPython itself ever freezes, and fewer than there are.
MANY_OBJECTS = 2000


def _be_nursery(time_path: str) -> None:
    """Fork for every order. It has no thread, so that it may."""
    agent_module.POLL_S = POLL_S
    agent_module.MEMORY_POLLS = MEMORY_POLLS
    agent_module.PAGE_RETRY_POLLS = 2 * MEMORY_POLLS
    agent_module.BOARD_GRACE_S = BOARD_GRACE_S
    policy_module.DRIFT_GRACE_S = DRIFT_GRACE_S
    Agent(None)  # whatever is imported late: another user may not be able to
    gc.collect()
    children: set[int] = set()
    with ControlledTime(Path(time_path)).in_force(AGENT_MODULES):
        for line in sys.stdin:
            order = json.loads(line)
            if "start" in order:
                pid = os.fork()
                if not pid:
                    _live(**order)
                children.add(pid)
            else:
                pid = order["end"]
                _end(pid)
                children.remove(pid)
            print(pid, flush=True)
    for pid in children:
        _end(pid)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _live(
    start: str,
    role: str,
    rank: int,
    run_dir: str,
    thresholds: list[int],
    frozen: bool,
    owner: list[int] | None,
) -> NoReturn:
    """A process of the engine, until its connection ends. `owner` is user and group, where they are not ours."""
    try:
        life = Life(start)
        if owner is not None:
            os.setgroups([owner[1]])
            os.setgid(owner[0])
            os.setuid(owner[0])
        life.begin(role, rank, run_dir, thresholds, frozen)
        life.go_on()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Life:
    """The main thread of a process: it waits for questions, and for the agent's thread to wake it."""

    agent: Agent

    def __init__(self, path: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        self.is_woken, self._wake = os.pipe()
        self.cycles: list[Any] = []
        self.ballast: list[bytes] = []

    def begin(
        self, role: str, rank: int, run_dir: str, thresholds: list[int], frozen: bool
    ) -> None:
        """Its GC as it will be found, and the agent with its role."""
        gc.set_threshold(*thresholds)
        if frozen:
            gc.freeze()
        self.agent = Agent(run_dir)

        def wake_up() -> None:
            os.write(self._wake, b"x")

        self.agent.main_thread.wake = wake_up
        self.agent.start(role, 0, rank, TOPOLOGY, "tiny 1.0")
        self.agent.set_ready()

    def go_on(self) -> None:
        """Answer until nobody asks any more."""
        data = b""
        connection = self.connection.fileno()
        while True:
            for ready in select.select([connection, self.is_woken], [], [])[0]:
                if ready == self.is_woken:
                    os.read(self.is_woken, 64)
                    continue
                received = self.connection.recv(65536)
                if not received:
                    return
                data += received
                while b"\n" in data:
                    line, data = data.split(b"\n", 1)
                    self.connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        asked = json.loads(line)
        answer = getattr(self, asked["question"])(asked["value"])
        return {"number": asked["number"], "answer": answer}

    def truth(self, _: None) -> dict[str, Any]:
        """What this process's GC really is like, and what it would tell."""
        policy = self.agent.policy
        return {
            "mode": policy.mode,
            "generation": policy.generation,
            "owner": policy.settings.owner if policy.settings else None,
            "lease_s": policy.lease_remaining_s(),
            "is_pending": policy.collect_pending,
            "is_drifted": policy.drift is not None,
            "reason": policy.reason.code if policy.reason else None,
            "is_enabled": gc.isenabled(),
            "thresholds": list(gc.get_threshold()),
            "is_frozen": gc.get_freeze_count() > MANY_OBJECTS,
            "cycles": sum(cycle() is not None for cycle in self.cycles),
            "freezes": self.agent.meter.words[NUMBER_INDEX["freezes"]],
            "polls": self.agent._polls,
            "agent_error": self.agent.last_error,
        }

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """A command over RPC."""
        return self.agent.handle(command)

    def plant(self, _: None) -> None:
        """Cyclic garbage; under a policy a freeze has caught it already."""
        plant = plant_cycle if self.agent.policy.mode == "off" else plant_frozen_cycle
        self.cycles = [plant()]

    def collect(self, _: None) -> None:
        """Somebody's full collections, which store into the page."""
        for _i in range(20):
            gc.collect()

    def meddle(self, thresholds: list[int]) -> None:
        """Somebody else in this process sets the thresholds."""
        gc.set_threshold(*thresholds)

    def grow(self, size: int) -> None:
        """Take so much memory."""
        self.ballast.append(b"x" * size)

    def shrink(self, _: None) -> None:
        """Give it back."""
        self.ballast.clear()


if __name__ == "__main__":
    _be_nursery(sys.argv[1])
