"""What the sidecar does without being asked: it takes over the board, looks at the pages, keeps contact with the
engine, and lets a policy end with its lease.

None of it runs into an operation: while one runs, the engine is asked nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from gc_sidecar.server.desired import LEASE_EXPIRED, Desired, desired_from_board
from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.operations import new_id
from gc_sidecar.server.reports import Key
from gc_sidecar.server.roster import Roster
from gc_sidecar.server.tasks import spawn
from gc_sidecar.server.timing import Timing
from gc_sidecar_agent.board import Board
from gc_sidecar_agent.command import DEFAULT_DEADLINE_S, Command

logger = logging.getLogger("gc_sidecar.server")

# What is told in the log of a process in such a state: event and words.
LOST = {
    "drifted": ("process_drifted", "has drifted from the desired policy"),
    "gone": ("process_gone", "has ended"),
}
# How much less often pages are read of an engine that does nothing.
QUIET_FACTOR = 3
# A reading is recent for this share of the time between two.
RECENTLY = 0.9
# When nobody answers: the longest time between two questions, in units of the first.
LONGEST_WAIT = 16


class Watch:
    """See the module. `is_busy` tells whether an operation runs; `record_orphan` is called with a maintenance that
    a sidecar before us had not finished."""

    def __init__(
        self,
        knowledge: Knowledge,
        timing: Timing,
        is_busy: Callable[[], bool],
        record_orphan: Callable[[Command], None],
    ) -> None:
        self._knowledge = knowledge
        self._timing = timing
        self._is_busy = is_busy
        self._record_orphan = record_orphan
        self._taking_over = asyncio.Lock()
        self._contact_at = 0.0
        self._had_fault = False
        self._observe_at = 0.0
        self._observe_wait_s = timing.observe_retry_s
        self._losses = 0
        # Who was lost to the policy at the last look, and why.
        self._lost: dict[Key, tuple[str | None, str]] = {}

    async def take_over_if_need_be(self) -> None:
        """Take over the run directory where another sidecar may have had it until now, and nothing runs."""
        async with self._taking_over:
            if self._knowledge.run_dir.is_to_be_taken_over and not self._is_busy():
                await self.take_over()

    async def take_over(self) -> None:
        """What a sidecar before us left on the board becomes what is desired.

        Whoever asked for a maintenance that it had not finished gets no answer any more, and a process that starts
        later must not run it.
        """
        board = await self._knowledge.run_dir.take_over()
        if board is None:
            return
        desired = desired_from_board(board)
        wanted = self._knowledge.desired
        if desired.generation < wanted.generation:
            # Older than what we did over RPC: a process that starts must find that, and no orphan.
            if board.maintain is not None:
                self._record_orphan(board.maintain)
            await self._knowledge.run_dir.write_board(lambda _: board_of(wanted))
            return
        self._knowledge.desired = desired
        _log(
            "board_taken_over",
            "took over the board",
            mode=desired.mode,
            generation=desired.generation,
            reason=str(desired.reason) if desired.reason else None,
        )
        if board.maintain is not None:
            self._record_orphan(board.maintain)
            await self._knowledge.run_dir.write_board(without_maintain)

    # --- sight ---

    async def keep_watch(self) -> None:
        """Look at the pages and keep the lease, for ever."""
        while True:
            try:
                # Not again where somebody who watches has had it read a moment ago.
                await self.look(RECENTLY * self._timing.sight_poll_s)
                self._knowledge.engines.notice_processes(self._knowledge.processes)
                await self._knowledge.run_dir.keep()
                await self.take_over_if_need_be()
                await self._catch_up_board()
            except Exception:
                logger.exception(
                    "looking at the run directory failed",
                    extra={"fields": {"event": "look_failed"}},
                )
            await asyncio.sleep(self._pause_s())

    async def _catch_up_board(self) -> None:
        """Write what is desired where that failed, or where it was learnt from the pages: whoever starts, or was
        not reached, has to find it."""
        run_dir, desired = self._knowledge.run_dir, self._knowledge.desired
        wanted, stands = board_of(desired).policy, run_dir.board.policy
        is_older = wanted is not None and (stands is None or stands.generation < wanted.generation)

        def caught_up(board: Board) -> Board:
            # Asked when nobody else writes: an operation may have begun meanwhile, and it is the newer one.
            return board if self._is_busy() else board_of(self._knowledge.desired)

        if (is_older or run_dir.is_board_behind) and not self._is_busy():
            await run_dir.write_board(caught_up)

    def _pause_s(self) -> float:
        """How long until the next look. Where no process collects much and none is held to a policy there is
        little to miss, and a scrape or a request looks for itself."""
        knowledge = self._knowledge
        is_quiet = not (knowledge.desired.is_on or knowledge.sight.log.listeners)
        if is_quiet and not knowledge.sight.is_filling:
            return QUIET_FACTOR * self._timing.sight_poll_s
        return self._timing.sight_poll_s

    async def look(self, maximum_age_s: float | None = None) -> Roster:
        """The roster after a fresh look at the pages, if the last one is too old."""
        age = self._timing.sight_fresh_s if maximum_age_s is None else maximum_age_s
        await self._knowledge.look(age)
        if not self._is_busy():
            self._knowledge.adopt()
        self.end_lease_in_time()
        roster = self._knowledge.roster()
        self._knowledge.note_applied(roster)
        if not self._is_busy():
            self._tell_losses(roster)
        return roster

    def _tell_losses(self, roster: Roster) -> None:
        """One line for each process that ends, drifts or leaves its policy by itself, when it does."""
        before, self._lost = self._lost, {}
        for row in roster.rows:
            if row.state not in LOST or row.reason is None:
                continue
            loss = self._lost[row.key] = (row.token, row.reason.code)
            if before.get(row.key) != loss:
                event, what = LOST[row.state]
                _log(
                    event,
                    f"{row.key} {what}",
                    logging.WARNING,
                    role=row.key.role,
                    dp_rank=row.key.dp_rank,
                    rank=row.key.rank,
                    pid=row.report.identity.pid if row.report else None,
                    desired=self._knowledge.desired.mode,
                    mode=row.report.state.mode if row.report else None,
                    reason=str(row.reason),
                )

    def end_lease_in_time(self) -> None:
        """With its lease the policy ends in every process; so it does here, and on the board."""
        desired = self._knowledge.desired
        if not desired.is_on or desired.lease_remaining_s() != 0.0:
            return
        _log(
            "lease_ended",
            "the lease ended without a renewal, and the policy with it",
            logging.WARNING,
            mode=desired.mode,
            generation=desired.generation,
            owner=desired.owner,
        )
        self._knowledge.desired = desired.ended(LEASE_EXPIRED)
        # Where no page shows it, somebody has to ask; a little later, for their leases began after ours.
        self._observe_at = time.monotonic() + self._timing.first_retry_s
        # A process that starts from now on finds nothing to apply.
        spawn(
            self._knowledge.run_dir.write_board(
                lambda board: _without_policy(board, desired.generation)
            )
        )

    # --- contact ---

    async def keep_contact(self) -> None:
        """Ask the engines for a transport until they have one, and notice their restarts, for ever."""
        while True:
            try:
                if not self._is_busy():
                    await self._contact_once()
            except Exception:
                logger.exception(
                    "asking the engine failed", extra={"fields": {"event": "contact_failed"}}
                )
            await asyncio.sleep(self._timing.sight_poll_s)

    async def _contact_once(self) -> None:
        engines = self._knowledge.engines
        await self.ask_engines()
        now = time.monotonic()
        if not self._knowledge.processes.cores and now >= self._contact_at:
            self._contact_at = now + self._timing.contact_poll_s
            await engines.keep_contact(self._knowledge.processes)
        if engines.has_fault and not self._had_fault:
            # An RPC failed; one that does not will clear it. Not at once: let it recover.
            self._observe_at = now + self._timing.observe_retry_s
        if self._losses != self._knowledge.losses:
            self._losses = self._knowledge.losses
            self._observe_at, self._observe_wait_s = 0.0, self._timing.observe_retry_s
        self._had_fault = engines.has_fault
        if engines.has_rpc and now >= self._observe_at and self._has_gaps():
            await self._observe()

    async def ask_engines(self, eagerly: bool = False) -> None:
        """Ask those that are due which transport they have; `eagerly` where somebody waits for it."""
        engines = self._knowledge.engines
        if not engines.is_due(self._knowledge.processes, eagerly):
            return
        before = engines.transport
        if await engines.ask(self._knowledge.processes, eagerly):
            self._knowledge.forget_replies()
            self._observe_at, self._observe_wait_s = 0.0, self._timing.observe_retry_s
        if engines.transport != before:
            _log("transport", f"the transport is {engines.transport}", transport=engines.transport)

    def _has_gaps(self) -> bool:
        """Whether there is something that only an RPC can tell."""
        rows = self._knowledge.roster().rows
        return (
            not rows
            or self._knowledge.engines.has_fault
            or any(row.state in ("uncovered", "gone") for row in rows)
            or any(row.page is None and row.state in ("pending", "drifted") for row in rows)
        )

    async def _observe(self) -> None:
        """One harmless RPC."""
        knowledge = self._knowledge
        if self._is_busy() or knowledge.engines.is_talking:
            return
        command = Command("observe", new_id("observe"), knowledge.desired.generation)
        until = time.monotonic() + self._timing.question_s
        result = await knowledge.engines.call(command, until, knowledge.processes)
        knowledge.remember(result.replies)
        # Once is enough while the engine lives; less and less often where something is still to be told.
        if result.replies and not knowledge.engines.has_fault and not self._awaits_end():
            self._observe_at, self._observe_wait_s = float("inf"), self._timing.observe_retry_s
            return
        self._observe_at = time.monotonic() + self._observe_wait_s
        longest_s = LONGEST_WAIT * self._timing.observe_retry_s
        self._observe_wait_s = min(2 * self._observe_wait_s, longest_s)

    def _awaits_end(self) -> bool:
        """Whether a process without a page has still to end the policy whose lease ended."""
        return self._knowledge.desired.reason is not None and any(
            row.page is None and row.state == "pending" for row in self._knowledge.roster().rows
        )


def board_of(desired: Desired) -> Board:
    """The board that tells what is desired: nothing where nobody has asked for anything, or its lease ended."""
    if not desired.generation or desired.reason is not None:
        return Board()
    policy = desired.command(new_id("policy"), DEFAULT_DEADLINE_S)
    return Board(policy, lease=desired.lease())


def without_maintain(board: Board) -> Board:
    """`board` after a maintenance: a process that starts later must not run it in some timed moment."""
    return replace(board, maintain=None, maintain_until=None)


def _without_policy(board: Board, generation: int) -> Board:
    """`board` without the policy of `generation`, unless another has taken its place."""
    if board.policy is None or board.policy.generation != generation:
        return board
    return replace(board, policy=None, lease=None)


def _log(event: str, message: str, level: int = logging.INFO, **fields: object) -> None:
    logger.log(level, message, extra={"fields": {"event": event, **fields}})
