"""Carrying one command to all processes: RPC first, then the board, then waiting until each one shows it.

What a page or a reply proves is judged by `proof`; what to do about a failure is up to `changes`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from gc_sidecar.server.attempt import Attempt
from gc_sidecar.server.engines import CallResult
from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.operations import Line
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.proof import judge_lines
from gc_sidecar.server.roster import Row
from gc_sidecar.server.tasks import spawn
from gc_sidecar.server.timing import Timing
from gc_sidecar_agent.board import Board
from gc_sidecar_agent.command import Command

WriteBoard = Callable[[Board], Board]


@dataclass(frozen=True)
class Overtime:
    """A command that is under way at its deadline may go on `until` then; `tell` is called when it does."""

    until: float
    tell: Callable[[], None]


class Carrier:
    """The way of a command to the processes, and of their proof back."""

    def __init__(self, knowledge: Knowledge, timing: Timing) -> None:
        self._knowledge = knowledge
        self._timing = timing

    async def carry(
        self,
        command: Command,
        write: WriteBoard,
        deadline: float,
        overtime: Overtime | None = None,
        use_rpc: bool = True,
    ) -> Attempt:
        """Carry `command` until everybody shows it, or cannot any more, or `deadline`.

        Raises Problem where there is no way at all.
        """
        sent_at = time.monotonic()
        rpc: asyncio.Task[CallResult] | None = None
        try:
            if use_rpc and self._knowledge.engines.has_rpc:
                rpc = spawn(self._call(command, overtime.until if overtime else deadline))
                left_s = max(0.0, deadline - time.monotonic())
                await asyncio.wait({rpc}, timeout=min(self._timing.board_after_s, left_s / 2))
            wrote = await self._knowledge.run_dir.write_board(write)
            if not wrote and rpc is None:
                if not self._knowledge.engines.has_rpc:
                    raise self._no_way()
                rpc = spawn(self._call(command, overtime.until if overtime else deadline))
            lines = await self._wait_for_proof(command, sent_at, rpc, deadline, overtime)
        finally:
            pending = rpc is not None and not rpc.done()
            if rpc is not None and pending:
                rpc.cancel()
        result = rpc.result() if rpc is not None and not pending else None
        reached = wrote or pending or (result is not None and result.sent)
        return Attempt(lines, result, pending, reached)

    async def _call(self, command: Command, until: float) -> CallResult:
        result = await self._knowledge.engines.call(command, until, self._knowledge.processes)
        self._knowledge.remember(result.replies)
        return result

    async def _wait_for_proof(
        self,
        command: Command,
        sent_at: float,
        rpc: asyncio.Task[CallResult] | None,
        deadline: float,
        overtime: Overtime | None,
    ) -> tuple[Line, ...]:
        has_pages = self._knowledge.run_dir.path is not None
        # What only a page can still tell may take a moment; without pages nothing will come.
        grace_s = self._timing.unseen_grace_s if has_pages else 0.0
        quiet_since: float | None = None
        gone_since: float | None = None
        collecting_at: float | None = None
        poll_s = self._timing.proof_poll_s
        while True:
            await self._knowledge.look()
            pending = rpc is not None and not rpc.done()
            replies = rpc.result().replies if rpc is not None and rpc.done() else ()
            rows = self._knowledge.roster().rows
            now = time.monotonic()
            lines = tuple(judge_lines(command, rows, replies, pending, now - sent_at))
            if lines and all(line.ok for line in lines):
                return lines
            if rpc is None and not any(row.is_live for row in rows):
                return lines  # nobody is there to show anything
            is_gone = [row.state == "gone" for row in rows]
            if any(is_gone) and all(
                line.ok or gone for line, gone in zip(lines, is_gone, strict=True)
            ):
                # Nobody is left who could still do it, whatever becomes of the RPC.
                gone_since = now if gone_since is None else gone_since
                if now - gone_since >= grace_s:
                    return lines
            else:
                gone_since = None
            if not pending:
                if lines and all(line.ok or line.own_code for line in lines):
                    return lines  # all have said it themselves
                quiet_since = now if quiet_since is None else quiet_since
                if now - quiet_since >= grace_s and all(line.final for line in lines):
                    return lines
            if _is_collecting(rows, lines):
                collecting_at = now
            # A collection that has just ended shows on the page a moment later.
            at_work = collecting_at is not None and now - collecting_at < grace_s
            limit = deadline
            if overtime is not None and (pending or at_work) and now >= deadline:
                overtime.tell()
                limit = overtime.until
            if now >= limit:
                return lines
            wait_s = min(poll_s, limit - now)
            poll_s = min(poll_s * 1.2, 5 * self._timing.proof_poll_s)
            if rpc is not None and pending:
                await asyncio.wait({rpc}, timeout=wait_s)
            else:
                await asyncio.sleep(wait_s)

    def _no_way(self) -> Problem:
        """Why a command can be sent over neither RPC nor board."""
        fault = self._knowledge.run_dir.why_not_written
        if fault is not None:
            return Problem(fault.code, fault.detail, fault.remedy)
        obstacles = self._knowledge.engines.obstacles()
        desync = next((each for each in obstacles if each.code == "rpc_desync"), None)
        if desync is not None:
            return Problem(desync.code, desync.detail, desync.remedy)
        details = [each.detail for each in obstacles] or [self._knowledge.why_nobody().detail]
        return Problem("engine_not_seen", "; ".join(details))


def _is_collecting(rows: tuple[Row, ...], lines: tuple[Line, ...]) -> bool:
    """Whether a process that has not shown it yet is in a collection: most likely in the one asked for."""
    return any(
        not line.ok and row.page is not None and row.page.collecting_s is not None
        for row, line in zip(rows, lines, strict=True)
    )
