"""A stage for faults: an engine whose collections can be held, a sidecar beside it, and victims.

What must be true afterwards, whoever was struck, is asserted here, by the pages and by a witness in each process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gc_sidecar_agent.board import Board, read_board
from gc_sidecar_agent.page import PageContent, list_pages, read_page
from tests.embedded.engine import EmbeddedEngine, gone, scene
from tests.forked_sidecar import ForkedSidecar
from tests.sidecar_process import SidecarProcess, wait_for
from tests.striking import strike
from tests.vllm.real_vllm import wait_until
from tests.vllm.scene import Scene, pids_of

API_SERVER, OTHER_API_SERVER = "api_server-0-1", "api_server-0-0"
CORE, FIRST_WORKER, LAST_WORKER = "engine_core-0-0", "worker-0-0", "worker-0-1"
EVERYONE = (OTHER_API_SERVER, API_SERVER, CORE, FIRST_WORKER, LAST_WORKER)
FLAGS = ("--workers=2", "--api-servers=2", "--heap-objects=1000")
TITLES = {
    OTHER_API_SERVER: "api_server 0",
    API_SERVER: "api_server 1",
    CORE: "engine_core dp0",
    FIRST_WORKER: "worker dp0 r0",
    LAST_WORKER: "worker dp0 r1",
}

IS_READY = r"API server \d of .* is ready"
# Each process has thresholds of its own, so that nobody's can be put back in another's place by chance.
OWN_THRESHOLDS = """
import gc, os
gc.set_threshold(700 + os.getpid() % 100, 10, 10)
"""
# A full collection does not begin while there is a gate: so its middle lasts for as long as a test wants.
HOLD_AT_GATE = """
import gc, os, time
def hold_at_gate(phase, info, exists=os.path.exists, sleep=time.sleep, now=time.monotonic):
    if phase == "start" and info["generation"] == 2:
        until = now() + 60
        while exists({gate!r}) and now() < until:
            sleep(0.005)
