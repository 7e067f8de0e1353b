"""The agent in processes of its own, seen as the sidecar sees it: through pages, the board and replies."""

from __future__ import annotations

import gc
import json
import math
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent import agent as agent_module
from gc_sidecar_agent.agent import RUN_DIR_VARIABLE, Agent, Topology, this_process
from gc_sidecar_agent.board import BOARD_NAME, Board, Lease, write_board
from gc_sidecar_agent.command import OPERATION_ID, PROTOCOL_VERSION, Command
from gc_sidecar_agent.memory import CgroupMemory
from gc_sidecar_agent.page import (
    HEADER_COLLECTING_SINCE_NS,
    PAGE_BYTES,
    PageContent,
    PageError,
    create_page,
    list_pages,
    page_name,
    read_page,
)
from gc_sidecar_agent.rules import HELD_OFF
from tests.unit.agent.garbage import Cycle, is_frozen, plant_cycle, plant_frozen_cycle
from tests.unit.agent.mounting import mount_for_this_process
from tests.unit.agent.own_process import Child, hear, in_own_process, say
from tests.unit.agent.waiting import wait_until

TOPOLOGY = Topology(dp_ranks=(0, 1), workers=2, api_servers=1)
FOUND = (321, 9, 8)


# --- an engine's process, as far as the agent is concerned ---


def run_agent(run_dir: str | None, roles: list[str], ready: bool, grace_s: float) -> None:
    """A process with these roles, whose main thread runs bytecode. It evaluates what it is told, on the main
    thread where that begins with `main:`."""
    if run_dir:
        os.environ[RUN_DIR_VARIABLE] = run_dir
    agent_module.POLL_S = 0.005
    agent_module.PAGE_RETRY_POLLS = 10
    agent_module.BOARD_GRACE_S = grace_s
    gc.set_threshold(*FOUND)
    agent = this_process()
    for role in roles:
        agent.start(role, 1, 3, TOPOLOGY, "stand-in 1.0")
    if ready:
        agent.set_ready()
    names = {**globals(), "agent": agent, "cycles": [], "ran_on": [], "resource": resource}
    gc.callbacks.append(
        lambda phase, info: (
            names["ran_on"].append(threading.current_thread().name)
            if info["generation"] == 2
            else None
        )
    )
    tasks: queue.Queue[str] = queue.Queue()

    def evaluate(expression: str) -> None:
        try:
            answer = eval(expression, names)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        say(answer)

    def listen() -> None:
        while True:
            told = hear()
            if told.startswith("main:"):
                tasks.put(told.removeprefix("main:"))
            else:
                evaluate(told)

    threading.Thread(target=listen, daemon=True).start()
    say("started")
    while True:
        try:
            evaluate(tasks.get(timeout=0.001))
        except queue.Empty:
            pass


