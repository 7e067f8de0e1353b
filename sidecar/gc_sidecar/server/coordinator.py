"""How a change runs: one at a time, over RPC first, then over the board, proven by every process, else undone.

It also keeps what is desired: it takes it over from the board when it starts, and lets it end with its lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gc_sidecar.server.desired import (
    LEASE_EXPIRED,
    MODE_OF_KIND,
    Desired,
    desired_from_board,
    desired_from_reports,
)
from gc_sidecar.server.engine_http import EngineFault
from gc_sidecar.server.engines import CallResult, Engines, Processes
from gc_sidecar.server.operations import Change, Ledger, Line, Operation
from gc_sidecar.server.problems import KINDS, Problem
from gc_sidecar.server.proof import judge_lines
from gc_sidecar.server.reports import Key, Reply, Report
from gc_sidecar.server.roster import Roster, take_roll
from gc_sidecar.server.secret import ENDPOINT_TOKEN_NAME, ensure_endpoint_token
from gc_sidecar.server.sight import Reason, Sight
from gc_sidecar.server.tally import Tally
from gc_sidecar.server.timing import Timing
from gc_sidecar_agent.board import Board, BoardError, read_board, write_board
from gc_sidecar_agent.command import POLICY_KINDS, Command

logger = logging.getLogger("gc_sidecar.server")

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """What is known after a command was carried to the processes."""

    lines: tuple[Line, ...]
    result: (
        CallResult | None
    )  # of the RPC; None where there was none, or it had not returned in time
    rpc_pending: bool
    reached_somebody: bool  # whether any process may have got it

    @property
    def is_complete(self) -> bool:
        """Whether every process that is expected did it."""
        return bool(self.lines) and all(line.ok for line in self.lines)

    @property
    def done(self) -> int:
        """How many did it."""
        return sum(line.ok for line in self.lines)


class Coordinator:
    """The one place from which anything is changed."""

    def __init__(
        self, run_dir: str | None, sight: Sight, engines: Engines, timing: Timing, tally: Tally
    ) -> None:
        self.desired = Desired()
        self.sight = sight
        self.engines = engines
        self.ledger = Ledger()
        self.running_id: str | None = None
        self._run_dir = run_dir
        self._timing = timing
        self._tally = tally
        self._board = Board()
        self._board_lock = asyncio.Lock()
        self._board_fault: Reason | None = None
        self._token_fault: Reason | None = None
        self._replies: dict[str, Report] = {}
        self._applied: dict[Key, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        # Set when a maintenance goes on after its deadline, so that its caller is told so.
        self._goes_on = asyncio.Event()
        # Held by whoever talks to the engine: a command, or the questions which transport it has.
        self._channel = asyncio.Lock()
        self._observe_at = 0.0
        self._contact_at = 0.0

    # --- what others ask ---

    def roster(self) -> Roster:
        """All processes, by the newest snapshot and the last replies."""
        return take_roll(
            self.sight.snapshot,
            self._replies.values(),
            self.desired,
            self._applied,
            self._timing.stale_after_s,
            contact_lost=not self.engines.is_reachable,
        )

    async def look(self, maximum_age_s: float | None = None) -> Roster:
        """The roster after a fresh look at the pages, if the last one is too old."""
        age = self._timing.sight_fresh_s if maximum_age_s is None else maximum_age_s
        await self.sight.look(age)
        self._adopt()
        self._end_lease_in_time()
        roster = self.roster()
        self._applied.update(
            (row.key, row.token) for row in roster.rows if row.state == "applied" and row.token
        )
        return roster

    def reasons(self, roster: Roster) -> list[Reason]:
        """Everything that stands in the way of seeing or reaching the engine."""
        reasons = [self.sight.snapshot.directory, self._board_fault, self._token_fault]
        found = [reason for reason in reasons if reason is not None]
        if not roster.reports:
            found.append(self._why_nobody())
        for row in roster.rows:
            identity = row.report.identity if row.report else None
            if identity and row.page is None and identity.page_error and self._run_dir:
                found.append(
                    Reason(
                        "page_error",
                        f"{row.key} has no page: {identity.page_error}",
                        "make the run directory writable for the engine, with room for its pages",
                    )
                )
            if identity and identity.agent_error:
                found.append(Reason("agent_error", f"{row.key}: {identity.agent_error}"))
        for page in self.sight.snapshot.unreadable:
            found.append(Reason(page.code, f"{page.name}: {page.detail}"))
        found.extend(self.engines.reasons())
        return list(dict.fromkeys(found))

    def _why_nobody(self) -> Reason:
        if self._run_dir is not None and self.sight.snapshot.directory is None:
            return Reason(
                "no_pages",
                f"no living process of an engine has a page in {self._run_dir}",
                "start vLLM with `DIR/bin/with-agent` and GC_SIDECAR_RUN_DIR set to the same directory",
            )
        return Reason(
            "engine_not_connected",
            "no process of an engine has been seen yet",
            "give --engine-url and start the engine with the agent, or share a run directory",
        )

    # --- life ---

    async def take_over(self) -> None:
        """When the sidecar starts: what a sidecar before us left on the board."""
        if self._run_dir is None:
            return
        await asyncio.to_thread(self._ensure_token)
        try:
            board = await asyncio.to_thread(read_board, self._run_dir)
        except FileNotFoundError:
            return
        except (BoardError, OSError) as error:
            self._board_fault = Reason(
                "board_unreadable", f"the board was not taken over: {error}", "POST /gc/restore"
            )
            return
        self._board = board
        self.desired = desired_from_board(board)
        logger.info(
            "took over the board",
            extra={"fields": {"mode": self.desired.mode, "generation": self.desired.generation}},
        )
        if board.maintain is not None:
            # Whoever asked for it got no answer from us; a process that starts later must not run it.
            self._record_orphan(board.maintain)
            await self._write_board(_without_maintain)

    def _record_orphan(self, maintain: Command) -> None:
        change = Change("maintain", maintain.operation_id, owner=maintain.owner)
        problem = Problem("outcome_unknown", "the sidecar restarted while this operation ran")
        self.ledger.put(
            Operation(
                change,
                requested_at=time.time(),
                state="unknown",
                generation=maintain.generation,
                problem=problem,
            )
        )

    async def keep_watch(self) -> None:
        """Look at the pages and keep the lease, for ever."""
        while True:
            try:
                await self.look(0.0)
                self.engines.notice_restarts(self._processes())
                if self._token_fault is not None and self._run_dir is not None:
                    await asyncio.to_thread(self._ensure_token)
            except Exception:
                logger.exception("looking at the run directory failed")
            await asyncio.sleep(self._timing.sight_poll_s)

    async def keep_contact(self) -> None:
        """Ask the engines for a transport until they have one, and notice their restarts, for ever."""
        while True:
            try:
                await self._contact_once()
            except Exception:
                logger.exception("asking the engine failed")
            await asyncio.sleep(self._timing.sight_poll_s)

    async def _contact_once(self) -> None:
        if self.running_id is not None:
            return
        await self._ask_engines()
        now = time.monotonic()
        if not self._processes().cores and now >= self._contact_at:
            self._contact_at = now + self._timing.contact_poll_s
            await self.engines.keep_contact(self._processes())
        if self.engines.has_rpc and now >= self._observe_at and self._has_gaps():
            await self._observe()

    async def _ask_engines(self, eagerly: bool = False) -> None:
        if not self.engines.is_due(self._processes(), eagerly):
            return
        async with self._channel:
            before = self.engines.transport
            await self.engines.ask(self._processes(), eagerly)
        if self.engines.has_rpc:
            # What earlier replies told may be of an engine that is no more.
            self._replies.clear()
            self._observe_at = 0.0
        if self.engines.transport != before:
            logger.info("transport found", extra={"fields": {"transport": self.engines.transport}})

    def _has_gaps(self) -> bool:
        rows = self.roster().rows
        return not rows or any(row.state in ("uncovered", "gone") for row in rows)

    async def _observe(self) -> None:
        """One harmless RPC, where pages do not tell who is there."""
        command = Command("observe", new_id("observe"), self.desired.generation)
        async with self._channel:
            if self.running_id is not None:
                return
            result = await self.engines.call(command, self._timing.question_s, self._processes())
        self._remember(result.replies)
        # Once is enough while the engine lives; when nobody answered, not before long.
        wait_s = float("inf") if result.replies else self._timing.last_retry_s
        self._observe_at = time.monotonic() + wait_s

    def _ensure_token(self) -> None:
        assert self._run_dir is not None
        try:
            ensure_endpoint_token(self._run_dir)
            self._token_fault = None
        except OSError as error:
            self._token_fault = Reason(
                "run_dir_not_writable",
                f"the sidecar cannot write {ENDPOINT_TOKEN_NAME} into {self._run_dir}:"
                f" {error.strerror}",
                "make the run directory writable for the sidecar's user or group",
            )

    def _processes(self) -> Processes:
        identities = [page.report.identity for page in self.sight.snapshot.pages if page.alive]
        return Processes(
            frozenset(identity.token for identity in identities),
            frozenset(i.token for i in identities if "engine_core" in i.roles),
        )

    def _remember(self, replies: tuple[Reply, ...]) -> None:
        """Keep the newest report of each place that came by RPC."""
        for reply in replies:
            if reply.report is None:
                continue
            identity = reply.report.identity
            places = set(identity.keys)
            self._replies = {
                token: report
                for token, report in self._replies.items()
                if token == identity.token or not places & set(report.identity.keys)
            }
            self._replies[identity.token] = reply.report

    def _adopt(self) -> None:
        """With no word of ours, what processes have already is what is desired."""
        if self.desired != Desired() or self.running_id is not None:
            return
        reports = [page.report for page in self.sight.snapshot.pages if page.alive]
        reports = reports or list(self._replies.values())
        if reports:
            self.desired = desired_from_reports(reports)

    def _end_lease_in_time(self) -> None:
        if not self.desired.is_on or self.desired.lease_remaining_s() != 0.0:
            return
        logger.info(
            "the lease ended",
            extra={"fields": {"generation": self.desired.generation, "owner": self.desired.owner}},
        )
        self.desired = self.desired.ended(LEASE_EXPIRED)
        self._observe_at = 0.0 if not self._processes().all else self._observe_at
        if self._run_dir is not None:
            # A process that starts from now on finds nothing to apply.
            ended = self.desired.generation
            self._spawn(self._write_board(lambda board: _without_policy(board, ended)))

    # --- operations ---

    async def submit(self, change: Change) -> Operation:
        """Run `change`, or join it where it was asked for before. Raises Problem where it is refused.

        It goes on when the caller leaves. The operation that is returned still runs where it is a
        maintenance that outlasts its deadline.
        """
        known = self.ledger.get(change.operation_id)
        if known is not None and not known.change.asks_the_same(change):
            raise Problem(
                "operation_id_reused",
                f"operation {change.operation_id} was a {known.change.kind} with other fields",
            )
        if known is None:
            self._admit(change)
            self.running_id = change.operation_id
            self._goes_on = asyncio.Event()
            self.ledger.put(Operation(change, requested_at=time.time()))
            self._tasks[change.operation_id] = asyncio.create_task(self._run(change))
        task = self._tasks.get(change.operation_id)
        if task is not None:
            goes_on = self._spawn(self._goes_on.wait())
            await asyncio.wait({task, goes_on}, return_when=asyncio.FIRST_COMPLETED)
            goes_on.cancel()
        operation = self.ledger.get(change.operation_id)
        assert operation is not None
        return operation

    def _admit(self, change: Change) -> None:
        """Refuse what may not run now; no await before it is registered as running."""
        if self.running_id is not None:
            raise Problem(
                "operation_running",
                f"operation {self.running_id} has not ended",
                remedy=f"wait for it: GET /gc/operations/{self.running_id}",
                extra={"operation_id": self.running_id},
                headers={"Retry-After": "1", "Location": f"/gc/operations/{self.running_id}"},
            )
        self._end_lease_in_time()
        if change.kind == "lease" and not self.desired.is_on:
            ended = f" ({self.desired.reason})" if self.desired.reason else ""
            raise Problem("no_policy", f"there is no lease to renew: the policy is off{ended}")
        if self.desired.is_on and self.desired.owner != change.owner and not change.force:
            raise Problem(
                "owned_by_other",
                f"the {self.desired.mode} policy belongs to {self.desired.owner!r},"
                f" not to {change.owner!r}",
                extra={"owner": self.desired.owner},
            )

    async def _run(self, change: Change) -> None:
        started = time.monotonic()
        try:
            await _RUNNERS[change.kind](self, change, started)
        except Problem as problem:
            self._update(change, state="failed", problem=problem)
        except Exception as error:
            logger.exception("operation %s failed", change.operation_id)
            detail = f"{type(error).__name__}: {error}"
            self._update(change, state="unknown", problem=Problem("internal_error", detail))
        finally:
            operation = self._update(
                change,
                duration_s=time.monotonic() - started,
                transport=self.engines.transport,
                lease_expires_at=self.desired.lease_expires_at(),
            )
            if operation.is_running:  # cancelled: the sidecar stops
                operation = self._update(change, state="unknown")
            self.running_id = None
            self._tasks.pop(change.operation_id, None)
            self._tally.count_operation(change.kind, operation.state, operation.duration_s or 0.0)
            self._log(operation)

    async def _run_policy(self, change: Change, started: float) -> None:
        deadline = started + change.deadline_s
        await self._prepare(change)
        previous = self.desired
        wanted = self._wanted(change)
        if wanted.is_on and wanted.is_same_policy(previous) and self._is_in_force():
            await self._run_lease(change, started)
            return
        self.desired = wanted
        self._update(change, generation=wanted.generation)
        command = wanted.command(change.operation_id, change.deadline_s, change.collect_first)
        reserve = (
            min(self._timing.rollback_reserve_s, change.deadline_s * self._timing.rollback_share)
            if wanted.is_on
            else 0.0
        )

        def write(_: Board) -> Board:
            return Board(policy=command, lease=wanted.lease())

        try:
            attempt = await self._carry(command, write, deadline - reserve)
        except Problem:
            self.desired = previous
            raise
        if attempt.is_complete or (change.allow_partial and attempt.done):
            if wanted.is_on and self.desired == wanted:
                self.desired = replace(self.desired, entered_at=time.time())
            state = "applied" if attempt.is_complete else "partial"
            self._update(change, state=state, lines=attempt.lines)
            return
        rolled_back: bool | str = False
        if wanted.is_on:
            rolled_back = await self._roll_back(previous, attempt, deadline)
        state = _failed_state(attempt)
        if rolled_back is True and attempt.reached_somebody:
            state = "rolled_back"
        elif rolled_back == "unknown":
            state = "unknown"
        problem = self._problem(attempt, {"rolled_back": rolled_back})
        self._update(
            change, state=state, lines=attempt.lines, rolled_back=rolled_back, problem=problem
        )

    async def _run_maintain(self, change: Change, started: float) -> None:
        deadline = started + change.deadline_s
        await self._prepare(change)
        self._update(change, generation=self.desired.generation)
        if change.when == "idle":
            await self._wait_until_idle(deadline)
            # The waiting may have used it up; what follows goes on then.
            loop = asyncio.get_running_loop()
            loop.call_later(deadline - time.monotonic(), self._goes_on.set)
            deadline = max(deadline, time.monotonic() + self._timing.rollback_reserve_s)
        command = Command(
            kind="maintain",
            operation_id=change.operation_id,
            generation=self.desired.generation,
            owner=change.owner,
            trim=change.trim,
            deadline_s=change.deadline_s,
        )
        try:
            attempt = await self._carry(
                command,
                lambda board: replace(board, maintain=command),
                deadline,
                patience=started + max(self._timing.background_limit_s, change.deadline_s),
            )
        finally:
            # A process that starts later would find it there and run it in some timed moment.
            await self._write_board(_without_maintain)
        self._finish(change, attempt)

    async def _run_lease(self, change: Change, started: float) -> None:
        """A renewal, also where a policy that is in force is asked for again."""
        await self._prepare(change)
        if not self.desired.is_on:
            raise Problem("no_policy", "the policy ended before its lease was renewed")
        self.desired = self.desired.with_lease(change.lease_s)
        self._update(change, generation=self.desired.generation)
        command = replace(
            self.desired.command(change.operation_id, change.deadline_s), kind="lease"
        )
        desired = self.desired

        def write(board: Board) -> Board:
            policy = board.policy
            if policy is None or policy.generation != desired.generation:
                policy = desired.command(new_id("policy"), change.deadline_s)
            return Board(policy, board.maintain, desired.lease())

        pages_tell_all = self._run_dir is not None and all(
            row.page is not None for row in self.roster().rows if row.is_live
        )
        attempt = await self._carry(
            command, write, started + change.deadline_s, use_rpc=not pages_tell_all
        )
        self._finish(change, attempt)

    def _finish(self, change: Change, attempt: Attempt) -> None:
        """Record what came of something that cannot be undone and need not be."""
        if attempt.is_complete or (change.allow_partial and attempt.done):
            state = "applied" if attempt.is_complete else "partial"
            self._update(change, state=state, lines=attempt.lines)
            return
        problem = self._problem(attempt, {})
        self._update(change, state=_failed_state(attempt), lines=attempt.lines, problem=problem)

    async def _prepare(self, change: Change) -> None:
        """Find out how to reach the engine, and refuse where there is nobody to reach."""
        if not self.engines.has_rpc:
            # It was refused when it was last asked, but somebody waits now.
            patience = min(self._timing.board_after_s, change.deadline_s / 2)
            await asyncio.wait({self._spawn(self._ask_engines(eagerly=True))}, timeout=patience)
        roster = await self.look(0.0)
        if roster.reports or self.engines.has_rpc:
            return
        if change.kind == "restore" and self._run_dir is not None:
            return  # the board tells every process that starts
        reasons = self.reasons(roster)
        raise Problem(
            "engine_not_seen",
            "; ".join(reason.detail for reason in reasons),
            remedy=next((reason.remedy for reason in reasons if reason.remedy), None),
        )

    def _wanted(self, change: Change) -> Desired:
        generation = self._next_generation()
        if change.kind == "restore":
            return Desired(generation=generation, lease_sequence=self.desired.lease_sequence)
        wanted = Desired(
            mode=MODE_OF_KIND[change.kind],
            generation=generation,
            owner=change.owner,
            interval_s=change.interval_s,
            pause_budget_ms=change.pause_budget_ms,
            max_rss_growth_bytes=change.max_rss_growth_bytes,
            lease_sequence=self.desired.lease_sequence,
        )
        return wanted.with_lease(change.lease_s)

    def _next_generation(self) -> int:
        """One more than any that was seen: a reply or a page of before cannot be taken for a new one."""
        seen = [self.desired.generation]
        seen += [page.report.state.generation for page in self.sight.snapshot.pages]
        seen += [report.state.generation for report in self._replies.values()]
        if self._board.policy is not None:
            seen.append(self._board.policy.generation)
        return max(seen) + 1

    def _is_in_force(self) -> bool:
        roster = self.roster()
        return roster.expected > 0 and roster.acknowledged == roster.expected

    async def _wait_until_idle(self, deadline: float) -> None:
        while True:
            try:
                busy = await self.engines.busy_requests()
                what = f"{busy:.0f} requests run or wait"
            except EngineFault as fault:
                if fault.code == "idle_unknown":
                    raise Problem("idle_unknown", fault.detail) from None
                busy, what = 1.0, fault.detail
            if not busy:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Problem("not_idle", f"at the deadline {what}; nothing was changed")
            await asyncio.sleep(min(self._timing.idle_poll_s, left_s))

    async def _roll_back(self, previous: Desired, attempt: Attempt, deadline: float) -> bool | str:
        """Bring back what was before, in every process, under a further generation."""
        if not attempt.reached_somebody:
            self.desired = previous
            return True
        generation = self._next_generation()
        if previous.is_on and previous.lease_remaining_s() != 0.0:
            back = replace(previous, generation=generation)
        else:
            back = Desired(
                generation=generation,
                lease_sequence=previous.lease_sequence,
                reason=previous.reason,
            )
        self.desired = back
        left_s = max(1.0, deadline - time.monotonic())
        command = back.command(new_id("rollback"), left_s, collect_first=False)
        # An RPC that did not return in time may block the next one as well.
        use_rpc = self._run_dir is None or not attempt.rpc_pending
        try:
            undone = await self._carry(
                command,
                lambda _: Board(policy=command, lease=back.lease()),
                time.monotonic() + left_s,
                use_rpc=use_rpc,
            )
        except Problem:
            return "unknown"
        # Who was never there was not changed either.
        lines = [line for line in undone.lines if line.live]
        if any(not line.ok and line.own_code for line in lines):
            return False
        return True if lines and all(line.ok for line in lines) else "unknown"

    # --- carrying one command to all processes ---

    async def _carry(
        self,
        command: Command,
        write: Callable[[Board], Board],
        deadline: float,
        patience: float | None = None,
        use_rpc: bool = True,
    ) -> Attempt:
        """RPC first, then the board, then wait until everybody shows it, or cannot any more, or `deadline`.

        With `patience`, an RPC that has not returned at the deadline is waited for until then.
        """
        rpc: asyncio.Task[CallResult] | None = None
        if use_rpc and self.engines.has_rpc:
            limit = patience or deadline
            rpc = self._spawn(self._call(command, limit))
            left_s = max(0.0, deadline - time.monotonic())
            await asyncio.wait({rpc}, timeout=min(self._timing.board_after_s, left_s / 2))
        wrote = await self._write_board(write)
        if not wrote and rpc is None:
            raise self._no_way()
        try:
            lines = await self._wait_for_proof(command, rpc, deadline, patience)
        finally:
            pending = rpc is not None and not rpc.done()
            if rpc is not None and pending:
                rpc.cancel()
        result = rpc.result() if rpc is not None and not pending else None
        reached = wrote or pending or (result is not None and result.sent)
        return Attempt(lines, result, pending, reached)

    async def _call(self, command: Command, limit: float) -> CallResult:
        async with self._channel:
            left_s = max(0.01, limit - time.monotonic())
            result = await self.engines.call(command, left_s, self._processes())
        self._remember(result.replies)
        return result

    async def _wait_for_proof(
        self,
        command: Command,
        rpc: asyncio.Task[CallResult] | None,
        deadline: float,
        patience: float | None,
    ) -> tuple[Line, ...]:
        quiet_since: float | None = None
        poll_s = self._timing.proof_poll_s
        while True:
            await self.sight.look()
            replies = rpc.result().replies if rpc is not None and rpc.done() else ()
            pending = rpc is not None and not rpc.done()
            lines = tuple(judge_lines(command, self.roster().rows, replies, pending))
            now = time.monotonic()
            if lines and all(line.ok for line in lines):
                return lines
            if not pending:
                quiet_since = now if quiet_since is None else quiet_since
                # What only a page could still tell may take a moment; without pages nothing will come.
                grace_s = self._timing.unseen_grace_s if self._run_dir is not None else 0.0
                if now - quiet_since >= grace_s and all(line.final for line in lines):
                    return lines
            limit = deadline
            if pending and patience is not None and now >= deadline:
                self._goes_on.set()
                limit = patience
            if now >= limit:
                return lines
            wait_s = min(poll_s, limit - now)
            poll_s = min(poll_s * 1.2, 5 * self._timing.proof_poll_s)
            if pending:
                assert rpc is not None
                await asyncio.wait({rpc}, timeout=wait_s)
            else:
                await asyncio.sleep(wait_s)

    async def _write_board(self, write: Callable[[Board], Board]) -> bool:
        """Replace the board by what `write` makes of it; False where there is none, or it cannot be written.

        One after the other, each from what the one before left: the end of a lease must not undo a change.
        """
        if self._run_dir is None:
            return False
        async with self._board_lock:
            board = write(self._board)
            if board == self._board:
                return True
            try:
                await asyncio.to_thread(write_board, self._run_dir, board)
            except OSError as error:
                self._board_fault = Reason(
                    "board_not_written",
                    f"the board in {self._run_dir} cannot be written: {error.strerror or error}",
                    KINDS["board_not_written"].remedy,
                )
                return False
            self._board = board
            self._board_fault = None
            return True

    # --- telling ---

    def _no_way(self) -> Problem:
        """Why a command can be sent over neither RPC nor board."""
        if self._board_fault is not None:
            return Problem("board_not_written", self._board_fault.detail)
        reasons = self.engines.reasons()
        desync = next((reason for reason in reasons if reason.code == "rpc_desync"), None)
        if desync is not None:
            return Problem(desync.code, desync.detail, desync.remedy)
        detail = "; ".join(reason.detail for reason in reasons) or self._why_nobody().detail
        return Problem("engine_not_seen", detail)

    def _problem(self, attempt: Attempt, extra: Mapping[str, object]) -> Problem:
        """The error that says best why it is not complete."""
        missing = [line for line in attempt.lines if not line.ok]
        own = next((line for line in missing if line.own_code), None)
        faults = attempt.result.faults if attempt.result is not None else ()
        fault = next((f for f in faults if f.code == "rpc_desync"), next(iter(faults), None))
        nameless = [
            reply.outcome
            for reply in (attempt.result.replies if attempt.result is not None else ())
            if reply.report is None and not reply.outcome.ok
        ]
        details = [f"{line.key}: {line.detail or line.code}" for line in missing]
        details += [f.detail for f in faults]
        details += [str(outcome.detail or outcome.code) for outcome in nameless]
        detail = f"{attempt.done} of {len(attempt.lines)} processes did it; " + "; ".join(details)
        remedy = None
        if own is not None and own.code is not None and own.code not in KINDS:
            code = own.code
        elif attempt.rpc_pending and any(not line.final for line in missing):
            code = "outcome_unknown"
        elif fault is not None and (self._run_dir is None or not attempt.lines):
            code, remedy = fault.code, fault.remedy
            if code == "engine_timeout":
                code = "outcome_unknown"
        else:
            code = "incomplete_coverage" if attempt.lines else "engine_not_seen"
            if not attempt.lines:
                details = details or [self._why_nobody().detail]
                detail = f"nobody is there to do it: {'; '.join(details)}"
        return Problem(code, detail[:4000], remedy, extra)

    def _update(self, change: Change, **changes: object) -> Operation:
        return self.ledger.update(change.operation_id, **changes)

    def _log(self, operation: Operation) -> None:
        """One line for each operation."""
        change = operation.change
        fields = {
            "event": "operation",
            "id": operation.id,
            "kind": change.kind,
            "state": operation.state,
            "generation": operation.generation,
            "owner": change.owner,
            "force": change.force,
            "duration_s": round(operation.duration_s or 0.0, 6),
            "coverage": f"{sum(line.ok for line in operation.lines)}/{len(operation.lines)}",
            "transport": operation.transport,
            "rolled_back": operation.rolled_back,
            "code": operation.problem.code if operation.problem else None,
        }
        logger.info("operation", extra={"fields": fields})

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that is held on to: asyncio itself keeps weak references only."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _without_maintain(board: Board) -> Board:
    return replace(board, maintain=None)


def _without_policy(board: Board, generation: int) -> Board:
    """`board` without the policy of `generation`, unless another has taken its place."""
    if board.policy is None or board.policy.generation != generation:
        return board
    return replace(board, policy=None, lease=None)


def _failed_state(attempt: Attempt) -> str:
    """`unknown` where something may still happen, else `failed`."""
    unsure = attempt.rpc_pending or any(not line.ok and not line.final for line in attempt.lines)
    timed_out = attempt.result is not None and any(
        fault.code in ("engine_timeout", "engine_hung_up", "rpc_desync")
        for fault in attempt.result.faults
    )
    return "unknown" if unsure or (timed_out and not attempt.is_complete) else "failed"


def new_id(purpose: str) -> str:
    """An operation id of our own."""
    return f"{purpose}-{uuid.uuid4().hex[:12]}"


_RUNNERS = {
    **dict.fromkeys(POLICY_KINDS, Coordinator._run_policy),
    "maintain": Coordinator._run_maintain,
    "lease": Coordinator._run_lease,
}