gc.callbacks.append(hold_at_gate)
"""
# How much longer than its deadline an answer may take on a machine that is busy: more is a hang.
BUSY_S = 10.0
PATIENCE_S = 20.0
LEAVES_WITHIN_S = 2.0


@dataclass(frozen=True)
class Answer:
    """What came of a request: a status and a body, or neither where the sidecar was no more."""

    code: int | None = None
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operation(self) -> Mapping[str, Any]:
        """The operation that it tells of."""
        operation: Mapping[str, Any] = self.body["operation"]
        return operation


class Stage:
    """An engine that runs, embedded or real, and its processes by name."""

    def __init__(self, running: Scene, pids: Mapping[str, int]) -> None:
        assert running.run_dir is not None
        self.run_dir = running.run_dir
        self.pids = dict(pids)
        self._running = running
        self._gate = running.directory / "gate"
        running.probe.run(OWN_THRESHOLDS + HOLD_AT_GATE.format(gate=str(self._gate)), pids)
        self.found = self._witnessed(pids)
        assert self.found[CORE]["frozen"]
        assert not self.found[LAST_WORKER]["frozen"]

    # --- what is done ---

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """Hold every full collection that begins."""
        self._gate.touch()
        try:
            yield
        finally:
            self._gate.unlink()

    def wait_until_held(self, asking: Asking) -> None:
        """Wait until all are in the middle of the full collection that was asked for, by their pages."""
        if not wait_until(lambda: not self._not_held(), PATIENCE_S):
            states = [self.page(name).description["state"] for name in self._not_held()]
            raise AssertionError(f"{self._not_held()} do not collect: {states}, {asking.so_far}")

    def _not_held(self) -> list[str]:
        return [name for name in self.pids if self.page(name).collecting_since_ns == 0]

    # --- what is seen ---

    def page(self, name: str) -> PageContent:
        """The newest page of a process."""
        role, dp_rank, rank = name.split("-")
        prefix = f"{role}-dp{dp_rank}-r{rank}-"
        (page,) = [n for n in list_pages(str(self.run_dir)) if n.startswith(prefix)]
        return read_page(str(self.run_dir), page)

    def board(self) -> Board:
        """What stands on the board."""
        return read_board(str(self.run_dir))

    def board_or_none(self) -> Board | None:
        """The same, None where there is none yet."""
        with contextlib.suppress(FileNotFoundError):
            return self.board()
        return None

    def wait_until_all_are(self, mode: str) -> None:
        """Wait until every process has this policy, by its page."""
        for name in self.pids:
            wait_for(
                f"{name} has {mode}",
                lambda name=name: self.page(name).description["state"]["mode"] == mode,
            )

    def assert_files_are_whole(self) -> None:
        """Every page can be read with all its records, of the dead too, and so can the board."""
        pages = [read_page(str(self.run_dir), n, (0, 0)) for n in list_pages(str(self.run_dir))]
        assert {page.description["identity"]["pid"] for page in pages} == set(self.pids.values())
        self.board_or_none()

    def assert_normal(self, names: Iterable[str], may_be_pending: bool = False) -> None:
        """These processes come to be as they were found: by their pages, and by a witness in each of them.

        With `may_be_pending` the collection with which a restore ends may be to come, and until then a heap that
        was frozen is not: whose main thread waits for one that is stopped cannot collect.
        """
        found = {name: self.found[name] for name in names}
        pids = {name: self.pids[name] for name in names}

        def pages_are_as_found() -> bool:
            return all(_gc_of(self.page(name)) == _shown(state) for name, state in found.items())

        def is_pending(name: str) -> bool:
            return bool(self.page(name).description["state"]["collect_pending"])

        def differences() -> list[str]:
            return [
                f"{name}: {state}, not {found[name]}{', collection pending' * is_pending(name)}"
                for name, state in self._witnessed(pids).items()
                if state != found[name]
                and not (
                    may_be_pending and is_pending(name) and state == found[name] | {"frozen": False}
                )
            ]

        wait_for("their pages show normal GC", pages_are_as_found)
        if not wait_until(lambda: not differences(), PATIENCE_S):
            raise AssertionError("\n".join(differences()))

    def _witnessed(self, pids: Mapping[str, int]) -> dict[str, Any]:
        states = self._running.gc_state(pids)
        # Every process looks through them many times a second, and some stages last.
        for file in self._running.probe.directory.iterdir():
            if file.suffix != ".tmp":
                file.unlink(missing_ok=True)
        return states

    def assert_serves(self) -> None:
        """Somebody who asks for a completion gets it."""
        self._running.assert_serves()

    def assert_nothing_is_left(self) -> None:
        """All processes of the engine end."""
        engine = self._running.engine
        assert wait_until(lambda: not engine.processes(), PATIENCE_S), engine.processes()


class EmbeddedStage(Stage):
    """An embedded engine, and sidecars for it."""

    def __init__(self, running: Scene) -> None:
        assert isinstance(running.engine, EmbeddedEngine)
        engine = self._engine = running.engine
        self._numbers = itertools.count()
        # It answers when the first of its API servers does; who is ready has frozen its heap, and has its agent.
        wait_for("both are ready", lambda: len(re.findall(IS_READY, engine.log_text())) == 2)
        super().__init__(
            running, {name: self._engine.pids(title)[0] for name, title in TITLES.items()}
        )

    @contextlib.contextmanager
    def sidecar(self) -> Iterator[SidecarProcess]:
        """A sidecar that sees everyone."""
        with ForkedSidecar(
            engine_urls=[self._engine.url],
            run_dir=self.run_dir,
            log_path=self._running.directory / f"sidecar-{next(self._numbers)}.log",
        ) as sidecar:
            wait_for("all are seen", lambda: pids_of(sidecar.status()) == self.pids)
            wait_for("there is a transport", lambda: sidecar.status()["transport"] == "plugin")
            yield sidecar

    @contextlib.contextmanager
    def held_launcher(self) -> Iterator[None]:
        """Keep the engine's first process from ending the others when one has died, so that they live on."""
        launcher = self._engine.launcher.pid
        strike(launcher, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(launcher, signal.SIGCONT)


def _gc_of(page: PageContent) -> dict[str, object]:
    numbers = page.numbers
    return {
        "mode": page.description["state"]["mode"],
        "enabled": bool(numbers["gc_enabled"]),
        "threshold": [numbers[f"threshold{i}"] for i in range(3)],
    }


def _shown(state: Mapping[str, Any]) -> dict[str, object]:
    return {"mode": "off", "enabled": state["enabled"], "threshold": state["threshold"]}


def assert_leaves_in_time(sidecar: SidecarProcess) -> None:
    """Told to end, it does so within two seconds, and says what stays."""
    os.kill(sidecar.pid, signal.SIGTERM)
    assert gone([sidecar.pid], LEAVES_WITHIN_S), f"it stays:\n{sidecar.log_text()}"
    assert '"event": "stopped"' in sidecar.log_text()


class Asking:
    """An operation that is asked for, under an id of its own, by a thread that waits for the answer."""

    def __init__(
        self, sidecar: SidecarProcess, operation: str, deadline_s: float, **fields: object
    ) -> None:
        self.operation_id = f"{operation}-{uuid.uuid4().hex[:8]}"
        self._deadline_s = deadline_s
        self._answer = Answer()
        fields |= {"operation_id": self.operation_id, "deadline_s": deadline_s}
        self._request = (sidecar, f"/gc/{operation}", fields)
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        sidecar, path, fields = self._request
        with contextlib.suppress(OSError):  # nobody is there, or not any more
            self._answer = Answer(*sidecar.post(path, fields))

    @property
    def so_far(self) -> Answer | None:
        """The answer, if there is one yet."""
        return self._answer if self.is_answered else None

    @property
    def is_answered(self) -> bool:
        """Whether the answer is there."""
        return not self._thread.is_alive()

    def answer(self) -> Answer:
        """The answer, which comes within the deadline."""
        self._thread.join(self._deadline_s + BUSY_S)
        assert self.is_answered, f"no answer within {self._deadline_s:g} s"
        return self._answer


def outcome_of(operation_id: str, sidecar: SidecarProcess) -> Mapping[str, Any]:
    """An operation when it has ended."""

    def now() -> Mapping[str, Any]:
        operation: Mapping[str, Any] = sidecar.get(f"/gc/operations/{operation_id}")[1]["operation"]
        return operation

    wait_for("the operation ends", lambda: now()["state"] != "running", deadline_s=60)
    return now()


@contextlib.contextmanager
def staged(directory: Path) -> Iterator[EmbeddedStage]:
    """An engine, and everything that is needed to disturb it."""
    directory.mkdir(parents=True, exist_ok=True)
    with scene(directory, *FLAGS) as running:
        yield EmbeddedStage(running)