class Engine(Child):
    """Such a process, and what the sidecar sees of it."""

    def __init__(
        self,
        run_dir: Path | None,
        *roles: str,
        ready: bool = True,
        grace_s: float = 0.02,
        wait: bool = True,
    ) -> None:
        where = str(run_dir) if run_dir else None
        super().__init__(
            run_agent, run_dir=where, roles=roles or ("worker",), ready=ready, grace_s=grace_s
        )
        self.run_dir = str(run_dir)
        if wait:
            assert self.hear() == "started"

    def page(self) -> PageContent:
        """The page of the process, the only one in its run directory."""
        (name,) = list_pages(self.run_dir)
        return read_page(self.run_dir, name, after=(0, 0))

    def page_or_none(self) -> PageContent | None:
        try:
            return self.page()
        except (PageError, OSError, ValueError):
            return None

    def identity(self) -> dict[str, Any]:
        return self.page().description["identity"]

    def state(self) -> dict[str, Any]:
        return self.page().description["state"]

    def wait_for(self, **state: Any) -> dict[str, Any]:
        """The state once it has these values."""

        def there() -> bool:
            now = self.state()
            return all(now[name] == value for name, value in state.items())

        wait_until(there, what=f"{state}, but {self.state()}")
        return self.state()

    def poll_often(self, polls: int = 30) -> None:
        """Until the agent's thread has come round so many times."""
        since = self.ask("agent._polls")
        wait_until(lambda: self.ask("agent._polls") > since + polls)

    def gc_state(self) -> list[Any]:
        return self.ask("[gc.isenabled(), gc.get_threshold(), is_frozen()]")

    def rpc(self, kind: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
        """A command over RPC, carried out on the main thread."""
        operation_id = f"rpc-{random.randrange(1 << 40)}"
        request = Command(kind, operation_id, generation, **fields).to_dict()
        reply = self.ask(f"main:agent.handle({request!r})")
        assert reply["operation_id"] == operation_id
        return reply


def as_found() -> list[Any]:
    return [True, list(FOUND), False]


def held_off() -> list[Any]:
    return [True, [*FOUND[:2], HELD_OFF], True]


def lease(sequence: int, remaining_s: float, expires_in_s: float | None = None) -> Lease:
    left_s = remaining_s if expires_in_s is None else expires_in_s
    return Lease(sequence, remaining_s, time.time() + left_s)


def freeze(generation: int, **fields: Any) -> Command:
    return Command("freeze", f"freeze-{generation}", generation, **fields)


def restore(generation: int) -> Command:
    return Command("restore", f"restore-{generation}", generation)


# --- its page ---


@pytest.mark.parametrize("role", ["api_server", "engine_core", "worker"])
def test_a_page_appears_when_the_process_has_a_role(tmp_path: Path, role: str) -> None:
    with Engine(tmp_path, role, ready=False) as engine:
        page = engine.page()
        assert page.name.startswith(f"{role}-dp1-r3-")
        assert page.alive
        identity = page.description["identity"]
        assert identity["roles"] == [role]
        assert (identity["dp_rank"], identity["rank"]) == (1, 3)
        assert identity["pid"] == engine.pid
        assert identity["python"] == ".".join(map(str, sys.version_info[:3]))
        assert identity["engine"] == "stand-in 1.0"
        assert (identity["page_error"], identity["agent_error"]) == (None, None)
        assert page.description["topology"] == {"dp_ranks": [0, 1], "workers": 2, "api_servers": 1}
        assert page.description["state"]["ready"] is False
        assert page.description["state"]["mode"] == "off"
        assert page.numbers["gc_enabled"] == 1
        thresholds = [page.numbers[f"threshold{n}"] for n in range(3)]
        assert thresholds == list(FOUND)
        assert (page.numbers["anonymous_bytes"] or 0) > 1 << 20
        assert page.numbers["lease_remaining_ms"] is None


def test_its_heartbeat_beats_and_its_collections_are_published(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        before = engine.page().numbers["heartbeat"] or 0
        wait_until(lambda: (engine.page().numbers["heartbeat"] or 0) > before + 5)
        engine.ask("gc.collect()")
        engine.ask("gc.collect(0)")
        page = wait_until(lambda: engine.page() if engine.page().full_pauses else None)
        (pause,) = page.full_pauses
        assert pause.trigger == "explicit"
        assert page.numbers["gen2_count"] == 1
        assert sum(page.numbers[f"requested_bucket{i}"] or 0 for i in range(17)) == 1
        wait_until(lambda: any(p.gc_generation == 0 for p in engine.page().young_pauses))
        # A pause is told as a date with the offset of the writer's clocks.
        began = (pause.start_ns + (page.numbers["clock_offset_ns"] or 0)) / 1e9
        assert abs(began - time.time()) < 30


CGROUP_READ_BY: list[str] = []


def stand_in_cgroup(limit: int | None, current: int | None) -> Callable[[], CgroupMemory]:
    """In the child: tells this of the cgroup, and notes which thread asked."""

    def read() -> CgroupMemory:
        CGROUP_READ_BY.append(threading.current_thread().name)
        return CgroupMemory(limit, current)

    return read


def test_the_cgroups_memory_is_published_and_read_on_the_agents_thread_alone(
    tmp_path: Path,
) -> None:
    def memory() -> tuple[int | None, int | None]:
        now = engine.page().numbers
        return now["memory_limit_bytes"], now["memory_current_bytes"]

    with Engine(tmp_path) as engine:
        wait_until(lambda: engine.page().numbers["heartbeat"] not in (None, 0, 1, 2))
        real = engine.ask("agent_module.read_cgroup_memory()")
        assert (memory()[1] is None) == (real[1] is None)
        engine.ask("setattr(agent_module, 'read_cgroup_memory', stand_in_cgroup(50, 40))")
        wait_until(lambda: memory() == (50, 40))
        assert engine.rpc("freeze")["report"]["numbers"]["memory_current_bytes"] == 40
        engine.ask("main:[gc.collect() for _ in range(20)] and None")
        assert set(engine.ask("CGROUP_READ_BY")) == {"gc-sidecar-agent"}
        # No limit is not a limit of nothing.
        engine.ask("setattr(agent_module, 'read_cgroup_memory', stand_in_cgroup(None, 30))")
        wait_until(lambda: memory() == (None, 30))


def test_a_second_role_is_added_to_the_same_page(tmp_path: Path) -> None:
    with Engine(tmp_path, "worker") as engine:
        first = engine.page()
        engine.ask("agent.start('engine_core', 1, 0, None, 'stand-in 1.0')")
        engine.ask("agent.start('engine_core', 1, 0, None, 'stand-in 1.0')")
        wait_until(lambda: engine.identity()["roles"] == ["engine_core", "worker"])
        second = engine.page()
        assert second.name == first.name
        assert second.description["identity"]["token"] == first.description["identity"]["token"]
        assert second.description["topology"] == first.description["topology"]
        threads = engine.ask("[t.name for t in threading.enumerate()]")
        assert threads.count("gc-sidecar-agent") == 1


def test_the_pages_of_dead_predecessors_are_removed(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        first = engine.page().name
        os.kill(engine.pid, signal.SIGKILL)
        engine.process.wait()
    with Engine(tmp_path) as engine:
        assert engine.page().name != first


def remove_it(page: Path) -> None:
    page.unlink()


def replace_it(page: Path) -> None:
    page.unlink()
    page.write_bytes(b"somebody's")


def truncate_it(page: Path) -> None:
    # To something: storing into a map of nothing is what nobody survives, for as long as one poll.
    os.truncate(page, 4096)


def truncate_and_grow_it(page: Path) -> None:
    with page.open("r+b") as file:
        file.truncate(4096)
        file.truncate(PAGE_BYTES)


def fill_it(page: Path) -> None:
    with page.open("r+b") as file:
        file.write(os.urandom(PAGE_BYTES))


@pytest.mark.parametrize(
    "damage", [remove_it, replace_it, truncate_it, truncate_and_grow_it, fill_it]
)
def test_a_process_whose_page_is_damaged_survives_and_has_a_new_one(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with Engine(tmp_path) as engine:
        assert engine.rpc("freeze")["outcome"]["ok"]
        descriptors = engine.ask("len(os.listdir('/proc/self/fd'))")
        for _ in range(5):
            old = engine.page()
            damage(tmp_path / old.name)
            engine.ask("[gc.collect() for _ in range(20)] and None")

            def renewed(old: PageContent = old) -> PageContent | None:
                names = [name for name in list_pages(str(tmp_path)) if name != old.name]
                return read_page(str(tmp_path), names[0], after=(0, 0)) if names else None

            new = wait_until(renewed)
            # Whoever sees it first sees all of it: no counter begins at 0 again.
            assert new.alive
            assert new.description["state"]["mode"] == "freeze"
            assert new.description["identity"]["page_error"] is None
            assert (new.numbers["gen2_count"] or 0) >= (old.numbers["gen2_count"] or 0) >= 1
            assert new.full_pauses[: len(old.full_pauses)] == old.full_pauses
            (tmp_path / old.name).unlink(missing_ok=True)
        # The agent's thread may have a file open at either moment.
        wait_until(lambda: engine.ask("len(os.listdir('/proc/self/fd'))") <= descriptors)
        assert engine.rpc("restore", 2)["outcome"]["ok"]
        assert engine.gc_state() == as_found()


def test_a_page_that_is_emptied_while_no_collection_runs_is_replaced(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        old = engine.page().name
        os.truncate(tmp_path / old, 0)
        wait_until(lambda: old not in list_pages(str(tmp_path)) and engine.page_or_none())
        engine.ask("[gc.collect() for _ in range(20)] and None")
        assert engine.page().alive


def test_callbacks_that_somebody_cleared_are_put_back(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.ask("gc.callbacks.clear()")
        wait_until(lambda: engine.ask("agent.meter.callback in gc.callbacks"))


# --- without a page ---


def test_without_a_run_directory_it_meters_and_answers(tmp_path: Path) -> None:
    with Engine(None) as engine:
        reply = engine.rpc("freeze")
        assert reply["outcome"]["ok"]
        report = reply["report"]
        assert report["description"]["identity"]["page_error"] is None
        assert report["description"]["state"]["mode"] == "freeze"
        assert report["numbers"]["gen2_count"] == 1
        assert engine.gc_state() == held_off()


def test_a_run_directory_that_comes_late_has_a_page_soon(tmp_path: Path) -> None:
    late = tmp_path / "late"
    with Engine(late) as engine:
        report = engine.rpc("freeze")["report"]
        assert "No such file" in report["description"]["identity"]["page_error"]
        late.mkdir()
        wait_until(engine.page_or_none)
        assert engine.identity()["page_error"] is None
        assert engine.state()["mode"] == "freeze"
        # Gone again, with everything in it.
        shutil.rmtree(late)
        engine.poll_often()
        assert "removed" in engine.ask("agent.publisher.error") or "No such" in engine.ask(
            "agent.publisher.error"
        )
        late.mkdir()
        wait_until(engine.page_or_none)
        assert engine.state()["mode"] == "freeze"


@pytest.mark.usefixtures("tmpfs_may_be_mounted")
@pytest.mark.parametrize(
    ("option", "why"), [("size=40k", "No space left"), ("ro", "Read-only file system")]
)
@in_own_process
def test_on_a_run_directory_that_takes_nothing_it_works_without_a_page(
    tmp_path: Path, option: str, why: str
) -> None:
    mount_for_this_process(tmp_path, "-o", option)
    agent_module.POLL_S = 0.005
    agent_module.PAGE_RETRY_POLLS = 10
    agent = Agent(str(tmp_path))
    agent.start("worker", 0, 0, TOPOLOGY, "stand-in")
    reply = agent.handle(freeze(1).to_dict())
    assert reply["outcome"]["ok"]
    assert why in reply["report"]["description"]["identity"]["page_error"]
    assert list(tmp_path.iterdir()) == []
    # As soon as there is room, there is a page.
    remount = ["mount", "-o", "remount,rw,size=1m", str(tmp_path)]
    subprocess.run(remount, check=True)
    wait_until(lambda: list_pages(str(tmp_path)))
    wait_until(lambda: agent.handle(freeze(1).to_dict())["report"] is not None)
    assert agent.description()["identity"]["page_error"] is None


# --- the board ---


def test_before_the_engine_is_ready_the_board_is_not_followed(tmp_path: Path) -> None:
    write_board(str(tmp_path), Board(freeze(1), lease=lease(1, 60)))
    with Engine(tmp_path, "api_server", ready=False) as engine:
        engine.poll_often()
        assert engine.gc_state() == as_found()
        assert engine.state()["mode"] == "off"
        engine.ask("agent.set_ready()")
        engine.wait_for(ready=True, mode="freeze", generation=1)
        assert engine.gc_state() == held_off()


@pytest.mark.parametrize("roles", [["api_server"], ["worker"], ["engine_core", "worker"]])
def test_freeze_maintain_and_restore_on_the_board_are_followed(
    tmp_path: Path, roles: list[str]
) -> None:
    run_dir = str(tmp_path)
    with Engine(tmp_path, *roles) as engine:
        policy = freeze(7, owner="bench-1", interval_s=5)
        write_board(run_dir, Board(policy, lease=lease(1, 60)))
        state = engine.wait_for(mode="freeze", generation=7)
        assert (state["owner"], state["interval_s"]) == ("bench-1", 5)
        assert state["operation"]["operation_id"] == "freeze-7"
        assert state["operation"]["ok"] is True
        assert engine.gc_state() == held_off()
        wait_until(lambda: engine.page().numbers["threshold2"] == HELD_OFF)
        assert 50_000 < (engine.page().numbers["lease_remaining_ms"] or 0) <= 60_000

        engine.ask("cycles.append(plant_frozen_cycle())")
        maintain = Command("maintain", "maintain-1", 7)
        write_board(run_dir, Board(policy, maintain, lease(1, 60)))
        wait_until(lambda: engine.state()["operation"]["operation_id"] == "maintain-1")
        assert engine.state()["operation"]["collected_objects"] >= 1
        assert engine.ask("cycles.pop()() is None")
        assert engine.gc_state() == held_off()
        engine.poll_often()
        assert engine.page().numbers["maintains"] == 1

        engine.ask("cycles.append(plant_frozen_cycle())")
        write_board(run_dir, Board(restore(8)))
        engine.wait_for(mode="off", generation=8, collect_pending=False)
        assert engine.gc_state() == as_found()
        assert engine.ask("cycles.pop()() is None")

        triggers = [pause.trigger for pause in engine.page().full_pauses]
        assert triggers == ["entry", "maintain", "restore"]
        where = "gc-sidecar-agent" if roles == ["api_server"] else "MainThread"
        assert set(engine.ask("ran_on")) == {where}


def test_what_the_busy_loop_is_asked_to_do_is_left_to_it_for_a_while(tmp_path: Path) -> None:
    with Engine(tmp_path, "engine_core", grace_s=60) as engine:
        engine.ask("setattr(agent, 'busy_loop', lambda request, until: cycles.append(request))")
        write_board(str(tmp_path), Board(freeze(1), lease=lease(1, 60)))
        wait_until(lambda: engine.ask("cycles or agent.follower.error"))
        assert engine.ask("agent.follower.error") is None
        engine.poll_often()
        # Told once, and not done by the agent's thread meanwhile.
        (request,) = engine.ask("cycles")
        assert request["operation_id"] == "freeze-1"
        assert 50 < request["lease_s"] <= 60
        assert engine.gc_state() == as_found()
        # A busy loop that never comes round does not keep the board from being followed.
        engine.ask("setattr(agent_module, 'BOARD_GRACE_S', 0)")
        engine.wait_for(mode="freeze", generation=1)


def test_an_older_generation_on_the_board_is_passed_over(tmp_path: Path) -> None:
    with Engine(tmp_path, "api_server") as engine:
        assert engine.rpc("freeze", 9)["outcome"]["ok"]
        write_board(str(tmp_path), Board(restore(8)))
        engine.poll_often()
        assert engine.gc_state() == held_off()
        write_board(str(tmp_path), Board(restore(10)))
        engine.wait_for(mode="off", generation=10)


def test_a_damaged_board_is_told_on_the_page_and_the_next_good_one_followed(
    tmp_path: Path,
) -> None:
    with Engine(tmp_path, "api_server") as engine:
        (tmp_path / BOARD_NAME).write_bytes(b"{" + b"x" * 100_000)
        wait_until(lambda: engine.identity()["agent_error"])
        assert "board" in engine.identity()["agent_error"]
        write_board(str(tmp_path), Board(freeze(1), lease=lease(1, 60)))
        engine.wait_for(mode="freeze")
        wait_until(lambda: engine.identity()["agent_error"] is None)


def test_a_board_that_could_not_be_opened_for_a_moment_is_read_later(tmp_path: Path) -> None:
    with Engine(tmp_path, "api_server") as engine:
        # No descriptor is left in the process, as where vLLM has many connections.
        limit = engine.ask("resource.getrlimit(resource.RLIMIT_NOFILE)")
        engine.ask(f"resource.setrlimit(resource.RLIMIT_NOFILE, (3, {limit[1]}))")
        write_board(str(tmp_path), Board(freeze(1), lease=lease(1, 60)))
        engine.poll_often()
        assert engine.ask("agent.policy.mode") == "off"
        engine.ask(f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit[0]}, {limit[1]}))")
        engine.wait_for(mode="freeze", generation=1)


# --- leases on the board ---


def test_a_late_starter_leaves_an_old_board_alone(tmp_path: Path) -> None:
    write_board(str(tmp_path), Board(freeze(3), lease=lease(5, 3600, expires_in_s=-1)))
    with Engine(tmp_path, "api_server") as engine:
        engine.poll_often()
        assert engine.gc_state() == as_found()
        assert engine.state()["generation"] == 0
        # A restore is followed however old it is.
        write_board(str(tmp_path), Board(restore(4), lease=lease(5, 3600, expires_in_s=-1)))
        engine.wait_for(mode="off", generation=4)


@pytest.mark.parametrize("role", ["api_server", "worker"])
def test_a_late_starter_has_what_is_left_of_the_lease_and_no_more(
    tmp_path: Path, role: str
) -> None:
    with Engine(tmp_path, role, ready=False) as engine:
        write_board(str(tmp_path), Board(freeze(3, lease_s=3600), lease=lease(5, 3600, 1.0)))
        engine.ask("agent.set_ready()")
        engine.wait_for(mode="freeze", generation=3)
        assert (engine.page().numbers["lease_remaining_ms"] or 0) <= 1000
        state = engine.wait_for(mode="off")
        assert state["reason"]["code"] == "lease_expired"
        assert engine.gc_state() == as_found()
        # And it is not entered again from the same board.
        engine.poll_often()
        assert engine.state()["mode"] == "off"


def test_a_lease_is_renewed_through_the_board_once_for_each_sequence(tmp_path: Path) -> None:
    run_dir = str(tmp_path)

    def remaining_ms() -> int:
        return engine.page().numbers["lease_remaining_ms"] or 0

    with Engine(tmp_path, "api_server") as engine:
        policy = freeze(1, lease_s=50)
        write_board(run_dir, Board(policy, lease=lease(3, 50)))
        engine.wait_for(mode="freeze")
        wait_until(lambda: 40_000 < remaining_ms() <= 50_000)
        for sequence, seconds in ((2, 500), (3, 500)):  # an older one, and one that was seen
            write_board(run_dir, Board(policy, lease=lease(sequence, seconds)))
            engine.poll_often()
            assert remaining_ms() <= 50_000
        write_board(run_dir, Board(freeze(0), lease=lease(4, 500)))  # another policy's
        engine.poll_often()
        assert remaining_ms() <= 50_000
        write_board(run_dir, Board(policy, lease=lease(5, 500)))
        wait_until(lambda: 490_000 < remaining_ms() <= 500_000)
        assert engine.page().numbers["freezes"] == 1
        assert len(engine.page().full_pauses) == 1


def test_a_lease_that_nobody_renews_ends_although_the_sidecar_is_gone(tmp_path: Path) -> None:
    with Engine(tmp_path, "worker") as engine:
        write_board(str(tmp_path), Board(freeze(1, lease_s=0.5), lease=lease(1, 0.5)))
        engine.wait_for(mode="freeze")
        engine.ask("cycles.append(plant_frozen_cycle())")
        state = engine.wait_for(mode="off", collect_pending=False)
        assert state["reason"]["code"] == "lease_expired"
        assert state["exits"] == {"lease_expired": 1}
        assert state["generation"] == 1
        assert engine.gc_state() == as_found()
        assert engine.ask("cycles.pop()() is None")


def test_growth_beyond_the_limit_ends_the_policy(tmp_path: Path) -> None:
    with Engine(tmp_path, "worker") as engine:
        policy = freeze(1, max_rss_growth_bytes=20 << 20)
        write_board(str(tmp_path), Board(policy, lease=lease(1, 60)))
        engine.wait_for(mode="freeze")
        engine.ask("cycles.append(bytearray(b'x') * (40 << 20))")
        state = engine.wait_for(mode="off")
        assert state["reason"]["code"] == "rss_growth"
        assert engine.gc_state() == as_found()


# --- over RPC ---


def test_a_reply_and_the_page_show_the_change_at_once(tmp_path: Path) -> None:
    with Engine(tmp_path, "worker") as engine:
        engine.ask("setattr(agent_module, 'POLL_S', 3600)")

        def is_asleep() -> bool:
            polls = engine.ask("agent._polls")
            time.sleep(0.03)
            return engine.ask("agent._polls") == polls

        wait_until(is_asleep)
        reply = engine.rpc("freeze", 4, owner="me", lease_s=100)
        assert reply["outcome"]["ok"]
        assert reply["report"]["description"]["state"]["generation"] == 4
        assert 99_000 < reply["report"]["numbers"]["lease_remaining_ms"] <= 100_000
        assert engine.state()["generation"] == 4
        assert engine.state()["owner"] == "me"
        assert engine.page().numbers["threshold2"] == HELD_OFF
        assert set(engine.ask("ran_on")) == {"MainThread"}


def test_the_kinds_among_processes_do_what_they_say(tmp_path: Path) -> None:
    with Engine(tmp_path, "worker", ready=False) as engine:
        assert engine.state()["ready"] is False
        reply = engine.rpc("ready", 0)
        assert reply["outcome"]["ok"]
        assert reply["report"]["description"]["state"]["ready"] is True
        assert engine.rpc("observe", 0)["outcome"]["ok"]
        engine.rpc("freeze", 1, lease_s=10)
        numbers = engine.rpc("lease", 1, lease_s=1000)["report"]["numbers"]
        assert 990_000 < numbers["lease_remaining_ms"] <= 1_000_000
        assert engine.rpc("settle", 0)["outcome"]["ok"]
        assert engine.gc_state() == held_off()
        # None of them is an operation, so none is remembered as one.
        assert engine.state()["operation"]["kind"] == "freeze"


@in_own_process
def test_settling_while_another_collection_runs_is_told_with_its_code() -> None:
    agent = Agent(None)
    agent.start("worker", 0, 0, TOPOLOGY, "stand-in")
    agent.policy.collect_pending = True
    inside, leave = threading.Event(), threading.Event()

    class Sitting(Cycle):
        def __del__(self) -> None:
            inside.set()
            leave.wait(30)

    gc.disable()
    Sitting()
    other = threading.Thread(target=gc.collect)
    other.start()
    assert inside.wait(10)
    reply = agent.handle(Command("settle", "s-1", 0, deadline_s=0.05).to_dict())
    leave.set()
    other.join()
    assert (reply["outcome"]["ok"], reply["outcome"]["code"]) == (False, "collector_busy")
    assert reply["operation_id"] == "s-1"


@in_own_process
def test_no_request_whatever_raises_and_every_reply_is_json_with_its_id() -> None:
    agent_module.POLL_S = 0.005
    agent = Agent(None)
    agent.start("worker", 0, 0, TOPOLOGY, "stand-in")
    chance = random.Random(20)
    good = freeze(1).to_dict()
    values: list[Any] = [
        *(None, True, False, 0, 1, -1, 1 << 70, 10**400, 0.5, math.nan, math.inf, "", "x", "op-1"),
        *("\ud800", "x" * 70, "freeze", "restore", "maintain", "settle", "ready", "lease", b"x"),
        *([], {}, [1], {"a": 1}, (1,), {1, 2}, object(), print, Cycle(), ValueError),
    ]
    names = [*good, "other", "timeout", 7, None, (1, 2)]

    def anything(depth: int = 0) -> Any:
        if depth > 3 or chance.random() < 0.4:
            return chance.choice(values)
        if chance.random() < 0.3:
            return [anything(depth + 1) for _ in range(chance.randrange(4))]
        return {chance.choice(names): anything(depth + 1) for _ in range(chance.randrange(6))}

    done = 0
    for _ in range(2_000):
        request = anything()
        if chance.random() < 0.6:
            changed = {chance.choice(names): anything(2) for _ in range(chance.randrange(3))}
            request = {**good, "kind": chance.choice(["freeze", "restore", "lease"]), **changed}
        reply = agent.handle(request)
        json.dumps(reply)
        asked = request.get("operation_id") if isinstance(request, dict) else None
        # Only what is an id is echoed: a surrogate or a novel would break whoever sends it on.
        expected = asked if isinstance(asked, str) and OPERATION_ID.fullmatch(asked) else ""
        assert reply["version"] == PROTOCOL_VERSION
        assert reply["operation_id"] == reply["outcome"]["operation_id"] == expected
        assert reply["outcome"]["code"] != "agent_error", reply["outcome"]
        assert reply["report"] is not None
        done += reply["outcome"]["ok"]
    assert 100 < done < 1_900


@in_own_process
def test_a_step_that_fails_is_told_and_keeps_nothing_else_from_being_done(tmp_path: Path) -> None:
    agent_module.POLL_S = 0.005
    agent = Agent(str(tmp_path))

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    agent.policy.poll = fail  # type: ignore[method-assign]
    agent.start("api_server", 0, 0, TOPOLOGY, "stand-in")
    agent.set_ready()
    write_board(str(tmp_path), Board(freeze(1), lease=lease(1, 60)))
    wait_until(lambda: agent.policy.mode == "freeze")

    def page() -> PageContent:
        return read_page(str(tmp_path), list_pages(str(tmp_path))[0])

    wait_until(lambda: page().description["identity"]["agent_error"])
    assert page().description["identity"]["agent_error"] == "RuntimeError: a fault of ours"
    beat = page().numbers["heartbeat"] or 0
    wait_until(lambda: (page().numbers["heartbeat"] or 0) > beat)


# --- forks ---


def fork_from_an_agent(run_dir: str) -> None:
    os.environ[RUN_DIR_VARIABLE] = run_dir
    agent_module.POLL_S = 0.005
    gc.set_threshold(*FOUND)
    agent = this_process()
    agent.start("worker", 0, 0, TOPOLOGY, "stand-in")
    assert agent.handle(freeze(5).to_dict())["outcome"]["ok"]
    say("forking")
    # Not while the thread publishes: its frame, which nobody runs in the child, would keep the parent's map.
    with agent.publisher._lock:
        pid = os.fork()
    if pid == 0:
        gc_now = [gc.isenabled(), gc.get_threshold(), is_frozen()]
        threads = [thread.name for thread in threading.enumerate()]
        callbacks = len(gc.callbacks)
        description = this_process().description()
        open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        mapped = Path("/proc/self/maps").read_text()
        of_parent = [name for name in (*open_files, mapped) if ".page" in name]
        say([os.getpid(), gc_now, threads, callbacks, description, of_parent])
        hear()
        this_process().start("worker", 0, 1, TOPOLOGY, "stand-in")
        reply = this_process().handle(freeze(1).to_dict())
        say([reply["outcome"]["ok"], [gc.isenabled(), gc.get_threshold(), is_frozen()]])
        hear()
        os._exit(0)
    os.waitpid(pid, 0)
    say([gc.isenabled(), gc.get_threshold(), is_frozen()])
    hear()


def test_a_forked_child_begins_anew_and_leaves_its_parent_alone(tmp_path: Path) -> None:
    run_dir = str(tmp_path)

    def pages() -> dict[int, PageContent]:
        found = [read_page(run_dir, name) for name in list_pages(run_dir)]
        return {page.description["identity"]["pid"]: page for page in found}

    with Child(fork_from_an_agent, run_dir=run_dir) as child:
        assert child.hear() == "forking"
        pid, gc_now, threads, callbacks, description, of_parent = child.hear()
        assert gc_now == as_found()
        assert threads == ["MainThread"]
        assert callbacks == 0
        assert of_parent == []
        assert description["identity"]["roles"] == []
        assert description["identity"]["pid"] == pid
        state = description["state"]
        assert (state["mode"], state["generation"], state["ready"]) == ("off", 0, False)
        token = pages()[child.pid].description["identity"]["token"]
        assert description["identity"]["token"] != token
        assert set(pages()) == {child.pid}

        assert child.ask("start") == [True, held_off()]
        wait_until(lambda: set(pages()) == {child.pid, pid})
        assert all(page.alive for page in pages().values())
        assert pages()[child.pid].description["state"]["generation"] == 5
        assert pages()[pid].description["state"]["generation"] == 1

        assert child.ask("end") == held_off()
        assert not pages()[pid].alive
        parents = pages()[child.pid]
        assert parents.alive
        assert parents.description["state"]["mode"] == "freeze"
        beat = parents.numbers["heartbeat"] or 0
        wait_until(lambda: (pages()[child.pid].numbers["heartbeat"] or 0) > beat + 5)


@in_own_process
def test_children_that_never_have_a_role_leave_nothing_behind(tmp_path: Path) -> None:
    os.environ[RUN_DIR_VARIABLE] = str(tmp_path)
    agent = this_process()
    agent.start("worker", 0, 0, TOPOLOGY, "stand-in")
    before = sorted(os.listdir(tmp_path))
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0 if this_process().roles == [] else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert sorted(os.listdir(tmp_path)) == before


@in_own_process
def test_children_forked_in_the_middle_of_another_threads_collection_can_collect() -> None:
    agent = this_process()
    agent.meter.attach()
    heap = [[number] for number in range(400_000)]
    children: list[int] = []

    def fork_while_a_collection_runs() -> None:
        while len(children) < 5:
            # Set only while this thread waits in vain, but for the moment in which our callback lets it run.
            while not agent.meter.collecting[HEADER_COLLECTING_SINCE_NS]:
                time.sleep(0)
            children.append(status_of_a_child_that_collects())

    gc.disable()
    thread = threading.Thread(target=fork_while_a_collection_runs)
    thread.start()
    while thread.is_alive():
        gc.collect()
        run_bytecode(0.03)
    assert children == [0] * 5
    assert len(heap) == 400_000


@in_own_process
def test_children_forked_where_a_young_collection_starts_in_a_long_call_can_collect() -> None:
    agent = this_process()
    agent.meter.attach()
    # Decoded in C for a tenth of a second; the callback of a young collection in it is all that lets others run.
    text = json.dumps([{str(number): [number]} for number in range(150_000)])
    children: list[int] = []

    def fork_now_and_then() -> None:
        for _ in range(10):
            time.sleep(0.01)
            children.append(status_of_a_child_that_collects())

    gc.set_threshold(2_000, 1_000, 1_000)
    thread = threading.Thread(target=fork_now_and_then)
    thread.start()
    while thread.is_alive():
        json.loads(text)
        run_bytecode(0.03)
    assert children == [0] * 10


@in_own_process
def test_children_forked_while_several_threads_allocate_can_collect() -> None:
    agent = this_process()
    agent.start("worker", 0, 0, None, "test")
    # Collections walk enough that the callback is where threads meet: one of them is in it nearly all the time.
    heap = [Cycle() for _ in range(100_000)]
    is_over = threading.Event()

    def allocate() -> None:
        kept: list[Cycle] = []
        while not is_over.is_set():
            kept.append(Cycle())
            if len(kept) > 20_000:
                kept.clear()

    threads = [threading.Thread(target=allocate) for _ in range(6)]
    for thread in threads:
        thread.start()
    children = [status_of_a_child_that_collects() for _ in range(20)]
    is_over.set()
    for thread in threads:
        thread.join()
    assert children == [0] * 20
    assert agent.meter.callback in gc.callbacks
    assert heap


def run_bytecode(seconds: float) -> None:
    """As an engine does between collections: other threads get their turn in it after 5 ms."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def status_of_a_child_that_collects() -> int:
    pid = os.fork()
    if pid == 0:
        before = gc.get_stats()[2]["collections"]
        gc.collect()
        os._exit(0 if gc.get_stats()[2]["collections"] == before + 1 else 3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- start-up ---


def test_pages_of_others_are_left_alone(tmp_path: Path) -> None:
    other = create_page(str(tmp_path), page_name("worker", 0, 0, 1))
    with Engine(tmp_path, "worker"):
        assert other.name in list_pages(str(tmp_path))
        assert len(list_pages(str(tmp_path))) == 2


@in_own_process
def test_what_was_found_is_read_when_the_engine_is_ready() -> None:
    # vLLM freezes its heap at the end of start-up, after the agent was born.
    agent = Agent(None)
    agent.start("worker", 0, 0, TOPOLOGY, "stand-in")
    gc.freeze()
    cycle = plant_cycle()
    assert agent.handle(Command("ready", "r-1", 0).to_dict())["outcome"]["ok"]
    assert agent.handle(freeze(1).to_dict())["outcome"]["ok"]
    assert agent.handle(restore(2).to_dict())["outcome"]["ok"]
    assert cycle() is None
    assert is_frozen()


@in_own_process
def test_there_is_one_agent_in_a_process() -> None:
    found: list[Agent] = []
    threads = [threading.Thread(target=lambda: found.append(this_process())) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(agent) for agent in found}) == 1
    assert plant_frozen_cycle is not None
