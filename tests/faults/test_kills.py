"""Whoever dies or hangs, and whenever: the others end in normal GC, and the sidecar tells what is true.

The matrix is every victim, killed or stopped, before, in the middle of and after each operation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.board import Board
from tests.faults.stage import (
    API_SERVER,
    CORE,
    EVERYONE,
    FIRST_WORKER,
    LAST_WORKER,
    Answer,
    Asking,
    EmbeddedStage,
    assert_leaves_in_time,
    outcome_of,
    staged,
)
from tests.sidecar_process import SidecarProcess, wait_for
from tests.striking import strike
from tests.vllm.scene import rows_of

SIDECAR = "sidecar"
ENGINE_VICTIMS = (API_SERVER, CORE, FIRST_WORKER, LAST_WORKER)
STAGES = ("before", "in the middle of", "after")
OPERATIONS = ("freeze", "maintain", "restore")

OWNER = "bench"
# For what somebody cannot do who stands still, and for what everybody can do, on a machine that is busy too.
SHORT_DEADLINE_S, LONG_DEADLINE_S = 2.5, 30.0
# What nobody restores has to end by itself, so it is short; where somebody does, it must not be the lease.
SHORT_LEASE_S, LONG_LEASE_S = 4.0, 600.0


@dataclass(frozen=True)
class Case:
    """One field of the matrix."""

    victim: str
    signal: signal.Signals
    stage: str
    operation: str

    def __str__(self) -> str:
        return f"{self.signal.name} {self.victim} {self.stage} {self.operation}"

    @property
    def is_deadly(self) -> bool:
        """Whether the victim does not survive."""
        return self.signal == signal.SIGKILL

    @property
    def lease_s(self) -> float:
        """How long the policy may last."""
        is_ended = self.operation == "restore" or (self.victim == SIDECAR and self.is_deadly)
        return LONG_LEASE_S if is_ended else SHORT_LEASE_S

    @property
    def survivors(self) -> list[str]:
        """Who runs on: a worker or an engine core takes all of them along, API servers live on by themselves."""
        others = [name for name in EVERYONE if name != self.victim]
        takes_along = self.is_deadly and self.victim.startswith(("engine", "worker"))
        return [name for name in others if name.startswith("api")] if takes_along else others


def matrix(number: signal.Signals, *victims: str) -> list[Case]:
    """All cases of these victims and this signal."""
    return [Case(*each) for each in itertools.product(victims, [number], STAGES, OPERATIONS)]


class Lasting:
    """A stage for all cases that it survives: made when the first of them comes, anew after one that failed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._cleanup = contextlib.ExitStack()
        self._stage: EmbeddedStage | None = None

    def stage(self) -> EmbeddedStage:
        """The stage, everybody on it as found."""
        if self._stage is None:
            directory = self._directory / str(next(self._numbers))
            self._stage = self._cleanup.enter_context(staged(directory))
        self._stage.assert_normal(EVERYONE)
        return self._stage

    def end(self) -> None:
        """Clear it away."""
        self._stage = None
        self._cleanup.close()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    stages = Lasting(tmp_path_factory.mktemp("lasting"))
    yield stages
    stages.end()


@pytest.fixture
def lasting_stage(lasting: Lasting, request: pytest.FixtureRequest) -> Iterator[EmbeddedStage]:
    failed_before = request.session.testsfailed
    yield lasting.stage()
    if request.session.testsfailed > failed_before:
        lasting.end()


