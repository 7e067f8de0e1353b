"""Follows the board: does in this process what the sidecar wants, where no RPC has done it already.

An API server acts at once. Workers and engine cores leave it for a moment to the engine core's busy loop, which
carries a command out over RPC in all of them side by side; who is not called then acts by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gc_sidecar_agent.board import (
    Board,
    BoardError,
    board_stamp,
    lease_remaining_s,
    read_board,
    still_wanted,
)
from gc_sidecar_agent.command import Command, Outcome
from gc_sidecar_agent.policy import Policy

HandOver = Callable[[Command, "float | None"], None]


class BoardFollower:
    """Looks at the board of `run_dir` and calls `execute` for what has not been done yet.

    `error` says why the board cannot be read.
    """

    def __init__(
        self, run_dir: str | None, policy: Policy, execute: Callable[[Command], Outcome]
    ) -> None:
        self.error: str | None = None
        self._run_dir = run_dir
        self._policy = policy
        self._execute = execute
        self._board = Board()
        self._stamp: tuple[int, int] | None = None
        self._seen_at: dict[str, float] = {}
        self._lease_sequence = 0

    def look(self, grace_s: float, hand_over: HandOver | None) -> None:
        """One look. `hand_over` gives a command to the busy loop, and the time after which it must not begin any
        more (seconds since the epoch); it is done here after `grace_s`."""
        if self._run_dir is None:
            return
        self._read(self._run_dir)
        wanted, lease = self._board.policy, self._board.lease
        if wanted is not None and wanted.generation > self._policy.generation:
            command = still_wanted(wanted, lease)
            if command is not None:
                self._follow(command, None, grace_s, hand_over)
        maintain = self._board.timely_maintain
        if maintain is not None:
            self._follow(maintain, self._board.maintain_until, grace_s, hand_over)
        if (
            wanted is not None
            and lease is not None
            and lease.sequence > self._lease_sequence
            and wanted.generation == self._policy.generation
        ):
            self._lease_sequence = lease.sequence
            remaining_s = lease_remaining_s(lease)
            if remaining_s > 0:
                self._policy.renew_lease(remaining_s, wanted.generation)

    def _read(self, run_dir: str) -> None:
        stamp = board_stamp(run_dir)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._seen_at.clear()
        self.error = None
        try:
            self._board = read_board(run_dir)
        except FileNotFoundError:
            self._board = Board()
        except BoardError as error:
            self._board = Board()
            self.error = f"the board cannot be read: {error}"
        except OSError as error:
            self._board = Board()
            self._stamp = None  # it may be readable in a moment
            self.error = f"the board cannot be read: {error}"

    def _follow(
        self, command: Command, until: float | None, grace_s: float, hand_over: HandOver | None
    ) -> None:
        if self._policy.outcome_of(command) is not None:
            return
        now = time.monotonic()
        seen_at = self._seen_at.get(command.operation_id)
        if seen_at is None:
            seen_at = self._seen_at[command.operation_id] = now
            if hand_over is not None:
                hand_over(command, until)
        if now - seen_at >= grace_s:
            self._execute(command)
