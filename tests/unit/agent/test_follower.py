"""What an agent does about the board: what is wanted, once, and nothing that has come too late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gc_sidecar_agent.board import Board, write_board
from gc_sidecar_agent.collector import GENERATIONAL
from gc_sidecar_agent.command import Command, Outcome
from gc_sidecar_agent.follower import BoardFollower
from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.policy import Policy

MAINTAIN = Command("maintain", "op-1", 0)


class Follower:
    """A follower whose commands are noted and not carried out."""

    def __init__(self, run_dir: Path) -> None:
        self.followed: list[Command] = []
        policy = Policy(PauseMeter(), GENERATIONAL)
        self.follower = BoardFollower(str(run_dir), policy, self._note)

    def _note(self, command: Command) -> Outcome:
        self.followed.append(command)
        return Outcome(command.operation_id, command.kind, command.generation, ok=True)

    def look(self) -> list[str]:
        self.follower.look(0.0, None)
        return [command.operation_id for command in self.followed]


@pytest.mark.parametrize("until", [None, 60.0])
def test_a_maintenance_is_followed_while_it_may_begin(tmp_path: Path, until: float | None) -> None:
    follower = Follower(tmp_path)
    assert follower.look() == []
    ends = None if until is None else time.time() + until
    write_board(str(tmp_path), Board(maintain=MAINTAIN, maintain_until=ends))
    assert follower.look() == ["op-1"]


def test_one_whose_sidecar_may_have_ended_long_ago_does_not_begin(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    write_board(str(tmp_path), Board(maintain=MAINTAIN, maintain_until=time.time() - 0.001))
    assert follower.look() == []


def test_a_process_that_stood_still_meanwhile_does_not_begin_it_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower(tmp_path)
    now = time.time()
    write_board(str(tmp_path), Board(maintain=MAINTAIN, maintain_until=now + 10))
    follower.follower.look(60.0, None)  # seen, and left to the busy loop for a moment
    monkeypatch.setattr(time, "time", lambda: now + 11)
    assert follower.look() == []