@pytest.mark.parametrize("case", matrix(signal.SIGKILL, *ENGINE_VICTIMS), ids=str)
def test_a_process_of_the_engine_is_killed(case: Case, tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        with stage.held_launcher(), stage.sidecar() as sidecar:
            answer = act(case, stage, sidecar)
            assert_answer_is_true(case, answer, sidecar)
            wait_for("it is told of", lambda: row_of(case, sidecar)["state"] == "gone")
            assert_leaves_in_time(sidecar)
            stage.assert_files_are_whole()
            stage.assert_normal(case.survivors)
            if case.victim == API_SERVER:
                stage.assert_serves()
            stage.assert_files_are_whole()
        stage.assert_nothing_is_left()


@pytest.mark.parametrize("case", matrix(signal.SIGSTOP, *ENGINE_VICTIMS), ids=str)
def test_a_process_of_the_engine_is_stopped(case: Case, lasting_stage: EmbeddedStage) -> None:
    stage = lasting_stage
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(os.kill, stage.pids[case.victim], signal.SIGCONT)
        with stage.sidecar() as sidecar:
            answer = act(case, stage, sidecar)
            assert_answer_is_true(case, answer, sidecar)
            wait_for("it is told of", lambda: is_told_of(case, row_of(case, sidecar)))
            assert_leaves_in_time(sidecar)
        stage.assert_files_are_whole()
        stage.assert_normal(case.survivors, may_be_pending=True)
        if case.victim == API_SERVER:
            stage.assert_serves()
    stage.assert_normal(EVERYONE)
    stage.assert_files_are_whole()
    stage.assert_serves()


def act(case: Case, stage: EmbeddedStage, sidecar: SidecarProcess) -> Answer:
    """What the case says: an operation, and a signal before it, in the middle of it or after it."""
    strike_victim = functools.partial(strike, stage.pids[case.victim], case.signal)
    if case.operation != "freeze":
        assert_done(case, sidecar, "freeze")
    if case.stage == "after":
        answer = assert_done(case, sidecar, case.operation)
        strike_victim()
        return answer
    if case.stage == "before":
        strike_victim()
        return ask(case, sidecar, case.operation, SHORT_DEADLINE_S).answer()
    with stage.gate():
        asking = ask(case, sidecar, case.operation, SHORT_DEADLINE_S)
        stage.wait_until_held(asking)
        strike_victim()
    return asking.answer()


def ask(case: Case, sidecar: SidecarProcess, operation: str, deadline_s: float) -> Asking:
    """Ask for an operation."""
    lease = {"lease_s": case.lease_s} if operation == "freeze" else {}
    return Asking(sidecar, operation, deadline_s, owner=OWNER, **lease)


def assert_done(case: Case, sidecar: SidecarProcess, operation: str) -> Answer:
    """Ask for an operation and have it done by everybody."""
    answer = ask(case, sidecar, operation, LONG_DEADLINE_S).answer()
    assert answer.code == 200, answer
    assert [row["ok"] for row in answer.operation["processes"]] == [True] * len(EVERYONE)
    return answer


def assert_answer_is_true(case: Case, answer: Answer, sidecar: SidecarProcess) -> None:
    """It names the victim where that had no part in the operation."""
    if case.stage == "after":
        return
    operation = answer.operation
    if answer.code == 202:
        # It goes on as long as somebody may still do it.
        assert (case.operation, operation["state"]) == ("maintain", "running"), answer
        if not case.is_deadly:
            return  # the status tells who stands still
        operation = outcome_of(operation["id"], sidecar)
    else:
        assert answer.code == (502 if case.is_deadly else 504), answer
    line = rows_of(operation)[case.victim]
    assert not line["ok"]
    assert line["code"] in (("process_gone",) if case.is_deadly else ("no_answer", "no_heartbeat"))
    if case.operation == "freeze":
        # Nobody can tell of who is stopped.
        assert operation["rolled_back"] == (True if case.is_deadly else "unknown"), answer


def row_of(case: Case, sidecar: SidecarProcess) -> Mapping[str, Any]:
    """What the status says of the victim."""
    return rows_of(sidecar.status())[case.victim]


def is_told_of(case: Case, row: Mapping[str, Any]) -> bool:
    """Whether a row of the status says that the victim stands still; one that collects may do so for long."""
    if case.stage == "in the middle of":
        return row["collecting_for_s"] is not None
    return bool(row["state"] == "stale")


@pytest.mark.parametrize(
    "case", [*matrix(signal.SIGKILL, SIDECAR), *matrix(signal.SIGSTOP, SIDECAR)], ids=str
)
def test_the_sidecar_is_killed_or_stopped(case: Case, lasting_stage: EmbeddedStage) -> None:
    (killed if case.is_deadly else stopped)(case, lasting_stage)
    lasting_stage.assert_normal(EVERYONE)
    lasting_stage.assert_files_are_whole()
    lasting_stage.assert_serves()


def killed(case: Case, stage: EmbeddedStage) -> None:
    """A second sidecar knows what the first one wanted; it renews the lease, and leaves the rest to that."""
    asking: Asking | None = None
    with stage.sidecar() as first:
        if case.operation != "freeze":
            assert_done(case, first, "freeze")
        with contextlib.ExitStack() as gate:
            if case.stage == "in the middle of":
                gate.enter_context(stage.gate())
                asking = ask(case, first, case.operation, LONG_DEADLINE_S)
                stage.wait_until_held(asking)
                operation_id = asking.operation_id
                wait_for("it is on the board", lambda: is_on_board(operation_id, stage.board()))
            elif case.stage == "after":
                assert_done(case, first, case.operation)
            strike(first.pid, signal.SIGKILL)
        if case.stage == "before":
            asking = ask(case, first, case.operation, SHORT_DEADLINE_S)
        assert asking is None or asking.answer().code is None
    stage.assert_serves()
    left = stage.board_or_none() or Board()
    with stage.sidecar() as second:
        second.wait_for_coverage(len(EVERYONE))
        assert_took_over(second, left)
        kept = replace(left, maintain=None, maintain_until=None)
        # The lease may end meanwhile.
        assert stage.board_or_none() in (None, kept, replace(kept, policy=None, lease=None))
        if (case.stage, case.operation) == ("before", "restore"):
            assert_done(case, second, "restore")
        elif second.status()["policy"]["mode"] == "freeze":
            assert second.post("/gc/lease", {"owner": OWNER, "lease_s": SHORT_LEASE_S})[0] == 200
        assert_leaves_in_time(second)


def assert_took_over(sidecar: SidecarProcess, left: Board) -> None:
    """It wants what stands on the board that was left, and knows of the maintenance there that nobody finished."""
    lease = left.lease
    had_ended = lease is not None and time.time() >= lease.expires_at
    policy = sidecar.status()["policy"]
    if left.policy is None or left.policy.kind == "restore" or had_ended:
        assert policy["mode"] == "off"
    elif lease is None or time.time() < lease.expires_at:
        assert (policy["mode"], policy["owner"]) == (left.policy.kind, left.policy.owner)
        assert left.lease is not None
        expires_at = datetime.fromisoformat(policy["lease_expires_at"].replace("Z", "+00:00"))
        assert expires_at.timestamp() == pytest.approx(left.lease.expires_at, abs=1.0)
    if left.policy is not None:
        assert policy["generation"] == left.policy.generation
    if left.maintain is not None:
        code, body = sidecar.get(f"/gc/operations/{left.maintain.operation_id}")
        assert (code, body["operation"]["state"]) == (200, "unknown"), body


def is_on_board(operation_id: str, board: Board) -> bool:
    """Whether it tells of the operation."""
    return any(
        command is not None and command.operation_id == operation_id
        for command in (board.policy, board.maintain)
    )


def stopped(case: Case, stage: EmbeddedStage) -> None:
    """While it stands still nothing goes on but the lease; when it goes on it sees what happened meanwhile."""
    with stage.sidecar() as sidecar:
        if case.operation != "freeze":
            assert_done(case, sidecar, "freeze")
        if case.stage == "after":
            assert_done(case, sidecar, case.operation)
        with contextlib.ExitStack() as gate:
            if case.stage == "in the middle of":
                gate.enter_context(stage.gate())
                asking = ask(case, sidecar, case.operation, LONG_DEADLINE_S)
                stage.wait_until_held(asking)
            strike(sidecar.pid, signal.SIGSTOP)
        if case.stage == "before":
            asking = ask(case, sidecar, case.operation, LONG_DEADLINE_S)
        if (case.stage, case.operation) == ("in the middle of", "freeze"):
            stage.wait_until_all_are("freeze")
        if (case.stage, case.operation) != ("before", "restore"):
            stage.assert_normal(EVERYONE)
        stage.assert_serves()
        assert case.stage == "after" or not asking.is_answered
        os.kill(sidecar.pid, signal.SIGCONT)
        if (case.stage, case.operation) == ("in the middle of", "freeze"):
            # Everybody had it, and had left it when somebody looked.
            assert asking.answer().code in (502, 504)
        elif case.stage != "after":
            assert asking.answer().code == 200
        wait_for("everything is as it should be", lambda: is_off_everywhere(sidecar.status()))
        assert_leaves_in_time(sidecar)


def is_off_everywhere(status: Mapping[str, Any]) -> bool:
    """Whether no policy is wanted, and none is anywhere."""
    rows = status["processes"]
    return status["policy"]["mode"] == "off" and all(
        (row["mode"], row["state"]) == ("off", "applied") for row in rows
    )
