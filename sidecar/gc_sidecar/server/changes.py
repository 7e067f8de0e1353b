"""The changes that can be asked for, each a function: a policy, a maintenance, the renewal of a lease.

A policy is for all processes or none: where it is not complete, what was before is brought back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from gc_sidecar.server.attempt import Attempt, problem_of
from gc_sidecar.server.carrier import Carrier, Overtime
from gc_sidecar.server.desired import MODE_OF_KIND, Desired, next_sequence
from gc_sidecar.server.engine_http import EngineFault
from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.operations import Change, Ledger, Operation, new_id
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.tasks import spawn
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.watch import Watch, without_maintain
from gc_sidecar_agent.board import Board
from gc_sidecar_agent.command import (
    DEFAULT_DEADLINE_S,
    MAXIMUM_DEADLINE_S,
    POLICY_KINDS,
    Command,
)

# In units of the pause that is expected: how long the caller of a maintenance waits for its answer, and how long
# it may go on.
DEADLINE_IN_PAUSES, LIMIT_IN_PAUSES = 2, 10


@dataclass(frozen=True)
class Means:
    """What a change is made with."""

    knowledge: Knowledge
    watch: Watch
    carrier: Carrier
    timing: Timing
    # The longest pause that a maintenance may be expected to make; None is no limit.
    max_maintain_pause_s: float | None


@dataclass(frozen=True)
class Running:
    """A change under way. `goes_on` is set when it outlasts its deadline, so that its caller is told so."""

    change: Change
    ledger: Ledger
    started: float = field(default_factory=time.monotonic)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def deadline(self) -> float:
        """When its caller wants an answer."""
        return self.started + self.change.deadline_s

    def record(self, **fields: object) -> Operation:
        """Replace fields of its operation."""
        return self.ledger.update(self.change.operation_id, **fields)


@dataclass(frozen=True)
class Told:
    """What a failure adds to its detail, about what was done instead; and its remedy, where it has one."""

    done: str = ""
    remedy: str | None = None


_SEE_AND_RESTORE = "GET /gc shows how each process stands; POST /gc/restore is safe at any time"
_RESTORE_STAYS_WANTED = Told(
    "normal GC stays wanted: whoever has not shown it finds that on the board",
    "GET /gc shows who has it by now; POST /gc/restore is safe at any time",
)


async def run(means: Means, running: Running) -> None:
    """Make the change and record what came of it. Raises Problem where nothing was done."""
    await _prepare(means, running.change)
    await _RUNNERS[running.change.kind](means, running)


# --- policies ---


async def _run_policy(means: Means, running: Running) -> None:
    change, knowledge, timing = running.change, means.knowledge, means.timing
    previous = knowledge.desired
    wanted = _wanted(knowledge, change)
    if not wanted.is_on and _stands_for_nobody(knowledge):
        wanted = previous
    if wanted.is_on and wanted.is_same_policy(previous) and knowledge.roster().is_covered:
        renewal = await _renew(means, running)
        if not any(line.code == "not_in_policy" for line in renewal.missing):
            _finish(means, running, renewal)
            return
        # A process had left the policy, and nothing had shown it: enter it anew.
        previous = knowledge.desired
        wanted = _wanted(knowledge, change)
    knowledge.desired = wanted
    running.record(generation=wanted.generation)
    command = wanted.command(change.operation_id, change.deadline_s, change.collect_first)
    reserve_s = 0.0
    if wanted.is_on:
        reserve_s = min(timing.rollback_reserve_s, change.deadline_s * timing.rollback_share)
    try:
        attempt = await means.carrier.carry(
            command,
            lambda board: (
                board if wanted is previous else Board(policy=command, lease=wanted.lease())
            ),
            running.deadline - reserve_s,
        )
    except Problem:
        knowledge.desired = previous
        raise
    if _is_enough(change, attempt):
        if wanted.is_on and knowledge.desired == wanted:
            knowledge.desired = replace(wanted, entered_at=time.time(), entered_s=time.monotonic())
        _finish(means, running, attempt)
        return
    rolled_back: bool | str | None = None
    told = _RESTORE_STAYS_WANTED if knowledge.run_dir.path is not None else Told()
    if wanted.is_on:
        rolled_back = await _roll_back(means, previous, attempt, running.deadline)
    state = attempt.failed_state
    if rolled_back is True and attempt.reached_somebody:
        state = "rolled_back"
    elif rolled_back == "unknown":
        state = "unknown"
    extra = {}
    if rolled_back is not None:
        extra = {"rolled_back": rolled_back}
        told = _told_of_rollback(rolled_back, attempt, knowledge.run_dir.path is not None)
    running.record(
        state=state,
        lines=attempt.lines,
        rolled_back=rolled_back,
        problem=_problem(means, attempt, told, extra),
    )


def _stands_for_nobody(knowledge: Knowledge) -> bool:
    """Whether a restore stands on the board already, and nobody is there who could follow another one."""
    policy = knowledge.run_dir.board.policy
    return (
        not knowledge.desired.is_on
        and policy is not None
        and (policy.kind, policy.generation) == ("restore", knowledge.desired.generation)
        and not knowledge.engines.has_rpc
        and not knowledge.roster().reports
    )


def _wanted(knowledge: Knowledge, change: Change) -> Desired:
    generation = knowledge.next_generation()
    lease_sequence = knowledge.desired.lease_sequence
    if change.kind == "restore":
        return Desired(generation=generation, lease_sequence=lease_sequence)
    wanted = Desired(
        mode=MODE_OF_KIND[change.kind],
        generation=generation,
        owner=change.owner,
        interval_s=change.interval_s,
        pause_budget_ms=change.pause_budget_ms,
        max_rss_growth_bytes=change.max_rss_growth_bytes,
        lease_sequence=lease_sequence,
    )
    before = knowledge.desired
    if before.is_on and wanted.is_same_policy(before):
        wanted = replace(wanted, lease_s=before.lease_s)
    return wanted.with_lease(change.lease_s)


async def _roll_back(
    means: Means, previous: Desired, attempt: Attempt, deadline: float
) -> bool | str:
    """Bring back what was before, in every process, under a further generation."""
    knowledge = means.knowledge
    if not attempt.reached_somebody:
        knowledge.desired = previous
        return True
    generation = knowledge.next_generation()
    if previous.is_on and previous.lease_remaining_s() != 0.0:
        back = replace(previous, generation=generation)
    else:
        back = Desired(
            generation=generation, lease_sequence=previous.lease_sequence, reason=previous.reason
        )
    knowledge.desired = back
    left_s = max(means.timing.rollback_least_s, deadline - time.monotonic())
    command = back.command(new_id("rollback"), left_s, collect_first=False)
    # An RPC that did not return in time may block the next one as well.
    use_rpc = knowledge.run_dir.path is None or not attempt.rpc_pending
    try:
        undone = await means.carrier.carry(
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


def _told_of_rollback(rolled_back: bool | str, attempt: Attempt, has_run_dir: bool) -> Told:
    """What was done about a policy that is not complete."""
    if rolled_back is True:
        again = "try again with a longer deadline_s, or with allow_partial=true for what can be had"
        return Told(
            "what had been changed was rolled back"
            if attempt.reached_somebody
            else "nothing had been sent, so nothing was changed",
            f"nothing is left to be undone; {again}" if attempt.timed_out else None,
        )
    if rolled_back is False:
        return Told("NOT every process could be rolled back", _SEE_AND_RESTORE)
    if has_run_dir:
        return Told(
            "it is being rolled back, which not every process has shown yet", _SEE_AND_RESTORE
        )
    return Told("whether every process was rolled back is not known", _SEE_AND_RESTORE)


# --- maintenance ---


def maintain_deadline_s(knowledge: Knowledge) -> float:
    """How long the answer to a maintenance may take where its caller does not say: long enough for one like the
    last."""
    expected = knowledge.expected_pause()
    patience_s = DEADLINE_IN_PAUSES * expected.pause_s if expected is not None else 0.0
    return min(max(DEFAULT_DEADLINE_S, patience_s), MAXIMUM_DEADLINE_S)


async def _run_maintain(means: Means, running: Running) -> None:
    change, knowledge, timing = running.change, means.knowledge, means.timing
    deadline = running.deadline
    _refuse_long_pause(means, change)
    running.record(generation=knowledge.desired.generation)
    if change.when == "idle":
        await _wait_until_idle(means, deadline)
        # The waiting may have used it up; what follows goes on then.
        left_s = deadline - time.monotonic()
        asyncio.get_running_loop().call_later(left_s, running.goes_on.set)
        deadline = max(deadline, time.monotonic() + timing.rollback_reserve_s)
    command = Command(
        kind="maintain",
        operation_id=change.operation_id,
        generation=knowledge.desired.generation,
        owner=change.owner,
        trim=change.trim,
        deadline_s=change.deadline_s,
    )
    expected = knowledge.expected_pause()
    longest_s = max(
        timing.background_limit_s,
        change.deadline_s,
        LIMIT_IN_PAUSES * expected.pause_s if expected is not None else 0.0,
    )
    begin_until = time.time() + max(timing.maintain_begin_s, deadline - time.monotonic())
    try:
        attempt = await means.carrier.carry(
            command,
            lambda board: replace(board, maintain=command, maintain_until=begin_until),
            deadline,
            Overtime(time.monotonic() + longest_s, running.goes_on.set),
        )
    finally:
        await knowledge.run_dir.write_board(without_maintain)
    _finish(means, running, attempt)


def _refuse_long_pause(means: Means, change: Change) -> None:
    """Refuse a maintenance that may outlast whatever watches the engine, its health probe say."""
    limit_s, expected = means.max_maintain_pause_s, means.knowledge.expected_pause()
    if limit_s is None or expected is None or change.force:
        return
    if expected.pause_s > limit_s:
        raise Problem(
            "pause_too_long",
            f"{expected.key} is expected to stand still for {expected.pause_s:.1f} s, by its last maintenance"
            f" and by its growth since; the limit is {limit_s:g} s (--max-maintain-pause-s); nothing was changed",
            extra={
                "expected_pause_s": round(expected.pause_s, 3),
                "max_maintain_pause_s": limit_s,
            },
        )


async def _wait_until_idle(means: Means, deadline: float) -> None:
    while True:
        try:
            busy = await means.knowledge.engines.busy_requests()
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
        await asyncio.sleep(min(means.timing.idle_poll_s, left_s))


# --- leases ---


async def _run_lease(means: Means, running: Running) -> None:
    if not means.knowledge.desired.is_on:
        raise Problem("no_policy", "the policy ended before its lease was renewed")
    attempt = await _renew(means, running)
    told = "the lease of the others was renewed" if attempt.done else "the lease stays as it was"
    _finish(means, running, attempt, Told(told))


async def _renew(means: Means, running: Running) -> Attempt:
    """Renew the lease of the policy in force; where nobody did, it ends when it would have ended."""
    change, knowledge = running.change, means.knowledge
    previous = knowledge.desired
    desired = knowledge.desired = previous.with_lease(change.lease_s)
    running.record(generation=desired.generation)
    command = replace(desired.command(change.operation_id, change.deadline_s), kind="lease")

    def write(board: Board) -> Board:
        policy = board.policy
        if policy is None or policy.generation != desired.generation:
            policy = desired.command(new_id("policy"), change.deadline_s)
        return replace(board, policy=policy, lease=desired.lease())

    pages_tell_all = knowledge.run_dir.path is not None and all(
        row.page is not None for row in knowledge.roster().rows if row.is_live
    )
    try:
        attempt = await means.carrier.carry(
            command, write, running.deadline, use_rpc=not pages_tell_all
        )
    except Problem:
        knowledge.desired = previous
        raise
    if not attempt.done and knowledge.desired == desired:
        await _take_back_lease(knowledge, previous)
    return attempt


async def _take_back_lease(knowledge: Knowledge, previous: Desired) -> None:
    """The lease as it was, also for whoever reads of the renewal on the board only now."""
    sequence = next_sequence(knowledge.desired.lease_sequence)
    back = knowledge.desired = replace(previous, lease_sequence=sequence)
    await knowledge.run_dir.write_board(
        lambda board: (
            replace(board, lease=back.lease())
            if board.policy is not None and board.policy.generation == back.generation
            else board
        )
    )


# --- what they have in common ---


async def _prepare(means: Means, change: Change) -> None:
    """Find out how to reach the engine, and refuse where there is nobody to reach."""
    knowledge = means.knowledge
    if not knowledge.engines.has_rpc:
        # It was refused when it was last asked, but somebody waits now.
        patience_s = min(means.timing.board_after_s, change.deadline_s / 2)
        asking = spawn(means.watch.ask_engines(eagerly=True))
        await asyncio.wait({asking}, timeout=patience_s)
    roster = await means.watch.look(0.0)
    if roster.reports or knowledge.engines.has_rpc:
        return
    if change.kind == "restore" and knowledge.run_dir.path is not None:
        return  # the board tells every process that starts
    obstacles = knowledge.obstacles(roster)
    raise Problem(
        "engine_not_seen",
        "; ".join(obstacle.detail for obstacle in obstacles),
        remedy=next((obstacle.remedy for obstacle in obstacles if obstacle.remedy), None),
    )


def _is_enough(change: Change, attempt: Attempt) -> bool:
    return attempt.is_complete or (change.allow_partial and attempt.done > 0)


def _finish(means: Means, running: Running, attempt: Attempt, told: Told | None = None) -> None:
    """Record what came of it, where nothing has to be undone. `told` is for a failure."""
    if _is_enough(running.change, attempt):
        state = "applied" if attempt.is_complete else "partial"
        running.record(state=state, lines=attempt.lines)
        return
    problem = _problem(means, attempt, told or Told())
    running.record(state=attempt.failed_state, lines=attempt.lines, problem=problem)


def _problem(
    means: Means, attempt: Attempt, told: Told, extra: Mapping[str, object] | None = None
) -> Problem:
    knowledge = means.knowledge
    has_run_dir = knowledge.run_dir.path is not None
    problem = problem_of(attempt, knowledge.why_nobody(), has_run_dir, extra or {})
    return replace(
        problem,
        detail=f"{problem.detail}; {told.done}" if told.done else problem.detail,
        remedy=told.remedy or problem.remedy,
    )


_RUNNERS: Mapping[str, Callable[[Means, Running], Awaitable[None]]] = {
    **dict.fromkeys(POLICY_KINDS, _run_policy),
    "maintain": _run_maintain,
    "lease": _run_lease,
}
